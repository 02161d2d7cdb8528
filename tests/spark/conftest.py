"""One Spark session for all tests here. They run in one worker: the session is the dear thing.

Tests that need no session do not ask for it, so they start none.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pymongo
import pytest

from pyqueue import Client
from pyqueue.embedded import EmbeddedServer
from pyqueue.spark import spark_session
from tests.spark.fakes import Flow, faked
from tests.spark.programs import CONFIG

__all__ = ["faked"]

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("spark"))


@pytest.fixture(scope="session")
def place(mongod: EmbeddedServer, mongo: pymongo.MongoClient[dict[str, Any]]) -> Iterator[str]:
    """The URL of a database that these tests share; each has queues of its own."""
    name = f"t{uuid4().hex[:16]}"
    base, _, query = mongod.url.partition("?")
    yield f"{base.rstrip('/')}/{name}?{query}"
    mongo.drop_database(name)


@pytest.fixture(scope="session")
def shared(place: str) -> Iterator[Client]:
    """A client of it, which has reached the server before."""
    with Client(place, signals="none:") as client:
        client.queues()
        yield client


@pytest.fixture
def flow(shared: Client) -> Flow:
    """Two queues, and what goes between them."""
    return Flow(shared)


@pytest.fixture(scope="session")
def password() -> str:
    """What nobody may see."""
    return f"pw{uuid4().hex}"


@pytest.fixture(scope="session")
def signed_in(place: str, password: str, mongo: pymongo.MongoClient[dict[str, Any]]) -> Iterator[str]:
    """The same database's URL, with credentials."""
    user = f"user{uuid4().hex[:8]}"
    mongo.admin.command("createUser", user, pwd=password, roles=["root"])
    yield place.replace("mongodb://", f"mongodb://{user}:{password}@") + "&authSource=admin"
    mongo.admin.command("dropUser", user)


#: The environment variable that holds that URL, in the session's workers too.
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
    """The session's log: nothing, until a test asks for more by ``setLogLevel``. Tasks fail here on purpose."""
    return tmp_path_factory.mktemp("spark") / "log"


@pytest.fixture(scope="session")
def spark(signed_in: str, log: Path) -> Iterator[Any]:
    """The session. A task that fails is tried once more."""
    logging = log.with_name("log4j2.properties")
    logging.write_text(_LOGGING.format(path=log))
    java = {"spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile=file:{logging}"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(URI_ENV, signed_in)
        session = spark_session("tests", master="local[2,2]", config=CONFIG | java)
        yield session
        session.stop()
