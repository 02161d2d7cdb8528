"""The guarantees for batches that a query writes: the table of docs/how-to/spark-streams.md.

Each row of the table is a test here, for the two ways in which a query writes. All messages are
consumed at once and leave no history, so no id that is still stored can hide a second write.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import NAMESPACE_OID, uuid5

import pyarrow as pa
import pytest
from pyspark.sql.types import StringType, StructField, StructType

from pyqueue import ConfigurationError, Fenced
from pyqueue.spark import QueueDataSource, writers
from tests.spark.engine import in_a_task
from tests.spark.fakes import Flow

ROWS = StructType([StructField("id", StringType()), StructField("payload", StringType())])
DOCS = Path(__file__).parents[2] / "docs"


class Query:
    """A query that writes batches, and its consumer, who finishes each message at once."""

    def __init__(self, flow: Flow, database: str, way: str, id: str = "q", run: str = "r") -> None:
        self._flow, self._way, self._id, self._run = flow, way, id, run
        self._given = {"uri": database, "queue": flow.target, "stage": "s"}

    def _writer(self, number: int) -> Any:
        if self._way == "stream":
            return QueueDataSource(self._given).streamWriter(ROWS, False)
        return QueueDataSource(self._given | {"epoch": str(number)}).writer(ROWS, False)

    def tasks(self, number: int, rows: Sequence[int]) -> Callable[[], None]:
        """Run the tasks of a batch. Return its commit."""
        writer = self._writer(number)
        ids, payloads = [f"i{row}" for row in rows], [str(row) for row in rows]
        done = []
        for some in (slice(0, 2), slice(2, None)):
            batch = pa.RecordBatch.from_pydict({"id": ids[some], "payload": payloads[some]})
            with in_a_task(self._id, number, str(uuid5(NAMESPACE_OID, self._run))):
                done.append(writer.write(iter([batch])))
        numbers = (number,) if self._way == "stream" else ()
        return lambda: self._writer(number).commit(done, *numbers)

    def batch(self, number: int, rows: Sequence[int]) -> list[int]:
        """Write a batch. Return the rows that the consumer gets."""
        self.tasks(number, rows)()
        return self.consumed()

    def consumed(self) -> list[int]:
        """Return the rows that the consumer gets."""
        got = sorted(each.payload for each in self._flow.clean.pop_many(100, timeout=0))
        # Epochs of different numbers may be shown in several queues; here there is one.
        return [int(each) for each in got]


Make = Callable[..., Query]


@pytest.fixture(params=["stream", "foreachBatch"])
def make(
    request: pytest.FixtureRequest, flow: Flow, database: str, monkeypatch: pytest.MonkeyPatch
) -> Make:
    """Return a function that makes a query. A wait for another query takes no time."""
    rest = SimpleNamespace(sleep=lambda _: flow.rest_stages())
    monkeypatch.setattr(writers, "time", rest)
    return lambda id="q", run="r": Query(flow, database, request.param, id, run)


def test_repeated_batch(make: Make) -> None:
    query = make()
    assert query.batch(0, [1, 2, 3]) == [1, 2, 3]
    assert make(run="r2").batch(0, [3, 2, 1]) == []
    assert make(run="r3").batch(0, []) == []
    assert make(run="r3").batch(1, [4]) == [4]


def test_new_checkpoint(make: Make) -> None:
    assert make().batch(7, [1, 2]) == [1, 2]
    new = make("q2", "r2")
    assert new.batch(0, [3]) == [3]
    assert new.batch(1, [1]) == [1], "the ids are not known any more"


def test_deleted_queue(make: Make, flow: Flow) -> None:
    query = make()
    assert query.batch(3, [1]) == [1]
    flow.client.delete_queue(flow.target)
    assert query.batch(0, [2]) == [2]
    assert query.batch(1, [3]) == [3]


def test_two_queries_with_one_stage(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second waits until the first has rested, and fails if it does not rest."""
    first, second = make(), make("q2", "r2")
    numbers = iter(range(9))
    assert first.batch(next(numbers), [1]) == [1]
    busy = SimpleNamespace(sleep=lambda _: first.batch(next(numbers), [2]))
    monkeypatch.setattr(writers, "time", busy)
    with pytest.raises(ConfigurationError, match="use a different stage name for each query"):
        second.batch(0, [3])
    monkeypatch.undo()


def test_checkpoint_that_was_put_back(make: Make) -> None:
    query = make()
    for number in range(3):
        query.batch(number, [number])
    with pytest.raises(ConfigurationError, match=r"batch 1 of .* than batch 2, .*stage forget"):
        make(run="r2").batch(1, [1])


def test_same_number_with_other_rows(make: Make) -> None:
    make().batch(0, [1, 2])
    with pytest.raises(ConfigurationError, match=r"without id 's~i3'; .*uuid\(\)"):
        make(run="r2").batch(0, [1, 2, 3])
    assert make(run="r2").batch(0, [2]) == []


@pytest.mark.parametrize("at", ["before its tasks", "before its commit"])
def test_suspended_query(make: Make, at: str) -> None:
    """Another query takes the source over, and writes the same rows."""
    first, second = make(), make("q2", "r2")
    first.batch(0, [0])
    commit = first.tasks(1, [1, 2]) if at == "before its commit" else None
    assert second.batch(0, [1, 2]) == [1, 2]
    with pytest.raises(Fenced, match="another run has taken over"):
        commit() if commit else first.batch(1, [1, 2])
    assert first.consumed() == []
    assert make(run="r1b").batch(1, [5]) == [5], "its next start is admitted"
    with pytest.raises(Fenced):
        second.batch(1, [6])


def test_every_row_of_the_table_is_a_test() -> None:
    text = (DOCS / "how-to" / "spark-streams.md").read_text()
    named = re.findall(r"`(test_\w+)`", text[text.index("## When a batch") :].split("\n## ")[0])
    there = [name for name in globals() if name.startswith("test_") and "table" not in name]
    assert sorted(named) == sorted(there)
