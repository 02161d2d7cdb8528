"""A scan that starts at a lower bound hides no message for long. There is no database.

Real plans run in virtual time, and a model watches them. The model knows the stored messages and
the time since when each may be claimed. It checks every scan and every change:

- Every scan sees the messages that were stored on time, in order.
- An idle process finds a message below the lower bound within 1 s.
- A process with a backlog finds it within 5 s.
- Both limits grow by the time that the queue was quiet before, up to the fallback poll.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pytest
from bson import ObjectId
from hypothesis import given, settings
from hypothesis import strategies as st

from pyqueue.backends import scan as rules
from pyqueue.backends import transitions
from pyqueue.backends.kind import ScanStart
from pyqueue.backends.options import Options
from pyqueue.backends.queue_plans import QueuePlans, plans_of
from pyqueue.backends.scan import Scanned, ScanState
from pyqueue.errors import LeaseLost
from pyqueue.messages import Backoff, Reservation
from pyqueue.requests import Find, FindAndModify
from tests.plans.runner import NOW, after
from tests.plans.store import Process, Task, World, instant, millis, place

# All times are in milliseconds of virtual time.
POLL, BACKLOG, LIVELY = 15_000.0, 5_000.0, 1_000.0
#: How much the commands, the work and the steps of the checks add to a limit.
TOLERANCE = 300.0
STEP = 100.0
#: A message is on time if it is stored within this time after its ``when``. The clocks of
#: processes differ by no more than this.
RACE, SKEW = 400.0, 40.0


class PromiseBroken(AssertionError):
    """A promise was not kept."""


@dataclass(frozen=True, slots=True)
class Push:
    """A push.

    ``slow``: how long the insert takes to arrive, as in a slow transaction. ``delay`` and ``past``
    belong to the messages.
    """

    at: float
    process: int = 0
    count: int = 1
    slow: float = 0
    delay: float = 0
    past: float | None = None
    key: str | None = None
    strs: bool = False


@dataclass(frozen=True, slots=True)
class Consumer:
    """Receives again and again, and settles in these ways in turn.

    ``rest``: the pause between two receives.
    """

    process: int = 0
    limit: int = 1
    timeout: float | None = None
    ends: tuple[str, ...] = ("commit",)
    rest: float = 0
    lease: float = 30_000
    pop: bool = False
    begins: float = 0


def backend(queue: str = "a") -> QueuePlans:
    return plans_of(
        queue,
        Options(
            dead_letter=f"{queue}.dead", max_tries=None, poll=POLL / 1000, backoff=Backoff(jitter=0)
        ),
    )


class Model:
    """A world, the operations in it, and the checks."""

    def __init__(
        self,
        *consumers: Consumer,
        pushes: list[Push] | tuple[Push, ...] = (),
        redrives: list[float] | tuple[float, ...] = (),
        processes: int = 1,
        seed: int = 0,
        fault_rates: tuple[float, float, float] = (0, 0, 0),
        scan: type[ScanState] = ScanState,
    ) -> None:
        self.world = World(seed, lost=fault_rates[0], doubled=fault_rates[1], late=fault_rates[2])
        self.random = self.world.random
        self.queue, self.dead_letters = backend(), backend("a.dead")
        self.processes = [
            Process(self.world, "a", skew=self._skew(processes), scan=scan)
            for _ in range(processes)
        ]
        #: Messages that a scan may skip: they were stored late, or given back.
        self.late: set[Any] = set()
        self.pushed: set[Any] = set()
        self.delivered: list[Any] = []
        self.tokens: set[tuple[Any, str]] = set()
        self.finished: set[Any] = set()
        #: For each process that consumes: the times of its scans, the times of its empty scans,
        #: and the
        #: longest pause between its receives.
        self.scans: dict[Process, list[float]] = {}
        self.empty: dict[Process, list[float]] = {}
        #: Since when the last scans of each process have skipped a message.
        self.passed: dict[Process, dict[Any, float]] = {}
        self.away: dict[Process, float] = {}
        self.begins: dict[Process, float] = {}
        self.world.store.on_scan, self.world.store.on_change = self._scanned, self._changed
        for each in consumers:
            process = self.processes[each.process]
            self.scans[process], self.empty[process], self.passed[process] = [], [], {}
            self.away[process] = max(self.away.get(process, 0), each.rest)
            self.begins[process] = max(self.begins.get(process, 0), each.begins)
            self.world.spawn(self._consume(process, each), each.begins)
        for push in pushes:
            self.world.spawn(self._push(self.processes[push.process], push), push.at)
        for at in redrives:
            self.world.spawn(self._run(self.processes[0], self.dead_letters.redrive), at)

    def _skew(self, processes: int) -> float:
        return self.random.uniform(-SKEW, SKEW) if processes > 1 else 0

    # ---- events

    def _run(self, process: Process, plan: Callable[[], Any]) -> Task:
        yield from process.run(plan())

    def _push(self, process: Process, push: Push) -> Task:
        ids: list[Any] = [f"{self.random.getrandbits(96):024x}" for _ in range(push.count)]
        if not push.strs:
            ids = [ObjectId(id) for id in ids]
        if push.slow > RACE:
            self.late.update(ids)
        past = None if push.past is None else instant(self.world.time - push.past)
        keys = None if push.key is None else [push.key] * push.count
        plan = self.queue.push(
            range(push.count),
            delay=push.delay / 1000 if past is None else None,
            at=past,
            keys=keys,
            ids=None if keys else ids,
            on_duplicate="replace" if keys else "ignore",
        )
        if keys is None:
            self.pushed.update(ids)
        answered = yield from process.run(plan, slow=push.slow)
        self.pushed.update(answered)

    def _consume(self, process: Process, consumer: Consumer) -> Task:
        turn = 0
        timeout = None if consumer.timeout is None else consumer.timeout / 1000
        lease = None if consumer.pop else consumer.lease / 1000
        while True:
            plan = self.queue.receive(
                process.waiters, consumer.limit, timeout=timeout, pop=consumer.pop, lease=lease
            )
            given = yield from process.run(plan)
            if given:
                process.active_at.append(self.world.time)
            for each in given:
                self._deliver(each)
            for each in given if not consumer.pop else ():
                yield self.world.sleep(self.random.uniform(0, 5))
                yield from self._settle(process, each, consumer.ends[turn % len(consumer.ends)])
                turn += 1
            yield self.world.sleep(consumer.rest)

    def _deliver(self, each: Any) -> None:
        if each.id in self.finished:
            raise PromiseBroken(f"{each.id} came again after it was finished")
        self.delivered.append(each.id)
        self.late.add(each.id)  # whatever happens next, it returns below the lower bound
        if not isinstance(each, Reservation):
            self.finished.add(each.id)
        elif (each.id, each.token) in self.tokens:
            raise PromiseBroken(f"{each.id} came twice by one claim")
        else:
            self.tokens.add((each.id, each.token))

    def _settle(self, process: Process, each: Reservation[Any], how: str) -> Task:
        if how == "abandon":
            return
        plans: dict[str, Callable[[], Any]] = {
            "commit": lambda: self.queue.commit((each,)),
            "rollback": lambda: self.queue.rollback((each,), delay=0),
            "later": lambda: self.queue.rollback((each,), delay=0.7),
            "release": lambda: self.queue.release((each,)),
            "extend": lambda: self.queue.extend((each,), lease=1),
            "bury": lambda: self.queue.bury((each,)),
        }
        try:
            yield from process.run(plans[how]())
        except LeaseLost:
            if each.key is None and each.until > instant(self.world.time + 2 * SKEW):
                raise PromiseBroken(f"{each.id} was lost under a live lease") from None
        else:
            if how == "commit":
                self.finished.add(each.id)

    # ---- invariants

    def _changed(self, before: dict[str, Any], now: dict[str, Any] | None) -> None:
        """Check that no claim takes a message under a live lease."""
        if now is None or "token" not in now or before.get("token") in (None, now["token"]):
            return
        if before["when"] > instant(self.world.time + 2 * SKEW):
            raise PromiseBroken(f"{before['_id']} was claimed under a live lease")

    def _scanned(
        self, process: Process, request: Find | FindAndModify, found: list[dict[str, Any]]
    ) -> None:
        """Check that the scan skipped no message that was stored on time.

        Record since when it skips messages that were stored late, or given back.
        """
        branch = request.filter.get("$or", [request.filter])[-1]
        if branch.get("q") != "a" or (isinstance(request, Find) and request.skip):
            return
        time, scans, before = self.world.time, self.scans[process], self.passed[process]
        limit = request.limit if isinstance(request, Find) else 1
        last = place(found[-1]) if len(found) == limit else None
        seen = {each["_id"] for each in found}
        passed = self.passed[process] = {}
        for since, document in self.world.store.ready("a"):
            id = document["_id"]
            if (
                document["when"] > branch["when"]["$lte"]
                or id in seen
                or (last is not None and place(document) > last)
            ):
                continue
            if id not in self.late and "key" not in document:
                raise PromiseBroken(
                    f"{id} of {millis(document['when']):.0f} was passed over at {time:.0f}"
                )
            passed[id] = before.get(id, since if not scans or since > scans[-1] else time)
        scans.append(time)
        if not found:
            self.empty[process].append(time)

    def run(self, seconds: float) -> None:
        """Advance the time and run the checks."""
        end = self.world.time + 1000 * seconds
        while self.world.time < end:
            self.world.run(self.world.time + STEP)
            self._check()
        stored = self.world.store.documents
        if lost := [id for id in self.pushed if id not in self.finished and id not in stored]:
            raise PromiseBroken(f"lost: {lost}")

    def _check(self) -> None:
        """Check that no process hides a message for longer than its limit."""
        time = self.world.time
        for since, document in self.world.store.ready("a"):
            if time - since <= LIVELY + TOLERANCE:
                continue
            for process, scans in self.scans.items():
                hidden = self.passed[process].get(document["_id"])
                if hidden is None and (not scans or scans[-1] <= since):
                    hidden = since  # it has not been scanned
                begin = max(hidden or time, self.begins[process])
                if (
                    time - begin > LIVELY + TOLERANCE
                    and time - begin > self._limit(process, begin) + TOLERANCE
                ):
                    raise PromiseBroken(
                        f"{document['_id']} is hidden for {time - begin:.0f} ms at {time:.0f}"
                    )

    def _limit(self, process: Process, since: float) -> float:
        """Return how long a process may take to find a message below its lower bound."""
        empty, scans = self.empty[process], self.scans[process]
        first, before = bisect_left(empty, since), bisect_right(scans, since) - 1
        if before < 0 or (first and empty[first - 1] >= scans[before]):  # it was idle
            active_at = process.active_at[max(0, bisect_right(process.active_at, since) - 1)]
            limit = min(POLL, LIVELY + since - active_at)
        else:
            limit = min(BACKLOG, empty[first] - since + LIVELY) if first < len(empty) else BACKLOG
        return limit + self.away[process]


# ---- random scenarios

ENDS = ["commit", "commit", "commit", "rollback", "later", "release", "abandon", "extend", "bury"]
FAULT_RATES = [(0.0, 0.0, 0.0), (1.0, 0.0, 0.0), (0.3, 0.3, 0.3)]


@st.composite
def scenarios(draw: st.DrawFn) -> dict[str, Any]:
    """Generate processes that push and consume, with failures."""
    processes = draw(st.integers(1, 3))
    which = st.integers(0, processes - 1)
    consumers = draw(
        st.lists(
            st.builds(
                Consumer,
                process=which,
                limit=st.sampled_from([1, 1, 3, 20]),
                timeout=st.sampled_from([None, None, 0.0, 700.0]),
                ends=st.lists(st.sampled_from(ENDS), min_size=1, max_size=5).map(tuple),
                rest=st.sampled_from([0.0, 0.0, 50.0, 3_000.0]),
                lease=st.sampled_from([500.0, 3_000.0, 30_000.0]),
                pop=st.sampled_from([False, False, False, True]),
                begins=st.sampled_from([0.0, 0.0, 4_000.0]),
            ).filter(lambda each: each.timeout != 0 or each.rest > 0),
            min_size=1,
            max_size=4,
        )
    )
    pushes = draw(
        st.lists(
            st.builds(
                Push,
                at=st.integers(0, 8_000).map(float),
                process=which,
                count=st.sampled_from([1, 1, 1, 5, 25]),
                slow=st.sampled_from([0.0, 0.0, 150.0, RACE, 2_000.0, 6_000.0]),
                delay=st.sampled_from([0.0, 0.0, 0.0, 300.0, 2_500.0]),
                past=st.sampled_from([None, None, 60_000.0]),
                key=st.sampled_from([None, None, None, "k"]),
                strs=st.booleans(),
            ),
            min_size=1,
            max_size=12,
        )
    )
    return {
        "consumers": consumers,
        "pushes": [
            each if each.key is None else Push(each.at, each.process, key=each.key)
            for each in pushes
        ],
        "redrives": draw(st.lists(st.integers(3_000, 14_000).map(float), max_size=2)),
        "processes": processes,
        "seed": draw(st.integers(0, 2**16)),
        "fault_rates": draw(st.sampled_from(FAULT_RATES)),
    }


def play(scenario: dict[str, Any], scan: type[ScanState] = ScanState) -> None:
    model = Model(
        *scenario["consumers"],
        **{name: it for name, it in scenario.items() if name != "consumers"},
        scan=scan,
    )
    model.run(28)


@given(scenarios())
@settings(max_examples=20)
def test_no_message_is_hidden_lost_or_received_twice(scenario: dict[str, Any]) -> None:
    play(scenario)


@pytest.mark.slow
@given(scenarios())
@settings(max_examples=1500, derandomize=False, print_blob=True)
def test_no_message_is_hidden_or_lost_in_the_long_run(scenario: dict[str, Any]) -> None:
    play(scenario)


# ---- the purpose of each rule: without it, the model fails


class NoRescan(ScanState):
    """Rescans once only."""

    def scanned(self, *seen: Any) -> None:
        super().scanned(*seen)
        self.rescan_at = after(10_000)


class NoMoveBack(ScanState):
    """Never moves its start back for an announced message."""

    def move_start_back(self, when: datetime) -> None:
        pass


#: A push of another process lands two seconds late, and its signal is lost.
LATE: dict[str, Any] = {
    "pushes": [Push(1_000, process=1, slow=2_000)],
    "processes": 2,
    "fault_rates": (1, 0, 0),
}


def test_late_message_is_found_by_a_rescan() -> None:
    model = Model(Consumer(), **LATE)
    model.run(20)
    assert model.delivered
    model = Model(Consumer(), scan=NoRescan, **LATE)
    with pytest.raises(PromiseBroken, match="is hidden"):
        model.run(20)


def test_expired_lease_of_another_process_is_found() -> None:
    dies = Consumer(ends=("abandon",), lease=2_000, rest=100_000, begins=100)
    model = Model(
        dies, Consumer(process=1, begins=500), pushes=[Push(0)], processes=2, fault_rates=(1, 0, 0)
    )
    model.run(3.3)
    assert len(model.delivered) == 2


def test_signal_moves_the_scan_start_back() -> None:
    scan = ScanState()
    scan.scanned(Scanned(None, NOW, NOW, None, True), 15)
    assert scan.start(after(0.5)) == (NOW - rules.SLACK, None)
    scan.on_signal(after(-60))
    assert scan.start(after(0.5)) == (after(-60), None)
    scan.scanned(Scanned((after(-60), None), after(0.5), after(0.5), None, True), 15)
    scan.wake_at(after(0.6))
    assert scan.start(after(0.55)) == (after(0), None)
    scan.scanned(
        Scanned((after(0), None), after(3), after(3), (after(2.9), "m1"), True), 15
    )  # its end was not expected
    scan.rescan_at = after(10)
    assert scan.start(after(4)) == (after(0.6), None)


def test_scan_further_ahead_keeps_the_lower_bound() -> None:
    scan = ScanState(lower_bound=(NOW, "m1"), rescan_at=after(5))
    scan.scanned(Scanned((NOW, "m1"), after(1), after(1), None, False), 15)
    assert scan.lower_bound == (NOW, "m1")


def test_scan_start_includes_a_whole_millisecond() -> None:
    """The ids within one millisecond say nothing about which message came first."""
    scan = ScanState(lower_bound=(NOW, "m5"), rescan_at=after(5))
    scan.move_start_back(NOW)
    assert scan.start(NOW) == (NOW, None)
    scan.scanned(Scanned((NOW, None), NOW + rules.SLACK, NOW + rules.SLACK, (NOW, "m5"), True), 15)
    assert scan.start(NOW) == (NOW, None)
    scan.scanned(
        Scanned((NOW, None), NOW + 2 * rules.SLACK, NOW + 2 * rules.SLACK, (NOW, "m5"), True), 15
    )
    assert scan.lower_bound == (NOW, "m5")


def test_racing_producers_need_no_rescan(monkeypatch: pytest.MonkeyPatch) -> None:
    pushes = [Push(at, process=1, slow=at % 7 * RACE / 6) for at in range(500, 3_000, 37)]
    scenario: dict[str, Any] = {
        "pushes": pushes,
        "processes": 2,
        "fault_rates": (1, 0, 0),
        "scan": NoRescan,
    }
    Model(Consumer(limit=3, timeout=0, rest=20), **scenario).run(5)
    monkeypatch.setattr(rules, "SLACK", rules.SLACK * 0)
    with pytest.raises(PromiseBroken, match="was passed over"):
        Model(Consumer(limit=3, timeout=0, rest=20), **scenario).run(5)


def test_burst_with_one_when_and_two_id_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lower bound is a pair, and ``$gt`` compares values of one type only."""
    pushes = [Push(0, count=30, strs=strs, delay=1) for strs in (True, False)]
    model = Model(Consumer(rest=40), pushes=pushes, scan=NoRescan)
    model.run(4)
    assert len(model.delivered) == 60
    plain: Any = transitions.claimable

    def claimable(queue: str, now: datetime, start: ScanStart | None) -> dict[str, Any]:
        match: dict[str, Any] = plain(queue, now, start)
        return match | {"$or": match["$or"][:1] + match["$or"][-1:]} if "$or" in match else match

    monkeypatch.setattr(transitions, "claimable", claimable)
    with pytest.raises(PromiseBroken, match="was passed over"):
        Model(Consumer(rest=40), pushes=pushes, scan=NoRescan).run(4)


