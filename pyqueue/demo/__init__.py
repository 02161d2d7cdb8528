"""``pyqueue demo``: run the ``flights`` pipeline, kill a consumer, and check every figure.

The demo pushes a year's flights, some of them broken on purpose. The first consumer process stores
flights and is killed by SIGKILL before it commits them. Then other consumer processes finish the
work: they receive the messages of the killed process when its leases expire. At the end the demo
counts all figures from the collection and the queues, and compares them with the same figures
counted from the file.

``flights`` is the example: stages and graph. ``consumer`` processes its messages, ``rows`` reads
the file, ``figures`` counts, and ``report`` prints. ``traffic`` adds messages that only a dashboard
shows. This module starts and kills the processes, and compares the figures.
"""

from __future__ import annotations

import itertools
import logging
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any
from uuid import uuid4

from pymongo.errors import PyMongoError

from pyqueue import Client, ConfigurationError, QueueError
from pyqueue.demo.consumer import By, connect
from pyqueue.demo.figures import compare, expected, measured
from pyqueue.demo.flights import QUEUES
from pyqueue.demo.report import progress_bar
from pyqueue.demo.rows import BROKEN, Line, find_lines, with_broken
from pyqueue.demo.traffic import traffic

__all__ = ["PROCESSES", "Consumers", "run", "run_spark", "run_with_web"]

#: How long the demo tries to reach the server of ``--url``.
CONNECT_TIMEOUT_S = 5.0
#: The number of consumer processes besides the victim.
PROCESSES = 2


class Consumers:
    """The consumer processes. The first one is the victim, which is killed."""

    def __init__(self) -> None:
        #: The ids of the flights that the victim had stored and not committed.
        self.held: list[int] = []
        self.running: dict[Connection, subprocess.Popen[bytes]] = {}

    def start(self, url: str, namespace: str, by: By, telemetry: bool = False) -> None:
        """Start all processes. They wait until ``begin`` is called."""
        for number in range(1 + PROCESSES):
            ours, theirs = Pipe()
            with theirs:
                command = [sys.executable, "-m", "pyqueue.demo", str(theirs.fileno())]
                # In a separate session, so that only the parent gets the terminal's Ctrl-C.
                process = subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], start_new_session=True
                )
            self.running[ours] = process
            ours.send((url, namespace, number == 0, by, telemetry))

    def begin(self, *, victim: bool) -> None:
        """Let the victim begin or, once the victim is dead, all remaining processes."""
        for connection in itertools.islice(self.running, 1 if victim else None):
            with suppress(OSError):  # If the process has ended, `receive` reports it.
                connection.send("begin")

    def receive(self, timeout: float) -> None:
        """Receive reports from the processes, and kill the victim once it reports held flights.

        Args:
            timeout: How many seconds to wait for a report.

        Raises:
            QueueError: A process failed or ended early.
        """
        for connection in wait(self.running, timeout):
            assert isinstance(connection, Connection)
            process = self.running[connection]
            try:
                what, value = connection.recv()
            except (EOFError, ConnectionError):
                status = process.wait()
                what, value = "error", f"a consumer process ended early, with status {status}"
            if what == "error":
                raise QueueError(value)
            if what == "held":
                process.kill()  # SIGKILL: the process cannot clean up
                self.held = value
            process.wait()
            del self.running[connection]
            connection.close()

    def close(self) -> None:
        """Kill the processes that are still running."""
        for connection, process in self.running.items():
            process.kill()
            process.wait()
            connection.close()


def run(rows: int | None = None, url: str | None = None, by: By = "batches") -> dict[str, Any]:
    """Run the demo, and return the result that ``report`` prints.

    Args:
        rows: The number of flights; None means the whole sample.
        url: The server to use; None starts a private one.
        by: "batches": the handlers take batches; "pipeline": they take one message at a time.
    """
    found = find_lines(rows)
    with opened(url) as client, dropped_after(client):
        return _fly(client, found, by)


def run_with_web(
    rows: int | None,
    url: str | None,
    by: By,
    serve: Callable[[str, str], AbstractContextManager[object]],
    show: Callable[[dict[str, Any]], object],
) -> dict[str, Any]:
    """Run the demo while a dashboard shows it, wait for Ctrl-C, and return the result.

    Telemetry is on, and other kinds of queues have traffic, too. After the figures are checked, the
    flights pass through the pipeline again, slowly, so that the numbers on the pages change.

    Args:
        rows: As for ``run``.
        url: As for ``run``.
        by: As for ``run``.
        serve: Takes the URL of the server and the namespace, and returns a context manager that
            serves a dashboard during its block.
        show: A function that shows the result.
    """
    found = find_lines(rows)
    _, _, read = found
    # Some of the traffic fails on purpose, and each failure would be logged.
    logging.getLogger("pyqueue").setLevel(logging.ERROR)
    with ExitStack() as stack:
        client = stack.enter_context(opened(url))
        stack.enter_context(dropped_after(client))
        # This client stores its figures before the collections are dropped, and not afterwards.
        told = connect(str(client.url), client.namespace, telemetry=True)
        stack.enter_context(closing(told))
        stack.enter_context(serve(str(client.url), client.namespace))
        again = stack.enter_context(traffic(told, read))
        result = _fly(told, found, by, telemetry=True)
        with suppress(KeyboardInterrupt):
            show(result)
            again()
            threading.Event().wait()
    return result


