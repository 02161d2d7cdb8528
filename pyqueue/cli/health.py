"""The health checks of ``pyqueue worker``: a small HTTP server in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Final

from pyqueue import ConfigurationError
from pyqueue.cli.common import note
from pyqueue.pipeline.pulse import Pulse

#: A client that sends nothing for this time, in seconds, is disconnected.
_SILENT_S: Final = 5.0


@contextmanager
def served(address: str | None) -> Iterator[Pulse | None]:
    """Serve health checks until the block ends. Yield the pulse that they read, or None.

    ``/live`` answers 503 while the event loop is blocked, and ``/ready`` while no messages can be
    received.

    Args:
        address: "PORT" or "HOST:PORT", or None for no checks.

    Raises:
        ConfigurationError: The address is not allowed, or cannot be used.
    """
    if address is None:
        yield None
        return
    pulse = Pulse()
    server = _server(address, {"/live": pulse.why_not_alive, "/ready": pulse.why_not_ready})
    host, port = server.server_address[:2]
    note(f"health checks on http://{host!s}:{port}/live and /ready")
    thread = threading.Thread(target=server.serve_forever, name="pyqueue-health", daemon=True)
    thread.start()
    try:
        yield pulse
    finally:
        server.shutdown()
        server.server_close()


class _Server(ThreadingTCPServer):
    """An HTTP server that answers requests for the health checks.

    Args:
        place: The host and the port.
        checks: The checks, keyed by path. Each is a function that returns what is wrong, or None.
    """

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, place: tuple[str, int], checks: dict[str, Callable[[], str | None]]) -> None:
        self.checks = checks
        super().__init__(place, _Handler)


class _Handler(BaseHTTPRequestHandler):
    timeout = _SILENT_S
    server: _Server
    server_version = "pyqueue"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer the request for a check."""
        check = self.server.checks.get(self.path.partition("?")[0])
        wrong = f"no such page; use {' or '.join(self.server.checks)}"
        status = 404
        if check is not None:
            found = check()
            status, wrong = (200, "ok") if found is None else (503, found)
        body = f"{wrong}\n".encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing, because the checks come every few seconds."""


def _server(address: str, checks: dict[str, Callable[[], str | None]]) -> _Server:
    host, _, port = address.rpartition(":")
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigurationError(
            f"--health: expected PORT or HOST:PORT, found {address!r}; use a port such as 8081"
        )
    try:
        return _Server((host or "127.0.0.1", int(port)), checks)
    except OSError as error:
        raise ConfigurationError(
            f"--health: {address} cannot be used ({error.strerror or error}); use another port"
        ) from error
