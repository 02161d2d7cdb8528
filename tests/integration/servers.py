"""A mongod with options of the test's own: a standalone, or one that asks for passwords. It never outlives the tests."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pymongo import MongoClient
from pymongo.errors import PyMongoError

from pyqueue import _watchdog
from pyqueue.embedded import _free_port, find_mongod


@contextmanager
def standalone(path: Path, *options: str) -> Iterator[int]:
    """Run a standalone mongod with these options; gives its port."""
    port = _free_port(0)
    (path / "db").mkdir(parents=True)
    keeper = [
        sys.executable,
        "-I",
        "-S",
        _watchdog.__file__,
        str(os.getpid()),
        str(path),
        str(port),
    ]
    mongod = [
        find_mongod(),
        f"--dbpath={path / 'db'}",
        f"--port={port}",
        "--bind_ip=127.0.0.1",
        "--nounixsocket",
    ]
    process = subprocess.Popen([*keeper, *mongod, "--wiredTigerCacheSizeGB=0.25", *options])
    try:
        deadline = time.monotonic() + 60
        while True:
            assert process.poll() is None, (path / "mongod.log").read_text()[-2000:]
            assert time.monotonic() < deadline, "mongod did not start"
            try:
                with MongoClient[dict[str, Any]](
                    "127.0.0.1", port, serverSelectionTimeoutMS=200
                ) as mongo:
                    mongo.admin.command("ping")
                    break
            except PyMongoError:
                time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.wait(20)
