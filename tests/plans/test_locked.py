"""Claims get past messages that a transaction holds. There is no database: the time is virtual.

A locked message makes a write wait. A write with a limit fails at its limit; a write without one
fails after 29 s, or continues once the message is free.
"""

from __future__ import annotations

import random
from collections.abc import Generator
from itertools import pairwise
from typing import Any

import pytest

from pyqueue.backends.claims.claims import NamedClaims
from pyqueue.backends.options import Options
from pyqueue.backends.queue_plans import plans_of
from pyqueue.backends.scan import ScanState
from pyqueue.backends.transaction_locks import SLOW_SERVER_LIMITS_S, LockedMessages
from pyqueue.errors import InvalidMessage, QueueError, TimedOut, TimeLimitReached, Unavailable
from pyqueue.payloads import Codec
from pyqueue.requests import Command, Find, FindAndModify, Plan, Update, UpdateEach
from pyqueue.runtime.waiters import Waiters
from tests.plans.runner import Runner, after, message, record, standard
from tests.plans.store import Pause, Process, Task, World

#: How long a write without a limit waits for a locked message, in milliseconds.
PATIENCE = 29_000.0
#: How long each write of a slow server takes, and of a very slow one, in milliseconds.
SLOW, VERY_SLOW = 400.0, 4000.0


class Killed(QueueError):
    """The process was killed. No plan catches it."""


class LockingProcess(Process):
    """A client of a server where a transaction holds some messages."""

    def __init__(self, world: World) -> None:
        super().__init__(world, "a")
        self.locked: set[str] = set()
        #: How long each write takes, in milliseconds.
        self.slow = 0.0
        #: Whether reads take as long.
        self.slow_reads = False
        #: The process is killed after this number of requests.
        self.requests_left = 1_000_000
        #: Requests that are done although the server reports a time-out.
        self.late_replies = 0
        #: The writes that met their limit, and when.
        self.timeouts: list[tuple[float, Any]] = []

    def _answer(self, request: Any, slow: float) -> Generator[Pause, None, Any]:
        self.requests_left -= 1
        if self.requests_left < 0:
            raise Killed
        if isinstance(request, Find) and self.slow_reads:
            yield self.world.sleep(self.slow)
        if isinstance(request, (Update, FindAndModify)):
            yield from self._wait_for_locks(request)
            counts = "tries" in (request.update or {}).get("$inc", {})
            if counts and any(isinstance(each["tries"], str) for each in self._met(request)):
                raise InvalidMessage("the server cannot count a try")
        if isinstance(request, UpdateEach) and any(
            each["_id"] in self.locked
            for match, _ in request.pairs
            for each in self.world.store._found(match, None, 0, 1)
        ):
            yield self.world.sleep(1000 * (request.max_time_s or 30.0))
            raise TimedOut("time limit of the client")
        return (yield from super()._answer(request, slow))

    def _wait_for_locks(self, request: Update | FindAndModify) -> Generator[Pause, None, None]:
        limit = PATIENCE if request.server_limit_s is None else 1000 * request.server_limit_s
        world = self.world
        limited = request.server_limit_s is not None
        if self.late_replies and limited and not self._meets_a_lock(request):
            self.late_replies -= 1
            # The server reports the time-out of a write that it has done.
            yield from super()._answer(request, 0)
            raise TimeLimitReached("late")
        if self.slow:
            yield world.sleep(min(self.slow, limit))
            if limit >= self.slow and not self._meets_a_lock(request):
                return
            yield world.sleep(max(0.0, limit - self.slow))
        else:
            for _ in range(10):
                if not self._meets_a_lock(request):
                    return
                yield world.sleep(limit / 10)
        self.commands.append(request)
        self.timeouts.append((world.time, request))
        raise TimeLimitReached("time limit")

    def _meets_a_lock(self, request: Update | FindAndModify) -> bool:
        return any(each["_id"] in self.locked for each in self._met(request))

    def _met(self, request: Update | FindAndModify) -> list[dict[str, Any]]:
        many = isinstance(request, Update) and request.many
        sort = request.sort if isinstance(request, FindAndModify) else None
        return self.world.store._found(request.filter, sort, 0, 0 if many else 1)


