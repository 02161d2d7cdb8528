"""A consumer process of the demo. It runs the ``flights`` pipeline until all queues are empty.

The handlers of the pipeline take batches. For comparison, ``--by pipeline`` makes each batch one
message, at several times the cost.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Literal

from pyqueue import Client, Delivery
from pyqueue.demo.flights import Flight, pipeline, store

By = Literal["batches", "pipeline"]

CONCURRENCY = 64  # how many handlers of single messages run at once
POLL_S = 0.25  # how often an idle stage checks its queue: no signals cross processes
VICTIM_STORES_FOR_S = 0.3  # from the first stored flight until the victim is killed
VICTIM_LEASE_S = 3  # when it ends, the victim's messages are delivered again


def connect(url: str, namespace: str, **options: Any) -> Client:
    """Make a client whose signals stay in this process.

    The default bus would create a collection in the user's database, and leave it there. So would
    telemetry.
    """
    options = {"signals": "memory:", "telemetry": False, **options}
    return Client(url, namespace=namespace, **options)


def consume(parent: Connection) -> None:
    """Process messages until none are left or the parent is gone.

    The victim has short leases and never commits. It stores some flights and tells the parent their
    ids; then the parent kills it. Each of its handlers takes one message.

    Args:
        parent: The connection to the parent, which sends the settings, and then "begin".
    """
    try:
        url, namespace, victim, by, telemetry = parent.recv()
        parent.recv()
    except (EOFError, OSError):
        return  # The parent is gone.
    os.environ["PYQUEUE_URL"], os.environ["PYQUEUE_NAMESPACE"] = url, namespace
    # Hide the warning that the victim's lease differs from the stored options of its queues.
    logging.getLogger("pyqueue").setLevel(logging.ERROR)
    threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()
    try:
        with connect(url, namespace, telemetry=telemetry) as client:
            if victim:  # not covered: the victim is killed
                Victim(parent).run(client)
            elif by == "pipeline":
                single = pipeline(client, batch=1, poll=POLL_S)
                single.run(until_empty=True, concurrency=CONCURRENCY)
            else:
                pipeline(client, poll=POLL_S).run(until_empty=True)
        _send(parent, "done", None)
    except Exception as error:
        _send(parent, "error", f"a consumer: {type(error).__name__}: {error}")


def _exit_with(parent: Connection) -> None:
    """Wait until the parent, which sends nothing more, is gone. Then exit."""
    with suppress(EOFError, OSError):
        parent.recv()
    os._exit(1)  # not covered: ends this process


def _send(parent: Connection, what: str, value: object) -> None:
    with suppress(OSError):  # The parent is gone.
        parent.send((what, value))


class Victim:  # not covered: the victim is killed
    """The consumer that is killed while it holds messages."""

    def __init__(self, parent: Connection) -> None:
        self._parent = parent
        self._held: list[int] = []
        self._has_stored = threading.Event()

    def run(self, client: Client) -> None:
        """Run the pipeline until the parent kills this process."""
        threading.Thread(target=self._report, daemon=True).start()
        flights = pipeline(client, store=self._store, batch=1, lease=VICTIM_LEASE_S, poll=POLL_S)
        flights.run(until_empty=True, concurrency=CONCURRENCY)

    def _store(self, flights: list[Flight], deliveries: list[Delivery[Flight]]) -> None:
        """Store a flight, and never return, so that its message is not committed."""
        store(flights, deliveries)
        self._held += [each.id for each in flights]
        self._has_stored.set()
        threading.Event().wait()

    def _report(self) -> None:
        """Some time after the first flight is stored, tell the parent which flights are stored."""
        self._has_stored.wait()
        time.sleep(VICTIM_STORES_FOR_S)
        _send(self._parent, "held", list(self._held))