def test_late_message_in_a_backlog_is_found_in_five_seconds() -> None:
    """Several processes take messages from each other, so each scans further ahead."""
    pushes = [Push(0, count=25) for _ in range(50)] + [
        Push(2_000.0 + at, slow=2_000) for at in range(0, 3_000, 500)
    ]
    consumers = [Consumer(process=which, limit=10) for which in range(3)]
    model = Model(*consumers, pushes=pushes, processes=3, fault_rates=(1, 0, 0))
    model.run(12)
    with pytest.raises(PromiseBroken, match="is hidden"):
        Model(*consumers, pushes=pushes, processes=3, fault_rates=(1, 0, 0), scan=NoRescan).run(12)


def test_client_that_was_away_rescans() -> None:
    away = Consumer(process=0, timeout=0, rest=8_000)
    model = Model(
        away, pushes=[Push(4_000, process=1, slow=2_500)], processes=2, fault_rates=(1, 0, 0)
    )
    model.run(9)
    assert len(model.delivered) == 1


# ---- the time of the next rescan


@pytest.mark.parametrize(
    ("rescanned", "before", "took", "found", "ended", "next_"),
    [
        (True, None, 0, True, False, 5),  # it has a backlog
        (True, None, 0, True, True, 1),
        (True, None, 0, False, True, 1),
        (True, 0, 0, False, True, 1),
        (True, None, 0.1, True, False, 5.1),
        (True, None, 1, True, False, 6),  # one slow rescan may be a stall
        (True, 4, 0, False, True, 4),  # another scan was a rescan in between
        (False, 9, 0, False, True, 1),  # the queue becomes quiet
        (False, 0.5, 0, False, True, 0.5),
        (False, 9, 0, True, True, 9),
        (False, None, 0, False, True, None),  # a signal was missed in between: rescan at once
    ],
)
def test_time_of_the_next_rescan(
    rescanned: bool,
    before: float | None,
    took: float,
    found: bool,
    ended: bool,
    next_: float | None,
) -> None:
    scan = ScanState(lower_bound=(NOW, "m0"), rescan_at=None if before is None else after(before))
    last: ScanStart | None = (after(-0.1), "m1") if found else None
    scan.scanned(Scanned(None if rescanned else (NOW, "m0"), NOW, after(took), last, ended), 15)
    assert scan.rescan_at == (None if next_ is None else after(next_))


