"""How a queue without groups is claimed if it has a limit."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from pyqueue.backends.claim_terms import ClaimTerms
from pyqueue.backends.claiming import Take
from pyqueue.backends.limits import scan as limit_scan
from pyqueue.backends.limits import slots, waiting
from pyqueue.backends.limits.pacing import paced
from pyqueue.backends.scan import ScanState
from pyqueue.errors import ConfigurationError
from pyqueue.requests import Plan, ServerTime


def follow(
    terms: ClaimTerms, scan: ScanState, record: Mapping[str, Any], now: datetime
) -> Plan[None]:
    """Learn the limit that the record of a queue has.

    Raises:
        ConfigurationError: this release cannot read it.
    """
    before = scan.limit.limit
    try:
        scan.limit.follow(terms.queue, record.get("shape"))
    except ConfigurationError:
        scan.flag_read = None  # the next call raises it, too
        raise
    yield from slots.follow_drain(terms.queue, scan.limit, record, now)
    if waiting.defers(before, instead=scan.limit.limit):
        # This process may have deferred some since the change.
        yield from waiting.lift(terms.queue)


def take_of(
    terms: ClaimTerms, scan: ScanState, now: datetime
) -> Plan[tuple[datetime, Take | None]]:
    """Prepare a claim.

    Returns:
        The instant at which it begins, and what takes messages as the limit allows; None: there is
        no limit.
    """
    limit = scan.limit.limit  # another thread may read a change
    if limit is None:
        return now, None
    if scan.rescan_at is None or scan.rescan_at <= now:
        yield from limit_scan.walk(terms.queue, scan)
        now = yield from ServerTime()
    if limit.per is not None:
        scan.locked.release(now)
        return now, limit_scan.take
    held = None if limit.concurrency is None else limit_scan.take
    return now, held if limit.rate is None else paced(held)
