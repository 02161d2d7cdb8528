"""The server goes away: consumers go on when it is back, callers hear in time when it is not, and no outcome is guessed."""

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
from pyqueue.connecting import runner_of
from tests.chaos.conftest import Server
from tests.integration.eventually import async_until, until
from tests.support.proxy import Proxy

# PyMongo's async monitor drops its socket when its client is closed while it connects, so only a client left open counts here.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")

#: The command timeout of the impatient, and how much later they may hear on a busy machine.
PATIENCE = 2.0
SLACK = 1.2

Ways = pytest.mark.parametrize("way", ["stop", "kill"])


def through(proxy: Proxy, database: str) -> str:
    return f"mongodb://127.0.0.1:{proxy.port}/{database}?directConnection=true"


# Stopped and started again


@Ways
def test_a_blocked_consumer_goes_on(server: Server, database: str, way: str) -> None:
    url = server.url(database)
    # One looks while the server is away, one sleeps through it.
    with Client(url) as client, ThreadPoolExecutor(2) as pool:
        eager, calm = client.queue("eager", poll=0.2), client.queue("calm", poll=3600)
        popped = pool.submit(eager.pop)
        reserved = pool.submit(calm.reserve)
        until(
            lambda: (
                runner_of(client).waiters("eager")._led and runner_of(client).waiters("calm")._led
            )
        )
        getattr(server, way)()
        time.sleep(0.5)  # so that the eager one surely looks at nothing
        assert not popped.done()
        assert not reserved.done()
        server.start()
        with Client(url) as producer:
            producer.queue("eager").push("for the eager")
            producer.queue("calm").push("for the calm")
        message, reservation = popped.result(20), reserved.result(20)
        assert message is not None
        assert message.payload == "for the eager"
        assert reservation is not None
        assert reservation.payload == "for the calm"
        calm.commit(reservation)
        assert (eager.counts().total, calm.counts().total) == (0, 0)


@Ways
def test_a_blocked_consumer_goes_on_async(server: Server, database: str, way: str) -> None:
    url = server.url(database)

    async def main() -> None:
        async with AsyncClient(url) as client:
            eager, calm = client.queue("eager", poll=0.2), client.queue("calm", poll=3600)
            popped = asyncio.create_task(eager.pop())
            reserved = asyncio.create_task(calm.reserve())
            await async_until(
                lambda: (
                    runner_of(client).waiters("eager")._led
                    and runner_of(client).waiters("calm")._led
                )
            )
            await asyncio.to_thread(getattr(server, way))
            await asyncio.sleep(0.5)
            assert not popped.done()
            assert not reserved.done()
            await asyncio.to_thread(server.start)
            async with AsyncClient(url) as producer:
                await producer.queue("eager").push("for the eager")
                await producer.queue("calm").push("for the calm")
            async with asyncio.timeout(20):
                message, reservation = await popped, await reserved
            assert message is not None
            assert message.payload == "for the eager"
            assert reservation is not None
            assert reservation.payload == "for the calm"
            await calm.commit(reservation)

    asyncio.run(main())


def test_what_was_pushed_and_held_survives_a_shutdown(server: Server, database: str) -> None:
    with Client(server.url(database)) as client:
        queue = client.queue("jobs")
        ids = queue.push_many(range(10))
        held = queue.reserve_many(4, timeout=0)
        server.stop()
        server.start()
        queue.commit(*held)
        assert [message.id for message in queue.pop_many(20, timeout=0)] == ids[4:]


def test_what_was_pushed_survives_a_kill(server: Server, database: str) -> None:
    """A claim that was not yet on disk may be undone with it. Its holder is told, and the message comes again."""
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


# Stopped for good


#: Every kind of operation, on a queue that has one more message and a reservation; for both twins.
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
#: What may have been written, or not, when the server is gone. The others write nothing that an id could name.
UNKNOWN = {
    "push": ["push-3"],
    "push_many": ["push_many-3", "push_many-4"],
    **{name: [f"{name}-1"] for name in ("commit", "rollback", "move", "extend")},
}


def judge(took: dict[str, float], failures: dict[str, BaseException]) -> None:
    assert {
        name: error for name, error in failures.items() if not isinstance(error, Unavailable)
    } == {}
    assert {name: took[name] for name in OPERATIONS if took[name] > PATIENCE + SLACK} == {}
    ids = {
        name: error.ids
        for name, error in failures.items()
        if isinstance(error, Unavailable) and error.ids
    }
    assert ids == UNKNOWN


