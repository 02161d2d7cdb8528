"""Uses of queues with ``auto_delete``: such a queue is deleted after a set time without use.

A document for each of these queues notes when it was last used::

    _id      "~used:NAME"
    q, when  "~used", and when a pass next checks whether the queue is unused; see ``unused``
    used     the last use that was noted

A use is a push, a receive, or a consumer that waits. A process notes its first use at once, and
then one use in each quarter of the time, so the last use may be a quarter later than ``used``. The
first note comes before the record of the queue has the option, and each note writes the document
again if it is missing. So a pass finds every queue that has the option.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from pyqueue import arguments
from pyqueue.errors import ConfigurationError
from pyqueue.limits import shown
from pyqueue.requests import Plan, Request, ServerTime, Update, UpdateDocument

#: The shared option: after how many seconds an unused queue is deleted. False: never.
AUTO_DELETE: Final = "auto_delete"
#: The ``q`` of the documents. No queue has this name.
USES: Final = "~used"
#: The beginning of their ids.
_IDS: Final = f"{USES}:"
#: The least value of the option, and the least time between two notes of a process, in seconds.
_LEAST_S: Final = 1.0


@dataclass(slots=True)
class Used(Request[None]):
    """Note in the background that this process uses a queue, unless it did so a short time ago."""

    queue: str
    #: The shared options of the queue, as just read.
    shape: Mapping[str, object]


def length(value: Any) -> float:
    """Check the option ``auto_delete``. Return its value, in seconds.

    Raises:
        ConfigurationError: The value is not allowed.
    """
    length_s = arguments.duration(AUTO_DELETE, value)
    if length_s < _LEAST_S:
        raise ConfigurationError(
            f"{AUTO_DELETE}: {shown(value)} is not allowed; use at least 1 second"
        )
    return length_s


def seconds_of(shape: object) -> float | None:
    """Return after how many unused seconds these shared options delete a queue, or None."""
    if isinstance(shape, Mapping):
        with suppress(ConfigurationError):  # False, or another program wrote it
            return length(shape.get(AUTO_DELETE))
    return None


def interval_s(seconds_s: float) -> float:
    """Return how many seconds a process waits between two notes that it uses a queue."""
    return max(_LEAST_S, seconds_s / 4)


def unused_at(used: datetime, seconds_s: float) -> datetime:
    """Return when a queue's time without use is certainly over, if no other use is noted."""
    return used + timedelta(seconds=seconds_s + interval_s(seconds_s))


def note(queue: str, seconds_s: float) -> Plan[None]:
    """Note that a queue is used now.

    Args:
        queue: The name of the queue.
        seconds_s: Its ``auto_delete``, in seconds.
    """
    now = yield from ServerTime()
    put = {"q": USES, "when": unused_at(now, seconds_s)}
    # A note that arrives late must not undo a later one.
    update: UpdateDocument = {"$max": {"used": now}, "$set": put}
    yield from Update({"_id": _IDS + queue}, update, upsert=True)


def queue_of(stored: Mapping[str, Any]) -> str:
    """Return the name of the queue whose use a document notes."""
    return str(stored["_id"]).removeprefix(_IDS)


def follow(queue: str, shape: object) -> Plan[None]:
    """Note that a consumer uses a queue whose shared options it has just read."""
    if isinstance(shape, Mapping) and AUTO_DELETE in shape:
        yield from Used(queue, shape)
