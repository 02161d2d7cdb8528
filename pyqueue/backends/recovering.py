"""Recovery: finish handovers whose processes died, and delete their abandoned copies.

Consumers of a queue do this from time to time. About once a minute, each client that receives does
it for all queues, since some may have no consumer any more. ``pyqueue doctor`` does so, too. Hidden
documents have their own range of the index. Ended sources come first in that range, so a pass finds
them, whatever the number of copies.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from pyqueue.backends import transitions
from pyqueue.backends.expiring import EXPIRING, end_expired
from pyqueue.backends.handover import GRACE, finish_decided
from pyqueue.backends.hidden import (
    ENDED,
    HANDED,
    MARK,
    is_copy,
    is_open,
    is_source,
    lists,
    open_filter,
    token_of,
)
from pyqueue.backends.kind import ScanStart
from pyqueue.backends.namespace import HOT
from pyqueue.backends.pages import page_end
from pyqueue.backends.scan import FIRST, SCAN_ORDER
from pyqueue.backends.transitions import HIDDEN, hidden_queue
from pyqueue.errors import QueueError
from pyqueue.requests import Delete, Distinct, Document, Find, Plan, ServerTime

log = logging.getLogger("pyqueue")

#: The ``grace`` of a deletion, which must even find decisions of processes whose clock is ahead.
NO_GRACE: Final = -GRACE
#: The mean time between two passes of a client over the handovers of all queues.
SWEEP_INTERVAL: Final = timedelta(seconds=60)
#: The time between two passes of a process over one queue.
INTERVAL: Final = timedelta(seconds=10)
#: Copies that no source lists, and none can list any more, are deleted at this age.
ABANDONED: Final = timedelta(days=1)
#: How many hidden documents a pass reads at once.
PAGE_SIZE: Final = 100
#: What else a pass over all queues does, keyed by the ``q`` of the documents that ask for it.
PASSES: Final[dict[str, Callable[[], Plan[object]]]] = {EXPIRING: end_expired}
#: The ``q`` of schedules, which hand over their messages. No queue has this name.
SCHEDULES: Final = "~cron"


@dataclass(slots=True)
class Sweep:
    """When a client next finishes the handovers of all queues. Its Queue objects share this."""

    at: datetime | None = None

    def is_due(self, now: datetime) -> bool:
        """Return whether a sweep is due. If it is, set a random time for the next sweep."""
        due = self.at is not None and now >= self.at
        # A time that is far ahead comes from a clock that was set back since.
        if due or self.at is None or self.at > now + 2 * SWEEP_INTERVAL:
            self.at = now + SWEEP_INTERVAL * random.uniform(0.5, 1.5)
        return due


@dataclass(slots=True)
class Recovery:
    """When and where this process next recovers handovers of processes that died."""

    sweep: Sweep = field(default_factory=Sweep)
    #: When to scan for such handovers next, and where the last scan ended.
    at: datetime | None = None
    ended: ScanStart | None = None

    def is_due(self, now: datetime) -> bool:
        """Return whether ``recover_next`` has something to do or to plan."""
        scan, sweep = self.at, self.sweep.at
        if scan is None or sweep is None:
            return True
        soon = now < scan <= now + INTERVAL and now < sweep <= now + 2 * SWEEP_INTERVAL
        return not soon


def pending(queue: str) -> Plan[bool]:
    """Return whether finished messages may have outputs that are still hidden."""
    match = {"q": hidden_queue(queue), "when": FIRST}
    return bool((yield from Find(match, {"_id": 1}, limit=1, hint=HOT)))


def recover_next(queue: str, recovery: Recovery, now: datetime) -> Plan[None]:
    """From time to time, finish handovers of dead processes, in this queue and in all queues."""
    if recovery.sweep.is_due(now):
        try:
            yield from recover_all()
        except QueueError as error:
            log.warning("cannot finish handovers of dead processes: %s", error)
    if recovery.at is not None and now >= recovery.at:
        recovery.at = now + INTERVAL
        try:
            recovery.ended, _ = yield from recover(queue, recovery.ended)
        except QueueError as error:  # the next pass tries it again
            log.warning("queue %r: cannot finish handovers of dead processes: %s", queue, error)
    elif recovery.at is None or recovery.at > now + INTERVAL:
        recovery.at = now + INTERVAL


def recover(
    queue: str, start: ScanStart | None = None, grace: timedelta = GRACE
) -> Plan[tuple[ScanStart | None, int]]:
    """Read some hidden documents of a queue. Publish committed copies; delete abandoned copies.

    Args:
        queue: The name of the queue.
        start: Where the last pass ended, or None to begin at the start.
        grace: Handovers that began, or were committed, within this time are left alone.

    Returns:
        Where the next pass starts, or None at the end, and how many sources and copies it handled.
    """
    before = (yield from ServerTime()) - grace
    page = yield from _page(queue, None, before)  # sources that have ended come first
    done = yield from _recover(queue, page, before)
    if len(page) < PAGE_SIZE:
        return None, done
    page = yield from _page(queue, start or page_end(page), before)
    done += yield from _recover(queue, page, before)
    return page_end(page) if len(page) == PAGE_SIZE else None, done


def _page(queue: str, start: ScanStart | None, before: datetime) -> Plan[list[Document]]:
    match = transitions.scan_range(hidden_queue(queue), {"$lt": before}, start)
    fields = dict.fromkeys(("q", "when", "token", HANDED, ENDED, MARK), 1)
    return (
        yield from Find(match, fields, sort=SCAN_ORDER, limit=PAGE_SIZE, hint=HOT, majority=True)
    )


def _recover(queue: str, page: Sequence[Document], before: datetime) -> Plan[int]:
    ended = [each for each in page if ENDED in each and is_source(each)]
    done = yield from _finish([each for each in ended if each[ENDED]["at"] < before])
    done += yield from _delete_open(page, before - ABANDONED)
    copies = [each for each in page if is_copy(each)]
    return done + ((yield from _recover_copies(queue, copies, before)) if copies else 0)


def _delete_open(page: Sequence[Document], old: datetime) -> Plan[int]:
    """Delete old sources that are still open, so that no process can complete their handovers.

    After that, no source can list their copies. Return the number of these sources.
    """
    sources = [each for each in page if is_open(each) and each["when"] < old]
    for each in sources:
        yield from Delete(open_filter(each), majority=True)
    return len(sources)


def _recover_copies(queue: str, copies: Sequence[Document], before: datetime) -> Plan[int]:
    """Publish the copies that a source lists; delete copies that no source can list any more."""
    owners = [each[MARK].get("source") for each in copies]
    fields = dict.fromkeys(("q", "token", HANDED, ENDED), 1)
    found = yield from Find({"_id": {"$in": owners}}, fields, majority=True)
    done = yield from _finish([each for each in found if is_source(each)])
    old = before - ABANDONED
    dead = [each["_id"] for each in copies if each["when"] < old and _is_abandoned(each, found)]
    if dead:
        match = {"_id": {"$in": dead}, "q": hidden_queue(queue), "when": {"$lt": old}}
        yield from Delete(match, many=True, w1=True)
    return done + len(dead)


def _finish(sources: Sequence[Document]) -> Plan[int]:
    """Publish the copies that sources list. Return the number of sources."""
    for each in sources:
        yield from finish_decided(each)
    return len(sources)


def _is_abandoned(copy: Document, sources: Sequence[Document]) -> bool:
    """Return whether no source lists a copy, and no source can list it any more.

    While a source has the token of the copy, its holder may still complete the handover.
    """
    token = token_of(copy)
    return not any(
        each.get("token") == token or (is_source(each) and lists(each, copy)) for each in sources
    )


def recover_queue(queue: str, grace: timedelta = GRACE) -> Plan[int]:
    """Finish all handovers of a queue. Return how many sources and copies were handled."""
    start, done = yield from recover(queue, grace=grace)
    while start is not None:
        start, number = yield from recover(queue, start, grace)
        done += number
    return done


def recover_all() -> Plan[int]:
    """Finish the handovers of all queues, end expired messages, and delete unused queues.

    Returns:
        How many sources and copies were handled.
    """
    done = 0
    for name in (yield from Distinct("q")):
        queue = name.removeprefix(HIDDEN) if isinstance(name, str) else "~"
        # Other names with "~" belong to streams.
        if queue != name and ("~" not in queue or queue == SCHEDULES):
            done += yield from recover_queue(queue)
        elif isinstance(name, str) and name in PASSES:
            yield from PASSES[name]()
    return done
