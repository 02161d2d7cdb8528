"""What the commands share: how they end, how they reach the server, and how they speak to people and to programs.

A program reads ``--json``: one value per line, BSON as MongoDB's relaxed extended JSON. A person at a terminal gets a table, and a
pipe gets the same as tab-separated lines.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Annotated, Any

import pymongo
import typer
from bson import ObjectId, json_util
from bson.binary import UuidRepresentation
from typer.core import TyperGroup

from pyqueue import Client, ConfigurationError, Queue, QueueError
from pyqueue.backends.namespace import kind_of, options_of
from pyqueue.connecting import runner_of
from pyqueue.messages import Id

__all__ = [
    "Commands",
    "Json",
    "Namespace",
    "Signals",
    "Url",
    "as_json_text",
    "connect",
    "emit",
    "fail",
    "identity",
    "note",
    "parsed",
    "queue",
    "shown",
    "table",
    "target",
    "target_of",
]

#: Seconds for which a command looks for the server.
REACH = 5.0
#: What is wrong with a command line; typer has no name of its own for it.
UsageError: Any = typer.BadParameter.__base__
CLOSED_PIPE = 141  # what a shell says of a command that a closed pipe ended

_EXTENDED = json_util.JSONOptions(
    json_mode=json_util.JSONMode.RELAXED,
    tz_aware=True,
    uuid_representation=UuidRepresentation.STANDARD,
)

Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        envvar="PYQUEUE_URL",
        metavar="URL",
        help="The server and database: mongodb://host/db.",
        show_envvar=True,
    ),
]
Namespace = Annotated[
    str,
    typer.Option(
        "--namespace",
        envvar="PYQUEUE_NAMESPACE",
        metavar="NAME",
        help="The collection.",
        show_envvar=True,
    ),
]
Signals = Annotated[
    str | None,
    typer.Option(
        "--signals",
        envvar="PYQUEUE_SIGNALS",
        metavar="URL",
        help="The bus that the consumers listen to, if it is not the default: redis://..., none:.",
        show_envvar=True,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="For programs: JSON, one value per line.")]


class Commands(TyperGroup):
    """The commands, with what they have in common: how they end."""

    def invoke(self, ctx: Any) -> Any:
        """Carry the command out."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except QueueError as error:
            fail(error)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except UsageError as error:
            error.message = _redacted(error.message)
            raise
        except BrokenPipeError:
            os.dup2(
                os.open(os.devnull, os.O_WRONLY), 1
            )  # so that the flush at the interpreter's end is quiet, too
            raise typer.Exit(CLOSED_PIPE) from None
        return result


def fail(error: object) -> None:
    """End with one line of complaint."""
    typer.echo(f"pyqueue: {_redacted(' '.join(str(error).split()))}", err=True)
    raise typer.Exit(2) from None


def _redacted(text: str) -> str:
    """A complaint without the credentials of a URL that was given where none belongs."""
    return re.sub(r"(\w+:/+)\S*@", r"\1***@", text)


def note(text: str) -> None:
    """Tell a person something beside the answer."""
    typer.echo(f"pyqueue: {text}", err=True)


# ---- the server


def target_of(url: str | None) -> str:
    """The target that was named."""
    if not url:
        raise ConfigurationError(
            "which server? Give --url mongodb://host/db or set PYQUEUE_URL; `pyqueue embedded PATH` starts one and prints its URL"
        )
    if url == "memory:":
        raise ConfigurationError(
            '--url: what is in "memory:" no other process can see; give mongodb://host/db'
        )
    return url


@contextmanager
def target(url: str | None, namespace: str, signals: str | None = None) -> Iterator[Client]:
    """A client that has not yet talked to the server."""
    client = Client(target_of(url), namespace=namespace, signals=signals, owner=None)
    try:
        yield client
    finally:
        client.close()


@contextmanager
def connect(url: str | None, namespace: str, signals: str | None = None) -> Iterator[Client]:
    """A client whose server was reached."""
    with target(url, namespace, signals) as client:
        with pymongo.timeout(REACH):
            client.__enter__()
        yield client


def queue(client: Client, name: str) -> Queue[Any]:
    """A queue with the options that its own programs last used: the command line must not bring in others."""
    run = runner_of(client).run
    options = run(options_of(client.queue(name).name))
    kind = run(kind_of(name)) or "standard"
    known = {
        key: options[key]
        for key in ("lease", "max_tries", "dead_letter", "history")
        if key in options
    }
    try:
        return client.queue(name, kind=kind, **known)
    except QueueError as error:
        note(f"the options in the record of queue {name!r} are passed over: {error}")
        return client.queue(name, kind=kind)


# ---- values


def parsed(text: str, place: str) -> Any:
    """The BSON value of a text of extended JSON."""
    try:
        return json_util.loads(text, json_options=_EXTENDED)
    except Exception as error:  # json_util raises what comes up on the way
        raise ConfigurationError(
            f"{place}: no JSON: {error}; give a text that is no JSON with --text, or in quotes: '\"like this\"'"
        ) from error


def identity(text: str) -> Id:
    """An id as it was typed: 24 hexadecimal digits are an ObjectId."""
    return ObjectId(text) if ObjectId.is_valid(text) else text


def as_json_text(value: Any) -> str:
    """A value as one line of extended JSON."""
    return json_util.dumps(value, json_options=_EXTENDED, ensure_ascii=False)


def emit(value: Any) -> None:
    """Print a value as one line of JSON."""
    print(as_json_text(value))


# ---- tables


def shown(value: Any) -> str:
    """A value in a table's cell."""
    if value is None or value is False:
        return ""
    if value is True:
        return "yes"
    if isinstance(value, datetime):
        return value.isoformat(sep=" ", timespec="milliseconds").replace("+00:00", "Z")
    if isinstance(value, (dict, list)):
        return as_json_text(value)
    return str(value)


def table(
    columns: Sequence[str], rows: Iterable[Mapping[str, Any]], *, right: Sequence[str] = ()
) -> None:
    """Print rows: as a table at a terminal, else as lines of a header and cells between tabs."""
    cells = [[shown(row.get(name)) for name in columns] for row in rows]
    if not sys.stdout.isatty():
        for line in (list(columns), *cells):
            print("\t".join(cell.replace("\t", " ").replace("\n", " ") for cell in line))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Column, Table

    heads = (
        Column(name, justify="right" if name in right else "left", overflow="fold")
        for name in columns
    )
    grid = Table(*heads, box=box.SIMPLE_HEAD)
    for line in cells:
        grid.add_row(*line)
    Console(highlight=False, markup=False).print(grid)
