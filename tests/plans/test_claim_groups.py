"""Runners of a group of named claims: their leases, standby and members. There is no database.

Replicas of one stage start, renew, stall and die at any command. A replica takes the group over
only when no live replica renews its lease. So the deaths and stalls of the replicas bound the
number of takeovers, and no message is lost.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest

from pyqueue.backends.claims.claims import NamedClaims
from pyqueue.backends.claims.groups import (
    COMEBACK_S,
    Candidate,
    hold,
    release,
    runner_lease_s,
    take,
)
from pyqueue.errors import ConfigurationError, Fenced, Occupied
from pyqueue.requests import Plan, Update
from tests.plans.runner import standard
from tests.plans.store import Pause, Process, Task, instant
from tests.plans.test_named_claims import Bench, cut, interrupted
from tests.support.samples import sampled

LEASE = 600.0
#: The lease of a runner whose messages have this lease.
RUNNER_S = runner_lease_s(LEASE)

ONE, TWO, THREE = (Candidate(name) for name in ("one", "two", "three"))


def following(known: str, owner: str = "restarted") -> Candidate:
    """Return a process that continues the work of a runner."""
    return Candidate(owner, known)


def adopted(bench: Bench, candidate: Candidate, group: str = "g") -> str:
    token: str = bench.run(bench.claims(group).adopt(LEASE, candidate))
    return token


def claimed(bench: Bench, count: int = 2) -> tuple[NamedClaims, str]:
    """Let the first runner claim messages. Return its claims and the token."""
    token, claims = adopted(bench, ONE), bench.claims()
    bench.run(claims.claim(token, count, LEASE))
    return claims, token


def refused(bench: Bench, candidate: Candidate) -> Occupied:
    """Take the group over in vain; return the error. Nothing is written."""
    before = {id: dict(each) for id, each in bench.world.store.documents.items()}
    with pytest.raises(Occupied) as caught:
        adopted(bench, candidate)
    assert bench.world.store.documents == before
    return caught.value


def wait(bench: Bench, seconds: float) -> None:
    bench.world.time += 1000 * seconds


@pytest.mark.parametrize(
    ("lease_s", "expected"), [(0.4, 0.1), (8, 2), (20, 5), (600, 5), (86_400, 5)]
)
def test_runner_lease_is_a_quarter_of_the_lease_up_to_5_s(lease_s: float, expected: float) -> None:
    assert runner_lease_s(lease_s) == pytest.approx(expected)


def test_second_runner_stands_by_while_the_first_renews() -> None:
    bench = Bench(3)
    claims, token = claimed(bench)
    for _ in range(10):
        other = refused(bench, TWO)
        assert other.owner == "one"
        assert other.until == bench.state()["until"]
        assert 0 < other.wait_s <= RUNNER_S
        wait(bench, RUNNER_S / 3)
        bench.run(hold(claims, token, LEASE))
    assert bench.run(claims.acknowledge(token, 1)) == 2


def test_second_runner_takes_over_when_the_lease_ends() -> None:
    bench = Bench(3)
    claims, first = claimed(bench)
    wait(bench, refused(bench, TWO).wait_s)
    second = adopted(bench, TWO)
    assert bench.state()["owner"] == "two"
    assert sorted(bench.run(claims.proceed(second, 5, LEASE))[1]) == ["m0000", "m0001"]
    for plan in (hold(claims, first, LEASE), claims.acknowledge(first, 1)):
        with pytest.raises(Fenced):
            bench.run(plan)
    assert refused(bench, ONE).owner == "two"


def test_lease_that_ended_in_an_outage_is_checked_twice() -> None:
    """The runner renews its lease as soon as the servers are back."""
    bench = Bench(1)
    token, two = adopted(bench, ONE), Candidate("two", seen={})
    refused(bench, two)
    bench.run(hold(bench.claims(), token, LEASE))
    wait(bench, RUNNER_S + 10)
    assert refused(bench, two).wait_s == COMEBACK_S
    bench.run(hold(bench.claims(), token, LEASE))
    wait(bench, refused(bench, two).wait_s)
    adopted(bench, two)  # the lease was not renewed since the last check


def test_lease_that_ended_long_ago_is_checked_once() -> None:
    bench = Bench(1)
    adopted(bench, ONE)
    wait(bench, RUNNER_S + 31)
    adopted(bench, Candidate("two", seen={}))


@pytest.mark.parametrize("next_one", [TWO, Candidate("two", seen={})], ids=["once", "twice"])
def test_released_group_is_taken_over_at_once(next_one: Candidate) -> None:
    bench = Bench(3)
    claims, token = claimed(bench)
    bench.run(release(claims, token))
    second = adopted(bench, next_one)
    bench.run(release(claims, token))  # of a former runner: this changes nothing
    assert refused(bench, ONE).owner == "two"
    assert len(bench.run(bench.claims().proceed(second, 5, LEASE))[1]) == 2


def test_restart_that_follows_the_runner_does_not_wait() -> None:
    """It brings the owner, or the first token of the runners whose work it continues."""
    bench = Bench(3)
    _, first = claimed(bench)
    tokens = [first]
    for _ in range(3):
        tokens.append(adopted(bench, following(first)))
        assert bench.state()["runner"] == first
    assert len(set(tokens)) == 4
    assert refused(bench, following("unknown")).owner == "restarted"
    by_owner = adopted(bench, following("restarted"))
    assert bench.state()["runner"] == by_owner
    refused(bench, following(first))


def test_takeover_after_a_wait_begins_a_new_lineage() -> None:
    """Tokens in an older checkpoint no longer count, also for its own query."""
    bench = Bench(1)
    first = adopted(bench, ONE)
    wait(bench, RUNNER_S)
    second = adopted(bench, TWO)
    wait(bench, RUNNER_S)
    third = adopted(bench, following(first, "one"))
    assert bench.state()["runner"] == third
    assert third not in (first, second)


def forget_runner(bench: Bench) -> None:
    """Give the state the form of the first release."""
    for name in ("until", "owner", "runner"):
        del bench.state()[name]


def test_state_of_the_first_release_is_taken_over_at_once() -> None:
    bench = Bench(1)
    first = adopted(bench, ONE)
    forget_runner(bench)
    second = adopted(bench, following(first))
    assert (bench.state()["runner"], bench.state()["token"]) == (first, second)
    forget_runner(bench)
    third = adopted(bench, TWO)
    assert bench.state()["runner"] == third


def taking(request: Any) -> bool:
    """Return whether a request writes a new runner."""
    return isinstance(request, Update) and "runner" in request.update.get("$set", {})


def test_renewal_just_before_a_takeover_keeps_the_group() -> None:
    """The second runner has seen that the lease has ended, and the first renews it late."""
    bench = Bench(1)
    token = adopted(bench, ONE)
    wait(bench, RUNNER_S)
    claims = bench.claims()
    renewal = hold(claims, token, LEASE)
    with pytest.raises(Occupied):
        interrupted(bench, claims.adopt(LEASE, TWO), lambda: bench.run(renewal), taking)
    assert bench.state()["token"] == token


def test_two_takeovers_at_once_have_one_winner() -> None:
    bench = Bench(1)
    adopted(bench, ONE)
    wait(bench, RUNNER_S)
    claims = bench.claims()
    with pytest.raises(Occupied):
        interrupted(bench, claims.adopt(LEASE, TWO), lambda: adopted(bench, THREE), taking)
    assert bench.state()["owner"] == "three"


def test_claim_by_hand_takes_over_from_a_live_runner() -> None:
    """``Queue.claim`` does so. Then a stage of the group stands by."""
    bench = Bench(3)
    claims, first = claimed(bench)
    assert len(bench.run(claims.begin(5, LEASE))[2]) == 2
    refused(bench, ONE)
    with pytest.raises(Fenced):
        bench.run(hold(claims, first, LEASE))


def test_takeover_cut_at_any_command_is_finished_later() -> None:
    """The next runner holds everything that was outstanding, under its token."""
    for steps in range(1, 14):
        bench = Bench(3)
        claims, _ = claimed(bench, 3)
        wait(bench, RUNNER_S)
        bench.world.spawn(cut(bench.process.run(claims.adopt(LEASE, TWO)), steps), bench.world.time)
        bench.world.run(bench.world.time + 1000)
        wait(bench, RUNNER_S)
        token = adopted(bench, THREE)
        assert len(bench.run(claims.proceed(token, 5, LEASE))[1]) == 3
        assert {each["token"] for each in bench.messages} == {token}


# ---- members


def members(bench: Bench, number: int = 2) -> list[NamedClaims]:
    return [NamedClaims(bench.backend, "g", 1 + each) for each in range(number)]


def taken(bench: Bench, candidate: Candidate, number: int = 2) -> tuple[NamedClaims, str]:
    result: tuple[NamedClaims, str] = bench.run(take(members(bench, number), LEASE, candidate))
    return result


def test_members_have_names_that_no_group_has() -> None:
    assert NamedClaims(standard(), "g", 1).tag == "a~g#1"
    with pytest.raises(ConfigurationError, match="group"):
        NamedClaims(standard(), "g#1")


def test_each_process_takes_a_free_member() -> None:
    bench = Bench(6)
    (one, first), (two, second) = taken(bench, ONE), taken(bench, TWO)
    assert [one.member, two.member] == [1, 2]
    with pytest.raises(Occupied) as caught:
        taken(bench, THREE)
    assert caught.value.owner == "one"  # its lease ends first
    assert bench.run(one.claim(first, 2, LEASE)) == 1
    assert bench.run(two.claim(second, 2, LEASE)) == 1
    assert bench.run(one.acknowledge(first, 99)) == 2  # this leaves the claims of the other member
    assert len(bench.run(two.ids(second, 0, 1))) == 2
    wait(bench, RUNNER_S)
    bench.run(hold(one, first, LEASE))
    three, third = taken(bench, THREE)
    assert three.member == 2
    assert len(bench.run(three.proceed(third, 5, LEASE))[1]) == 2


def test_member_with_outstanding_messages_is_taken_first() -> None:
    bench = Bench(6)
    (_, first), (two, second) = taken(bench, ONE, 3), taken(bench, TWO, 3)
    bench.run(two.claim(second, 2, LEASE))
    wait(bench, RUNNER_S)
    assert taken(bench, THREE, 3)[0].member == 2
    again, token = taken(bench, following(first), 3)
    assert (again.member, token != first) == (1, True)


def test_members_taken_at_once_are_different() -> None:
    """The commands of the two takeovers may interleave in any order."""
    for steps in range(1, 20):
        bench = Bench()
        found: list[int | None] = []

        def process(candidate: Candidate, found: list[int | None], bench: Bench) -> Task:
            member, _ = yield from bench.process.run(take(members(bench), LEASE, candidate))
            found.append(member.member)

        bench.world.random = random.Random(steps)
        for candidate in (ONE, TWO):
            bench.world.spawn(process(candidate, found, bench), bench.world.time)
        bench.world.run(bench.world.time + 1000)
        assert sorted(map(str, found)) == ["1", "2"]


# ---- replicas


@dataclass
class Group:
    """The events of the replicas of a stage."""

    bench: Bench
    lease: float
    members: int
    takeovers: int = 0
    fenced: int = 0
    finished: Counter[str] = field(default_factory=Counter)

    def changed(self, before: dict[str, Any], after: dict[str, Any] | None) -> None:
        """Count finished messages."""
        if after is None:
            self.finished[before["_id"]] += 1


def grouped(lease: float, members: int) -> Group:
    """Return the group of a stage with 60 messages."""
    bench = Bench(60)
    group = Group(bench, lease, members)
    bench.world.store.on_change = group.changed
    return group


def check_finished(group: Group) -> None:
    """Check that each of the messages was finished once."""
    assert sorted(group.finished.elements()) == [f"m{number:04}" for number in range(60)]


class Replica:
    """A process of a stage: batch after batch, and a renewal in the background."""

    def __init__(self, group: Group, name: str, rng: random.Random, stalls: float = 0) -> None:
        self.group, self.name, self.rng, self.stalls = group, name, rng, stalls
        self.process = Process(group.bench.world, "a")
        self.held: tuple[NamedClaims, str] | None = None
        #: A stalled process renews nothing.
        self.stalled_until = 0.0

    def run(self, plan: Plan[Any]) -> Generator[Pause, None, Any]:
        return (yield from self.process.run(plan))

    def renewing(self) -> Task:
        """Renew the runner's lease three times in it."""
        world = self.process.world
        while True:
            yield world.sleep(1000 * runner_lease_s(self.group.lease) / 3)
            if self.held is None or world.time < self.stalled_until:
                continue
            claims, token = held = self.held
            try:
                yield from self.run(hold(claims, token, self.group.lease))
            except Fenced:
                if self.held is held:
                    self.held = None

    def working(self) -> Task:
        """Move batch after batch. Stand by while another replica runs the group."""
        world, group = self.process.world, self.group
        plans = members(group.bench, group.members)
        while True:
            try:
                if self.held is None:
                    candidate = Candidate(self.name)
                    self.held = yield from self.run(take(plans, group.lease, candidate))
                    group.takeovers += 1
                claims, token = self.held
                upto, ids = yield from self.run(claims.proceed(token, 3, group.lease))
                yield world.sleep(self.rng.uniform(0, 500) if ids else 1000)
                if self.rng.random() < self.stalls:
                    pause = world.sleep(1000 * self.rng.uniform(0, 3 * runner_lease_s(group.lease)))
                    self.stalled_until = pause.until
                    yield pause
                if ids:
                    yield from self.run(claims.acknowledge(token, upto))
            except Occupied as other:
                yield world.sleep(1000 * other.wait_s)
            except Fenced:
                group.fenced += 1
                self.held = None


