"""``pyqueue demo``: the pipeline of ``flights`` runs over a year's flights, a consumer is killed on the way, and every figure is checked.

The rows are pushed, some of them broken on purpose. One consumer process begins, and dies by SIGKILL when it has stored flights
and not committed them. Then others finish the work: its messages come back to them when their leases have run out. In the end all
figures are read from the collection and the queues, and compared with the same figures counted straight from the file.

``flights`` is the example: stages and graph. ``consumer`` is what works on it, ``rows`` reads the file, ``figures`` counts; this module
starts, kills, compares and prints.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any
from uuid import uuid4

from pymongo.errors import PyMongoError

from pyqueue import Client, ConfigurationError, QueueError
from pyqueue.demo.consumer import By, connect
from pyqueue.demo.figures import Figures, compare, expected, measured
from pyqueue.demo.flights import QUEUES
from pyqueue.demo.rows import BROKEN, find_lines, with_broken

__all__ = ["PROCESSES", "run", "run_spark", "show", "show_spark"]

PROCESSES = 2  # that consume, besides the one that is killed


class Consumers:
    """The consumer processes, as their parent sees them."""

    def __init__(self) -> None:
        self.held: list[int] = []  # the flights that the victim had stored and not committed
        self.running: dict[Connection, subprocess.Popen[bytes]] = {}

    def start(self, url: str, namespace: str, by: By) -> None:
        """Start all; they wait for a word to begin. The first is the victim."""
        for place in range(1 + PROCESSES):
            ours, theirs = Pipe()
            with theirs:
                command = [sys.executable, "-m", "pyqueue.demo", str(theirs.fileno())]
                # In a session of its own: the terminal's Ctrl-C is for the parent.
                process = subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], start_new_session=True
                )
            self.running[ours] = process
            ours.send((url, namespace, place == 0, by))

    def begin(self, *, victim: bool) -> None:
        """Let the victim begin; or, when it is dead, the others."""
        for connection in itertools.islice(self.running, 1 if victim else None):
            with suppress(OSError):  # who ended by itself is heard of
                connection.send("begin")

    def hear(self, timeout: float) -> None:
        """Hear what they have to say. Who holds messages is killed."""
        for connection in [
            each for each in wait(self.running, timeout) if isinstance(each, Connection)
        ]:
            process = self.running[connection]
            try:
                what, value = connection.recv()
            except (EOFError, ConnectionError):
                what, value = (
                    "error",
                    f"a consumer process ended by itself, with status {process.wait()}",
                )
            if what == "error":
                raise QueueError(value)
            if what == "held":
                process.kill()  # SIGKILL: it cannot clean up
                self.held = value
            process.wait()
            del self.running[connection]
            connection.close()

    def close(self) -> None:
        """End them in any case."""
        for connection, process in self.running.items():
            process.kill()
            process.wait()
            connection.close()


def run(rows: int | None = None, url: str | None = None, by: By = "batches") -> dict[str, Any]:
    """Run it; the answer is what ``show`` shows."""
    source, count, read = find_lines(rows)
    with ExitStack() as stack:
        client = stack.enter_context(opened(url))
        results = client.database[f"{client.namespace}_flights"]
        stack.callback(clean_up, client, results)
        consumers = stack.enter_context(closing(Consumers()))
        consumers.start(str(client.url), client.namespace, by)
        show_progress = stack.enter_context(progress(count + BROKEN))
        begun, pushed = time.monotonic(), 0
        raw = client.queue("raw")  # without a model: the rows go in as they are
        lines = with_broken(read(), count)
        while batch := list(itertools.islice(lines, 1000)):
            if not pushed:
                consumers.begin(victim=True)
            pushed += len(raw.push_many(batch))
        while not consumers.held:
            consumers.hear(0.2)
        returned = sum(client.queue(name).counts().reserved for name in QUEUES)
        consumers.begin(victim=False)
        while consumers.running:
            show_progress({name: client.queue(name).counts().total for name in QUEUES})
            consumers.hear(0.2)
        seconds = time.monotonic() - begun
        figures = measured(client, results, pushed, consumers.held)
        compared, wrong = compare(expected(read(), len(consumers.held)), figures)
        letters = client.queue("raw.dead").peek(1)
    return {
        "source": source,
        "rows": count,
        "broken": BROKEN,
        "by": by,
        "seconds": round(seconds, 3),
        "messages_per_second": round(pushed / seconds),
        "steps_per_second": round(
            sum(queue["out"] for queue in figures["queues"].values()) / seconds
        ),
        "held_by_the_killed": len(consumers.held),
        "redelivered": returned,
        "a_dead_letter_says": letters[0].error and letters[0].error["message"] if letters else None,
        "queues": figures["queues"],
        "carriers": dict(sorted(figures["carriers"].items())),
        "check": {"equal": not wrong, "compared": compared, "different": wrong},
    }


def run_spark(rows: int | None = None, url: str | None = None) -> dict[str, Any]:
    """Run the flights through Spark; the answer is what ``show_spark`` shows."""
    try:
        from pyqueue.demo import spark
    except ImportError as error:
        raise ConfigurationError(f'--spark: {error}; pip install "pyqueue-mongo[spark]"') from error
    source, count, read = find_lines(rows)
    with ExitStack() as stack:
        client = stack.enter_context(opened(url))
        stack.callback(client.database.drop_collection, client.namespace)
        return {"source": source, "rows": count, "broken": BROKEN} | spark.run(
            client, list(read()), stack
        )


@contextmanager
def opened(url: str | None) -> Iterator[Client]:
    """A client on a namespace of its own, there or on a server started for it."""
    namespace = f"pyqueue_demo_{uuid4().hex[:12]}"
    with ExitStack() as stack:
        if url is None:
            folder = tempfile.TemporaryDirectory(prefix="pyqueue-demo-", ignore_cleanup_errors=True)
            url = f"embedded:{stack.enter_context(folder)}"
        elif url.startswith(("mongodb://", "mongodb+srv://")):
            with closing(connect(url, namespace, command_timeout=5)) as client:
                client.queues()  # is anybody there?
        else:
            raise ConfigurationError("--url: give mongodb://... or mongodb+srv://...")
        client = stack.enter_context(closing(connect(url, namespace)))
        client.queues()  # the server is there from here on
        yield client


def clean_up(client: Client, results: Any) -> None:
    """Drop what the demo made."""
    with suppress(PyMongoError):  # if the server is gone, the user hears of that
        results.drop()
        client.database.drop_collection(client.namespace)


@contextmanager
def progress(total: int) -> Iterator[Callable[[dict[str, int]], None]]:
    """A bar on stderr, if that is a terminal."""
    from rich import progress as rich
    from rich.console import Console

    console = Console(stderr=True)
    columns = (
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TimeElapsedColumn(),
        rich.TextColumn("{task.description}"),
    )
    with rich.Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True
    ) as bar:
        task = bar.add_task("starting", total=total)

        def show_progress(inside: dict[str, int]) -> None:
            where = "  ".join(f"{name} {count}" for name, count in inside.items())
            bar.update(task, completed=max(0, total - sum(inside.values())), description=where)

        yield show_progress


def show(result: dict[str, Any]) -> None:
    """Print the result for people."""
    console = _console()
    console.print(
        f"{result['rows']} rows: {result['source']}; and {result['broken']} copies broken on purpose."
    )
    _table(console, "queue", ["in", "out", "dead"], result["queues"])
    _table(console, "carrier", ["flights", "late", "cancelled", "mean_delay"], result["carriers"])
    console.print(
        "Late: arrived 15 minutes late or more, or was diverted. Mean delay: minutes, of those that arrived."
    )
    console.print(f"A dead letter says: {' '.join(str(result['a_dead_letter_says']).split())}")
    console.print(
        f"A consumer process was killed when it had stored {result['held_by_the_killed']} flights and not committed them. "
        f"In all, {result['redelivered']} messages that it had held were delivered again, to the others."
    )
    console.print(
        f"{result['seconds']:.1f} s with the start of the processes: {result['messages_per_second']} messages/s. "
        f"Each is moved twice and committed once: {result['steps_per_second']} steps/s."
    )
    _show_check(console, result["check"])


def show_spark(result: dict[str, Any]) -> None:
    """Print the result of the run through Spark for people."""
    console = _console()
    console.print(
        f"{result['rows']} rows: {result['source']}; and {result['broken']} copies broken on purpose."
    )
    _table(console, "carrier", ["flights", "late", "cancelled", "mean_delay"], result["carriers"])
    console.print(
        "Late: arrived 15 minutes late or more, or was diverted. Mean delay: minutes, of those that arrived."
    )
    console.print(
        f"A Spark stage moved {result['moved']} messages from raw to parsed in {result['batches']} batches, and finished {result['dropped']} "
        f"that it left out. The sums are of {result['claims']} claims on parsed."
    )
    console.print(
        f"{result['seconds']:.1f} s, after {result['seconds_to_start_spark']:.1f} s to start Spark: {result['messages_per_second']} messages/s."
    )
    _show_check(console, result["check"])


def _console() -> Any:
    from rich.console import Console

    return Console(highlight=False, markup=False)


def _table(console: Any, title: str, columns: list[str], lines: dict[str, Figures]) -> None:
    from rich.table import Column, Table

    grid = Table(title, *(Column(name.replace("_", " "), justify="right") for name in columns))
    for name, figures in lines.items():
        cells = (figures[column] for column in columns)
        grid.add_row(
            name, *(f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in cells)
        )
    console.print(grid)


def _show_check(console: Any, check: dict[str, Any]) -> None:
    for wrong in check["different"]:
        console.print(
            f"NOT EQUAL: {wrong['figure']}: {wrong['file']} in the file, {wrong['here']} here"
        )
    if check["equal"]:
        console.print(
            f"Check: {check['compared']} figures, all equal to those counted straight from the file."
        )
