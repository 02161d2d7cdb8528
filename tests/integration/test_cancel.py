"""A receive that is cancelled, or times out from outside, loses and holds no message.

Receives are cancelled at seeded random points around the time that the command itself takes. A
message that did not reach the caller must be back in its place, with the same id, due, tries and
key. The control does the same to the raw driver, which loses messages.
"""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import anyio
import pytest
from motor.motor_asyncio import AsyncIOMotorClient
from pydantic import BaseModel
from pymongo import AsyncMongoClient

from pyqueue import AsyncClient, AsyncQueue, Counts
from pyqueue.requests import Find
from pyqueue.runtime.base_driver import BaseDriver
from pyqueue.runtime.connecting import runner_of
from pyqueue.runtime.drivers import AsyncDriver
from tests.support.eventually import LONG, async_eventually, waiters
from tests.support.recorder import Recorder
from tests.support.samples import sampled

STORE = 40  # messages that are there to the last
BATCH = 3
MORE_ROUNDS = 10  # at most, until a receive is cancelled

Receive = Callable[[], Awaitable[Any]]
Cancel = Callable[[Receive, float], Awaitable[Any]]


class Order(BaseModel):
    n: int


# ---- ways to cancel a receive: each returns the result, or None


async def by_task_cancel(receive: Receive, after: float) -> Any:
    async def call() -> Any:
        return await receive()

    task = asyncio.create_task(call())
    asyncio.get_running_loop().call_later(after, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        return None


async def by_wait_for(receive: Receive, after: float) -> Any:
    try:
        return await asyncio.wait_for(receive(), after)
    except TimeoutError:
        return None


async def by_timeout(receive: Receive, after: float) -> Any:
    try:
        async with asyncio.timeout(after):
            return await receive()
    except TimeoutError:
        return None


async def by_move_on_after(receive: Receive, after: float) -> Any:
    with anyio.move_on_after(after):
        return await receive()
    return None


CANCELS: list[Cancel] = [by_task_cancel, by_wait_for, by_timeout, by_move_on_after]


# ---- ways to receive: the options of the queue, and the call


@dataclass(frozen=True)
class Kind:
    call: Callable[[AsyncQueue[Any]], Awaitable[Any]]
    pops: bool = True
    model: Any = None
    history: float | None = None


KINDS = {
    "pop": Kind(lambda queue: queue.pop(0)),
    "pop_many": Kind(lambda queue: queue.pop_many(BATCH, timeout=0)),
    "typed pop": Kind(lambda queue: queue.pop(0), model=Order),
    "pop with history": Kind(lambda queue: queue.pop(0), history=3600),
    "reserve": Kind(lambda queue: queue.reserve(0), pops=False),
    "reserve_many": Kind(lambda queue: queue.reserve_many(BATCH, timeout=0), pops=False),
}


@asynccontextmanager
async def opened(
    driver: str, url: str, namespace: str, **options: Any
) -> AsyncIterator[AsyncClient]:
    """An AsyncClient over PyMongo's async client, or motor."""
    if driver == "pymongo":
        async with AsyncClient(url, namespace=namespace, **options) as client:
            yield client
    else:
        motor: Any = AsyncIOMotorClient(url)
        try:
            database = motor.get_default_database()
            async with AsyncClient(database, namespace=namespace, **options) as client:
                yield client
        finally:
            motor.close()


async def settled(client: AsyncClient) -> None:
    """Wait until the client has given back the claims of cancelled callers."""
    driver = runner_of(client).open()
    assert driver is not None
    await driver.settled()


@dataclass
class Storm:
    """The outcome of many cancelled receives."""

    received: list[Any]
    cancelled: int = 0


def several(got: Any) -> list[Any]:
    return got if isinstance(got, list) else [] if got is None else [got]


async def storm(receive: Receive, cancel: Cancel, rounds: int, seed: str) -> Storm:
    """Cancel receives at random points, from before they begin to well after their end."""
    began = time.perf_counter()
    result = Storm(several(await receive()))
    aim = time.perf_counter() - began
    rng = random.Random(seed)
    for place in range(rounds + MORE_ROUNDS):
        if place >= rounds and result.cancelled:
            break
        got = several(await cancel(receive, rng.uniform(0, 2 * aim)))
        result.received += got
        result.cancelled += not got
        # About half of them return, however busy the machine is.
        aim *= (0.9 if place < rounds else 0.5) if got else 1 / 0.9
    return result


async def exercise(driver: str, kind: Kind, cancel: Cancel, url: str, rounds: int) -> int:
    """Run one storm and check every message; return how often one had to be given back."""
    async with opened(driver, url, f"n{uuid4().hex[:8]}") as client:
        queue = client.queue("orders", kind.model, lease=600, history=kind.history)
        total = STORE + rounds * BATCH
        payloads = [Order(n=n) if kind.model else {"n": n} for n in range(total)]
        ids = await queue.push_many(payloads, keys=[f"key-{n}" for n in range(total)])
        # One message was tried before, so that a try counted in vain shows.
        tried = await queue.reserve(0)
        assert tried is not None
        await queue.rollback(tried, delay=0)
        collection = client.database[client.namespace]
        before = {
            each["_id"]: each async for each in collection.find({"record": {"$exists": False}})
        }
        assert set(before) == set(ids)

        result = await storm(
            lambda: kind.call(queue), cancel, rounds, f"{driver}-{cancel.__name__}"
        )
        await settled(client)

        got = [message.id for message in result.received]
        assert len(got) == len(set(got)), "a message was received twice"
        held, kept = (0, len(got) if kind.history else 0) if kind.pops else (len(got), 0)
        assert await queue.counts() == Counts(ready=total - len(got), reserved=held, history=kept)
        # Place, tries, key and payload are unchanged, with no trace of the claim but a count of 0.
        untouched = [id for id in ids if id not in got]
        left = {each["_id"]: each async for each in collection.find({"_id": {"$in": untouched}})}
        for each in left.values():
            if each.get("deliveries") == 0:
                del each["deliveries"]
        assert left == {id: before[id] for id in untouched}
        assert result.cancelled, "no receive was cancelled"
        assert got, "no receive came through"
        return client.stats.get("given back", 0)


@pytest.mark.parametrize(
    ("kind", "driver"),
    [(kind, "pymongo") for kind in KINDS] + [("pop", "motor"), ("reserve_many", "motor")],
)
def test_cancelled_receives_lose_nothing(url: str, driver: str, kind: str) -> None:
    """Each kind of receive is cancelled in two of the four ways. All of them run at length."""
    first = list(KINDS).index(kind) % len(CANCELS)
    ways = (CANCELS * 2)[first : first + 2]

    async def main() -> int:
        return sum([await exercise(driver, KINDS[kind], cancel, url, 12) for cancel in ways])

    for _ in range(20):  # until a storm meets the critical moment
        if asyncio.run(main()) > 0:
            return
    raise AssertionError("nothing had to be given back")


@pytest.mark.slow
@pytest.mark.parametrize("cancel", CANCELS, ids=lambda cancel: cancel.__name__)
@pytest.mark.parametrize("driver", ["pymongo", "motor"])
@pytest.mark.parametrize("kind", KINDS)
def test_cancelled_receives_lose_nothing_at_length(
    url: str, driver: str, kind: str, cancel: Cancel
) -> None:
    assert asyncio.run(exercise(driver, KINDS[kind], cancel, url, 1000)) > 0


@pytest.mark.parametrize(("kind", "driver"), [("pop", "pymongo"), ("reserve", "motor")])
def test_receive_cancelled_while_woken_loses_nothing(url: str, driver: str, kind: str) -> None:
    """The cancel comes around the time at which the message does."""

    async def main() -> None:
        async with opened(driver, url, "waiting") as client:
            queue = client.queue("orders", lease=600)
            rng = random.Random(driver + kind)
            got = rounds = 0
            aim = 0.003
            while rounds < 30 or not 0 < got < rounds:
                assert rounds < 2000
                waiter = asyncio.create_task(getattr(queue, kind)(None))
                line = runner_of(client).waiters("orders")
                await async_eventually(lambda: line.has_leader or waiter.done())  # noqa: B023
                await queue.push({"n": rounds})
                await asyncio.sleep(rng.uniform(0, 2 * aim))
                waiter.cancel()
                before = got
                with suppress(asyncio.CancelledError):
                    got += (await waiter) is not None
                rounds += 1
                aim *= 0.9 if got > before else 1 / 0.9
                assert not line.has_leader
            await settled(client)
            assert await queue.counts() == Counts(
                ready=rounds - got, reserved=got if kind == "reserve" else 0
            )

    asyncio.run(main())


@pytest.mark.parametrize("driver", ["pymongo", "motor"])
def test_cancelled_request_cancels_its_message(url: str, driver: str) -> None:
    async def main() -> None:
        async with opened(driver, url, f"n{uuid4().hex[:8]}") as client:
            queue = client.queue("jobs")
            line = runner_of(client).waiters(runner_of(client).results)
            asking = asyncio.create_task(client.request(queue, "x", timeout=600))
            await async_eventually(lambda: line.has_leader, "a call that waits")
            asking.cancel()
            await asyncio.wait([asking])
            assert asking.cancelled()
            await settled(client)
            assert await queue.reserve(0) is None
            [message] = await queue.history()
            assert message.outcome == "cancelled"

    asyncio.run(main())


@pytest.mark.parametrize("driver", ["pymongo", "motor"])
def test_cancelled_loops_lose_nothing(url: str, driver: str) -> None:
    """Loops are cancelled while they commit, claim or wait, but not in their bodies."""
    rounds = 40

    async def main() -> bool:
        async with opened(driver, url, f"n{uuid4().hex[:8]}") as client:
            queue = client.queue("orders", lease=600)
            ids = await queue.push_many([{"n": n} for n in range(20 * rounds)])
            collection = client.database[client.namespace]
            live = {"record": {"$exists": False}}
            before = {each["_id"]: each async for each in collection.find(live)}
            seen: list[Any] = []

            async def loop(in_block: bool) -> None:
                each = queue.each()
                async with each if in_block else nullcontext():
                    async for order in each:
                        seen.append(order.id)  # noqa: PERF401  # until it is cancelled

            rng = random.Random(driver)
            for number in range(rounds):
                task = asyncio.create_task(loop(in_block=number % 2 == 1))
                await asyncio.sleep(rng.uniform(0, 0.02))
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            await settled(client)
            assert len(seen) == len(set(seen)), "a message was received twice"
            left = {each["_id"]: each async for each in collection.find(live)}
            for each in left.values():
                each.pop("left", None)  # a release that shared a command
                assert each.pop("deliveries", 0) == 0
            # All messages of bodies that ended are committed, even if the commit was cancelled.
            untouched = {id: before[id] for id in ids if id not in seen}
            assert left == untouched
            assert untouched, "push more messages"
            return client.stats.get("given back", 0) > 0

    assert any(asyncio.run(main()) for _ in range(20)), "nothing had to be given back"


@dataclass
class Losing:
    """A cursor that loses a cancellation which comes with the answer, as PyMongo's may."""

    cursor: Any
    asked: asyncio.Event

    async def to_list(self, length: int | None) -> Any:
        self.asked.set()
        with suppress(asyncio.CancelledError):
            await asyncio.get_running_loop().create_future()
        return await self.cursor.to_list(length)


def test_cancellation_that_the_driver_loses_ends_a_receive(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, consumers = asyncio.Event(), list[asyncio.Task[Any]]()
    send: Callable[..., Any] = vars(BaseDriver)["_send"]

    def losing(driver: Any, request: Any) -> Any:
        sent = send(driver, request)
        mine = asyncio.current_task() in consumers
        return Losing(sent, asked) if mine and isinstance(request, Find) else sent

    monkeypatch.setattr(AsyncDriver, "_send", losing)

    async def main() -> None:
        async with AsyncClient(url) as client:
            consumers.append(asyncio.create_task(client.queue("jobs", poll=3600).reserve()))
            await asked.wait()
            consumers[0].cancel()
            _, waiting = await asyncio.wait(consumers, timeout=LONG)
            assert not waiting
            assert consumers[0].cancelled()

    asyncio.run(main())


# ---- the control: storms that lose nothing on the raw driver would prove nothing above


# The raw driver drops the connection of a command that is cancelled.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("cancel", sampled(CANCELS, few=1), ids=lambda cancel: cancel.__name__)
def test_raw_driver_loses_messages(url: str, cancel: Cancel) -> None:
    async def main() -> int:
        async with AsyncMongoClient[dict[str, Any]](url) as mongo:
            collection = mongo.get_default_database()["raw"]
            await collection.drop()
            await collection.insert_many({"n": n} for n in range(STORE + 100))
            result = await storm(
                lambda: collection.find_one_and_delete({}, sort=[("_id", 1)]), cancel, 100, "raw"
            )
            quiet = -1
            # Commands on their way still delete.
            while quiet != (left := await collection.count_documents({})):
                quiet = left
                await asyncio.sleep(0.05)
            return STORE + 100 - left - len(result.received)

    assert any(asyncio.run(main()) > 0 for _ in range(10)), "the storms lost nothing"
    gc.collect()


def test_cancelled_receive_tells_hooks_nothing(url: str) -> None:
    async def main() -> None:
        recorder = Recorder()
        async with AsyncClient(url, hooks=[recorder]) as client:
            queue = client.queue("jobs")
            await queue.push(0)
            assert await queue.pop(0)
            recorder.take()
            for receive in (queue.reserve, queue.pop):
                task = asyncio.create_task(receive(60))
                await async_eventually(lambda: waiters(client, "jobs") == 1, "a waiting consumer")
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            assert recorder.take() == []
            pushing = asyncio.create_task(queue.push(1))
            await asyncio.sleep(0)
            pushing.cancel()
            with suppress(asyncio.CancelledError):
                await pushing
            assert recorder.take("pushed") == [("jobs", [], asyncio.CancelledError)]

    asyncio.run(main())
