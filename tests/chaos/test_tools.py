"""The parts of the fault suite: servers, processes, faults, the workload and the ledgers."""

from __future__ import annotations

import asyncio
import gc
import io
import logging
import os
import random
import sys
import threading
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
    JobFailed,
    QueueError,
    Unavailable,
    embedded,
)
from tests.chaos import ledger, nemesis
from tests.chaos.cluster import Cluster, WorkloadProcesses, is_any_left
from tests.chaos.drivers import AsyncRunner, run_blocking
from tests.chaos.ledger import Call, Ledger
from tests.chaos.members import Member, ReplicaSet
from tests.chaos.nemesis import Fault, Injection
from tests.chaos.processes import Process
from tests.chaos.producers import BACKLOG
from tests.chaos.schedule import Schedule
from tests.chaos.steps import Step
from tests.chaos.workload import Role, Workload
from tests.support.eventually import async_eventually, eventually
from tests.support.servers import require_mongod

# ---- the servers


@pytest.fixture
def member(tmp_path: Path) -> Iterator[Member]:
    """A member outside of a replica set, not started."""
    member = Member(0, tmp_path / "member", require_mongod())
    yield member
    member.close()


def test_member_can_be_killed_after_its_first_answer(member: Member) -> None:
    member.start()
    with pytest.raises(Unavailable, match="member 0 has not answered"):
        member.kill()
    eventually(member.hello)
    pid = member.pid
    member.start()  # does nothing: it runs
    assert member.hello()
    assert member.pid == pid
    member.kill()
    assert not member.running
    assert member.hello() == {}


def test_member_without_an_answer_can_be_closed(member: Member) -> None:
    member.start()
    member.close()
    assert not member.running


def test_replica_set_start_failure_shows_the_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "mongod"
    program.write_text("#!/bin/sh\necho there is no room\nexit 1\n")
    program.chmod(0o700)
    monkeypatch.setattr(embedded, "find_mongod", lambda: str(program))
    with pytest.raises(
        Unavailable, match=r"(?s)member 0 did not start; member 0: has ended.*there is no room"
    ):
        ReplicaSet(tmp_path)


# ---- the processes


def test_process_that_ends_early_shows_its_error(tmp_path: Path) -> None:
    error = r"(?s)unknown ended early with status 1: .*KeyError: 'unknown'"
    process = Process("unknown", tmp_path, {})
    with pytest.raises(QueueError, match=error):
        process.receive()
    with pytest.raises(QueueError, match=error):
        process.wait()


def test_process_that_does_not_end_in_time_is_an_error(tmp_path: Path) -> None:
    process = Process("proxies", tmp_path, {"ports": []})
    with pytest.raises(QueueError, match=r"proxies did not end within 0\.1 s"):
        process.wait(0.1)
    process.check()
    process.kill()


def test_workload_processes_are_killed_on_close(tmp_path: Path, url: str) -> None:
    spec = {"url": url, "namespace": "load", "seed": 1, "rate": 100.0}
    spec |= {"redis": "none:", "mutant": None}
    workload = WorkloadProcesses(tmp_path, spec, ("producer-1",))
    eventually(lambda: workload.is_running("producer-1"))
    workload.check()
    (path,) = workload.ledgers
    workload.close()
    path.unlink()
    assert workload.ledgers == [], "a process may be killed before it begins"
    with pytest.raises(QueueError, match=r"producer-1\.1 ended early with status -9"):
        workload.check()


def test_unreachable_servers_at_the_end_are_an_error() -> None:
    with (
        pymongo.MongoClient[dict[str, Any]](
            "mongodb://127.0.0.1:1", serverSelectionTimeoutMS=50
        ) as mongo,
        pytest.raises(Unavailable, match="the servers do not answer after the last fault"),
    ):
        is_any_left(mongo["faults"]["load"], {})


# ---- faults and their schedule


def inject(fault: Fault, **parts: Any) -> Injection:
    """Begin a fault, in a cluster that has only these parts."""
    cluster: Any = SimpleNamespace(**parts)
    return fault(cluster, random.Random(1))


