"""The instant and the queue that the rows of a stage's transform give to their messages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    DataType,
    DoubleType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from pyqueue import Client, ConfigurationError
from tests.spark.fakes import Crash, Flow, Frame, meddled, no_session, outputs
from tests.support.eventually import eventually
from tests.support.samples import at_each, some_or_all

HOUR = timedelta(hours=1)
TYPES: dict[str, DataType] = {
    "id": StringType(),
    "payload": StringType(),
    "queue": StringType(),
    "when": TimestampType(),
    "delay": DoubleType(),
}

pytestmark = pytest.mark.usefixtures("faked")


def saying(fields: Callable[[int], dict[str, Any]], *names: str) -> Callable[[Frame], Frame]:
    """Return a transform whose rows have exactly these fields, by their payload."""
    schema = StructType([StructField(name, TYPES[name]) for name in ("id", "payload", *names)])
    arrow = to_arrow_schema(schema, timezone="UTC")

    def transform(frame: Frame) -> Frame:
        rows = [
            dict.fromkeys(arrow.names)
            | {"id": row["id"], "payload": row["payload"]}
            | fields(int(row["payload"]))
            for row in frame.rows()
        ]
        return Frame(pa.Table.from_pylist(rows, arrow), schema)

    return transform


@outputs
def test_stage_rows_become_ready_when_they_say(flow: Flow, output: str) -> None:
    now = datetime.now(UTC)
    late = {"delay": 600.0}
    said: list[dict[str, Any]] = [{"when": now + HOUR}, late, {"when": now - HOUR}, {}, late]
    flow.raw.push_many(range(len(said)))
    transform = saying(lambda n: said[n], "when", "delay")
    report = flow.stage(transform, output=output).run_once(no_session)
    assert (report.written, flow.left()) == (len(said), [])

    def states() -> dict[int, str]:
        return {n: each.state for n, each in flow.messages(flow.target).items()}

    expected = {n: "scheduled" if n in (0, 1, 4) else "ready" for n in range(len(said))}
    eventually(lambda: states() == expected, "the ready messages")
    messages = flow.messages(flow.target)
    assert abs(messages[0].when - (now + HOUR)) < timedelta(milliseconds=1)
    assert all(timedelta(minutes=5) < messages[n].when - now < HOUR for n in (1, 4))
    assert messages[2].when > now - HOUR / 2


@outputs
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"when": datetime.now(UTC), "delay": 1.0}, "^when, delay: .* has both"),
        ({"delay": -1.0}, r"^delay: -1.0 is not allowed; .* in (the row with id|row 1)"),
        ({"when": datetime(8000, 1, 1, tzinfo=UTC)}, "^when: .* before the year 8000; in"),
    ],
    ids=["both", "negative", "too far"],
)
def test_stage_row_with_an_invalid_instant_is_refused(
    flow: Flow, output: str, fields: dict[str, Any], text: str
) -> None:
    """Nothing is written, and the batch is released unchanged."""
    flow.raw.push_many(range(2))
    transform = saying(lambda n: fields if n else {}, "when", "delay")
    with pytest.raises(ConfigurationError, match=text):
        flow.stage(transform, output=output).run_once(no_session)
    flow.check_released(2)


# ---- queue


@pytest.fixture
def names(flow: Flow) -> list[str]:
    """Two targets."""
    return [f"{flow.target}-{name}" for name in ("even", "odd")]


@outputs
def test_stage_rows_go_to_the_queues_that_they_name(
    flow: Flow, names: list[str], output: str
) -> None:
    """The rows of one queue become ready later. A message without a row is finished."""
    flow.raw.push_many(range(6))

    def said(number: int) -> dict[str, Any]:
        return {"queue": names[number % 2], "delay": 600.0 if number % 2 else None}

    def transform(frame: Frame) -> Frame:
        rows = frame.made_of([row for row in frame.rows() if row["payload"] != "4"])
        return saying(said, "queue", "delay")(rows)

    report = flow.stage(transform, output=output, to=names).run_once(no_session)
    assert (report.claimed, report.written) == (6, 5)
    even, odd = (flow.messages(name) for name in names)
    assert (sorted(even), sorted(odd), flow.left()) == ([0, 2], [1, 3, 5], [])
    assert {each.state for each in odd.values()} == {"scheduled"}
    assert set(names) <= {each.name for each in flow.client.queues()}


@outputs
@pytest.mark.parametrize("name", [None, "elsewhere"])
def test_stage_row_of_another_queue_is_refused(
    flow: Flow, names: list[str], output: str, name: str | None
) -> None:
    """Nothing is written, and the batch is released unchanged."""
    flow.raw.push_many(range(2))
    transform = saying(lambda n: {"queue": name if n else names[0]}, "queue")
    said = "null" if name is None else repr(name)
    with pytest.raises(ConfigurationError, match=f"^queue: {said} is not one of {names[0]}, "):
        flow.stage(transform, output=output, to=names).run_once(no_session)
    assert [flow.stored(name) for name in names] == [[], []]
    flow.check_released(2)


def test_stage_with_a_list_needs_the_queue_column(flow: Flow, names: list[str]) -> None:
    """Also with a list of one: the name in a row would count for nothing."""
    flow.raw.push(0)
    with pytest.raises(ConfigurationError, match="no column 'queue'"):
        flow.stage(saying(lambda n: {}), to=names[:1]).run_once(no_session)
    assert flow.left() == [0]


@some_or_all
@outputs
def test_stage_choice_that_dies_at_any_command_is_whole(
    shared: Client, output: str, few: int | None
) -> None:
    """Each message is in one of the targets once."""

    def run(at: int) -> int:
        flow = Flow(shared)
        names = [f"{flow.target}-{name}" for name in ("even", "odd")]
        transform = saying(lambda n: {"queue": names[n % 2]}, "queue")
        flow.raw.push_many(range(4))
        with meddled(shared, at) as meddler, suppress(Crash):
            flow.stage(transform, output=output, to=names).run_once(no_session)
        flow.work(transform, output=output, to=names)
        expected = {names[0]: [0, 2], names[1]: [1, 3]}
        stored = {name: sorted(each["payload"] for each in flow.stored(name)) for name in names}
        assert stored == expected, f"died at command {at}"
        assert not flow.left()
        return meddler.count

    assert at_each(run, few) > 12
