"""The command faults: a queue under load while servers, network and clients are made to fail, and the audit of what came of it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Annotated

import typer

from pyqueue.cli.common import Commands, Json, emit

__all__ = ["app"]

app = typer.Typer(cls=Commands)


@app.command()
def faults(
    minutes: Annotated[
        float, typer.Option(min=0.1, metavar="N", help="For how long faults are made.")
    ] = 2,
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="S", help="The same faults again, in the same order; default: others each time."
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw messages a second, and the faults, as SVG."),
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Leave there what the count is made of: who did what, and when."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a queue on three servers of its own, have servers, network and clients fail, and count what was lost or done twice.

    Exit status 1 if anything was lost, settled twice, or done by a consumer that had lost its lease.
    """
    from pyqueue import faults

    result = faults.run(
        minutes, random.randrange(1_000_000) if seed is None else seed, plot=plot, keep=keep
    )
    if as_json:
        emit(result)
    else:
        faults.show(result)
    raise typer.Exit(0 if faults.is_good(result) else 1)
