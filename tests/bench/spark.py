"""Spark: the cost of writing and reading messages, compared with one process of raw pymongo."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

from pyqueue import Client, Queue
from tests.bench.figures import at_least, at_most
from tests.bench.harness import (
    RAW_RESERVE,
    WRITE,
    Bench,
    fill,
    interleave,
    payload,
    raw_claim,
    raw_document,
    raw_lease,
)

BATCH = 10_000
#: The size of a pack.
PACK = 1000
#: Pushes that start Python workers, and the seconds between the end of a batch and the next push.
WARM, PAUSE_S = 10, 0.3

numbers = itertools.count()


def store(client: Client, queue: str, count: int) -> None:
    """Store messages in a queue that has a record: a stream waits for a queue without one."""
    client.queue(queue, kind="standard").reserve(0)
    fill(client.database[client.namespace], queue, count)


def run(bench: Bench) -> None:
    from pyqueue.spark import spark_session

    config = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
    }
    spark = spark_session("pyqueue bench", master="local[2]", config=config)
    count, rounds = bench.either(20_000, 200_000), bench.either(2, 5)
    try:
        with bench.blocking("majority") as (client, raw):
            url = str(client.url)
            # These are no ratios, so they come before the writes that keep the server busy.
            visible(bench, spark, url, client)
            ceiling(bench, url, client, rounds)
            for output in ("move", "transaction"):
                staged(bench, spark, url, client, raw, output, rounds)
            claimed(bench, client, raw, rounds)
            streamed(bench, spark, url, raw, count, rounds)
            written(bench, spark, url, raw, count, rounds)
            read(bench, spark, url, client, raw, count, rounds)
            packed(bench, spark, url, client, raw, rounds)
    finally:
        spark.stop()


def name() -> str:
    return f"spark{next(numbers)}"


def seconds(call: Callable[[], object], count: int) -> float:
    """Return the seconds that a call takes per message."""
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) / count


def written(bench: Bench, spark: Any, url: str, raw: Any, count: int, rounds: int) -> None:
    text = json.dumps(payload(1))
    rows = spark.range(count).selectExpr("id", f"'{text}' payload").repartition(2).cache()
    rows.count()

    def theirs() -> float:
        documents = [raw_document("raw", number) for number in range(count)]
        return seconds(lambda: raw.insert_many(documents, ordered=False), count)

    def ours(df: Any, **options: str) -> float:
        writer = df.write.format("pyqueue").mode("append").options(uri=url, queue=name(), **options)
        return seconds(writer.save, count)

    before, staged, direct = interleave(
        rounds,
        theirs,
        lambda: ours(rows.select("payload")),
        lambda: ours(
            rows.selectExpr(f"concat('{uuid4().hex}~', id) id", "payload"),
            idColumn="id",
            staged="false",
        ),
    )
    label = f"batch write of {count}, {{}}, against insert_many"
    bench.speed(label.format("staged"), before, staged, rounds * count)
    bench.speed(label.format("with ids"), before, direct, rounds * count, at_least(0.7))


def streamed(bench: Bench, spark: Any, url: str, raw: Any, count: int, rounds: int) -> None:
    text = json.dumps(payload(1))
    with TemporaryDirectory() as folder:
        rows = spark.range(count).selectExpr("cast(id AS string) id", f"'{text}' payload")
        rows.repartition(2).write.parquet(f"{folder}/rows")
        files = spark.readStream.schema("id string, payload string").parquet(f"{folder}/rows")

        def theirs() -> float:
            documents = [
                raw_document("raw", number) | {"_id": f"{uuid4().hex}~{number}"}
                for number in range(count)
            ]
            return seconds(lambda: raw.insert_many(documents, ordered=False), count)

        def ours(delivery: str) -> float:
            writer = files.writeStream.format("pyqueue").options(
                uri=url, queue=name(), stage=uuid4().hex, delivery=delivery
            )
            writer = writer.option("checkpointLocation", f"{folder}/{uuid4().hex}").trigger(
                availableNow=True
            )
            return seconds(lambda: writer.start().awaitTermination(), count)

        before, once, plain = interleave(
            rounds, theirs, lambda: ours("exactly-once"), lambda: ours("at-least-once")
        )
    label = f"stream's write of {count}, {{}}, against insert_many"
    bench.speed(label.format("exactly once"), before, once, rounds * count)
    bench.speed(label.format("at least once"), before, plain, rounds * count, at_least(0.7))


def visible(bench: Bench, spark: Any, url: str, client: Client) -> None:
    """Push one message at a time, and wait until the stream's output shows it."""
    pushes = bench.either(10, 60)
    for output in ("foreachBatch", "at-least-once", "exactly-once"):
        source, target = client.queue(name()), client.queue(name())

        def show(rows: Any, _: int, target: Queue[Any] = target) -> None:
            target.push_many([row["payload"] for row in rows.collect()])

        rows = spark.readStream.format("pyqueue").options(
            uri=url, queue=source.name, group="visible", numPartitions="1"
        )
        writer = rows.load().writeStream
        if output == "foreachBatch":
            writer = writer.foreachBatch(show)
        else:
            writer = writer.format("pyqueue").options(
                uri=url, queue=target.name, stage="visible", delivery=output
            )
        times = []
        with TemporaryDirectory() as folder:
            query = writer.option("checkpointLocation", folder).start()
            for number in range(WARM + pushes):
                began = time.perf_counter()
                source.push(payload(number))
                assert target.pop(timeout=60) is not None
                times.append(time.perf_counter() - began)
                time.sleep(PAUSE_S)
            query.stop()
        label = f"from a push to the output of a stream, {output}: p50"
        bench.row(label, "s", times[WARM:], pushes, at_most(0.3))


