"""The commands on messages: ls, push, pop, peek and purge."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from functools import partial
from io import BufferedIOBase
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, cast

import bson
import typer

from pyqueue import (
    AsyncClient,
    Client,
    ConfigurationError,
    Message,
    Queue,
    QueueError,
    QueueInfo,
)
from pyqueue.cli.common import (
    Commands,
    Json,
    Namespace,
    QueueName,
    Sheet,
    Signals,
    Url,
    age,
    as_json_text,
    connect,
    duration,
    emit,
    note,
    parse_id,
    parse_instant,
    parse_json,
    queue_with_stored_options,
    refuse_unknown,
    table,
)
from pyqueue.cli.limits import limit_text
from pyqueue.cli.watching import EVERY_S, watch, with_client
from pyqueue.payloads import OPTIONS, encode

#: The maximum number of messages that one call pops or moves.
BATCH_SIZE = 100
#: The states that `ls` counts.
_STATES: Final = ("ready", "scheduled", "reserved", "history")
#: The maximum number of lines that one call pushes.
PUSH_BATCH_SIZE = 1000

app = typer.Typer(cls=Commands)


@app.command()
def ls(
    cap: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Stop counting at N, which is shown as N+."),
    ] = None,
    again: Annotated[
        bool, typer.Option("--watch", help="List the queues again every 2 seconds, until Ctrl-C.")
    ] = False,
    url: Url = None,
    namespace: Namespace = "pyqueue",
    as_json: Json = False,
) -> None:
    """List the queues with their numbers of messages, dead letters included.

    The column "oldest" shows when the oldest waiting message began to wait.
    """
    if again:
        if as_json:
            raise ConfigurationError(
                "--watch: prints tables, so it cannot be combined with --json; leave out --json"
            )
        with_client(url, namespace, None, partial(_list_often, cap=cap))
        return
    with connect(url, namespace) as client:
        infos = client.queues(cap=cap)
    if as_json:
        for each in infos:
            emit(_row(each))
    else:
        _sheet(infos, cap).print()


async def _list_often(client: AsyncClient, cap: int | None) -> None:
    async def read() -> Sheet:
        return _sheet(await client.queues(cap=cap), cap)

    await watch(read, EVERY_S, lines=Sheet.lines, render=Sheet.grid)


def _sheet(infos: Sequence[QueueInfo], cap: int | None) -> Sheet:
    """Return the table of queues."""
    terminal = sys.stdout.isatty()
    rows = [_row(each) for each in infos]
    for row in rows:
        if cap is not None:
            row |= {name: f"{cap}+" for name in (*_STATES, "dead") if row[name] == cap}
        if terminal and isinstance(row["oldest"], datetime):
            row["oldest"] = age(row["oldest"])
    columns: Sequence[str] = ("queue", *_STATES, "paused", "kind", "dead", "oldest")
    if any(row["limit"] for row in rows):
        columns = (*columns, "limit")
    if terminal:  # room for the names: leave out columns that say nothing
        nothing: dict[str, object] = {"history": 0, "paused": False, "kind": "standard"}
        columns = [
            name
            for name in columns
            if name not in nothing or any(row[name] != nothing[name] for row in rows)
        ]
    return Sheet(columns, rows, right=(*_STATES, "dead"), whole="queue")


def _row(info: QueueInfo) -> dict[str, object]:
    """Return the values of a queue, keyed by column."""
    counts = {name: getattr(info.counts, name) for name in _STATES}
    limit = limit_text(info.limit) if info.limit else None
    row: dict[str, object] = {"queue": info.name, "paused": info.paused, "kind": info.kind}
    return row | {"limit": limit} | counts | {"dead": info.dead, "oldest": info.oldest}


# ---- push


Payload = Annotated[
    str | None,
    typer.Argument(
        metavar="[PAYLOAD]",
        help="The payload as JSON. If it is missing or -, it is read from standard input.",
    ),
]
File = Annotated[
    Path | None, typer.Option("--file", metavar="PATH", help="Read the payload from a file.")
]
Ndjson = Annotated[
    bool, typer.Option("--ndjson", help="Push one message for each line of the input.")
]
Text = Annotated[
    bool, typer.Option("--text", help="The payload, or each line, is plain text and not JSON.")
]
Header = Annotated[
    list[str] | None, typer.Option(metavar="NAME=VALUE", help="A header. Can be repeated.")
]
Delay = Annotated[
    float | None,
    typer.Option(
        metavar="DURATION",
        parser=duration("--delay"),
        help="The time until the message can be received, such as 90 (seconds), 1m or 2h30m.",
    ),
]
At = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="When the message can be received, such as 2030-01-31T09:00+01:00.",
    ),
]
Key = Annotated[str | None, typer.Option(help="The message key. It is unique in the queue.")]
MessageId = Annotated[
    str | None,
    typer.Option(
        "--id",
        metavar="ID",
        help="The message's id. A text of 24 hexadecimal digits is read as an ObjectId.",
    ),
]


GroupOption = Annotated[
    str | None,
    typer.Option("--group", help="For an ordered queue: the group of the message."),
]
PriorityOption = Annotated[
    int | None,
    typer.Option(
        "--priority", min=0, max=9, metavar="N", help="From 0 to 9; higher numbers go first."
    ),
]


class Entry(NamedTuple):
    """The options with which each line of the input is pushed."""

    delay: float | None
    at: datetime | None
    headers: dict[str, str]
    priority: int | None
    group: str | None


@app.command()
def push(
    name: QueueName,
    payload: Payload = None,
    file: File = None,
    ndjson: Ndjson = False,
    text: Text = False,
    delay: Delay = None,
    at: At = None,
    key: Key = None,
    on_duplicate: Annotated[
        Literal["ignore", "replace", "error"], typer.Option(help="What to do if the key is taken.")
    ] = "ignore",
    header: Header = None,
    id: MessageId = None,
    priority: PriorityOption = None,
    group: GroupOption = None,
    url: Url = None,
    namespace: Namespace = "pyqueue",
    signals: Signals = None,
    as_json: Json = False,
) -> None:
    """Push a message and print its id. With --ndjson, push one for each line and print how many.

    If the --id is stored already, write nothing, and exit with 1 if its payload differs.
    """
    headers = _headers(header or [])
    how = Entry(delay, _start(at, delay), headers, priority, group)
    if ndjson:
        _check_lines(key, id, payload)
        with connect(url, namespace, signals) as client:
            target = queue_with_stored_options(client, name)
            number = _push_lines(target, file, text, how)
        emit({"pushed": number}) if as_json else print(number)
        return
    value = _value(payload, file, text)
    wanted = None if id is None else parse_id(id)
    with connect(url, namespace, signals) as client:
        target = queue_with_stored_options(client, name)
        stored = None if wanted is None else client.find(wanted)
        pushed = target.push(
            value,
            delay=delay,
            at=how.at,
            key=key,
            on_duplicate=on_duplicate,
            headers=headers,
            id=wanted,
            priority=priority,
            group=group,
        )
        replaced = key is not None and on_duplicate == "replace"
        refused = stored is not None and not replaced and _refused(client, stored, value)
    if as_json:
        emit({"id": pushed})
    elif pushed is None:
        note(f"nothing pushed: the key {key!r} is taken")
    else:
        print(pushed)
    if refused:
        raise typer.Exit(1)


def _refused(client: Client, stored: Message[Any], value: Any) -> bool:
    """Print that a push wrote nothing because its id was stored before.

    Args:
        client: A connected client.
        stored: The message that had the id before the push.
        value: The payload of the push.

    Returns:
        Whether the stored payload differs from ``value``.
    """
    now = client.find(stored.id)
    if now is None or now.pushed != stored.pushed:  # the old message ended before the push
        return False
    note(f"nothing was written: {now.id} is already stored in {now.queue} ({now.state})")
    given = bson.decode(encode({"payload": value}).raw, OPTIONS)["payload"]
    return bool(now.payload != given)


def _check_lines(key: str | None, id: str | None, payload: str | None) -> None:
    """Refuse arguments that cannot be combined with --ndjson."""
    if key is not None or id is not None:
        raise ConfigurationError(
            "--ndjson: several messages cannot share a key or an id; leave out --key and --id"
        )
    if payload not in (None, "-"):
        raise ConfigurationError(
            "--ndjson: reads lines from --file or standard input; leave out PAYLOAD"
        )


def _start(at: str | None, delay: float | None) -> datetime | None:
    if at is None:
        return None
    if delay is not None:
        raise ConfigurationError("--at, --delay: pass one of the two, not both")
    return parse_instant("--at", at)


def _value(payload: str | None, file: Path | None, text: bool) -> Any:
    """Return the payload to push, from the argument, the file or standard input."""
    if payload is not None and file is not None:
        raise ConfigurationError("--file: pass a PAYLOAD or a file, not both")
    source = "PAYLOAD"
    if payload is None or payload == "-":
        payload = _read_all(file)
        source = "standard input" if file is None else f"--file {file}"
    return payload if text else parse_json(payload, source)


def _headers(given: list[str]) -> dict[str, str]:
    headers = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not equals or not name:
            raise ConfigurationError(f"--header: {each!r} is not allowed; use NAME=VALUE")
        headers[name] = value
    return headers


def _open_input(file: Path | None) -> BufferedIOBase:
    if file is None:
        if sys.stdin.isatty():
            raise ConfigurationError("PAYLOAD: pass a payload or --file, or pipe the payload in")
        return cast(BufferedIOBase, sys.stdin.buffer)  # the stubs promise less than there is
    try:
        return file.open("rb")
    except OSError as error:
        raise ConfigurationError(f"--file: {file} cannot be read ({error.strerror})") from error


def _read_all(file: Path | None) -> str:
    with _open_input(file) as source:
        try:
            return source.read().decode().removesuffix("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"the input cannot be read ({error}); use readable UTF-8 text"
            ) from error


def _batches(source: BufferedIOBase) -> Iterator[list[bytes]]:
    """Yield batches of lines. No batch waits for more lines, which a slow producer may delay."""
    rest = b""
    while data := source.read1(1 << 20):
        *lines, rest = (rest + data).split(b"\n")
        for start in range(0, len(lines), PUSH_BATCH_SIZE):
            yield lines[start : start + PUSH_BATCH_SIZE]
    yield [rest]


def _push_lines(target: Queue[Any], file: Path | None, text: bool, how: Entry) -> int:
    """Push a message for each line, and return how many."""
    pushed = number = 0
    try:
        with _open_input(file) as source:
            for batch in _batches(source):
                payloads = []
                for line in batch:
                    number += 1
                    if line.strip():
                        payload = line.decode().removesuffix("\r")
                        payloads.append(payload if text else parse_json(payload, f"line {number}"))
                if payloads:
                    number_of = len(payloads)
                    pushed += len(
                        target.push_many(
                            payloads,
                            delay=how.delay,
                            at=how.at,
                            headers=how.headers,
                            priorities=None if how.priority is None else [how.priority] * number_of,
                            groups=None if how.group is None else [how.group] * number_of,
                        )
                    )
    except (QueueError, OSError, UnicodeDecodeError) as error:
        where = "" if isinstance(error, QueueError) else f"line {number}: "
        raise ConfigurationError(
            f"{where}{error}; {pushed} messages were pushed before that"
        ) from error
    return pushed


# ---- pop, peek


def to_json(message: Message[Any]) -> dict[str, Any]:
    """Return the fields of a message that the JSON output contains."""
    names = "id queue payload headers key when pushed tries error trail state dead priority group "
    names += "deliveries deferred"
    attempts = [asdict(each) for each in message.attempts]
    return {name: getattr(message, name) for name in names.split()} | {"attempts": attempts}


@app.command()
def pop(
    name: QueueName,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Remove at most N messages.")] = 1,
    timeout: Annotated[
        float,
        typer.Option(
            metavar="DURATION",
            parser=duration("--timeout"),
            help="How long to wait for the first message.",
        ),
    ] = 0,
    url: Url = None,
    namespace: Namespace = "pyqueue",
    signals: Signals = None,
    as_json: Json = False,
) -> None:
    """Remove messages, and print each payload as a line of JSON; with --json, each message.

    A popped message is gone, even if the output is lost. The exit status is 1 if there was no
    message.
    """
    with connect(url, namespace, signals) as client:
        if not timeout:  # a command that waits may wait for the first use of the queue
            refuse_unknown(client, name)
        source = queue_with_stored_options(client, name)
        popped = 0
        while popped < limit:
            batch = source.pop_many(
                min(BATCH_SIZE, limit - popped), timeout=0 if popped else timeout
            )
            if not batch:
                break
            popped += len(batch)
            for each in batch:
                emit(to_json(each) if as_json else each.payload)
            sys.stdout.flush()
        if not popped:
            note_if_paused(source)
            raise typer.Exit(1)


@app.command()
def peek(
    name: QueueName,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Show at most N messages.")] = 10,
    url: Url = None,
    namespace: Namespace = "pyqueue",
    as_json: Json = False,
) -> None:
    """Show the next messages, and leave them in the queue."""
    with connect(url, namespace) as client:
        refuse_unknown(client, name)
        messages = queue_with_stored_options(client, name).peek(limit)
    if as_json:
        for each in messages:
            emit(to_json(each))
        return
    width = 200 if sys.stdout.isatty() else None
    rows = [
        to_json(each)
        | {"payload": as_json_text(each.payload)[:width], "why": each.error and each.error.message}
        for each in messages
    ]
    table(("id", "when", "tries", "key", "payload", "why"), rows, right=("tries",))


def note_if_paused(source: Queue[Any]) -> None:
    """Print a remark if a queue is paused."""
    if source.paused():
        note(f"queue {source.name!r} is paused: `pyqueue resume {source.name}`")


# ---- purge


@app.command()
def purge(
    name: QueueName,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    url: Url = None,
    namespace: Namespace = "pyqueue",
    as_json: Json = False,
) -> None:
    """Delete the ready and scheduled messages after asking for confirmation. Print their number."""
    with connect(url, namespace) as client:
        refuse_unknown(client, name)
        target = queue_with_stored_options(client, name)
        if not yes:
            counts = target.counts()
            number = counts.ready + counts.scheduled
            question = f"Delete {number} messages of queue {name!r} for good? [y/N] "
            typer.echo(question, nl=False, err=True)
            if sys.stdin.readline().strip().lower() not in ("y", "yes"):
                note("nothing deleted")
                raise typer.Exit(1)
        purged = target.purge()
    emit({"purged": purged}) if as_json else print(purged)
