"""The flights that left New York in 2013 as a pipeline. Read this example first.

::

    raw ──parse──> parsed ──route──┬──> late ──────┐
     │                             ├──> on-time ───┼──store──> a collection, one document each
     └─ misfit ──> raw.dead        └──> cancelled ─┘

* The rows are pushed to ``raw`` as they are in the file: strings. The stage validates them with the
  model ``Row``. A row that does not fit moves to ``raw.dead`` with the validation error, and
  ``parse`` never sees it.
* Each step is an atomic move: one update takes a message out of a queue and puts it, with its new
  payload, into the next queue. The message is always in exactly one queue.
* The handlers take batches: a list of up to a hundred messages, which are reserved and settled by a
  few commands. ``parse`` and ``route`` return a list with one answer for each message.
* ``store`` writes flights, and then their messages are committed. A process that dies in between
  has written the flights and not committed the messages, so these are delivered again when their
  leases expire. Therefore each write is an upsert by the flight's id: it can be repeated.

``docs/examples/flights.toml`` describes the same graph as a recipe.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import date
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field
from pymongo import MongoClient, UpdateOne, WriteConcern
from pymongo.collection import Collection

from pyqueue import Client, Delivery, Message, Pipeline, To

LATE = 15  # minutes, as the U.S. Department of Transportation defines it
WINDOW_S = 0.1  # how long a batch that is not full waits for more messages
QUEUES = ("raw", "parsed", "late", "on-time", "cancelled")  # in the order of the flow


# ---- the models

Minutes = Annotated[int | None, BeforeValidator(lambda value: None if value == "NA" else value)]


class Row(BaseModel):
    """A line of the file. Pydantic converts its strings to numbers, or raises an error."""

    id: int
    year: int
    month: int = Field(ge=1, le=12)
    day: int = Field(ge=1, le=31)
    dep_time: Minutes
    arr_delay: Minutes
    carrier: str = Field(pattern="^[A-Z0-9]{2}$")
    flight: int
    origin: str
    dest: str


class Flight(BaseModel):
    """A flight, with the facts that the demo needs."""

    id: int
    name: str
    carrier: str
    day: date
    departed: bool
    delay: int | None  # minutes on arrival; None if it did not arrive at its destination


# ---- the stages


def parse(rows: list[Row]) -> list[Flight]:
    """Convert rows to flights."""
    return [
        Flight(
            id=row.id,
            name=f"{row.carrier}{row.flight} {row.origin}-{row.dest}",
            carrier=row.carrier,
            day=date(row.year, row.month, row.day),
            departed=row.dep_time is not None,
            delay=row.arr_delay,
        )
        for row in rows
    ]


def route(flights: list[Flight]) -> list[To[Literal["late", "on-time", "cancelled"]]]:
    """Choose a queue for each flight. Late means 15 minutes or more, or diverted."""

    def choose(flight: Flight) -> To[Literal["late", "on-time", "cancelled"]]:
        if not flight.departed:
            return To("cancelled")
        return To("late" if flight.delay is None or flight.delay >= LATE else "on-time")

    return [choose(flight) for flight in flights]


def store(flights: list[Flight], deliveries: list[Delivery[Flight]]) -> None:
    """Write flights to the collection with one command."""
    pairs = zip(flights, deliveries, strict=True)
    results().bulk_write([upsert(flight, each.message) for flight, each in pairs], ordered=False)


def upsert(flight: Flight, message: Message[Any]) -> UpdateOne:
    """Return the upsert of a flight by its id. ``writes`` counts how often it was written."""
    passed = [*(step["q"] for step in message.trail), message.queue]
    fields = {"carrier": flight.carrier, "delay": flight.delay, "passed": passed}
    return UpdateOne({"_id": flight.id}, {"$set": fields, "$inc": {"writes": 1}}, upsert=True)


# ---- the graph


def pipeline(
    client: Client, *, store: Callable[..., Any] = store, batch: int = 100, **options: Any
) -> Pipeline:
    """Return the stages, chained by their queues. Each takes up to ``batch`` messages at once."""
    flights: Pipeline = client.pipeline("flights")
    options |= {"batch": batch, "window": WINDOW_S}
    # A consumer may receive mostly broken rows at first, if other consumers took the good rows.
    flights.link("raw", parse, to="parsed", model=Row, on_invalid="bury", **options)
    flights.choice("parsed", route, to=["late", "on-time", "cancelled"], model=Flight, **options)
    for queue in ("late", "on-time", "cancelled"):
        flights.sink(queue, store, model=Flight, **options)
    return flights


@cache
def results() -> Collection[dict[str, Any]]:
    """Return the collection of the stored flights.

    The environment names the server, as it does for the handlers of a recipe.
    """
    mongo = MongoClient[dict[str, Any]](os.environ["PYQUEUE_URL"])
    name = f"{os.environ.get('PYQUEUE_NAMESPACE', 'pyqueue')}_flights"
    # The commit of a message is durable, so the write before it must be durable too.
    durable = WriteConcern("majority", j=True)
    return mongo.get_default_database("pyqueue").get_collection(name, write_concern=durable)
