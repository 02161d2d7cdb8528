"""Code that the commands share: exit statuses, the connection to the server, output.

With ``--json``, programs read one value per line: BSON as MongoDB's relaxed extended JSON. At a
terminal, people get a table. In a pipe, the same rows are tab-separated lines.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import pymongo
import typer
from bson import ObjectId, json_util
from bson.binary import UuidRepresentation
from typer.core import TyperGroup

from pyqueue import Client, ConfigurationError, Queue, QueueError
from pyqueue.backends.all_queues import names as queue_names
from pyqueue.backends.namespace import STREAM, kind_of
from pyqueue.backends.reading import options_of
from pyqueue.cli import completing
from pyqueue.durations import seconds_of
from pyqueue.errors import suggestion
from pyqueue.messages import Id
from pyqueue.runtime.connecting import runner_of
from pyqueue.targets import is_memory_url

if TYPE_CHECKING:
    from rich.table import Table

#: How long a command tries to reach the server, in seconds.
CONNECT_TIMEOUT_S = 5.0
#: What a deferred message waits for.
DEFERRED: Final = {"group": "an earlier message of its group", "limit": "the limit of its queue"}
#: The exit statuses of a shell for a program that Ctrl-C or a closed pipe ended.
INTERRUPTED, CLOSED_PIPE = 130, 141
#: The error for a wrong command line. Typer does not export it, but it exports a subclass.
UsageError: Any = typer.BadParameter.__base__

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
        help="The collection of the queues.",
        show_envvar=True,
    ),
]
Signals = Annotated[
    str | None,
    typer.Option(
        "--signals",
        envvar="PYQUEUE_SIGNALS",
        metavar="URL",
        help="The bus that the consumers use, if it is not the default: redis://..., none:.",
        show_envvar=True,
    ),
]
QueueName = Annotated[
    str,
    typer.Argument(
        metavar="QUEUE", help="The queue's name.", autocompletion=completing.queue_names
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs, one value per line.")]


class Commands(TyperGroup):
    """A group of commands that translates errors into exit statuses."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except QueueError as error:
            fail(error)
        except KeyboardInterrupt:
            _forget_interrupt()
            raise typer.Exit(INTERRUPTED) from None
        except UsageError as error:
            error.message = _without_credentials(error.message)
            raise
        except BrokenPipeError:
            # Python flushes stdout once more when it exits. That must not fail too.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            raise typer.Exit(CLOSED_PIPE) from None
        return result


def _forget_interrupt() -> None:
    """Make Python exit with our status, wherever Ctrl-C interrupted it.

    If a KeyboardInterrupt leaves ``exec`` of a text, CPython treats the exception as unhandled,
    even if a caller handles it: at its end, the process kills itself with SIGINT. Dataclasses and
    named tuples use ``exec``, so this happens while modules are imported. The next ``exec`` clears
    the flag.
    """
    exec("")


def fail(error: object) -> None:
    """Print an error in one line on stderr, and exit with status 2."""
    typer.echo(f"pyqueue: {_without_credentials(' '.join(str(error).split()))}", err=True)
    raise typer.Exit(2) from None


def _without_credentials(text: str) -> str:
    """Hide the credentials of a URL that was given in the wrong place."""
    return re.sub(r"(\w+:/+)\S*@", r"\1***@", text)


def note(text: str) -> None:
    """Print a remark for people on stderr."""
    typer.echo(f"pyqueue: {text}", err=True)


# ---- the server


def checked_url(url: str | None) -> str:
    """Return the URL of the server.

    Raises:
        ConfigurationError: The URL is missing, or it is "memory:", whose data no other process can
            see.
    """
    if not url:
        raise ConfigurationError(
            "missing server: pass --url mongodb://host/db or set PYQUEUE_URL; "
            "`pyqueue embedded PATH` starts a server and prints its URL"
        )
    if is_memory_url(url):
        raise ConfigurationError(
            '--url: no other process can see the data of "memory:"; use mongodb://host/db'
        )
    return url


