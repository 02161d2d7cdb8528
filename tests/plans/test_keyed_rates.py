"""Rates ``per`` header, alone and beside a limit on concurrency: each key starts at its own rate.

There is no server. ``test_faults`` disturbs each operation at each of its commands. The last tests
run real plans in virtual time, with processes that die.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from functools import cache, partial
from itertools import groupby, islice
from typing import Any

import pytest

from pyqueue import ConfigurationError, Limit
from pyqueue.backends import reshaping
from pyqueue.backends.limits import rates, scan
from pyqueue.backends.limits import waiting as limit_waiting
from pyqueue.backends.options import Options
from pyqueue.backends.queue_plans import QueuePlans, plans_of
from pyqueue.backends.turns import DEFERRED_FOR
from pyqueue.errors import LeaseLost
from pyqueue.limits import FollowedLimit, check_call, key_of
from pyqueue.messages import Backoff
from pyqueue.requests import Command, Find, Plan, Update, UpdateEach
from pyqueue.runtime.waiters import Waiters
from tests.plans.competing import compete, seeds
from tests.plans.faults import Faults, Settler, check_ends, each_command
from tests.plans.meddler import Meddler
from tests.plans.runner import after
from tests.plans.steps import Steps, lasting, lost_request, resume
from tests.plans.store import World

LEASE = 60.0
BURST = 2
RATE = Limit(rate=1, period=10, burst=BURST, per="headers.t")
BOTH = Limit(concurrency=2, rate=1, period=10, burst=BURST, per="headers.t")
LIMITS = {"rate": RATE, "both": BOTH}
MESSAGES = 15

each_limit = pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS)
pytestmark = pytest.mark.usefixtures("same_slots")


def plans(limit: Limit | None = None, **options: Any) -> QueuePlans:
    """Return a queue with a limit; None: as a program that does not give the limit has it."""
    shape = {} if limit is None else {"limit": limit.stored()}
    given = {"lease": LEASE, "max_tries": None, "backoff": Backoff(jitter=0), **options}
    return plans_of("a", Options(dead_letter="dead", shape=shape, **given), owner="me")


def headers_of(number: int) -> dict[str, Any]:
    """Return the headers of a message: most have one key, some have another one or none."""
    return {} if number % 5 == 4 else {"t": "y" if number % 5 == 3 else "x"}


class Consumer(Settler):
    """A consuming process, and the messages it has started and finished."""

    def __init__(self) -> None:
        super().__init__()
        self.plans = plans()
        self.waiting = Waiters("a")
        self.started: list[Any] = []
        self.ended: set[int] = set()

    def receive(self, limit: int, **how: Any) -> Plan[list[Any]]:
        found = yield from self.plans.receive(self.waiting, limit, **{"timeout": 0, **how})
        self.started += [each.headers.get("t") for each in found]
        return found

    def work(self) -> Plan[None]:
        """Receive several times, and end each message in another way."""
        for _ in range(2):
            held = yield from self.receive(8)
            yield from self.settle(self.plans.commit(held[:2]), held[:2], self.ended)
            yield from self.settle(self.plans.rollback(held[2:], delay=0), held[2:])
            held = yield from self.receive(1, timeout=11)
            yield from self.settle(self.plans.release(held), held)
            held = yield from self.receive(3, timeout=11)
            yield from self.settle(self.plans.bury(held), held, self.ended)


@cache
def stored(limit: Limit) -> list[Any]:
    """Return the documents of a queue with a limit."""
    steps = lasting()
    for number in range(MESSAGES):
        steps.run(plans(limit).push([number], headers=headers_of(number)))
    return steps.all()


def drain(steps: Steps, consumer: Consumer) -> list[int]:
    """Consume the rest. Nothing waits for much longer than a lease, or the next permit."""
    delivered: list[int] = []
    for _ in range(12):
        steps.seconds += LEASE + 1
        consumer.waiting.scan.forget()
        while held := steps.run(consumer.receive(100)):
            assert max(Counter(each.headers.get("t") for each in held).values()) <= BURST
            delivered += [each.payload for each in held]
            steps.run(consumer.plans.commit(held))
            consumer.waiting.scan.forget()
    assert DEFERRED_FOR.total_seconds() > 12 * LEASE
    assert list(steps.collection.find({"q": "a", "record": {"$exists": False}})) == []
    return delivered


def check(steps: Steps, *consumers: Consumer) -> None:
    """Check that no more messages of a key have started than its permits allow."""
    for key, number in Counter(key for each in consumers for key in each.started).items():
        assert number <= BURST + steps.seconds / 10, key


def audit(steps: Steps, *consumers: Consumer) -> None:
    """Check that each message is delivered, or was finished once."""
    check(steps, *consumers)
    last = Consumer()
    left = drain(steps, last)
    check(steps, last, *consumers)
    ended = [number for each in consumers for number in each.ended]
    check_ends(left, ended, consumers, MESSAGES)


FAULTS = {
    name: Faults(partial(stored, limit), Consumer, audit, 400, store=lasting, stride=193)
    for name, limit in LIMITS.items()
}


@pytest.mark.parametrize("name", FAULTS)
@each_command(FAULTS["rate"].stride)
def test_walk_beside_a_consumer_changes_nothing(name: str, every: int) -> None:
    """Another process corrects deferred messages before each command."""

    def walk(steps: Steps, quick: Consumer) -> None:
        steps.run(limit_waiting.restore("a", FollowedLimit(LIMITS[name]), None))

    FAULTS[name].sleeps(every, walk)


# ---- one scan


class Scene:
    """A queue with messages, and processes that consume it."""

    def __init__(self, keys: str, limit: Limit = RATE) -> None:
        self.steps = lasting()
        for key, each in groupby(enumerate(keys), lambda each: each[1]):
            numbers = [number for number, _ in each]
            ids = [f"{key}{number}" for number in numbers]
            self.steps.run(plans(limit).push(numbers, ids=ids, headers={"t": key}))
        self.consumer = Consumer()

    def receive(self, limit: int, consumer: Consumer | None = None, **how: Any) -> list[str]:
        """Receive all messages that may start now. Return the ids."""
        receive = (consumer or self.consumer).receive(limit, **how)
        return sorted(each.id for each in self.steps.run(receive))

    def sent(self, kind: type[Command[Any]]) -> list[Any]:
        """Return the commands of the last receive that are of a type."""
        return [each for each in self.steps.commands if isinstance(each, kind)]

    def whens(self) -> dict[str, Any]:
        """Return the ``when`` of deferred messages."""
        return {each["_id"]: each["when"] for each in self.steps.all() if "limited" in each}


@each_limit
def test_each_key_starts_at_its_own_rate(limit: Limit) -> None:
    scene = Scene("xxxxxyyyz", limit)
    assert scene.receive(9) == ["x0", "x1", "y5", "y6", "z8"]
    assert scene.receive(9) == []
    whens = scene.whens()
    first = after(LEASE) if limit is BOTH else after(10)
    assert (whens["x2"], whens["y7"], whens["x3"]) == (first, first, after(3600))
    scene.steps.seconds = 10
    if limit is RATE:
        assert scene.receive(9) == ["x2", "y7"]
        assert scene.whens()["x3"] == after(20)
        scene.steps.seconds = 30
        assert scene.receive(9) == ["x3", "x4"]


def test_first_of_a_key_waits_for_slot_and_permit() -> None:
    """The later of both instants counts."""
    scene = Scene("xxxx", Limit(concurrency=1, rate=1, period=600, per="headers.t"))
    held = scene.steps.run(scene.consumer.receive(9))
    assert scene.receive(9) == []
    assert scene.whens()["x1"] == after(600)  # the lease ends before
    scene.steps.run(scene.consumer.plans.commit(held))
    assert scene.receive(9) == []
    assert scene.whens()["x1"] == after(600)
    scene.steps.seconds = 600
    assert scene.receive(9) == ["x1"]


def test_waiting_consumer_scans_when_a_key_may_start() -> None:
    scene = Scene("xxxxyyy")
    assert scene.receive(9) == ["x0", "x1", "y4", "y5"]
    assert scene.receive(1, timeout=30) == ["x2"]
    assert scene.steps.seconds == pytest.approx(10)
    assert scene.receive(1, timeout=30) == ["y6"]
    assert scene.steps.seconds == pytest.approx(10)
    assert scene.receive(1, timeout=30) == ["x3"]
    assert scene.steps.seconds == pytest.approx(20)


def test_waiting_consumer_knows_when_each_key_may_start() -> None:
    """It reads the next ``when`` from the server no more than once a second."""
    scene = Scene("xxyy", Limit(rate=10, per="headers.t"))
    assert scene.receive(1) == ["x0"]
    scene.steps.seconds = 0.05
    assert scene.receive(1) == ["y2"]
    assert scene.receive(9) == []
    assert scene.receive(1, timeout=30) == ["x1"]
    assert scene.receive(1, timeout=30) == ["y3"]
    assert scene.steps.seconds == pytest.approx(0.15)


def test_several_permits_are_used_by_one_scan() -> None:
    """A message comes first. The scan that claims it brings more."""
    scene = Scene("x" * 12, Limit(rate=1, burst=5, per="headers.t"))
    assert len(scene.receive(9)) == 5
    assert scene.receive(9) == []
    scene.steps.seconds = 50
    assert len(scene.receive(9)) == 5
    granting = [each for each in scene.sent(rates.TakePermits) if each.wanted > 1]
    assert len(granting) == 1


def test_receive_returns_early_while_permits_come() -> None:
    """Otherwise the first leases end before it has enough."""
    scene = Scene("x" * 90, Limit(rate=20, per="headers.t"))
    for _ in scene.steps.steps(scene.consumer.receive(90)):
        scene.steps.seconds += 0.05  # a command takes this long; one permit comes
    assert scene.steps.seconds < 3
    assert 0 < len(scene.consumer.started) < 40


def test_many_keys_start_though_each_question_takes_long() -> None:
    """A scan asks for half a second, and uses its permits by then. So each call starts some."""
    scene = Scene("".join(map(chr, range(0x4E00, 0x4E00 + 100))), Limit(rate=1, per="headers.t"))
    for calls in range(1, 11):
        began = scene.steps.seconds
        for _ in scene.steps.steps(scene.consumer.receive(100)):
            scene.steps.seconds += 0.03
        assert scene.steps.seconds - began <= 1
        assert len(scene.consumer.started) >= min(10 * calls, 100)
    assert len(set(scene.consumer.started)) == 100


def test_permits_that_a_claim_could_not_use_cost_little_time() -> None:
    """After a claim that a transaction blocked, the next claims take one message at a time.

    Such a claim gets permits for 60 keys, uses some of them within half a second, and returns the
    rest. Its consumer waits until the messages of these keys are eligible again.
    """
    scene = Scene(6 * "".join(map(chr, range(0x4E00, 0x4E00 + 60))), RATE)
    scene.receive(200)
    scene.consumer.waiting.scan.transaction_locks.singly_until = math.inf
    scene.steps.trip_s = 0.05
    for calls in range(1, 3):
        scene.steps.seconds += 25
        began = scene.steps.seconds
        scene.steps.run(scene.consumer.receive(200))
        assert len(scene.consumer.started) >= 120 + 5 * calls
        assert scene.steps.seconds - began < 2.5


def test_permits_given_back_are_not_added_to_a_full_burst() -> None:
    """The bucket was full in between, so the tokens that it gained then have replaced them."""
    limit, steps = Limit(rate=20, burst=4), lasting()

    def take(number: int) -> rates.Granted:
        return steps.run(rates.take("a", limit, {"": number}))[""]

    unused = take(1)
    steps.seconds = 0.1
    assert (unused.permits, take(9).permits) == (1, 4)
    steps.seconds = 0.15
    steps.run(rates.give_back("a", limit, [("", unused)]))
    assert take(9).permits == 1


def test_permits_given_back_by_another_process_are_noticed() -> None:
    """A consumer that knew of none does not defer the message again and again."""
    scene, other = Scene("xxx"), Consumer()
    assert scene.receive(2, other) == ["x0", "x1"]
    assert scene.receive(9) == []
    granted = rates.Granted(1, scene.steps.now, scene.steps.now)
    scene.steps.run(rates.give_back("a", RATE, [("=x", granted)]))
    scene.steps.run(plans().push([9], ids=["x9"], headers={"t": "x"}))
    running = scene.steps.steps(scene.consumer.receive(1))
    assert sum(1 for _ in islice(running, 100)) < 50
    assert scene.consumer.started == ["x"]


def test_another_waiting_consumer_hears_when_a_key_may_start() -> None:
    """It has not scanned. It knows from the signal of the process that deferred."""
    scene, other = Scene("xxx"), Consumer()
    scene.steps.listeners.append(other.waiting)
    assert scene.receive(9) == ["x0", "x1"]
    assert scene.receive(9) == []
    assert other.waiting.scan.due == after(10)


def test_key_that_fills_a_page_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scan reads past it, and defers no more than one page of it."""
    monkeypatch.setattr(scan, "LEAST_PAGE", 8)
    scene = Scene("x" * 60 + "yyy")
    assert scene.receive(2) == ["x0", "x1"]
    assert scene.receive(4) == ["y60", "y61"]
    assert len(scene.whens()) == 16


