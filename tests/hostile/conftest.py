"""Both kinds of client on one database, and raw access to their documents."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

import pymongo
import pytest
from anyio.from_thread import start_blocking_portal
from bson.raw_bson import RawBSONDocument
from hypothesis import is_hypothesis_test, settings

from pyqueue import AsyncClient, Client
from pyqueue.payloads import OPTIONS
from tests.contract.portal import PortalClient
from tests.hostile.servers import Secure, secure
from tests.support.shared import Mongod

settings.register_profile("pyqueue", deadline=None, derandomize=True, database=None)
settings.load_profile("pyqueue")

_numbers = count(1)


@dataclass(frozen=True)
class Place:
    """A client and its collection. An async client has the blocking names, by a portal."""

    #: "blocking" or "async".
    kind: str
    client: Client
    raw: pymongo.collection.Collection[dict[str, Any]]

    def name(self) -> str:
        """Return an unused queue name. It ends in a letter, so that it is no prefix of another."""
        return f"q{next(_numbers)}q"

    def bytes(self, *but: str) -> list[bytes]:
        """Return the stored documents of all queues except these, byte by byte."""
        options = OPTIONS.with_options(document_class=RawBSONDocument)
        found = self.raw.with_options(codec_options=options).find({"q": {"$nin": list(but)}})
        return [each.raw for each in found.sort("_id", 1)]


@pytest.hookimpl(tryfirst=True)  # before pytest reads the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let ``make test`` search on blocking clients only, since async clients run the same plans."""
    here = [item for item in items if item.path.parent == Path(__file__).parent]
    for item in here:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if params.get("place") == "async" and is_hypothesis_test(getattr(item, "obj", None)):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="module", params=["blocking", "async"])
def place(request: pytest.FixtureRequest, mongod: Mongod) -> Iterator[Place]:
    """A place that the tests of a module share."""
    name = f"t{uuid4().hex[:16]}"
    base, _, query = mongod.url.partition("?")
    url = f"{base.rstrip('/')}/{name}?{query}"
    with ExitStack() as stack:
        mongo = stack.enter_context(pymongo.MongoClient[dict[str, Any]](url))
        stack.callback(mongo.drop_database, name)
        client: Any
        if request.param == "blocking":
            client = Client(url, signals="none:")
        else:
            portal = stack.enter_context(start_blocking_portal())
            client = PortalClient(portal, AsyncClient(url, signals="none:"))
        stack.callback(client.close)
        client.queues()  # makes the indexes before any document
        yield Place(
            request.param, client, mongo[name].get_collection("pyqueue", codec_options=OPTIONS)
        )


@pytest.fixture(scope="session")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    """A mongod that requires passwords and TLS."""
    with secure(tmp_path_factory.mktemp("secure")) as server:
        yield server


#: PyMongo's async monitors leave their sockets to the garbage collector if they are closed while
#: they connect. A monitor that can never connect always does.
ABANDONED = "ignore:unclosed <(socket|ssl):ResourceWarning"


@pytest.fixture(scope="module")
def collected() -> Iterator[None]:
    """Collect the garbage of a module's tests, so that no other module meets it."""
    yield
    gc.collect()


@pytest.fixture
def database(secured: Secure) -> Iterator[str]:
    """The name of a database there that only this test uses; dropped with its users and roles."""
    name = f"t{uuid4().hex[:16]}"
    yield name
    secured.admin[name].command("dropAllUsersFromDatabase")
    secured.admin[name].command("dropAllRolesFromDatabase")
    secured.admin.drop_database(name)
