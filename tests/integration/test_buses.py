"""Queues over each bus: what travels between processes, and what happens to consumers when a bus, or what carries it, is gone."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pymongo
import pytest
from anyio.from_thread import start_blocking_portal

from pyqueue import AsyncClient, Client, ConfigurationError, QueueClosed
from pyqueue.connecting import runner_of
from tests.contract.portal import PortalClient
from tests.integration.conftest import Connect
from tests.integration.eventually import async_until, until, waiters
from tests.integration.other import Other, other_process
from tests.integration.servers import standalone
from tests.signals.servers import RedisServer, free_port

#: A few milliseconds and a few processes, on a busy machine.
SOON = 0.25
NEVER = 3600.0
SECRET = "hunter2-correct-horse"
MONITORING = {
    "hello",
    "isMaster",
    "serverStatus",
    "ping",
    "endSessions",
    "buildInfo",
    "saslStart",
    "saslContinue",
}

Mongo = pymongo.MongoClient[dict[str, Any]]


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A server that the test may kill."""
    server = RedisServer(tmp_path)
    yield server
    server.kill()


@pytest.fixture
def bus(request: pytest.FixtureRequest) -> str:
    """The URL of the bus under test."""
    if request.param == "redis":
        return str(request.getfixturevalue("redis_server").url)
    return f"{request.param}:"


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    pool = ThreadPoolExecutor(64)
    yield pool
    pool.shutdown(
        wait=False, cancel_futures=True
    )  # a test that failed leaves waiters; closing their client ends them


@pytest.fixture(scope="module")
def other() -> Iterator[Other]:
    with other_process() as other:
        yield other


carried = pytest.mark.parametrize("bus", ["capped", "redis"], indirect=True)
every = pytest.mark.parametrize("bus", ["memory", "capped", "redis"], indirect=True)


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    return call(), time.monotonic()


def commands(mongo: Mongo) -> int:
    """How many commands the server was given, the driver's monitoring left out."""
    metrics = mongo.admin.command("serverStatus")["metrics"]["commands"]
    return sum(
        each["total"]
        for name, each in metrics.items()
        if isinstance(each, dict) and "total" in each and name not in MONITORING
    )


def ready(client: Any) -> Any:
    """The driver of a client that is in use."""
    return runner_of(client).open()


# Between processes


@carried
def test_a_push_in_another_process_wakes(
    connect: Connect, url: str, bus: str, pool: ThreadPoolExecutor, other: Other
) -> None:
    client = connect(signals=bus)
    queue = client.queue("jobs", poll=NEVER)
    lags = []
    other.do(f"queue = fresh({url!r}, {bus!r})")
    for n in range(5):
        future = pool.submit(timed, queue.pop)
        until(lambda: waiters(client, "jobs") == 1)
        began = time.monotonic()
        other.do(f"queue.push({n})")
        message, at = future.result(20)
        assert message.payload == n
        lags.append(at - began)
    assert median(lags) < SOON


@pytest.mark.parametrize("bus", ["memory"], indirect=True)
def test_a_push_of_another_client_wakes(
    connect: Connect, url: str, bus: str, pool: ThreadPoolExecutor
) -> None:
    """The bus in memory carries within a process."""
    client = connect(signals=bus)
    queue = client.queue("jobs", poll=NEVER)
    with Client(url, signals=bus) as other:
        future = pool.submit(timed, queue.pop)
        until(lambda: waiters(client, "jobs") == 1)
        began = time.monotonic()
        other.queue("jobs").push(1)
        assert future.result(20)[1] - began < SOON


@carried
def test_a_pause_travels_and_stays(
    connect: Connect, url: str, bus: str, pool: ThreadPoolExecutor, other: Other
) -> None:
    client = connect(signals=bus)
    queue = client.queue("jobs", poll=NEVER)
    future = pool.submit(timed, queue.pop)
    until(lambda: waiters(client, "jobs") == 1)
    other.do(f"queue = fresh({url!r}, {bus!r})")
    began = time.monotonic()
    other.do("queue.pause()")
    until(lambda: runner_of(client).waiters("jobs").scan.paused)
    assert time.monotonic() - began < 2.5  # without a bus it would take 5 s
    other.do("queue.push(1)")
    other.do(
        f"new = fresh({url!r}, {bus!r})"
    )  # it never heard the event, and honours the pause at once
    other.do("assert new.pop(0) is None and new.paused()")
    assert not future.done()
    began = time.monotonic()
    other.do("new.resume()")
    message, at = future.result(20)
    assert message.payload == 1
    assert at - began < 2.5


