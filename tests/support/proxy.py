"""A TCP proxy in front of a mongod, with faults of the network.

``ProxyLink`` is the proxy itself and runs in an event loop. ``Proxy`` runs one in a thread, for
tests whose client blocks. The fault suite runs one for each member of its replica set, in a
process (see ``tests/chaos/proxies.py``).

A fail point of mongod closes a connection before a command runs. The proxy can lose the reply after
the command ran. Only then is the outcome of the command unknown to the client.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

import bson

_OP_MSG = 2013
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER of 0 s: close() sends a reset
_EVERY = 1_000_000
#: Fields of BSON documents: a date, and a string whose length follows.
_LOCAL_TIME = b"\x09localTime\0"
_HOST_INFO = b"\x02hostInfo\0"


class ProxyLink:
    """The connections of all clients to one server, and the faults on them.

    An async context manager, which listens.

    Args:
        target: The port of the server.
        names: Pairs of bytes; in replies the first of a pair is replaced by the second. Members of
            a replica set tell clients their real addresses, so the proxy writes its own instead.
            Both must have the same length.
        port: The port to listen on; 0 takes a free one.
    """

    def __init__(
        self, target: int, names: Sequence[tuple[bytes, bytes]] = (), *, port: int = 0
    ) -> None:
        self.port = port
        self.target = target
        self._names = names
        self._open = asyncio.Event()
        self._open.set()
        self._cut = False
        self._delay = 0.0
        self._swallow: Counter[str] = Counter()
        self._tear, self._tear_at = 0, 0
        self._apart: frozenset[int] = frozenset()
        self._together = asyncio.Event()
        self._clock_ms = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._connections: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        #: How often each fault struck: "swallowed", "torn", "held", "late", "cut", "apart" and
        #: "misdated".
        self.done: Counter[str] = Counter()
        #: How many replies were swallowed, by the name of the command.
        self.swallowed: Counter[str] = Counter()

    def change(
        self,
        *,
        hold: bool | None = None,
        cut: bool | None = None,
        delay: float | None = None,
        swallow: Mapping[str, int] | None = None,
        tear: tuple[int, int] | None = None,
        apart: Sequence[int] | None = None,
        clock: float | None = None,
    ) -> None:
        """Change the faults that are given and leave the rest.

        Args:
            hold: Keep all messages back until ``hold=False``.
            cut: Reset all connections and refuse new connections.
            delay: Seconds by which each message is late.
            swallow: How many replies to lose, by the name of the command. The connection is reset.
            tear: How many replies to cut off, and after how many bytes. The connection is reset.
            apart: The ports of servers. Messages to and from them are kept back until a change
                leaves them out. Servers name their port if test commands are enabled.
            clock: Seconds by which the server's clock seems to be ahead, in replies to ``hello``.
        """
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
        if swallow is not None:
            self._swallow = Counter(swallow)
        if tear is not None:
            self._tear, self._tear_at = tear
        if apart is not None:
            self._apart = frozenset(apart)
            self._together.set()  # each connection checks whether it is still held
            self._together = asyncio.Event()
        if clock is not None:
            self._clock_ms = round(clock * 1000)

    async def __aenter__(self) -> Self:
        """Listen."""
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop listening and reset all connections."""
        # Closing the server would break a connection that it is just accepting (an assertion of
        # asyncio in Python 3.11 leaves its socket open). So it first stops to accept.
        for listening in self._server.sockets:
            asyncio.get_running_loop().remove_reader(listening.fileno())
        await _turns()  # a connection that was just accepted becomes a task
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await _turns()  # the sockets of aborted transports are closed

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Not a coroutine: a task that is cancelled before its first step would not close the
        # writer.
        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            _reset(writer)

        task = asyncio.create_task(self._connected(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(done)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if self._cut:
                raise ConnectionRefusedError
            replies, commands = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            return
        pair = (writer, commands)
        self._connections.add(pair)
        lost = ""  # the command whose reply is to be swallowed
        server: int | None = None  # the port of the server that connected, if it was one

        async def keep_apart() -> None:
            if server in self._apart:
                self.done["apart"] += 1
            while server in self._apart:
                await self._together.wait()

        async def pass_command(message: bytes) -> None:
            nonlocal lost, server
            server = server or _server_of(message)
            await keep_apart()
            if self._swallow and (name := _command_of(message)) and self._swallow[name] > 0:
                self._swallow[name] -= 1
                lost = name
            commands.write(message)

        async def pass_reply(message: bytes) -> None:
            if lost:
                self.done["swallowed"] += 1
                self.swallowed[lost] += 1
                raise ConnectionResetError
            await keep_apart()
            if self._clock_ms and (at := message.find(_LOCAL_TIME)) >= 0:
                self.done["misdated"] += 1
                message = _misdated(message, at + len(_LOCAL_TIME), self._clock_ms)
            for real, ours in self._names:
                message = message.replace(real, ours)
            if self._tear > 0:
                self._tear -= 1
                self.done["torn"] += 1
                writer.write(message[: self._tear_at])
                await writer.drain()
                raise ConnectionResetError
            writer.write(message)

        try:
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._pump(reader, pass_command, commands))
                pumps.create_task(self._pump(replies, pass_reply, writer))
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


class Proxy:
    """A ``ProxyLink`` in a separate thread; a context manager.

    Args:
        target: The port of the server.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._listening = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self._link.port

    def cut(self) -> None:
        """Reset all connections and refuse new connections."""

        async def change() -> None:
            self._link.change(cut=True)

        asyncio.run_coroutine_threadsafe(change(), self._loop).result()

    def restore(self) -> None:
        """Accept connections again."""

        async def change() -> None:
            self._link.change(cut=False)

        asyncio.run_coroutine_threadsafe(change(), self._loop).result()

    def swallow(self, command: str, replies: int = _EVERY) -> None:
        """Lose the next replies to a command, and count lost replies from 0 again."""

        async def change() -> None:
            self._link.change(swallow={command: replies})
            self._link.swallowed.clear()

        asyncio.run_coroutine_threadsafe(change(), self._loop).result()

    def swallowed(self, command: str) -> int:
        """Return how many replies to a command were lost since the last ``swallow``."""
        return self._link.swallowed[command]

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._link = ProxyLink(self._target)
        async with self._link:
            self._listening.set()
            await self._stop.wait()

    def __enter__(self) -> Self:
        self._thread.start()
        self._listening.wait()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


async def _turns() -> None:
    """Let the event loop make several turns, more than asyncio needs to accept a connection."""
    for _ in range(10):
        await asyncio.sleep(0)


def _reset(*ends: asyncio.StreamWriter) -> None:
    for end in ends:
        with suppress(OSError):  # already closed
            end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        end.transport.abort()


def _command_of(message: bytes) -> str:
    """Return the name of the command in a message: the first field of its body."""
    if int.from_bytes(message[12:16], "little") != _OP_MSG:
        return ""
    body = 20  # after the header and the flags
    while message[body] == 1:  # document sequences may come before the body
        body += 1 + int.from_bytes(message[body + 1 : body + 5], "little")
    size = int.from_bytes(message[body + 1 : body + 5], "little")
    return str(next(iter(bson.decode(message[body + 1 : body + 1 + size]))))


def _server_of(message: bytes) -> int | None:
    """Return the port of the server that sent a message, if the message names it."""
    at = message.find(_HOST_INFO)
    if at < 0:
        return None
    start = at + len(_HOST_INFO) + 4
    return int(message[start : message.index(b"\0", start)].rpartition(b":")[2])


def _misdated(message: bytes, at: int, ms: int) -> bytes:
    """Return a message in which the date at this offset is later by some milliseconds."""
    date = int.from_bytes(message[at : at + 8], "little", signed=True) + ms
    return message[:at] + date.to_bytes(8, "little", signed=True) + message[at + 8 :]
