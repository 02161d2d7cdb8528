"""Assertions about the messages of a queue or a stream."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, NamedTuple, overload

from pyqueue import arguments
from pyqueue.backends.contents import contents_of
from pyqueue.backends.invalid import decode
from pyqueue.backends.kind import lookup
from pyqueue.backends.matching import conditions
from pyqueue.backends.namespace import HOT
from pyqueue.backends.naming_kind import GUESSED_KIND
from pyqueue.backends.scan import SCAN_ORDER
from pyqueue.backends.streams.plans import StreamPlans
from pyqueue.backends.taking_kind import asking_for_kind
from pyqueue.backends.transitions import live
from pyqueue.messages import Message
from pyqueue.payloads import Codec
from pyqueue.pipeline.blocking import connection_of
from pyqueue.requests import Document, Find, Plan, ServerTime
from pyqueue.runtime.connecting import AsyncConnection, Connected, Connection

#: Conditions on a message: values or conditions of ``pyqueue.where``, keyed by path
#: ("payload.order", "key"), or a function that returns whether a message matches.
Where = Mapping[str, object] | Callable[[Message[Any]], object]
Messages = list[Message[Any]]

#: A path that browse has as an argument.
_STATE: Final = "state"
#: The stored fields that a message of a stream has, too.
_OF_STREAM: Final = ("payload", "headers", "key", "when", "pushed", "tries")
#: How many messages the text of a failed assertion shows.
_SHOWN: Final = 5
#: How many messages of a stream are read at once.
_PAGE: Final = 1000


class _Found(NamedTuple):
    """A message, and the document that conditions are compared with."""

    message: Message[Any]
    document: Document


@overload
def assert_enqueued(
    client: Connected[Connection], queue: str, *, where: Where | None = None
) -> list[Any]: ...  # messages of a queue or of a stream
@overload
def assert_enqueued(
    client: Connected[AsyncConnection], queue: str, *, where: Where | None = None
) -> Coroutine[Any, Any, list[Any]]: ...
def assert_enqueued(client: Any, queue: str, *, where: Where | None = None) -> Any:
    """Check that a queue has a matching message that is ready, scheduled or reserved.

    This includes messages in the packs of a bucket, and the messages of a stream.

    Args:
        client: A Client or an AsyncClient. With an AsyncClient, await the result.
        queue: The name of a queue or a stream.
        where: The values that a message must have, keyed by path, such as ``{"payload.order": 7}``,
            as for ``Queue.browse``; "state" is a path, too. A function that takes a Message, and
            returns whether it matches, is also allowed. None matches every message.

    Returns:
        The matching messages, in the order of the queue.

    Raises:
        AssertionError: No message matches. The text shows the messages of the queue.
        ConfigurationError: ``where`` is not allowed.
        InvalidName: ``queue`` is not the name of a queue.
    """
    return connection_of(client).run(_enqueued(queue, where))


@overload
def refute_enqueued(
    client: Connected[Connection], queue: str, *, where: Where | None = None
) -> None: ...
@overload
def refute_enqueued(
    client: Connected[AsyncConnection], queue: str, *, where: Where | None = None
) -> Coroutine[Any, Any, None]: ...
def refute_enqueued(client: Any, queue: str, *, where: Where | None = None) -> Any:
    """Check that a queue has no matching message. The arguments are as for ``assert_enqueued``.

    Raises:
        AssertionError: A message matches.
        ConfigurationError: ``where`` is not allowed.
        InvalidName: ``queue`` is not the name of a queue.
    """
    return connection_of(client).run(_not_enqueued(queue, where))


def _enqueued(queue: str, where: Where | None) -> Plan[Messages]:
    found, every = yield from _matching(queue, where)
    if not found:
        raise AssertionError(
            f"queue {queue!r}: expected a message{_wanted(where)}; {_listed(every)}"
        )
    return found


def _not_enqueued(queue: str, where: Where | None) -> Plan[None]:
    found, _ = yield from _matching(queue, where)
    if found:
        raise AssertionError(
            f"queue {queue!r}: expected no message{_wanted(where)}; {_listed(found)}"
        )


def _wanted(where: Where | None) -> str:
    if where is None:
        return ""
    return f" where {dict(where)!r}" if isinstance(where, Mapping) else f" where {where!r}"


def _listed(messages: Messages) -> str:
    shown = ", ".join(f"{each.payload!r} ({each.state})" for each in messages[:_SHOWN])
    more = f" and {len(messages) - _SHOWN} more" if len(messages) > _SHOWN else ""
    return f"there are {len(messages)}: {shown}{more}" if messages else "there are none"


def _matching(queue: str, where: Where | None) -> Plan[tuple[Messages, Messages]]:
    """Return the messages that match, and all messages.

    Raises:
        ConfigurationError, InvalidName: An argument is not allowed.
    """
    arguments.queue_name(queue, "queue")
    matches = _matcher(where)
    every = yield from _messages(queue)
    found = [each.message for each in every if matches(each)]
    return found, [each.message for each in every]


def _matcher(where: Where | None) -> Callable[[_Found], object]:
    if callable(where):
        chosen = where
        return lambda found: chosen(found.message)
    wanted = conditions(where, also=(_STATE,))
    return lambda found: wanted.matches({**found.document, _STATE: found.message.state})


def _messages(queue: str) -> Plan[list[_Found]]:
    """Return the live messages of a queue, or all messages of a stream."""
    kind = yield from asking_for_kind(queue)
    if kind == "stream":
        return (yield from _of_stream(queue))
    contents = contents_of(lookup(kind or GUESSED_KIND))
    now = yield from ServerTime()
    documents = yield from Find(live(queue, None), sort=SCAN_ORDER, hint=HOT)
    found = [each for document in documents for each in contents.messages(document)]
    return [_Found(decode(Codec[Any](), each, now), each) for each in found]


def _of_stream(stream: str) -> Plan[list[_Found]]:
    plans, found = StreamPlans(stream, Codec[Any](), {}), list[Any]()
    while True:
        page = yield from plans.read(found[-1].position if found else None, _PAGE)
        found += page
        if len(page) < _PAGE:
            return [_Found(each, _document(each)) for each in found]


def _document(message: Message[Any]) -> Document:
    """Return the fields of a message of a stream, as a message of a queue stores them."""
    return {name: getattr(message, name) for name in _OF_STREAM}
