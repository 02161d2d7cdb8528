"""What the rows of a stage's transform say of their messages: the instant, and the queue."""

from __future__ import annotations

from collections.abc import Callable
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

from pyqueue import ConfigurationError, Message
from tests.spark.fakes import Flow, Frame, no_session
from tests.support.eventually import eventually

HOUR = timedelta(hours=1)
TYPES: dict[str, DataType] = {
    "id": StringType(),
    "payload": StringType(),
    "queue": StringType(),
    "when": TimestampType(),
    "delay": DoubleType(),
}

outputs = pytest.mark.parametrize("output", ["move", "transaction"])
pytestmark = pytest.mark.usefixtures("faked")


def saying(fields: Callable[[int], dict[str, Any]], *names: str) -> Callable[[Frame], Frame]:
    """Return a transform whose rows have these fields, by their payload, and no others."""
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


def found(flow: Flow, name: str) -> dict[int, Message[Any]]:
    """Return the messages of a queue by payload, in any state."""
    queue = flow.client.queue(name)
    got = [queue.get(each["_id"]) for each in flow.stored(name)]
    return {each.payload: each for each in got if isinstance(each, Message)}


@outputs
def test_stage_rows_become_ready_when_they_say(flow: Flow, output: str) -> None:
    now = datetime.now(UTC)
    said: list[dict[str, Any]] = [
        {"when": now + HOUR},
        {"delay": 600.0},
        {"when": now - HOUR},
        {},
        {"delay": 600.0},
    ]
    flow.raw.push_many(range(len(said)))
    report = flow.stage(saying(lambda n: said[n], "when", "delay"), output=output).run_once(
        no_session
    )
    assert (report.written, flow.left()) == (len(said), [])
    scheduled = {number for number in range(len(said)) if number in (0, 1, 4)}

    def states() -> dict[int, str]:
        return {n: each.state for n, each in found(flow, flow.target).items()}

    expected = {n: "scheduled" if n in scheduled else "ready" for n in range(len(said))}
    eventually(lambda: states() == expected, "the ready messages")
    messages = found(flow, flow.target)
    assert abs(messages[0].when - (now + HOUR)) < timedelta(milliseconds=1)
    assert all(timedelta(minutes=5) < messages[n].when - now < HOUR for n in (1, 4))
    assert messages[2].when > now - HOUR / 2


@outputs
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"when": datetime.now(UTC), "delay": 1.0}, "^when, delay: .* has both"),
        ({"delay": -1.0}, r"^delay: -1.0 is not allowed: .* in (the row with id|row 1)"),
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
    assert flow.written() == []
    assert [(each.state, each.tries) for each in flow.raw.peek()] == [("ready", 0)] * 2
