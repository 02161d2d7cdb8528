"""The tools of the fault suite: its servers and processes, its kinds of faults, its load, its ledgers and its witness, each by itself."""

from __future__ import annotations

import asyncio
import gc
import io
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pymongo
import pytest
from pymongo.errors import OperationFailure

from pyqueue import (
    AsyncClient,
    Client,
    ConfigurationError,
    DuplicateKey,
    QueueError,
    Unavailable,
    embedded,
)
from tests.chaos import cluster as world
from tests.chaos import ledger, processes
from tests.chaos import nemesis as kinds
from tests.chaos import run as faults
from tests.chaos.change_log import END, watch
from tests.chaos.cluster import Crew, World
from tests.chaos.conftest import Server
from tests.chaos.ledger import Call, Ledger
from tests.chaos.members import Member, ReplicaSet
from tests.chaos.nemesis import Fault, Kind
from tests.chaos.processes import Process
from tests.chaos.workload import BACKLOG, CREW, Do, Load, Role, Tasks, _blocking
from tests.conftest import missing
from tests.integration.eventually import async_until, until

# ---- the servers


@pytest.fixture
def member(tmp_path: Path) -> Iterator[Member]:
    """A member that is no part of a replica set, and does not run yet."""
    try:
        member = Member(0, tmp_path / "member", embedded.find_mongod())
    except ConfigurationError as error:
        missing(str(error))
    yield member
    member.close()


def test_a_member_is_killed_when_it_has_said_who_it_is(member: Member) -> None:
    member.start()
    with pytest.raises(Unavailable, match="member 0 has not answered"):
        member.kill()
    until(member.hello)
    pid = member.pid
    member.start()  # it runs already
    assert member.hello()
    assert member.pid == pid
    member.kill()
    assert not member.running
    assert member.hello() == {}


def test_a_member_that_has_not_answered_is_ended_all_the_same(member: Member) -> None:
    member.start()
    member.close()
    assert not member.running


def test_members_that_do_not_start_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "mongod"
    program.write_text("#!/bin/sh\necho there is no room\nexit 1\n")
    program.chmod(0o700)
    monkeypatch.setattr(embedded, "find_mongod", lambda: str(program))
    with pytest.raises(
        Unavailable, match=r"(?s)member 0 did not start; the ends of the logs:.*there is no room"
    ):
        ReplicaSet(tmp_path)


# ---- the processes


def test_a_process_that_ends_by_itself_says_why(tmp_path: Path) -> None:
    told = r"(?s)nobody ended by itself, with status 1: .*KeyError: 'nobody'"
    with pytest.raises(QueueError, match=told):
        Process("nobody", tmp_path, {}).hear()
    with pytest.raises(QueueError, match=told):
        Process("nobody", tmp_path, {}).end()


def test_a_process_that_does_not_end_when_it_is_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "PATIENCE", 0.1)
    process = Process("proxies", tmp_path, {"ports": []})
    with pytest.raises(QueueError, match="proxies did not end when it was told to"):
        process.end()
    process.check()
    process.kill()


def test_a_crew_is_ended_in_any_case(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "CREW", {"producer-1": CREW["producer-1"]})
    crew = Crew(tmp_path, {"url": url, "namespace": "load", "seed": 1, "rate": 100.0})
    until(lambda: crew.at_work("producer-1"))
    crew.check()
    crew.close()
    with pytest.raises(QueueError, match=r"producer-1\.1 ended by itself, with status -9"):
        crew.check()


def test_servers_that_are_away_when_all_is_mended_are_a_failure() -> None:
    made_up = object.__new__(World)
    with pymongo.MongoClient[dict[str, Any]](
        "mongodb://127.0.0.1:1", serverSelectionTimeoutMS=50
    ) as mongo:
        made_up.mongo = mongo
        with pytest.raises(Unavailable, match="the servers are away though every fault was mended"):
            made_up._left({})


# ---- the kinds of faults, and their order


def made_up_world(**parts: Any) -> Any:
    """What a fault sees of the world."""
    return SimpleNamespace(**parts)


def ended(fault: Fault, steps: int) -> str:
    """What a fault says of itself, when it has waited so often."""
    for _ in range(steps):
        assert next(fault) is None
    with pytest.raises(StopIteration) as end:
        next(fault)
    return str(end.value.value)


def refuse(*_: Any, **__: Any) -> None:
    raise OperationFailure("no other has caught up")


def test_a_fault_of_the_primary_waits_until_there_is_one() -> None:
    found = iter([None, None, SimpleNamespace(place=2, command=refuse)])
    servers = SimpleNamespace(primary=lambda: next(found))
    assert (
        ended(kinds.step_down(made_up_world(servers=servers), random.Random(1)), 2)
        == "member 2 refused"
    )


