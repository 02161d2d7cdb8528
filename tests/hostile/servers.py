"""Servers as they should be run: a mongod that asks for passwords and speaks TLS only, and TLS before a Redis with a password.

The authority that signs for them is made for one run. None of it outlives the tests.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from anyio.from_thread import start_blocking_portal
from pymongo import MongoClient
from pymongo.errors import PyMongoError

from pyqueue import _watchdog
from pyqueue.embedded import _free_port, find_mongod
from tests.conftest import missing

Mongo = MongoClient[dict[str, Any]]

ADMINISTRATOR = ("administrator", "of-these-tests-only")


def openssl(*arguments: str) -> None:
    program = shutil.which("openssl")
    if program is None:
        missing("the openssl command, to make certificates with")
    done = subprocess.run([program, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@dataclass(frozen=True)
class Authority:
    """An authority, and a certificate of its for 127.0.0.1, and for no name."""

    directory: Path

    @property
    def ca(self) -> Path:
        """What clients trust."""
        return self.directory / "ca.pem"

    @property
    def server(self) -> Path:
        """The server's key and certificate."""
        return self.directory / "server.pem"


def authority(directory: Path) -> Authority:
    """Make one."""
    directory.mkdir()
    at = {
        name: str(directory / name)
        for name in ("ca.key", "ca.pem", "server.key", "server.csr", "server.crt", "extension")
    }
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    openssl(
        "req",
        "-x509",
        *curve,
        "-keyout",
        at["ca.key"],
        "-out",
        at["ca.pem"],
        "-days",
        "2",
        "-subj",
        f"/CN={directory.name}",
    )
    openssl(
        "req", *curve, "-keyout", at["server.key"], "-out", at["server.csr"], "-subj", "/CN=server"
    )
    Path(at["extension"]).write_text("subjectAltName=IP:127.0.0.1\n")
    sign = ["-CA", at["ca.pem"], "-CAkey", at["ca.key"], "-CAcreateserial", "-days", "2"]
    openssl(
        "x509",
        "-req",
        "-in",
        at["server.csr"],
        *sign,
        "-out",
        at["server.crt"],
        "-extfile",
        at["extension"],
    )
    made = Authority(directory)
    made.server.write_text(Path(at["server.key"]).read_text() + Path(at["server.crt"]).read_text())
    return made


@dataclass(frozen=True)
class Secure:
    """A replica set of one member that asks for passwords and speaks TLS only."""

    port: int
    trusted: Authority
    stranger: Authority
    admin: Mongo

    def url(self, user: str, password: str, database: str, **options: str) -> str:
        """A URL as one gives it to a client; the user is one of that database."""
        given = {"replicaSet": "secure", "tls": "true", "tlsCAFile": str(self.trusted.ca)} | options
        query = "&".join(
            f"{name}={quote(value, safe='')}" for name, value in given.items() if value
        )
        return f"mongodb://{quote(user, safe='')}:{quote(password, safe='')}@127.0.0.1:{self.port}/{database}?{query}"

    def user(self, database: str, name: str, password: str, *roles: Any) -> None:
        """Make a user of a database."""
        self.admin[database].command("createUser", name, pwd=password, roles=list(roles))


@contextmanager
def secure(path: Path) -> Iterator[Secure]:
    """Run one."""
    path.mkdir(exist_ok=True)
    trusted, stranger = authority(path / "trusted"), authority(path / "stranger")
    (path / "db").mkdir()
    (path / "key").write_text("c2VjcmV0IG9mIHRoZSBtZW1iZXJz" * 4)
    (path / "key").chmod(0o600)
    port = _free_port(0)
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
    mongod += [
        "--wiredTigerCacheSizeGB=0.25",
        "--replSet=secure",
        f"--keyFile={path / 'key'}",
        "--oplogSize=16",
    ]
    mongod += [
        "--tlsMode=requireTLS",
        f"--tlsCertificateKeyFile={trusted.server}",
        f"--tlsCAFile={trusted.ca}",
    ]
    mongod += [
        "--tlsAllowConnectionsWithoutCertificates",
        "--setParameter=diagnosticDataCollectionEnabled=false",
    ]
    mongod += ["--setParameter=shutdownTimeoutMillisForSignaledShutdown=0"]
    options: dict[str, Any] = {
        "tls": True,
        "tlsCAFile": str(trusted.ca),
        "serverSelectionTimeoutMS": 500,
    }
    process = subprocess.Popen([*keeper, *mongod])
    try:
        with Mongo("127.0.0.1", port, directConnection=True, **options) as first:
            initiate(first, port, process, path / "mongod.log")
            # As long as there is no user, one from this machine may make the first.
            name, password = ADMINISTRATOR
            first.admin.command("createUser", name, pwd=password, roles=["root"])
        with Mongo(
            "127.0.0.1", port, replicaSet="secure", username=name, password=password, **options
        ) as admin:
            yield Secure(port, trusted, stranger, admin)
    finally:
        process.terminate()
        process.wait(20)


def initiate(mongo: Mongo, port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Make a replica set of it, and wait until it can be written to."""
    config = {"_id": "secure", "members": [{"_id": 0, "host": f"127.0.0.1:{port}"}]}
    deadline = time.monotonic() + 60
    begun = False
    trouble: object = "no primary"
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-2000:]
        try:
            if not begun:
                mongo.admin.command("replSetInitiate", config)
                begun = True
            if mongo.admin.command("hello")["isWritablePrimary"]:
                return
        except PyMongoError as error:
            trouble = error
        time.sleep(0.02)
    raise AssertionError(f"mongod was not ready: {trouble}")


@contextmanager
def relay(target: int, certificate: Path) -> Iterator[int]:
    """Speak TLS before a port that does not; gives the port of that."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", target)
        await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer))

    async def start() -> asyncio.Server:
        return await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)

    with start_blocking_portal() as portal:
        server = portal.call(start)
        try:
            yield int(server.sockets[0].getsockname()[1])
        finally:
            portal.call(server.close)
