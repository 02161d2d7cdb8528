"""Clients used where they cannot work: after a fork, in a second loop, after close; Ctrl-C."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import signal
import threading
import time
import warnings
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from pyqueue import (
    AsyncClient,
    Client,
    ConfigurationError,
    LeaseLost,
    QueueClosed,
    Reservation,
    memory,
)
from pyqueue.clock import next_number
from pyqueue.runtime import opened
from pyqueue.runtime.connecting import runner_of
from pyqueue.spark import addresses
from tests.integration.conftest import Connect
from tests.support.eventually import async_eventually, eventually, waiters
from tests.support.processes import settle


def in_fork(call: Callable[[], object]) -> str:
    """Call it in a forked child; return its result or its error as text."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # Python warns of a fork with threads. The tests are about such forks.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:  # whatever happens, the child must not continue with the tests
        try:
            try:
                outcome = f"returned {call()!r}"
            except BaseException as error:
                outcome = f"{type(error).__name__}: {error}"
            os.write(writing, outcome.encode())
        finally:
            os._exit(0)
    os.close(writing)
    try:
        with open(reading, encoding="utf-8") as pipe:
            return pipe.read()
    finally:
        os.waitpid(child, 0)


# ---- after a fork


@pytest.fixture
def pushing() -> Iterator[None]:
    """Threads that open clients in memory, and push to their ordered queues."""
    done = threading.Event()

    def push() -> None:
        while not done.is_set():
            push_in_order()

    push_in_order()  # it imports the modules that they need
    with ThreadPoolExecutor(3) as pool:
        pushes = [pool.submit(push) for _ in range(3)]
        yield
        done.set()
        for each in pushes:
            each.result()


def push_in_order() -> list[int]:
    """Push to an ordered queue of a new client. Return the numbers that the messages got."""
    with Client("memory:") as client:
        client.queue("turns", kind="ordered").push_many([1, 2], groups=["a", "a"])
        return [
            each["no"] for each in client.database["pyqueue"].find({"group": {"$exists": True}})
        ]


@pytest.mark.parametrize("forks", [5, pytest.param(300, marks=pytest.mark.slow)])
def test_child_forked_beside_threads_pushes(forks: int, pushing: None) -> None:
    """A lock that another thread held at the fork would never be free in the child."""

    def use() -> object:
        signal.alarm(60)  # it ends a child that hangs
        return len(push_in_order())

    assert [in_fork(use) for _ in range(forks)] == ["returned 2"] * forks


@pytest.mark.parametrize("guard", [(memory, "_guard"), (addresses, "_opening")])
def test_child_forked_under_a_lock_works(guard: tuple[Any, str]) -> None:
    module, name = guard

    def use() -> object:
        signal.alarm(10)
        address = addresses.NamespaceAddress("memory:", None, "pyqueue")
        return addresses.client_of(address) and len(push_in_order())

    with getattr(module, name):
        assert in_fork(use) == "returned 2"


def test_child_numbers_its_messages_anew() -> None:
    """Its parent may fork another child later, whose messages come behind."""
    first = in_fork(next_number)
    began = time.time_ns()
    eventually(lambda: time.time_ns() > began + 1_000_000, "it is a millisecond later")
    assert f"returned {next_number()}" < first < in_fork(next_number)


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
        outcome = in_fork(call)
        assert outcome.startswith("ConfigurationError: ")
        assert "fork" in outcome
    queue.commit(reservation)
    assert queue.counts().total == 0


@pytest.mark.filterwarnings("ignore:.*opened before fork:UserWarning")
def test_async_client_is_refused_after_a_fork(url: str) -> None:
    async def main() -> str:
        async with AsyncClient(url) as client:
            queue = client.queue("jobs")
            await queue.push(1)

            def drive() -> object:
                # The loop belongs to the parent too, so the operation is stepped by hand. It is
                # refused before its first wait.
                return queue.counts().send(None)

            return in_fork(drive)

    outcome = asyncio.run(main())
    assert outcome.startswith("ConfigurationError: ")
    assert "fork" in outcome


