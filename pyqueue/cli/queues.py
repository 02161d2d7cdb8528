"""The commands about the messages of a queue: ls, push, pop, peek, move, redrive, purge, pause, resume."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from pyqueue import Client, ConfigurationError, LeaseLost, Message, QueueError
from pyqueue.cli.common import (
    Commands,
    Json,
    Namespace,
    Signals,
    Url,
    as_json_text,
    connect,
    emit,
    identity,
    note,
    parsed,
    queue,
    table,
)
from pyqueue.queues import backend_of

__all__ = ["app"]

#: Messages taken or passed on at a time.
BATCH = 100

app = typer.Typer(cls=Commands)

Name = Annotated[str, typer.Argument(metavar="QUEUE", help="The queue's name.")]


@app.command()
def ls(url: Url = None, namespace: Namespace = "pyqueue", as_json: Json = False) -> None:
    """List the queues, and how many messages each has."""
    columns = ("queue", "ready", "scheduled", "reserved", "history", "paused")
    with connect(url, namespace) as client:
        rows = [
            {"queue": info.name, "paused": info.paused}
            | {
                name: getattr(info.counts, name)
                for name in ("ready", "scheduled", "reserved", "history")
            }
            for info in client.queues()
        ]
    if as_json:
        for row in rows:
            emit(row)
    else:
        table(columns, rows, right=columns[1:5])


# ---- push


@app.command()
def push(
    name: Name,
    payload: Annotated[
        str | None,
        typer.Argument(metavar="[PAYLOAD]", help="As JSON; left out, or -: standard input."),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", metavar="PATH", help="Read the payload from a file.")
    ] = None,
    ndjson: Annotated[
        bool, typer.Option("--ndjson", help="A message for each line of the input.")
    ] = False,
    text: Annotated[
        bool, typer.Option("--text", help="The payload is a text, or each line is one: no JSON.")
    ] = False,
    delay: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Until it can be received.")
    ] = None,
    key: Annotated[str | None, typer.Option(help="The message key, unique in the queue.")] = None,
    on_duplicate: Annotated[
        Literal["ignore", "replace", "error"], typer.Option(help="If the key is taken.")
    ] = "ignore",
    header: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A header; can be repeated.")
    ] = None,
    id: Annotated[
        str | None,
        typer.Option(
            "--id", metavar="ID", help="The message's id; 24 hexadecimal digits are an ObjectId."
        ),
    ] = None,
    url: Url = None,
    namespace: Namespace = "pyqueue",
    signals: Signals = None,
    as_json: Json = False,
) -> None:
    """Push a message, or with --ndjson one for each line. Prints the id, or how many."""
    if ndjson and (key is not None or id is not None):
        raise ConfigurationError("--ndjson: many messages cannot have one --key or one --id")
    if payload is not None and file is not None:
        raise ConfigurationError("--file: give a PAYLOAD or a file, not both")
    headers = _headers(header or [])
    if ndjson:
        if payload not in (None, "-"):
            raise ConfigurationError("--ndjson: reads --file or standard input, no PAYLOAD")
        with connect(url, namespace, signals) as client:
            _push_lines(client, name, file, text, {"delay": delay, "headers": headers}, as_json)
        return
    if payload is None or payload == "-":
        payload = _whole(file)
    value = payload if text else parsed(payload, "PAYLOAD" if file is None else f"--file {file}")
    with connect(url, namespace, signals) as client:
        pushed = queue(client, name).push(
            value,
            delay=delay,
            key=key,
            on_duplicate=on_duplicate,
            headers=headers,
            id=None if id is None else identity(id),
        )
    if as_json:
        emit({"id": pushed})
    elif pushed is None:
        note(f"nothing pushed: the key {key!r} is taken")
    else:
        print(pushed)


def _headers(given: list[str]) -> dict[str, str]:
    pairs = [each.partition("=") for each in given]
    for (name, equals, _), each in zip(pairs, given, strict=True):
        if not equals or not name:
            raise ConfigurationError(f"--header {each}: give NAME=VALUE")
    return {name: value for name, _, value in pairs}


def _read(file: Path | None) -> Any:
    """The input, in bytes."""
    if file is None:
        if sys.stdin.isatty():
            raise ConfigurationError("PAYLOAD: give one, or --file, or pipe it in")
        return sys.stdin.buffer
    try:
        return file.open("rb")
    except OSError as error:
        raise ConfigurationError(f"--file {file}: {error.strerror}") from error


def _whole(file: Path | None) -> str:
    with _read(file) as source:
        try:
            return str(source.read().decode()).removesuffix("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"the input cannot be read: {error}") from error


def _batches(source: Any) -> Iterator[list[bytes]]:
    """The lines that are there, in batches: a slow producer's lines are not kept waiting."""
    rest = b""
    while data := source.read1(1 << 20):
        *lines, rest = (rest + data).split(b"\n")
        for start in range(0, len(lines), 10 * BATCH):
            yield lines[start : start + 10 * BATCH]
    yield [rest]