def start(work: Task, replica: Replica, at: float) -> None:
    """Start a replica. Its renewals end with its work."""
    alive = [True]

    def working() -> Task:
        yield from work
        alive[0] = False

    def renewing() -> Task:
        for pause in replica.renewing():
            if not alive[0]:
                return
            yield pause

    world = replica.process.world
    world.spawn(working(), at)
    world.spawn(renewing(), at)


@pytest.mark.parametrize("seed", sampled(range(15), few=5))
@pytest.mark.parametrize("count", [1, 2])
def test_replicas_take_over_only_from_the_dead(seed: int, count: int) -> None:
    """Five replicas, two of which are killed at any command."""
    rng = random.Random(seed)
    group = grouped(rng.choice([2.0, 20.0, 600.0]), count)
    kills = 0
    for number in range(5):
        replica = Replica(group, f"r{number}", rng)
        work: Task = replica.working()
        if number in (0, 1):
            kills += 1
            work = cut(work, rng.randint(1, 120))
        start(work, replica, rng.uniform(0, 3000))
    group.bench.world.run(60_000)
    check_finished(group)
    assert group.fenced == 0
    assert group.takeovers <= count + kills


@pytest.mark.parametrize("seed", sampled(range(15), few=6))
def test_replica_that_stalls_stands_by_and_loses_nothing(seed: int) -> None:
    rng = random.Random(seed)
    group = grouped(rng.choice([2.0, 600.0]), rng.choice([1, 2]))
    for number in range(3):
        replica = Replica(group, f"r{number}", rng, stalls=0.1)
        start(replica.working(), replica, rng.uniform(0, 3000))
    group.bench.world.run(120_000)
    check_finished(group)


def test_replicas_that_take_over_at_once_fight() -> None:
    """This shows that the tests above can fail: here the runner's lease keeps no replica away."""
    group = grouped(600.0, 1)
    world = group.bench.world
    for number in range(3):
        replica = Replica(group, f"r{number}", random.Random(number))
        start(replica.working(), replica, 0)

    def ending() -> Task:
        while True:
            yield world.sleep(100)
            for each in world.store.documents.values():
                if "until" in each:
                    each["until"] = instant(world.time) - timedelta(seconds=1)

    world.spawn(ending())
    world.run(60_000)
    assert group.fenced > 3
