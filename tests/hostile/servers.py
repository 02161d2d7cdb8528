"""Servers as they should be run: a mongod that requires passwords and TLS, and TLS before Redis.

The authority that signs their certificates is made for one run.
"""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from anyio.from_thread import start_blocking_portal
from pymongo import MongoClient

from tests.support.servers import missing, mongod_process

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
    """An authority, and a certificate by it for 127.0.0.1, which holds for no name."""

    directory: Path

    @property
    def ca(self) -> Path:
        """The certificate that clients trust."""
        return self.directory / "ca.pem"

    @property
    def server(self) -> Path:
        """The key and the certificate of the server."""
        return self.directory / "server.pem"


def authority(directory: Path) -> Authority:
    """Make an authority and a certificate in a new directory."""
    directory.mkdir()
    at = {
        name: str(directory / name)
        for name in ("ca.key", "ca.pem", "server.key", "server.csr", "server.crt", "extension")
    }
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    own = ["-keyout", at["ca.key"], "-out", at["ca.pem"], "-days", "2"]
    openssl("req", "-x509", *curve, *own, "-subj", f"/CN={directory.name}")
    request = ["-keyout", at["server.key"], "-out", at["server.csr"]]
    openssl("req", *curve, *request, "-subj", "/CN=server")
    Path(at["extension"]).write_text("subjectAltName=IP:127.0.0.1\n")
    sign = ["-CA", at["ca.pem"], "-CAkey", at["ca.key"], "-CAcreateserial", "-days", "2"]
    signed = ["-in", at["server.csr"], "-out", at["server.crt"], "-extfile", at["extension"]]
    openssl("x509", "-req", *signed, *sign)
    made = Authority(directory)
    made.server.write_text(Path(at["server.key"]).read_text() + Path(at["server.crt"]).read_text())
    return made


@dataclass(frozen=True)
class Secure:
    """A replica set of one member that requires passwords and TLS."""

    port: int
    trusted: Authority
    stranger: Authority
    admin: Mongo

    def url(self, user: str, password: str, database: str, **options: str) -> str:
        """Return a URL for clients; the user is defined in that database."""
        given = {"replicaSet": "secure", "tls": "true", "tlsCAFile": str(self.trusted.ca)} | options
        query = "&".join(
            f"{name}={quote(value, safe='')}" for name, value in given.items() if value
        )
        credentials = f"{quote(user, safe='')}:{quote(password, safe='')}"
        return f"mongodb://{credentials}@127.0.0.1:{self.port}/{database}?{query}"

    def user(self, database: str, name: str, password: str, *roles: Any) -> None:
        """Create a user in a database."""
        self.admin[database].command("createUser", name, pwd=password, roles=list(roles))


@contextmanager
def secure(path: Path) -> Iterator[Secure]:
    """Run such a server."""
    path.mkdir(exist_ok=True)
    trusted, stranger = authority(path / "trusted"), authority(path / "stranger")
    key = path / "key"
    key.write_text("c2VjcmV0IG9mIHRoZSBtZW1iZXJz" * 4)
    key.chmod(0o600)
    options = [f"--keyFile={key}", "--tlsMode=requireTLS", f"--tlsCAFile={trusted.ca}"]
    options += [f"--tlsCertificateKeyFile={trusted.server}"]
    options += ["--tlsAllowConnectionsWithoutCertificates"]
    tls: dict[str, Any] = {"tls": True, "tlsCAFile": str(trusted.ca)}
    with mongod_process(path, *options, replica_set="secure", **tls) as port:
        name, password = ADMINISTRATOR
        # While there is no user, a connection from this machine may create the first one.
        with Mongo("127.0.0.1", port, directConnection=True, **tls) as first:
            first.admin.command("createUser", name, pwd=password, roles=["root"])
        with Mongo("127.0.0.1", port, username=name, password=password, **tls) as admin:
            yield Secure(port, trusted, stranger, admin)


@contextmanager
def relay(target: int, certificate: Path) -> Iterator[int]:
    """Speak TLS in front of a port that does not; yield the port of the relay."""
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
