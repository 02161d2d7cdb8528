"""Operations while the server is away: consumers wait, callers hear in time, nothing is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, closing
from itertools import chain
from typing import Any

import pytest

from pyqueue import AsyncClient, Client, LeaseLost, Reservation, Unavailable
from pyqueue.runtime.connecting import runner_of
from tests.chaos.conftest import SLACK_S, TIMEOUT_S, Server, through
from tests.support.eventually import async_eventually, waiters
from tests.support.proxy import Proxy
from tests.support.samples import spread

# PyMongo's async monitor drops its socket when its client is closed while it connects. So only an
# object that a client of pyqueue leaves open is a failure here.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")

# ---- the server restarts


@pytest.mark.parametrize("end", [pytest.param("stop", marks=pytest.mark.slow), "kill"])
def test_waiting_consumers_survive_a_restart(server: Server, database: str, end: str) -> None:
    """Some consumers poll while the server is away, some sleep; with both kinds of client."""
    url = server.url(database)

    def push(names: list[str]) -> None:
        with Client(url) as producer:
            for name in names:
                producer.queue(name).push(f"for {name}")

    async def main(client: Client, twin: AsyncClient, pool: ThreadPoolExecutor) -> None:
        polling, sleeping = client.queue("polling", poll=0.05), client.queue("sleeping", poll=3600)
        async_polling = twin.queue("async-polling", poll=0.05)
        async_sleeping = twin.queue("async-sleeping", poll=3600)
        popped = asyncio.wrap_future(pool.submit(polling.pop))
        reserved = asyncio.wrap_future(pool.submit(sleeping.reserve))
        async_popped = asyncio.create_task(async_polling.pop())
        async_reserved = asyncio.create_task(async_sleeping.reserve())
        receiving = (popped, reserved, async_popped, async_reserved)
        await async_eventually(
            lambda: (
                all(waiters(client, name) for name in ("polling", "sleeping"))
                and all(waiters(twin, name) for name in ("async-polling", "async-sleeping"))
            )
        )
        await asyncio.to_thread(getattr(server, end))
        await asyncio.sleep(0.3)  # several polls; a slow machine has fewer, which does no harm
        assert not any(each.done() for each in receiving)
        await asyncio.to_thread(server.start)
        names = ["polling", "sleeping", "async-polling", "async-sleeping"]
        await asyncio.to_thread(push, names)
        async with asyncio.timeout(60):
            found = [await each for each in receiving]
        assert [each and each.payload for each in found] == [f"for {name}" for name in names]
        _, reservation, _, async_reservation = found
        assert isinstance(reservation, Reservation)
        assert isinstance(async_reservation, Reservation)
        await asyncio.to_thread(sleeping.commit, reservation)
        await async_sleeping.commit(async_reservation)
        assert [(await twin.queue(name).counts()).total for name in names] == [0, 0, 0, 0]

    async def opened() -> None:
        # The clients are closed first, which ends their threads if the test fails.
        with ThreadPoolExecutor(2) as pool, Client(url) as client:
            async with AsyncClient(url) as twin:
                await main(client, twin, pool)

    asyncio.run(opened())


def test_shutdown_keeps_messages_and_claims(server: Server, database: str) -> None:
    with Client(server.url(database)) as client:
        queue = client.queue("jobs")
        ids = queue.push_many(range(10))
        held = queue.reserve_many(4, timeout=0)
        server.stop()
        server.start()
        queue.commit(*held)
        assert [message.id for message in queue.pop_many(20, timeout=0)] == ids[4:]


def test_kill_keeps_messages(server: Server, database: str) -> None:
    """A kill may undo claims that were not yet on disk. Then LeaseLost names their messages."""
    with Client(server.url(database)) as client:
        queue = client.queue("jobs")
        ids = queue.push_many(range(10))
        held = queue.reserve_many(4, timeout=0)
        server.kill()
        server.start()
        undone = []
        try:
            queue.commit(*held)
        except LeaseLost as error:
            undone = [each.id for each in error.lost]
        assert [message.id for message in queue.pop_many(20, timeout=0)] == undone + ids[4:]


# ---- the server stays away


#: Each operation on a queue with one more message and a reservation, for both kinds of queue.
OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "push": lambda queue, held: queue.push("third", id="push-3"),
    "push_many": lambda queue, held: queue.push_many(
        ["third", "fourth"], ids=["push_many-3", "push_many-4"]
    ),
    "pop": lambda queue, held: queue.pop(),
    "pop_many": lambda queue, held: queue.pop_many(10, timeout=1),
    "reserve": lambda queue, held: queue.reserve(),
    "reserve_many": lambda queue, held: queue.reserve_many(10),
    "commit": lambda queue, held: queue.commit(held),
    "rollback": lambda queue, held: queue.rollback(held),
    "move": lambda queue, held: queue.move(held, to=queue),
    "extend": lambda queue, held: queue.extend(held),
    "counts": lambda queue, held: queue.counts(),
    "get": lambda queue, held: queue.get(held.id),
    "pause": lambda queue, held: queue.pause(),
}
#: The ids that Unavailable names: those that the operation may have written.
UNKNOWN = {
    "push": ["push-3"],
    "push_many": ["push_many-3", "push_many-4"],
    **{name: [f"{name}-1"] for name in ("commit", "rollback", "move", "extend")},
}


#: How many operations ``make test`` tries on async clients, which run the same plans.
FEW_TWINS = 7

Outcome = tuple[float, BaseException | None]


def expect_unavailable(outcomes: dict[str, Outcome]) -> None:
    """Assert that each operation raised Unavailable in time, with the ids of unknown writes."""
    assert {
        name: error for name, (_, error) in outcomes.items() if not isinstance(error, Unavailable)
    } == {}
    assert {name: took for name, (took, _) in outcomes.items() if took > TIMEOUT_S + SLACK_S} == {}
    ids = {
        name: error.ids
        for name, (_, error) in outcomes.items()
        if isinstance(error, Unavailable) and error.ids
    }
    assert ids == {name: each for name, each in UNKNOWN.items() if name in outcomes}


def attempt(name: str, queue: Any, held: Any) -> Outcome:
    began = time.monotonic()
    try:
        OPERATIONS[name](queue, held)
    except Exception as error:
        return time.monotonic() - began, error
    return time.monotonic() - began, None


async def attempt_async(name: str, queue: Any, held: Any) -> Outcome:
    began = time.monotonic()
    try:
        await OPERATIONS[name](queue, held)
    except Exception as error:
        return time.monotonic() - began, error
    return time.monotonic() - began, None


@pytest.mark.parametrize(
    "few",
    [pytest.param(FEW_TWINS, id="some"), pytest.param(None, id="all", marks=pytest.mark.slow)],
)
def test_every_operation_is_unavailable_in_time(
    server: Server, database: str, few: int | None
) -> None:
    """Each operation has its own client, which worked just before. Some are async."""
    names = list(OPERATIONS)
    twin_names = [names[place] for place in spread(len(names), few or len(names))]
    url = server.url(database)
    for namespace in ("pyqueue", "twins"):
        with Client(url, namespace=namespace) as client:
            client.queues()  # creates the collection, so that the short timeouts do not cover it
    seeds = {name: [f"{name}-1", f"{name}-2"] for name in OPERATIONS}

    async def main(
        clients: list[Client], twins: list[AsyncClient], pool: ThreadPoolExecutor
    ) -> None:
        ready: dict[str, tuple[Any, Any]] = {}
        async_ready: dict[str, tuple[Any, Any]] = {}
        for client, (name, ids) in zip(clients, seeds.items(), strict=True):
            queue = client.queue(name)
            queue.push_many(["first", "second"], ids=ids)
            ready[name] = queue, queue.reserve(0)
        for twin, name in zip(twins, twin_names, strict=True):
            async_queue = twin.queue(name)
            await async_queue.push_many(["first", "second"], ids=seeds[name])
            async_ready[name] = async_queue, await async_queue.reserve(0)
        await asyncio.to_thread(server.stop)
        used: list[Client | AsyncClient] = [*clients, *twins]
        for each in used:  # else a stale clock could fail before the write
            runner_of(each).open().clock.touch()
        threads = [pool.submit(attempt, name, *each) for name, each in ready.items()]
        tasks = [attempt_async(name, *each) for name, each in async_ready.items()]
        async_outcomes = dict(zip(async_ready, await asyncio.gather(*tasks), strict=True))
        outcomes = {
            name: await asyncio.wrap_future(each) for name, each in zip(ready, threads, strict=True)
        }
        await asyncio.to_thread(server.start)
        # A client that closes looks for its server, so all of them close at once.
        closing_twins = [each.close() for each in twins]
        closing_clients = [asyncio.to_thread(each.close) for each in clients]
        await asyncio.gather(*closing_twins, *closing_clients)
        expect_unavailable(outcomes)
        expect_unavailable(async_outcomes)

    async def opened() -> None:
        # Clients that a failure leaves open are closed here.
        with ExitStack() as stack, ThreadPoolExecutor(len(OPERATIONS)) as pool:
            async with AsyncExitStack() as async_stack:
                clients = [Client(url, command_timeout=TIMEOUT_S) for _ in OPERATIONS]
                twins = [
                    AsyncClient(url, namespace="twins", command_timeout=TIMEOUT_S)
                    for _ in twin_names
                ]
                for client in clients:
                    stack.enter_context(client)
                for twin in twins:
                    await async_stack.enter_async_context(twin)
                await main(clients, twins, pool)

    asyncio.run(opened())


def test_open_and_first_use_are_unavailable_in_time(proxy: Proxy, database: str) -> None:
    proxy.cut()
    url = through(proxy, database)
    began = time.monotonic()
    with pytest.raises(Unavailable), Client(url, command_timeout=TIMEOUT_S):
        pass
    with closing(Client(url, command_timeout=TIMEOUT_S)) as client, pytest.raises(Unavailable):
        client.queue("jobs").push(1)
    assert time.monotonic() - began < 2 * (TIMEOUT_S + SLACK_S)


def test_close_does_not_wait_for_a_lost_server(proxy: Proxy, database: str) -> None:
    client = Client(through(proxy, database))
    client.queue("jobs").push(1)
    proxy.cut()
    began = time.monotonic()
    client.close()
    assert time.monotonic() - began < TIMEOUT_S + SLACK_S


def test_async_close_does_not_wait_for_a_lost_server(proxy: Proxy, database: str) -> None:
    async def main() -> None:
        client = AsyncClient(through(proxy, database))
        await client.queue("jobs").push(1)
        proxy.cut()
        began = time.monotonic()
        await client.close()
        assert time.monotonic() - began < TIMEOUT_S + SLACK_S

    asyncio.run(main())


def test_concurrent_callers_are_unavailable_together(proxy: Proxy, database: str) -> None:
    """The callers of one client wait at the same time. The second call starts without a server."""
    with Client(through(proxy, database)) as client:
        client.queues()  # creates the collection, so that the short timeout does not cover it
    with (
        Client(through(proxy, database), command_timeout=TIMEOUT_S) as client,
        ThreadPoolExecutor(8) as pool,
    ):
        queue = client.queue("jobs")
        queue.push("first")
        proxy.cut()

        def attempt(_: int) -> list[float]:
            took = []
            for _ in range(2):
                began = time.monotonic()
                with pytest.raises(Unavailable):
                    queue.push("more")
                took.append(time.monotonic() - began)
            return took

        assert max(chain.from_iterable(pool.map(attempt, range(8)))) < TIMEOUT_S + SLACK_S


def test_concurrent_tasks_are_unavailable_together(proxy: Proxy, database: str) -> None:
    async def main() -> float:
        async with AsyncClient(through(proxy, database)) as client:
            await client.queues()
        async with AsyncClient(through(proxy, database), command_timeout=TIMEOUT_S) as client:
            queue = client.queue("jobs")
            await queue.push("first")
            proxy.cut()

            async def attempt() -> list[float]:
                took = []
                for _ in range(2):
                    began = time.monotonic()
                    with pytest.raises(Unavailable):
                        await queue.push("more")
                    took.append(time.monotonic() - began)
                return took

            return max(chain.from_iterable(await asyncio.gather(*(attempt() for _ in range(8)))))

    assert asyncio.run(main()) < TIMEOUT_S + SLACK_S
