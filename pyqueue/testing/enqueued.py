"""Assertions about the messages of a queue or a stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from pyqueue.backends.contents import contents_of
from pyqueue.backends.invalid import decode
from pyqueue.backends.kind import lookup
from pyqueue.backends.namespace import HOT
from pyqueue.backends.naming_kind import GUESSED_KIND
from pyqueue.backends.scan import SCAN_ORDER
from pyqueue.backends.streams.plans import StreamPlans
from pyqueue.backends.taking_kind import asking_for_kind
from pyqueue.backends.transitions import live
from pyqueue.errors import ConfigurationError
from pyqueue.messages import Message
from pyqueue.payloads import Codec
from pyqueue.pipeline.blocking import AnyClient, connection_of
from pyqueue.requests import Find, Plan, ServerTime

#: Conditions on a message: values keyed by path ("payload.order", "headers.tenant", "key"), or a
#: function that returns whether a message matches.
Where = Mapping[str, object] | Callable[[Message[Any]], object]

#: The parts of a message that a path may begin with.
_PARTS: Final = ("payload", "headers", "key", "priority", "group", "tries", "state")
#: How many messages the text of a failed assertion shows.
_SHOWN: Final = 5
#: How many messages of a stream are read at once.
_PAGE: Final = 1000
_MISSING: Final = object()


def assert_enqueued(client: AnyClient, queue: str, *, where: Where | None = None) -> Any:
    """Check that a queue has a matching message that is ready, scheduled or reserved.

    This includes messages in the packs of a bucket, and the messages of a stream.

    Args:
        client: A Client or an AsyncClient. With an AsyncClient, await the result.
        queue: The name of a queue or a stream.
        where: The values that a message must have, keyed by path, such as
            ``{"payload.order": 7}``, or a function that takes a Message. The stored payload is
            compared.

    Returns:
        The matching messages, in the order of the queue.

    Raises:
        AssertionError: No message matches. The text shows the messages of the queue.
        ConfigurationError: A path is not allowed.
    """
    return connection_of(client).run(_enqueued(queue, where))


def refute_enqueued(client: AnyClient, queue: str, *, where: Where | None = None) -> Any:
    """Check that a queue has no matching message. It takes the arguments of ``assert_enqueued``.

    Raises:
        AssertionError: A message matches.
        ConfigurationError: A path is not allowed.
    """
    return connection_of(client).run(_not_enqueued(queue, where))


def _enqueued(queue: str, where: Where | None) -> Plan[list[Message[Any]]]:
    matches = matcher(where)
    messages = yield from _messages(queue)
    found = [each for each in messages if matches(each)]
    if not found:
        raise AssertionError(
            f"queue {queue!r}: expected a message{_wanted(where)}; {_listed(messages)}"
        )
    return found


def _not_enqueued(queue: str, where: Where | None) -> Plan[None]:
    matches = matcher(where)
    messages = yield from _messages(queue)
    found = [each for each in messages if matches(each)]
    if found:
        raise AssertionError(
            f"queue {queue!r}: expected no message{_wanted(where)}; {_listed(found)}"
        )


def _wanted(where: Where | None) -> str:
    if where is None:
        return ""
    return f" where {dict(where)!r}" if isinstance(where, Mapping) else f" where {where!r}"


def _listed(messages: list[Message[Any]]) -> str:
    shown = ", ".join(f"{each.payload!r} ({each.state})" for each in messages[:_SHOWN])
    more = f" and {len(messages) - _SHOWN} more" if len(messages) > _SHOWN else ""
    return f"there are {len(messages)}: {shown}{more}" if messages else "there are none"


def matcher(where: Where | None) -> Callable[[Message[Any]], object]:
    """Return the function that decides whether a message matches.

    Raises:
        ConfigurationError: A path is not allowed.
    """
    if where is None:
        return lambda message: True
    if not isinstance(where, Mapping):
        return where
    for path in where:
        if not isinstance(path, str) or path.partition(".")[0] not in _PARTS:
            raise ConfigurationError(
                f"where: {path!r} is not allowed; begin the path with one of {', '.join(_PARTS)}, "
                'as in "payload.order"'
            )
    return lambda message: all(_value_at(message, path) == where[path] for path in where)


def _value_at(message: Message[Any], path: str) -> object:
    part, *names = path.split(".")
    found = getattr(message, part)
    for name in names:
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            found = found.get(name, _MISSING) if isinstance(found, Mapping) else _MISSING
    return found


def _messages(queue: str) -> Plan[list[Message[Any]]]:
    """Return the live messages of a queue, or all messages of a stream."""
    kind = yield from asking_for_kind(queue)
    if kind == "stream":
        return (yield from _of_stream(queue))
    contents = contents_of(lookup(kind or GUESSED_KIND))
    now = yield from ServerTime()
    documents = yield from Find(live(queue, None), sort=SCAN_ORDER, hint=HOT)
    found = [each for document in documents for each in contents.messages(document)]
    return [decode(Codec[Any](), each, now) for each in found]


def _of_stream(stream: str) -> Plan[list[Message[Any]]]:
    plans, found = StreamPlans(stream, Codec[Any](), {}), list[Any]()
    while True:
        page = yield from plans.read(found[-1].position if found else None, _PAGE)
        found += page
        if len(page) < _PAGE:
            return found
