"""Claim several messages with a slot each, by one command; see ``slots``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from typing import Final

from pyqueue.backends import invalid
from pyqueue.backends.kind import Kind
from pyqueue.errors import DuplicateKey, InvalidMessage
from pyqueue.requests import Filter, Plan, UpdateDocument, UpdateEach

#: How long one command claims several messages, in seconds. It waits for a message that a
#: transaction holds. Messages are then claimed one by one, which gets past that one.
CLAIM_TIMEOUT_S: Final = 2.0


def claim_slots(
    queue: str,
    kind: Kind,
    dead_letter: str,
    pairs: Sequence[tuple[Filter, UpdateDocument]],
    now: datetime,
    timeout_s: float,
) -> Plan[int]:
    """Claim messages, each by a filter and an update with a slot. Return how many were claimed.

    A message is left alone if it is not free any more, if another one has its slot by now, or if
    the server refuses to claim it.
    """
    matched, failures = yield from UpdateEach(
        pairs, w1=True, max_time_s=min(timeout_s, CLAIM_TIMEOUT_S)
    )
    for each in failures:
        if isinstance(each.error, InvalidMessage):
            one = pairs[each.place][0]
            with suppress(InvalidMessage):  # a claim of this message alone raises it
                yield from invalid.bury_refused(queue, kind, dead_letter, one, each.error, now)
        elif not isinstance(each.error, DuplicateKey):
            raise each.error
    return matched
