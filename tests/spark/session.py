"""The Spark session of a test run. It is expensive, so all tests that use it run in one worker.

Nothing else may start a session in the process of the tests: Spark would return the existing one,
with its settings and its environment.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pymongo
import pytest

from tests.spark.programs import CONFIG, JAVA_OPTIONS
from tests.support.processes import ROOT
from tests.support.shared import Mongod


@pytest.fixture(scope="session")
def database(mongod: Mongod, mongo: pymongo.MongoClient[dict[str, Any]]) -> Iterator[str]:
    """The URL of a database that the Spark tests share. Each test has separate queues."""
    name = f"t{uuid4().hex[:16]}"
    base, _, query = mongod.url.partition("?")
    yield f"{base.rstrip('/')}/{name}?{query}"
    mongo.drop_database(name)


@pytest.fixture(scope="session")
def password() -> str:
    """A password that may appear nowhere."""
    return f"pw{uuid4().hex}"


@pytest.fixture(scope="session")
def signed_in(
    database: str, password: str, mongo: pymongo.MongoClient[dict[str, Any]]
) -> Iterator[str]:
    """The URL of the same database, with credentials."""
    user = f"user{uuid4().hex[:8]}"
    mongo.admin.command("createUser", user, pwd=password, roles=["root"])
    yield database.replace("mongodb://", f"mongodb://{user}:{password}@") + "&authSource=admin"
    mongo.admin.command("dropUser", user)


#: The environment variable that holds this URL, also in the workers of the session.
URI_ENV = "PYQUEUE_TESTS_URI"

_LOGGING = """
rootLogger.level = off
rootLogger.appenderRef.file.ref = file
appender.file.type = File
appender.file.name = file
appender.file.fileName = {path}
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %p %c: %m%n%ex
"""


@pytest.fixture(scope="session")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of the session. It is empty until a test calls ``setLogLevel``."""
    return tmp_path_factory.mktemp("spark") / "log"


@pytest.fixture(scope="session")
def spark(signed_in: str, log: Path) -> Iterator[Any]:
    """The session. Spark repeats a failed task once."""
    from pyqueue.spark import spark_session

    logging = log.with_name("log4j2.properties")
    logging.write_text(_LOGGING.format(path=log))
    java = {
        "spark.driver.extraJavaOptions": f"{JAVA_OPTIONS} -Dlog4j2.configurationFile=file:{logging}"
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(URI_ENV, signed_in)
        patch.setenv("PYTHONPATH", str(ROOT))
        # Relative paths, such as the checkpoints in the docs, start where the JVM was started.
        with contextlib.chdir(log.parent):
            session = spark_session("tests", master="local[2,2]", config=CONFIG | java)
        yield session
        session.stop()