def test_rescans_back_off_until_a_message_arrives() -> None:
    scan = ScanState()
    rests = []
    at = 0.0
    for found in (False, False, False, True, False, False, False, False, False, False):
        scan.scanned(
            Scanned(None, after(at), after(at), (after(at), "m1") if found else None, True), 15
        )
        assert scan.rescan_at is not None
        rests.append((scan.rescan_at - after(at)).total_seconds())
        at += rests[-1]
    assert rests == [1, 2, 4, 1, 1, 2, 4, 8, 15, 15]
    for tell in (scan.on_missed_signals, lambda: scan.on_signal(after(at))):
        tell()
        scan.rescan_at = None
        scan.scanned(Scanned(None, after(at), after(at), None, True), 15)
        assert scan.rescan_at == after(at + 1)
    short = ScanState()
    for _ in range(3):
        short.scanned(Scanned(None, after(at), after(at), None, True), 0.1)
        assert short.rescan_at is not None
        assert (short.rescan_at - after(at)).total_seconds() == 1
        short.rescan_at = None


@pytest.mark.parametrize(
    ("durations", "rest"),
    [
        ((0.2,) * 4, 10),  # a slow rescan is not repeated soon
        ((1, 0.2, 1, 1), 10),
        ((0.01, 1), 2),  # a stall says nothing about the scan
        ((1, 1), 2),
        ((1, 1, 1), 4),
        ((0.01, 1, 3600, 1), 8),
        ((2,) * 4, 60),  # messages without a signal wait for this rescan
        ((60,) * 5, 60),
    ],
)
def test_rest_after_rescans_is_measured_and_bounded(
    durations: tuple[float, ...], rest: float
) -> None:
    scan, at = ScanState(), 0.0
    for took in durations:
        scan.rescan_at = None
        scan.scanned(Scanned(None, after(at), after(at + took), None, True), 15)
        at += took
    assert scan.rescan_at == after(at + rest)


