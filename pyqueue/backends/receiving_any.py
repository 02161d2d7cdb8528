"""Receive from several queues and consumer groups, in a strict order.

In a *round*, the caller receives from each source in turn, without waiting, until it has enough. A
round is one batch. If its caller is cancelled, the batch goes on, and its messages are given back.
Between two rounds, the caller waits in all sources at once. In doing so, it may use up a wake-up
that only one consumer of a source gets. The next round then wakes the next consumer, or else the
caller does so when it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from pyqueue import arguments
from pyqueue.backends.forms import each_part
from pyqueue.backends.receiving import Waiting
from pyqueue.hooks import Tell
from pyqueue.messages import Reservation
from pyqueue.requests import Coalesce, Listen, MonotonicTime, Plan, Wait
from pyqueue.waiting_any import WaitForAny


class Source(NamedTuple):
    """A queue or a consumer group from which messages are received."""

    name: str
    #: Its consumers that wait in this client.
    waiting: Waiting
    #: Receives up to a number of messages, without waiting.
    receive: Callable[[int], Plan[list[Reservation[Any]]]]
    #: Gives back messages that no caller got.
    give_back: Callable[[Sequence[Reservation[Any]]], Plan[None]]
    #: Returns when the next round begins if no event arrives.
    wake_time: Callable[[], Plan[datetime]]


#: A source, and the messages that a round found there.
Found = tuple[Source, list[Reservation[Any]]]


def receive(
    sources: Sequence[Source], limit: int, timeout: float | timedelta | None
) -> Plan[list[Reservation[Any]]]:
    """Receive up to ``limit`` messages; wait up to ``timeout`` for the first one.

    Messages of the first source come before messages of the second source, and so on.
    """
    arguments.count("limit", limit)
    timeout_s = None if timeout is None else arguments.duration("timeout", timeout)
    began = yield from MonotonicTime()
    deadline = None if timeout_s is None else began + timeout_s
    #: The sources in which this consumer may have used up another consumer's wake-up.
    owing: list[Source] = []
    try:
        while True:
            found: list[Found] = yield Coalesce(
                object(),  # no other call shares its batch
                limit,
                lambda limits: _round(sources, limits[0], owing),
                undo=_give_back,
            )
            if found:
                return (yield from _tell(found, began))
            if deadline is not None and (yield from MonotonicTime()) >= deadline:
                return []
            if not (yield from _listen(sources)):
                yield from _wait(sources, deadline, owing)
    finally:
        for source in owing:
            source.waiting.wake_next(False)


def _round(sources: Sequence[Source], limit: int, owing: list[Source]) -> Plan[list[list[Found]]]:
    """Receive from each source in turn, until there are enough messages.

    An error is raised only if nothing was found before it. Otherwise, it ends the round.
    """
    found: list[Found] = []
    for source in sources:
        if source in owing:
            owing.remove(source)  # receiving passes the wake on
        try:
            messages = yield from source.receive(limit)
        except Exception:
            if not found:
                raise
            break
        if messages:
            found.append((source, messages))
            limit -= len(messages)
        if not limit:
            break
    return [found]


def _tell(found: Sequence[Found], began: float) -> Plan[list[Reservation[Any]]]:
    """Report received messages to hooks. Return the messages. ``began``: when the call began."""
    waited = (yield from MonotonicTime()) - began
    for source, messages in found:
        yield from Tell("received", source.name, messages, waited=waited)
    return [message for _, messages in found for message in messages]


def _give_back(found: Sequence[Found]) -> Plan[None]:
    """Give back all messages that a cancelled caller did not get."""
    yield from each_part(*((source.give_back(some), some) for source, some in found))


def _listen(sources: Sequence[Source]) -> Plan[bool]:
    """Subscribe to the events of all sources. Return whether a round must come before the wait."""
    new = False
    for source in sources:
        new |= yield from Listen(source.waiting)
    return new


def _wait(sources: Sequence[Source], deadline: float | None, owing: list[Source]) -> Plan[None]:
    """Wait for the next round. Set ``owing`` to the sources, whose wake-ups this may use up."""
    woken = False
    while not woken:
        waits: list[Wait] = []
        for source in sources:
            until = yield from source.wake_time()
            waits.append(Wait(source.waiting, until, deadline))
        owing[:] = sources
        woken = yield from WaitForAny(waits)