class Bench:
    """A queue of messages m000, m001, ... and one client."""

    def __init__(
        self, messages: int, *, locked: int = 0, kind: str = "standard", **options: Any
    ) -> None:
        self.world = World(0)
        self.process = LockingProcess(self.world)
        given = Options(dead_letter="a.dead", **{"lease": 100_000, **options})
        self.queue = plans_of("a", given, owner="me", kind=kind)
        self.names = [f"m{number:03}" for number in range(messages)]
        if messages:
            self.run(self.queue.push(self.names, ids=self.names))
        self.process.locked = set(self.names[:locked])
        self.world.run(self.world.time + 1000)

    @property
    def state(self) -> LockedMessages:
        return self.process.waiters.scan.transaction_locks

    def run(self, plan: Plan[Any], process: Process | None = None) -> Any:
        """Run a plan to its end. Return its result, or raise its error."""
        return self.world.finish((process or self.process).run(plan))

    def receive(self, limit: int = 1, *, timeout: float = 0, **how: Any) -> list[str]:
        plan = self.queue.receive(self.process.waiters, limit, timeout=timeout, **how)
        return [each.id for each in self.run(plan)]

    def drain(self, **how: Any) -> list[str]:
        """Receive one by one until nothing comes for a while."""
        received: list[str] = []
        while got := self.receive(timeout=70, **how):
            received += got
        return received


def receiving(bench: Bench, how: str) -> list[str]:
    if how == "typed pop":
        bench.queue = plans_of("a", bench.queue.options, Codec(str), owner="me")
    return bench.receive(5 if "many" in how else 1, pop="pop" in how)


@pytest.mark.parametrize("how", ["reserve", "reserve_many", "pop_many", "typed pop"])
def test_claim_gets_past_locked_messages(how: str) -> None:
    bench = Bench(30, locked=2)
    began = bench.world.time
    received = receiving(bench, how)
    assert received == bench.names[2 : 2 + len(received)]
    assert len(bench.process.timeouts) == 3  # the claim, and each locked message alone
    assert bench.world.time - began < 600
    assert received + [bench.receive()[0] for _ in range(20)] == bench.names[2 : 22 + len(received)]
    assert len(bench.process.timeouts) == 3


@pytest.mark.parametrize("limit", [{"concurrency": 1}, {"rate": 1, "period": 3600}])
def test_freed_message_starts_with_a_permit_of_its_key(limit: dict[str, Any]) -> None:
    shape = {"limit": {**limit, "per": "headers.t"}}
    bench = Bench(0, shape=shape)
    bench.world.store.documents["~queue:a"] = record(shape=shape)
    for name in ("x1", "x2", "y1", "y2", "z1", "w1"):
        bench.run(bench.queue.push([name], ids=[name], headers={"t": name[0]}))
    bench.world.run(bench.world.time + 1000)
    bench.process.locked = {"x1"}
    assert sorted(bench.receive()[0][0] for _ in range(4)) == list("wxyz")
    bench.process.locked = set()
    bench.run(bench.queue.push(["v1"], ids=["v1"], headers={"t": "v"}))
    bench.world.run(bench.world.time + 5000)
    assert bench.receive() == ["v1"]
    assert bench.receive() == []
    assert bench.state.excluded == {}


def test_repeated_claim_retries_no_message_of_another_key() -> None:
    """Its update has the slot of the message that it chose."""
    shape = {"limit": {"concurrency": 1, "per": "headers.t"}}
    bench = Bench(0, shape=shape)
    bench.world.store.documents["~queue:a"] = record(shape=shape)
    for name in ("x1", "x2"):
        bench.run(bench.queue.push([name], ids=[name], headers={"t": "x"}))
    bench.world.run(bench.world.time + 1000)
    bench.process.locked = {"x1"}
    assert bench.receive() == ["x2"]
    bench.process.locked = set()
    bench.run(bench.queue.push(["v1"], ids=["v1"], headers={"t": "v"}))
    until = bench.state.excluded["x1"].retry_at
    left_ms = (until - bench.process.now()).total_seconds() * 1000
    bench.world.run(bench.world.time + left_ms - 100)
    bench.process.slow = SLOW
    assert bench.receive() == ["v1"]


