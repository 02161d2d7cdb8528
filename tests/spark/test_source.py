"""The data source, called as Spark calls it: crashes, limits, partitions and fencing.

No test here needs a session.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest
from bson import ObjectId
from pyspark import cloudpickle
from pyspark.sql.streaming.datasource import ReadMaxRows
from pyspark.sql.types import LongType, StringType, StructField, StructType

from pyqueue import Client, ConfigurationError, Fenced, Unavailable
from pyqueue.backends.bulk import epochs
from pyqueue.backends.bulk.partitions import page, slices
from pyqueue.backends.claims.claims import NamedClaims
from pyqueue.messages import Id
from pyqueue.queue_base import backend_of
from pyqueue.requests import Plan
from pyqueue.runtime.connecting import runner_of
from pyqueue.spark import QueueDataSource, QueueProgressListener, idle, tables, writers
from pyqueue.spark.addresses import NamespaceAddress, client_of
from pyqueue.spark.columns import columns
from pyqueue.spark.frames import batch
from pyqueue.spark.offsets import Offset
from tests.plans.runner import NOW
from tests.spark.engine import (
    Checkpoint,
    Deaths,
    Engine,
    in_a_task,
    nothing,
    seen,
    sized,
    source,
    table_rows,
    target,
    to_queue,
)
from tests.spark.fakes import Crash, Flow, meddled, waiting_consumer
from tests.support.eventually import eventually
from tests.support.samples import at_each, sampled, some_or_all

# ---- dying


def run_through(
    flow: Flow, database: str, checkpoint: Checkpoint, step: Callable[[str], object], stage: bool
) -> None:
    """Run a stream from the source to the target until the source is empty."""
    if stage:
        sink = to_queue(target(flow, database), step, query=checkpoint.query)
    else:  # a foreachBatch that writes without ids

        def sink(number: int, batches: list[pa.RecordBatch]) -> None:
            for batch in batches:
                step("write")
                flow.clean.push_many(
                    [json.loads(each) for each in batch.column("payload").to_pylist()]
                )
            step("sink commit")

    engine = Engine(source(flow, database), sink, checkpoint, step)
    try:
        engine.run()
    finally:
        engine.reader.stop()  # a dead process renews nothing


def restart(
    flow: Flow,
    database: str,
    checkpoint: Checkpoint,
    step: Callable[[str], object] = nothing,
    *,
    stage: bool = True,
) -> None:
    """Run a stream that has died to its end."""
    if not checkpoint.offsets:  # it knows of no former runner
        flow.lapse()
    run_through(flow, database, checkpoint, step, stage)


@some_or_all
def test_stream_that_dies_at_any_step_writes_each_once(
    shared: Client, database: str, few: int | None
) -> None:
    dying: set[str] = set()

    def run(at: int) -> int:
        flow, checkpoint, death = Flow(shared), Checkpoint(), Deaths(at)
        flow.raw.push_many(range(5))
        with suppress(Crash):
            run_through(flow, database, checkpoint, death, stage=True)
        restart(flow, database, checkpoint)
        flow.check_moved(range(5), f"died after {death.steps}")
        dying.update(death.steps)
        return len(death.steps)

    assert at_each(run, few) > 20
    expected = {"initialOffset", "latestOffset", "offset log", "commit", "partitions"}
    assert dying >= expected | {"tasks", "write", "sink commit", "commit log"}


def die_at_commands(
    flow_of: Callable[[], Flow],
    database: str,
    few: int | None,
    *,
    consumed: bool,
    number: int = 3,
) -> int:
    """Let a stream of a few messages die at its commands. Return how many commands there are.

    Args:
        flow_of: Returns two new queues.
        database: The URL.
        few: How many deaths are tried; None: one at each command.
        consumed: Whether a consumer takes each message as it appears.
        number: How many messages there are.
    """
    client = client_of(NamespaceAddress.of(database, None, "pyqueue"))
    runner_of(client).enter()  # it has reached the server before commands are counted

    def run(at: int) -> int:
        flow, checkpoint, taken = flow_of(), Checkpoint(), Counter[Any]()
        flow.raw.push_many(range(number))

        def consume(step: str = "") -> None:
            if consumed:
                taken.update(each.payload for each in flow.clean.pop_many(10, timeout=0))

        with meddled(client, at) as meddler, suppress(Crash):
            run_through(flow, database, checkpoint, consume, stage=True)
        consume()
        restart(flow, database, checkpoint, consume)
        consume()
        flow.check_moved(range(0 if consumed else number), f"died at command {at}")
        assert taken == Counter(range(number if consumed else 0)), f"died at command {at}"
        return meddler.count

    return at_each(run, few)


@some_or_all
def test_batch_that_was_consumed_is_not_written_again(
    shared: Client, database: str, few: int | None
) -> None:
    assert die_at_commands(lambda: Flow(shared), database, few, consumed=True) > 20


@some_or_all
def test_stream_that_dies_at_any_command_writes_each_once(
    shared: Client, database: str, few: int | None
) -> None:
    assert die_at_commands(lambda: Flow(shared), database, few, consumed=False) > 20


def test_stream_without_ids_writes_twice_after_a_crash(shared: Client, database: str) -> None:
    """This shows that the tests above can fail."""
    doubled = False
    for at in range(1, 20):
        flow, checkpoint, death = Flow(shared), Checkpoint(), Deaths(at)
        flow.raw.push_many(range(5))
        with suppress(Crash):
            run_through(flow, database, checkpoint, death, stage=False)
        restart(flow, database, checkpoint, stage=False)
        assert {*flow.written()} == {*range(5)}
        doubled = len(flow.written()) > 5
        if doubled:
            break
    assert doubled


@some_or_all
def test_stream_survives_the_loss_of_its_checkpoint(
    shared: Client, database: str, monkeypatch: pytest.MonkeyPatch, few: int | None
) -> None:
    """Nothing is lost, whichever step it died at, and stable ids prevent a second write."""
    monkeypatch.setattr(epochs, "FRESH", timedelta(0))

    def run(at: int) -> int:
        flow, death = Flow(shared), Deaths(at)
        flow.raw.push_many(range(5))
        with suppress(Crash):
            run_through(flow, database, Checkpoint(), death, stage=True)
        flow.lapse()
        run_through(flow, database, Checkpoint(), nothing, stage=True)
        flow.check_moved(range(5), f"died after {death.steps}")
        return len(death.steps)

    assert at_each(run, few) > 20


def test_restarted_stream_waits_for_no_lease(flow: Flow, database: str) -> None:
    flow.raw.push_many(range(2))
    checkpoint = Checkpoint()
    options = source(flow, database, leaseSeconds="600")
    with pytest.raises(Crash):
        Engine(options, seen(Counter()), checkpoint, Deaths(5)).run()
    assert flow.raw.counts().reserved == 2
    rows: Counter[Any] = Counter()
    engine = Engine(options, seen(rows), checkpoint)
    assert engine.batch()
    assert rows == Counter(range(2))
    assert not engine.batch()
    assert flow.left() == []
    engine.reader.stop()


# ---- acknowledging


def test_batch_is_acknowledged_once_committed(flow: Flow, database: str) -> None:
    flow.raw.push_many(range(5))
    left: list[int] = []
    engine = Engine(source(flow, database), lambda *_: left.append(len(flow.left())))
    while engine.batch():
        pass
    assert left == [5, 3, 1]
    assert flow.left() == []  # Spark asked for the next batch, and there was none
    engine.reader.stop()


def test_listener_acknowledges_the_last_batch(flow: Flow, database: str) -> None:
    flow.raw.push_many(range(5))
    engine = Engine(source(flow, database), seen(Counter()))
    engine.batch()
    assert len(flow.left()) == 5
    engine.listen()
    assert len(flow.left()) == 3
    assert not flow.held()
    engine.listen()  # a second time changes nothing
    engine.reader.stop()


def progress(*ends: str | None) -> Any:
    """Return the event of a committed batch, with the end offsets of its sources."""
    sources = [
        SimpleNamespace(endOffset=each, latestOffset="None", numInputRows=2) for each in ends
    ]
    return SimpleNamespace(progress=SimpleNamespace(id="q", sources=sources))


def test_listener_ignores_other_sources(flow: Flow, database: str) -> None:
    flow.raw.push_many(range(5))
    engine = Engine(source(flow, database), seen(Counter()))
    engine.batch()
    (end,) = engine.checkpoint.offsets
    others = ["5", None, "2013-07-01", '{"topic": {"0": 5}}', '[{"n": 5}]', "null"]
    others.append('{"logOffset": 3}')
    listener = QueueProgressListener()
    listener.onQueryProgress(progress(*others))
    assert len(flow.left()) == 5
    assert listener.queries == {}
    listener.onQueryProgress(progress(*others, json.dumps(end), *others))
    eventually(lambda: len(flow.left()) == 3, "the acknowledgement of the batch")
    engine.reader.stop()


def test_late_listener_is_fenced_by_the_next_runner(flow: Flow, database: str) -> None:
    flow.raw.push_many(range(6))
    checkpoint = Checkpoint()
    engine = Engine(source(flow, database), seen(Counter()), checkpoint)
    engine.batch()
    late = Offset.parse(checkpoint.offsets[0])
    engine.reader.stop()
    flow.lapse()
    other = Engine(source(flow, database), seen(Counter()))
    other.batch()
    before = flow.stored(flow.source)
    with pytest.raises(Fenced):
        late.acknowledge()
    assert flow.stored(flow.source) == before
    other.reader.stop()


def test_committed_batch_wakes_a_waiting_consumer(flow: Flow, database: str) -> None:
    writer: Any = QueueDataSource(target(flow, database)).streamWriter(columns(None), False)
    with waiting_consumer(flow, database) as got:
        with in_a_task("query", 0):
            row = {"_id": "m", "q": "", "when": NOW, "payload": 1}
            done = writer.write(iter([batch([row], None)]))
        assert got == []
        writer.commit([done], 0)
    assert [each.id for each in got] == ["s~m"]


# ---- limits


def test_stream_keeps_its_limit(flow: Flow, database: str) -> None:
    flow.raw.push_many(range(5))
    sizes: list[int] = []
    Engine(source(flow, database), sized(sizes)).run()
    assert sizes == [2, 2, 1]


def test_stream_keeps_the_limit_that_spark_gives(flow: Flow, database: str) -> None:
    flow.raw.push_many(range(5))
    engine = Engine(source(flow, database), seen(Counter()))
    assert engine.reader.getDefaultReadLimit() == ReadMaxRows(2)
    start = engine.reader.initialOffset()
    engine.reader.latestOffset(start, ReadMaxRows(3))
    assert flow.raw.counts().reserved == 3
    engine.reader.stop()


def test_available_now_leaves_later_messages(flow: Flow, database: str) -> None:
    flow.raw.push_many(range(4))
    rows: Counter[Any] = Counter()

    def sink(number: int, batches: list[pa.RecordBatch]) -> None:
        seen(rows)(number, batches)
        flow.raw.push(100 + number)

    engine = Engine(source(flow, database), sink, now=True)
    flow.raw.push(50)  # a millisecond later at the earliest
    eventually(lambda: flow.raw.counts().ready == 5, "five ready messages")
    assert engine.run() >= 2
    assert sorted(rows) in ([*range(4)], [*range(4), 50])
    assert {100, 101} <= {*flow.left()}
    assert {*rows} | {*flow.left()} >= {50}
    assert not flow.held()


def test_stream_stopped_before_its_start_adopts_nothing(flow: Flow, database: str) -> None:
    flow.raw.push_many(range(3))
    engine = Engine(source(flow, database), seen(Counter()))
    assert engine.batch()
    Engine(source(flow, database), seen(Counter())).reader.stop()
    assert engine.batch()
    engine.listen()
    assert flow.left() == []
    engine.reader.stop()


def test_stream_waits_while_its_queue_is_paused(
    flow: Flow, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle, "IDLE_LOOK_S", 0.0)
    flow.raw.push_many(range(2))
    flow.raw.pause()
    rows: Counter[Any] = Counter()
    engine = Engine(source(flow, database), seen(rows))
    assert not engine.batch()
    flow.raw.resume()
    assert engine.batch()
    assert len(rows) == 2
    engine.reader.stop()


def test_acknowledge_leaves_messages_of_other_holders(flow: Flow, database: str) -> None:
    flow.raw.push_many(range(2))
    engine = Engine(source(flow, database), seen(Counter()))
    engine.batch()
    flow.steal(1)
    engine.listen()
    assert flow.left() == [1]
    engine.reader.stop()


# ---- leases


def test_stream_renews_a_lease_shorter_than_its_batch(flow: Flow, database: str) -> None:
    flow.raw.push_many([1])
    checks = 0

    def slow(number: int, batches: list[pa.RecordBatch]) -> None:
        first = flow.stored(flow.source)[0]["when"]

        def renewed() -> bool:
            nonlocal checks
            checks += 1
            assert flow.raw.reserve(0) is None
            return bool(flow.stored(flow.source)[0]["when"] > first + timedelta(seconds=1.5))

        eventually(renewed, "a lease beyond the first")

    Engine(source(flow, database, leaseSeconds="1.5"), slow).run()
    assert checks > 1
    assert flow.left() == []


def test_acknowledge_without_renewal_spares_a_lapsed_message(
    flow: Flow, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = client_of(NamespaceAddress.of(database, None, "pyqueue"))
    monkeypatch.setattr(runner_of(client).renewer, "add", lambda *_: None)
    flow.raw.push_many(range(3))
    stolen: list[Any] = []

    def slow(number: int, batches: list[pa.RecordBatch]) -> None:
        def taken() -> bool:
            stolen.extend(flow.raw.reserve_many(1, timeout=0))
            return bool(stolen)

        eventually(taken, "a lapsed message")

    engine = Engine(source(flow, database, leaseSeconds="0.3", maxMessagesPerBatch="9"), slow)
    engine.batch()
    engine.listen()
    assert flow.left() == [stolen[0].payload]
    flow.raw.extend(stolen[0])
    flow.raw.commit(stolen[0])
    engine.reader.stop()


def test_stream_goes_on_after_a_failed_renewal(
    flow: Flow, database: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(claims: NamedClaims, token: str, lease: float) -> Plan[None]:
        raise Unavailable("the server went away")

    monkeypatch.setattr(NamedClaims, "renew", failing)
    flow.raw.push_many(range(2))
    rows: Counter[Any] = Counter()

    def slow(number: int, batches: list[pa.RecordBatch]) -> None:
        text = "could not renew the lease of group 'g', trying again: the server went away"
        eventually(lambda: text in caplog.text, "a log message")
        seen(rows)(number, batches)

    Engine(source(flow, database, leaseSeconds="3"), slow).run()
    assert rows == Counter(range(2))
    assert flow.left() == []


# ---- tables


def table(database: str, queue: str, **options: str) -> QueueDataSource:
    """Return a queue as a table."""
    return QueueDataSource({"uri": database, "queue": queue} | options)


def test_table_is_read_by_slices_and_chunks(
    flow: Flow, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each task has its own reader, as in a separate process. No message is consumed."""
    monkeypatch.setattr(tables, "CHUNK", 3)
    flow.raw.push_many(range(10))
    flow.raw.push(10, delay=600)
    before = flow.stored(flow.source)
    whole = table(database, flow.source, numPartitions="2")
    parts = whole.reader(columns(None)).partitions()
    assert len(parts) == 2
    rows = Counter[Any]()
    sizes = []
    for number, part in enumerate(map(pickle.dumps, parts)):
        batches: list[Any] = [*whole.reader(columns(None)).read(pickle.loads(part))]
        sizes.append([each.num_rows for each in batches])
        seen(rows)(number, batches)
    assert sizes == [[3, 2], [3, 2]]
    assert rows == Counter(range(10))
    assert flow.stored(flow.source) == before


