"""Invalid options, arguments and rows are refused before anything is written, without a session.

Each error names the argument.
"""

from __future__ import annotations

import json
import pickle
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pyarrow as pa
import pytest
from pydantic import BaseModel
from pyspark.sql.types import LongType, StringType, StructField, StructType

from pyqueue import Client, ConfigurationError, DuplicateKey, InvalidName, QueueError
from pyqueue.runtime.connecting import Connection
from pyqueue.spark import QueueDataSource, SparkStage
from pyqueue.spark import options as checks
from pyqueue.spark.addresses import NamespaceAddress
from pyqueue.spark.columns import columns
from pyqueue.spark.offsets import Offset
from pyqueue.spark.options import checked
from tests.spark.engine import in_a_task
from tests.spark.fakes import Flow, Frame, no_session

#: No server listens at this address.
NOWHERE = "mongodb://127.0.0.1:1/?serverSelectionTimeoutMS=100"

READ = {"uri": NOWHERE, "queue": "raw"}
STREAM = READ | {"group": "g"}
SEVERAL = {"uri": NOWHERE, "queues": "a, b"}


def read(**options: Any) -> Any:
    return QueueDataSource(options).reader(columns(None))


def stream(**options: Any) -> Any:
    return QueueDataSource(options).streamReader(columns(None))


def write(
    options: dict[str, str], schema: StructType | None = None, overwrite: bool = False
) -> Any:
    return QueueDataSource(options).writer(schema or columns(None), overwrite)


def stream_to(
    options: dict[str, str], schema: StructType | None = None, overwrite: bool = False
) -> Any:
    return QueueDataSource(options).streamWriter(schema or columns(None), overwrite)


def table(**types: Any) -> StructType:
    return StructType([StructField(name, type) for name, type in types.items()])