def finish(injection: Injection, steps: int) -> str:
    """Return the description of an injection that waits this many times before it ends."""
    for _ in range(steps):
        assert next(injection) is None
    with pytest.raises(StopIteration) as end:
        next(injection)
    return str(end.value.value)


def refuse(*_: Any, **__: Any) -> None:
    raise OperationFailure("no secondary has caught up")


def test_fault_of_the_primary_waits_for_a_primary() -> None:
    found = iter([None, None, SimpleNamespace(place=2, command=refuse)])
    servers = SimpleNamespace(primary=lambda: next(found))
    assert finish(inject(nemesis.step_down, servers=servers), 2) == "member 2 refused"


def test_drop_bus_survives_a_refusal() -> None:
    servers = SimpleNamespace(primary=lambda: SimpleNamespace(place=0))
    injection = inject(nemesis.drop_bus, servers=servers, drop_bus=refuse)
    assert finish(injection, 0) == "not dropped"


def test_network_fault_lasts_until_it_has_struck() -> None:
    # Before it begins, at its beginning, twice without effect, then with effect, at its end.
    done = iter([3, 3, 3, 3, 5, 5])
    changes: list[dict[str, Any]] = []

    def change(place: int, **how: Any) -> Counter[str]:
        changes.append(how)
        return Counter(cut=next(done))

    servers = SimpleNamespace(primary=lambda: SimpleNamespace(place=1))
    injection = inject(nemesis.cut, servers=servers, proxies=SimpleNamespace(change=change))
    assert (next(injection) or 0) >= 1
    assert finish(injection, 2) == "cut 2 times"
    assert [how for how in changes if how] == [{"cut": True}, {"cut": False}]


def test_suspend_consumer_waits_for_a_running_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nemesis, "LONGEST_LEASE_S", -1)
    done: list[str] = []
    running = iter([False, False, True])
    process = SimpleNamespace(
        name="mover-1.1",
        suspend=lambda: done.append("suspended"),
        resume=lambda: done.append("resumed"),
    )
    workload = SimpleNamespace(
        choose=lambda kind, dice: "mover-1",
        is_running=lambda name: next(running),
        processes={"mover-1": process},
    )
    assert finish(inject(nemesis.suspend_consumer, workload=workload), 2) == "mover-1.1"
    assert done == ["suspended", "resumed"]


def schedule(fault: Fault, timeout: float = 60.0) -> Schedule:
    faults, ready = {"something": fault}, lambda: True
    servers = SimpleNamespace(state=lambda: "member 2: has ended")
    cluster: Any = SimpleNamespace(servers=servers)
    return Schedule(faults, cluster, "1", ready, 1.0, (0.0, 0.0), timeout=timeout)


def test_schedule_without_faults_does_nothing() -> None:
    """A mutant may need faults of clients alone."""
    nothing = Schedule({}, SimpleNamespace(), "1", lambda: True, 1.0, (0.0, 0.0))  # type: ignore[arg-type]  # unused
    assert not nothing.step(more=True)
    assert (nothing.rounds, nothing.events) == (0, [])


def test_schedule_raises_if_a_fault_does_not_end() -> None:
    def forever(cluster: Cluster, dice: random.Random) -> Injection:
        while True:
            yield 0.0

    with pytest.raises(Unavailable, match="something: not over after -1 s; member 2: has ended"):
        schedule(forever, timeout=-1).step(more=True)


def test_schedule_error_names_the_fault() -> None:
    def failing(cluster: Cluster, dice: random.Random) -> Injection:
        refuse()
        yield None
        return ""

    with pytest.raises(Unavailable, match="something: no secondary has caught up"):
        schedule(failing).step(more=True)


# ---- the workload


@pytest.fixture
def start(tmp_path: Path) -> Callable[[str], Workload]:
    """Make the workload of a role; its ledger is in ``tmp_path``."""
    spec = {"seed": 1, "rate": 1e6, "ledger": str(tmp_path / "ledger")}
    return lambda role: Workload({**spec, "name": f"{role}.1", "role": role})


