"""A consumer process of the demo: it works on the pipeline of ``flights`` until all queues are empty.

It can do so in two ways. ``Pipeline.run`` handles each message by itself, as handlers want it. ``in_batches`` takes the same stages a
hundred messages at a time, by the batch calls of the queues: that costs a third, where a stage can do with whole batches.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import defaultdict
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Literal, cast

from pyqueue import Client, Delivery, LeaseLost, Pipeline, Queue, Reservation, To
from pyqueue.demo.flights import Flight, pipeline, results, store, upsert

if TYPE_CHECKING:
    from pyqueue.pipeline.graph import Stage

__all__ = ["By", "connect", "consume", "in_batches"]

By = Literal["batches", "pipeline"]

BATCH = 100  # messages reserved and settled at a time
CONCURRENCY = 64  # handlers at once
GATHER = 0.3  # seconds for which the process that is killed goes on storing
VICTIMS_LEASE = 3  # seconds until its messages come back


def connect(url: str, namespace: str, **options: Any) -> Client:
    """Make a client. Its signals stay in the process: those between processes would leave a collection in your database."""
    return Client(url, namespace=namespace, signals="memory:", **options)


# ---- in batches


def in_batches(flights: Pipeline) -> None:
    """Work on all stages, a thread for each, until no queue has a message left."""
    stages = flights.graph.stages
    failed: list[BaseException] = []

    def work(stage: Stage) -> None:
        try:
            while not failed:
                batch = queue_of(stage).reserve_many(BATCH, timeout=0.25)
                if batch:
                    with suppress(
                        LeaseLost
                    ):  # it took too long, and others have what was lost: leave it to them
                        handle(stages, stage, batch)
                elif all(
                    each.queue.next_when() is None for each in stages.values()
                ):  # in the order of the flow
                    return
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(stage,)) for stage in stages.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in failed:
        raise error


def handle(stages: dict[str, Stage], stage: Stage, batch: list[Reservation[Any]]) -> None:
    """Do what is to be done with a batch of a stage, and settle it."""
    if stage.kind == "sink":
        results().bulk_write([upsert(each.payload, each) for each in batch], ordered=False)
        queue_of(stage).commit(*batch)
        return
    decided: dict[str, list[tuple[Reservation[Any], Any]]] = defaultdict(list)
    for each in batch:
        answer = stage.handler(each.payload)
        to = To(stage.to[0], answer) if stage.kind == "link" else answer
        decided[to.queue].append((each, to.payload))
    for target, pairs in decided.items():
        queue_of(stage).move_many(pairs, to=queue_of(stages[target]))


def queue_of(stage: Stage) -> Queue[Any]:
    """Return the queue of a stage; the demo's client is a blocking one."""
    return cast("Queue[Any]", stage.queue)


# ---- the process


def consume(parent: Connection) -> None:
    """Do as the parent says: begin, and end when there is nothing left to do or the parent is gone.

    The victim's leases are short, and it never commits: it stores some flights, tells the parent which, and is killed. It handles each
    message by itself, whatever the others do.
    """
    try:
        url, namespace, victim, by = parent.recv()
        parent.recv()  # the word to begin
    except (EOFError, OSError):
        return  # the parent is gone
    os.environ["PYQUEUE_URL"], os.environ["PYQUEUE_NAMESPACE"] = url, namespace
    # It would say that the victim's leases are other than the others'.
    logging.getLogger("pyqueue").setLevel(logging.ERROR)
    held: list[int] = []
    some = threading.Event()

    def tell(what: str, value: Any) -> None:
        with suppress(OSError):  # the parent is gone
            parent.send((what, value))

    def hold(
        flight: Flight, delivery: Delivery[Flight]
    ) -> None:  # not covered: the victim is killed
        store(flight, delivery)
        held.append(flight.id)
        some.set()
        threading.Event().wait()  # for the end

    def confess() -> None:  # not covered: the victim is killed
        some.wait()
        time.sleep(GATHER)
        tell("held", list(held))

    def live() -> None:
        with suppress(EOFError, OSError):
            parent.recv()
        os._exit(1)  # not covered: the parent is gone, and so is this process

    threading.Thread(target=live, daemon=True).start()
    try:
        with connect(url, namespace) as client:
            # Without signals between processes, an idle stage looks four times a second.
            if victim:  # not covered: the victim is killed
                threading.Thread(target=confess, daemon=True).start()
                flights = pipeline(client, store=hold, lease=VICTIMS_LEASE, poll=0.25)
            else:
                flights = pipeline(client, poll=0.25)
            if victim or by == "pipeline":
                flights.run(until_empty=True, concurrency=CONCURRENCY)
            else:
                in_batches(flights)
        tell("done", None)
    except Exception as error:
        tell("error", f"a consumer: {type(error).__name__}: {error}")