def test_unavailable_in_time(server: Server, database: str) -> None:
    """Every operation on a client of its own, which was at work just before."""
    took: dict[str, float] = {}
    failures: dict[str, BaseException] = {}

    def attempt(name: str, queue: Any, held: Any) -> None:
        began = time.monotonic()
        try:
            OPERATIONS[name](queue, held)
        except Exception as error:
            failures[name] = error
        took[name] = time.monotonic() - began

    with ExitStack() as stack, ThreadPoolExecutor(len(OPERATIONS)) as pool:
        ready = []
        for name in OPERATIONS:
            client = stack.enter_context(Client(server.url(database), command_timeout=PATIENCE))
            queue = client.queue(name)
            queue.push_many(["first", "second"], ids=[f"{name}-1", f"{name}-2"])
            ready.append((name, queue, queue.reserve(0)))
        server.stop()
        for each in ready:
            pool.submit(attempt, *each)
        pool.shutdown()
        server.start()  # clients say good-bye to a server that is there
    judge(took, failures)


def test_unavailable_in_time_async(server: Server, database: str) -> None:
    took: dict[str, float] = {}
    failures: dict[str, BaseException] = {}

    async def attempt(name: str, queue: Any, held: Any) -> None:
        began = time.monotonic()
        try:
            await OPERATIONS[name](queue, held)
        except Exception as error:
            failures[name] = error
        took[name] = time.monotonic() - began

    async def main() -> None:
        async with AsyncExitStack() as stack:
            ready = []
            for name in OPERATIONS:
                client = AsyncClient(server.url(database), command_timeout=PATIENCE)
                await stack.enter_async_context(client)
                queue = client.queue(name)
                await queue.push_many(["first", "second"], ids=[f"{name}-1", f"{name}-2"])
                ready.append((name, queue, await queue.reserve(0)))
            await asyncio.to_thread(server.stop)
            await asyncio.gather(*(attempt(*each) for each in ready))
            await asyncio.to_thread(server.start)

    asyncio.run(main())
    judge(took, failures)


def test_unavailable_on_entering_and_at_first_use(server: Server, database: str) -> None:
    server.stop()
    began = time.monotonic()
    with pytest.raises(Unavailable), Client(server.url(database), command_timeout=PATIENCE):
        pass
    with (
        closing(Client(server.url(database), command_timeout=PATIENCE)) as client,
        pytest.raises(Unavailable),
    ):
        client.queue("jobs").push(1)
    assert time.monotonic() - began < 2 * (PATIENCE + SLACK)


def test_close_does_not_wait_for_a_server_that_is_gone(server: Server, database: str) -> None:
    client = Client(server.url(database))
    client.queue("jobs").push(1)
    server.stop()
    began = time.monotonic()
    client.close()
    assert time.monotonic() - began < PATIENCE


def test_close_does_not_wait_for_a_server_that_is_gone_async(server: Server, database: str) -> None:
    async def main() -> None:
        client = AsyncClient(server.url(database))
        await client.queue("jobs").push(1)
        await asyncio.to_thread(server.stop)
        began = time.monotonic()
        await client.close()
        assert time.monotonic() - began < PATIENCE

    asyncio.run(main())


def test_many_callers_hear_together(server: Server, database: str) -> None:
    """The callers of one client wait side by side, not one after the other."""
    with (
        Client(server.url(database), command_timeout=PATIENCE) as client,
        ThreadPoolExecutor(8) as pool,
    ):
        queue = client.queue("jobs")
        queue.push("first")
        server.stop()

        def attempt(_: int) -> list[float]:
            took = []
            for _ in range(2):  # the second finds a client that knows it has lost its server
                began = time.monotonic()
                with pytest.raises(Unavailable):
                    queue.push("more")
                took.append(time.monotonic() - began)
            return took

        assert max(chain.from_iterable(pool.map(attempt, range(8)))) < PATIENCE + SLACK


