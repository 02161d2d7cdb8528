"""Names that the workload and the checker share: queues with a part of their own, and ids.

A message keeps its name in the records for life, whatever its id becomes. A message of a pack has
the name "<_id of its first pack>:<place>". Messages that leave a pack may be stored as a part,
"<_id of the first pack>/<token>.<place>-<checksum of all places>". A result is pushed under the id
of another message, so the name of its queue comes first in its name.
"""

from __future__ import annotations

import re
from typing import Any, Final

#: Two buckets in a line, and one that is deleted now and then.
PACKED_QUEUE, CRATES, DELETED_QUEUE = "parcels", "crates", "brief"
#: A bucket whose messages are popped, and one whose messages are moved to ``rows``.
JARS, SHEAVES, ROWS = "jars", "sheaves", "rows"
BUCKETS: Final = (PACKED_QUEUE, CRATES, DELETED_QUEUE, JARS, SHEAVES)
#: The queues whose messages are popped.
POPPED: Final = ("events", JARS)
#: The queue whose messages are removed one by one, or all at once.
PURGED_QUEUE: Final = "drafts"
#: The queue of results.
RESULTS: Final = "results"
#: The queue that is consumed by loops, and the one whose messages operators cancel and change, with
#: its dead letters.
LOOPS: Final = "loops"
CHORES, CHORES_DEAD = "chores", "chores.dead"
#: The queue whose producers wait for results, and the one that a schedule pushes to.
ASKS: Final = "asks"
TICKS: Final = "ticks"
#: The queue, in the ledger, of a call that receives from several queues or settles their messages.
MIXED: Final = "mixed"
#: These queues.
MIXED_QUEUES: Final = ("urgent", "turns", "calls", CRATES, "billed")
#: How the name of a malformed document begins.
MISFIT: Final = "misfit-"
#: The ordered queue with common instants.
SHIFTS: Final = "shifts"
#: An id of a message that is or was in a pack, and the id of a part.
_PACKED: Final = re.compile(r"([0-9a-f]{24})(?::|/[^.]+\.)(\d{1,4})(?:-[0-9a-f]{8})?")


def name_of(id: object) -> str:
    """Return the name of a message in a pack or in no pack, from its id."""
    text = str(id)
    match = _PACKED.fullmatch(text)
    return f"{match[1]}:{int(match[2])}" if match else text


def name_in(queue: str, id: object) -> str:
    """Return the name of a message of a queue."""
    return f"{RESULTS}/{id}" if queue == RESULTS else name_of(id)


def document_of(name: Any) -> str:
    """Return the first pack of a message, or the id of another one."""
    match = _PACKED.fullmatch(str(name))
    return match[1] if match else str(name)


def shift_of(name: str) -> tuple[str, int]:
    """Return who pushed a message of ``shifts`` for which instant, and its number there."""
    id, _, instant = name.partition("@")
    process, _, number = id.rpartition(".")
    return f"{process}@{instant}", int(number)
