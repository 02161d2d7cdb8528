"""``pyqueue top``: all queues, live. At a terminal it needs Textual; otherwise it prints tables."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Annotated, Any, Final

import typer

from pyqueue import AsyncClient, ConfigurationError
from pyqueue.cli.board import Board, Line
from pyqueue.cli.columns import Grid
from pyqueue.cli.common import Commands, Json, Namespace, Sheet, Signals, Url, duration, emit
from pyqueue.cli.watching import EVERY_S, watch, with_client

app = typer.Typer(cls=Commands)

#: The figures of telemetry: the first are per second, "failed/m" is per minute.
_FIGURES: Final = ("in/s", "done/s", "failed/m", "p95")
#: The columns in a pipe.
_COLUMNS: Final = (
    *("queue", "group", "kind", "ready", "reserved", "scheduled", "oldest", "paused"),
    *_FIGURES,
    "dead",
)


@app.command()
def top(
    once: Annotated[bool, typer.Option("--once", help="Print the table once, and exit.")] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="Print the table again and again, without Textual.")
    ] = False,
    interval: Annotated[
        float,
        typer.Option(
            metavar="DURATION", parser=duration("--interval"), help="The time between two reads."
        ),
    ] = EVERY_S,
    url: Url = None,
    namespace: Namespace = "pyqueue",
    signals: Signals = None,
    as_json: Json = False,
) -> None:
    """Watch all queues: their messages, rates and dead letters.

    The last line of the screen lists the keys. In a pipe, and with --json, print once. Rates and
    latencies need clients with telemetry.
    """
    work: Callable[[AsyncClient], Awaitable[None]]
    if as_json or once or not (plain or sys.stdout.isatty()):
        work = partial(_print_once, as_json=as_json)
    elif plain:
        work = partial(_print_often, every_s=interval)
    elif find_spec("textual") is None:
        raise ConfigurationError(
            'top: Textual is not installed; pip install "pyqueue-mongo[top]", or use --plain'
        )
    else:
        work = partial(_run_app, every_s=interval)
    with_client(url, namespace, signals, work)


async def _run_app(client: AsyncClient, every_s: float) -> None:
    from pyqueue.cli.top_app import Top

    await Top(client, every_s).run_async()


async def _print_once(client: AsyncClient, as_json: bool) -> None:
    lines = (await Board(client).read()).lines
    if as_json:
        for each in lines:
            emit(row(each))
    elif sys.stdout.isatty():
        from rich.console import Console

        Console(highlight=False, markup=False).print(Grid(lines))
    else:
        print(*_sheet(lines).lines(), sep="\n")


async def _print_often(client: AsyncClient, every_s: float) -> None:
    board = Board(client)

    async def read() -> Sequence[Line]:
        return (await board.read()).lines

    await watch(read, every_s, lines=lambda lines: _sheet(lines).lines(), render=Grid)


def _sheet(lines: Iterable[Line]) -> Sheet:
    return Sheet(_COLUMNS, [row(each) for each in lines])


def row(line: Line) -> dict[str, Any]:
    """Return the values of a line, keyed by column."""
    flow = line.flow
    figures: dict[str, float | None] = dict.fromkeys(_FIGURES)
    if flow is not None:
        figures = dict(zip(_FIGURES, (flow.into, flow.done, flow.failed, flow.p95), strict=True))
    return {
        "queue": line.info.name,
        "group": None if line.group is None else line.group.name,
        "kind": line.info.kind,
        "ready": line.ready,
        "reserved": line.work,
        "scheduled": line.scheduled,
        "oldest": line.oldest,
        "paused": line.paused,
        **{name: None if value is None else round(value, 3) for name, value in figures.items()},
        "dead": line.dead,
    }