def test_many_tasks_hear_together(server: Server, database: str) -> None:
    async def main() -> float:
        async with AsyncClient(server.url(database), command_timeout=PATIENCE) as client:
            queue = client.queue("jobs")
            await queue.push("first")
            await asyncio.to_thread(server.stop)

            async def attempt() -> list[float]:
                took = []
                for _ in range(2):
                    began = time.monotonic()
                    with pytest.raises(Unavailable):
                        await queue.push("more")
                    took.append(time.monotonic() - began)
                return took

            return max(chain.from_iterable(await asyncio.gather(*(attempt() for _ in range(8)))))

    assert asyncio.run(main()) < PATIENCE + SLACK


# Claims with an unknown outcome


def one_claim(client: Client, reservation: Reservation[Any] | None, payload: object) -> None:
    """It was claimed once, nothing else was, and the claim is good."""
    assert reservation is not None
    assert (reservation.payload, reservation.tries) == (payload, 1)
    queue = client.queue(reservation.queue)
    assert queue.counts().reserved == 1
    queue.commit(reservation)


@pytest.mark.parametrize("times", [1, 2])
def test_a_claim_whose_connection_is_cut(server: Server, database: str, times: int) -> None:
    with Client(server.url(database)) as client:
        queue = client.queue("jobs")
        queue.push_many(["one", "two"])
        server.fail(times, "findAndModify", closeConnection=True)
        reservation = queue.reserve(0)
        assert server.spent()
        one_claim(client, reservation, "one")


@pytest.mark.parametrize("code", [10107, 189], ids=["NotWritablePrimary", "PrimarySteppedDown"])
def test_a_claim_at_a_fail_over(server: Server, database: str, code: int) -> None:
    with Client(server.url(database)) as client:
        queue = client.queue("jobs")
        queue.push_many(["one", "two"])
        server.fail(1, "findAndModify", errorCode=code, errorLabels=["RetryableWriteError"])
        reservation = queue.reserve(0)
        assert server.spent()
        one_claim(client, reservation, "one")


@pytest.mark.parametrize("times", [1, 3])
def test_a_claim_whose_reply_is_lost(
    server: Server, proxy: Proxy, database: str, times: int
) -> None:
    """The server keeps what it answered, and answers a repeated command with it."""
    with Client(through(proxy, database)) as client:
        queue = client.queue("jobs")
        queue.push_many(["one", "two"])
        proxy.cut("findAndModify", times)
        reservation = queue.reserve(0)
        assert proxy.swallowed("findAndModify") == times
        one_claim(client, reservation, "one")


def test_a_claim_of_which_nothing_is_heard_in_time(
    server: Server, proxy: Proxy, database: str
) -> None:
    """The driver gave up; the token tells."""
    with Client(through(proxy, database), command_timeout=PATIENCE) as client:
        queue = client.queue("jobs")
        queue.push_many(["one", "two"])
        proxy.cut("findAndModify")
        reservation = queue.reserve(0)
        assert proxy.swallowed("findAndModify") > 1
        one_claim(client, reservation, "one")


def test_a_claim_of_which_nothing_is_heard_in_time_async(
    server: Server, proxy: Proxy, database: str
) -> None:
    async def main() -> None:
        async with AsyncClient(through(proxy, database), command_timeout=PATIENCE) as client:
            queue = client.queue("jobs")
            await queue.push_many(["one", "two"])
            proxy.cut("findAndModify")
            reservation = await queue.reserve(0)
            assert reservation is not None
            assert (reservation.payload, reservation.tries) == ("one", 1)
            assert (await queue.counts()).reserved == 1
            await queue.commit(reservation)

    asyncio.run(main())


def test_a_claim_with_a_write_concern_error(server: Server, database: str) -> None:
    """The document is claimed all the same."""
    failure = {
        "code": 64,
        "errmsg": "waiting for replication timed out",
        "errInfo": {"wtimeout": True},
    }
    with Client(server.url(database)) as client:
        queue = client.queue("jobs")
        queue.push_many(["one", "two"])
        server.fail(1, "findAndModify", writeConcernError=failure)
        reservation = queue.reserve(0)
        assert server.spent()
        one_claim(client, reservation, "one")


def test_a_batch_claim_whose_connection_is_cut(server: Server, database: str) -> None:
    with Client(server.url(database)) as client:
        queue = client.queue("jobs")
        queue.push_many(range(10))
        server.fail(1, "update", closeConnection=True)
        held = queue.reserve_many(8, timeout=0)
        assert server.spent()
        assert [(each.payload, each.tries) for each in held] == [(n, 1) for n in range(8)]
        assert queue.counts().reserved == 8
        queue.commit(*held)


