"""The proxy: the effect of each fault of the network on a client and on the server."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import bson
import pytest

from pyqueue import QueueError, embedded
from tests.chaos import proxies
from tests.chaos.proxies import Proxies, serve
from tests.support.eventually import async_eventually
from tests.support.proxy import ProxyLink
from tests.support.servers import free_port

OP_MSG, OP_QUERY = 2013, 2004
GONE = (OSError, asyncio.IncompleteReadError)  # the errors of a reset connection


def message(
    command: str, *, about: str = "", operation: int = OP_MSG, documents: int = 0, **more: object
) -> bytes:
    """Return a command as drivers send it, after a sequence of documents if there are any."""
    sequence = b"documents\0" + bson.encode({"n": 1}) * documents
    first = b"\1" + (len(sequence) + 4).to_bytes(4, "little") + sequence if documents else b""
    body = bytes(4) + first + b"\0" + bson.encode({command: "jobs", "about": about, **more})
    head = (16 + len(body), 1, 0, operation)
    return b"".join(each.to_bytes(4, "little") for each in head) + body


async def read(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readexactly(4)
    return head + await reader.readexactly(int.from_bytes(head, "little") - 4)


class Server:
    """Sends each message back and keeps it."""

    def __init__(self) -> None:
        self.received: list[bytes] = []

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(*GONE):
            while True:
                self.received.append(await read(reader))
                writer.write(self.received[-1])
                await writer.drain()
        writer.close()


class Connection:
    """The connection of a client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def ask(self, command: bytes) -> bytes:
        """Send a command and return the reply."""
        self.writer.write(command)
        await self.writer.drain()
        return await read(self.reader)


class Net:
    """A server, a link to it, and clients."""

    def __init__(self, link: ProxyLink, server: Server) -> None:
        self.link, self.server = link, server

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Connection]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.link.port)
        try:
            yield Connection(reader, writer)
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def is_reset(self) -> None:
        """Assert that a new connection is reset."""
        async with self.client() as client:
            with pytest.raises(GONE):
                await client.ask(message("ping"))


Scenario = Callable[[Net], Coroutine[Any, Any, None]]


def run(scenario: Scenario, *names: tuple[bytes, bytes]) -> None:
    """Run a scenario with a new server and a new link."""

    async def main() -> None:
        server = Server()
        async with await asyncio.start_server(server.answer, "127.0.0.1", 0) as behind:
            link = ProxyLink(behind.sockets[0].getsockname()[1], names)
            async with link:
                await asyncio.wait_for(scenario(Net(link, server)), 60)

    asyncio.run(main())


def on_a_link(*names: tuple[bytes, bytes]) -> Callable[[Scenario], Callable[[], None]]:
    """Make a test of a scenario, which runs with a new server and a new link."""

    def make(scenario: Scenario) -> Callable[[], None]:
        return lambda: run(scenario, *names)

    return make


@on_a_link((b"127.0.0.1:27017", b"127.0.0.1:37017"))
async def test_link_replaces_the_addresses_of_members(net: Net) -> None:
    async with net.client() as client:
        asked = message("hello", about="127.0.0.1:27017")
        assert await client.ask(asked) == message("hello", about="127.0.0.1:37017")
        assert net.server.received == [asked]
        assert not net.link.done


@on_a_link()
async def test_link_delays_each_message_in_both_directions(net: Net) -> None:
    net.link.change(delay=0.01)
    async with net.client() as client:
        assert await client.ask(message("ping")) == message("ping")
        assert net.link.done == {"late": 2}
        net.link.change(delay=0)
        await client.ask(message("ping"))
        assert net.link.done == {"late": 2}


@on_a_link()
async def test_link_holds_messages_back_and_delivers_them_later(net: Net) -> None:
    net.link.change(hold=True)
    async with net.client() as client:
        asking = asyncio.create_task(client.ask(message("ping")))
        await async_eventually(lambda: net.link.done["held"])
        assert net.server.received == []
        net.link.change(hold=False)
        assert await asking == message("ping")
        assert net.link.done == {"held": 1}


