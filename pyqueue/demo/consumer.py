"""A consumer process of the demo. It processes the ``flights`` pipeline until all queues are empty.

There are two ways to do that. ``Pipeline.run`` calls the handlers for each message. ``in_batches``
runs the same stages on a hundred messages at a time, with the batch calls of the queues. That costs
a third, and suits stages that can handle whole batches.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import defaultdict
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Literal, cast

from pyqueue import Client, Delivery, LeaseLost, Pipeline, Queue, Reservation, To
from pyqueue.demo.flights import Flight, pipeline, results, store, upsert
from pyqueue.pipeline.graph import Stage

__all__ = ["By", "connect", "consume", "handle", "in_batches"]

By = Literal["batches", "pipeline"]

BATCH_SIZE = 100  # messages that are reserved and settled together
CONCURRENCY = 64  # handlers that run at once
POLL_S = 0.25  # without signals between processes, an idle stage looks this often
VICTIM_STORES_FOR_S = 0.3  # from the first stored flight until the victim is killed
VICTIM_LEASE_S = 3  # then the messages of the victim are delivered again


def connect(url: str, namespace: str, **options: Any) -> Client:
    """Make a client whose signals stay in this process.

    The default bus would leave a collection in the user's database.
    """
    return Client(url, namespace=namespace, signals="memory:", **options)


# ---- in batches


def in_batches(flights: Pipeline) -> None:
    """Run all stages, each in a thread, until no queue has a message left."""
    stages = flights.graph.stages
    errors: list[BaseException] = []

    def work(stage: Stage) -> None:
        try:
            while not errors:
                batch = queue_of(stage).reserve_many(BATCH_SIZE, timeout=POLL_S)
                if batch:
                    # A lease can expire if this process was slow. Another consumer then has the
                    # message.
                    with suppress(LeaseLost):
                        handle(stages, stage, batch)
                # The order matters: a message only moves to a queue that is checked later.
                elif all(queue_of(each).next_when() is None for each in stages.values()):
                    return
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(stage,)) for stage in stages.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error


def handle(stages: dict[str, Stage], stage: Stage, batch: list[Reservation[Any]]) -> None:
    """Process a batch of a stage, and settle it."""
    if stage.kind == "sink":
        results().bulk_write([upsert(each.payload, each) for each in batch], ordered=False)
        queue_of(stage).commit(*batch)
        return
    moves: dict[str, list[tuple[Reservation[Any], Any]]] = defaultdict(list)
    for each in batch:
        result = stage.handler(each.payload)
        to = To(stage.to[0], result) if stage.kind == "link" else result
        moves[to.queue].append((each, to.payload))
    for target, pairs in moves.items():
        queue_of(stage).move_many(pairs, to=queue_of(stages[target]))


def queue_of(stage: Stage) -> Queue[Any]:
    """Return the queue of a stage. The client of the demo is a blocking one."""
    return cast("Queue[Any]", stage.queue)


# ---- the process


def consume(parent: Connection) -> None:
    """Process messages until none are left or the parent is gone.

    The victim has short leases and never commits. It stores some flights, tells the parent which,
    and is killed. It always handles one message at a time.

    Args:
        parent: the connection to the parent, which sends the settings, and then the word to begin.
    """
    try:
        url, namespace, victim, by = parent.recv()
        parent.recv()
    except (EOFError, OSError):
        return  # The parent is gone.
    os.environ["PYQUEUE_URL"], os.environ["PYQUEUE_NAMESPACE"] = url, namespace
    # Without the warning that the victim's lease differs from the stored options of its queues.
    logging.getLogger("pyqueue").setLevel(logging.ERROR)
    threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()
    try:
        with connect(url, namespace) as client:
            if victim:  # not covered: the victim is killed
                Victim(parent).run(client)
            elif by == "pipeline":
                pipeline(client, poll=POLL_S).run(until_empty=True, concurrency=CONCURRENCY)
            else:
                in_batches(pipeline(client, poll=POLL_S))
        _send(parent, "done", None)
    except Exception as error:
        _send(parent, "error", f"a consumer: {type(error).__name__}: {error}")


def _exit_with(parent: Connection) -> None:
    """Exit when the parent is gone. The parent sends nothing more."""
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
        flights = pipeline(client, store=self._store, lease=VICTIM_LEASE_S, poll=POLL_S)
        flights.run(until_empty=True, concurrency=CONCURRENCY)

    def _store(self, flight: Flight, delivery: Delivery[Flight]) -> None:
        """Store a flight, and never return, so that its message is not committed."""
        store(flight, delivery)
        self._held.append(flight.id)
        self._has_stored.set()
        threading.Event().wait()

    def _report(self) -> None:
        """Tell the parent which flights are stored, some time after the first."""
        self._has_stored.wait()
        time.sleep(VICTIM_STORES_FOR_S)
        _send(self._parent, "held", list(self._held))