def read(
    bench: Bench, spark: Any, url: str, client: Client, raw: Any, count: int, rounds: int
) -> None:
    queue = name()
    store(client, queue, count)

    def theirs() -> float:
        return seconds(
            lambda: [
                json.dumps(each.get("payload"))
                for each in client.database[client.namespace].find({"q": queue})
            ],
            count,
        )

    def ours(**options: str) -> float:
        frame = spark.read.format("pyqueue").options(uri=url, queue=queue, **options).load()
        return seconds(frame.write.format("noop").mode("overwrite").save, count)

    struct = "struct<n: bigint, text: string>"
    before, as_json, as_struct = interleave(rounds, theirs, ours, lambda: ours(payloadType=struct))
    label = f"batch read of {count}, {{}}, against find and json.dumps"
    bench.speed(label.format("JSON"), before, as_json, rounds * count, at_least(0.8))
    bench.speed(label.format("a struct"), before, as_struct, rounds * count, at_least(1.5))


def claimed(bench: Bench, client: Client, raw: Any, rounds: int) -> None:
    queue, loop = client.queue(name()), bench.either(300, 1000)
    quick = raw.with_options(write_concern=WRITE["acknowledged"])

    def theirs() -> float:
        raw.insert_many([raw_document("loop", number) for number in range(loop)])
        return seconds(
            lambda: [
                quick.find_one_and_update(raw_claim("loop"), raw_lease(), **RAW_RESERVE)
                for _ in range(loop)
            ],
            loop,
        )

    def ours() -> float:
        store(client, queue.name, BATCH)
        held: list[float] = []
        began = time.perf_counter()
        with queue.claim("bench", limit=BATCH) as claim:
            held.append((time.perf_counter() - began) / BATCH)
            assert len(claim) == BATCH
            claim.commit()
        return held[0]

    before, after = interleave(rounds, theirs, ours)
    label = f"claim of {BATCH}, at majority, against a loop of find_one_and_update at w:1"
    bench.speed(label, before, after, rounds * BATCH, at_least(20))


def staged(
    bench: Bench, spark: Any, url: str, client: Client, raw: Any, output: Any, rounds: int
) -> None:
    from pyqueue.spark import SparkStage

    source, target = name(), name()
    stage = SparkStage(
        uri=url,
        source=source,
        to=target,
        group=f"bench-{uuid4().hex}",
        output=output,
        max_messages=BATCH,
        namespace=client.namespace,
        transform=lambda df: df.select("id", "payload"),
    )

    def theirs() -> float:
        """Claim, read and write one message after the other, without Spark."""
        loop = bench.either(200, 500)
        raw.insert_many([raw_document(source, number) for number in range(loop)])

        def work() -> None:
            for _ in range(loop):
                found = raw.find_one_and_update(raw_claim(source), raw_lease(), **RAW_RESERVE)
                put = {
                    "$set": {"q": target, "payload": json.loads(json.dumps(found["payload"]))},
                    "$unset": {"token": ""},
                }
                assert (
                    raw.update_one(
                        {"_id": found["_id"], "token": found["token"]}, put
                    ).matched_count
                    == 1
                )

        return seconds(work, loop)

    reports: list[Any] = []

    count = bench.either(2, 5) * BATCH

    def ours() -> float:
        store(client, source, count)
        took = seconds(lambda: reports.extend(stage.run(spark, until_empty=True)), count)
        assert sum(each.written for each in reports) == count
        reports.clear()
        return took

    before, after = interleave(rounds, theirs, ours)
    label = f'stage, output="{output}", {BATCH} a batch'
    least = at_least(5000) if output == "move" else None
    bench.speed(f"{label}, against a raw loop", before, after, rounds * count)
    bench.row(label, "messages/s", [1 / each for each in after], rounds * count, least)