def _push_lines(
    client: Client, name: str, file: Path | None, text: bool, options: dict[str, Any], as_json: bool
) -> None:
    target = queue(client, name)
    pushed = number = 0
    try:
        with _read(file) as source:
            for batch in _batches(source):
                payloads = []
                for line in batch:
                    number += 1
                    if line.strip():
                        written = line.decode().removesuffix("\r")
                        payloads.append(written if text else parsed(written, f"line {number}"))
                if payloads:
                    pushed += len(target.push_many(payloads, **options))
    except (QueueError, OSError, UnicodeDecodeError) as error:
        where = "" if isinstance(error, QueueError) else f"line {number}: "
        raise ConfigurationError(
            f"{where}{error}; {pushed} messages were pushed before that"
        ) from error
    emit({"pushed": pushed}) if as_json else print(pushed)


# ---- pop, peek


def _told(message: Message[Any]) -> dict[str, Any]:
    """A message for programs."""
    fields = (
        "id",
        "queue",
        "payload",
        "headers",
        "key",
        "when",
        "pushed",
        "tries",
        "error",
        "trail",
        "state",
        "dead",
    )
    return {name: getattr(message, name) for name in fields}


@app.command()
def pop(
    name: Name,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="How many at most.")] = 1,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long to wait for the first.")
    ] = 0,
    url: Url = None,
    namespace: Namespace = "pyqueue",
    signals: Signals = None,
    as_json: Json = False,
) -> None:
    """Take messages out and print their payloads as JSON, a line each; with --json all of each message.

    Popped is gone, even if nobody reads the output. Exit status 1 if there was none.
    """
    with connect(url, namespace, signals) as client:
        source = queue(client, name)
        popped = 0
        while popped < limit:
            batch = source.pop_many(min(BATCH, limit - popped), timeout=0 if popped else timeout)
            if not batch:
                break
            popped += len(batch)
            for each in batch:
                emit(_told(each) if as_json else each.payload)
            sys.stdout.flush()
        if not popped:
            _why_nothing(source)
            raise typer.Exit(1)


@app.command()
def peek(
    name: Name,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="How many at most.")] = 10,
    url: Url = None,
    namespace: Namespace = "pyqueue",
    as_json: Json = False,
) -> None:
    """Show the messages that would be received next. Takes nothing."""
    with connect(url, namespace) as client:
        messages = client.queue(name).peek(limit)
    if as_json:
        for each in messages:
            emit(_told(each))
        return
    width = 200 if sys.stdout.isatty() else None
    rows = [
        _told(each)
        | {"payload": as_json_text(each.payload)[:width], "why": (each.error or {}).get("message")}
        for each in messages
    ]
    table(("id", "when", "tries", "key", "payload", "why"), rows, right=("tries",))


