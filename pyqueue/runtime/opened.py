"""The resources of a connection. They are closed with it, or when it is dropped unclosed.

The garbage collector notices a dropped connection, at any moment and in any thread. So a blocking
connection is closed in a separate thread, and an async connection in a task of its event
loop.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import os
import warnings
import weakref
from typing import Any, Final, NamedTuple, TypeAlias

import pymongo

from pyqueue.embedded import EmbeddedServer

Finalizer: TypeAlias = "weakref.finalize[..., Any]"

#: How many seconds closing a client may spend on checks of gathers whose messages have ended.
_LOOKS_S: Final = 2.0


class Opened(NamedTuple):
    """The resources to close, blocking or async, except resources that the user passed in."""

    driver: Any
    renewer: Any
    bus: Any = None
    mongo: Any = None
    server: EmbeddedServer | None = None

    @property
    def leaks(self) -> bool:
        """Whether any of these resources would stay open if the connection were dropped."""
        if self.driver is None or self.driver.memory:
            return False
        return any(each is not None for each in (self.bus, self.mongo, self.server))


def close_opened(opened: Opened) -> None:
    """Wake the waiting consumers, and close all resources."""
    opened.renewer.close()
    if opened.driver is not None:
        if opened.driver.looks.pending:
            opened.driver.looks.now(_LOOKS_S)
        opened.driver.close_waiters()
    if opened.bus is not None:
        opened.bus.close()
    if opened.mongo is not None:
        with pymongo.timeout(1):  # closing ends the sessions on a server that may be down
            opened.mongo.close()
    if opened.server is not None:
        opened.server.close()


async def close_opened_async(opened: Opened) -> None:
    """Wake the waiting consumers, and close all resources."""
    await opened.renewer.close()
    if opened.driver is not None:
        await opened.driver.settled()
        opened.driver.close_waiters()
    if opened.bus is not None:
        await opened.bus.close()
    if opened.mongo is not None:
        with pymongo.timeout(1):  # closing ends the sessions on a server that may be down
            await opened.mongo.close()
    if opened.server is not None:
        await asyncio.to_thread(opened.server.close)


# ---- dropped

_closing: set[asyncio.Task[None]] = set()


def close_if_dropped(connection: object, name: str, opened: Opened) -> Finalizer:
    """Return a finalizer, which closes the resources of a dropped connection, with a warning."""
    finalizer = weakref.finalize(connection, _dropped, name, opened, os.getpid())
    finalizer.atexit = False  # nothing needs closing when the process ends
    return finalizer


def close_if_dropped_async(connection: object, name: str, opened: Opened) -> Finalizer:
    """Return a finalizer, which closes the resources of a dropped connection, with a warning."""
    finalizer = weakref.finalize(connection, _dropped_async, name, opened, os.getpid())
    finalizer.atexit = False
    return finalizer


def _dropped(name: str, opened: Opened, pid: int) -> None:
    if os.getpid() == pid:  # a fork shares the connections of its parent: leave them alone
        # Not threading.Thread, because the collector may run while this thread holds its locks.
        _thread.start_new_thread(_close_quietly, (opened,))
        _warn(name, opened)


def _close_quietly(opened: Opened) -> None:
    with contextlib.suppress(Exception):
        close_opened(opened)


def _dropped_async(name: str, opened: Opened, pid: int) -> None:
    loop = None if opened.driver is None else opened.driver.loop
    if os.getpid() != pid or (loop is None and opened.server is None):
        return  # the client was never used, or this is a forked process
    if loop is not None and not loop.is_closed():
        with contextlib.suppress(RuntimeError):  # it was just closed
            loop.call_soon_threadsafe(_close_soon, opened)
    elif opened.server is not None:  # all other resources ended with the loop
        _thread.start_new_thread(opened.server.close, ())
    _warn(name, opened)


def _close_soon(opened: Opened) -> None:
    task = asyncio.get_running_loop().create_task(_close_quietly_async(opened))
    _closing.add(task)
    task.add_done_callback(_closing.discard)


async def _close_quietly_async(opened: Opened) -> None:
    with contextlib.suppress(Exception):
        await close_opened_async(opened)


def _warn(name: str, opened: Opened) -> None:
    if opened.mongo is None and opened.server is None:
        return  # the user owns the connections
    text = f"{name} was dropped without being closed: use `with` or `async with`, or call close()"
    warnings.warn(text, ResourceWarning, stacklevel=2)
