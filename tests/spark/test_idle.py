"""The cost of an idle stream or stage. Only the last test needs a session."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any

import pymongo
import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows

from pyqueue import Client
from pyqueue.backends.claims.claims import NamedClaims
from pyqueue.queue_base import backend_of
from pyqueue.requests import Command, Find
from pyqueue.runtime.connecting import Connected, Connection, runner_of
from pyqueue.spark import idle as module
from pyqueue.spark.addresses import NamespaceAddress, TaskClient, client_of
from tests.spark import programs
from tests.spark.engine import Engine, seen, source
from tests.spark.fakes import Flow, no_session
from tests.spark.processes import SLOW_S, spark_eventually
from tests.support.eventually import eventually

LIMIT = ReadMaxRows(2)


@contextmanager
def commands(client: Connected[Connection]) -> Iterator[list[Command[Any]]]:
    """Collect the commands of a client."""
    driver: Any = runner_of(client).open()
    sent: list[Command[Any]] = []
    send = driver._send

    def collected(request: Command[Any]) -> Any:
        sent.append(request)
        return send(request)

    driver._send = collected
    try:
        yield sent
    finally:
        del driver._send


def reader_client(database: str) -> TaskClient:
    """Return the client of the readers of this process."""
    return client_of(NamespaceAddress.of(database, None, "pyqueue"))


def idle(flow: Flow, database: str, **options: str) -> tuple[Any, dict[str, Any]]:
    """Return the reader of a stream that has emptied its queue, and its last offset."""
    flow.raw.push_many(range(2))
    rows: Counter[Any] = Counter()
    engine = Engine(source(flow, database, **options), seen(rows))
    engine.batch()
    assert sum(rows.values()) == 2
    (end,) = engine.checkpoint.offsets
    assert engine.reader.latestOffset(end, LIMIT) == end
    return engine.reader, end


def test_idle_stream_reads_rarely_and_writes_nothing(flow: Flow, database: str) -> None:
    """Spark asks a hundred times a second. Each scan is one or two reads."""
    reader, end = idle(flow, database, maxWaitMs="0")
    began = time.monotonic()
    with commands(reader_client(database)) as sent:
        for _ in range(200):
            assert reader.latestOffset(end, LIMIT) == end
            reader.reportLatestOffset()
            reader.commit(end)
        scans = (time.monotonic() - began) / module.IDLE_LOOK_S + 1
    messages = [each for each in sent if isinstance(each, Find)]
    assert [each for each in sent if not isinstance(each, Find)] == []
    assert len(messages) <= 2 * scans + 2  # the record of the queue may be read again
    reader.stop()


def test_signal_wakes_an_idle_stream(
    flow: Flow, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else can wake it within the time of this test."""
    monkeypatch.setattr(module, "IDLE_LOOK_S", 10 * SLOW_S)
    reader, end = idle(flow, database, maxWaitMs="60000")
    ends: list[dict[str, Any]] = []

    def ask() -> None:
        while not ends or ends[-1] == end:
            ends.append(reader.latestOffset(end, LIMIT))

    asking = Thread(target=ask)
    asking.start()
    with Client(database) as producer:
        producer.queue(flow.source).push("more")
        eventually(lambda: not asking.is_alive(), "an answer with the message")
    asking.join()
    assert ends[-1]["n"] == end["n"] + 1
    reader.stop()


def test_delayed_message_is_seen_without_a_signal(
    flow: Flow, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "IDLE_LOOK_S", 10 * SLOW_S)
    flow.raw.push("early")
    flow.raw.push("late", delay=1.5)
    engine = Engine(source(flow, database, maxWaitMs="10"), seen(Counter()))
    assert engine.batch()
    eventually(engine.batch, "a batch with the delayed message")
    engine.reader.stop()


@pytest.mark.parametrize(("delay", "waits"), [("1h", True), ("1ms", False)])
def test_batch_waits_for_enough_messages(
    flow: Flow, database: str, monkeypatch: pytest.MonkeyPatch, delay: str, waits: bool
) -> None:
    monkeypatch.setattr(module, "IDLE_LOOK_S", 0.0)
    given = {"minMessagesPerBatch": "3", "maxMessagesPerBatch": "3", "maxTriggerDelay": delay}
    reader, end = idle(flow, database, maxWaitMs="0", **given)  # the first batch has two
    flow.raw.push_many(range(2))
    if waits:
        assert reader.latestOffset(end, LIMIT) == end
        assert flow.raw.counts().ready == 2
    else:
        eventually(lambda: reader.latestOffset(end, LIMIT) != end, "a batch after the delay")
    flow.raw.push_many(range(2))
    assert reader.latestOffset(end, LIMIT)["n"] == end["n"] + 1
    assert flow.raw.counts().ready == 2
    reader.stop()
    now = Engine(source(flow, database, **given), seen(Counter()), now=True)
    assert now.run() > 0, "the trigger availableNow does not wait"