def test_scan_with_enough_defers_nothing() -> None:
    """So a consumer of many keys writes nothing but its claims and its permits."""
    scene = Scene("aabbccddeeffgghh")
    for _ in range(4):
        assert len(scene.receive(4)) == 4
        assert len(scene.sent(rates.TakePermits)) == 2
        assert len(scene.sent(Update)) + len(scene.sent(UpdateEach)) == 1
        assert not any(each.projection == {"tokens": 1, "at": 1} for each in scene.sent(Find))


def test_scan_takes_other_keys_in_place_of_refused_keys() -> None:
    """It reads the buckets of the rest before it asks again, and asks no bucket in vain twice."""
    scene, other = Scene("aaabbbcdefghij"), Consumer()
    assert scene.receive(4, other) == ["a0", "a1", "b3", "b4"]
    assert scene.receive(4) == ["c6", "d7", "e8", "f9"]
    asked = Counter(each.id for each in scene.sent(rates.TakePermits))
    assert sorted(asked) == [rates.permits_id("a", f"={key}") for key in "abcdef"]
    assert set(asked.values()) == {1}
    assert not scene.whens()
    assert scene.receive(4) == ["g10", "h11", "i12", "j13"]
    assert len(scene.sent(rates.TakePermits)) == 4


def test_refused_key_makes_a_scan_read_the_other_buckets() -> None:
    """A page of keys without permits is not asked one by one."""
    keys = "abcdefghijklmnopqrst"
    scene, other = Scene(keys * 2 + keys + "z"), Consumer()
    while scene.receive(7, other):
        pass
    assert scene.receive(2) == []
    lift(scene)
    scene.consumer = Consumer()
    scene.steps.run(plans().push([1], ids=["z"], headers={"t": "Z"}))
    assert scene.receive(2) == ["z"]
    assert len(scene.sent(rates.TakePermits)) <= 3 + len("z")


