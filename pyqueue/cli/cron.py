"""The commands for schedules: ls, run, pause, resume and rm."""

from __future__ import annotations

from typing import Annotated

import typer

from pyqueue import Client, ConfigurationError
from pyqueue.cli.common import (
    Commands,
    Json,
    Namespace,
    Signals,
    Url,
    connect,
    emit,
    report_pause,
    table,
)
from pyqueue.errors import suggestion

app = typer.Typer(cls=Commands, help="Schedules: ls, run, pause, resume, rm.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="SCHEDULE", help="The schedule's name.")]


@app.command()
def ls(url: Url = None, namespace: Namespace = "pyqueue", as_json: Json = False) -> None:
    """List the schedules and their next ticks."""
    columns = ("schedule", "queue", "times", "timezone", "next", "paused", "skipped", "error")
    with connect(url, namespace) as client:
        rows = [
            {
                "schedule": each.name,
                "queue": each.queue,
                "times": each.options.get("cron") or f"every {each.options['every']:g} s",
                "timezone": each.options["timezone"],
                "next": each.next,
                "paused": each.paused,
                "skipped": each.skipped,
                "error": each.error,
                "last": each.last,
                "options": each.options,
            }
            for each in client.schedules()
        ]
    if as_json:
        for row in rows:
            emit(row)
    else:
        table(columns, rows, right=("skipped",))


@app.command()
def run(
    name: Name,
    url: Url = None,
    namespace: Namespace = "pyqueue",
    signals: Signals = None,
    as_json: Json = False,
) -> None:
    """Push the message of a schedule now, and print its id. The ticks are not affected."""
    with connect(url, namespace, signals) as client:
        id = client.run_schedule(name)
        if id is None:
            raise _unknown(client, name)
    emit({"id": id}) if as_json else print(id)


@app.command()
def pause(
    name: Name,
    url: Url = None,
    namespace: Namespace = "pyqueue",
    signals: Signals = None,
    as_json: Json = False,
) -> None:
    """Stop the ticks of a schedule, in every process."""
    with connect(url, namespace, signals) as client:
        _set_paused(client, name, as_json, pause=True)


@app.command()
def resume(
    name: Name,
    url: Url = None,
    namespace: Namespace = "pyqueue",
    signals: Signals = None,
    as_json: Json = False,
) -> None:
    """Let a paused schedule continue with its next tick."""
    with connect(url, namespace, signals) as client:
        _set_paused(client, name, as_json, pause=False)


def _set_paused(client: Client, name: str, as_json: bool, *, pause: bool) -> None:
    if not (client.pause_schedule if pause else client.resume_schedule)(name):
        raise _unknown(client, name)
    report_pause("schedule", name, as_json, paused=pause)


@app.command()
def rm(
    name: Name, url: Url = None, namespace: Namespace = "pyqueue", as_json: Json = False
) -> None:
    """Delete a schedule. The messages that it has pushed stay."""
    with connect(url, namespace) as client:
        if not client.unschedule(name):
            raise _unknown(client, name)
    emit({"deleted": name}) if as_json else print(f"{name}: deleted")


def _unknown(client: Client, name: str) -> ConfigurationError:
    """Return the error for the name of a schedule that does not exist."""
    names = [each.name for each in client.schedules()]
    hint = suggestion(name, names, "`pyqueue cron ls` lists all schedules")
    return ConfigurationError(
        f"SCHEDULE: namespace {client.namespace!r} has no schedule {name!r}; {hint}"
    )