@contextmanager
def started(url: str | None) -> Iterator[str | None]:
    """Start the server that an ``embedded:`` URL names, and stop it afterwards.

    Only one process, and in it one client, can start the server of a directory. So handlers that
    create a client need the URL of the running server.

    Yields:
        The URL of the running server. Any other URL, or None, stays unchanged.
    """
    if url is None or not url.startswith("embedded:"):
        yield url
        return
    with closing(Client(url, owner=None)) as client:
        runner_of(client).open()
        yield client.url


@contextmanager
def unconnected(url: str | None, namespace: str, signals: str | None = None) -> Iterator[Client]:
    """Create a client that has not connected to the server yet, and close it afterwards."""
    client = Client(checked_url(url), namespace=namespace, signals=signals, owner=None)
    try:
        yield client
    finally:
        client.close()


@contextmanager
def connect(url: str | None, namespace: str, signals: str | None = None) -> Iterator[Client]:
    """Create a client that is connected to the server, and close it afterwards."""
    with unconnected(url, namespace, signals) as client:
        # The preparation has its own time limit, because the limit below cannot shorten it.
        runner_of(client).open().prepare(CONNECT_TIMEOUT_S)
        with pymongo.timeout(CONNECT_TIMEOUT_S):
            client.__enter__()
        yield client