def lift(scene: Scene) -> None:
    """Make everything ready that is deferred, as after a fail-over."""
    waiting = {"limited": {"$exists": True}}
    scene.steps.collection.update_many(
        waiting, {"$set": {"when": scene.steps.now}, "$unset": {"limited": ""}}
    )


def test_permits_that_are_given_back_are_used() -> None:
    """Another consumer has deferred the messages, because it got no permits."""
    scene, other = Scene("xxxx"), Consumer()
    running = scene.steps.steps(scene.consumer.receive(2))
    while not scene.sent(rates.TakePermits):
        next(running)
    assert scene.receive(2, other) == []
    assert min(scene.whens().values()) == after(10)
    resume(running)
    assert scene.consumer.started == ["x", "x"]


def test_scan_keeps_permits_that_are_young() -> None:
    """The answer for one key takes so long that the permits of the other one are too old."""
    scene = Scene("ab")
    for slow in ("=a", "=b"):
        for each in scene.steps.steps(scene.consumer.receive(9)):
            if isinstance(each, rates.TakePermits) and each.id.endswith(slow):
                scene.steps.seconds += 1.2
    assert scene.consumer.started == ["b"]
    assert scene.receive(9) == ["a0"]


def test_lapsed_lease_does_not_make_a_consumer_poll() -> None:
    """The claim is ended for good, so that the message can be deferred."""
    limit = Limit(rate=1, period=3600, per="headers.t")
    scene = Scene("xx", limit)
    former = scene.steps.run(scene.consumer.receive(1))
    scene.steps.seconds = LEASE + 1
    assert scene.receive(1) == []
    assert set(scene.whens()) == {"x0", "x1"}
    assert scene.whens()["x0"] == after(3600)
    with pytest.raises(LeaseLost):
        scene.steps.run(scene.consumer.plans.extend(former))
    assert scene.receive(1, timeout=60) == []
    assert len(scene.steps.commands) < 200
    scene.steps.seconds = 3600
    assert scene.receive(1) == ["x0"]