#: How many messages are locked, and which one is malformed: it is claimed alone, after the page, or
#: with those that were excluded untried.
MALFORMED = {"on the page": (1, 2), "behind the page": (20, 20), "untried": (3, 5)}


@pytest.mark.parametrize("where", MALFORMED)
@pytest.mark.parametrize("how", ["reserve", "reserve_many", "pop_many"])
def test_malformed_message_beside_locked_messages_is_buried(how: str, where: str) -> None:
    locked, place = MALFORMED[where]
    bench = Bench(30, locked=locked)
    malformed = bench.world.store.documents[bench.names[place]]
    bench.world.store._put(malformed | {"tries": "many"})
    received: list[str] = []
    while found := receiving(bench, how) or bench.receive(timeout=70):
        received += found
    assert sorted(received) == bench.names[locked:place] + bench.names[max(locked, place + 1) :]
    assert bench.world.store.documents[bench.names[place]]["q"] == bench.queue.options.dead_letter


@pytest.mark.parametrize("slow", [SLOW, VERY_SLOW])
@pytest.mark.parametrize("how", ["reserve", "reserve_many", "pop_many", "typed pop"])
def test_slow_server_marks_nothing_locked(how: str, slow: float) -> None:
    bench = Bench(30)
    bench.process.slow = slow
    received = receiving(bench, how)
    assert received == bench.names[: len(received)]
    assert bench.state.excluded == {}
    seen = len(bench.process.timeouts)
    assert slow > SLOW or seen <= 6
    assert bench.state.expected(bench.process.now())  # for a minute, whatever the cause was
    assert len(receiving(bench, how)) == len(received)
    assert len(bench.process.timeouts) == seen  # claims have a longer limit for a while, or none


def test_slow_reads_hold_up_no_claim_for_ever() -> None:
    """A try takes longer than the time for which claims have a longer limit."""
    bench = Bench(30)
    bench.process.slow, bench.process.slow_reads = VERY_SLOW, True
    assert bench.receive() == bench.names[:1]
    assert bench.world.time < 120_000


@pytest.mark.parametrize("how", ["reserve", "reserve_many"])
def test_lock_after_a_slow_moment_holds_up_no_claim(how: str) -> None:
    """After a fail-over the server is slow for a moment, and a program may die during it."""
    bench = Bench(30)
    bench.process.slow = SLOW
    received = receiving(bench, how)
    bench.process.slow = 0.0
    bench.process.locked = set(bench.names[len(received) : len(received) + 2])
    began = bench.world.time
    again = receiving(bench, how)
    assert again[0] == bench.names[len(received) + 2]
    assert bench.world.time - began < 3000


@pytest.mark.parametrize("how", ["reserve", "reserve_many"])
def test_locked_messages_on_a_slow_server_hold_up_no_claim(how: str) -> None:
    """No write finishes within the shortest limit. The longer limit tells which messages wait."""
    bench = Bench(30, locked=2)
    bench.process.slow = SLOW
    assert receiving(bench, how)[0] == bench.names[2]
    assert bench.world.time < 6000
    assert set(bench.state.excluded) == set(bench.names[:2])


def test_retries_on_a_slow_server_leave_time_for_other_messages() -> None:
    bench = Bench(200, locked=2)
    bench.process.slow = SLOW
    bench.receive()
    seen, began = len(bench.process.timeouts), bench.world.time
    while bench.world.time - began < 6000:  # as long as claims have a longer limit
        assert bench.receive()
    retries = len(bench.process.timeouts) - seen
    assert 1 <= retries <= 6000 / (5 * 1000 * SLOW_SERVER_LIMITS_S[0])


