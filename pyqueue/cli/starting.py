"""The start of a worker: its output, and how it waits for the server."""

from __future__ import annotations

import os
import signal
import sysconfig
import traceback
from pathlib import Path
from typing import Any, Final

import anyio
import typer

import pyqueue
from pyqueue import AsyncClient, Backoff, Client, ConfigurationError
from pyqueue.backends import managing
from pyqueue.cli.common import note
from pyqueue.errors import Unavailable
from pyqueue.pipeline import Runner, concurrency_of
from pyqueue.pipeline.blocking import connection_of
from pyqueue.pipeline.pulse import Pulse
from pyqueue.runtime.connecting import AsyncConnection
from pyqueue.runtime.retrying import RetryDelays
from pyqueue.runtime.thread_pool import DaemonThreadPool

#: After this time without an answer, in seconds, a worker prints that it is waiting.
_SAY_AFTER_S: Final = 2.0
_RETRIES: Final = Backoff(base=0.5, maximum=5, jitter=0)
#: The maximum number of frames of the user's code that are shown.
_MAX_FRAMES: Final = 5


def start_line(runner: Runner[Any], client: Client | AsyncClient, concurrency: int | None) -> str:
    """Return the line that a worker prints when it starts. It contains no credentials."""
    queues = ", ".join(runner.graph.stages)
    handlers = concurrency_of(runner) if concurrency is None else concurrency
    return (
        f"{runner.name}: pyqueue {pyqueue.__version__}, queues {queues}, concurrency {handlers}, "
        f"{client!r}, pid {os.getpid()}"
    )


async def server_reached(client: Client | AsyncClient, pulse: Pulse | None = None) -> bool:
    """Wait until the server answers. Return False if SIGTERM or SIGINT came first.

    Args:
        client: The client that connects to the server.
        pulse: Records that the event loop is running, or None if there are no health checks.
    """
    connection, threads = connection_of(client), DaemonThreadPool()
    delays, reached = RetryDelays(_RETRIES), False
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_cancel_at_signals, tasks.cancel_scope)
        tasks.start_soon(_say_that_it_waits, client)
        if pulse is not None:
            tasks.start_soon(pulse.turn)
        while not reached:
            try:
                if isinstance(connection, AsyncConnection):
                    await connection.run(managing.ping())
                else:
                    await threads.run(connection.run, managing.ping())
                reached = True
            except Unavailable:
                await anyio.sleep(next(delays))
        tasks.cancel_scope.cancel()
    threads.close()
    return reached


async def _cancel_at_signals(scope: anyio.CancelScope) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as received:
        async for _ in received:
            scope.cancel()
            return


async def _say_that_it_waits(client: Client | AsyncClient) -> None:
    await anyio.sleep(_SAY_AFTER_S)
    note(f"waiting for the server of {client!r}; stop with Ctrl-C")


def import_failed(what: str, error: Exception) -> ConfigurationError:
    """Print where an import failed in the user's code. Return the error that ends the command."""
    show_failure(error)
    remedy = "install what is missing" if isinstance(error, ImportError) else "correct the code"
    return ConfigurationError(f"{what} cannot be imported, see above; {remedy}, and try again")


def show_failure(error: Exception) -> None:
    """Print where the user's code failed, and the exception with its notes."""
    paths = sysconfig.get_paths()
    libraries = [Path(paths[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    libraries.append(Path(pyqueue.__file__).parent)
    frames = [
        each
        for each in traceback.extract_tb(error.__traceback__)
        if not each.filename.startswith("<")
        and not any(Path(each.filename).is_relative_to(path) for path in libraries)
    ]
    lines = traceback.format_list(frames[-_MAX_FRAMES:]) + traceback.format_exception_only(error)
    typer.echo("".join(lines), err=True, nl=False)
