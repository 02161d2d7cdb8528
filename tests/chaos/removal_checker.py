"""The check of purges and removes: each must count the messages that it removed.

So the removed, the received and the remaining messages add up to the pushed messages. A call
beside a fault of the servers, or beside another call whose outcome is unknown, proves nothing. A
message that a consumer asked to commit may have gone by the commit or by the purge.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

#: The precision of the times in the change log.
_CLOCK_ERROR_S = 0.1


class Removal(NamedTuple):
    """A call that removes messages, from a ledger. ``until``: its commands may arrive until then.

    ``counted`` is None if its outcome is unknown.
    """

    began: float
    until: float
    counted: int | None


def miscounted(
    removals: Sequence[Removal],
    sure: Iterable[float],
    perhaps: Iterable[float],
    broken: Iterable[tuple[float, float]],
) -> list[str]:
    """Return the calls that counted other messages than they removed or changed, in words.

    Args:
        removals: The calls.
        sure: When each message was deleted that no consumer asked to commit.
        perhaps: When each other message was deleted.
        broken: When faults of the servers or the network began and ended.
    """
    unclear = [*broken, *((each.began, each.until) for each in removals if each.counted is None)]
    sure, perhaps = list(sure), list(perhaps)
    found = []
    for each in removals:
        begin, end = each.began - _CLOCK_ERROR_S, each.until + _CLOCK_ERROR_S
        if each.counted is None or any(a <= end and begin <= b for a, b in unclear):
            continue
        least = sum(begin <= at <= end for at in sure)
        most = least + sum(begin <= at <= end for at in perhaps)
        if not least <= each.counted <= most:
            found.append(
                f"a call from {each.began:.2f} to {each.until:.2f} counted {each.counted} "
                f"messages, and changed {least} to {most}"
            )
    return found