def answered(outcome: str, result: Any = None) -> Call:
    call = Call()
    call.outcome, call.result = outcome, result
    return call


def test_workload_follows_orders_until_the_input_ends(
    start: Callable[[str], Workload], monkeypatch: pytest.MonkeyPatch
) -> None:
    workload, statuses = start("consumer-2"), list[int]()
    orders = '["drain"]\n["storm", 60]\n["hold", 5, 2]\n["stop"]\n'
    monkeypatch.setattr(sys, "stdin", io.StringIO(orders))
    monkeypatch.setattr(os, "_exit", statuses.append)
    workload.follow_orders()
    assert (workload.draining, workload.to_hold) == (True, (5, 2))
    assert workload.stopping.is_set()
    assert 0 < workload.storm_until - time.monotonic() <= 60
    assert statuses == [1]


def test_workload_repeats_an_unknown_push_with_its_ids(start: Callable[[str], Workload]) -> None:
    workload = start("producer-1")
    plan = workload.produce("orders")
    assert next(plan) >= 0  # the pause until it is due
    first = next(plan)
    assert isinstance(first, Step)
    assert first.items
    for _ in range(2):
        assert plan.send(answered("unknown")) == 0.05
        assert next(plan) is first
    other = plan.send(answered("ok"))
    while not isinstance(other, Step):
        other = next(plan)
    assert other.items != first.items
    workload.stopping.set()
    with pytest.raises(StopIteration):
        plan.send(answered("unknown"))


def test_workload_producers_wait_while_a_queue_is_full(start: Callable[[str], Workload]) -> None:
    workload = start("producer-1")
    plan = workload.wait_for_room("events")
    full, room = SimpleNamespace(total=BACKLOG), SimpleNamespace(total=BACKLOG - 1)
    assert (next(plan).method, plan.send(answered("ok", full))) == ("counts", 0.5)
    assert (next(plan).method, plan.send(answered("unknown"))) == ("counts", 0.5)
    assert next(plan).method == "counts"
    with pytest.raises(StopIteration):
        plan.send(answered("ok", room))
    stopped = workload.wait_for_room("events")
    next(stopped)
    assert stopped.send(answered("ok", full)) == 0.5
    workload.stopping.set()
    assert list(stopped) == []


