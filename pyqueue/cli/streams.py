"""The commands on streams: read, consumers and seek."""

from __future__ import annotations

import sys
from datetime import datetime
from typing import Annotated, Any

import typer

from pyqueue import Client, ConfigurationError, Stream
from pyqueue.backends.namespace import STREAM, kind_of
from pyqueue.cli import completing
from pyqueue.cli.common import (
    Commands,
    Json,
    Namespace,
    Signals,
    Url,
    as_json_text,
    connect,
    emit,
    refuse_unknown,
    table,
)
from pyqueue.runtime.connecting import runner_of

app = typer.Typer(cls=Commands, help="Streams: read, consumers and seek.", no_args_is_help=True)

Name = Annotated[
    str,
    typer.Argument(
        metavar="STREAM",
        help="The stream's name.",
        autocompletion=completing.queue_names,
    ),
]


@app.command()
def read(
    name: Name,
    after: Annotated[
        int | None, typer.Option(metavar="POSITION", help="Begin after this position.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Show at most N messages.")] = 10,
    url: Url = None,
    namespace: Namespace = "pyqueue",
    as_json: Json = False,
) -> None:
    """Show messages by position. Consumer groups are not affected."""
    with connect(url, namespace) as client:
        messages = _stream(client, name).read(after=after, limit=limit)
    columns = ("position", "pushed", "payload")
    rows: list[dict[str, Any]] = [
        {"position": each.position, "pushed": each.pushed, "payload": each.payload}
        for each in messages
    ]
    if as_json:
        for row, each in zip(rows, messages, strict=True):
            emit({**row, "headers": each.headers})
        return
    width = 200 if sys.stdout.isatty() else None
    for row in rows:
        row["payload"] = as_json_text(row["payload"])[:width]
    table(columns, rows, right=("position",))


@app.command()
def consumers(
    name: Name,
    url: Url = None,
    namespace: Namespace = "pyqueue",
    as_json: Json = False,
) -> None:
    """List the consumer groups of a stream: their positions, and the messages ahead of them."""
    numbers = ("ready", "scheduled", "reserved", "skipped")
    with connect(url, namespace) as client:
        rows: list[dict[str, Any]] = [
            {"group": each.name, "position": each.position, "paused": each.paused}
            | {number: getattr(each.counts, number) for number in numbers}
            for each in _stream(client, name).consumers()
        ]
    if as_json:
        for row in rows:
            emit(row)
    else:
        columns = ("group", "position", *numbers, "paused")
        table(columns, rows, right=columns[1:6])


@app.command()
def seek(
    name: Name,
    group: Annotated[str, typer.Argument(metavar="GROUP", help="The consumer group.")],
    to: Annotated[
        str,
        typer.Argument(
            metavar="TO",
            help='"first", "last", a position, or an instant such as 2026-01-31T12:00:00Z.',
        ),
    ],
    url: Url = None,
    namespace: Namespace = "pyqueue",
    signals: Signals = None,
    as_json: Json = False,
) -> None:
    """Move a consumer group to another position. Every lease of the group ends."""
    place = _place(to)
    with connect(url, namespace, signals) as client:
        log = _stream(client, name)
        known = [each.name for each in log.consumers()]
        if group not in known:
            raise ConfigurationError(
                f"GROUP: stream {name!r} has no consumer group {group!r}; it has {known}"
            )
        position = log.consumer(group).seek(place)
    emit({"position": position}) if as_json else print(position)


def _stream(client: Client, name: str) -> Stream[Any]:
    """Return a stream that exists.

    Raises:
        ConfigurationError: No stream has this name.
    """
    refuse_unknown(client, name, "STREAM")
    if runner_of(client).run(kind_of(name)) != STREAM:
        raise ConfigurationError(
            f"STREAM: {name!r} is not a stream but a queue; use `pyqueue peek`"
        )
    return client.stream(name)


def _place(text: str) -> str | int | datetime:
    """Return the place that the argument TO names.

    Raises:
        ConfigurationError: The text does not name a place in a stream.
    """
    if text in ("first", "last"):
        return text
    if text.isascii() and text.isdecimal():
        return int(text)
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise ConfigurationError(
            f'TO: {text!r} is not allowed; use "first", "last", a position, or an instant with '
            "its time zone, such as 2026-01-31T12:00:00Z"
        ) from None
