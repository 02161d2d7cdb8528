"""The stages that write to a queue by epoch: list them, forget them, or delete them.

``epochs`` describes their records. This module also deletes rows that abandoned writes have left.
"""

from __future__ import annotations

import logging
import re
from datetime import datetime
from typing import Final, NamedTuple

from pyqueue import arguments
from pyqueue.backends import namespace
from pyqueue.backends.bulk.epoch_records import (
    hidden_queue,
    name_of,
    parts_of,
    records,
    starting_with,
    unclaimed,
)
from pyqueue.backends.bulk.epochs import ABANDONED, writes_of
from pyqueue.backends.contents import count_of_any_kind
from pyqueue.backends.namespace import HOT
from pyqueue.errors import QueueError, Unavailable
from pyqueue.requests import Delete, Document, Filter, Find, Plan, ServerTime

log = logging.getLogger("pyqueue")

#: How many times the deletion of a record is tried while its query still writes.
_TRIES: Final = 20
#: The largest epoch number.
_LAST: Final = 10**12 - 1


class StageInfo(NamedTuple):
    """A query that writes to a queue by epoch, or did so before."""

    queue: str
    #: The name of the stage, or "" if the write has none.
    stage: str
    #: The id of the query, or "" if it is not known.
    query: str
    #: The number of the last committed epoch, or -1 if there is none.
    epoch: int
    #: When the query last wrote.
    at: datetime


def stages(queue: str | None = None) -> Plan[list[StageInfo]]:
    """Return the queries that write by epoch, sorted by queue, stage and query.

    Args:
        queue: The first queue that the queries write to, or None for any queue.
    """
    found = yield from records(queue)
    infos = [
        StageInfo(*parts_of(name_of(each)), each["epoch"], each["processed"]) for each in found
    ]
    return sorted(infos)


def abandoned(cap: int) -> Plan[int]:
    """Return how many hidden rows ``sweep`` would delete, up to ``cap``."""
    return (yield from count_of_any_kind((yield from _abandoned()), HOT, cap))


def sweep() -> Plan[int]:
    """Delete the hidden rows of writes that ended without a commit. Return how many there were.

    A batch write that has been running for more than a day loses its rows, and will fail.
    """
    match = yield from _abandoned()
    number = yield from count_of_any_kind(match, HOT)
    yield from Delete(match, many=True)
    return number


def _abandoned() -> Plan[Filter]:
    """Return the filter that matches old hidden rows that belong to no stage.

    Rows of a stage are left alone. The stage may still commit them, or will delete them.
    """
    now = yield from ServerTime()
    return unclaimed("", (yield from records(None)), now - ABANDONED)


def forget(queue: str, stage: str) -> Plan[int]:
    """Forget the epochs of a stage, so that its next query may begin with any epoch.

    This first publishes committed rows, and deletes the other hidden rows of the stage.

    Args:
        queue: The first queue that the stage writes to.
        stage: The name of the stage, or "" for all writes to the queue without a stage.

    Returns:
        How many queries were forgotten.

    Raises:
        ConfigurationError: A name is invalid.
    """
    arguments.queue_name(queue)
    if stage:
        arguments.group(stage, "stage")
    found = yield from records(queue, stage)
    for record in found:
        yield from _delete_record(queue, record)
    return len(found)


def show_decided(queue: str) -> Plan[None]:
    """Publish the committed rows of the stages of a queue, so that they become messages."""
    for record in (yield from records(queue)):
        yield from _publish_committed(queue, record)


def delete(queue: str) -> Plan[None]:
    """Delete the records of the stages of a queue, and the hidden rows of all writes to it."""
    for record in (yield from records(queue)):
        yield from _delete_record(queue, record)
    yield from Delete({"q": starting_with(f"~staged:{queue}~")}, many=True)
    # The ``q`` of batch writes ends with the job, the attempt and the part. Names may have colons.
    of_a_job = f"^~staged:{re.escape(queue)}:[0-9a-f]{{32}}:[0-9a-f]{{32}}:[0-9]+(@|$)"
    yield from Delete({"q": {"$regex": of_a_job}}, many=True)


def _publish_committed(queue: str, record: Document) -> Plan[bool]:
    """Publish the committed rows of a record. Return False if some of these rows were missing."""
    if record["places"]:
        target = yield from namespace.target(queue)
        try:
            yield from writes_of(target, name_of(record)).publish_committed(record)
        except Unavailable:
            raise
        except QueueError as error:  # otherwise the stage could never be forgotten
            log.error("%s", error)
            return False
    return True


def _delete_record(queue: str, record: Document) -> Plan[None]:
    """Delete a record and its hidden rows, after publishing the rows that are committed."""
    match = {"_id": record["_id"]}
    for _ in range(_TRIES):
        complete = yield from _publish_committed(queue, record)
        # If another epoch was committed since then, the record does not match.
        unchanged = {"epoch": record["epoch"]} | ({"places": []} if complete else {})
        if (yield from Delete({**match, **unchanged})):
            break
        found = yield from Find(match, limit=1)
        if not found:
            break
        record = found[0]
    else:
        raise Unavailable(f"queue {queue!r}: queries keep writing to it; stop these queries first")
    name = name_of(record)
    first, end = hidden_queue(name, 0), hidden_queue(name, _LAST, "\x7f")
    yield from Delete({"q": {"$gte": first, "$lt": end}}, many=True)