def test_locked_messages_are_received_once_they_are_free() -> None:
    bench = Bench(8, locked=2)
    assert bench.drain() == bench.names[2:]
    assert set(bench.state.excluded) == set(bench.names[:2])
    bench.process.locked = set()
    assert bench.drain() == bench.names[:2]
    assert bench.state.excluded == {}
    assert bench.process.waiters.scan.lower_bound is not None


def test_long_row_of_locked_messages_skips_the_page() -> None:
    bench = Bench(60, locked=15)
    first = bench.receive()
    assert first == [bench.names[20]]  # behind the page
    assert len(bench.process.timeouts) == 4
    for _ in range(10):  # one of the rest is tried while the consumer continues
        bench.receive()
    assert len(bench.process.timeouts) == 5
    assert len(bench.drain()) == 34
    bench.process.locked = set()
    held = [each["_id"] for each in bench.world.store.documents.values() if "token" in each]
    assert sorted([*held, *bench.drain()]) == bench.names


#: Queues whose claims choose messages from a page: their options, and how long a message may wait,
#: in seconds. The first claim of several messages with slots times out after 2 s.
CHOOSING: dict[str, tuple[dict[str, Any], float]] = {
    "ordered": ({}, 3),
    "ordered, limited": ({"limit": {"concurrency": 50}}, 5),
    "limited": ({"limit": {"concurrency": 50}}, 4),
    "with a rate": ({"limit": {"rate": 50, "burst": 50}}, 3),
    "limited per key": ({"limit": {"concurrency": 50, "per": "headers.t"}}, 4),
}


@pytest.mark.parametrize("how", CHOOSING)
def test_untried_messages_are_received_while_others_stay_locked(how: str) -> None:
    """No other message is free, so nothing but the pause of the excluded messages leads here."""
    kind = "ordered" if "ordered" in how else "standard"
    shape, patience = CHOOSING[how]
    bench = Bench(0, kind=kind, shape=shape)
    bench.world.store.documents["~queue:a"] = record(kind, shape=shape)
    bench.names = [f"m{number:03}" for number in range(12)]

    def push(name: str) -> None:
        groups: dict[str, Any] = {"groups": [name]} if kind == "ordered" else {}
        bench.run(bench.queue.push([name], ids=[name], headers={"t": name}, **groups))

    def receive(names: list[str], seconds: float = patience) -> None:
        received: list[str] = []
        until = bench.world.time + 1000 * seconds
        while len(received) < len(names) and bench.world.time < until:
            received += bench.receive(10, timeout=0.5)
        assert sorted(received) == names

    for name in bench.names:
        push(name)
    bench.world.run(bench.world.time + 1000)
    bench.process.locked = set(bench.names[:5])
    receive(bench.names[5:])
    for number in range(30):
        push(f"n{number}")
        receive([f"n{number}"])
        bench.world.run(bench.world.time + 300)
    bench.process.locked = set()
    receive(bench.names[:5], 70)


def test_keys_with_a_rate_are_received_past_locked_messages() -> None:
    """For a minute after a time-out, also of a slow server.

    A scan asks for the permits of all keys. When it then claimed one message and gave the other
    permits back, messages of 200 keys waited for 80 s on a busy machine.
    """
    shape = {"limit": {"rate": 2, "burst": 2, "per": "headers.t"}}
    bench = Bench(0, shape=shape)
    bench.world.store.documents["~queue:a"] = record(shape=shape)
    bench.names = [f"m{number:03}" for number in range(50)]
    for name in bench.names:
        bench.run(bench.queue.push([name], ids=[name], headers={"t": name}))
    bench.world.run(bench.world.time + 1000)
    bench.process.waiters.scan.transaction_locks.on_time_limit(bench.process.now())
    bench.process.slow = 100.0
    began = bench.world.time
    received: list[str] = []
    while len(received) < 50 and bench.world.time < began + 60_000:
        received += bench.receive(50, timeout=0.5)
    assert sorted(received) == bench.names
    assert bench.world.time - began < 1000, "one by one takes 7 s"


