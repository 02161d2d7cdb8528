"""Rows that cannot be messages: with ``onBadRow`` "bury" they go to the dead-letter queue, once."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    DataType,
    DecimalType,
    DoubleType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from pyqueue import ConfigurationError, DuplicateKey, InvalidMessage, Message
from pyqueue.backends.bulk import staging
from pyqueue.errors import Fenced
from pyqueue.payloads import LIMIT
from pyqueue.spark import QueueDataSource, row_reader
from tests.spark.engine import in_a_task
from tests.spark.fakes import Flow, waiting_consumer
from tests.spark.test_sink import WAYS, Rows, Sink, sink, ways

__all__ = ["sink"]  # a fixture

TYPES: dict[str, DataType] = {
    "key": StringType(),
    "headers": MapType(StringType(), StringType()),
    "when": TimestampType(),
    "delay": DoubleType(),
}
#: The fault of a row, and the text of its error.
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "JSON": ({"payload": '{"n": '}, "payload: in the row with id {}: invalid JSON"),
    "integer": ({"payload": f'{{"n": {2**70}}}'}, "payload.n: not storable as BSON .* id {}"),
    "surrogate": ({"payload": r'"\ud800"'}, "payload: not storable as BSON .* id {}"),
    "nesting": ({"payload": "[" * 181 + "]" * 181}, "nested more than 179 levels .* id {}"),
    "key": ({"payload": "1", "key": ""}, "key: '' is not allowed; .* id {}"),
    "headers": ({"payload": "1", "headers": [("a.b", "c")]}, "headers: the name .* id {}"),
    "delay": ({"payload": "1", "delay": -1.0}, "delay: -1.0 is not allowed; .* id {}"),
    "when": ({"payload": "1", "when": datetime(8000, 1, 1, tzinfo=UTC)}, "when: .* id {}"),
    "both": (
        {"payload": "1", "delay": 99.0, "when": datetime(2030, 1, 1, tzinfo=UTC)},
        "when, delay: the row with id {} has both",
    ),
}
#: The repeated batch of these is left out by its number, not by the ids that are stored.
BY_EPOCH = ["epoch", "stream"]


def bury(sink: Sink, way: str, rows: Rows, types: Mapping[str, DataType], **options: str) -> None:
    sink.write(way, rows, types, onBadRow="bury", **options)


def buried(sink: Sink, queue: str | None = None) -> list[Message[Any]]:
    return list(sink.flow.client.queue(queue or f"{sink.first}.dead").peek(100))


def bad(sink: Sink, number: int, **fields: Any) -> dict[str, Any]:
    return sink.row(number, **{"payload": "{"} | fields)


@ways
@pytest.mark.parametrize("fault", BAD)
def test_bad_row_is_buried_and_all_others_are_written(sink: Sink, way: str, fault: str) -> None:
    fields, text = BAD[fault]
    rows = [sink.row(0), {**sink.row(1), **fields}, sink.row(2, key="k")]
    bury(sink, way, rows, TYPES)
    assert sink.stored() == [(sink.first, 0), (sink.first, 2)]
    (found,) = buried(sink)
    assert found.id == f"{sink.first}-1~bad~{sink.first}"
    assert found.payload == (1 if fields["payload"] == "1" else fields["payload"])
    assert found.state == "ready"
    assert found.dead is not None
    assert found.error is not None
    assert (found.dead["from"], found.dead["reason"], found.tries) == (sink.first, "invalid", 0)
    assert found.error == found.dead["error"]
    assert found.error["type"] == "InvalidMessage"
    assert sink.hidden() == 0
    assert re.search(text.format(f"{sink.first}-1"), found.error["message"])


@ways
def test_bad_row_fails_the_write_by_default(sink: Sink, way: str) -> None:
    with pytest.raises(InvalidMessage, match=f"^payload: in the row with id {sink.first}-1: "):
        sink.write(way, [sink.row(0), bad(sink, 1)], {})
    assert (sink.stored(), buried(sink), sink.hidden()) == ([], [], 0)


@ways
@pytest.mark.parametrize("consumed", [False, True])
def test_repeated_write_buries_a_row_once(sink: Sink, way: str, consumed: bool) -> None:
    """Also if the write is not known as repeated: the id of the row tells, as of other rows."""
    rows = [sink.row(0), bad(sink, 1)]
    bury(sink, way, rows, {})
    if consumed:
        assert sink.flow.client.queue(f"{sink.first}.dead").pop(0)
    bury(sink, way, rows, {})
    once = 0 if consumed and way in BY_EPOCH else 1
    assert (sink.stored(), len(buried(sink))) == ([(sink.first, 0)], once)


@pytest.mark.parametrize("way", ["staged", "direct"])
def test_row_that_is_bad_again_is_no_duplicate(sink: Sink, way: str) -> None:
    for number in (0, 2):
        bury(sink, way, [sink.row(number), bad(sink, 1)], {}, onDuplicate="error")
    assert (sink.stored(), len(buried(sink))) == ([(sink.first, 0), (sink.first, 2)], 1)


@pytest.mark.parametrize("way", BY_EPOCH)
def test_row_of_a_fenced_attempt_is_not_buried(sink: Sink, way: str, database: str) -> None:
    rows = pa.RecordBatch.from_pylist([sink.row(0), bad(sink, 1)])
    schema = StructType([StructField(name, StringType()) for name in ("id", "payload")])
    options = {"uri": database, "queue": sink.first, "onBadRow": "bury", **WAYS[way]}
    source, epoch = QueueDataSource(options), (0,) if way == "stream" else ()
    attempts: list[tuple[Any, Any]] = []
    for _ in range(2):
        writer: Any = (source.streamWriter if epoch else source.writer)(schema, False)
        with in_a_task("query", 0):
            attempts.append((writer, writer.write(iter([rows]))))
    (former, written), (writer, done) = attempts
    with pytest.raises(Fenced):
        former.commit([written], *epoch)
    assert (sink.stored(), buried(sink)) == ([], [])
    writer.commit([done], *epoch)
    assert (sink.stored(), len(buried(sink)), sink.hidden()) == ([(sink.first, 0)], 1, 0)


def test_decided_row_is_buried_after_a_crash(sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next run of the batch shows the rows that the former run has decided."""
    rows = [sink.row(0), bad(sink, 1)]
    with monkeypatch.context() as patch:
        patch.setattr(staging, "publish_rows", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            bury(sink, "stream", rows, {})
    assert (sink.stored(), buried(sink), sink.hidden()) == ([], [], 2)
    bury(sink, "stream", rows, {})
    assert (sink.stored(), len(buried(sink)), sink.hidden()) == ([(sink.first, 0)], 1, 0)


@ways
def test_corrected_row_is_written(sink: Sink, way: str) -> None:
    bury(sink, way, [bad(sink, 1)], {})
    options = {"stage": "corrected"} if way in BY_EPOCH else {}
    bury(sink, way, [sink.row(1)], {}, **options)
    assert sink.stored() == [(sink.first, 1)]
    assert len(buried(sink)) == 1


def test_stage_and_rows_without_ids_bury_too(sink: Sink) -> None:
    bury(sink, "stream", [bad(sink, 1)], {}, stage="s", idColumn="")
    bury(sink, "staged", [bad(sink, 2, payload="[")], {}, idColumn="")
    first, second = sorted(buried(sink), key=lambda each: str(each.payload), reverse=True)
    assert first.id == f"s~{sink.first}-1~bad~{sink.first}"
    assert (second.payload, len(str(second.id))) == ("[", 24)


def test_longest_id_of_a_row_is_shortened(sink: Sink) -> None:
    rows = [bad(sink, 1, id=each * 512) for each in "ab"]
    for _ in range(2):
        bury(sink, "staged", rows, {})
    assert sorted(len(str(each.id)) for each in buried(sink)) == [69 + len(sink.first)] * 2


@ways
def test_rows_are_buried_where_their_queue_says(sink: Sink, database: str, way: str) -> None:
    """The dead-letter queue may be of another kind. Its consumers are woken."""
    client = sink.flow.client
    client.queue(sink.second, kind="ordered", dead_letter=sink.flow.source).reserve(0)
    client.queue(sink.first, kind="ordered", dead_letter=f"{sink.first}-x").reserve(0)
    client.queue(f"{sink.first}-x", kind="priority").pop(0)
    types = {"queue": StringType(), "key": StringType(), "group": StringType()}
    rows = [
        bad(sink, 0, queue=sink.second, key="k", group="g"),
        bad(sink, 1, queue=sink.first, group=""),
        sink.row(2, queue=sink.first, group="g"),
    ]
    bury(sink, way, rows, types, queues=sink.both)
    assert sink.stored() == [(sink.first, 2)]
    (found,) = buried(sink, f"{sink.first}-x")
    assert (found.payload, found.group, found.priority) == ("{", None, 4)
    dead = client.queue(sink.flow.source)
    (found,) = dead.peek()
    assert (found.key, found.group) == ("k", "g")
    assert dead.redrive() == 1
    (again,) = client.queue(sink.second, kind="ordered").peek()
    assert (again.payload, again.key, again.group) == ("{", "k", "g")


@ways
def test_buried_row_wakes_consumers(sink: Sink, flow: Flow, database: str, way: str) -> None:
    flow.client.queue(sink.second, kind="ordered", dead_letter=sink.first).reserve(0)
    with waiting_consumer(flow, database) as got:
        bury(sink, way, [bad(sink, 0)], {}, queue=sink.second)
    assert [each.payload for each in got] == ["{"]


def test_row_with_an_invalid_priority_is_buried(sink: Sink) -> None:
    sink.flow.client.queue(sink.first, kind="priority").pop(0)
    rows = [sink.row(0, priority=10), bad(sink, 1, priority=9), sink.row(2, priority=9)]
    bury(sink, "staged", rows, {"priority": LongType()})
    assert [(each.payload, each.priority) for each in buried(sink)] == [(0, None), ("{", 9)]
    assert sink.stored() == [(sink.first, 2)]


def test_payload_of_a_struct_is_kept_as_text(sink: Sink) -> None:
    type = StructType([StructField("n", DecimalType(38, 0)), StructField("at", TimestampType())])
    rows = [sink.row(0, payload={"n": Decimal(n * "9")}) for n in (38, 34)]
    rows[1]["id"] = "fits"
    bury(sink, "staged", rows, {"payload": type})
    (found,) = buried(sink)
    assert json.loads(found.payload) == {"n": 38 * "9", "at": None}
    instants = pa.array([2**60], pa.timestamp("us", "UTC"))
    column = pa.array([{"at": None}], pa.struct([("at", instants.type)]))
    column = pa.StructArray.from_arrays([instants], fields=list(column.type))
    text = row_reader._text_of(column, type)
    assert json.loads(text) == {"at": f"[ <value out of range: {2**60}> ]"}


@pytest.mark.parametrize("way", ["staged", "stream"])
def test_row_that_is_too_large_leaves_an_excerpt(sink: Sink, way: str) -> None:
    """Also one that is too large only with the rest of its document."""
    size = LIMIT - 1000
    texts = ['"' + "x" * size + '"', "{" + " " * 2**24, '["' + "y" * 10 + '"' + ",1" * 2**21 + "]"]
    rows = [sink.row(number, payload=text) for number, text in enumerate(texts)]
    bury(sink, way, [*rows, sink.row(3)], {})
    assert sink.stored() == [(sink.first, 3)]
    kept = [each.payload for each in buried(sink)]
    assert sorted(kept, key=len) == [texts[0][:1000] + "...", texts[1][:1000] + "...", texts[2]]


@ways
@pytest.mark.parametrize("duplicate", ["replace", "error"])
def test_keys_of_buried_rows_are_not_taken(sink: Sink, way: str, duplicate: str) -> None:
    if way in BY_EPOCH or (way, duplicate) == ("staged", "replace"):
        duplicate = "ignore"
    rows = [bad(sink, number, key="k") for number in range(2)]
    bury(sink, way, [*rows, sink.row(2, key="k")], {"key": StringType()}, onDuplicate=duplicate)
    assert sink.stored() == [(sink.first, 2)]
    assert [each.key for each in buried(sink)] == ["k", "k"]


WHOLE: list[tuple[dict[str, Any], dict[str, str], str]] = [
    ({"id": None, "payload": "{"}, {}, "has a null"),
    ({"id": "~x", "payload": "{"}, {}, "^id: "),
    ({"id": "twice", "payload": "{"}, {}, "several rows have the id"),
    ({}, {}, "never in queue"),
    ({"queue": "elsewhere"}, {"queues": "a, b"}, "^queue: 'elsewhere' is not one of a, b"),
]


@ways
@pytest.mark.parametrize(("fields", "options", "text"), WHOLE)
def test_fault_of_the_whole_write_fails_it(
    sink: Sink, way: str, fields: dict[str, Any], options: dict[str, str], text: str
) -> None:
    sink.flow.raw.push(0, id=sink.row(2)["id"])
    rows = [bad(sink, 0, queue="a"), bad(sink, 1, id="twice", queue="a")]
    with pytest.raises((ConfigurationError, DuplicateKey), match=text):
        bury(sink, way, [*rows, sink.row(2) | fields], {"queue": StringType()}, **options)
    assert (sink.stored(), buried(sink), sink.hidden()) == ([], [], 0)