#: Values of a stream's options that are refused.
WRONG_VALUES = {
    "minMessagesPerBatch": ("0", "10001"),
    "maxTriggerDelay": ("15", "0s"),
    "maxWaitMs": ("-1", "0.1", "60001"),
    "maxMessagesPerBatch": ("0", "-5", "100001"),
    "maxBytesPerBatch": ("0", "64MB"),
    "leaseSeconds": ("0", "-1", "nan", "a minute"),
}
WRONG: list[tuple[str, Callable[[], Any]]] = [
    # a read
    ("uri, url, uriEnv", lambda: read(queue="raw")),
    ("uri, url, uriEnv", lambda: read(uri=NOWHERE, uriEnv="HOME", queue="raw")),
    ("uri, url, uriEnv", lambda: read(uri=NOWHERE, url=NOWHERE, queue="raw")),
    ("uri", lambda: read(uri="memory:", queue="raw")),
    ("uri", lambda: read(uri="127.0.0.1:27017", queue="raw")),
    ("uriEnv", lambda: stream(uriEnv="PYQUEUE_NONE", queue="raw", group="g").initialOffset()),
    ("queue", lambda: read(uri=NOWHERE)),
    ("name", lambda: read(uri=NOWHERE, queue="no name")),
    ("namespace", lambda: read(**READ, namespace="system.x")),
    ("qeue: .* mean queue[?]", lambda: read(**READ, qeue="x")),
    ("leaseSecond: .* mean leaseSeconds[?]", lambda: stream(**STREAM, leaseSecond="5")),
    ("payloadType", lambda: read(**READ, payloadType="jsonn")),
    ("payloadType", lambda: read(**READ, payloadType="RawFlight")),
    ("numPartitions", lambda: read(**READ, numPartitions="0")),
    ("numPartitions", lambda: read(**READ, numPartitions="four")),
    ("columns", lambda: read(**READ, columns="id,payloads")),
    ("columns", lambda: read(**READ, columns="id,id")),
    ("columns", lambda: read(**READ, columns=",")),
    ("match", lambda: read(**READ, match="delay > 0")),
    ("pushFilters", lambda: read(**READ, pushFilters="yes")),
    ("payloadType, payloadModel", lambda: read(**READ, payloadType="json", payloadModel="a:B")),
    ("schema", lambda: QueueDataSource(READ).reader(table(id=StringType(), payload=StringType()))),
    ("onBadRow", lambda: write(READ | {"onBadRow": "drop"})),
    ("onBadRow", lambda: stream_to(READ | {"stage": "s", "onBadRow": "null"})),
    ("onBadRecord", lambda: read(**READ, onBadRecord="drop")),
    ("onBadRecord", lambda: read(**READ, onBadRecord="bury")),
    ("columnNameOfCorruptRecord", lambda: read(**READ, columnNameOfCorruptRecord="raw")),
    (
        "columnNameOfCorruptRecord",
        lambda: stream(**STREAM, onBadRecord="bury", columnNameOfCorruptRecord="raw"),
    ),
    (
        "columnNameOfCorruptRecord",
        lambda: read(**READ, onBadRecord="null", columnNameOfCorruptRecord="id"),
    ),
    ("schema", lambda: read(**READ, onBadRecord="null", columnNameOfCorruptRecord="raw")),
    # a stream
    *(
        (name, partial(stream, **STREAM, **{name: value}))
        for name, values in WRONG_VALUES.items()
        for value in values
    ),
    ("group", lambda: stream(**READ)),
    ("group", lambda: stream(**READ, group="a~b")),
    ("match, pushFilters", lambda: stream(**STREAM, match='{"a": 1}')),
    ("match, pushFilters", lambda: stream(**STREAM, pushFilters="true")),
    # writes
    ("mode", lambda: write(READ, overwrite=True)),
    ("stage, epoch", lambda: write(READ | {"stage": "s"})),
    ("stage, epoch", lambda: write(READ | {"epoch": "1"})),
    ("epoch", lambda: write(READ | {"stage": "s", "epoch": "-1"})),
    ("delivery", lambda: write(READ | {"delivery": "at-least-once"})),
    ("staged", lambda: write(READ | {"staged": "false"})),
    ("staged", lambda: write(READ | {"staged": "no", "idColumn": "id"})),
    ("staged", lambda: write(READ | {"staged": "false", "stage": "s", "epoch": "1"})),
    ("queue, queues", lambda: write(READ | {"queues": "a,b"})),
    ("queues", lambda: write(SEVERAL | {"queues": "a, b, a"})),
    ("name", lambda: write(SEVERAL | {"queues": "a,,b"})),
    ("queues", lambda: read(**SEVERAL)),
    ("queues", lambda: stream(**SEVERAL, group="g")),
    ("queue", lambda: write(SEVERAL, table(payload=StringType()))),
    ("queue", lambda: write(SEVERAL, table(payload=StringType(), queue=LongType()))),
    ("when", lambda: write(READ, table(payload=StringType(), when=StringType()))),
    ("delay", lambda: write(READ, table(payload=StringType(), delay=StringType()))),
    ("onDuplicate", lambda: write(READ | {"onDuplicate": "drop"})),
    ("onDuplicate", lambda: write(READ | {"onDuplicate": "replace", "idColumn": "id"})),
    ("onDuplicate", lambda: write(READ | {"onDuplicate": "replace", "stage": "s", "epoch": "1"})),
    ("onDuplicate", lambda: stream_to(READ | {"stage": "s", "onDuplicate": "error"})),
    ("onDuplicate", lambda: stream_to(READ | {"stage": "s", "onDuplicate": "replace"})),
    ("payload", lambda: write(READ, table(id=StringType(), value=StringType()))),
    ("order_id", lambda: write(READ | {"idColumn": "order_id"})),
    ("outputMode", lambda: stream_to(READ | {"stage": "s"}, overwrite=True)),
    ("stage, idColumn", lambda: stream_to(READ)),
    ("epoch", lambda: stream_to(READ | {"stage": "s", "epoch": "1"})),
    ("epoch, query, staged", lambda: stream_to(READ | {"stage": "s", "staged": "false"})),
    ("epoch, query, staged", lambda: stream_to(READ | {"stage": "s", "query": "q"})),
    ("query", lambda: write(READ | {"query": "q"})),
    ("idPrefix", lambda: write(READ | {"idPrefix": "a-"})),
    ("idPrefix: id: ", lambda: write(READ | {"idColumn": "id", "idPrefix": "~a"})),
    ("idPrefix", lambda: stream_to(READ | {"stage": "s", "idPrefix": "a-"})),
    ("query", lambda: write(READ | {"stage": "s", "epoch": "1", "query": "a~b"})),
    ("delivery", lambda: stream_to(READ | {"stage": "s", "delivery": "once"})),
    ("stage", lambda: stream_to(READ | {"stage": "a~b"})),
    ("payload", lambda: stream_to(READ | {"stage": "s"}, table(id=StringType()))),
    ("id", lambda: stream_to(READ | {"stage": "s"}, table(payload=StringType()))),
    ("id", lambda: stream_to(READ | {"stage": "s"}, table(id=LongType(), payload=StringType()))),
]