def test_blocked_claim_of_several_is_not_repeated_at_once() -> None:
    """It waits until its time limit, so the next ones claim one by one for four times as long."""
    random.seed(1)  # with one draw in a hundred, the second receive takes half a second longer
    shape = {"limit": {"concurrency": 3, "per": "headers.t"}}
    bench = Bench(0, shape=shape)
    bench.world.store.documents["~queue:a"] = record(shape=shape)
    bench.names = [f"m{number:03}" for number in range(50)]
    for name in bench.names:
        bench.run(bench.queue.push([name], ids=[name], headers={"t": name}))
    bench.world.run(bench.world.time + 1000)
    received: list[str] = []
    seconds: list[float] = []
    for locked in (["m000"], bench.names[::2]):
        bench.process.locked |= set(locked)
        began = bench.world.time
        received += bench.receive(8, timeout=0.5)
        seconds.append((bench.world.time - began) / 1000)
    assert seconds[0] > 2 > seconds[1]


def test_queue_of_locked_messages_seems_empty_and_continues() -> None:
    bench = Bench(50, locked=50)
    assert bench.receive() == []
    assert bench.world.time < 10_000
    bench.run(bench.queue.push(["new"], ids=["new"]))
    began = bench.world.time
    assert bench.receive() == ["new"]
    assert bench.world.time - began < 500


def test_claim_moves_the_start_up_to_a_locked_message() -> None:
    bench = Bench(0)
    for number in range(5):
        bench.run(bench.queue.push([number], ids=[f"n{number}"]))
        bench.world.run(bench.world.time + 1000)
    bench.process.locked = {"n2"}
    place = bench.world.store.documents["n2"]["when"]
    assert [bench.receive()[0] for _ in range(4)] == ["n0", "n1", "n3", "n4"]
    assert bench.receive() == []
    bound = bench.process.waiters.scan.lower_bound
    assert bound is not None
    assert bound[0] <= place
    assert bench.process.waiters.scan.due is not None  # the retry


def test_waiting_consumer_retries_a_locked_message() -> None:
    bench = Bench(1, locked=1)
    bench.world.spawn(unlocking(bench), bench.world.time + 500)
    began = bench.world.time
    assert bench.receive(timeout=60) == bench.names
    assert bench.world.time - began < 2000


def unlocking(bench: Bench) -> Task:
    bench.process.locked = set()
    yield from ()


def test_pauses_between_retries_double_up_to_a_minute() -> None:
    bench = Bench(1, locked=1)
    assert bench.receive(timeout=250) == []
    tries = [
        time
        for time, each in bench.process.timeouts
        if isinstance(each, Update) and each.filter["_id"] == {"$in": bench.names}
    ]
    pauses = [round((after - before) / 1000) for before, after in pairwise(tries)]
    assert pauses[:8] == [1, 2, 4, 8, 16, 32, 60, 60]


def test_locked_message_that_was_settled_is_forgotten() -> None:
    bench = Bench(3, locked=1)
    assert bench.receive() == [bench.names[1]]
    del bench.world.store.documents[bench.names[0]]
    bench.process.locked = set()
    assert bench.drain() == [bench.names[2]]
    assert bench.state.excluded == {}


def test_deleting_pop_has_no_limit_and_then_claims_first() -> None:
    """The server might report a time-out after the message was deleted."""
    bench = Bench(30, locked=1)
    with pytest.raises(Unavailable):
        bench.receive(pop=True)
    (_, command), *_ = bench.process.timeouts
    assert (command.update, command.server_limit_s) == (None, None)
    began = bench.world.time
    assert bench.receive(pop=True) == [bench.names[1]]
    assert bench.world.time - began < 600


def test_reserve_that_timed_out_makes_pops_claim() -> None:
    bench = Bench(30, locked=1)
    bench.receive()
    assert bench.receive(pop=True) == [bench.names[2]]
    bench.process.locked = set()
    bench.drain()
    bench.world.run(bench.world.time + 61_000)
    bench.run(bench.queue.push(["new"], ids=["new"]))
    bench.process.commands.clear()
    assert bench.receive(pop=True) == ["new"]
    (take,) = (each for each in bench.process.commands if isinstance(each, FindAndModify))
    assert take.update is None


