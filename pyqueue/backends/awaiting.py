"""Wait until a message has finished, and return it.

Each client waits on a separate topic, which is stored in the messages whose results it asked for.
Every event on the topic wakes all waiting calls of the client, and their reads share a command.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Final, Protocol

from pyqueue import arguments
from pyqueue.backends import finding
from pyqueue.backends.browsing import shown
from pyqueue.backends.transitions import HIDDEN
from pyqueue.errors import JobFailed
from pyqueue.messages import Duration, Finished, Id, Message
from pyqueue.payloads import Codec
from pyqueue.requests import (
    Coalesce,
    Document,
    Filter,
    Listen,
    MonotonicTime,
    Plan,
    ServerTime,
    Wait,
)

#: The seconds between two reads of a message, in case it ends without an event. Only a message that
#: is missing for this long counts as gone, because a handover may hide a message for an instant.
POLL_S: Final = 1.0
_HANDED_OVER: Final[Filter] = MappingProxyType({"q": {"$gte": HIDDEN, "$lt": HIDDEN[:-1] + ";"}})
#: The result of a request is kept for this many seconds longer than its caller waits.
SPARE_S: Final = 60.0
#: The outcomes which mean that the work on a message succeeded.
_SUCCESS: Final = ("committed", "popped")


class Waiting(Protocol):
    """The calls of one client that wait for messages to finish."""

    def wake_all(self) -> None:
        """Wake every call."""
        ...

    def wake_next(self, found: bool) -> None:
        """Wake the next waiting call, after a call has returned."""
        ...


def wait(waiting: Waiting, id: Id, timeout: Duration | None) -> Plan[Finished[Any]]:
    """Wait until a message has finished, and return it; see ``Client.wait``.

    Args:
        waiting: The calls of this client that wait for messages to finish.
        id: The id of the message.
        timeout: How long to wait, or None for no limit.
    """
    spellings = arguments.spellings(id)
    timeout_s = math.inf if timeout is None else arguments.duration("timeout", timeout)
    ends_s = timeout_s + (yield from MonotonicTime())
    seen_s: float | None = None
    try:
        while True:
            found = yield from _read(spellings)
            now_s = yield from MonotonicTime()
            if (ended := _end_of(found)) is not None:
                return ended
            if found is not None or seen_s is None:
                seen_s = now_s  # or when it was first missed
            elif now_s - seen_s >= POLL_S:
                if not (yield from _is_handed_over(spellings)):
                    raise _gone(id)
                seen_s = now_s
            if now_s >= ends_s:
                raise TimeoutError(f"message {id} has not finished within {timeout_s:g} s")
            if (yield from Listen(waiting)):
                continue  # the subscription is new: the message may have ended before it
            now = yield from ServerTime()
            soon = timedelta(seconds=POLL_S)
            yield from Wait(waiting, now + soon, min(ends_s, now_s + POLL_S))
            waiting.wake_all()
    finally:
        waiting.wake_next(False)


def _read(spellings: Sequence[Id]) -> Plan[Message[Any] | None]:
    """Return a message, or None if it is missing. A fail-over cannot undo its end or absence."""
    found = yield from Coalesce(("ends",), spellings, _read_each, threads=True)
    if found is not None and not (found.dead is not None or isinstance(found, Finished)):
        return found
    return (yield from Coalesce(("ends", "majority"), spellings, _reread, threads=True))


def _reread(wanted: Sequence[Sequence[Id]]) -> Plan[list[Message[Any] | None]]:
    """Return the messages as a majority of the replica set has stored them."""
    return (yield from _read_each(wanted, majority=True))


def _read_each(
    wanted: Sequence[Sequence[Id]], majority: bool = False
) -> Plan[list[Message[Any] | None]]:
    """Return each caller's message, given the spellings of its id, or None if it is missing."""
    every = list(dict.fromkeys(id for spellings in wanted for id in spellings))
    now, found = yield from finding.documents(every, finding.IN_QUEUES, majority=majority)
    documents: list[Document | None] = [finding.first_of(each, found) for each in wanted]
    return [None if each is None else shown(Codec(), each, now) for each in documents]


def _is_handed_over(spellings: Sequence[Id]) -> Plan[bool]:
    """Return whether a handover hides the message. If its process died, recovery completes it."""
    _, found = yield from finding.documents(spellings, _HANDED_OVER, majority=True)
    return bool(found)


def _end_of(found: Message[Any] | None) -> Finished[Any] | None:
    """Return a message if it has finished, or None if it is missing or has not finished.

    Raises:
        JobFailed: The message was buried, or has finished without success.
    """
    if found is None:
        return None
    if found.dead is not None:
        error = "" if found.error is None else f": {found.error.type}: {found.error.message}"
        raise JobFailed(
            f"message {found.id} of queue {found.dead.queue!r} was buried "
            f"({found.dead.reason}){error}",
            reason="dead",
            job=found,
        )
    if not isinstance(found, Finished):
        return None
    if found.outcome not in _SUCCESS:
        text = f"message {found.id} of queue {found.queue!r} was {found.outcome}"
        raise JobFailed(text, reason=found.outcome, job=found)
    return found


def _gone(id: Id) -> JobFailed:
    return JobFailed(
        f"message {id} is in no queue, and its result was not kept; push such messages with "
        "result=, and call wait() while the result is kept",
        reason="gone",
    )
