"""The filters that a table read leaves to the database, which drops no row that Spark keeps."""

from __future__ import annotations

import operator
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from bson import ObjectId
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from pyspark.sql import datasource

from pyqueue import Client, ConfigurationError
from pyqueue.spark import QueueDataSource
from pyqueue.spark.columns import columns
from pyqueue.spark.filters import condition, fields_of, ids_of, matching
from pyqueue.spark.frames import batch
from tests.plans.runner import NOW
from tests.plans.store import matches
from tests.spark.fakes import Flow


class Order(BaseModel):
    copies: int
    name: str | None = None


OID = ObjectId("0123456789abcdef01234567")
KEYS = ["a", "b"]
INSTANTS = [NOW + timedelta(microseconds=each) for each in (0, 400, 1000, 1600, 2000)]

#: Documents with fields that are missing, and some that another program wrote.
documents = st.fixed_dictionaries(
    {"_id": st.sampled_from(["m", str(OID), OID]), "q": st.just("q"), "payload": st.just(1)}
    | {"when": st.sampled_from(INSTANTS[::2])},
    optional={
        "due": st.sampled_from([*INSTANTS[::2], "now"]),
        "key": st.sampled_from([*KEYS, 7]),
        "tries": st.integers(0, 3),
    },
)
COMPARISONS: dict[type[Any], Callable[[Any, Any], bool]] = {
    datasource.EqualTo: operator.eq,
    datasource.GreaterThan: operator.gt,
    datasource.GreaterThanOrEqual: operator.ge,
    datasource.LessThan: operator.lt,
    datasource.LessThanOrEqual: operator.le,
}
values = {
    "id": st.sampled_from(["m", str(OID), "none"]),
    "key": st.sampled_from([*KEYS, "none"]),
    "tries": st.integers(-1, 4),
    "when": st.sampled_from(INSTANTS),
}
filters = st.sampled_from([*values]).flatmap(
    lambda column: st.one_of(
        st.builds(
            lambda kind, value: kind((column,), value),
            st.sampled_from([*COMPARISONS]),
            values[column],
        ),
        st.builds(
            lambda some: datasource.In((column,), tuple(some)), st.lists(values[column], max_size=3)
        ),
        st.sampled_from([datasource.IsNull((column,)), datasource.IsNotNull((column,))]),
    )
)


def keeps(filter: Any, row: dict[str, Any]) -> bool:
    """Return whether Spark keeps a row."""
    value = row[filter.attribute[0]]
    match filter:
        case datasource.IsNull():
            return value is None
        case datasource.IsNotNull():
            return value is not None
        case datasource.In():
            return value in filter.value
    return value is not None and COMPARISONS[type(filter)](value, filter.value)


@given(documents, filters)
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
def test_database_keeps_every_row_that_spark_keeps(document: dict[str, Any], filter: Any) -> None:
    (row,) = batch([document], None).to_pylist()
    wanted = condition(filter)
    if keeps(filter, row) and wanted is not None:
        assert matches(document, wanted), (filter, wanted)


@pytest.mark.parametrize(
    ("filter", "left_out"),
    [
        (datasource.EqualTo(("id",), "m"), {"_id": "n"}),
        (datasource.In(("id",), ("m", str(OID))), {"_id": "n"}),
        (datasource.EqualTo(("key",), "a"), {"key": "b"}),
        (datasource.IsNotNull(("key",)), {}),
        (datasource.IsNull(("key",)), {"key": "b"}),
        (datasource.GreaterThan(("tries",), 2), {"tries": 1}),
        (datasource.LessThan(("tries",), 2), {"tries": 3}),
        (datasource.EqualTo(("tries",), 2), {"tries": 3}),
        (datasource.LessThanOrEqual(("when",), NOW), {"due": NOW + timedelta(milliseconds=1)}),
        (datasource.GreaterThan(("when",), NOW), {"due": NOW - timedelta(milliseconds=1)}),
    ],
    ids=str,
)
def test_database_leaves_out_what_spark_would(filter: Any, left_out: dict[str, Any]) -> None:
    wanted = condition(filter)
    assert wanted is not None
    assert not matches({"_id": "x", "when": NOW} | left_out, wanted)


@pytest.mark.parametrize(
    "filter",
    [
        datasource.Not(datasource.EqualTo(("key",), "a")),
        datasource.StringStartsWith(("id",), "m"),
        datasource.EqualTo(("payload", "a"), 1),
        datasource.GreaterThan(("id",), "m"),
        datasource.EqualTo(("when",), NOW.replace(tzinfo=None)),
    ],
    ids=str,
)
def test_other_filters_stay_with_spark(filter: Any) -> None:
    assert condition(filter) is None
    assert ids_of(filter) is None


def test_projection_has_what_the_columns_need() -> None:
    assert fields_of(["id", "queue"]) == {"_id": 1, "q": 1, "when": 1}
    assert set(fields_of(columns(None).names)) == {
        *("_id", "q", "payload", "headers", "key", "when", "due", "pushed", "tries"),
        *("priority", "group", "lock", "last_group"),
    }


@pytest.mark.parametrize(
    "text",
    [
        *("", "1", "[]", "{}", "{", '{"$where": 1}', '{"": 1}', '{"a.$b": 1}'),
        *('{"a": {"$mod": [2, 0]}}', '{"a": {"$gt": 1, "b": 2}}'),
    ],
)
def test_match_refuses_what_is_no_condition_on_fields(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"match: .*fields of the payload"):
        matching(text)