@pytest.mark.parametrize("limit", [1, 5])
def test_time_limit_after_the_write_keeps_the_claim(limit: int) -> None:
    bench = Bench(5)
    bench.process.late_replies = 1
    assert bench.receive(limit) == bench.names[:limit]
    assert bench.state.excluded == {}
    held = [each for each in bench.world.store.documents.values() if "token" in each]
    assert len(held) == limit


@pytest.mark.parametrize("how", ["reserve", "reserve_many", "pop_many", "typed pop"])
@pytest.mark.parametrize("late", [1, 3])
def test_time_limits_after_writes_claim_no_surplus(how: str, late: int) -> None:
    """Claims one by one, whose replies are time-outs, are not in the number that the plan knows."""
    bench = Bench(30, locked=1)
    bench.process.late_replies = late
    received = receiving(bench, how)
    assert len(received) == (5 if "many" in how else 1)
    bench.process.locked = set()
    seconds = bench.world.time
    assert sorted(received + bench.drain(pop=True)) == bench.names
    assert bench.world.time - seconds < 90_000  # no lease of 100 000 s had to end


@pytest.mark.parametrize(("limit", "locked"), [(1, 2), (5, 2), (1, 6), (5, 30)])
def test_interrupted_claim_loses_nothing(limit: int, locked: int) -> None:
    """It is killed before each of its requests in turn. Its messages return when leases end."""
    requests = 0
    killed = True
    while killed:
        bench = Bench(30, locked=locked, lease=30)
        bench.process.requests_left = requests = requests + 1
        try:
            bench.receive(limit)
            killed = False
        except Killed:
            pass
        bench.process.locked = set()
        bench.world.run(bench.world.time + 31_000)
        others = Process(bench.world, "a")
        received = bench.run(bench.queue.receive(others.waiters, 50, timeout=0, pop=True), others)
        assert sorted(each.id for each in received) == bench.names
    assert requests > 12


def test_named_claim_waits_for_one_time_limit() -> None:
    bench = Bench(5, locked=1)
    began = bench.world.time
    with pytest.raises(Unavailable):
        bench.run(NamedClaims(bench.queue, "g").begin(5, 60))
    assert bench.world.time - began < 1.1 * PATIENCE
    bench.process.locked = set()
    assert bench.run(NamedClaims(bench.queue, "g").begin(5, 60))[2] == bench.names


def test_clock_that_is_set_back_ends_each_pause() -> None:
    scan = ScanState()
    scan.transaction_locks.exclude(after(3600), [{"_id": "m", "when": after(0)}], [])
    scan.transaction_locks.on_slow_server(after(3600), after(3600))
    scan.transaction_locks.on_time_limit(after(3600))
    assert scan.transaction_locks.to_retry(after(3600)) is None
    assert scan.transaction_locks.to_retry(after(0)) is not None
    assert scan.transaction_locks.limit_s(after(0)) == 0.15
    scan.transaction_locks.forget("m")
    assert not scan.transaction_locks.expected(after(0))


def test_claim_is_repeated_after_a_network_error() -> None:
    """The driver does not repeat a command with a limit. The token shows that nothing was done."""
    runner = Runner(
        [{"paused": False}],
        Unavailable("not primary"),
        [],
        lambda command: message("m1", tries=1) | command.update["$set"],
    )
    (held,) = runner.run(standard().receive(Waiters("t"), 1, timeout=0))
    _, first, find, again = runner.commands
    assert (first.server_limit_s, again.server_limit_s) == (0.15, 0.15)
    assert find.filter["token"] == again.update["$set"]["token"] == held.token


def test_limits_are_the_servers_and_only_on_claims() -> None:
    bench = Bench(5)
    bench.receive()
    bench.receive(3)
    bench.receive(pop=True)
    limited = [
        each
        for each in bench.process.commands
        if isinstance(each, Command) and each.server_limit_s is not None
    ]
    assert [type(each) for each in limited] == [FindAndModify, Update]
    assert {each.server_limit_s for each in limited} == {0.15}
    assert all(each.w1 and each.max_time_s == 29 for each in limited)