def test_namespaces_and_databases_on_one_redis_do_not_hear_each_other(
    connect: Connect, mongo: Mongo, url: str, redis_server: RedisServer, pool: ThreadPoolExecutor
) -> None:
    client = connect(signals=redis_server.url)
    queue = client.queue("jobs", poll=NEVER)
    future = pool.submit(queue.pop)
    until(lambda: waiters(client, "jobs") == 1)
    elsewhere = f"{client.database.name}x"
    with (
        Client(url, signals=redis_server.url, namespace="another") as one,
        Client(url.replace(client.database.name, elsewhere), signals=redis_server.url) as two,
        Client(url, signals=redis_server.url) as same,
    ):
        heard = []
        listening = ready(client).bus  # what it heard is counted there
        for producer in (one, two, same):
            before = listening.stats["heard"]
            for n in range(4):
                producer.queue("jobs").push(n)
                time.sleep(0.06)  # past the window
            heard.append(listening.stats["heard"] - before)
    mongo.drop_database(elsewhere)
    assert heard[:2] == [0, 0]
    assert heard[2] > 0
    assert future.result(20) is not None


@every
def test_a_queue_name_with_every_allowed_character(
    connect: Connect, url: str, bus: str, pool: ThreadPoolExecutor
) -> None:
    name = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.:>"
    client = connect(signals=bus)
    queue, near = client.queue(name, poll=NEVER), client.queue(f"{name}>", poll=NEVER)
    future, other = pool.submit(timed, queue.pop), pool.submit(timed, lambda: near.pop(1.5))
    until(lambda: waiters(client, name) == waiters(client, f"{name}>") == 1)
    with Client(url, signals=bus) as producer:
        began = time.monotonic()
        producer.queue(name).push(1)
        assert future.result(20)[1] - began < 2 * SOON
    assert other.result(20)[0] is None


# Refused