def test_blocked_consumer_sends_few_commands() -> None:
    scene = Scene("xxxxxxyyyyyy", Limit(rate=1, period=3600, per="headers.t"))
    assert len(scene.receive(9)) == 2
    assert scene.receive(9, timeout=60) == []
    assert len(scene.steps.commands) < 60 * 3


def test_transaction_on_a_waiting_message_causes_no_polling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A locked message is not deferred, and the consumer waits for the next permit."""
    scene = Scene("xxx", Limit(rate=1, period=20, per="headers.t"))
    scene.receive(1)

    def locked(*given: Any) -> Plan[int]:
        yield from ()
        return 0

    monkeypatch.setattr(limit_waiting, "defer", locked)
    before = scene.steps.seconds
    assert scene.receive(1, timeout=60) == ["x1"]
    assert scene.steps.seconds - before == pytest.approx(20, abs=0.1)
    assert len(scene.steps.commands) < 100


@pytest.mark.parametrize("wanted", [1, 9])
def test_pops_obey_a_rate_per_key(wanted: int) -> None:
    scene = Scene("xxxyyz")
    popped: list[Any] = []
    for _ in range(9):
        popped += scene.steps.run(
            scene.consumer.plans.receive(scene.consumer.waiting, wanted, timeout=0, pop=True)
        )
    assert sorted(each.id for each in popped) == ["x0", "x1", "y3", "y4", "z5"]
    left = [each["_id"] for each in scene.steps.all() if each.get("q") == "a"]
    assert [each for each in left if not each.startswith("~")] == ["x2"]
    scene.steps.seconds = 10
    again = scene.consumer.plans.receive(scene.consumer.waiting, wanted, timeout=0, pop=True)
    assert [each.id for each in scene.steps.run(again)] == ["x2"]


@pytest.mark.parametrize(
    "limit",
    [
        False,
        {"rate": 1, "period": 10, "burst": 9},
        {"rate": 1, "period": 10, "burst": 9, "per": "headers.u"},
        {"concurrency": 9, "per": "headers.t"},
        {"rate": 1000, "burst": 1000, "per": "headers.t"},
    ],
)
def test_changed_limit_lifts_every_deferral(limit: Any) -> None:
    """Also messages deferred by a process that did not know of the change yet."""
    scene = Scene("xxxxxx", Limit(rate=1, period=3600, burst=2, per="headers.t"))
    scene.receive(10)
    assert scene.receive(10) == []
    deferred = [each for each in scene.steps.all() if "limited" in each]
    assert len(deferred) == 4
    scene.steps.run(reshaping.reshape("a", {"limit": limit}))
    assert not scene.whens()
    for each in deferred:
        scene.steps.collection.replace_one({"_id": each["_id"]}, each)
    scene.steps.seconds = 5
    scene.consumer.waiting.scan.forget()
    assert len(scene.receive(10)) == 4


@pytest.mark.parametrize(
    "limit", [RATE, BOTH, Limit(concurrency=1, per="headers.t"), Limit(rate=1, period=9, burst=2)]
)
def test_limit_that_is_removed_during_a_scan_defers_nothing(limit: Limit) -> None:
    """Another thread reads of it, and lifts deferred messages, before the scan defers more."""
    for at in range(40):
        scene = Scene("xxxx", limit)
        running = scene.steps.steps(scene.consumer.receive(9))
        if sum(1 for _ in islice(running, at)) < at:
            assert at > 5
            return
        scene.steps.run(reshaping.reshape("a", {"limit": False}))
        scene.consumer.waiting.scan.flag_read = None
        scene.receive(1)
        resume(running)
        assert not scene.whens()
    raise AssertionError("more commands than expected")


def test_rescan_finds_messages_that_dead_processes_left() -> None:
    """The first that waits was removed, and no other of its key will be claimed."""
    scene = Scene("xxxxx")
    assert scene.receive(10) == ["x0", "x1"]
    assert scene.receive(10) == []
    scene.steps.collection.delete_one({"_id": "x2"})
    scene.steps.seconds = 10
    assert scene.receive(10, Consumer()) == ["x3"]


def test_claimed_messages_arrive_though_a_deferral_fails() -> None:
    """The next call corrects what the failure left deferred for too long."""
    claimed = ["x0", "x1", "y5"]
    whole = Scene("xxxxxy")
    assert whole.receive(9) == claimed
    commands = whole.steps.commands
    begin = max(n for n, each in enumerate(commands) if isinstance(each, UpdateEach))
    assert begin < len(commands) - 1
    for number in range(begin, len(commands)):
        scene = Scene("xxxxxy")
        found = scene.steps.run(scene.consumer.receive(9), lost_request(number))
        assert sorted(each.id for each in found) == claimed
        scene.steps.seconds = 10
        assert scene.receive(9) == ["x2"]


def test_slow_claims_do_not_put_rescans_off() -> None:
    """A rescan takes as long as its read of the queue, not as long as the claims after it."""
    scene = Scene("z")
    steps, consumer = scene.steps, scene.consumer
    lost_at = None
    for turn in range(60):
        for key in range(7):
            name = f"{turn}-{key}"
            steps.run(plans().push([turn], ids=[name], headers={"t": name}))
        if turn == 30:  # a process defers a message and dies
            lost_at = steps.seconds
            put = {"when": steps.now + DEFERRED_FOR, "limited": "=30-0"}
            steps.collection.update_one({"_id": "30-0"}, {"$set": put})
        for _ in steps.steps(consumer.receive(100)):
            steps.seconds += 0.03  # each command takes this long
        if lost_at is not None and "30-0" in consumer.started:
            assert steps.seconds - lost_at < 6
            return
    raise AssertionError("nothing received the deferred message")


def test_message_keeps_no_trace_of_its_deferral() -> None:
    scene = Scene("xxx")
    scene.receive(9)
    scene.receive(9)
    scene.steps.seconds = 10
    assert scene.receive(9) == ["x2"]
    assert not scene.whens()


def test_long_values_have_keys_of_bounded_length() -> None:
    values = ["a" * 200, "a" * 201, "a" * 5000, "a" * 5001, "é" * 300, "#", "=", "-", 1, "1", None]
    keys = [key_of(RATE, {"headers": {"t": each}}) for each in values]
    assert len(set(keys)) == len(values)
    assert max(map(len, keys)) <= 201
    assert len({rates.permits_id("a", each) for each in keys}) == len(keys)


def test_named_claims_refuse_a_limit_per_key() -> None:
    with pytest.raises(ConfigurationError, match=r"^claim: .*per key.*reserve messages"):
        check_call("a", RATE, "claim")
    check_call("a", RATE, "pop")
    check_call("a", Limit(rate=1), "claim")


def test_process_remembers_a_bounded_number_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyqueue.limits._MAX_KEYS", 3)
    followed = FollowedLimit(RATE)
    for number in range(10):
        now = after(number / 10)
        followed.expect(str(number), after(0.25 if number == 0 else 4), now)
        known = [each for each in map(str, range(10)) if followed.waits(now, each)]
        assert str(number) in known
        assert len(known) <= 3
    assert followed.first_start(after(1)) == after(4)
    followed.expect("far", after(3600), after(3))
    assert followed.first_start(after(5)) == after(8)
    followed.forget("far")
    assert not followed.waits(after(5), "far")


def test_reading_a_bucket_counts_as_taking_does() -> None:
    """Whatever the clock does."""
    chance = random.Random(5)
    for _ in range(200):
        steps = lasting()
        limit = Limit(
            rate=chance.choice([0.3, 2, 7.5]), burst=chance.randint(1, 4), per="headers.t"
        )
        for _ in range(3):
            steps.seconds += round(chance.choice([0, 0.3, 2, -30, -3600]) * chance.random(), 3)
            steps.run(rates.take("a", limit, {"x": chance.randint(0, 3)}))
        steps.seconds += round(chance.choice([0, 0.3, 2, -30]) * chance.random(), 3)
        followed = FollowedLimit(limit)
        read = steps.run(rates.may_start("a", limit, followed, ["x", "y"], steps.now))
        assert read["y"] == (limit.capacity, steps.now)
        granted = steps.run(rates.take("a", limit, {"x": 9}))["x"]
        assert read["x"].number == granted.permits
        if not granted.permits:
            assert abs(read["x"].next_at - granted.next_at) <= timedelta(milliseconds=1)
            assert followed.waits(steps.now, "x")


# ---- competing processes, in virtual time


def push(choose: random.Random, _: int) -> Plan[list[Any]]:
    """Push messages of one of a few keys."""
    several = [1] * choose.choice((1, 1, 5))
    return plans().push(several, headers={"t": choose.choice("xxyz")})


@pytest.mark.parametrize("mortal", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("concurrency", [None, 2])
@seeds(1, 40)
def test_competing_processes_start_no_more_of_a_key(
    seed: int, concurrency: int | None, mortal: bool
) -> None:
    """All messages are finished once, and soon."""
    limit = Limit(concurrency=concurrency, rate=20, period=1, burst=3, per="headers.t")
    world = World(seed, lost=0.2, late=0.1)
    store, done, starts = world.store, list[Any](), list[tuple[float, str]]()

    def changed(before: Mapping[str, Any], then: Mapping[str, Any] | None) -> None:
        if then is None:
            done.append(before["_id"])
        elif "token" in then and then["token"] != before.get("token"):
            starts.append((world.time, key_of(limit, then)))

    store.on_change = changed
    pushed: list[Any] = [*Meddler(store).run(plans(limit).push([1]))]
    compete(world, seed, plans(), push, pushed, mortal=mortal)
    world.run(30_000 + mortal * 6 * LEASE * 1000)
    assert sorted(map(str, done)) == sorted(map(str, pushed))
    check_windows(starts)


def check_windows(starts: list[tuple[float, str]]) -> None:
    """Check that in no window too many messages of a key started.

    A claim follows its permits by some commands, so a window may include claims
    whose permits are slightly older.
    """
    for key in {key for _, key in starts}:
        times = sorted(time for time, each in starts if each == key)
        for place, begin in enumerate(times):
            for more, end in enumerate(times[place:], 1):
                assert more <= 3 + (end - begin + 100) * 20 / 1000, key