def test_workload_producers_wait_for_the_queues_behind(start: Callable[[str], Workload]) -> None:
    plan = start("producer-1").wait_for_room("orders")
    step, looked = next(plan), []
    while step != 0.5:
        looked.append(step.queue)
        step = plan.send(answered("ok", SimpleNamespace(total=BACKLOG // 4)))
    assert looked == ["orders", "parsed", "billed", "packed"]


def test_workload_raises_the_error_of_a_thread(
    start: Callable[[str], Workload], client: Client
) -> None:
    """The error is raised when the other threads have ended, too."""
    workload = start("consumer-1")
    workload.role = Role("consumer", False, (("failing",), ("going_on",)))
    went_on: list[float] = []

    def going_on() -> Iterator[float]:
        while True:
            went_on.append(0.0)
            yield 0.0

    def failing() -> Iterator[float]:
        eventually(lambda: went_on)
        yield 0.0
        raise ZeroDivisionError

    vars(workload).update(failing=failing, going_on=going_on)
    with pytest.raises(ZeroDivisionError):
        run_blocking(workload, client)
    assert went_on


def results(path: Path) -> Iterator[tuple[str, str, Any]]:
    """Yield the operation, the outcome and the items of each call; all calls must have ended."""
    calls: dict[int, str] = {}
    for what, number, _, *more in ledger.read(path):
        if what == "call":
            calls[number] = more[0]
        else:
            yield calls.pop(number), more[0], more[1]
    assert calls == {}


class CountingLedger(Ledger):
    """A ledger that counts its lines by operation or outcome."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.counted: Counter[str] = Counter()

    def _write(self, line: list[Any]) -> None:
        super()._write(line)
        self.counted[line[3]] += 1


class LongPauses(random.Random):
    """Cancels callers later, so that on any machine some calls end before that."""

    def uniform(self, a: float, b: float) -> float:
        return super().uniform(a, 20 * b)


# PyMongo drops the connection of a cancelled command.
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_cancellation_storm_loses_nothing(
    start: Callable[[str], Workload], tmp_path: Path, url: str
) -> None:
    """Each message that cancelled callers popped was returned to one of them, or is back."""
    workload = start("consumer-2")
    workload.role = Role("consumer", True, ())
    workload.storm_until = time.monotonic() + 60
    workload.dice = LongPauses(1)
    workload.ledger = book = CountingLedger(tmp_path / "ledger")

    async def main() -> None:
        async with AsyncClient(url, namespace="load") as client:
            await client.queue("billed").push_many([{"n": str(n), "trail": []} for n in range(300)])
            storm = asyncio.create_task(AsyncRunner(workload, client).run())
            # Some calls are cancelled, and some callers reserve and commit before that.
            await async_eventually(lambda: book.counted["cancelled"] and book.counted["commit"])
            workload.stopping.set()
            await storm

    asyncio.run(main())
    gc.collect()  # PyMongo warns here of sockets that it left open
    with Client(url, namespace="load") as client:
        left = [str(each.id) for each in client.queue("events").pop_many(100_000, timeout=0)]
    found = list(results(tmp_path / "ledger"))
    pushed = [id for op, outcome, ids in found if (op, outcome) == ("push", "ok") for id in ids]
    popped = [id for op, outcome, ids in found if (op, outcome) == ("pop", "ok") for id in ids]
    assert Counter(popped) + Counter(left) == Counter(pushed)
    assert {outcome for _, outcome, _ in found} <= {"ok", "cancelled", "refused"}


# ---- the ledger


@pytest.mark.parametrize(
    ("error", "hurried", "outcome", "items"),
    [
        (ConfigurationError("bad"), False, "ConfigurationError: bad", "Traceback "),
        (ZeroDivisionError("bad"), False, "ZeroDivisionError: bad", "Traceback "),
        (DuplicateKey("key is taken"), False, "taken", ""),
        (JobFailed("it was buried", reason="dead"), False, "failed", "dead"),
        (TimeoutError(), False, "timeout", ""),
        (Unavailable("no answer"), False, "unknown", "no answer"),
        (Unavailable("no answer", ids=["1"]), True, "late", "no answer"),
        (Unavailable("no", ids=["1", "2"]), False, "Unavailable names 2 ids of 1: no", "no"),
    ],
)
def test_ledger_records_the_outcome_of_an_error(
    tmp_path: Path, error: Exception, hurried: bool, outcome: str, items: str
) -> None:
    book = Ledger(tmp_path / "ledger")

    def call() -> None:
        with book.recorded("push", "states", ["a"], hurried=hurried):
            raise error

    call()
    [found] = results(tmp_path / "ledger")
    assert found[:2] == ("push", outcome)
    assert "".join(found[2]).startswith(items)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_ledger_records_what_is_logged_and_what_ends_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    Ledger(tmp_path / "ledger").record_logged_errors()
    log = logging.getLogger("pyqueue.something")
    log.warning("this happens")
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        log.exception("%d copies were not shown", 2)
    thread = threading.Thread(target=lambda: [][0])
    thread.start()
    thread.join()
    found = [line[3:] for line in ledger.read(tmp_path / "ledger")]
    assert [text for text, _ in found] == [
        "pyqueue.something: 2 copies were not shown",
        "a thread ended: IndexError('list index out of range')",
    ]
    assert all(trace.startswith("Traceback ") for _, trace in found)


def test_ledger_without_its_incomplete_last_line(tmp_path: Path) -> None:
    (tmp_path / "ledger").write_text('["call",1,0.5,"push","orders",["a"]]\n["result",1,0.')
    assert list(ledger.read(tmp_path / "ledger")) == [["call", 1, 0.5, "push", "orders", ["a"]]]