def _fly(
    client: Client,
    found: tuple[str, int, Callable[[], Iterator[Line]]],
    by: By,
    *,
    telemetry: bool = False,
) -> dict[str, Any]:
    """Send the flights through the pipeline, and return the result.

    Args:
        client: The client that pushes and counts.
        found: The lines, as ``find_lines`` returns them.
        by: As for ``run``.
        telemetry: Whether the consumers store figures.
    """
    source, count, read = found
    results = client.database[f"{client.namespace}_flights"]
    with ExitStack() as stack:
        consumers = stack.enter_context(closing(Consumers()))
        consumers.start(str(client.url), client.namespace, by, telemetry)
        show_progress = stack.enter_context(progress_bar(count + BROKEN))
        begun = time.monotonic()
        pushed = _push(client, with_broken(read(), count), consumers)
        while not consumers.held:
            consumers.receive(0.2)
        redelivered = sum(client.queue(name).counts().reserved for name in QUEUES)
        consumers.begin(victim=False)
        while consumers.running:
            counts = {name: client.queue(name).counts().total for name in QUEUES}
            show_progress(counts, sum(counts.values()))
            consumers.receive(0.2)
        seconds = time.monotonic() - begun
        figures = measured(client, results, pushed, consumers.held)
        compared, wrong = compare(expected(read(), len(consumers.held)), figures)
        letters = client.queue("raw.dead").peek(1)
    steps = sum(queue["out"] for queue in figures["queues"].values())
    return {
        "source": source,
        "rows": count,
        "broken": BROKEN,
        "by": by,
        "seconds": round(seconds, 3),
        "messages_per_second": round(pushed / seconds),
        "steps_per_second": round(steps / seconds),
        "held_by_the_killed": len(consumers.held),
        "redelivered": redelivered,
        "a_dead_letter_says": letters[0].error and letters[0].error.message if letters else None,
        "queues": figures["queues"],
        "carriers": dict(sorted(figures["carriers"].items())),
        "check": {"equal": not wrong, "compared": compared, "different": wrong},
    }


def _push(client: Client, lines: Iterator[Line], consumers: Consumers) -> int:
    """Push all lines. The victim begins just before the first push. Return how many were pushed."""
    pushed = 0
    raw = client.queue("raw")  # without a model, so that broken rows are pushed too
    while batch := list(itertools.islice(lines, 1000)):
        if not pushed:
            consumers.begin(victim=True)
        pushed += len(raw.push_many(batch))
    return pushed


def run_spark(rows: int | None = None, url: str | None = None) -> dict[str, Any]:
    """Run the flights through Spark, and return the result that ``report`` prints.

    Args:
        rows: The number of flights; None means the whole sample.
        url: The server to use; None starts a private one.

    Raises:
        ConfigurationError: Spark is not installed.
    """
    try:
        from pyqueue.demo import spark
    except ImportError as error:
        raise ConfigurationError(
            f'--spark: {error}; install the spark extra: pip install "pyqueue-mongo[spark]"'
        ) from error
    source, count, read = find_lines(rows)
    with ExitStack() as stack:
        client = stack.enter_context(opened(url))
        stack.callback(client.database.drop_collection, client.namespace)
        # A message takes two steps: the stage, and the sum.
        show_progress = stack.enter_context(progress_bar(2 * (count + BROKEN)))
        return {"source": source, "rows": count, "broken": BROKEN} | spark.run(
            client, list(read()), stack, show_progress
        )


@contextmanager
def opened(url: str | None) -> Iterator[Client]:
    """Make a client with a new namespace, on this server or, without a URL, on a private one."""
    namespace = f"pyqueue_demo_{uuid4().hex[:12]}"
    with ExitStack() as stack:
        if url is None:
            folder = tempfile.TemporaryDirectory(prefix="pyqueue-demo-", ignore_cleanup_errors=True)
            url = f"embedded:{stack.enter_context(folder)}"
        elif url.startswith(("mongodb://", "mongodb+srv://")):
            with closing(connect(url, namespace, command_timeout=CONNECT_TIMEOUT_S)) as client:
                client.queues()  # Fail soon if the server cannot be reached.
        else:
            raise ConfigurationError(
                "--url: not the URL of a MongoDB server; use mongodb://... or mongodb+srv://..."
            )
        client = stack.enter_context(closing(connect(url, namespace)))
        client.queues()  # From here on the server runs.
        yield client


@contextmanager
def dropped_after(client: Client) -> Iterator[None]:
    """Drop the collections of the demo after the block: their names begin with its namespace."""
    try:
        yield
    finally:
        with suppress(PyMongoError):  # If the server is gone, another error already says so.
            own = {"name": {"$regex": f"^{client.namespace}"}}
            for name in client.database.list_collection_names(filter=own):
                client.database.drop_collection(name)
