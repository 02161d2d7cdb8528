"""Ticks: every worker process pushes the due messages of all schedules, without a leader.

The message of a tick enters its queue by a handover. The update that commits the handover matches
the next tick and the revision as they were read, and sets the following tick and a new revision.
So only one of the processes that try pushes the message, and the hidden copies of the other
processes are deleted.

A worker reads the times of the next ticks when a tick is due, when a schedule changes, and
otherwise about once a minute.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence, Set
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from pyqueue.backends.gathering import look_when_due
from pyqueue.backends.handover import finish
from pyqueue.backends.hidden import ENDED, GATHERS
from pyqueue.backends.namespace import HOT
from pyqueue.backends.receiving import Waiting
from pyqueue.backends.recovering import SCHEDULES
from pyqueue.backends.scan import FIRST, SCAN_ORDER
from pyqueue.backends.schedules.definitions import Schedule, read
from pyqueue.backends.schedules.managing import messages_of, push
from pyqueue.backends.schedules.timing import MOMENT
from pyqueue.backends.transitions import new_token
from pyqueue.clock import BAND
from pyqueue.errors import ConfigurationError, InvalidMessage
from pyqueue.messages import NEVER
from pyqueue.requests import Document, Find, Listen, Plan, ServerTime, Update, Wait

log = logging.getLogger("pyqueue")

#: The shortest time between two reads while no tick is due. The longest time is 1.5 times this.
IDLE: Final = timedelta(seconds=60)
#: After a tick is due, a process waits for a random part of this time before it reads. So the
#: processes of a fleet read at different times, and few of them compete.
_SPREAD: Final = timedelta(milliseconds=250)
#: How many schedules one read returns.
_PAGE_SIZE: Final = 100
#: With ``missed="all"``, only this number of the last missed ticks get a message.
_MOST_MISSED: Final = 100
#: The longest error text that a schedule stores, in characters.
_MOST_CHARACTERS: Final = 500


class Due(NamedTuple):
    """The ticks that get a message now, and the next tick of the schedule."""

    ticks: list[datetime]
    following: datetime


def due(schedule: Schedule, now: datetime) -> Due:
    """Return the ticks of a schedule that get a message now. Its stored next tick must be due."""
    tick, timing = schedule.when, schedule.timing
    on_time = now - timedelta(seconds=schedule.spec["grace"])
    if tick >= on_time:
        return Due([tick], timing.after(tick, tick) or NEVER)
    if schedule.spec["missed"] == "once":
        return Due([tick], timing.after(tick, now) or NEVER)
    late = on_time - MOMENT
    following = timing.after(tick, late) or NEVER
    if schedule.spec["missed"] == "skip":
        return Due([], following)
    return Due(timing.last(tick, late, _MOST_MISSED), following)


def find_due(waiting: Waiting, passed: Set[object]) -> Plan[tuple[list[object], datetime | None]]:
    """Find the schedules whose next tick is due, and the gathers that must be checked now.

    Args:
        waiting: The consumers of this client that wait for ticks; see ``await_tick``.
        passed: The ids of schedules to pass over, because they cannot be read.

    Returns:
        The ids of both, and when the next tick or check after now is due, or None if not known.
    """
    yield from Listen(waiting)  # before the read, so that no later change is missed
    now = yield from ServerTime()
    # Other programs may store dates that datetime cannot hold.
    match: Document = {"q": {"$in": [SCHEDULES, GATHERS]}, "when": {"$gte": FIRST, "$lt": BAND}}
    if passed:  # in the query, because there may be more of them than one read returns
        match["_id"] = {"$nin": list(passed)}
    page = yield from Find(match, {"when": 1}, sort=SCAN_ORDER, limit=_PAGE_SIZE, hint=HOT)
    ready = [each["_id"] for each in page if each["when"] <= now]
    return ready, next((each["when"] for each in page if each["when"] > now), None)


def tick_each(waiting: Waiting, ids: Sequence[object]) -> Plan[set[object]]:
    """Push the messages of due ticks, and check gathers. Return the ids of unreadable schedules.

    Raises:
        QueueError: The server did not answer, or refused a command. Then find the due ticks again.
    """
    unreadable: set[object] = set()
    for id in ids:
        for stored in (yield from Find({"_id": id}, limit=1)):
            try:
                if stored.get("q") == GATHERS:
                    yield from look_when_due(stored)
                elif stored.get("q") == SCHEDULES:
                    yield from finish(stored)
                    yield from tick(read(stored))
            except (ConfigurationError, InvalidMessage) as error:
                log.warning("%s: %s", id, error)
                unreadable.add(id)
    yield from waiting.upkeep(SCHEDULES, (yield from ServerTime()))
    return unreadable


def tick(schedule: Schedule) -> Plan[None]:
    """Push the messages of the due ticks of a schedule, unless another process has done so."""
    now = yield from ServerTime()
    if schedule.when > now:
        return
    ticks, following = due(schedule, now)
    put = {"when": following}
    if ticks and not schedule.spec["overlap"] and (yield from _is_live(schedule)):
        log.info(
            "schedule %r: skipped a tick, because the last message is not finished", schedule.name
        )
        yield from _pass(schedule, put, skipped=1)
    elif not ticks:
        yield from _pass(schedule, put)
    else:
        try:
            messages = yield from messages_of(schedule, ticks)
            # If its outcome is unknown, the next read of the schedule shows it. The same messages
            # must not be pushed again: if the first push succeeded, a consumer may have finished
            # them, and then their ids are free.
            yield from push(schedule, messages, put)
        except (ConfigurationError, InvalidMessage) as error:
            log.warning("schedule %r: a tick pushed no message: %s", schedule.name, error)
            yield from _pass(schedule, {**put, "error": str(error)[:_MOST_CHARACTERS]}, skipped=1)


def _is_live(schedule: Schedule) -> Plan[bool]:
    """Return whether the last message of a schedule is neither finished nor buried.

    A message that was replaced by several messages counts as finished.
    """
    last = schedule.stored.get("last")
    gone = {each: {"$exists": False} for each in ("processed", "dead", ENDED)}
    return last is not None and bool((yield from Find({"_id": last, **gone}, {"_id": 1}, limit=1)))


def _pass(schedule: Schedule, put: Document, skipped: int = 0) -> Plan[None]:
    """Skip ticks: set the next tick and push no message, unless the schedule has changed."""
    update = {"$set": {**put, "token": new_token()}, "$inc": {"skipped": skipped}}
    yield from Update(schedule.unchanged, update, majority=True)


def await_tick(waiting: Waiting, when: datetime | None) -> Plan[None]:
    """Wait until a tick is due, a schedule has changed, or it is time to read again.

    Args:
        waiting: The consumers of this client that wait for ticks.
        when: When the next tick is due, or None if that is not known.
    """
    now = yield from ServerTime()
    until = now + random.uniform(1, 1.5) * IDLE
    if when is not None:
        until = min(until, when + random.random() * _SPREAD)
    try:
        yield from Wait(waiting, until, None)
    finally:
        waiting.wake_next(False)