# ---- forgetting


def learnt() -> ScanState:
    """Return the state of a process that has just scanned an empty queue."""
    scan = ScanState()
    scan.observe(NOW)
    scan.flag_read = NOW
    scan.start(NOW)
    scan.scanned(Scanned(None, NOW, after(0.01), None, True), 15)
    scan.wake_at(after(600))
    scan.due_known, scan.due_read = True, after(0.01)
    return scan


def test_forgotten_bounds_lead_to_a_rescan() -> None:
    scan = learnt()
    assert scan.start(after(0.5)) is not None
    scan.forget()
    assert scan.start(after(0.5)) in (None, (rules.FIRST, None))
    assert (scan.due, scan.due_known, scan.due_read, scan.flag_read) == (None, False, None, None)


def test_scan_state_is_forgotten_when_the_clock_is_set_back() -> None:
    scan = learnt()
    scan.observe(after(-0.9))  # small differences between threads are no step
    scan.observe(after(0.1))
    read = scan.flag_read
    assert read == NOW
    assert scan.start(after(0.5)) is not None
    scan.observe(after(-3600))
    assert scan.flag_read is None
    assert scan.start(after(-3600)) in (None, (rules.FIRST, None))
    assert scan.due is None


def test_scan_during_a_step_back_sets_no_bound() -> None:
    """Its instant is ahead of all messages that are pushed from now on."""
    scan = learnt()
    start = scan.start(after(0.5))
    scan.observe(after(-3600))
    scan.start(after(-3600))  # another thread scans
    scan.scanned(Scanned(start, after(0.5), after(-3600), None, True), 15)
    assert scan.start(after(-3599)) in (None, (rules.FIRST, None))