def _why_nothing(source: Any) -> None:
    if source.paused():
        note(f"queue {source.name!r} is paused: `pyqueue resume {source.name}`")


# ---- move, redrive, purge


@app.command()
def move(
    source: Annotated[str, typer.Argument(metavar="FROM", help="The queue they are in.")],
    to: Annotated[str, typer.Argument(metavar="TO", help="The queue they go to.")],
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="How many; default: all that are ready.")
    ] = None,
    url: Url = None,
    namespace: Namespace = "pyqueue",
    signals: Signals = None,
    as_json: Json = False,
) -> None:
    """Move messages to another queue, each in one atomic update. Prints how many."""
    if source == to:
        raise ConfigurationError(f"TO: {to!r} is where they are")
    with connect(url, namespace, signals) as client:
        taken, given = queue(client, source), queue(client, to)
        ready = taken.counts().ready  # so that it ends even if more come in all the time
        wanted = ready if limit is None else min(limit, ready)
        moved = 0
        while moved < wanted:
            batch = taken.reserve_many(min(BATCH, wanted - moved), timeout=0)
            if not batch:
                break
            try:
                taken.move(*batch, to=given)
                moved += len(batch)
            except LeaseLost as error:
                moved += len(batch) - len(error.lost) - len(error.unknown)
            except BaseException:
                taken.release(*batch)
                raise
        if not moved:
            _why_nothing(taken)
    emit({"moved": moved}) if as_json else print(moved)


@app.command()
def redrive(
    name: Annotated[
        str, typer.Argument(metavar="QUEUE", help="The dead-letter queue, such as orders.dead.")
    ],
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="How many; default: all.")
    ] = None,
    url: Url = None,
    namespace: Namespace = "pyqueue",
    signals: Signals = None,
    as_json: Json = False,
) -> None:
    """Send dead messages back to the queues they came from. Prints how many."""
    with connect(url, namespace, signals) as client:
        source = queue(client, name)
        moved = source.redrive(limit)
        dead = backend_of(source).options.dead_letter
        if not moved and client.queue(dead).counts().total:
            note(f"no dead messages are in {name!r}; its own are in {dead!r}")
    emit({"moved": moved}) if as_json else print(moved)


@app.command()
def purge(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    url: Url = None,
    namespace: Namespace = "pyqueue",
    as_json: Json = False,
) -> None:
    """Delete the messages that are ready or scheduled. Asks first. Prints how many."""
    with connect(url, namespace) as client:
        target = client.queue(name)
        if not yes:
            counts = target.counts()
            question = f"Delete {counts.ready + counts.scheduled} messages of queue {name!r} for good? [y/N] "
            typer.echo(question, nl=False, err=True)
            if sys.stdin.readline().strip().lower() not in ("y", "yes"):
                note("nothing deleted")
                raise typer.Exit(1)
        purged = target.purge()
    emit({"purged": purged}) if as_json else print(purged)


# ---- pause, resume


@app.command()
def pause(
    name: Name,
    url: Url = None,
    namespace: Namespace = "pyqueue",
    signals: Signals = None,
    as_json: Json = False,
) -> None:
    """Have the consumers of every process stop receiving. Pushes go on."""
    _set_paused(True, name, url, namespace, signals, as_json)


@app.command()
def resume(
    name: Name,
    url: Url = None,
    namespace: Namespace = "pyqueue",
    signals: Signals = None,
    as_json: Json = False,
) -> None:
    """Let consumers go on."""
    _set_paused(False, name, url, namespace, signals, as_json)


def _set_paused(
    value: bool, name: str, url: str | None, namespace: str, signals: str | None, as_json: bool
) -> None:
    with connect(url, namespace, signals) as client:
        target = client.queue(name)
        target.pause() if value else target.resume()
        paused = target.paused()
    if as_json:
        emit({"queue": name, "paused": paused})
    else:
        print(f"{name}: {'paused' if paused else 'not paused'}")
