"""How a run learns which of its messages were cancelled, and tells their handlers.

An event of the bus says that some message of the namespace was cancelled, but not which one. So a
run that hears the event checks which of its messages were cancelled. If the event is lost, or there
is no bus, the next renewal of the lease notices the cancellation.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import anyio

from pyqueue.backends.ending import CANCELLATIONS, find_cancelled
from pyqueue.errors import QueueClosed, QueueError
from pyqueue.messages import PackedReservation, Reservation, StreamReservation
from pyqueue.pipeline.blocking import ClientRunner

log = logging.getLogger("pyqueue")


class _Watched(NamedTuple):
    """A message whose handler is running, and the function that notifies the handler."""

    message: Reservation[Any]
    tell: Callable[[], object]


class Cancellations:
    """The messages of a run whose handlers are running, and the functions that notify them.

    Args:
        runner: Runs the plans.
        loop: The event loop of the run.
    """

    def __init__(self, runner: ClientRunner, loop: asyncio.AbstractEventLoop) -> None:
        self._runner = runner
        self._loop = loop
        #: Extends leases, and finds cancelled messages.
        self.renewal = runner.renewal(self._tell_soon)
        self._watched: dict[int, _Watched] = {}
        #: Set once this run hears events, or has failed to listen.
        self.listening = asyncio.Event()
        #: Whether to read which messages were cancelled.
        self._asked = asyncio.Event()
        #: When the last event was heard, by the monotonic clock.
        self._heard: float | None = None

    def add(self, message: Reservation[Any], tell: Callable[[], object], age_s: float) -> None:
        """Watch a message until ``discard``. If it is cancelled, call ``tell`` in the event loop.

        ``age_s`` is the number of seconds since the message was claimed.
        """
        if isinstance(message, (PackedReservation, StreamReservation)):
            return  # no holder of such a message is asked to end it
        self._watched[id(message)] = _Watched(message, tell)
        if self._heard is not None and time.monotonic() - age_s <= self._heard:
            self._asked.set()  # the event may have been about this message

    def discard(self, message: Reservation[Any]) -> None:
        """Stop watching a message."""
        self._watched.pop(id(message), None)

    async def watch(self) -> None:
        """Listen for cancelled messages, and tell their handlers, until this task is cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._listen)
            while True:
                await self._asked.wait()
                self._asked.clear()
                await self._look()

    async def _listen(self) -> None:
        try:
            async with self._runner.hearing(CANCELLATIONS) as listener:
                self.listening.set()
                while await listener.wait():
                    self._heard = time.monotonic()
                    self._asked.set()
        except QueueClosed:
            return
        except Exception as error:  # the bus may be the user's own
            log.info("cancelled messages are noticed when their leases are renewed: %s", error)
        finally:
            self.listening.set()

    async def _look(self) -> None:
        """Read which messages were cancelled, and tell their handlers."""
        held = [each.message for each in self._watched.values()]
        if not held:
            return
        try:
            for message in await self._runner.run(find_cancelled(held)):
                self._tell(message)
        except QueueError as error:  # the next renewal of the lease finds out
            log.info("could not read which messages were cancelled: %s", error)

    def _tell_soon(self, message: Reservation[Any]) -> None:
        """Tell a handler that its message was cancelled. Any thread may call this."""
        with suppress(RuntimeError):  # the run has ended, and its event loop is closed
            self._loop.call_soon_threadsafe(self._tell, message)

    def _tell(self, message: Reservation[Any]) -> None:
        watched = self._watched.get(id(message))
        if watched is not None and watched.message is message:
            watched.tell()