def test_table_is_read_as_its_payload_type(flow: Flow, database: str) -> None:
    flow.raw.push({"a": 1, "b": "x"})
    type = StructType([StructField("a", LongType()), StructField("b", StringType())])
    options = {"uri": database, "queue": flow.source, "payloadType": "struct<a: bigint, b: string>"}
    rows = table_rows(options, columns(type))
    assert [row["payload"] for row in rows] == [{"a": 1, "b": "x"}]


def test_table_has_the_documented_schema(flow: Flow, database: str) -> None:
    assert table(database, flow.source).schema() == columns(None)
    assert table(database, flow.source, payloadType="json").schema() == columns(None)
    typed = table(database, flow.source, payloadType="struct<a: bigint>").schema()
    assert typed == (
        "`id` string NOT NULL, `queue` string NOT NULL, `payload` struct<a: bigint>, "
        "`headers` map<string,string>, `key` string, `when` timestamp NOT NULL, "
        "`pushed` timestamp, `tries` int NOT NULL, `priority` int, `group` string"
    )


def rows_of(*payloads: int) -> Iterator[pa.RecordBatch]:
    """Return the rows that a task writes."""
    return iter([pa.RecordBatch.from_pydict({"payload": [str(each)]}) for each in payloads])


#: Rows of payloads without ids.
WRITTEN = StructType([StructField("payload", StringType())])