@pytest.mark.parametrize("receive", ["reserve_many", "pop_many"])
def test_a_batch_claim_whose_reply_is_lost(
    server: Server, proxy: Proxy, database: str, receive: str
) -> None:
    """The driver does not repeat an update of many: the token tells."""
    with Client(through(proxy, database)) as client:
        queue = client.queue("jobs")
        queue.push_many(range(10))
        proxy.cut("update", 1)
        got = getattr(queue, receive)(8, timeout=0)
        assert proxy.swallowed("update") == 1
        reserves = receive == "reserve_many"
        assert [(each.payload, each.tries) for each in got] == [
            (n, int(reserves)) for n in range(8)
        ]
        counts = queue.counts()
        assert (counts.ready, counts.reserved) == (2, 8 if reserves else 0)
        if reserves:
            queue.commit(*got)


def test_a_pop_whose_reply_is_lost(server: Server, proxy: Proxy, database: str) -> None:
    with Client(through(proxy, database), command_timeout=PATIENCE) as client:
        queue = client.queue("jobs")
        queue.push_many(["one", "two", "three"])
        proxy.cut("findAndModify", 1)
        message = queue.pop(0)
        assert message is not None
        assert message.payload == "one"
        # At most once: if nothing is heard in time, the message may be gone, and the caller is told so.
        proxy.cut("findAndModify")
        with pytest.raises(Unavailable):
            queue.pop(0)
        assert queue.counts().total == 1


# Writes with an unknown outcome


@pytest.mark.parametrize("arrives", [True, False])
def test_a_push_repeated_with_its_id_is_one_message(
    server: Server, proxy: Proxy, database: str, arrives: bool
) -> None:
    with Client(through(proxy, database), command_timeout=PATIENCE) as client:
        queue = client.queue("jobs")
        queue.push("first")
        if arrives:
            proxy.cut("insert")
        else:
            server.fail(1_000_000, "insert", closeConnection=True)
        with pytest.raises(Unavailable) as unknown:
            queue.push("second")
        assert arrives or server.spent()
        proxy.cut("insert", 0)
        assert queue.counts().total == 1 + arrives
        [id] = unknown.value.ids
        assert queue.push("second", id=id) == id
        assert [message.payload for message in queue.pop_many(10, timeout=0)] == ["first", "second"]


def test_a_push_whose_reply_is_lost_once(server: Server, proxy: Proxy, database: str) -> None:
    with Client(through(proxy, database)) as client:
        queue = client.queue("jobs")
        queue.push("first")
        proxy.cut("insert", 2)
        queue.push("second")
        queue.push_many(["third", "fourth"], keys=["a", "b"])
        assert proxy.swallowed("insert") == 2
        assert [each.payload for each in queue.pop_many(10, timeout=0)] == [
            "first",
            "second",
            "third",
            "fourth",
        ]


def test_push_many_repeated_with_its_ids(server: Server, proxy: Proxy, database: str) -> None:
    with Client(through(proxy, database), command_timeout=PATIENCE) as client:
        queue = client.queue("jobs")
        queue.push("first", id="a")
        proxy.cut("insert")
        with pytest.raises(Unavailable) as unknown:
            queue.push_many(range(5))
        proxy.cut("insert", 0)
        ids = unknown.value.ids
        assert len(ids) == 5
        assert queue.push_many(range(5), ids=ids) == ids
        assert queue.counts().total == 6


def test_a_settle_of_which_nothing_is_heard_can_be_repeated(
    server: Server, proxy: Proxy, database: str
) -> None:
    with Client(through(proxy, database), command_timeout=PATIENCE) as client:
        queue = client.queue("jobs")
        queue.push_many(range(4))
        one, *others = queue.reserve_many(4, timeout=0)
        proxy.cut("delete", 1)
        queue.commit(one)  # a single delete is repeated by the driver
        assert proxy.swallowed("delete") == 1
        proxy.cut("delete", 1)
        with pytest.raises(Unavailable) as unknown:
            queue.commit(*others)  # one of many is not
        assert unknown.value.ids == [each.id for each in others]
        with pytest.raises(LeaseLost):
            queue.commit(*others)
        assert queue.counts().total == 0
