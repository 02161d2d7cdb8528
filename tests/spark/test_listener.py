"""The listener of a session: its numbers, and its thread. No session is needed."""

from __future__ import annotations

import json
from collections import Counter
from threading import Event, current_thread, main_thread
from types import SimpleNamespace
from typing import Any

import pytest

from pyqueue.backends.claims.groups import ClaimProgress
from pyqueue.spark import QueueProgressListener
from pyqueue.spark import listener as module
from pyqueue.spark.listener import SourceNumbers
from pyqueue.spark.offsets import Offset
from tests.spark.engine import Engine, seen, source
from tests.spark.fakes import Flow
from tests.spark.test_records import PAYLOADS, into, numbers
from tests.support.eventually import eventually

NOWHERE = "mongodb://127.0.0.1:1/?serverSelectionTimeoutMS=100"


def progress(engine: Engine, rows: int, query: str = "q1") -> Any:
    """Return the event of the last committed batch of a query."""
    end = engine.checkpoint.offsets[engine.checkpoint.committed - 1]
    latest = engine.reader.reportLatestOffset()
    return event(end, rows, query, json.dumps(latest))


def event(end: dict[str, Any], rows: int, query: str = "q1", latest: str = "None") -> Any:
    one = SimpleNamespace(endOffset=json.dumps(end), latestOffset=latest, numInputRows=rows)
    return SimpleNamespace(progress=SimpleNamespace(id=query, sources=[one]))


def terminated(query: str = "q1", exception: str | None = None) -> Any:
    return SimpleNamespace(id=query, exception=exception)


def offset(n: int, queue: str = "raw") -> dict[str, Any]:
    fields = {"n": n, "token": "t", "queue": queue, "group": "g", "namespace": "pyqueue"}
    return {**fields, "uri": NOWHERE}


def only(listener: QueueProgressListener) -> SourceNumbers:
    """Return the numbers of the only source of the only query."""
    ((numbers,),) = listener.queries.values()
    return numbers


def ended(listener: QueueProgressListener) -> None:
    """Wait until the thread has nothing to do and ends."""
    eventually(lambda: listener._thread is None, "the end of the thread")


def test_listener_has_the_numbers_of_a_query(flow: Flow, database: str) -> None:
    """Of five messages one is bad, and one is taken by another consumer."""
    listener = QueueProgressListener()
    flow.raw.push_many(PAYLOADS)
    flow.raw.push_many([5, 6])
    engine = numbers(flow, database, into([]), maxMessagesPerBatch="5")
    assert engine.batch()
    flow.steal(3)
    listener.onQueryProgress(progress(engine, rows=4))
    eventually(lambda: only(listener).buried, "the acknowledgement")
    found = only(listener)
    assert (found.queue, found.group) == (flow.source, "g")
    assert (found.rows, found.claim, found.ready) == (4, 1, 2)
    assert found.oldest_age is not None
    assert found.oldest_age >= 0
    assert (found.buried, found.lost, found.fenced) == (1, 1, 0)
    assert engine.batch()
    assert not engine.batch()  # the stream acknowledges this batch itself
    listener.onQueryProgress(progress(engine, rows=2))
    found = only(listener)
    assert (found.rows, found.claim, found.ready, found.oldest_age) == (6, 2, 0, None)
    ended(listener)
    assert (only(listener).buried, only(listener).lost) == (1, 1)
    engine.reader.stop()


def test_listener_counts_a_takeover_once(flow: Flow, database: str) -> None:
    listener = QueueProgressListener()
    flow.raw.push_many(range(3))
    engine = Engine(source(flow, database), seen(Counter()))
    engine.batch()
    engine.reader.stop()
    flow.lapse()
    other = Engine(source(flow, database), seen(Counter()))
    other.batch()
    listener.onQueryProgress(progress(engine, rows=2))
    eventually(lambda: only(listener).fenced, "the refusal")
    error = "pyqueue.errors.Fenced: group 'g' of queue 'raw' was taken over by another runner"
    listener.onQueryTerminated(terminated(exception=f"[ERROR] ... {error}"))
    assert only(listener).fenced == 1
    assert len(flow.left()) == 3
    ended(listener)
    other.reader.stop()


def test_query_that_ends_fenced_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Offset, "acknowledge", lambda self: ClaimProgress(1, 1, "t"))
    listener = QueueProgressListener()
    listener.onQueryProgress(event(offset(1), 5))
    listener.onQueryProgress(event(offset(1), 5, query="q2"))
    listener.onQueryTerminated(terminated(exception="... pyqueue.errors.Fenced: taken over"))
    listener.onQueryTerminated(terminated("q2", exception="ZeroDivisionError"))
    assert [each.fenced for (each,) in listener.queries.values()] == [1, 0]
    ended(listener)


def test_no_io_happens_on_the_thread_of_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events are accepted while the server is silent, and only the latest offset counts."""
    gate, began = Event(), Event()
    done: list[tuple[int, Any]] = []

    def acknowledge(self: Offset) -> ClaimProgress:
        began.set()
        gate.wait()
        done.append((self.n, current_thread()))
        return ClaimProgress(self.n, self.n, "t")

    monkeypatch.setattr(Offset, "acknowledge", acknowledge)
    listener = QueueProgressListener()
    listener.onQueryProgress(event(offset(1), 10))
    began.wait()
    for n in range(2, 6):
        listener.onQueryProgress(event(offset(n), 10))
    listener.onQueryTerminated(terminated())
    assert done == []
    assert (only(listener).rows, only(listener).claim) == (50, 5)
    gate.set()
    ended(listener)
    assert [n for n, _ in done] == [1, 5]
    assert main_thread() not in {thread for _, thread in done}


def test_thread_starts_again_and_no_error_ends_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pyqueue")
    done: list[int] = []

    def acknowledge(self: Offset) -> ClaimProgress:
        if self.n == 1:
            raise ZeroDivisionError("unexpected")
        done.append(self.n)
        return ClaimProgress(self.n, self.n, "t")

    monkeypatch.setattr(Offset, "acknowledge", acknowledge)
    listener = QueueProgressListener()
    listener.onQueryProgress(event(offset(1), 1))
    ended(listener)
    assert "the last batch stays reserved until the next batch starts: unexpected" in caplog.text
    listener.onQueryProgress(event(offset(2), 1))
    ended(listener)
    assert done == [2]


def test_source_without_an_address_has_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its URI contains a password, which is not in the offset."""
    fields = offset(3)
    del fields["uri"]
    listener = QueueProgressListener()
    listener.onQueryProgress(event(fields, 7, latest='{"ready": 5, "oldestAgeSeconds": 1.5}'))
    assert only(listener) == SourceNumbers("raw", "g", 7, 3, 5, 1.5)
    assert listener._thread is None


def test_listener_forgets_the_oldest_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_QUERIES", 2)
    monkeypatch.setattr(Offset, "acknowledge", lambda self: ClaimProgress(1, 1, "t"))
    listener = QueueProgressListener()
    for query in ("q1", "q2", "q3"):
        listener.onQueryProgress(event(offset(1), 1, query))
    assert [*listener.queries] == ["q2", "q3"]
    ended(listener)
