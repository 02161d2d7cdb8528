"""A service with types: an app that stores orders and their jobs, a worker, and a status.

``tests/test_types.py`` gives it to type checkers, and ``tests/testing/test_service.py`` runs it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, assert_type

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel

from pyqueue import (
    AsyncClient,
    AsyncQueue,
    Client,
    Delivery,
    Pipeline,
    QueueSpec,
    Report,
    Reservation,
    To,
    Worker,
)
from pyqueue.messages import Id, KindName, State


class Order(BaseModel):
    """The body of a request."""

    book: str
    copies: int = 1


class Job(BaseModel):
    """A message of the queue "ship"."""

    order: str


class Letter(BaseModel):
    """A message of the queue "mail"."""

    text: str


class Status(BaseModel):
    """The answer to a question about an order."""

    state: State
    tries: int
    done: float = 0.0


SHIP = QueueSpec("ship", Job, lease=15, max_tries=3, history=3600)
MAIL = QueueSpec("mail", Letter, kind="priority")
KIND: KindName = "priority"


@dataclass
class Carrier:
    """What the handlers of a run share."""

    name: str
    parcels: list[str] = field(default_factory=list)

    def take(self, order: str) -> str:
        """Take a parcel. Return its label."""
        self.parcels.append(order)
        return f"{self.name}: parcel {len(self.parcels)}"


async def carrier() -> AsyncIterator[Carrier]:
    """Open what the handlers share."""
    yield Carrier("post")


# ---- the app


class Shop:
    """The part of the app that uses the queue.

    Args:
        client: The client of the app.
    """

    def __init__(self, client: AsyncClient) -> None:
        self.client = client
        self.jobs = client.queue(SHIP)
        assert_type(self.jobs, AsyncQueue[Job])

    async def accept(self, number: str, order: Order) -> Id:
        """Store an order and its job in one transaction: the queue is the outbox."""

        async def work(session: Any) -> Id:
            document = {"_id": number, **order.model_dump()}
            await self.client.database["orders"].insert_one(document, session=session)
            return await self.jobs.push(Job(order=number), id=f"ship-{number}", session=session)

        return assert_type(await self.client.run_transaction(work), Id)

    async def status(self, number: str) -> Status | None:
        """Return the state of the job of an order."""
        message = await self.jobs.get(f"ship-{number}")
        if message is None:
            return None
        assert_type(message.payload, Job)
        done = 0.0 if message.progress is None else message.progress.fraction
        return Status(state=message.state, tries=message.tries, done=done)


def make_app(url: str) -> FastAPI:
    """Return the app. It makes its client when it starts."""
    shops: list[Shop] = []

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncClient(url) as client:
            shops[:] = [Shop(client)]
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/orders/{number}", status_code=201)
    async def accept(number: str, order: Order) -> dict[str, str]:
        return {"id": str(await shops[0].accept(number, order))}

    @app.get("/orders/{number}")
    async def status(number: str) -> Status:
        if (found := await shops[0].status(number)) is None:
            raise HTTPException(404)
        return found

    return app


# ---- the worker


async def timed(delivery: Delivery, call_next: Callable[[Delivery], Awaitable[object]]) -> object:
    """Note the progress of every message. A bare ``Delivery`` is one of any payload."""
    await delivery.progress(0.25, "taken")
    return await call_next(delivery)


async def ship(job: Job, delivery: Delivery[Job, Carrier]) -> To:
    """Ship an order, and tell the customer."""
    assert_type(delivery.message, Reservation[Job])
    assert_type(delivery.state, Carrier)
    return To("mail", Letter(text=delivery.state.take(job.order)), priority=9)


def print_letter(letter: Letter) -> None:
    """Send a letter."""
    assert_type(letter.text, str)


def make_worker(client: Client) -> Worker[Report]:
    """Return the worker of the shop."""
    worker = Worker(client, lifespan=carrier)
    worker.use(timed)
    worker.on(SHIP, ship, to=[MAIL], retry_on=ConnectionError)
    return worker


def make_pipeline(client: Client) -> Pipeline[Report]:
    """Return the same as a pipeline, up to the letter."""
    pipeline = client.pipeline("shop", lifespan=carrier)
    pipeline.use(timed)

    @pipeline.choice(SHIP, to=[MAIL])
    async def tell(job: Job, delivery: Delivery[Job, Carrier]) -> To[Literal["mail"]]:
        return To("mail", Letter(text=delivery.state.take(job.order)))

    assert_type(pipeline.sink(MAIL, print_letter), Pipeline[Report])
    return pipeline


def work_off(client: Client) -> Report:
    """Run the worker until its queue is empty."""
    report = make_worker(client).run(until_empty=True, handle_signals=False)
    assert_type(report, Report)
    assert_type(report.stages["ship"]["out"], int)
    return report


async def work_off_async(client: AsyncClient) -> Report:
    """Run a worker of an async client."""
    worker = Worker(client, lifespan=carrier).on(SHIP, ship, to=[MAIL])
    return assert_type(await worker.run(until_empty=True, handle_signals=False), Report)
