"""The protocol between a runner and a server, and how procedures run in threads or in tasks.

Code that talks to a server is written once for blocking and for asyncio clients, as generators;
see ``Procedure``. A ``Transport`` contains the specifics of one kind of server. A ``Runtime``
contains the differences between threads and tasks.
"""

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Awaitable, Callable, Generator, Hashable
from datetime import datetime
from typing import Any, Protocol, TypeVar

from signals.api import BusError

T = TypeVar("T")

Procedure = Generator[Any, Any, T]
"""Code that is written once for threads and for tasks. It contains ``reply = yield call()``.

With a blocking client ``call()`` has already done its work and returned the reply. With an asyncio
client ``call()`` returns an awaitable, which ``run_async`` awaits.
"""

Deliver = Callable[[str, datetime | None, str], None]
"""Takes an event from a server: its topic, its ``when``, and its origin ("" if it has none)."""

READ_TIMEOUT_S = 1.0
"""How many seconds ``Transport.read`` waits for a message at most."""

JOIN_TIMEOUT_S = 1.0
"""How many seconds closing a bus waits for each of its procedures to end."""


def run(procedure: Procedure[T]) -> T:
    """Run a procedure whose calls block."""
    reply = None
    while True:
        try:
            reply = procedure.send(reply)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]  # its result is its T


async def run_async(procedure: Procedure[T]) -> T:
    """Run a procedure whose calls are awaitables. A cancellation is raised inside the procedure."""
    resume: Callable[[Any], Any] = procedure.send
    reply: Any = None
    while True:
        try:
            call = resume(reply)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]  # its result is its T
        try:
            reply, resume = await call, procedure.send
        except GeneratorExit:
            raise
        except BaseException as error:
            reply, resume = error, procedure.throw


class Transport(Protocol):
    """Talks to one kind of server. Every method may raise the errors of its client library.

    ``str(transport)`` names the server in log lines; it must not contain a password.
    """

    @property
    def place(self) -> Hashable:
        """A value that is equal for two transports of a process only if they hear each other."""

    def publish(self, events: dict[str, datetime | None], origin: str) -> Procedure[None]:
        """Send events, each with ``origin``, which ``read`` passes on in every process."""

    def start(self) -> Procedure[bool]:
        """Start listening. Return True if this covers every topic, without subscriptions."""

    def subscribe(self, add: list[str], drop: list[str]) -> Procedure[None]:
        """Subscribe to topics and unsubscribe from topics. ``read`` reports the confirmations."""

    def read(self, deliver: Deliver, confirm: Callable[[str], None]) -> Procedure[None]:
        """Wait up to READ_TIMEOUT_S for one event or confirmation, and pass it on."""

    def stop(self) -> Procedure[None]:
        """Stop listening."""

    def check(self) -> Procedure[None]:
        """Raise an error if the bus cannot publish and listen."""

    def close(self) -> Procedure[None]:
        """Close the connections that belong to the bus."""

    def explain(self, error: Exception) -> str:
        """Return a text about an error, in one line and without a password."""


class LoopFlag:
    """An ``asyncio.Event`` that any thread may set. Once its loop is closed, ``set`` is ignored."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._event = asyncio.Event()
        self.clear, self.is_set, self.wait = self._event.clear, self._event.is_set, self._event.wait

    def set(self) -> None:
        """Set the flag: at once if called in its loop, otherwise at the loop's next turn."""
        if running_loop() is self._loop:
            self._event.set()
        else:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._event.set)


Flag = threading.Event | LoopFlag
"""A flag for which a listener or a procedure waits. Any thread may set it."""


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that runs in this thread, or None."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class Runtime(Protocol):
    """Runs procedures, in threads or in the tasks of one event loop."""

    def bind(self, *, here: bool) -> bool:
        """Return whether procedures can run. With ``here``, refuse callers in other event loops."""

    def flag(self) -> Flag:
        """Return a new flag."""

    def start(self, procedure: Procedure[None], name: str) -> None:
        """Run a procedure in the background."""

    def wait(self, flag: Any, timeout: float | None) -> Awaitable[None] | None:
        """Wait until a flag of this runtime is set, up to ``timeout`` seconds."""

    def join(self) -> Awaitable[None] | None:
        """Wait for all procedures to end, but no longer than JOIN_TIMEOUT_S for each."""


class ThreadRuntime:
    """Runs procedures in threads."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def bind(self, *, here: bool) -> bool:
        """Return True, because threads can run anywhere."""
        return True

    def flag(self) -> threading.Event:
        """Return a new flag."""
        return threading.Event()

    def start(self, procedure: Procedure[None], name: str) -> None:
        """Run a procedure in a new daemon thread."""
        thread = threading.Thread(target=run, args=(procedure,), name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def wait(self, flag: threading.Event, timeout: float | None) -> None:
        """Block until the flag is set, up to ``timeout`` seconds."""
        flag.wait(timeout)

    def join(self) -> None:
        """Wait for all threads, but not for a thread that hangs in a dead connection."""
        for thread in self._threads:
            thread.join(JOIN_TIMEOUT_S)


class TaskRuntime:
    """Runs procedures in tasks of the event loop in which the bus was first used."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def bind(self, *, here: bool) -> bool:
        """Bind to the running loop at first use. Return False if that loop was closed.

        Raises:
            BusError: No loop runs yet, or ``here`` is set and another loop runs.
        """
        running = running_loop()
        self._loop = self._loop or running
        if self._loop is None:
            raise BusError("this bus is for asyncio; use it while an event loop runs")
        if here and running is not self._loop:
            raise BusError(
                "an asyncio bus belongs to the event loop in which it was first used; "
                "open another bus for this loop"
            )
        return not self._loop.is_closed()

    def flag(self) -> LoopFlag:
        """Return a new flag of the bound loop."""
        assert self._loop is not None
        return LoopFlag(self._loop)

    def start(self, procedure: Procedure[None], name: str) -> None:
        """Run a procedure in a new task."""
        assert self._loop is not None
        if running_loop() is self._loop:
            self._create(procedure, name)
        else:
            self._loop.call_soon_threadsafe(self._create, procedure, name)

    def _create(self, procedure: Procedure[None], name: str) -> None:
        # An empty context, because a deadline of the first user of the bus must not end the bus.
        task = asyncio.get_running_loop().create_task(
            run_async(procedure), name=name, context=contextvars.Context()
        )
        self._tasks.append(task)

    async def wait(self, flag: LoopFlag, timeout: float | None) -> None:
        """Wait until the flag is set, up to ``timeout`` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await flag.wait()

    async def join(self) -> None:
        """Wait for all tasks, then cancel the tasks that are still running."""
        try:
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=JOIN_TIMEOUT_S)
        finally:
            for task in self._tasks:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
