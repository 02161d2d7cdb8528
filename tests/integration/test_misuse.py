"""A client used where it cannot work says so: after a fork, in a second event loop, after close. And Ctrl-C is heard."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pyqueue import AsyncClient, Client, ConfigurationError, LeaseLost, QueueClosed, Reservation
from pyqueue.connecting import runner_of
from tests.integration.conftest import Connect
from tests.support.eventually import async_eventually, eventually, waiters
from tests.support.processes import settle, spawn_pool

ROOT = Path(__file__).parents[2]


def in_fork(call: Callable[[], object]) -> str:
    """Call it in a forked child; answers what came of it there."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # of forking with threads: it is what is tested
        child = os.fork()
    if not child:  # whatever happens, no test may go on in the child
        try:
            try:
                told = f"answered {call()!r}"
            except BaseException as error:
                told = f"{type(error).__name__}: {error}"
            os.write(writing, told.encode())
        finally:
            os._exit(0)
    os.close(writing)
    try:
        with open(reading, encoding="utf-8") as pipe:
            return pipe.read()
    finally:
        os.waitpid(child, 0)


# After a fork


@pytest.mark.filterwarnings("ignore:.*opened before fork:UserWarning")
def test_client_is_refused_after_a_fork(url: str, client: Client) -> None:
    queue = client.queue("jobs")
    queue.push("held")
    reservation = queue.reserve(0)
    assert reservation is not None
    calls: list[Callable[[], object]] = [
        lambda: queue.push(1),
        lambda: queue.pop(),
        lambda: queue.commit(reservation),
        lambda: client.queues(),
        lambda: client.queue("another").counts(),
    ]
    for call in calls:
        told = in_fork(call)
        assert told.startswith("ConfigurationError: ")
        assert "fork" in told
    queue.commit(reservation)
    assert queue.counts().total == 0


@pytest.mark.filterwarnings("ignore:.*opened before fork:UserWarning")
def test_async_client_is_refused_after_a_fork(url: str) -> None:
    async def main() -> str:
        async with AsyncClient(url) as client:
            queue = client.queue("jobs")
            await queue.push(1)

            def drive() -> object:
                # The loop is the parent's as well, so the operation is driven by hand: it is refused before it would wait.
                return queue.counts().send(None)

            return in_fork(drive)

    told = asyncio.run(main())
    assert told.startswith("ConfigurationError: ")
    assert "fork" in told


def test_client_made_after_the_fork_works(url: str, client: Client) -> None:
    client.queue("jobs").push("before")

    def use() -> object:
        with Client(url) as own:
            message = own.queue("jobs").pop(0)
            return message and message.payload

    assert in_fork(use) == "answered 'before'"
    assert client.queue("jobs").counts().total == 0


def test_client_unused_before_the_fork_works(url: str) -> None:
    """It opens at first use, so there is nothing yet that could be shared."""
    unused = Client(url)

    def use() -> object:
        try:
            unused.queue("jobs").push(1)
            return unused.queue("jobs").counts().ready
        finally:
            unused.close()

    assert in_fork(use) == "answered 1"
    unused.close()


# In a second event loop


@pytest.mark.parametrize("driver", ["pymongo", "motor"])
def test_second_event_loop_is_refused(url: str, driver: str) -> None:
    first, second = asyncio.new_event_loop(), asyncio.new_event_loop()
    motor: Any = None
    if driver == "motor":
        from motor.motor_asyncio import AsyncIOMotorClient

        motor = AsyncIOMotorClient(url, io_loop=first)
    client = AsyncClient(url if motor is None else motor.get_default_database())
    queue = client.queue("jobs")
    try:
        first.run_until_complete(queue.push(1))
        for operation in (
            lambda: queue.push(2),
            lambda: queue.pop(),
            lambda: queue.counts(),
            lambda: client.queues(),
        ):
            with pytest.raises(ConfigurationError, match="event loop"):
                second.run_until_complete(operation())
        counts = first.run_until_complete(queue.counts())
        assert counts.ready == 1
    finally:
        first.run_until_complete(client.close())
        if motor is not None:
            motor.close()
        first.close()
        second.close()


# After close


def test_closed_client_refuses_every_operation(connect: Connect) -> None:
    client = connect()
    queue = client.queue("jobs")
    queue.push("held")
    reservation = queue.reserve(0)
    assert reservation is not None
    client.close()
    client.close()
    operations: list[Callable[[], object]] = [
        lambda: queue.push(1),
        lambda: queue.push_many([1]),
        lambda: queue.pop(),
        lambda: queue.reserve(0),
        lambda: queue.commit(reservation),
        lambda: queue.extend(reservation),
        lambda: queue.counts(),
        lambda: queue.pause(),
        lambda: client.queues(),
        lambda: client.queue("another").peek(),
        lambda: client.run_transaction(lambda session: None),
    ]
    for operation in operations:
        with pytest.raises(QueueClosed):
            operation()
    assert repr(client)
    assert repr(queue)


