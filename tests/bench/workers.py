"""Worker processes of the benchmark: all of them call the same function at the same time."""

from __future__ import annotations

import asyncio
import inspect
import multiprocessing
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self


class Workers:
    """Processes that call functions at the same time; a context manager."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        # Kept because the children attach to it by name.
        self._barrier = context.Barrier(count)
        self._pipes: list[Connection] = []
        self._children = []
        for place in range(count):
            ours, theirs = context.Pipe()
            child = context.Process(target=_serve, args=(theirs, self._barrier, place), daemon=True)
            child.start()
            theirs.close()
            self._pipes.append(ours)
            self._children.append(child)

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call a function in every process. Its first argument is the ``Start`` of the process.

        It may be a coroutine function.
        """
        for pipe in self._pipes:
            pipe.send((function, arguments))

    def results(self) -> list[Any]:
        """Return the results of all processes; raise RuntimeError if a call failed."""
        answers = [pipe.recv() for pipe in self._pipes]
        for failed, value in answers:
            if failed:
                raise RuntimeError(f"a worker process failed: {value}")
        return [value for _, value in answers]

    def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a function in every process and return the results."""
        self.start(function, *arguments)
        return self.results()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for pipe in self._pipes:
            pipe.close()
        for child in self._children:
            child.join(0 if kind else 5)
            child.terminate()
            child.join()


@dataclass(slots=True)
class Start:
    """The number of a process, and a function that waits until all processes have called it."""

    place: int
    wait: Callable[[], object]


def _serve(pipe: Connection, barrier: Any, place: int) -> None:
    # Ctrl-C is for the parent, which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    start = Start(place, lambda: barrier.wait(60))
    with asyncio.Runner() as runner, suppress(EOFError, OSError):
        while True:
            function, arguments = pipe.recv()
            try:
                value = function(start, *arguments)
                if inspect.isawaitable(value):
                    value = runner.run(as_coroutine(value))
                pipe.send((False, value))
            except Exception as error:
                barrier.abort()
                pipe.send((True, f"{type(error).__name__}: {error}"))


async def as_coroutine(value: Awaitable[Any]) -> Any:
    """Await a value, for a function that takes a coroutine."""
    return await value
