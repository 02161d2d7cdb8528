"""A TCP proxy before a mongod, which can swallow replies: the command is carried out, and nobody hears of it.

Fail points of mongod cut a connection before a command runs; this is the other half, the one that leaves outcomes unknown.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections import Counter
from types import TracebackType
from typing import Self

import bson

_OP_MSG = 2013


class Proxy:
    """Listens on a port of its own; ``cut[name]`` replies to the command of that name are swallowed and their connection is closed."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        self._lock = threading.Lock()
        self._cut: Counter[str] = Counter()
        self._seen: Counter[str] = Counter()
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def cut(self, command: str, replies: int = 1_000_000) -> None:
        """Swallow the next replies to a command."""
        with self._lock:
            self._cut[command] = replies
            self._seen[command] = 0

    def swallowed(self, command: str) -> int:
        """How many were, since ``cut``."""
        return self._seen[command]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._listening.close()
        for each in self._sockets:
            _end(each)
        for thread in self._threads:
            thread.join()
        for each in self._sockets:
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                client.close()
                continue
            cutting = threading.Event()
            self._sockets += [client, server]
            for pump in (self._requests, self._replies):
                thread = threading.Thread(target=pump, args=(client, server, cutting))
                self._threads.append(thread)
                thread.start()

    def _requests(
        self, client: socket.socket, server: socket.socket, cutting: threading.Event
    ) -> None:
        try:
            while message := _message(client):
                name = _command(message)
                with self._lock:
                    if self._cut[name] > 0:
                        self._cut[name] -= 1
                        self._seen[name] += 1
                        cutting.set()
                server.sendall(message)
        except OSError:
            pass
        _end(client)
        _end(server)

    def _replies(
        self, client: socket.socket, server: socket.socket, cutting: threading.Event
    ) -> None:
        try:
            while (data := server.recv(65536)) and not cutting.is_set():
                client.sendall(data)
        except OSError:
            pass
        _end(client)
        _end(server)


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended
        connection.shutdown(socket.SHUT_RDWR)


def _message(connection: socket.socket) -> bytes:
    head = _exactly(connection, 4)
    return head and head + _exactly(connection, struct.unpack("<i", head)[0] - 4)


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            return b""
        data += part
    return data


def _command(message: bytes) -> str:
    """The name of the command in a message: the first field of its body."""
    if struct.unpack_from("<i", message, 12)[0] != _OP_MSG:
        return ""
    body = 20  # behind the header and the flags
    while message[body] == 1:  # a sequence of documents may come first
        body += 1 + struct.unpack_from("<i", message, body + 1)[0]
    size = struct.unpack_from("<i", message, body + 1)[0]
    return str(next(iter(bson.decode(message[body + 1 : body + 1 + size]))))