def test_client_closed_before_first_use_is_refused(url: str) -> None:
    client = Client(url)
    client.close()
    with pytest.raises(QueueClosed):
        client.queue("jobs").push(1)
    with pytest.raises(QueueClosed), client:
        pass

    async def main() -> None:
        client = AsyncClient(url)
        await client.close()
        with pytest.raises(QueueClosed):
            await client.queue("jobs").push(1)

    asyncio.run(main())


@pytest.mark.parametrize("bus", ["memory:", "none:"])
def test_close_wakes_all_waiting_threads(url: str, bus: str) -> None:
    with Client(url, signals=bus) as client, ThreadPoolExecutor(12) as pool:
        queue, other = client.queue("jobs", poll=3600), client.queue("other", poll=3600)
        futures = [pool.submit(queue.pop) for _ in range(6)] + [
            pool.submit(other.reserve) for _ in range(4)
        ]
        futures += [
            pool.submit(queue.reserve_many, 5, timeout=600),
            pool.submit(queue.pop_many, 5, timeout=600),
        ]
        eventually(lambda: waiters(client, "jobs") + waiters(client, "other") == 12)
        began = time.monotonic()
        client.close()
        for future in futures:
            with pytest.raises(QueueClosed):
                future.result(20)
        assert time.monotonic() - began < 1


@pytest.mark.parametrize("bus", ["memory:", "none:"])
def test_close_wakes_all_waiting_tasks(url: str, bus: str) -> None:
    async def main() -> None:
        async with AsyncClient(url, signals=bus) as client:
            queue, other = client.queue("jobs", poll=3600), client.queue("other", poll=3600)
            tasks = [asyncio.create_task(queue.pop()) for _ in range(6)]
            tasks += [asyncio.create_task(other.reserve()) for _ in range(4)]
            await async_eventually(lambda: waiters(client, "jobs") + waiters(client, "other") == 10)
            began = time.monotonic()
            await client.close()
            async with asyncio.timeout(20):
                outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(each) for each in outcomes] == [QueueClosed] * 10
            assert time.monotonic() - began < 1

    asyncio.run(main())


def test_close_leaves_a_passed_database_open(url: str) -> None:
    import pymongo

    with pymongo.MongoClient[dict[str, Any]](url) as mongo:
        with Client(mongo.get_default_database()) as client:
            client.queue("jobs").push(1)
        assert (
            mongo.get_default_database()["pyqueue"].count_documents({"record": {"$exists": False}})
            == 1
        )


# Another process


@pytest.mark.parametrize("kind", ["blocking", "async"])
def test_pickled_reservation_settles_in_another_process(
    url: str, client: Client, kind: str
) -> None:
    client.queue("jobs").push({"n": 1}, headers={"a": 1})
    if kind == "blocking":
        reservation = client.queue("jobs").reserve(0)
    else:

        async def main() -> Any:
            async with AsyncClient(url, owner=runner_of(client).owner) as own:
                return await own.queue("jobs").reserve(0)

        reservation = asyncio.run(main())
    assert isinstance(reservation, Reservation)
    copy = pickle.loads(pickle.dumps(reservation))
    assert (copy.id, copy.token, copy.until, copy.payload) == (
        reservation.id,
        reservation.token,
        reservation.until,
        {"n": 1},
    )
    with spawn_pool(1) as pool:
        assert pool.submit(settle, url, reservation).result(60) == runner_of(client).owner
    with pytest.raises(LeaseLost):
        client.queue("jobs").commit(reservation)
    assert client.queue("jobs").counts().total == 0


# Ctrl-C

CONSUMERS = {
    "blocking": """
import sys
from pyqueue import Client
with Client(sys.argv[1]) as client:
    client.queue("jobs").pop(0)
    print("ready", flush=True)
    client.queue("jobs", poll=3600).{receive}
""",
    "async": """
import asyncio, sys
from pyqueue import AsyncClient
async def main():
    async with AsyncClient(sys.argv[1]) as client:
        await client.queue("jobs").pop(0)
        print("ready", flush=True)
        await client.queue("jobs", poll=3600).{receive}
asyncio.run(main())
""",
}


@pytest.mark.parametrize("receive", ["pop()", "reserve_many(10)"])
@pytest.mark.parametrize("kind", CONSUMERS)
def test_ctrl_c_interrupts_a_waiting_receive(
    url: str, client: Client, kind: str, receive: str
) -> None:
    consumer = subprocess.Popen(
        [sys.executable, "-c", CONSUMERS[kind].format(receive=receive), url],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert consumer.stdout is not None
        assert consumer.stdout.readline() == "ready\n"
        time.sleep(
            0.3
        )  # it is waiting by now; were it not, the interrupt would be heard all the same
        began = time.monotonic()
        consumer.send_signal(signal.SIGINT)
        _, words = consumer.communicate(timeout=20)
        assert time.monotonic() - began < 1
    finally:
        consumer.kill()
        consumer.communicate()
    assert words.rstrip().endswith("KeyboardInterrupt")
    client.queue("jobs").push("for the next")  # it left nothing behind that could take it
    assert client.queue("jobs").pop(0) is not None
