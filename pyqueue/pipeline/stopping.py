"""SIGTERM and SIGINT stop a run."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio

log = logging.getLogger("pyqueue")


async def watch_signals(stop: Callable[[], None], stopping: Callable[[], bool]) -> None:
    """Call ``stop`` at each SIGTERM and SIGINT, until cancelled.

    Args:
        stop: Stops the run. A second call ends it at once.
        stopping: Returns whether the run is already stopping.
    """
    with (
        _signal_handlers_restored(),
        anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as received,
    ):
        async for number in received:
            name, how = signal.Signals(number).name, "ending at once" if stopping() else "ending"
            log.info("%s: %s", name, how)
            stop()


@contextmanager
def _signal_handlers_restored() -> Iterator[None]:
    """Restore the signal handlers at the end of the block."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
