"""Stages without a target: a function writes each claim to a table, under the claim's number.

A dict stands in for a table whose directories are overwritten. The last test has a real session.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pyqueue import Client, ConfigurationError
from pyqueue.backends.claims import acknowledging
from pyqueue.requests import Delete, Find, Plan
from pyqueue.spark import SparkStage
from tests.spark.fakes import Crash, Flow, Frame, Meddler, meddled, no_session, numbers
from tests.support.samples import at_each, some_or_all

Table = dict[int, list[int]]
Write = Callable[[Frame, int], None]


def into(table: Table, check: Callable[[list[int]], object] = len) -> Write:
    """Return a function that overwrites the part of its claim, and then may fail."""

    def write(frame: Frame, number: int) -> None:
        table[number] = sorted(numbers(frame))
        check(table[number])

    return write


def then_die(write: Callable[[Any, int], None], meddler: Meddler) -> Callable[[Any, int], None]:
    """Return a function whose process dies once it has written."""

    def dying(frame: Any, number: int) -> None:
        write(frame, number)
        meddler.die()

    return dying


def rows(table: Table) -> list[int]:
    return sorted(row for part in table.values() for row in part)


@pytest.mark.usefixtures("faked")
def test_sink_writes_each_claim_under_its_number(flow: Flow) -> None:
    flow.raw.push_many(range(5))
    table: Table = {}
    reports = flow.work(into(table), to=(), most=3)
    assert table == {1: [0, 1, 2], 2: [3, 4]}
    counted = [(each.claimed, each.written, each.dropped, each.failed) for each in reports]
    assert counted == [(3, 3, 0, 0), (2, 2, 0, 0)]
    assert not flow.left()


@pytest.mark.usefixtures("faked")
def test_sink_may_ignore_the_number(flow: Flow) -> None:
    flow.raw.push_many(range(3))
    seen: list[int] = []
    flow.work(lambda frame: seen.extend(numbers(frame)), to=())
    assert (sorted(seen), flow.left()) == ([0, 1, 2], [])


@pytest.mark.usefixtures("faked")
@some_or_all
def test_sink_that_dies_at_any_command_writes_once(shared: Client, few: int | None) -> None:
    def run(at: int) -> int:
        flow, table = Flow(shared), Table()
        flow.raw.push_many(range(5))
        with meddled(shared, at) as meddler, suppress(Crash):
            flow.stage(into(table), to=(), most=3).run_once(no_session)
        flow.work(into(table), to=(), most=4)
        assert rows(table) == [*range(5)], f"died at command {at}: {table}"
        assert not flow.left()
        return meddler.count

    assert at_each(run, few) > 10


@pytest.mark.usefixtures("faked")
def test_sink_that_dies_while_it_finishes_writes_once(flow: Flow) -> None:
    """The server has deleted some messages of the claim. The rest must not replace them."""
    flow.raw.push_many(range(5))
    table: Table = {}

    def partly(*given: Any) -> Plan[int]:
        match = given[1]
        some = (yield from Find(match, limit=2))[:2]
        yield from Delete({"_id": {"$in": [each["_id"] for each in some]}}, many=True)
        meddler.die()

    with meddled(flow.client) as meddler, pytest.MonkeyPatch.context() as patch:
        patch.setattr(acknowledging, "finish", partly)
        with pytest.raises(Crash):
            flow.stage(into(table), to=()).run_once(no_session)
    assert len(flow.left()) == 3
    flow.raw.push(5)
    flow.work(into(table), to=())
    assert (table, flow.left()) == ({1: [0, 1, 2, 3, 4], 2: [5]}, [])


@pytest.mark.usefixtures("faked")
def test_sink_gets_the_same_claim_after_a_death(flow: Flow) -> None:
    """A table that skips a number which it has would lose the rows of another claim."""
    flow.raw.push_many(range(4))
    claims: list[tuple[int, list[int]]] = []

    def write(frame: Frame, number: int) -> None:
        claims.append((number, sorted(numbers(frame))))
        if len(claims) == 1:
            flow.raw.push(4)

    with meddled(flow.client) as meddler, pytest.raises(Crash):
        flow.stage(then_die(write, meddler), to=()).run_once(no_session)
    flow.work(write, to=())
    assert claims == [(1, [0, 1, 2, 3]), (1, [0, 1, 2, 3]), (2, [4])]


@pytest.mark.usefixtures("faked")
def test_sink_finds_the_message_that_makes_it_fail(flow: Flow) -> None:
    """The other messages are written once, and no try of theirs is counted."""
    flow.raw.push_many(range(11))
    table: Table = {}

    def check(part: list[int]) -> None:
        if 7 in part:
            table.popitem()
            raise ArithmeticError("seven")

    flow.work(into(table, check), to=(), max_tries=2)
    assert rows(table) == [each for each in range(11) if each != 7]
    (dead,) = flow.buried().values()
    assert (dead.payload, dead.dead and dead.dead["tries"], flow.left()) == (7, 2, [])
    assert dead.error is not None
    assert dead.error["message"] == "seven"


@pytest.mark.usefixtures("faked")
def test_sink_that_is_down_keeps_its_messages(flow: Flow) -> None:
    """The error ends the second call: it is not one message that makes the function fail."""
    flow.raw.push_many(range(8))
    sizes: list[int] = []

    def down(frame: Frame) -> None:
        sizes.append(len(frame.rows()))
        raise ConnectionError("no table today")

    stage = flow.stage(down, to=())
    assert (stage.run_once(no_session).failed, sizes) == (1, [8, 4, 2, 1])
    for _ in range(3):
        with pytest.raises(ConnectionError, match="no table today"):
            stage.run_once(no_session)
    assert sizes[4:] == [1, 1, 1], "a sink that is down gets single messages"
    assert (flow.left(), flow.buried(), flow.held()) == ([*range(8)], {}, False)
    assert sum(each.tries for each in flow.raw.peek(10)) == 4
    table: Table = {}
    stage = flow.stage(into(table), to=())
    while stage.run_once(no_session).claimed:
        pass
    assert rows(table) == [*range(8)]


def sink_dies_at_13(flow: Flow, *, max_tries: int) -> None:
    """Work on 20 messages, of which one kills the process of the sink, until it is buried."""
    table, deaths = Table(), 0
    flow.raw.push_many(range(20))
    while flow.left():
        with meddled(flow.client) as meddler:

            def write(frame: Frame, number: int, meddler: Any = meddler) -> None:
                if 13 in numbers(frame):
                    meddler.die()
                into(table)(frame, number)

            try:
                flow.work(write, to=(), max_tries=max_tries)
            except Crash:
                deaths += 1
        assert deaths < 30
    assert rows(table) == [each for each in range(20) if each != 13]


@pytest.mark.usefixtures("faked")
@pytest.mark.parametrize("max_tries", [1, 5])
def test_sink_finds_the_message_that_kills_it(shared: Client, max_tries: int) -> None:
    """Each death ends the process. The message is buried at last, and it alone."""
    flow = Flow(shared)
    sink_dies_at_13(flow, max_tries=max_tries)
    ((payload, dead),) = flow.buried().items()
    assert (payload, dead.error and dead.error["message"]) == (
        13,
        "the process ended each time it worked on this message",
    )


@pytest.mark.usefixtures("faked")
def test_sink_that_returns_a_frame_is_refused(flow: Flow) -> None:
    """The messages would be finished, and written nowhere."""
    flow.raw.push_many(range(3))
    with pytest.raises(ConfigurationError, match=r"^to: .* returned Frame"):
        flow.stage(lambda frame: frame, to=()).run_once(no_session)
    flow.check_released(3)


def test_sink_refuses_the_batch_of_a_stream(flow: Flow) -> None:
    with pytest.raises(ConfigurationError, match=r"^to: a stage without a target"):
        flow.stage(into({}), to=()).foreach_batch(None)  # type: ignore[arg-type]


@pytest.mark.spark_long
def test_sink_writes_parquet_once(spark: Any, flow: Flow, database: str, tmp_path: Path) -> None:
    """The process dies after the files are written and before the batch is committed."""
    flow.raw.push_many(range(5))

    def write(df: Any, number: int) -> None:
        df.write.mode("overwrite").parquet(f"{tmp_path}/batch={number}")

    with meddled(flow.client) as meddler, pytest.raises(Crash):
        flow.stage(then_die(write, meddler), to=(), most=3).run_once(lambda: spark)
    assert spark.read.parquet(str(tmp_path)).count() == 3
    stage = SparkStage(uri=database, source=flow.source, group="g", transform=write, max_messages=3)
    reports = [*stage.run(spark, until_empty=True)]
    assert [each.written for each in reports] == [3, 2]
    stored = spark.read.parquet(str(tmp_path)).select("payload", "batch").collect()
    assert sorted((int(row.payload), row.batch) for row in stored) == [
        *((number, 1) for number in range(3)),
        *((number, 2) for number in (3, 4)),
    ]
    assert not flow.left()