def test_a_bus_that_cannot_be_dropped_is_not() -> None:
    servers = SimpleNamespace(primary=lambda: SimpleNamespace(place=0))
    assert (
        ended(kinds.drop_bus(made_up_world(servers=servers, drop_bus=refuse), random.Random(1)), 0)
        == "not dropped"
    )


def test_a_fault_of_the_network_lasts_until_it_has_met_somebody() -> None:
    done = iter([3, 3, 3, 3, 5, 5])  # before, begun, twice nothing, then two; and mended
    told: list[dict[str, Any]] = []

    def change(place: int, **how: Any) -> Counter[str]:
        told.append(how)
        return Counter(cut=next(done))

    servers = SimpleNamespace(primary=lambda: SimpleNamespace(place=1))
    fault = kinds.cut(
        made_up_world(servers=servers, proxies=SimpleNamespace(change=change)), random.Random(1)
    )
    assert (next(fault) or 0) >= 1
    assert ended(fault, 2) == "cut 2 times"
    assert [how for how in told if how] == [{"cut": True}, {"cut": False}]


def test_only_who_is_at_work_is_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "LONGEST_LEASE", -1)
    done: list[str] = []
    at_work = iter([False, False, True])
    process = SimpleNamespace(
        name="mover-1.1",
        suspend=lambda: done.append("suspended"),
        resume=lambda: done.append("resumed"),
    )
    crew = SimpleNamespace(
        one=lambda kind, dice: "mover-1",
        at_work=lambda name: next(at_work),
        processes={"mover-1": process},
    )
    assert (
        ended(kinds.suspend_consumer(made_up_world(crew=crew), random.Random(1)), 2) == "mover-1.1"
    )
    assert done == ["suspended", "resumed"]


def lane(kind: Kind) -> faults.Lane:
    return faults.Lane({"something": kind}, made_up_world(), "1", lambda: True, 1.0, (0.0, 0.0))


def test_a_fault_that_is_never_over_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def forever(world: World, dice: random.Random) -> Fault:
        while True:
            yield 0.0

    monkeypatch.setattr(faults, "PATIENCE", -1.0)
    with pytest.raises(Unavailable, match="this is not over: something"):
        lane(forever).step(more=True)


def test_an_error_of_the_servers_in_a_fault_names_the_fault() -> None:
    def failing(world: World, dice: random.Random) -> Fault:
        refuse()
        yield None
        return ""

    with pytest.raises(Unavailable, match="something: no other has caught up"):
        lane(failing).step(more=True)


# ---- the load


@pytest.fixture
def start(tmp_path: Path) -> Callable[[str], Load]:
    """Make what the workers of a process share; its ledger is in ``tmp_path``."""
    return lambda crew: Load(
        {
            "name": f"{crew}.1",
            "crew": crew,
            "seed": 1,
            "rate": 1e6,
            "ledger": str(tmp_path / "ledger"),
        }
    )


def answered(outcome: str, got: Any = None) -> Call:
    call = Call()
    call.outcome, call.got = outcome, got
    return call


def test_the_load_obeys_until_the_program_is_gone(
    start: Callable[[str], Load], monkeypatch: pytest.MonkeyPatch
) -> None:
    load, statuses = start("consumer-2"), list[int]()
    monkeypatch.setattr(sys, "stdin", io.StringIO('["hurry"]\n["storm", 60]\n["stop"]\n'))
    monkeypatch.setattr(os, "_exit", statuses.append)
    load.obey()
    assert load.hurrying
    assert load.stopping.is_set()
    assert 50 < load.storm_until - time.monotonic() <= 60
    assert statuses == [1]


def test_what_was_pushed_with_an_unknown_outcome_is_pushed_again_with_its_ids(
    start: Callable[[str], Load],
) -> None:
    load = start("producer-1")
    plan = load.produce("orders")
    assert next(plan) >= 0  # until it is due
    first = next(plan)
    assert isinstance(first, Do)
    assert first.items
    for _ in range(2):
        assert plan.send(answered("unknown")) == 0.05
        assert next(plan) is first
    other = plan.send(answered("ok"))
    while not isinstance(other, Do):
        other = next(plan)
    assert other.items != first.items
    load.stopping.set()
    with pytest.raises(StopIteration):
        plan.send(answered("unknown"))


def test_producers_wait_while_a_queue_is_full(start: Callable[[str], Load]) -> None:
    load = start("producer-1")
    plan = load._wait_for_room("orders")
    full, room = SimpleNamespace(total=BACKLOG), SimpleNamespace(total=BACKLOG - 1)
    assert (next(plan).method, plan.send(answered("ok", full))) == ("counts", 0.5)
    assert (next(plan).method, plan.send(answered("unknown"))) == ("counts", 0.5)
    assert next(plan).method == "counts"
    with pytest.raises(StopIteration):
        plan.send(answered("ok", room))
    stopped = load._wait_for_room("orders")
    next(stopped)
    assert stopped.send(answered("ok", full)) == 0.5
    load.stopping.set()
    assert list(stopped) == []


