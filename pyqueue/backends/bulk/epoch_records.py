"""The records of writes by epoch, and the hidden rows that belong to them; see ``epochs``."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from pyqueue.requests import Document, Filter, Find, Plan

#: The beginning of the _id of a record.
RECORD: Final = "~stage:"
#: The number of a task is always smaller than this.
_MAX_TASKS: Final = 1 << 32


def hidden_queue(name: str, epoch: int, place: str = "") -> str:
    """Return the ``q`` of hidden rows. No queue has this name, and the names sort by epoch."""
    return f"~staged:{name}:{epoch:012d}:{place}"


def name_of(record: Document) -> str:
    """Return the name of a record. Its hidden rows store this name in the ``staged`` field."""
    return str(record["_id"]).removeprefix(RECORD)


def parts_of(name: str) -> tuple[str, str, str]:
    """Return the first queue, the stage and the query, given the name of a record."""
    queue, stage, query = name.split("~")
    return queue, stage, query


def order_of(attempt: int, task: int = 0) -> int:
    """Return a number that is larger for a larger attempt and, within an attempt, a larger task."""
    return attempt * _MAX_TASKS + task


def is_out(record: Document, query: str, run: str) -> bool:
    """Return whether a run must not write any more, because a later run has taken over."""
    if run:
        return run in record.get("out", [])
    return not query and record.get("heir") is not None


def starting_with(prefix: str) -> Filter:
    """Return the condition for a prefix that is followed by nothing or by printable ASCII."""
    return {"$gte": prefix, "$lt": f"{prefix}\x7f"}


def records(queue: str | None, stage: str | None = None) -> Plan[list[Document]]:
    """Return the records of a queue and a stage. None stands for all queues or all stages."""
    prefix = RECORD if queue is None else f"{RECORD}{queue}~"
    named = starting_with(prefix if stage is None else f"{prefix}{stage}~")
    return (yield from Find({"_id": named}))


def unclaimed(prefix: str, owners: Sequence[Document], before: datetime) -> Filter:
    """Return a filter that matches old hidden rows which belong to no record in ``owners``.

    Args:
        prefix: The beginning of the names in the ``q`` of the rows.
        owners: The records whose rows do not match.
        before: The instant before which the rows were written.
    """
    return {
        "q": starting_with(f"~staged:{prefix}"),
        "staged": {"$nin": [name_of(each) for each in owners]},
        "processed": {"$lt": before},
    }
