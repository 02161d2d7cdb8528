"""A shell for the tests of the command line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pymongo
import pytest

from tests.cli.shell import Shell


@pytest.fixture(scope="session")
def shared(mongo: pymongo.MongoClient[dict[str, Any]]) -> Iterator[str]:
    """The name of a database that the tests of a worker share. To make its indexes takes long."""
    name = f"t{uuid4().hex[:16]}"
    yield name
    mongo.drop_database(name)


@pytest.fixture
def url(
    request: pytest.FixtureRequest,
    url: str,
    shared: str,
    mongo: pymongo.MongoClient[dict[str, Any]],
) -> Iterator[str]:
    """The URL of an empty database. Tests of the doctor change its indexes, so each has its own."""
    if "doctor" in request.node.nodeid:
        yield url
        return
    server, _, rest = url.rpartition("/")
    yield f"{server}/{shared}?{rest.partition('?')[2]}"
    for name in mongo[shared].list_collection_names():
        if name == "pyqueue":
            mongo[shared][name].delete_many({})
        elif name != "pyqueue.signals":  # no process reads an old signal
            mongo[shared].drop_collection(name)


@pytest.fixture
def shell(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    """A shell on an empty database, in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    shell = Shell(url, monkeypatch)
    yield shell
    shell.close()


@pytest.fixture
def bare_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    """A shell without a database, in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    shell = Shell("", monkeypatch)
    yield shell
    shell.close()
