"""The network that is made to fail: a TCP proxy before each member, in a process of their own.

Clients know the proxies' addresses only. The members know one another by their real ones, and say those in every ``hello``; so a proxy
writes its own in their place. All ports have five digits, so a message keeps its length.

``python -m tests.chaos.roles proxies`` runs ``serve``; ``Proxies`` is what the program holds of it.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import bson

from pyqueue import embedded
from tests.chaos.members import url_of
from tests.chaos.processes import Process

__all__ = ["Proxies", "serve"]

_OP_MSG = 2013
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends a reset


class Way:
    """The way of all clients to one member, and what is wrong with it."""

    def __init__(self, port: int, target: int, names: list[tuple[bytes, bytes]]) -> None:
        self._port, self._target, self._names = port, target, names
        self._open = asyncio.Event()
        self._open.set()
        self._cut = False
        self._delay = 0.0
        self._swallow: Counter[str] = Counter()
        self._torn = [0, 0]  # how many replies are still to be torn, and after how many bytes
        self._connections: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        #: What was done: swallowed, torn, held, late and cut, how often.
        self.done: Counter[str] = Counter()

    def change(
        self,
        *,
        hold: bool | None = None,
        cut: bool | None = None,
        delay: float | None = None,
        **more: Any,
    ) -> None:
        """Change what is wrong with it."""
        if hold is not None:
            (self._open.clear if hold else self._open.set)()
        if cut is not None:
            self._cut = cut
        if cut:
            for pair in list(self._connections):
                self.done["cut"] += 1
                _reset(*pair)
        if delay is not None:
            self._delay = delay
        if "swallow" in more:
            self._swallow = Counter(more["swallow"])
        if "tear" in more:
            self._torn = list(more["tear"])

    async def listen(self) -> asyncio.Server:
        """Take connections from now on, until what is returned is closed."""
        return await asyncio.start_server(self._connected, "127.0.0.1", self._port)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if self._cut:
                raise ConnectionRefusedError
            answers, commands = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            _reset(writer)
            return
        pair = (writer, commands)
        self._connections.add(pair)
        doomed = asyncio.Event()  # the next reply is swallowed

        async def command(message: bytes) -> None:
            if self._swallow and (name := _command(message)) and self._swallow[name] > 0:
                self._swallow[name] -= 1
                doomed.set()
            commands.write(message)

        async def reply(message: bytes) -> None:
            if doomed.is_set():
                self.done["swallowed"] += 1
                raise ConnectionResetError
            for real, ours in self._names:
                message = message.replace(real, ours)
            if self._torn[0] > 0:
                self._torn[0] -= 1
                self.done["torn"] += 1
                writer.write(message[: self._torn[1]])
                await writer.drain()
                raise ConnectionResetError
            writer.write(message)

        try:
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._pump(reader, command, commands))
                pumps.create_task(self._pump(answers, reply, writer))
        except* (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self._connections.discard(pair)
            _reset(*pair)

    async def _pump(
        self,
        source: asyncio.StreamReader,
        pass_on: Callable[[bytes], Awaitable[None]],
        sink: asyncio.StreamWriter,
    ) -> None:
        while True:
            head = await source.readexactly(4)
            message = head + await source.readexactly(int.from_bytes(head, "little") - 4)
            if self._delay:
                self.done["late"] += 1
                await asyncio.sleep(self._delay)
            if not self._open.is_set():
                self.done["held"] += 1
                await self._open.wait()
            await pass_on(message)
            await sink.drain()


def _reset(*ends: asyncio.StreamWriter) -> None:
    for end in ends:
        with suppress(OSError):  # it is closed already
            end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        end.transport.abort()


def _command(message: bytes) -> str:
    """The name of the command in a message: the first field of its body."""
    if int.from_bytes(message[12:16], "little") != _OP_MSG:
        return ""
    body = 20  # behind the header and the flags
    while message[body] == 1:  # a sequence of documents may come first
        body += 1 + int.from_bytes(message[body + 1 : body + 5], "little")
    size = int.from_bytes(message[body + 1 : body + 5], "little")
    return str(next(iter(bson.decode(message[body + 1 : body + 1 + size]))))


def serve(spec: dict[str, Any]) -> None:
    """Be the proxies: obey line by line, and answer each with what was done so far."""

    async def main() -> None:
        names = [
            (f"127.0.0.1:{real}".encode(), f"127.0.0.1:{ours}".encode())
            for ours, real in spec["ports"]
        ]
        paths = [Way(ours, real, names) for ours, real in spec["ports"]]
        listening = [await path.listen() for path in paths]
        print("{}", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            place, change = json.loads(line)
            paths[place].change(**change)
            print(json.dumps(paths[place].done), flush=True)
        for each in listening:
            each.close()

    asyncio.run(main())


class Proxies:
    """The process of the proxies, as the program holds it."""

    def __init__(self, folder: Path, targets: list[int]) -> None:
        self.ports: list[int] = []
        while len(self.ports) < len(targets):
            port = embedded._free_port(0)
            if port not in (*targets, *self.ports):
                self.ports.append(port)
        self._process = Process(
            "proxies", folder, {"ports": list(zip(self.ports, targets, strict=True))}
        )
        self._process.hear()  # they listen

    @property
    def url(self) -> str:
        """Where clients reach the replica set; they notice soon when a member does not answer."""
        return url_of(self.ports, "faults") + "&connectTimeoutMS=2000&heartbeatFrequencyMS=1000"

    def change(self, place: int, **change: Any) -> Counter[str]:
        """Change what is wrong with the way to a member; what was done on it so far."""
        self._process.tell([place, change])
        return Counter(self._process.hear())

    def check(self) -> None:
        """Raise QueueError if they ended by themselves."""
        self._process.check()

    def close(self) -> None:
        """End them."""
        self._process.kill()
