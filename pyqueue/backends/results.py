"""The results of finished messages, and how the clients that wait for them hear of an end.

A producer asks for a result when it pushes; see ``Keep``. The process that finishes the message
then keeps it, with its result, and signals the topic of the producer's client. A burial signals it,
too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from pyqueue import arguments
from pyqueue.errors import ConfigurationError, InvalidMessage, LeaseLost
from pyqueue.facts import MAX_KEEP_S, Keep
from pyqueue.messages import Reservation
from pyqueue.payloads import encode
from pyqueue.requests import Plan, ServerTime, Signal

#: The maximum size of a result, in bytes as BSON.
MAX_RESULT_BYTES: Final = 256 * 1024


def length(value: Any) -> float:
    """Return for how many seconds the end of a message is kept."""
    seconds = arguments.duration("result", value, positive=True)
    if seconds > MAX_KEEP_S:
        raise ConfigurationError(
            f"result: expected at most {MAX_KEEP_S:g} s (30 days), found {seconds:g}; use "
            "history= to keep finished messages for longer"
        )
    return seconds


def keeps(wanted: Sequence[Any], uniques: Sequence[Any], topic: str) -> list[Keep | None]:
    """Return how the ends of messages are kept.

    Args:
        wanted: the ``result`` of each message.
        uniques: the ``unique_for`` of each message.
        topic: the topic on which the client that pushes them hears of their ends.
    """
    found: list[Keep | None] = []
    for result, unique in zip(wanted, uniques, strict=True):
        unique_s = None
        if unique is not None:
            unique_s = arguments.duration("unique_for", unique, positive=True)
        if result is not None:
            found.append(Keep(length(result), topic, unique_s))
        else:
            found.append(None if unique_s is None else Keep(None, unique=unique_s))
    return found


def checked(result: Any) -> Any:
    """Return a result that can be stored.

    Raises:
        InvalidMessage: It is not a BSON value, or it is too large.
    """
    size = len(encode({"result": result}).raw)
    if size > MAX_RESULT_BYTES:
        raise InvalidMessage(
            f"result: expected at most {MAX_RESULT_BYTES} bytes, found {size}; store the data "
            "elsewhere, and return where they are"
        )
    return result


def announce(keeps: Iterable[Keep | None], session: object = None) -> Plan[None]:
    """Tell the clients that wait for some messages that these have ended."""
    topics = {keep.topic for keep in keeps if keep is not None and keep.topic is not None}
    if topics:
        now = yield from ServerTime()
        for topic in sorted(topics):
            yield from Signal(topic, now, session)


def announced(
    held: Sequence[Reservation[Any]], plan: Plan[None], session: object = None
) -> Plan[None]:
    """Return a plan that settles messages and then announces their ends."""
    keeps = [each.keep for each in held if each.keep is not None]
    return _announced(keeps, plan, session) if keeps else plan


def _announced(keeps: Sequence[Keep], plan: Plan[None], session: object) -> Plan[None]:
    try:
        yield from plan
    except LeaseLost:  # the rest are settled
        yield from announce(keeps, session)
        raise
    yield from announce(keeps, session)