def own_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that each program may choose for a queue, as a program last set them."""
    names = ("lease", "max_tries", "dead_letter", "history")
    return {name: options[name] for name in names if name in options}


def queue_with_stored_options(client: Client, name: str) -> Queue[Any]:
    """Return a queue with the options that its programs last set.

    With other options, a command would change how programs use the queue.

    Raises:
        ConfigurationError: The name belongs to a stream.
    """
    run = runner_of(client).run
    options = run(options_of(client.queue(name).name))
    kind: Any = run(kind_of(name))
    if kind == STREAM:
        raise ConfigurationError(
            f"QUEUE: {name!r} is a stream; use `pyqueue stream read`, `consumers` or `seek`"
        )
    try:
        return client.queue(name, kind=kind, **own_options(options))
    except QueueError as error:
        note(f"the stored options of queue {name!r} are ignored: {error}")
        return client.queue(name, kind=kind)


def refuse_unknown(client: Client, name: str, argument: str = "QUEUE") -> None:
    """Refuse the name of a queue that was never used, because the name may be mistyped.

    The dead-letter queue of a known queue is known, even if no message has died yet.

    Args:
        client: A connected client.
        name: The name of the queue.
        argument: The argument of the command that gave the name. The error text begins with it.

    Raises:
        ConfigurationError: The namespace has no such queue.
    """
    names = runner_of(client).run(queue_names())
    known = {client.queue(name).name, name.removesuffix(".dead")}
    if known.isdisjoint(names):
        hint = suggestion(name, names, "`pyqueue ls` lists all queues")
        raise ConfigurationError(
            f"{argument}: namespace {client.namespace!r} has no queue {name!r}; {hint}"
        )


# ---- values


def parse_json(text: str, source: str) -> Any:
    """Parse extended JSON into a BSON value. ``source`` names the text in the error."""
    try:
        return json_util.loads(text, json_options=_EXTENDED)
    except Exception as error:  # json_util raises errors of many types
        raise ConfigurationError(
            f"{source}: invalid JSON ({error}); to push plain text, use --text, "
            "or put it in quotes, '\"like this\"'"
        ) from error


def parse_instant(option: str, text: str) -> datetime:
    """Parse an instant that is given in ISO 8601 with a time zone."""
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        instant = None
    if instant is None or instant.utcoffset() is None:
        raise ConfigurationError(
            f"{option}: {text!r} is not allowed; use an instant with a time zone, such as "
            "2030-01-31T09:00+01:00 or 2030-01-31T08:00Z"
        )
    return instant


def duration(option: str) -> Callable[[object], float]:
    """Return the ``parser=`` of an option that takes a duration. Its errors name the option."""

    def parse(value: object) -> float:
        if isinstance(value, (int, float)):  # the default
            return float(value)
        try:
            return seconds_of(str(value))
        except ValueError as error:
            # Not a ValueError: Typer would print it in a frame of several lines.
            raise QueueError(f"{option}: {error}") from None

    return parse


def parse_id(text: str) -> Id:
    """Return an ObjectId if a text consists of 24 hexadecimal digits, or else the text itself."""
    return ObjectId(text) if ObjectId.is_valid(text) else text


def as_json_text(value: object) -> str:
    """Format a value as one line of extended JSON."""
    return json_util.dumps(value, json_options=_EXTENDED, ensure_ascii=False)


def emit(value: object) -> None:
    """Print a value as one line of JSON."""
    print(as_json_text(value))


def report_pause(what: str, name: str, as_json: bool, *, paused: bool) -> None:
    """Print whether a queue or a schedule is paused now."""
    if as_json:
        emit({what: name, "paused": paused})
    else:
        print(f"{name}: {'paused' if paused else 'not paused'}")


# ---- tables


def cell(value: object) -> str:
    """Format a value for a cell of a table."""
    if value is None or value is False:
        return ""
    if value is True:
        return "yes"
    if isinstance(value, datetime):
        return value.isoformat(sep=" ", timespec="milliseconds").replace("+00:00", "Z")
    if isinstance(value, (dict, list)):
        return as_json_text(value)
    return str(value)


def age(instant: datetime) -> str:
    """Return how long ago an instant was, or in how long it will be, for people: "5m ago"."""
    passed_s = round((datetime.now(UTC) - instant).total_seconds())
    length, unit = abs(passed_s), "s"
    for size, name in ((60, "m"), (60, "h"), (24, "d")):
        if length < 2 * size:
            break
        length, unit = length // size, name
    return f"in {length}{unit}" if passed_s < 0 else f"{length}{unit} ago"


class Sheet(NamedTuple):
    """Rows to print: a table at a terminal, tab-separated lines with a header otherwise."""

    #: The names of the columns, in order.
    columns: Sequence[str]
    #: The values of each row, keyed by column.
    rows: Sequence[Mapping[str, object]]
    #: The columns that are aligned to the right.
    right: Sequence[str] = ()
    #: The column whose values are never broken, so that they can be copied.
    whole: str = "id"

    def cells(self) -> list[list[str]]:
        """Return the texts of the rows."""
        return [[cell(row.get(name)) for name in self.columns] for row in self.rows]

    def lines(self) -> Iterator[str]:
        """Yield the tab-separated lines."""
        for line in (list(self.columns), *self.cells()):
            yield "\t".join(each.replace("\t", " ").replace("\n", " ") for each in line)

    def grid(self) -> Table:
        """Return the table for a terminal."""
        from rich import box
        from rich.table import Column, Table
        from rich.text import Text

        heads = [
            Column(name, justify="right" if name in self.right else "left", overflow="fold")
            for name in self.columns
        ]
        cells = self.cells()
        for head, *values in zip(heads, *cells, strict=True):
            if head.header == self.whole:
                head.min_width, head.no_wrap = max(map(len, values), default=0), True
        grid = Table(*heads, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for line in cells:
            grid.add_row(*map(Text, line))  # a text, and not markup
        return grid

    def print(self) -> None:
        """Print the rows."""
        if not sys.stdout.isatty():
            for line in self.lines():
                print(line)
            return
        from rich.console import Console

        Console(highlight=False, markup=False).print(self.grid())


def table(
    columns: Sequence[str],
    rows: Iterable[Mapping[str, object]],
    *,
    right: Sequence[str] = (),
    whole: str = "id",
) -> None:
    """Print rows; see ``Sheet``."""
    Sheet(columns, [*rows], right, whole).print()
