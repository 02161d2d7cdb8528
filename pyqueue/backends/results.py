"""The results of finished messages, and how clients and gathers learn that a message has ended.

A producer asks for a result when it pushes; see ``Keep``. The process that finishes the message
then keeps the message with its result, and signals the topic of the producer's client. A burial
signals the topic, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from pyqueue import arguments
from pyqueue.errors import ConfigurationError, InvalidMessage, LeaseLost
from pyqueue.facts import MAX_KEEP_S, Gather, Keep
from pyqueue.gathers import Look
from pyqueue.messages import Reservation
from pyqueue.payloads import encode
from pyqueue.requests import Document, Plan, ServerTime, Signal

#: The maximum size of a result, in bytes as BSON.
MAX_RESULT_BYTES: Final = 256 * 1024


def length(value: Any) -> float:
    """Check the ``result`` of a push. Return for how many seconds the finished message is kept."""
    seconds = arguments.duration("result", value, positive=True, most="30 days")
    if seconds > MAX_KEEP_S:
        raise ConfigurationError(
            f"result: expected at most 30 days, found {seconds / 86_400:g} days; use "
            "history= to keep finished messages for longer"
        )
    return seconds


def keeps(wanted: Sequence[Any], uniques: Sequence[Any], topic: str) -> list[Keep | None]:
    """Return how messages are kept after they have finished.

    Args:
        wanted: The ``result`` of each message.
        uniques: The ``unique_for`` of each message.
        topic: The topic of the signals by which the pushing client learns that messages ended.
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
    """Check that a result can be stored, and return it.

    Raises:
        InvalidMessage: The result is not a BSON value, or is too large.
    """
    size = len(encode({"result": result}).raw)
    if size > MAX_RESULT_BYTES:
        raise InvalidMessage(
            f"result: expected at most {MAX_RESULT_BYTES} bytes, found {size}; store the data "
            "elsewhere, and return its location"
        )
    return result


#: A fact of a message that says who must learn that the message has ended.
EndFact = Keep | Gather | None


def end_facts(document: Document) -> list[EndFact]:
    """Return the facts of a stored message that say who must learn that it has ended."""
    return [Keep.of(document), Gather.of(document.get("gather"))]


def announce(given: Iterable[EndFact], session: object = None) -> Plan[None]:
    """Tell waiting clients that messages have ended, and check the gathers of these messages."""
    every = list(given)
    if topics := _topics(every):
        now = yield from ServerTime()
        for topic in sorted(topics):
            yield from Signal(topic, now, session)
    for id in {each.id for each in every if isinstance(each, Gather)}:
        yield from Look(id, session)


def _topics(given: Iterable[EndFact]) -> set[str]:
    """Return the topics of the clients that wait for these messages to end."""
    return {each.topic for each in given if isinstance(each, Keep) and each.topic is not None}


def announced(
    held: Sequence[Reservation[Any]], plan: Plan[None], session: object = None
) -> Plan[None]:
    """Return a plan that settles messages and then announces their ends."""
    if len(held) == 1 and held[0].keep is None and held[0].gather is None:
        return plan
    given = [fact for each in held for fact in (each.keep, each.gather) if fact is not None]
    return _announced(given, plan, session) if given else plan


def _announced(given: Sequence[EndFact], plan: Plan[None], session: object) -> Plan[None]:
    try:
        yield from plan
    except LeaseLost:  # the rest are settled
        yield from announce(given, session)
        raise
    yield from announce(given, session)
