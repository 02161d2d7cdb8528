"""Needs of a cluster: imports that executors can do, older releases of Spark, a wheel's way."""

from __future__ import annotations

import pickle
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyspark
import pytest
from pyspark.errors import PySparkAttributeError, PySparkException
from pyspark.sql.datasource import CaseInsensitiveDict

from pyqueue import ConfigurationError
from pyqueue.spark import QueueDataSource, registration
from pyqueue.spark.columns import columns
from tests.support.processes import ROOT

pytestmark = pytest.mark.spark_long

#: Import hooks for a fresh interpreter. The first refuses packages.
REFUSE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {refused!r}:
            raise ImportError("refused: " + name)

sys.meta_path.insert(0, Refuse())
"""
#: Spark 4.0, as far as the data source sees it.
SPARK_4_0 = """
import sys
import pyspark
from pyspark.sql import datasource
from pyspark.sql.pandas import types

def to_arrow_schema(schema, *, made=types.to_arrow_schema):
    return made(schema, timezone="UTC")

pyspark.__version__ = "4.0.1"
types.to_arrow_schema = to_arrow_schema
sys.modules["pyspark.sql.streaming.datasource"] = None
del datasource.DataSourceStreamArrowWriter
"""


def run(*parts: str) -> list[str]:
    """Run a program in a fresh interpreter; return the lines that it prints."""
    code = "\n".join(textwrap.dedent(part) for part in parts)
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_executor_path_needs_neither_pydantic_nor_anyio() -> None:
    """A cluster needs pymongo and pyarrow beside Spark, and the files of this package."""
    refused = {"anyio", "cronsim", "mongomock", "pydantic", "pydantic_core", "rich", "typer"}
    assert run(
        REFUSE.format(refused=refused),
        """
        import pyarrow as pa
        from pyspark.sql.types import LongType, StringType, StructField, StructType
        from pyqueue import InvalidMessage, QueueError
        from pyqueue.payloads import encode, error_text, traceback_text
        from pyqueue.spark import QueueDataSource, QueueProgressListener, register
        from pyqueue.spark import readers, tables, writers
        from pyqueue.spark.addresses import NamespaceAddress, client_of
        from pyqueue.spark.columns import columns
        from pyqueue.spark.frames import batch
        from pyqueue.spark.row_reader import Reader
        from pyqueue.spark.pyspark_pyqueue import DefaultSource

        at = __import__("datetime").datetime(2013, 1, 1)
        document = {"_id": "m", "q": "q", "payload": 7, "when": at, "tries": 0}
        rows = batch([document], LongType())
        print(rows.column("payload").to_pylist())
        print([each.payload for each in Reader(columns(LongType()), "id").rows(rows)])
        try:
            batch([document | {"payload": "x"}], LongType())
        except InvalidMessage as error:
            print(error_text(error).partition(":")[0], traceback_text(error))
        encode(document)
        address = NamespaceAddress.of("mongodb://localhost:1/db", None, "pyqueue")
        print(client_of(address) is client_of(address), address.open() is client_of(address))
        source = DefaultSource({"uri": "mongodb://localhost:1/db", "queue": "q"})
        print(type(source.reader(columns(None))).__name__)
        """,
    ) == ["[7]", "[7]", "payload None", "True False", "BatchReader"]


def test_package_without_pydantic_still_names_what_it_offers() -> None:
    """Names are imported when they are used, and an unknown name is an AttributeError."""
    assert run(
        REFUSE.format(refused={"pydantic"}),
        """
        import pyqueue
        print("Client" in dir(pyqueue), hasattr(pyqueue, "nothing"))
        try:
            from pyqueue import Client
        except ImportError as error:
            print(error)
        """,
    ) == ["True False", "refused: pydantic"]


def test_stages_and_claims_import_with_spark_4_0() -> None:
    """Reads of a table work, too. For the rest an error names the release that it needs."""
    lines = run(
        SPARK_4_0,
        """
        from pydantic import BaseModel
        from pyqueue import ConfigurationError
        from pyqueue.spark import QueueDataSource, SparkStage, register, spark_session, struct_of
        from pyqueue.spark.columns import columns
        from pyqueue.spark.frames import batch
        from pyqueue.spark.models import frame

        class Order(BaseModel):
            copies: int

        print(SparkStage(uri="mongodb://h", source="a", to="b", group="g", model=Order))
        at = __import__("datetime").datetime(2013, 1, 1)
        document = {"_id": "m", "q": "q", "payload": {"copies": 1}, "when": at}
        print(batch([document], struct_of(Order)).schema.field("when").type)
        source = QueueDataSource({"uri": "mongodb://h", "queue": "q", "group": "g"})
        schema = columns(None)
        print(type(source.reader(schema)).__name__)
        for use in (source.streamReader, lambda schema: source.writer(schema, False)):
            try:
                use(schema)
            except ConfigurationError as error:
                print(error)
        """,
    )
    stage, instants, reader, read_error, write_error = lines
    assert stage == "SparkStage('a' -> 'b', group='g')"
    assert (instants, reader) == ("timestamp[us, tz=UTC]", "BatchReader")
    for text in ("a streaming read", "needs Spark 4.2", "this is Spark 4.0.1"):
        assert text in read_error
    for text in ("a write", "needs Spark 4.1"):
        assert text in write_error


def test_shared_clients_are_closed_when_the_process_ends(database: str) -> None:
    """A fork leaves the client of its parent alone. A server that is gone delays nothing."""
    assert run(
        f"""
        import os, sys, warnings
        from pyqueue.runtime.connecting import runner_of
        from pyqueue.spark.addresses import NamespaceAddress, client_of

        os.dup2(1, 2)  # a warning is a line of the output
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", ResourceWarning)
        gone = client_of(NamespaceAddress.of("mongodb://127.0.0.1:1/db", None, "pyqueue"))
        print(gone.database.name, flush=True)
        client = client_of(NamespaceAddress.of({database!r}, None, "pyqueue"))
        runner_of(client).enter()
        if not os.fork():
            os.close(2)
            sys.exit()
        os.wait()
        print(client.database.command("ping")["ok"])
        """,
    ) == ["db", "1.0"]


class Conf(dict[str, str]):
    """The settings of a session."""

    @property
    def getAll(self) -> dict[str, str]:  # noqa: N802  # as PySpark names it
        """Return all of them."""
        return dict(self)


class Session:
    """Records the sources, files and listeners that are registered with a session."""

    def __init__(self, conf: dict[str, str], parallelism: int | None) -> None:
        self.conf = Conf(conf)
        self._parallelism = parallelism
        self.sources: list[type[QueueDataSource]] = []
        self.artifacts: list[tuple[str, bool]] = []
        self.listeners: list[object] = []
        self.environment = {"PYTHONPATH": "/before"}
        self.dataSource = SimpleNamespace(register=self.sources.append)
        self.streams = SimpleNamespace(addListener=self.listeners.append)

    @property
    def sparkContext(self) -> Any:  # noqa: N802
        """Return the context of a classic session. Raise the error of a Connect session."""
        if self._parallelism is None:
            raise PySparkAttributeError(
                errorClass="JVM_ATTRIBUTE_NOT_SUPPORTED", messageParameters={"attr_name": "it"}
            )
        return SimpleNamespace(defaultParallelism=self._parallelism, environment=self.environment)

    def addArtifacts(self, path: str, *, pyfile: bool) -> None:  # noqa: N802
        """Record a file, which must exist."""
        assert Path(path).is_file()
        self.artifacts.append((Path(path).name, pyfile))


def registered(session: Any) -> Any:
    """Register the source with a session. Return it as a process gets it that plans a read."""
    registration.register(session)
    spark: Any = pyspark.cloudpickle
    return pickle.loads(spark.dumps(session.sources[-1]))


@pytest.mark.parametrize(
    ("conf", "parallelism", "tasks"),
    [
        ({}, 24, 24),
        ({}, 10**6, 10_000),
        ({"spark.default.parallelism": "6"}, None, 6),
        ({"spark.sql.leafNodeDefaultParallelism": "8", "spark.default.parallelism": "6"}, 24, 8),
        ({}, None, 4),
    ],
)
def test_reads_follow_the_parallelism_of_the_cluster(
    conf: dict[str, str], parallelism: int | None, tasks: int
) -> None:
    """The process that plans a read does not know it, so the class carries it there."""
    session: Any = Session(conf, parallelism)
    registration.register(session)
    made = registered(session)
    assert len(session.listeners) == 1
    assert (made.name(), made.parallelism) == ("pyqueue", tasks)
    given = {"uri": "mongodb://h", "queue": "q"}
    planned: Any = [
        made(options).reader(columns(None)) for options in (given, given | {"numPartitions": "3"})
    ]
    assert [each._options.partitions for each in planned] == [tasks, 3]
    assert session.artifacts == []
    assert session.environment == {"PYTHONPATH": "/before"}


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ({}, ("A", "flights")),
        ({"URIENV": "B"}, ("B", "flights")),
        ({"uri": "mongodb://h", "namespace": "other"}, (None, "other")),
    ],
)
def test_settings_of_the_session_are_default_options(
    given: dict[str, str], address: tuple[str | None, str]
) -> None:
    """Options are given in any case, as Spark does."""
    conf = {"spark.pyqueue.uriEnv": "A", "spark.pyqueue.namespace": "flights", "spark.other": "1"}
    made = registered(Session(conf, 2))
    reader = made(CaseInsensitiveDict({"queue": "q", **given})).reader(columns(None))
    found = reader._options.address
    assert (found.uri_env, found.namespace) == address


def test_setting_of_the_session_without_an_option_is_refused() -> None:
    for name in ("uri", "stage", "urienv"):
        with pytest.raises(ConfigurationError, match=rf"^spark.pyqueue.{name}: "):
            registration.register(cast(Any, Session({f"spark.pyqueue.{name}": "x"}, 2)))


@pytest.mark.parametrize("name", ["DATA_SOURCE_ALREADY_EXISTS", "ANOTHER"])
def test_register_keeps_a_source_that_spark_has_found(name: str) -> None:
    """Spark 4.0 finds sources when it starts, and refuses to register one of them again."""
    session: Any = Session({}, 2)

    def refuse(source: object) -> None:
        raise PySparkException(f"[{name}] Data source 'pyqueue' already exists.")

    session.dataSource.register = refuse
    if name == "ANOTHER":
        with pytest.raises(PySparkException):
            registration.register(session)
    else:
        registration.register(session)
    assert len(session.listeners) == (name != "ANOTHER")


def test_register_sends_the_wheel_that_it_runs_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Executors take files that end in .zip only. A second call sends nothing."""
    ends: list[Any] = []
    monkeypatch.setattr("atexit.register", lambda *what, **how: ends.append(what))
    wheel = tmp_path / "pyqueue_mongo-1.2.3-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("pyqueue/__init__.py", "")
    monkeypatch.setattr(registration, "__file__", str(wheel / "pyqueue/spark/registration.py"))
    session: Any = Session({}, 2)
    registration.register(session)
    registration.register(session)
    assert session.artifacts == [("pyqueue_mongo-1.2.3-py3-none-any.zip", True)]
    ((_, made),) = ends
    (sent,) = Path(made).iterdir()
    assert sent.name == "pyqueue_mongo-1.2.3-py3-none-any.zip"
    # The process that plans a stream gets it by the environment.
    assert session.environment == {"PYTHONPATH": f"{sent}:/before"}