@pytest.mark.parametrize("documents", [0, 2])
def test_link_swallows_the_reply_of_a_command_that_ran(documents: int) -> None:
    async def scenario(net: Net) -> None:
        net.link.change(swallow={"insert": 1})
        async with net.client() as client:
            await client.ask(message("insert", operation=OP_QUERY))  # the link does not read it
            await client.ask(message("find"))
            assert not net.link.done
            with pytest.raises(GONE):
                await client.ask(message("insert", documents=documents))
        assert net.server.received[2:] == [message("insert", documents=documents)]
        assert net.link.done == {"swallowed": 1}
        assert net.link.swallowed == {"insert": 1}
        async with net.client() as client:  # only one reply is lost
            await client.ask(message("insert", documents=documents))

    run(scenario)


@on_a_link()
async def test_link_resets_in_the_middle_of_a_torn_reply(net: Net) -> None:
    net.link.change(tear=(1, 20))
    async with net.client() as client:
        with pytest.raises(GONE):
            await client.ask(message("ping"))
    assert net.server.received == [message("ping")]
    assert net.link.done == {"torn": 1}
    async with net.client() as client:
        await client.ask(message("ping"))


@on_a_link()
async def test_link_that_is_cut_resets_and_refuses_connections(net: Net) -> None:
    async with net.client() as client:
        await client.ask(message("ping"))
        net.link.change(cut=True)
        with pytest.raises(GONE):
            await client.ask(message("ping"))
    assert net.link.done == {"cut": 1}
    await net.is_reset()
    assert len(net.server.received) == 1
    net.link.change(cut=False)
    async with net.client() as client:
        await client.ask(message("ping"))


@on_a_link()
async def test_link_without_a_server_resets_connections(net: Net) -> None:
    net.link.target = free_port()
    await net.is_reset()


@on_a_link()
async def test_link_keeps_a_server_apart_and_no_client(net: Net) -> None:
    """Messages of a server that names its port wait. They pass when a change leaves it out."""
    net.link.change(apart=[27018])
    async with net.client() as server, net.client() as other, net.client() as client:
        hello = message("hello", hostInfo="machine:27018")
        asking = asyncio.create_task(server.ask(hello))
        await async_eventually(lambda: net.link.done["apart"])
        assert await other.ask(message("hello", hostInfo="machine:27019"))
        assert await client.ask(message("ping"))
        net.link.change(apart=[27019])
        assert await asking == hello
        asking = asyncio.create_task(other.ask(message("ping")))
        await async_eventually(lambda: net.link.done["apart"] == 2)
        net.link.change(apart=[])
        assert await asking == message("ping")


@on_a_link()
async def test_link_steps_the_clock_of_the_server(net: Net) -> None:
    noon = datetime(2026, 1, 1, 12, tzinfo=UTC)
    async with net.client() as client:
        for seconds in (-2.5, 3600):
            net.link.change(clock=seconds)
            later = noon + timedelta(seconds=seconds)
            reply = await client.ask(message("hello", localTime=noon))
            assert reply == message("hello", localTime=later)
        net.link.change(clock=0)
        unchanged = message("hello", localTime=noon)
        assert await client.ask(unchanged) == unchanged
        assert net.link.done == {"misdated": 2}


def test_proxies_follow_orders_until_the_input_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    links: list[ProxyLink] = []
    changes: list[tuple[int, dict[str, Any]]] = []

    class RecordedLink(ProxyLink):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.done["late"] = len(links)
            links.append(self)

        def change(self, **faults: Any) -> None:
            changes.append((links.index(self), faults))

    monkeypatch.setattr(proxies, "ProxyLink", RecordedLink)
    monkeypatch.setattr(sys, "stdin", io.StringIO('[1, {"delay": 0.5}]\n[0, {"cut": true}]\n'))
    serve({"ports": [(free_port(), 1, 1), (free_port(), 2, 2)]})
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {},
        {"late": 1},
        {"late": 0},
    ]
    assert changes == [(1, {"delay": 0.5}), (0, {"cut": True})]


def test_proxies_use_different_ports_and_report_their_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = [free_port() for _ in range(3)]
    # The port of a member, and then the same port twice.
    drawn = itertools.chain([ports[0], ports[1], ports[1]], ports[2:])
    monkeypatch.setattr(embedded, "_free_port", lambda _: next(drawn))
    held = Proxies(tmp_path, [ports[0], 1], [ports[0], 1])
    assert held.ports == ports[1:]
    assert all(f"127.0.0.1:{port}" in held.url for port in ports[1:])
    assert held.change(1, delay=0.5) == {}
    held.check()
    held.close()
    with pytest.raises(QueueError, match="proxies ended early with status -9"):
        held.check()