@pytest.mark.parametrize(
    ("named", "call"), WRONG, ids=[f"{number}-{named}" for number, (named, _) in enumerate(WRONG)]
)
def test_source_refuses_invalid_options(named: str, call: Callable[[], Any]) -> None:
    with pytest.raises((ConfigurationError, InvalidName), match=f"^{named}|'{named}'"):
        call()


def test_sink_accepts_what_spark_adds_to_its_options() -> None:
    """Declarative Pipelines name the query of each flow."""
    added = {"checkpointLocation": "/x", "queryName": "flow", "queryTimeout": "0"}
    stream_to(READ | {"stage": "s"} | added)


#: The options that a catalog adds to a table that was made with these options.
TABLE_OPTIONS = {"option.queue": "raw", "option.maxMessagesPerBatch": "5", "option.uri": NOWHERE}


def test_source_warns_once_of_options_that_it_does_not_know(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A catalog adds some to each table. These mean nothing, and are no reason to warn."""
    for _ in range(2):
        read(**READ, refreshInterval="5", owner="me", provider="pyqueue", **TABLE_OPTIONS)
    checked({"uri": NOWHERE, "stream": "clicks", "owner": "me", "option.startingPosition": "5"})
    (warning,) = caplog.messages
    assert "unknown options (refreshInterval)" in warning


def test_source_warns_once_of_a_password_that_spark_may_show(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "_warned", set())
    secret = "mongodb://user:s3cret@127.0.0.1:1"
    checked({"url": secret, "queue": "raw"})
    for _ in range(2):
        checked({"uri": secret, "queue": "raw"})
    (warning,) = caplog.messages
    assert warning.startswith("uri: ")
    assert "s3cret" not in warning


def test_address_has_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYQUEUE_URL", NOWHERE)
    found = [checked(each | {"queue": "raw"}) for each in ({}, {"url": "mongodb://other/"})]
    assert [each.address.target for each in found] == [NOWHERE, "mongodb://other/"]


class Model(BaseModel):
    a: int


STAGE: dict[str, Any] = {"uri": NOWHERE, "source": "raw", "to": "clean", "group": "g"}


def to_table(df: Any, number: int) -> None:
    """Stand in for a function that writes a table."""


TABLE: dict[str, Any] = {"to": None, "transform": to_table}

WRONG_STAGES: list[tuple[str, dict[str, Any]]] = [
    ("uri, uriEnv", {"uri": None}),
    ("uri, uriEnv", {"uri_env": "HOME"}),
    ("uri", {"uri": "memory:"}),
    ("namespace", {"namespace": "no name"}),
    ("name", {"source": "no name"}),
    ("name", {"to": ""}),
    ("name", {"to": ["clean", None]}),
    ("to", {"to": 5}),
    ("to: .* leads nowhere", {"to": []}),
    ("to: .* lists 'a' twice", {"to": ["a", "b", "a"]}),
    ("group", {"group": "a~b"}),
    ("group", {"group": None}),
    ("transform", {"transform": "SELECT 1"}),
    ("output", {"output": "copy"}),
    ("model", {"model": dict}),
    ("transform: a stage without a target", {"to": None}),
    (
        "transform: expected a function that takes .df. or .df, number.",
        TABLE | {"transform": lambda a, b, c: None},
    ),
    ("output", TABLE | {"output": "transaction"}),
    ("members", TABLE | {"members": 2}),
    ("max_messages", TABLE | {"max_messages": 100_001}),
    ("max_messages", {"max_messages": 0}),
    ("max_messages", {"max_messages": 2.5}),
    ("max_messages", {"max_messages": 100_001}),
    ("max_messages", {"max_messages": 10_001, "output": "transaction"}),
    ("lease", {"lease": 0}),
    ("lease", {"lease": "600"}),
    ("max_tries", {"max_tries": 0}),
]


@pytest.mark.parametrize(
    ("named", "options"),
    WRONG_STAGES,
    ids=[
        f"{named}-{[getattr(each, '__name__', each) for each in options.values()]}"
        for named, options in WRONG_STAGES
    ],
)
def test_stage_refuses_invalid_arguments(named: str, options: dict[str, Any]) -> None:
    with pytest.raises((ConfigurationError, InvalidName), match=f"^{named}"):
        SparkStage(**(STAGE | options))


def test_stage_accepts_valid_arguments_and_pickles() -> None:
    SparkStage(**STAGE)
    SparkStage(**STAGE, output="transaction", max_messages=10_000, model=Model, max_tries=None)
    again = pickle.loads(pickle.dumps(SparkStage(**STAGE, max_messages=100_000, model=Model)))
    assert repr(again) == "SparkStage('raw' -> 'clean', group='g')"
    table = pickle.loads(pickle.dumps(SparkStage(**STAGE | TABLE)))
    assert repr(table) == "SparkStage('raw', group='g')"
    SparkStage(**STAGE | TABLE | {"transform": print, "members": 2})
    several = SparkStage(**STAGE | {"to": iter(["late", "on-time"])})
    assert repr(several) == "SparkStage('raw' -> 'late', 'on-time', group='g')"


# ---- results of a transform


def without_payload(frame: Frame) -> Any:
    return frame.made_of(frame.rows(), "id")


def without_id(frame: Frame) -> Any:
    return frame.made_of(frame.rows(), "payload")


def twice(frame: Frame) -> Any:
    return frame.made_of([*frame.rows(), frame.rows()[0]])


def strange(frame: Frame) -> Any:
    return frame.made_of([*frame.rows()[1:], frame.rows()[0] | {"id": "another"}])


def no_id(frame: Frame) -> Any:
    return frame.made_of([*frame.rows()[1:], frame.rows()[0] | {"id": None}], "id", "payload")


RESULTS: list[tuple[str, Any, str]] = [
    ("move", without_payload, "no column 'payload'"),
    ("move", without_id, "no column 'id'"),
    ("move", twice, "twice"),
    ("move", strange, "the id 'another', which is not in the batch"),
    ("move", no_id, "a null"),
    ("move", lambda frame: None, "^transform: expected .* found NoneType"),
    ("move", lambda frame: [1], "^transform: expected .* found list"),
    ("transaction", without_payload, "no column 'payload'"),
    ("transaction", lambda frame: None, "^transform: expected .* found NoneType"),
]


@pytest.mark.usefixtures("faked")
@pytest.mark.parametrize(
    ("output", "transform", "text"), RESULTS, ids=[f"{o}-{text}" for o, _, text in RESULTS]
)
def test_stage_refuses_an_unusable_result_of_its_transform(
    flow: Flow, output: str, transform: Any, text: str
) -> None:
    """Nothing is written, and the batch is released unchanged."""
    flow.raw.push_many(range(3))
    with pytest.raises(ConfigurationError, match=text):
        flow.stage(transform, output=output).run_once(no_session)
    flow.check_released(3)


# ---- rows


def rows_of(**given: list[Any]) -> Iterator[pa.RecordBatch]:
    return iter([pa.RecordBatch.from_pydict(given)])


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"id": "~queue:raw"}, "^id: "),
        ({"id": ""}, "^id: "),
        ({"id": None}, "null"),
        ({"id": "a"}, "several rows"),
        ({"payload": "{"}, "invalid JSON"),
        ({"key": ""}, "^key: "),
        ({"key": "k" * 513}, "^key: "),
    ],
)
def test_write_refuses_invalid_rows(
    flow: Flow, database: str, row: dict[str, Any], text: str, streaming: bool
) -> None:
    schema = table(id=StringType(), payload=StringType(), key=StringType())
    options = {"uri": database, "queue": flow.target, "idColumn": "id"}
    writer = stream_to(options, schema) if streaming else write(options, schema)
    usual = {"id": "a", "payload": "1", "key": None}
    rows = [usual, usual | {"id": "b"} | row]
    with in_a_task("query", 0), pytest.raises((ConfigurationError, ValueError), match=text):
        writer.write(rows_of(**{name: [each[name] for each in rows] for name in rows[0]}))
    assert flow.written() == []


def test_stream_write_refuses_ids_of_another_queue(flow: Flow, database: str) -> None:
    flow.raw.push(1, id=f"s~{flow.source}")
    options = {"uri": database, "queue": flow.target, "stage": "s"}
    writer = stream_to(options, table(id=StringType(), payload=StringType()))
    with in_a_task("query", 0), pytest.raises(DuplicateKey, match="never in queue"):
        writer.write(rows_of(id=[flow.source], payload=["1"]))
    assert flow.written() == []


def test_claim_limit_has_a_maximum(shared: Client, flow: Flow) -> None:
    with pytest.raises(ConfigurationError, match=r"^limit: "), flow.raw.claim("g", limit=100_001):
        pytest.fail("the claim began")


# ---- secrets

SECRETS = [
    "mongodb://user:s3cret@127.0.0.1:1/?serverSelectionTimeoutMS=100",
    "mongodb://127.0.0.1:1/?serverSelectionTimeoutMS=100&tls=true"
    "&tlsCertificateKeyFilePassword=s3cret",
]


@pytest.mark.parametrize("uri", SECRETS)
def test_offset_and_repr_hide_credentials(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYQUEUE_TEST_SECRET", uri)
    places: list[tuple[str | None, str | None]] = [(uri, None), (None, "PYQUEUE_TEST_SECRET")]
    for given in places:
        address = NamespaceAddress.of(*given, "pyqueue")
        fields = Offset(5, "token", "raw", "g", address).to_json()
        assert "s3cret" not in json.dumps(fields)
        assert "s3cret" not in repr(address)
        if address.uri_env:
            assert Offset.parse(fields).address.target == uri
        else:
            with pytest.raises(ConfigurationError, match=r"^uri, uriEnv"):
                Offset.parse(fields)
    assert "s3cret" not in repr(SparkStage(**(STAGE | {"uri": uri})))


def test_errors_hide_credentials(
    signed_in: str, password: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYQUEUE_TEST_SECRET", signed_in.replace(password, "s3cret"))
    quick = partial(Connection, command_timeout=1)
    monkeypatch.setattr("pyqueue.spark.addresses.Connection", quick)
    for given in ({"uri": SECRETS[0]}, {"uriEnv": "PYQUEUE_TEST_SECRET"}):
        with pytest.raises(QueueError) as caught:
            stream(**given, queue="raw", group="g").initialOffset()
        text = "".join(traceback.format_exception(caught.value, chain=True))
        assert "s3cret" not in str(caught.value)
        assert "s3cret" not in text