@pytest.mark.filterwarnings("ignore:.*opened before fork:UserWarning")
def test_loop_continues_in_the_process_that_began_it(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """A child that leaves the loop, or asks for the next message, does not settle the last one."""
    queue = client.queue("jobs")
    queue.push_many(range(2))
    loops = [iter(queue.each(0))]
    held = next(loops[0])

    def drop() -> str:
        loops.clear()
        return caplog.text

    assert in_fork(drop) == "returned ''"
    outcome = in_fork(lambda: next(loops[0]))
    assert outcome.startswith("ConfigurationError: ")
    assert "fork" in outcome
    stored = queue.get(held.id)
    assert stored is not None
    assert stored.state == "reserved"
    assert next(loops[0]).id != held.id
    assert queue.get(held.id) is None


def test_client_made_after_the_fork_works(url: str, client: Client) -> None:
    client.queue("jobs").push("before")

    def use() -> object:
        with Client(url) as own:
            message = own.queue("jobs").pop(0)
            return message and message.payload

    assert in_fork(use) == "returned 'before'"
    assert client.queue("jobs").counts().total == 0


@pytest.mark.parametrize("opened", [False, True])
def test_client_unused_before_the_fork_works(url: str, opened: bool) -> None:
    """A client opens at first use, so before that it shares nothing with its parent."""
    unused = Client(url)
    if opened:
        assert unused.database.name in url

    def use() -> object:
        try:
            unused.queue("jobs").push(1)
            return unused.queue("jobs").counts().ready
        finally:
            unused.close()

    assert in_fork(use) == "returned 1"
    unused.close()


@pytest.mark.parametrize("opened", [False, True])
def test_async_client_unused_before_the_fork_works(url: str, opened: bool) -> None:
    unused = AsyncClient(url)
    if opened:
        assert unused.database.name in url

    async def use() -> object:
        async with unused:
            await unused.queue("jobs").push(1)
            return (await unused.queue("jobs").counts()).ready

    assert in_fork(lambda: asyncio.run(use())) == "returned 1"
    asyncio.run(unused.close())


def test_claims_name_the_process_that_makes_them(url: str) -> None:
    """Client and queue may be made before a fork, as long as the client is used only after it."""
    client = Client(url)
    queue = client.queue("jobs")

    def use() -> object:
        queue.push(1)
        held = queue.reserve(0)
        assert held is not None
        return held.owner.endswith(f":{os.getpid()}"), runner_of(client).owner() == held.owner

    assert in_fork(use) == "returned (True, True)"
    with client:
        queue.push(2)
        held = queue.reserve(0)
        assert held is not None
        assert held.owner.endswith(f":{os.getpid()}")


# ---- dropped without being closed


def dropped(shown: str) -> AbstractContextManager[object]:
    return pytest.warns(ResourceWarning, match=f"{shown}.*was dropped without being closed")


def test_dropped_client_is_closed_with_a_warning(url: str) -> None:
    before = set(threading.enumerate())
    queue: Any = Client(url).queue("jobs")
    gc.collect()
    queue.push(1)  # a queue keeps its client
    with queue.reserved(0) as held:  # and has a renewer
        assert held is not None
    threads = set(threading.enumerate()) - before
    assert len(threads) >= 3  # of the renewer, of the bus and of pymongo
    connection = weakref.ref(queue._runner)
    with dropped("mongodb://"):
        del queue, held
        gc.collect()
    assert connection() is None
    eventually(lambda: not any(each.is_alive() for each in threads), "the end of its threads")


def test_dropped_async_client_is_closed_in_its_loop(url: str) -> None:
    async def use() -> Any:
        queue: Any = AsyncClient(url).queue("jobs")
        await queue.push(1)
        driver = queue._runner.open()
        with dropped("mongodb://"):
            del queue
            await asyncio.sleep(0)
            gc.collect()
        await async_eventually(lambda: driver.closed, "the end of the driver")
        await async_eventually(lambda: not opened._closing, "the end of all")

    asyncio.run(use())


def test_closed_and_unused_clients_are_dropped_in_silence(url: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Client(url) as client:
            client.queue("jobs").push(1)
        unused, memory = Client(url), Client("memory:")
        memory.queue("jobs").push(1)
        del client, unused, memory
        gc.collect()
    assert [str(each.message) for each in caught if "being closed" in str(each.message)] == []


@pytest.mark.filterwarnings("ignore:.*opened before fork:UserWarning")
def test_client_dropped_in_a_fork_leaves_its_parent_alone(url: str) -> None:
    clients = [Client(url)]
    clients[0].queue("jobs").push(1)

    def drop() -> object:
        connection = weakref.ref(runner_of(clients[0]))
        clients.clear()
        gc.collect()
        return connection() is None

    assert in_fork(drop) == "returned True"
    with clients[0] as client:
        assert client.queue("jobs").counts().ready == 1


# ---- in a second event loop


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


def test_loop_in_a_second_event_loop_is_refused(url: str) -> None:
    first, second = asyncio.new_event_loop(), asyncio.new_event_loop()
    client = AsyncClient(url)
    queue = client.queue("jobs")

    async def following(loop: AsyncIterator[Any]) -> Any:
        return await anext(loop)

    try:
        first.run_until_complete(queue.push_many(range(2)))
        loop = aiter(queue.each(0))
        first.run_until_complete(following(loop))
        with pytest.raises(ConfigurationError, match="event loop"):
            second.run_until_complete(following(loop))
        counts = first.run_until_complete(queue.counts())
        assert (counts.ready, counts.reserved) == (1, 1)  # until its lease ends
    finally:
        first.run_until_complete(client.close())
        first.close()
        second.close()


# ---- after close


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


def test_transaction_of_the_other_colour_is_refused(url: str) -> None:
    """Before anything runs, or else before anything is stored."""
    ran: list[str] = []

    async def awaited(session: Any) -> None:
        ran.append("async")

    def push(session: Any) -> Any:
        queue.push(1, session=session)
        return awaited(session)

    async def main() -> None:
        async with AsyncClient(url) as twin:
            with pytest.raises(ConfigurationError, match="fn: expected an async function"):
                await twin.run_transaction(lambda session: ran.append("plain"))  # type: ignore[arg-type,return-value]
            await twin.run_transaction(lambda session: awaited(session))

    with Client(url) as client:
        queue = client.queue("q")
        for work in (awaited, push):
            with pytest.raises(ConfigurationError, match="fn: expected a synchronous function"):
                client.run_transaction(work)
        assert (ran, queue.counts().total) == ([], 0)
    asyncio.run(main())
    assert ran == ["plain", "async"]


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


def test_close_leaves_a_passed_database_open(url: str) -> None:
    import pymongo

    with pymongo.MongoClient[dict[str, Any]](url) as mongo:
        with Client(mongo.get_default_database()) as client:
            client.queue("jobs").push(1)
        assert (
            mongo.get_default_database()["pyqueue"].count_documents({"record": {"$exists": False}})
            == 1
        )


# ---- another process


@pytest.mark.parametrize("kind", ["blocking", "async"])
def test_pickled_reservation_settles_in_another_process(
    url: str, client: Client, kind: str, processes: ProcessPoolExecutor
) -> None:
    client.queue("jobs").push({"n": 1}, headers={"a": 1})
    if kind == "blocking":
        reservation = client.queue("jobs").reserve(0)
    else:

        async def main() -> Any:
            async with AsyncClient(url, owner=runner_of(client).owner()) as own:
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
    assert processes.submit(settle, url, reservation).result(60) == runner_of(client).owner()
    with pytest.raises(LeaseLost):
        client.queue("jobs").commit(reservation)
    assert client.queue("jobs").counts().total == 0


# ---- Ctrl-C


@pytest.fixture
def interruptible() -> Iterator[None]:
    """The usual handler of SIGINT: workers of xdist ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@contextmanager
def interrupt(client: Any, topic: str = "jobs") -> Iterator[None]:
    """Send this process a SIGINT once a call of the client waits for this queue or topic.

    Python may begin to block just after the signal and before it looks for one. Then it needs
    another signal.
    """
    heard = threading.Event()

    def send() -> None:
        try:
            eventually(lambda: waiters(client, topic) == 1)
        finally:
            os.kill(os.getpid(), signal.SIGINT)
        if not heard.wait(5):
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=send)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        yield
    heard.set()
    thread.join()


RECEIVES: dict[str, Callable[[Any], Any]] = {
    "pop": lambda queue: queue.pop(),
    "reserve_many": lambda queue: queue.reserve_many(10),
}


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("receive", RECEIVES)
def test_ctrl_c_interrupts_a_blocking_receive(client: Client, receive: str) -> None:
    queue = client.queue("jobs", poll=3600)
    with interrupt(client):
        RECEIVES[receive](queue)
    queue.push("next")  # nothing is left behind that could take it
    assert queue.pop(0) is not None


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_cancels_the_message_of_a_request(client: Client) -> None:
    queue = client.queue("jobs")
    with interrupt(client, runner_of(client).results):
        client.request(queue, "x", timeout=600)
    assert queue.reserve(0) is None
    assert queue.counts().ready == 0


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("receive", RECEIVES)
def test_ctrl_c_interrupts_an_async_receive(url: str, client: Client, receive: str) -> None:
    other = AsyncClient(url)

    async def main() -> None:
        async with other:
            await RECEIVES[receive](other.queue("jobs", poll=3600))

    with interrupt(other):
        asyncio.run(main())
    client.queue("jobs").push("next")  # nothing is left behind that could take it
    assert client.queue("jobs").pop(0) is not None