@pytest.mark.parametrize("trouble", ["unreachable", "wrong password", "no password"])
def test_a_bus_that_was_named_and_does_not_work_is_told_on_entering(
    url: str, tmp_path: Path, trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    server = RedisServer(tmp_path, "--requirepass", SECRET)
    try:
        port = free_port() if trouble == "unreachable" else server.port
        given = {
            "unreachable": f":{SECRET}@",
            "wrong password": f":{SECRET}-not@",
            "no password": "",
        }[trouble]
        bus = f"redis://{given}127.0.0.1:{port}/0"
        with pytest.raises(ConfigurationError, match="signals") as caught, Client(url, signals=bus):
            pass

        async def enter() -> None:
            with pytest.raises(ConfigurationError, match="signals"):
                async with AsyncClient(url, signals=bus):
                    pass

        asyncio.run(enter())
        said = [str(caught.value), repr(caught.value), caplog.text]
        chain: BaseException | None = caught.value
        while chain is not None:
            said.append(repr(chain))
            chain = chain.__cause__ or chain.__context__
        assert not any(SECRET in text for text in said)
    finally:
        server.kill()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A server whose user "worker" may use the queues' collection and read and write signals, but not make their collection."""
    with standalone(tmp_path_factory.mktemp("guarded-buses"), "--auth") as port:
        with Mongo("127.0.0.1", port) as mongo:
            mongo.admin.command("createUser", "root", pwd=SECRET, roles=["root"])
        with Mongo("127.0.0.1", port, username="root", password=SECRET) as mongo:
            actions = ["find", "insert", "update", "remove"]
            privileges = [
                {
                    "resource": {"db": "", "collection": "pyqueue"},
                    "actions": [*actions, "createIndex", "listIndexes"],
                },
                {"resource": {"db": "", "collection": "pyqueue.signals"}, "actions": ["find"]},
            ]
            mongo.admin.command("createRole", "queues", privileges=privileges, roles=[])
            mongo.admin.command("createUser", "worker", pwd=SECRET, roles=["queues"])
        yield port


@pytest.mark.parametrize("how", ["blocking", "async"])
@pytest.mark.parametrize("dropped", [False, True])
def test_the_default_bus_not_permitted_is_one_warning_and_the_poll(
    guarded: int,
    pool: ThreadPoolExecutor,
    caplog: pytest.LogCaptureFixture,
    how: str,
    dropped: bool,
) -> None:
    database = f"t{how}{dropped}"
    url = f"mongodb://worker:{SECRET}@127.0.0.1:{guarded}/{database}?authSource=admin"
    caplog.set_level(logging.WARNING)
    with (
        ExitStack() as stack,
        Mongo("127.0.0.1", guarded, username="root", password=SECRET) as root,
    ):
        if dropped:
            root[database].create_collection("pyqueue.signals", capped=True, size=1 << 20)
        if how == "blocking":
            client: Any = stack.enter_context(Client(url))
        else:
            portal = stack.enter_context(start_blocking_portal())
            bare = AsyncClient(url)
            stack.callback(partial(portal.call, bare.close))
            portal.call(bare.__aenter__)
            client = PortalClient(portal, bare)
        queue = client.queue("jobs", poll=0.1)
        for n in range(12):
            if dropped and n == 6:
                root[database].drop_collection("pyqueue.signals")
            future = pool.submit(timed, queue.pop)
            until(lambda: waiters(client, "jobs") == 1 or future.done())  # noqa: B023  # called at once
            began = time.monotonic()
            queue.push(n)
            message, at = future.result(20)
            assert message.payload == n
            assert at - began < 0.1 + SOON
        time.sleep(0.3)  # a held back signal is tried
    warnings = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(warnings) == 1, warnings
    assert SECRET not in caplog.text


# Gone, and back


def test_redis_killed_and_started_again_under_consumers(
    connect: Connect, url: str, own_redis: RedisServer, pool: ThreadPoolExecutor
) -> None:
    client = connect(signals=own_redis.url)
    fallen, heard = client.queue("polled", poll=0.3), client.queue("heard", poll=NEVER)
    with Client(url, signals=own_redis.url) as producer:
        sleeper = pool.submit(timed, heard.pop)
        future = pool.submit(timed, fallen.pop)
        until(lambda: waiters(client, "polled") == waiters(client, "heard") == 1)
        own_redis.kill()
        began = time.monotonic()
        producer.queue("polled").push("while it is away")
        message, at = future.result(20)
        assert message.payload == "while it is away"
        assert at - began < 0.3 + 2 * SOON
        producer.queue("heard").push("no signal tells of this")
        before = client.stats["commands"]
        time.sleep(1)
        assert client.stats["commands"] - before <= 10  # nobody looks busily
        own_redis.start()
        assert (
            sleeper.result(20)[0].payload == "no signal tells of this"
        )  # it looks once when the bus is back

        def woken() -> bool:
            future = pool.submit(timed, heard.pop)
            until(lambda: waiters(client, "heard") == 1)
            began = time.monotonic()
            producer.queue("heard").push(1)
            return bool(future.result(20)[1] - began < SOON)

        until(woken)


@pytest.mark.own_mongod
@pytest.mark.parametrize("what", ["signals", "database"])
def test_what_carries_the_signals_dropped_under_consumers(
    connect: Connect, url: str, own_mongo: Mongo, pool: ThreadPoolExecutor, what: str
) -> None:
    client = connect()
    queue = client.queue("jobs", poll=2)
    future = pool.submit(timed, queue.pop)
    until(lambda: waiters(client, "jobs") == 1)
    database = client.database.name
    if what == "signals":
        own_mongo[database].drop_collection("pyqueue.signals")
    else:
        own_mongo.drop_database(database)
    before = commands(own_mongo)
    time.sleep(2)
    assert commands(own_mongo) - before <= 40  # the consumer's looks, and the cursor's back-off
    assert not future.done()
    with Client(url) as producer:
        producer.queue("jobs").push(1)
        assert future.result(20)[0].payload == 1

        def woken() -> bool:
            future = pool.submit(timed, lambda: queue.pop(20))
            until(lambda: waiters(client, "jobs") == 1)
            began = time.monotonic()
            producer.queue("jobs").push(1)
            return bool(future.result(20)[1] - began < SOON)

        until(woken)


# What waiting costs, and how it ends


@pytest.mark.own_mongod
@carried
def test_fifty_idle_waiters_cost_two_commands_a_second(
    connect: Connect, own_mongo: Mongo, bus: str, pool: ThreadPoolExecutor
) -> None:
    client = connect(signals=bus)
    queue = client.queue("jobs")
    futures = [pool.submit(queue.pop) for _ in range(50)]
    until(lambda: waiters(client, "jobs") == 50)

    def idle() -> bool:
        before, began = commands(own_mongo), time.monotonic()
        time.sleep(2)
        return commands(own_mongo) - before <= 2 * (time.monotonic() - began)

    assert any(idle() for _ in range(4))  # the first looks are closer together
    client.close()
    assert {type(future.exception(20)) for future in futures} == {QueueClosed}


@every
def test_cancelling_a_waiting_receive_returns_at_once(url: str, bus: str) -> None:
    async def main() -> list[float]:
        lags = []
        async with AsyncClient(url, signals=bus) as client:
            queue = client.queue("jobs", poll=NEVER)
            for receive in (queue.pop, queue.reserve, partial(queue.reserve_many, 5)) * 4:
                task = asyncio.create_task(receive())
                await async_until(lambda: waiters(client, "jobs") == 1)
                began = time.monotonic()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                lags.append(time.monotonic() - began)
                assert waiters(client, "jobs") == 0
        return lags

    assert median(asyncio.run(main())) < 0.05


@every
def test_closing_wakes_everybody(connect: Connect, bus: str, pool: ThreadPoolExecutor) -> None:
    client = connect(signals=bus)
    queue, other = client.queue("jobs", poll=NEVER), client.queue("other", poll=NEVER)
    futures = [
        pool.submit(timed, each) for each in (queue.pop, queue.reserve, other.pop, other.reserve)
    ]
    until(lambda: waiters(client, "jobs") == waiters(client, "other") == 2)
    client.close()
    for future in futures:
        with pytest.raises(QueueClosed):
            future.result(5)
