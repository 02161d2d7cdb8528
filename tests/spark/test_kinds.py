"""Every kind of queue as a source and as a target: it works, or it is refused with the reason.

No test here needs a session.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pymongo
import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows

from pyqueue import ConfigurationError
from pyqueue.backends.queue_plans import QueuePlans, found
from pyqueue.queue_base import backend_of
from pyqueue.runtime.connecting import runner_of
from pyqueue.spark import QueueDataSource
from pyqueue.spark.batches import Batches
from pyqueue.spark.columns import columns
from pyqueue.spark.outputs import Route
from tests.spark.engine import table_rows
from tests.spark.fakes import Flow, no_session, outputs
from tests.spark.test_sink import WAYS, Sink

KINDS = ("standard", "priority", "ordered", "bucket")


def run_stage(flow: Flow, output: str, transform: Any = None) -> int:
    """Run a stage once between queues whose records say their kinds. Return how many it wrote."""
    connection = runner_of(flow.client)

    def plans(name: str) -> QueuePlans:
        backend = backend_of(flow.client.queue(name, lease=600))
        return connection.run(found(backend, names=True))

    route = Route(plans(flow.source), [plans(flow.target)])
    stage = Batches(connection, route, "g", transform, output=output, max_messages=5000, members=1)
    try:
        return stage.run_once(no_session).written
    finally:
        stage.release()


def read_stream(flow: Flow, database: str) -> int:
    """Read a batch of a stream. Return how many messages it has."""
    source = QueueDataSource({"uri": database, "queue": flow.source, "group": "g"})
    stream: Any = source.streamReader(columns(None))
    try:
        start = stream.initialOffset()
        end = stream.latestOffset(start, ReadMaxRows(10))
        parts = stream.partitions(start, end)
        return sum(rows.num_rows for part in parts for rows in stream.read(part))
    finally:
        stream.stop()


READS: dict[str, Callable[[Flow, str], int]] = {
    "move": lambda flow, _: run_stage(flow, "move"),
    "transaction": lambda flow, _: run_stage(flow, "transaction"),
    "stream": read_stream,
    "table": lambda flow, url: len(table_rows({"uri": url, "queue": flow.source})),
}
#: The reason why a kind cannot be read in a way.
REFUSED = {("ordered", way): "which does not support it; reserve messages" for way in READS}
del REFUSED["ordered", "table"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", READS)
def test_source_of_each_kind(flow: Flow, faked: None, database: str, kind: Any, way: str) -> None:
    queue = flow.client.queue(flow.source, kind=kind)
    queue.push_many([1, 2, 3])
    if reason := REFUSED.get((kind, way)):
        with pytest.raises(ConfigurationError, match=f"of kind '{kind}', {reason}"):
            READS[way](flow, database)
        assert queue.counts().ready == 3
    else:
        assert READS[way](flow, database) == 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["move", "transaction", *WAYS])
def test_target_of_each_kind(flow: Flow, faked: None, database: str, kind: Any, way: str) -> None:
    queue = flow.client.queue(flow.target, kind=kind)
    queue.reserve(0)  # makes the record
    if way in WAYS:
        sink = Sink(flow, database)
        sink.write(way, [sink.row(1), sink.row(2), sink.row(3)], {})
    else:
        flow.raw.push_many([1, 2, 3])
        assert run_stage(flow, way) == 3
    received = queue.reserve_many(10, timeout=0)
    assert [each.payload for each in received] == [1, 2, 3]
    queue.commit(*received)
    assert queue.counts().total == 0


@outputs
def test_stage_keeps_the_order_of_groups(flow: Flow, faked: None, output: str) -> None:
    """It is the order in which the messages became ready. Their ids do not matter."""
    queue = flow.client.queue(flow.target, kind="ordered")
    queue.reserve(0)
    total = 2500  # more than one command moves
    ids = [f"{flow.source}-{total - number}" for number in range(total)]
    flow.raw.push_many(range(total), ids=ids)
    past = datetime.now(UTC) - timedelta(minutes=1)
    since = [past + timedelta(milliseconds=number) for number in range(total)]
    changes = [{"$set": {"when": when, "due": when}} for when in since]
    flow.client.database["pyqueue"].bulk_write(
        [pymongo.UpdateOne({"_id": id}, each) for id, each in zip(ids, changes, strict=True)]
    )

    def grouped(df: Any) -> Any:
        rows = [{**row, "group": str(int(row["payload"]) % 5)} for row in df.rows()]
        return df.made_of(rows, "id", "payload", "group")

    assert run_stage(flow, output, grouped) == total
    for group in range(5):
        places = sorted(
            (each["seq"], each["no"], each["payload"])
            for each in flow.stored(flow.target)
            if each["group"].endswith(f":{group}")
        )
        assert [payload for *_, payload in places] == [*range(group, total, 5)]
