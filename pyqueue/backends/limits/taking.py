"""Claims from a queue with a limit, unless the queue has ordered groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from pyqueue.backends import uses
from pyqueue.backends.claim_terms import ClaimTerms, Scan
from pyqueue.backends.claiming import Take
from pyqueue.backends.limits import rates, slots, waiting
from pyqueue.backends.limits import scan as limit_scan
from pyqueue.backends.limits.pacing import paced
from pyqueue.backends.scan import ScanState
from pyqueue.errors import ConfigurationError
from pyqueue.limits import key_of
from pyqueue.requests import Document, Plan, ServerTime


def follow(
    terms: ClaimTerms, state: ScanState, record: Mapping[str, Any], now: datetime
) -> Plan[None]:
    """Learn the limit of a queue from its record, and note the use of a queue with ``auto_delete``.

    Raises:
        ConfigurationError: This release cannot read the limit, and no earlier limit is known.
    """
    before = state.limit.limit
    try:
        state.limit.follow(terms.queue, record.get("shape"))
    except ConfigurationError:
        state.flag_read = None  # so that the next call reads the record again, and raises, too
        raise
    yield from slots.follow_drain(terms.queue, state.limit, record, now)
    if waiting.defers(before, instead=state.limit.limit):
        # This process may have deferred messages by the former limit since it was changed.
        yield from waiting.lift(terms.queue)
    yield from uses.follow(terms.queue, record.get("shape"))


def take_of(scan: Scan) -> Plan[Take | None]:
    """Return the function that claims within the limit, or None if the queue has no limit.

    If a rescan is due, first correct the start times of deferred messages, and update ``scan.now``.
    """
    state = scan.state
    limit = state.limit.limit  # read once, because another thread may change it
    if limit is None:
        return None
    if state.wants_rescan(scan.now):
        yield from limit_scan.walk(scan.terms.queue, state)
        scan.now = yield from ServerTime()
    # The functions below claim from a page. Messages that are excluded from it are never retried.
    state.transaction_locks.readmit(scan.now)
    if limit.per is not None:
        return limit_scan.take  # it also asks for permits for each key
    within_slots = None if limit.concurrency is None else limit_scan.take
    return within_slots if limit.rate is None else paced(within_slots)


def give_back_permits(scan: Scan, documents: Sequence[Document]) -> Plan[None]:
    """Give back the permits of messages that a scan claimed but does not deliver."""
    followed, now = scan.state.limit, scan.now
    limit = followed.limit
    if limit is None or limit.rate is None or not documents:
        return
    queue, number = scan.terms.queue, Counter(key_of(limit, each) for each in documents)
    for key in number:
        followed.forget(key)
    unused = [
        (key, rates.Granted(permits, now, followed.grants.at.get(key, now)))
        for key, permits in number.items()
    ]
    yield from rates.give_back(queue, limit, unused)
    if limit.per is not None:  # messages of these keys may be deferred for too long
        yield from waiting.restore(queue, followed, list(number))