def test_match_takes_values_and_conditions() -> None:
    given = '{"a": {"$gt": {"$date": "2013-01-01T12:00:00Z"}}, "b.c": null, "d": {"e": 1}}'
    found = {"payload.a": {"$gt": NOW}, "payload.b.c": None, "payload.d": {"e": 1}}
    assert matching(given) == found


# ---- reads of a table


def rows(flow: Flow, database: str, *filters: Any, **options: str) -> list[dict[str, Any]]:
    """Read a table as Spark does, after it has passed its filters on."""
    source = QueueDataSource({"uri": database, "queue": flow.source} | options)
    schema: Any = source.schema()
    reader: Any = source.reader(schema)
    if filters:
        assert list(reader.pushFilters([*filters])) == [*filters]
    found: list[dict[str, Any]] = []
    for part in reader.partitions():
        for each in reader.read(part):
            assert each.schema.names == schema.names
            found += each.to_pylist()
    return found


def test_table_matches_fields_of_the_payload(flow: Flow, database: str) -> None:
    flow.raw.push_many([{"carrier": "UA", "delay": delay} for delay in range(-5, 5)])
    flow.raw.push_many([{"carrier": "AA", "delay": 9}, 7, None])
    match = '{"carrier": "UA", "delay": {"$gt": 2}}'
    found = rows(flow, database, match=match, columns="payload", numPartitions="3")
    assert found == [
        {"payload": '{"carrier": "UA", "delay": 3}'},
        {"payload": '{"carrier": "UA", "delay": 4}'},
    ]
    assert flow.raw.counts().ready == 13


def test_table_shows_the_columns_asked_for(flow: Flow, database: str) -> None:
    id = flow.raw.push({"a": 1}, key="k", headers={"h": 1})
    assert rows(flow, database, columns="key, id") == [{"key": "k", "id": str(id)}]
    assert rows(flow, database, columns="headers,tries") == [{"headers": [("h", "1")], "tries": 0}]


def test_table_reads_what_spark_filters_by(flow: Flow, database: str) -> None:
    """An ObjectId is found by its hex digits, and a str of hex digits, too."""
    oid, name = ObjectId(), flow.source
    flow.raw.push_many(range(4), ids=[name, str(oid), ObjectId(), ObjectId()])
    flow.raw.push(4, id=oid, key="k")
    flow.raw.push(5, id=f"{name}-later", delay=600)

    def payloads(*filters: Any) -> list[str]:
        found = rows(flow, database, *filters, pushFilters="true")
        return sorted(each["payload"] for each in found)

    assert payloads(datasource.EqualTo(("id",), str(oid))) == ["1", "4"]
    assert payloads(datasource.In(("id",), (name, f"{name}-later", "none"))) == ["0"]
    assert payloads(datasource.EqualTo(("key",), "k"), datasource.IsNotNull(("key",))) == ["4"]
    assert payloads(datasource.GreaterThan(("when",), datetime.now(UTC))) == []
    assert payloads(datasource.EqualTo(("payload",), "2")) == ["0", "1", "2", "3", "4"]


def test_reader_has_the_method_only_if_asked_for(database: str, flow: Flow) -> None:
    """Spark refuses a reader that has it, unless a setting allows filters."""
    source = QueueDataSource({"uri": database, "queue": flow.source})
    reader: Any = type(source.reader(columns(None)))
    assert reader.pushFilters is datasource.DataSourceReader.pushFilters


@pytest.mark.spark_long
def test_spark_pushes_its_filters(flow: Flow, shared: Client, database: str, spark: Any) -> None:
    name = flow.source
    flow.raw.push_many(range(50), ids=[f"{name}-{number}" for number in range(50)])
    last = flow.raw.push(50, key="k")
    setting = "spark.sql.python.filterPushdown.enabled"
    spark.conf.set(setting, "true")
    try:
        options = {"uri": database, "queue": flow.source, "columns": "id,payload,key"}
        df = spark.read.format("pyqueue").options(**options, pushFilters="true").load()
        seventh = df.where(f"id = '{name}-7'")
        assert seventh.rdd.getNumPartitions() == 1
        assert [row.payload for row in seventh.where("payload < 9").collect()] == ["7"]
        assert [row.id for row in df.where("key is not null").collect()] == [str(last)]
        assert df.where(f"id like '{name}-1%'").count() == 11
        assert df.where("key is null").count() == 50
    finally:
        spark.conf.unset(setting)


def test_payload_model_makes_a_struct(flow: Flow, database: str) -> None:
    flow.raw.push({"copies": 2, "name": "x"})
    model = f"{__name__}:Order"
    assert rows(flow, database, payloadModel=model, columns="payload") == [
        {"payload": {"copies": 2, "name": "x"}}
    ]


@pytest.mark.parametrize("path", ["nothing", "no.such.module:Order", f"{__name__}:Nothing"])
def test_payload_model_that_cannot_be_imported_is_refused(path: str) -> None:
    with pytest.raises(ConfigurationError, match=r"payloadModel: .*module:Model"):
        QueueDataSource({"uri": "mongodb://h", "queue": "q", "payloadModel": path}).schema()