def test_available_now_never_waits(
    flow: Flow, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def waits(*args: Any) -> None:
        raise AssertionError("it waits")

    monkeypatch.setattr(module.IdleWait, "look", waits)
    flow.raw.push_many(range(3))
    engine = Engine(source(flow, database), seen(Counter()), now=True)
    eventually(lambda: flow.raw.counts().ready == 3, "ready messages")
    assert engine.run() in (1, 2)


def test_idle_query_that_was_fenced_stands_by(
    flow: Flow, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "IDLE_LOOK_S", 0.0)
    reader, end = idle(flow, database, maxWaitMs="0")
    claims = NamedClaims(backend_of(flow.raw), "g")
    token = runner_of(flow.client).run(claims.adopt(600))
    flow.raw.push(1, delay=600)
    assert reader.latestOffset(end, LIMIT) == end
    flow.raw.push(2)
    assert reader.latestOffset(end, LIMIT) == end
    assert runner_of(flow.client).run(claims.progress(token)).claimed == end["n"]
    reader.stop()


@pytest.mark.usefixtures("faked")
def test_idle_stage_reads_and_writes_nothing(flow: Flow) -> None:
    flow.raw.push_many(range(3))
    stage = flow.stage()
    assert stage.run_once(no_session).written == 3
    with commands(flow.client) as sent:
        for _ in range(10):
            assert stage.run_once(no_session).claimed == 0
    assert [each for each in sent if not isinstance(each, Find)] == []
    assert len(sent) <= 22


# ---- the time of one scan


class Clock:
    """A clock, and a listener that hears nothing. Each wait takes its whole time."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.heard = False
        self.waits: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def wait(self, timeout: float) -> bool:
        self.waits.append(timeout)
        self.now += timeout
        return self.heard


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def wait(clock: Clock, max_wait_s: float = 0.1) -> module.IdleWait:
    listener: Any = clock
    return module.IdleWait(max_wait_s, lambda: listener)


def poll(clock: Clock, one: module.IdleWait, times: int) -> list[float]:
    """Ask many times whether to scan an empty queue. Return the times of the scans."""
    scans = []
    for _ in range(times):
        if one.look():
            scans.append(clock.now)
            one.rest(float("inf"))
        one.answered()
        clock.now += 0.01
    return scans


def test_first_scan_and_each_after_a_batch_never_wait(clock: Clock) -> None:
    one = wait(clock)
    for _ in range(3):
        assert one.look()
        one.answered()
        clock.now += 5  # the batch
    assert clock.waits == []


def test_idle_scans_are_two_seconds_apart(clock: Clock) -> None:
    scans = poll(clock, wait(clock), 1000)
    _, *gaps = (later - earlier for earlier, later in pairwise(scans))  # the first one listens
    assert len(gaps) > 10
    assert all(2 <= gap < 2.2 for gap in gaps)


def test_scan_comes_when_a_message_becomes_ready(clock: Clock) -> None:
    one = wait(clock)
    one.look()
    one.rest(0.35)
    began = clock.now
    one.answered()
    assert one.look()  # the subscription is new: a message may have come before it
    one.rest(0.35)
    while not one.look():
        one.answered()
        clock.now += 0.01
    assert 0.35 <= clock.now - began < 0.37


def test_query_that_never_waits_hears_no_signals(clock: Clock) -> None:
    def listen() -> Any:
        raise AssertionError("it listens")

    poll(clock, module.IdleWait(0, listen), 1000)


def test_sources_of_a_query_share_the_wait(clock: Clock) -> None:
    """Spark asks one source after the other. All of them together wait no longer than one."""
    sources = [wait(clock) for _ in range(4)]
    for one in sources:
        one.look()
        one.rest(float("inf"))
        one.answered()
    for _ in range(10):
        began = clock.now
        for one in sources:
            if one.look():
                one.rest(float("inf"))
            one.answered()
        clock.now += 0.01
        assert clock.now - began <= 0.1 + 0.011


def test_source_beside_a_busy_one_never_waits_but_hears(clock: Clock) -> None:
    one = wait(clock)
    for _ in range(2):
        assert one.look()
        one.rest(float("inf"))
        one.answered()
    for _ in range(5):
        clock.now += 0.3  # the batches of the other source
        assert not one.look()
        one.answered()
    clock.heard = True
    clock.now += 0.3
    assert one.look()
    assert sum(clock.waits) == 0


# ---- a real query


@pytest.mark.slow
@pytest.mark.own_mongod
@pytest.mark.xdist_group("spark")
def test_idle_query_sends_three_commands_a_second(spark: Any, url: str, tmp_path: Path) -> None:
    """Counted by the server: all that the query sends, the reads of the signals included."""
    with Client(url, signals="none:") as client, pymongo.MongoClient[Any](url) as mongo:
        client.queue("raw").push_many(range(5))
        writer = programs.stream(spark, url, "raw", group="g").writeStream.format("pyqueue")
        writer = writer.options(uri=url, queue="clean", stage="clean")
        query = writer.option("checkpointLocation", str(tmp_path)).start()
        try:
            spark_eventually(
                lambda: client.queue("raw").counts().total == 0, "an empty source", query
            )

            def counted() -> tuple[float, dict[str, int]]:
                status = mongo.admin.command("serverStatus")
                return time.monotonic(), dict(status["opcounters"])

            time.sleep(3)  # the last batch's files and connections are done with
            began, before = counted()
            time.sleep(20)
            ended, after = counted()
            spent = {name: after[name] - before[name] for name in after}
            print(json.dumps(spent))
            seconds = ended - began
            assert spent["query"] + spent["getmore"] <= 3 * seconds
            assert spent["insert"] + spent["update"] + spent["delete"] <= seconds
        finally:
            query.stop()
