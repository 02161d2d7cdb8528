"""Queues over each bus: the signals between processes, and the failures of a bus.

Consumers here poll never or seldom, so a message that arrives proves that a signal arrived. The
counter ``heard`` of the bus says the same without a clock.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pymongo
import pytest

from pyqueue import AsyncClient, Client, ConfigurationError, QueueClosed
from pyqueue.runtime.connecting import runner_of
from signals import hub
from tests.integration.conftest import Connect, connecting
from tests.signals.conftest import ROOT_PASSWORD, ROOT_USER, guarded, redis_server
from tests.support.eventually import async_eventually, eventually, waiters
from tests.support.processes import Peer, peer_process
from tests.support.servers import RedisServer, free_port

__all__ = ["guarded", "redis_server"]  # fixtures

#: Far more than a signal takes, and less than any poll that is not set by the test.
SECONDS = 20.0
NEVER = 3600.0
SECRET = ROOT_PASSWORD
MONITORING = {
    *("hello", "isMaster", "serverStatus", "ping", "endSessions", "buildInfo"),
    *("saslStart", "saslContinue"),
}

Mongo = pymongo.MongoClient[dict[str, Any]]


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
    # A failed test leaves waiters behind; closing their client ends them.
    pool.shutdown(wait=False, cancel_futures=True)


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    with peer_process() as peer:
        yield peer


carried = pytest.mark.parametrize("bus", ["capped", "redis"], indirect=True)
every = pytest.mark.parametrize("bus", ["memory", "capped", "redis"], indirect=True)


def commands(mongo: Mongo) -> int:
    """Return how many commands the server got, without the monitoring of the driver."""
    metrics = mongo.admin.command("serverStatus")["metrics"]["commands"]
    return sum(
        each["total"]
        for name, each in metrics.items()
        if isinstance(each, dict) and "total" in each and name not in MONITORING
    )


def heard(*clients: Any) -> int:
    """Return how many events the buses of these clients delivered to their listeners."""
    return sum(int(runner_of(client).open().bus.stats["heard"]) for client in clients)


def published(client: Any) -> int:
    """Return how many events the bus of a client sent."""
    return int(runner_of(client).open().bus.stats["published"])


def waiting(
    pool: ThreadPoolExecutor, client: Any, name: str, receive: Callable[[], Any]
) -> Future[Any]:
    """Let a consumer receive in another thread; return once it waits."""
    future = pool.submit(receive)
    eventually(lambda: waiters(client, name) == 1 or future.done(), "a waiting consumer")
    return future


# Between processes


@carried
def test_push_in_another_process_wakes_a_consumer(
    connect: Connect, url: str, bus: str, pool: ThreadPoolExecutor, peer: Peer
) -> None:
    client = connect(signals=bus)
    queue = client.queue("jobs", poll=NEVER)
    peer.do(f"queue = fresh({url!r}, {bus!r})")
    for n in range(3):
        future = waiting(pool, client, "jobs", queue.pop)
        before = heard(client)
        peer.do(f"queue.push({n})")
        assert future.result(SECONDS).payload == n
        eventually(lambda before=before: heard(client) > before, "a signal")  # type: ignore[misc]


@pytest.mark.parametrize("bus", ["memory"], indirect=True)
def test_push_of_another_client_wakes_a_consumer(
    connect: Connect, url: str, bus: str, pool: ThreadPoolExecutor
) -> None:
    """The memory bus carries signals within a process."""
    client = connect(signals=bus)
    queue = client.queue("jobs", poll=NEVER)
    with Client(url, signals=bus) as producer:
        future = waiting(pool, client, "jobs", queue.pop)
        producer.queue("jobs").push(1)
        assert future.result(SECONDS).payload == 1
        assert heard(client, producer) > 0


@carried
def test_pause_travels_between_processes_and_stays(
    connect: Connect, url: str, bus: str, pool: ThreadPoolExecutor, peer: Peer
) -> None:
    client = connect(signals=bus)
    queue = client.queue("jobs", poll=NEVER)
    future = waiting(pool, client, "jobs", queue.pop)
    peer.do(f"queue = fresh({url!r}, {bus!r})")
    before = heard(client)
    peer.do("queue.pause()")
    eventually(lambda: runner_of(client).waiters("jobs").scan.paused, "the pause")
    eventually(lambda: heard(client) > before, "the signal of the pause")
    peer.do("queue.push(1)")
    # A new client never heard the event, and respects the pause at once.
    peer.do(f"new = fresh({url!r}, {bus!r})")
    peer.do("assert new.pop(0) is None and new.paused()")
    assert not future.done()
    before = heard(client)
    peer.do("new.resume()")
    assert future.result(SECONDS).payload == 1
    eventually(lambda: heard(client) > before, "the signal of the end of the pause")


def test_namespaces_on_one_redis_do_not_hear_each_other(
    connect: Connect, mongo: Mongo, url: str, redis_server: RedisServer, pool: ThreadPoolExecutor
) -> None:
    """The same holds for databases."""
    client = connect(signals=redis_server.url)
    future = waiting(pool, client, "jobs", client.queue("jobs", poll=NEVER).pop)
    elsewhere = f"{client.database.name}x"
    with (
        Client(url, signals=redis_server.url, namespace="another") as one,
        Client(url.replace(client.database.name, elsewhere), signals=redis_server.url) as two,
        Client(url, signals=redis_server.url) as same,
    ):
        before = heard(client)
        for producer in (one, two):
            producer.queue("jobs").push(1)
            eventually(partial(published, producer), "a sent signal")
        assert heard(client) == before
        assert not future.done()
        same.queue("jobs").push(1)
        assert future.result(SECONDS) is not None
        eventually(lambda: heard(client) > before, "the signal")
        assert heard(client) == before + 1  # sent last, so an earlier signal would have arrived
    mongo.drop_database(elsewhere)


@every
def test_queue_names_of_all_characters_are_exact_topics(
    connect: Connect, url: str, bus: str, pool: ThreadPoolExecutor
) -> None:
    name = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.:>"
    near = f"{name}>"
    client = connect(signals=bus)
    future = waiting(pool, client, name, client.queue(name, poll=NEVER).pop)
    second = waiting(pool, client, near, client.queue(near, poll=NEVER).pop)
    with Client(url, signals=bus) as producer:
        producer.queue(name).push(1)
        assert future.result(SECONDS).payload == 1
        assert not second.done()
        producer.queue(near).push(2)
        assert second.result(SECONDS).payload == 2


# Refused


@pytest.mark.parametrize("trouble", ["unreachable", "wrong password", "no password"])
def test_named_bus_that_fails_raises_on_entering(
    url: str, tmp_path: Path, trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    server = RedisServer(tmp_path, "--requirepass", SECRET)
    try:
        port = free_port() if trouble == "unreachable" else server.port
        given = {"unreachable": f":{SECRET}@", "wrong password": f":{SECRET}-not@"}.get(trouble, "")
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
def worker(guarded: int) -> int:
    """The port of a server whose user "worker" may use queues, but may not send signals."""
    with Mongo("127.0.0.1", guarded, username=ROOT_USER, password=SECRET) as mongo:
        actions = ["find", "insert", "update", "remove", "createIndex", "listIndexes"]
        privileges = [
            {"resource": {"db": "", "collection": "pyqueue"}, "actions": actions},
            {"resource": {"db": "", "collection": "pyqueue.signals"}, "actions": ["find"]},
        ]
        mongo.admin.command("createRole", "queues", privileges=privileges, roles=[])
        mongo.admin.command("createUser", "worker", pwd=SECRET, roles=["queues"])
    return guarded


@pytest.mark.parametrize("how", ["blocking", "async"])
@pytest.mark.parametrize("dropped", [False, True])
def test_default_bus_without_permission_warns_once(
    worker: int,
    pool: ThreadPoolExecutor,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    dropped: bool,
) -> None:
    """Consumers poll."""
    monkeypatch.setattr("signals.runner.ENTER_TIMEOUT_S", 0.1)
    database = f"t{how}{dropped}"
    url = f"mongodb://worker:{SECRET}@127.0.0.1:{worker}/{database}?authSource=admin"
    caplog.set_level(logging.WARNING)
    with (
        Mongo("127.0.0.1", worker, username=ROOT_USER, password=SECRET) as root,
        connecting(how, url) as connect,
    ):
        if dropped:
            root[database].create_collection("pyqueue.signals", capped=True, size=1 << 20)
        client = connect(telemetry=False)
        queue = client.queue("jobs", poll=0.1)
        for n in range(6):
            if dropped and n == 3:
                root[database].drop_collection("pyqueue.signals")
            future = waiting(pool, client, "jobs", queue.pop)
            queue.push(n)
            assert future.result(SECONDS).payload == n
        bus: Any = runner_of(client).open().bus
        stats = bus.stats
        eventually(lambda: stats["failed"] >= 2, "a second attempt to send")
    warnings = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(warnings) == 1, warnings
    assert SECRET not in caplog.text


# Gone, and back


def test_redis_restarted_under_consumers(
    connect: Connect, url: str, own_redis: RedisServer, pool: ThreadPoolExecutor, peer: Peer
) -> None:
    client = connect(signals=own_redis.url)
    polled, sleeper = client.queue("polled", poll=0.3), client.queue("sleeper", poll=NEVER)
    peer.do(f"fresh({url!r}, {own_redis.url!r}); far = clients[-1].queue")
    asleep = waiting(pool, client, "sleeper", sleeper.pop)
    future = waiting(pool, client, "polled", polled.pop)
    own_redis.kill()
    peer.do("far('polled').push('while Redis is down')")
    assert future.result(SECONDS).payload == "while Redis is down"  # found by the poll
    peer.do("far('sleeper').push('without a signal')")
    before, began = client.stats["commands"], time.monotonic()
    time.sleep(0.5)
    sent = client.stats["commands"] - before
    assert sent <= 20 * (time.monotonic() - began)  # consumers do not scan all the time
    own_redis.start()
    # The consumer scans once when the bus is back.
    assert asleep.result(SECONDS).payload == "without a signal"
    wakes_again(client, peer, "sleeper", sleeper.pop, pool)


def wakes_again(
    client: Any, peer: Peer, name: str, receive: Callable[[], Any], pool: ThreadPoolExecutor
) -> None:
    """Push from the other process until a consumer is woken by the signal of its message."""

    def woken() -> bool:
        future = waiting(pool, client, name, receive)
        before = heard(client)
        peer.do(f"far({name!r}).push(1)")
        assert future.result(SECONDS).payload == 1
        return heard(client) > before

    eventually(woken, "a wake-up by a signal")


def test_dead_bus_wakes_consumers_of_its_process(
    url: str, own_redis: RedisServer, pool: ThreadPoolExecutor
) -> None:
    """Of every client, blocking or async, also when it pauses or resumes a queue."""
    with connecting("async", url) as async_one, connecting("blocking", url) as blocking_one:
        makers = (async_one, blocking_one, blocking_one)
        clients: list[Any] = [make(signals=own_redis.url) for make in makers]
        own_redis.kill()
        for producer in clients[:2]:
            consumers = [each for each in clients if each is not producer]
            for client in consumers:
                future = waiting(pool, client, "jobs", client.queue("jobs", poll=NEVER).pop)
                producer.queue("jobs").push(1)
                assert future.result(SECONDS).payload == 1
            queue = consumers[0].queue("jobs", poll=NEVER)
            future = waiting(pool, consumers[0], "jobs", queue.pop)
            producer.queue("jobs").pause()
            scan = runner_of(consumers[0]).waiters("jobs").scan
            eventually(lambda: scan.paused, "the pause")  # noqa: B023  # called at once
            producer.queue("jobs").push(2)
            producer.queue("jobs").resume()
            assert future.result(SECONDS).payload == 2


@carried
def test_echo_of_a_push_wakes_no_second_consumer(
    connect: Connect, url: str, bus: str, pool: ThreadPoolExecutor
) -> None:
    client = connect(signals=bus)
    queue = client.queue("jobs", poll=NEVER)
    with Client(url, signals=bus) as far, patch.object(hub, "_places", {}):
        elsewhere = runner_of(far).open().bus  # as in another process
        consumers = [pool.submit(queue.pop) for _ in "12"]
        eventually(lambda: waiters(client, "jobs") == 2, "two waiting consumers")
        before = heard(client)
        queue.push(1)
        assert heard(client) == before + 1  # without the server
        eventually(lambda: published(client) == 1, "the sent signal")
        elsewhere.emit(runner_of(client).waiters("jobs").topic, None)
        eventually(lambda: heard(client) > before + 1, "the signal behind the echo")
        assert heard(client) == before + 2
        eventually(lambda: waiters(client, "jobs") == 1, "one waiting consumer")
        queue.push(2)
        popped = [each.result(SECONDS) for each in consumers]
        assert {each.payload for each in popped if each} == {1, 2}


@pytest.mark.own_mongod
@pytest.mark.parametrize("dropped", ["signals", "database"])
def test_dropped_collection_under_consumers(
    connect: Connect,
    url: str,
    own_mongo: Mongo,
    pool: ThreadPoolExecutor,
    peer: Peer,
    dropped: str,
) -> None:
    client = connect()
    queue = client.queue("jobs", poll=NEVER)
    future = waiting(pool, client, "jobs", queue.pop)
    database = client.database.name
    if dropped == "signals":
        own_mongo[database].drop_collection("pyqueue.signals")
    else:
        own_mongo.drop_database(database)
    before, began = commands(own_mongo), time.monotonic()
    time.sleep(1)
    # The scans, and the retries of the bus.
    assert commands(own_mongo) - before <= 30 * (time.monotonic() - began)
    assert not future.done()
    peer.do(f"fresh({url!r}, 'capped:'); far = clients[-1].queue")
    peer.do("far('jobs').push(1)")
    assert future.result(SECONDS).payload == 1
    wakes_again(client, peer, "jobs", partial(queue.pop, SECONDS), pool)


# The cost and the end of waiting


@pytest.mark.own_mongod
@carried
def test_fifty_idle_waiters_cost_two_commands_a_second(
    connect: Connect, own_mongo: Mongo, bus: str, pool: ThreadPoolExecutor
) -> None:
    client = connect(signals=bus)
    queue = client.queue("jobs")
    futures = [pool.submit(queue.pop) for _ in range(50)]
    eventually(lambda: waiters(client, "jobs") == 50, "50 waiting consumers")

    def idle() -> bool:
        before, began = commands(own_mongo), time.monotonic()
        time.sleep(1)
        return commands(own_mongo) - before <= 2 * (time.monotonic() - began)

    assert any(idle() for _ in range(8))  # the first scans are closer together
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
                await async_eventually(lambda: waiters(client, "jobs") == 1, "a waiting consumer")
                began = time.monotonic()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                lags.append(time.monotonic() - began)
                assert waiters(client, "jobs") == 0
        return lags

    assert min(asyncio.run(main())) < 0.05  # the best of twelve, for slow machines


@pytest.mark.parametrize("bus", ["memory", "capped", "redis", "none"], indirect=True)
def test_closing_the_client_wakes_all_waiters(
    connect: Connect, bus: str, pool: ThreadPoolExecutor
) -> None:
    client = connect(signals=bus)
    queue, second = client.queue("jobs", poll=NEVER), client.queue("second", poll=NEVER)
    calls: list[Callable[[], Any]] = [queue.pop, queue.reserve, second.pop, second.reserve]
    calls.append(lambda: queue.reserve_many(5, timeout=NEVER))
    calls.append(lambda: queue.pop_many(5, timeout=NEVER))
    futures = [pool.submit(call) for call in calls]
    eventually(lambda: (waiters(client, "jobs"), waiters(client, "second")) == (4, 2), "all wait")
    client.close()
    for future in futures:
        with pytest.raises(QueueClosed):
            future.result(SECONDS)
