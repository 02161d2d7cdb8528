"""The records of writes by epoch, and the hidden rows that belong to them. See ``epochs``."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from pyqueue.requests import Document, Filter, Find, Plan

#: The beginning of the _id of a record.
RECORD: Final = "~stage:"


def hidden_queue(name: str, epoch: int, place: str = "") -> str:
    """Return the ``q`` of hidden rows, which cannot name a queue. Epochs sort by number."""
    return f"~staged:{name}:{epoch:012d}:{place}"


def name_of(record: Document) -> str:
    """Return the name of a record, which its hidden rows have, too."""
    return str(record["_id"]).removeprefix(RECORD)


def parts_of(name: str) -> tuple[str, str, str]:
    """Return the first queue, the stage and the query that the name of a record holds."""
    queue, stage, query = name.split("~")
    return queue, stage, query


def starting_with(prefix: str) -> Filter:
    """Return the condition for texts that start with a prefix, then have printable ASCII."""
    return {"$gte": prefix, "$lt": f"{prefix}\x7f"}


def records(queue: str | None, stage: str | None = None) -> Plan[list[Document]]:
    """Return the records of one or all stages of a queue, or of all queues if that is None."""
    prefix = RECORD if queue is None else f"{RECORD}{queue}~"
    named = starting_with(prefix if stage is None else f"{prefix}{stage}~")
    return (yield from Find({"_id": named}))


def unclaimed(prefix: str, owners: Sequence[Document], before: datetime) -> Filter:
    """Return the filter of old hidden rows that belong to none of these records.

    Args:
        prefix: the beginning of the names that the rows have, or had.
        owners: the records.
        before: rows that were written later are not old.
    """
    return {
        "q": starting_with(f"~staged:{prefix}"),
        "staged": {"$nin": [name_of(each) for each in owners]},
        "processed": {"$lt": before},
    }