def test_write_shows_committed_tasks_only_and_all_at_once(
    flow: Flow, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of a task that Spark repeated or ran twice are written once."""
    monkeypatch.setattr(writers, "CHUNK", 2)
    writer: Any = table(database, flow.target).writer(WRITTEN, False)
    spark: Any = cloudpickle
    tasks = [pickle.loads(spark.dumps(writer)) for _ in range(3)]
    results = [tasks[0].write(rows_of(*range(5))), tasks[1].write(rows_of(5, 6))]
    results.append(tasks[2].write(rows_of()))
    tasks[1].write(rows_of(5, 6))  # a repeated task, whose result Spark drops
    assert flow.written() == []
    assert flow.staged() == 9
    writer.commit([*pickle.loads(pickle.dumps(results)), None])
    assert flow.written() == [*range(7)]
    assert flow.staged() == 0


def test_full_chunk_does_not_wait_for_further_rows(
    flow: Flow, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers, "CHUNK", 2)
    found: list[int] = []

    def rows() -> Iterator[pa.RecordBatch]:
        yield from rows_of(0, 1)
        found.append(flow.staged())
        yield from rows_of(2)

    writer: Any = table(database, flow.target).writer(WRITTEN, False)
    writer.commit([writer.write(rows())])
    assert found == [2]
    assert flow.written() == [0, 1, 2]


def test_write_that_is_not_staged_shows_each_row_once(flow: Flow, database: str) -> None:
    named = StructType([StructField("id", StringType()), StructField("payload", StringType())])
    writer: Any = table(database, flow.target, idColumn="id", staged="false").writer(named, False)

    def rows(*numbers: int) -> Iterator[pa.RecordBatch]:
        ids = [f"{flow.target}-{number}" for number in numbers]
        columns = {"id": ids, "payload": [str(number) for number in numbers]}
        return iter([pa.RecordBatch.from_pydict(columns)])

    with waiting_consumer(flow, database) as got:
        done = writer.write(rows(0))
        assert flow.staged() == 0
        writer.commit([done])
    assert [each.payload for each in got] == [0]
    writer.write(rows(1, 2))
    writer.abort([None])
    writer.write(rows(3, 2, 1))  # the job is run again, with its rows in another order
    writer.commit([done])
    assert flow.written() == [1, 2, 3]


def test_batch_write_of_an_epoch_is_done_once(flow: Flow, database: str) -> None:
    for epoch, expected in (("0", [1, 2]), ("0", []), ("1", [1, 2])):
        options = {"stage": "s", "epoch": epoch, "idColumn": "payload"}
        writer: Any = table(database, flow.target, **options).writer(WRITTEN, False)
        tasks = [pickle.loads(cast(Any, cloudpickle).dumps(writer)) for _ in range(2)]
        done = []
        for task, row in zip(tasks, (1, 2), strict=True):
            with in_a_task():
                done.append(task.write(rows_of(row)))
        writer.abort(done)  # the commit may have failed after it had decided
        writer.commit(pickle.loads(pickle.dumps(done)))
        assert [each.payload for each in flow.clean.pop_many(10, timeout=0)] == expected
        assert flow.staged() == 0


def test_aborted_write_leaves_nothing(flow: Flow, database: str) -> None:
    flow.clean.push(100)
    one, other = (cast(Any, table(database, flow.target).writer(WRITTEN, False)) for _ in range(2))
    done, kept = one.write(rows_of(1, 2)), other.write(rows_of(3))
    one.abort([done, None])
    assert flow.written() == [100]
    assert flow.staged() == 1
    other.commit([kept])
    assert flow.written() == [3, 100]


def test_committed_write_wakes_a_waiting_consumer(flow: Flow, database: str) -> None:
    writer: Any = table(database, flow.target).writer(WRITTEN, False)
    result = writer.write(rows_of(1))
    with waiting_consumer(flow, database) as got:
        assert got == []
        writer.commit([result])
    assert [each.payload for each in got] == [1]


# ---- parts

#: The types of the ids, and how many messages there are.
each_population = pytest.mark.parametrize(
    ("kind", "count"), sampled(product(["str", "ObjectId", "both"], [0, 1, 2, 1000]), few=5)
)


def pushed(flow: Flow, kind: Any, count: int) -> list[Id]:
    """Push messages with ids of one kind, in mixed order; return the ids."""
    ids: list[Any] = [
        f"{flow.source}-{number * 7919 % 1000}"
        if kind == "str" or (kind == "both" and number % 2)
        else ObjectId()
        for number in range(count)
    ]
    flow.raw.push_many(range(count), ids=ids)
    return ids


@each_population
def test_claim_ranges_are_disjoint_and_complete(flow: Flow, kind: Any, count: int) -> None:
    pushed(flow, kind, count)
    run = runner_of(flow.client).run
    claims = NamedClaims(backend_of(flow.raw), "g")
    token = run(claims.adopt(600))
    for _ in range(3):  # several outstanding claims, as after a crash
        run(claims.claim(token, max(1, count // 3 + 1), 600))
    for parts in (1, 2, 3, 7):
        spans = run(claims.ranges(token, 0, 3, parts))
        read = [[each["payload"] for each in run(claims.read(span))] for span in spans]
        assert len(spans) == min(parts, count)
        assert Counter(each for part in read for each in part) == Counter(range(count))
        sizes = [len(part) for part in read]
        assert not sizes or max(sizes) - min(sizes) <= 1


@each_population
def test_slices_are_disjoint_and_complete(flow: Flow, kind: Any, count: int) -> None:
    """Most messages became eligible in the same millisecond."""
    pushed(flow, kind, count)
    backend, run = backend_of(flow.raw), runner_of(flow.client).run
    eventually(lambda: flow.raw.counts().ready == count, "all messages ready")
    for parts in (1, 2, 3, 7):
        for limit in (1, 64, 10_000) if count < 1000 else (64, 10_000):
            read: list[int] = []
            for part in run(slices(backend.queue, backend.kind, parts)):
                while found := run(page(backend.queue, backend.kind, part, limit)):
                    read += [each["payload"] for each in found]
                    part = type(part)(part.now, (found[-1]["when"], found[-1]["_id"]), part.upto)
            assert Counter(read) == Counter(range(count))


# ---- queues that are not there


def stored(flow: Flow, text: str) -> list[Any]:
    """Return the documents that have this text in their ids: the records of a queue."""
    return list(flow.client.database["pyqueue"].find({"_id": {"$regex": text}}))


def test_read_of_a_missing_queue_fails_and_makes_none(flow: Flow, database: str) -> None:
    missing = f"{flow.source}-mistyped"
    reader = table(database, missing).reader(columns(None))
    with pytest.raises(ConfigurationError, match=f"^queue: there is no queue '{missing}'"):
        reader.partitions()
    assert table_rows({"uri": database, "queue": missing, "mustExist": "false"}) == []
    assert stored(flow, missing) == []


@pytest.mark.parametrize("kind", [None, "standard", "ordered"])
def test_read_of_a_queue_writes_nothing(flow: Flow, database: str, kind: Any) -> None:
    """Also not the kind of a queue that no program has named yet."""
    flow.client.queue(flow.source, kind=kind).push(1, group="g" if kind == "ordered" else None)
    before = stored(flow, flow.source)
    table_rows({"uri": database, "queue": flow.source})
    assert stored(flow, flow.source) == before


def test_stream_waits_for_a_missing_queue(
    flow: Flow, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It takes the kind that the first program gives it."""
    rows: Counter[Any] = Counter()
    engine = Engine(source(flow, database, maxWaitMs="0"), seen(rows))
    for _ in range(3):
        assert not engine.batch()
        engine.reader._idle.rest(0)
    assert stored(flow, flow.source) == []
    warned = [each for each in caplog.messages if "this query waits for it" in each]
    assert len(warned) == 1
    flow.client.queue(flow.source, kind="priority").push_many([1, 2], priorities=[3, 3])
    engine.reader._idle.rest(0)
    while engine.batch():
        pass
    assert rows == Counter([1, 2])
    engine.reader.stop()


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(200, marks=pytest.mark.spark_long),
        pytest.param(2000, marks=pytest.mark.slow),
    ],
)
def test_large_messages_take_little_memory(url: str, count: int) -> None:
    """Messages of 1 MB, which one task writes and reads. Their number does not matter."""
    command = [sys.executable, "-m", "tests.spark.large", url, str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 512
