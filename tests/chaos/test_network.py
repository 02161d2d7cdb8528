"""The proxies of the fault suite: what each fault of the network does to a client, and to the server behind."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import bson
import pytest

from pyqueue import QueueError, embedded
from tests.chaos import proxies
from tests.chaos.proxies import Proxies, Way, serve
from tests.integration.eventually import async_until

OP_MSG, OP_QUERY = 2013, 2004
GONE = (OSError, asyncio.IncompleteReadError)  # what a client hears of a connection that was reset


def message(command: str, *, about: str = "", operation: int = OP_MSG, documents: int = 0) -> bytes:
    """A command as drivers send it; some documents of it may come before its body."""
    sequence = b"documents\0" + bson.encode({"n": 1}) * documents
    first = b"\1" + (len(sequence) + 4).to_bytes(4, "little") + sequence if documents else b""
    body = bytes(4) + first + b"\0" + bson.encode({command: "jobs", "about": about})
    head = (16 + len(body), 1, 0, operation)
    return b"".join(each.to_bytes(4, "little") for each in head) + body


async def read(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readexactly(4)
    return head + await reader.readexactly(int.from_bytes(head, "little") - 4)


class Server:
    """It answers each message with the same, and keeps what it got."""

    def __init__(self) -> None:
        self.got: list[bytes] = []

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(*GONE):
            while True:
                self.got.append(await read(reader))
                writer.write(self.got[-1])
                await writer.drain()
        writer.close()


class Connection:
    """A client's connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def ask(self, command: bytes) -> bytes:
        """Send a command, and wait for what is answered."""
        self.writer.write(command)
        await self.writer.drain()
        return await read(self.reader)


class Net:
    """A server, a way to it, and clients."""

    def __init__(self, way: Way, port: int, server: Server) -> None:
        self.way, self._port, self.server = way, port, server

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Connection]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            yield Connection(reader, writer)
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def is_reset(self) -> None:
        """A new connection comes to nothing."""
        async with self.client() as client:
            with pytest.raises(GONE):
                await client.ask(message("ping"))


def on(scenario: Callable[[Net], Coroutine[Any, Any, None]], *names: tuple[bytes, bytes]) -> None:
    """Play it on a net of its own."""

    async def main() -> None:
        server = Server()
        async with await asyncio.start_server(server.answer, "127.0.0.1", 0) as behind:
            port = embedded._free_port(0)
            way = Way(port, behind.sockets[0].getsockname()[1], list(names))
            async with await way.listen():
                await asyncio.wait_for(scenario(Net(way, port, server)), 20)

    asyncio.run(main())


def test_a_way_that_is_whole_tells_the_proxies_names_for_the_members() -> None:
    async def scenario(net: Net) -> None:
        async with net.client() as client:
            asked = message("hello", about="127.0.0.1:27017")
            assert await client.ask(asked) == message("hello", about="127.0.0.1:37017")
            assert net.server.got == [asked]
            assert not net.way.done

    on(scenario, (b"127.0.0.1:27017", b"127.0.0.1:37017"))


def test_a_slow_way_delays_each_message_both_ways() -> None:
    async def scenario(net: Net) -> None:
        net.way.change(delay=0.01)
        async with net.client() as client:
            assert await client.ask(message("ping")) == message("ping")
            assert net.way.done == {"late": 2}
            net.way.change(delay=0)
            await client.ask(message("ping"))
            assert net.way.done == {"late": 2}

    on(scenario)


def test_what_a_stalled_way_holds_arrives_in_the_end() -> None:
    async def scenario(net: Net) -> None:
        net.way.change(hold=True)
        async with net.client() as client:
            asking = asyncio.create_task(client.ask(message("ping")))
            await async_until(lambda: net.way.done["held"])
            assert net.server.got == []
            net.way.change(hold=False)
            assert await asking == message("ping")
            assert net.way.done == {"held": 1}

    on(scenario)


@pytest.mark.parametrize("documents", [0, 2])
def test_a_swallowed_reply_is_that_of_a_command_that_was_carried_out(documents: int) -> None:
    async def scenario(net: Net) -> None:
        net.way.change(swallow={"insert": 1})
        async with net.client() as client:
            await client.ask(message("insert", operation=OP_QUERY))  # not one that is looked into
            await client.ask(message("find"))
            assert not net.way.done
            with pytest.raises(GONE):
                await client.ask(message("insert", documents=documents))
        assert net.server.got[2:] == [message("insert", documents=documents)]
        assert net.way.done == {"swallowed": 1}
        async with net.client() as client:  # as many as were asked for
            await client.ask(message("insert", documents=documents))

    on(scenario)


def test_a_torn_reply_ends_in_the_middle() -> None:
    async def scenario(net: Net) -> None:
        net.way.change(tear=[1, 20])
        async with net.client() as client:
            with pytest.raises(GONE):
                await client.ask(message("ping"))
        assert net.server.got == [message("ping")]
        assert net.way.done == {"torn": 1}
        async with net.client() as client:
            await client.ask(message("ping"))

    on(scenario)


def test_a_cut_way_resets_what_is_open_and_refuses_what_is_new() -> None:
    async def scenario(net: Net) -> None:
        async with net.client() as client:
            await client.ask(message("ping"))
            net.way.change(cut=True)
            with pytest.raises(GONE):
                await client.ask(message("ping"))
        assert net.way.done == {"cut": 1}
        await net.is_reset()
        assert len(net.server.got) == 1
        net.way.change(cut=False)
        async with net.client() as client:
            await client.ask(message("ping"))

    on(scenario)


def test_a_way_to_a_member_that_is_away_resets_who_comes() -> None:
    async def scenario(net: Net) -> None:
        net.way._target = embedded._free_port(0)
        await net.is_reset()

    on(scenario)


def test_the_proxies_obey_line_by_line_until_there_are_no_more(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ways: list[Way] = []

    class Kept(Way):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.done["late"] = len(ways)
            ways.append(self)

    monkeypatch.setattr(proxies, "Way", Kept)
    monkeypatch.setattr(sys, "stdin", io.StringIO('[1, {"delay": 0.5}]\n[0, {"cut": true}]\n'))
    serve({"ports": [(embedded._free_port(0), 1), (embedded._free_port(0), 2)]})
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {},
        {"late": 1},
        {"late": 0},
    ]
    assert [(way._delay, way._cut) for way in ways] == [(0.0, True), (0.5, False)]


def test_the_process_of_the_proxies_has_ports_of_its_own_and_says_when_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = [embedded._free_port(0) for _ in range(3)]
    drawn = itertools.chain(
        [ports[0], ports[1], ports[1]], ports[2:]
    )  # the member's own; then one and the same twice
    monkeypatch.setattr(embedded, "_free_port", lambda _: next(drawn))
    held = Proxies(tmp_path, [ports[0], 1])
    assert held.ports == ports[1:]
    assert all(f"127.0.0.1:{port}" in held.url for port in ports[1:])
    assert held.change(1, delay=0.5) == {}
    held.check()
    held.close()
    with pytest.raises(QueueError, match="proxies ended by itself, with status -9"):
        held.check()