def ceiling(bench: Bench, url: str, client: Client, rounds: int) -> None:
    """Claim and acknowledge as a streaming query does, without the work between the two."""
    from pyspark.sql.streaming.datasource import ReadMaxRows

    from pyqueue.spark.columns import columns
    from pyqueue.spark.source import QueueDataSource

    queue, count = name(), bench.either(2, 5) * BATCH

    def ours() -> float:
        store(client, queue, count)
        given = {"uri": url, "queue": queue, "group": uuid4().hex, "maxWaitMs": "0"}
        reader: Any = QueueDataSource(given).streamReader(columns(None))
        former, offset = None, reader.initialOffset()
        began = time.perf_counter()
        while offset != former:  # a busy server may give less than a batch
            former, offset = offset, reader.latestOffset(offset, ReadMaxRows(BATCH))
        took = time.perf_counter() - began
        reader.stop()
        assert client.queue(queue).counts().total == 0
        return took / count

    (after,) = interleave(rounds, ours)
    label = f"ceiling of one group: claim and acknowledge batches of {BATCH}, without Spark's work"
    per_second = [1 / each for each in after]
    bench.row(label, "messages/s", per_second, rounds * count, at_least(15_000))


class Buckets:
    """Two buckets, and the ways of Spark that read the first one or pass its messages on."""

    def __init__(self, bench: Bench, spark: Any, url: str, client: Client, raw: Any) -> None:
        self.spark, self.url, self.client, self.raw = spark, url, client, raw
        self.source, self.target = (
            client.queue(name(), kind="bucket", pack=PACK) for _ in range(2)
        )
        self.target.reserve(0)
        self.count, self.few = bench.either(4, 50) * BATCH, bench.either(2, 5) * BATCH

    def fill(self) -> None:
        """Fill the first one, and empty the second one."""
        self.source.purge()
        self.target.purge()
        for _ in range(self.count // PACK):
            self.source.push_many([payload(number) for number in range(PACK)])

    def loop(self) -> float:
        """Insert, read and delete documents in one process. Return the seconds for each."""
        documents = [raw_document("packed", number) for number in range(self.few)]

        def work() -> None:
            self.raw.insert_many(documents, ordered=False)
            found = self.raw.find({"q": "packed"})
            assert len([json.dumps(each["payload"]) for each in found]) == self.few
            self.raw.delete_many({"q": "packed"})

        return seconds(work, self.few)

    def read(self) -> float:
        """Read all messages as a table."""
        self.fill()
        options = {"uri": self.url, "queue": self.source.name}
        frame = self.spark.read.format("pyqueue").options(**options).load()
        return seconds(frame.write.format("noop").mode("overwrite").save, self.count)

    def stream(self) -> float:
        """Pass all messages on by a stream."""
        self.fill()
        given = {"uri": self.url, "queue": self.source.name, "group": uuid4().hex}
        given["maxMessagesPerBatch"] = str(10 * BATCH)
        rows = self.spark.readStream.format("pyqueue").options(**given).load()
        writer = rows.writeStream.format("pyqueue").options(
            uri=self.url, queue=self.target.name, stage=uuid4().hex
        )
        with TemporaryDirectory() as folder:
            writer = writer.option("checkpointLocation", folder).trigger(availableNow=True)
            took = seconds(lambda: writer.start().awaitTermination(), self.count)
        assert self.target.counts().ready == self.count
        return took

    def stage(self) -> float:
        """Pass all messages on by a stage."""
        from pyqueue.spark import SparkStage

        self.fill()
        stage = SparkStage(
            uri=self.url,
            source=self.source.name,
            to=self.target.name,
            group="stage",
            max_messages=BATCH,
            namespace=self.client.namespace,
            transform=lambda df: df.select("id", "payload"),
        )
        took = seconds(lambda: list(stage.run(self.spark, until_empty=True)), self.count)
        assert self.target.counts().ready == self.count
        return took


def packed(bench: Bench, spark: Any, url: str, client: Client, raw: Any, rounds: int) -> None:
    """Read the messages of a bucket, and pass them on to another bucket."""
    both = Buckets(bench, spark, url, client, raw)
    before, *after = interleave(rounds, both.loop, both.read, both.stream, both.stage)
    labels = "batch read of a bucket", "stream from bucket to bucket", "stage from bucket to bucket"
    for label, took, least in zip(labels, after, (60_000, 60_000, None), strict=True):
        bound, n = None if least is None else at_least(least), rounds * both.count
        bench.speed(f"{label}, {both.count}, against a raw loop", before, took, n)
        bench.row(f"{label}, {both.count}", "messages/s", [1 / each for each in took], n, bound)