@pytest.mark.parametrize(
    ("took", "found", "wanted"), [(0.002, False, True), (0.0019, False, False), (1, True, False)]
)
def test_sentinel_is_wanted_after_a_slow_empty_scan(took: float, found: bool, wanted: bool) -> None:
    scan = ScanState()
    scan.scanned(Scanned(None, NOW, after(took), (NOW, "m1") if found else None, True), 15)
    assert scan.sentinel.is_due(after(1)) == wanted
    assert scan.sentinel.is_due(after(took + 299.9)) == wanted
    assert not scan.sentinel.is_due(after(took + 300))
    scan.sentinel.at = after(10)
    assert not scan.sentinel.is_due(after(9))
    assert scan.sentinel.is_due(after(9.1)) == wanted


def test_due_message_is_scanned_and_forgotten() -> None:
    scan = ScanState(lower_bound=(after(10), None), rescan_at=after(60), due_known=True)
    scan.wake_at(after(5))
    scan.wake_at(after(7))
    scan.wake_at(after(3))
    assert scan.start(after(2.9)) == (after(10), None)
    assert scan.due_known
    assert scan.start(after(3)) == (after(3), None)
    assert (scan.due, scan.due_known) == (None, False)
    scan.due_known = True
    scan.on_missed_signals()
    assert scan.start(after(4)) == (rules.FIRST, None)
    assert not scan.due_known


