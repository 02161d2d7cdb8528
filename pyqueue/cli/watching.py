"""Show a table again and again, until Ctrl-C."""

from __future__ import annotations

import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TypeVar

import anyio

from pyqueue import AsyncClient
from pyqueue.cli.common import checked_url, connect

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

T = TypeVar("T")

#: The seconds between two tables.
EVERY_S: Final = 2.0
#: The maximum share of the time that reads take, however slow the server is.
MAX_SHARE: Final = 0.1
#: The minimum time between two reads, in seconds.
LEAST_S: Final = 0.05


def pause_after(took_s: float, every_s: float) -> float:
    """Return how many seconds to wait before the values are read again.

    Args:
        took_s: How many seconds it took to read them.
        every_s: The wanted time between two reads, in seconds.
    """
    return max(every_s, LEAST_S, took_s * (1 / MAX_SHARE - 1))


def with_client(
    url: str | None,
    namespace: str,
    signals: str | None,
    work: Callable[[AsyncClient], Awaitable[None]],
) -> None:
    """Call ``work`` with an AsyncClient, after checking that the server answers in time."""
    with connect(url, namespace, signals):
        pass

    async def main() -> None:
        async with AsyncClient(checked_url(url), namespace=namespace, signals=signals) as client:
            await work(client)

    anyio.run(main)


async def watch(
    read: Callable[[], Awaitable[T]],
    every_s: float,
    *,
    lines: Callable[[T], Iterable[str]],
    render: Callable[[T], RenderableType],
) -> None:
    """Show values again and again: in place at a terminal, one below the other in a pipe.

    Args:
        read: Reads the values.
        every_s: The seconds between two reads. After a slow read, the pause is longer.
        lines: Returns the lines of the values in a pipe.
        render: Returns the form of the values at a terminal.
    """
    with _screen() as live:
        while True:
            began = time.monotonic()
            values = await read()
            if live is None:
                print(*lines(values), "", sep="\n", flush=True)
            else:
                live.update(render(values), refresh=True)
            await anyio.sleep(pause_after(time.monotonic() - began, every_s))


@contextmanager
def _screen() -> Iterator[Live | None]:
    """Yield a live display at a terminal, or None in a pipe."""
    if not sys.stdout.isatty():
        yield None
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(highlight=False, markup=False), auto_refresh=False) as live:
        yield live
