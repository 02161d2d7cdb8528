"""The queues of the workload: their options, and where their messages go.

Messages are pushed to ``orders``, moved to ``parsed``, moved from there to ``billed`` or
``packed``, and committed. Messages of ``events`` are popped. Messages of ``states`` have keys.
Each message of ``renewed`` is held for long, under a lease that is renewed. Messages of ``urgent``
have priorities, messages of ``turns`` groups. Messages of ``shifts`` have groups too, and many of
them are scheduled at one instant.

``parcels``, ``crates`` and ``brief`` are buckets. Consumers of ``parcels`` move packs on to
``crates``, and messages of both fail alone. They push results to ``results`` under the ids of
messages, and to ``crates`` under ids that are derived from them. ``brief`` is deleted now and then.
Messages of ``jars`` are popped, by callers that are often cancelled. Messages of ``sheaves`` are
moved to ``rows``. Some of ``drafts`` are removed before they are received. Malformed documents are
inserted into ``states``.

Messages of ``loops`` are received by loops. Messages of ``chores`` are cancelled, and changed in
bulk, beside their consumers. Producers wait for the results of ``asks``. A schedule pushes to
``ticks``. One consumer receives from several queues at once.

Each tenant of ``calls`` has a limit, each tenant of ``metered`` a rate, ``paced`` has a rate, and
the limit of ``narrow`` changes; see ``limit_checker``. There are also many queues with few
messages, and with consumers that wait for them, and a stream; see ``stream_load``.
"""

from __future__ import annotations

from typing import Any, Final

from tests.chaos.limit_checker import LIMITS, NARROW_QUEUE
from tests.chaos.names import (
    ASKS,
    BUCKETS,
    CHORES,
    CRATES,
    DELETED_QUEUE,
    LOOPS,
    PACKED_QUEUE,
    PURGED_QUEUE,
    RESULTS,
    ROWS,
    SHEAVES,
    SHIFTS,
    TICKS,
)

POLL_S: Final = 4.0
COMMAND_TIMEOUT_S: Final = 8.0
BATCH: Final = 100
KEYS: Final = 50
LONG_WAIT_S: Final = 5.0
MANY: Final = [f"many-{number:02}" for number in range(100)]
#: The options of each queue. Leases are short, so that some of them lapse.
QUEUES: Final[dict[str, dict[str, Any]]] = {
    "orders": {"lease": 3, "poll": POLL_S},
    "parsed": {"lease": 4, "poll": POLL_S},
    "billed": {"lease": 2, "poll": POLL_S},
    "packed": {"lease": 5, "poll": POLL_S, "history": 86400},
    "events": {"lease": 2, "poll": POLL_S},
    "states": {"lease": 2, "poll": POLL_S},
    "renewed": {"lease": 5, "poll": POLL_S},
    "urgent": {"lease": 3, "poll": POLL_S, "kind": "priority"},
    "turns": {"lease": 3, "poll": POLL_S, "kind": "ordered"},
    SHIFTS: {"lease": 3, "poll": POLL_S, "kind": "ordered"},
    **{name: {"lease": 3, "poll": POLL_S} for name in (RESULTS, ROWS, PURGED_QUEUE, ASKS, TICKS)},
    LOOPS: {"lease": 5, "poll": POLL_S},
    CHORES: {"lease": 3, "poll": POLL_S, "history": 86400},
    **{name: {"lease": 3, "poll": POLL_S, "kind": "bucket"} for name in BUCKETS},
    **{name: {"lease": 3, "poll": POLL_S, "limit": limit} for name, limit in LIMITS.items()},
    # All programs name its first limit, so that no message is ever held without a slot.
    NARROW_QUEUE: {"lease": 5, "poll": POLL_S, "limit": LIMITS[NARROW_QUEUE]},
    **{name: {"lease": 5, "poll": POLL_S} for name in MANY},
}
#: The options of the consumer groups.
OF_GROUPS: Final[dict[str, Any]] = {"lease": 3, "poll": POLL_S}
NEXT: Final = {"orders": ("parsed",), "parsed": ("billed", "packed")}
#: Where messages of a bucket are moved to.
PACKED_NEXT: Final = {
    PACKED_QUEUE: (CRATES, "billed"),
    CRATES: ("billed",),
    DELETED_QUEUE: (CRATES,),
    SHEAVES: (ROWS,),
}


def with_next(queue: str) -> list[str]:
    """Return the queue and all that its messages can be moved to."""
    found = [queue]
    for name in found:
        targets = (*NEXT.get(name, ()), *PACKED_NEXT.get(name, ()))
        found += (each for each in targets if each not in found)
    return found
