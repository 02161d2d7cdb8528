"""The command web: serve the dashboard. The demo serves it, too."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Final

import typer

from pyqueue import AsyncClient, ConfigurationError
from pyqueue.cli.common import Commands, Namespace, Url, checked_url, note

app = typer.Typer(cls=Commands)

#: The variable with the password. On the command line, every user of the machine could read it.
PASSWORD: Final = "PYQUEUE_WEB_PASSWORD"
_LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
#: How long the server waits for open pages when it stops, in seconds.
_GRACE_S: Final = 1


@app.command()
def web(
    url: Url = None,
    namespace: Namespace = "pyqueue",
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="The address to listen on.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port.")] = 8080,
    names: Annotated[
        list[str] | None,
        typer.Option(
            "--name",
            metavar="HOST",
            help="A name under which browsers reach the dashboard. Can be repeated.",
        ),
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Allow changes, such as redrive and pause.")
    ] = False,
    label: Annotated[
        str, typer.Option(metavar="TEXT", help="A word in the head of each page, such as staging.")
    ] = "",
) -> None:
    """Serve the dashboard: pages that show queues, messages, errors and workers.

    Set the password in PYQUEUE_WEB_PASSWORD. It may be missing only on the loopback interface.
    """
    password = os.environ.get(PASSWORD) or None
    if host not in _LOOPBACK and password is None:
        raise ConfigurationError(
            f"--host: a dashboard on {host} needs a password; set {PASSWORD}, or leave out --host "
            "to listen on this machine only"
        )
    target = checked_url(url)
    server, dashboard = _imported()
    listening = _listening(host, port)
    given: dict[str, Any] = {"hosts": names or (), "password": password, "label": label}

    # Pages that are open when the server stops are cut off. That is no error, so it is not logged.
    logging.getLogger("uvicorn.error").addFilter(_not_cancelled)

    async def serve() -> None:
        async with AsyncClient(target, namespace=namespace) as client:
            pages = dashboard(client, allow="anyone", writable=write, **given)
            note(f"the dashboard is on {_address(host, listening)}; stop it with Ctrl-C")
            await _server(server, pages).serve(sockets=[listening])

    asyncio.run(serve())


@contextmanager
def beside(url: str, namespace: str) -> Iterator[str]:
    """Serve the dashboard of a namespace on this machine, in a thread, until the block ends.

    Args:
        url: The URL of the server and the database.
        namespace: The namespace to show.

    Yields:
        The address of the dashboard.
    """
    server, dashboard = _imported()
    listening = _listening(_LOOPBACK[0], 0)
    client = AsyncClient(url, namespace=namespace, signals="none:")
    running = _server(server, dashboard(client, allow="anyone", label="demo"))
    logging.getLogger("uvicorn.error").addFilter(_not_cancelled)

    async def serve() -> None:
        async with client:
            await running.serve(sockets=[listening])

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    try:
        address = _address(_LOOPBACK[0], listening)
        note(f"the dashboard is on {address}")
        yield address
    finally:
        running.should_exit = True
        thread.join()


def _server(module: Any, pages: Any) -> Any:
    """Return a uvicorn server for an app."""
    config = module.Config(
        pages,
        lifespan="off",
        log_level="warning",
        timeout_graceful_shutdown=_GRACE_S,
        server_header=False,
    )
    return module.Server(config)


def _address(host: str, listening: socket.socket) -> str:
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{listening.getsockname()[1]}/"


def _not_cancelled(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigurationError(
            f"--port: {host} {port} cannot be used ({error.strerror or error}); use another port"
        ) from error


def _imported() -> tuple[Any, Any]:
    """Return uvicorn, and the class of the dashboard."""
    try:
        import uvicorn

        from pyqueue.web import Dashboard
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"web: {error.name} is not installed; install the ``web`` extra: "
            'pip install "pyqueue-mongo[web]"'
        ) from error
    return uvicorn, Dashboard