def test_when_a_worker_fails_so_does_the_process(
    start: Callable[[str], Load], client: Client
) -> None:
    """With the error of that one, and when the others have ended, too."""
    load = start("consumer-1")
    load.role = Role("consumer", False, (("failing",), ("going_on",)))
    went_on: list[float] = []

    def going_on() -> Iterator[float]:
        while True:
            went_on.append(0.0)
            yield 0.0

    def failing() -> Iterator[float]:
        until(lambda: went_on)
        yield 0.0
        raise ZeroDivisionError

    vars(load).update(failing=failing, going_on=going_on)
    with pytest.raises(ZeroDivisionError):
        _blocking(load, client)
    assert went_on


def heard(path: Path) -> Iterator[tuple[str, str, Any]]:
    """What a ledger says of each call that came to an end: the operation, the outcome and the items."""
    calls: dict[int, str] = {}
    for what, number, _, *more in ledger.read(path):
        if what == "call":
            calls[number] = more[0]
        else:
            yield calls.pop(number), more[0], more[1]
    assert calls == {}


class Watched(Ledger):
    """A ledger that counts what is written into it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.counted: Counter[str] = Counter()

    def _write(self, line: list[Any]) -> None:
        super()._write(line)
        self.counted[line[3]] += 1  # the operation, or the outcome


class Patient(random.Random):
    """Callers are cancelled later: on any machine some calls come to an end before that."""

    def uniform(self, a: float, b: float) -> float:
        return super().uniform(a, 20 * b)


@pytest.mark.filterwarnings(
    "ignore:unclosed:ResourceWarning"
)  # PyMongo drops the connection of a command that is cancelled
def test_a_storm_loses_nothing(start: Callable[[str], Load], tmp_path: Path, url: str) -> None:
    """Each message that was pushed to callers who pop and are cancelled at it is in one's hands, or there again."""
    load = start("consumer-2")
    load.role = Role("consumer", True, ())
    load.storm_until = time.monotonic() + 60
    load.dice = Patient(1)
    load.ledger = book = Watched(tmp_path / "ledger")

    async def main() -> None:
        async with AsyncClient(url, namespace="load") as client:
            await client.queue("billed").push_many([{"n": str(n), "trail": []} for n in range(300)])
            storm = asyncio.create_task(Tasks(load, client).run())
            # Some were cancelled; and some had reserved before that, and committed it.
            await async_until(lambda: book.counted["cancelled"] and book.counted["commit"])
            load.stopping.set()
            await storm

    asyncio.run(main())
    gc.collect()  # what PyMongo left unclosed is said here
    with Client(url, namespace="load") as client:
        left = [str(each.id) for each in client.queue("events").pop_many(100_000, timeout=0)]
    found = list(heard(tmp_path / "ledger"))
    pushed = [id for op, outcome, ids in found if (op, outcome) == ("push", "ok") for id in ids]
    popped = [id for op, outcome, ids in found if (op, outcome) == ("pop", "ok") for id in ids]
    assert Counter(popped) + Counter(left) == Counter(pushed)
    assert {outcome for _, outcome, _ in found} <= {"ok", "cancelled", "refused"}


# ---- the ledger and the witness


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ConfigurationError("what is this?"), "ConfigurationError: what is this?"),
        (DuplicateKey("it is there"), "taken"),
        (Unavailable("nobody answers"), "unknown"),
    ],
    ids=lambda each: type(each).__name__,
)
def test_what_an_error_says_is_in_the_ledger(
    tmp_path: Path, error: QueueError, outcome: str
) -> None:
    book = Ledger(tmp_path / "ledger")

    def call() -> None:
        with book.noted("push", "states", ["a"]):
            raise error

    call()
    assert list(heard(tmp_path / "ledger")) == [("push", outcome, [])]


def test_the_witness_goes_on_when_its_stream_fails(
    server: Server, database: str, tmp_path: Path
) -> None:
    url = server.url(database) + "&appName=pyqueue"  # fail points are for who has that name
    with Client(server.url(database), namespace="load") as client:
        client.queues()  # the collection is there
        since = client.database.client.admin.command("ping")["operationTime"]
        client.queue("orders").push_many([{"n": "a"}, {"n": "b"}], ids=["a", "b"])
        client.queue("orders").pop(0)
        client.database["load"].insert_one({"_id": END, "record": True})
        server.fail(1, "aggregate", errorCode=50)
        spec = {"url": url, "database": database, "namespace": "load"}
        watch({**spec, "since": [since.time, since.inc], "path": str(tmp_path / "witness")})
    assert server.spent()
    assert [line[:2] for line in ledger.read(tmp_path / "witness")] == [
        ["in", "a"],
        ["in", "b"],
        ["out", "a"],
    ]
