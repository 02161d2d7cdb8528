"""``python -m tests.chaos``: the fault suite. ``--help`` lists its options."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Annotated

import typer

from pyqueue.cli.common import Commands, Json, emit
from tests.chaos import report, runner
from tests.chaos.mutants import MUTANTS

app = typer.Typer(cls=Commands, add_completion=False, pretty_exceptions_enable=False)


@app.command()
def faults(
    minutes: Annotated[
        float, typer.Option(min=0.1, metavar="N", help="For how long faults are injected.")
    ] = 2,
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="S",
            help="Inject the same faults in the same order as another run; default: a random seed.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw messages per second and the faults, as SVG."),
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Keep the records of the run there: who did what, and when."
        ),
    ] = None,
    mutant: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"Run with a guarantee removed until a check fails: {', '.join(MUTANTS)}.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make three private servers, their network and the clients of queues fail, and count losses.

    The exit status is 1 if a message was lost, settled twice, settled by a consumer that had lost
    its lease, or received too late, or if a call failed without a fault.
    """
    seed = random.randrange(1_000_000) if seed is None else seed
    if mutant is None:
        result = runner.run(minutes, seed, plot=plot, keep=keep)
    elif mutant in MUTANTS:
        result = runner.run_mutant(mutant, seed, keep=keep)
    else:
        raise typer.BadParameter(f"choose from {', '.join(MUTANTS)}", param_hint="--mutant")
    if as_json:
        emit(result)
    else:
        report.show(result)
    raise typer.Exit(0 if report.is_good(result) else 1)


if __name__ == "__main__":
    app(prog_name="python -m tests.chaos")
