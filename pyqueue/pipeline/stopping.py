"""SIGTERM and SIGINT stop a run."""

from __future__ import annotations

import logging
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import anyio

log = logging.getLogger("pyqueue")

#: The signals that stop a run.
_STOPPING: Final = (signal.SIGTERM, signal.SIGINT)


async def watch_signals(stop: Callable[[], None], stopping: Callable[[], bool]) -> None:
    """Call ``stop`` at each SIGTERM and SIGINT, until cancelled.

    Args:
        stop: Stops the run. A second call ends it at once.
        stopping: Returns whether the run is already stopping.
    """
    with _signals() as received:
        async for number in received:
            name, how = signal.Signals(number).name, "ending at once" if stopping() else "ending"
            log.info("%s: %s", name, how)
            stop()


@contextmanager
def _signals() -> Iterator[AsyncIterator[signal.Signals]]:
    """Receive SIGTERM and SIGINT in a block, and restore their handlers at its end.

    A handler of ``loop.add_signal_handler`` is lost. ``getsignal`` shows a function that does
    nothing, the same as in the block. With that one restored, the process would ignore the signal.
    """
    before = during = _handlers()
    try:
        with anyio.open_signal_receiver(*_STOPPING) as received:
            during = _handlers()
            yield received
    finally:
        for number, handler in before.items():
            if handler != during[number]:
                signal.signal(number, handler)


def _handlers() -> dict[signal.Signals, Any]:
    return {number: signal.getsignal(number) for number in _STOPPING}