@pytest.mark.parametrize("rescan_at", [None, after(60)])
def test_missed_signal_during_a_scan_rescans_next(rescan_at: datetime | None) -> None:
    scan = ScanState(lower_bound=(after(-9), None), rescan_at=rescan_at)
    start = scan.start(NOW)
    scan.on_missed_signals()
    scan.on_signal(after(-0.1))  # a signal clears no doubt
    scan.scanned(Scanned(start, NOW, after(0.1), None, True), 15)
    assert scan.start(after(0.2)) == (rules.FIRST, None)


# ---- the cost of idling


@pytest.mark.parametrize("consumers", [1, 5])
def test_idle_queue_is_rescanned_with_doubling_pauses(
    consumers: int,
) -> None:
    model = Model(*[Consumer()] * consumers)
    model.run(70)
    (scans,) = model.scans.values()
    later = [round(at / 1000, 1) for at in scans if at > 500]
    assert later == [1, 3, 7, 15, 30, 45, 60]


def test_idle_process_sends_few_commands() -> None:
    model = Model(*[Consumer()] * 5)
    model.run(1)
    (process,) = model.processes
    before = len(process.commands)
    model.run(60)
    # Seven scans. Before each, the pause flag is read; after each, the next ``when`` is read. In
    # addition, it searches for handovers of dead processes, with pauses of 10 s or more.
    assert len(process.commands) - before <= 3 * 7 + 6


def test_scheduled_message_is_on_time_despite_merged_signals() -> None:
    """If the bus merges events, the consumer receives the earliest ``when``."""
    pushes = [Push(5_000, process=1), Push(5_000, process=1, delay=6_000)]
    model = Model(Consumer(), pushes=pushes, processes=2, fault_rates=(1, 0, 0))
    model.run(5.02)
    assert not model.delivered
    model.processes[0].receive_signal(instant(5_000))
    model.run(1)
    assert len(model.delivered) == 1
    model.run(5.2)
    assert len(model.delivered) == 2


def test_late_message_is_found_despite_merged_signals() -> None:
    """An event without a ``when`` replaces all merged events, and means: read the record and scan.

    It also stands for the events that were lost while the bus was down.
    """
    model = Model(
        Consumer(), pushes=[Push(12_000, process=1, slow=8_500)], processes=2, fault_rates=(1, 0, 0)
    )
    model.run(20.55)
    model.processes[0].receive_signal(None)
    model.run(1.3)
    assert len(model.delivered) == 1
