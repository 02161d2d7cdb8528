"""Named claims: numbered, taken over, fenced. There is no database.

Runners die at any point, while other runners and another group claim messages. A runner
acknowledges only messages that it has read under the token of the acknowledgement. So a finished
message was processed, and an unprocessed message is still stored.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import bson
import pytest
from bson import ObjectId

from pyqueue.backends.claims import claims as module
from pyqueue.backends.claims import groups
from pyqueue.backends.claims.admitting import MAX_CLAIM
from pyqueue.backends.claims.claims import NamedClaims, divided
from pyqueue.backends.options import Options
from pyqueue.backends.queue_plans import QueuePlans, plans_of
from pyqueue.concurrently import Concurrently
from pyqueue.errors import DuplicateKey, Fenced, InvalidMessage, QueueError
from pyqueue.messages import Backoff, Id
from pyqueue.requests import Change, Delete, Find, Plan, Update, WriteFailure
from tests.plans.runner import Runner, standard
from tests.plans.store import Pause, Process, Task, World, instant
from tests.support.samples import sampled

LEASE = 30.0


def store(world: World, *ids: Id, **fields: Any) -> None:
    """Store messages that are ready."""
    now = instant(int(world.time))
    for id in ids:
        usual = {"_id": id, "q": "a", "when": now, "due": now, "tries": 0, "payload": 1}
        world.store.documents[id] = usual | fields
        world.store.written[id] = world.time


class Bench:
    """A world with messages, and processes that run plans in it one after the other."""

    def __init__(self, count: int = 0, **options: Any) -> None:
        self.world = World(seed=1)
        self.process = Process(self.world, "a")
        options = {"max_tries": None, "backoff": Backoff(base=0)} | options
        self.backend = plans_of("a", Options(dead_letter="a.dead", **options))
        self.push(*(f"m{number:04}" for number in range(count)))

    def push(self, *ids: Id, **fields: Any) -> None:
        store(self.world, *ids, **fields)

    def claims(self, group: str = "g") -> NamedClaims:
        return NamedClaims(self.backend, group)

    def adopted(self, group: str = "g") -> tuple[NamedClaims, str]:
        """Take a group over. Return its claims and the token."""
        claims = self.claims(group)
        return claims, self.run(claims.adopt(LEASE))

    def claimed(self, *limits: int) -> tuple[NamedClaims, str]:
        """Take the group over and make claims of these sizes. Return its claims and the token."""
        claims, token = self.adopted()
        for limit in limits:
            self.run(claims.claim(token, limit, LEASE))
        return claims, token

    def run(self, plan: Plan[Any]) -> Any:
        """Run a plan to its end."""
        answer: list[Any] = []

        def task() -> Task:
            try:
                answer.append((yield from self.process.run(plan)))
            except QueueError as error:
                answer.append(error)

        self.world.spawn(task(), self.world.time)
        self.world.run(self.world.time + 1000)
        if isinstance(answer[0], QueueError):
            raise answer[0]
        return answer[0]

    def stored(self, id: Id) -> dict[str, Any]:
        return self.world.store.documents[id]

    def state(self, group: str = "g") -> dict[str, Any]:
        return self.stored(f"~claim:a~{group}")

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [each for each in self.world.store.documents.values() if "record" not in each]


def test_takeover_gives_up_if_it_always_loses() -> None:
    """Each time it reads the state, another process has taken the group over."""
    runner = Runner(
        *[[{"_id": "~claim:a~g", "token": "other"}], Change(0, None)] * groups.TAKEOVER_TRIES
    )
    with pytest.raises(Fenced):
        runner.run(NamedClaims(standard(), "g").adopt(LEASE))
    assert runner.answers == []


def test_concurrent_first_adoption_takes_over() -> None:
    exists = WriteFailure(0, "_id", DuplicateKey("taken"))
    state = {"_id": "~claim:a~g", "token": "other", "former": ["older"]}
    changes = (Change(1, None), Change(3, None), Change(1, None))
    runner = Runner([], [exists], [state], *changes, [])  # at last, no document is invalid
    token = runner.run(NamedClaims(standard(), "g").adopt(LEASE))
    take, command_timeout, end, _ = runner.commands[3:]
    assert (take.filter["token"], take.update["$set"]["token"]) == ("other", token)
    assert take.update["$set"]["former"] == ["older", "other"]
    assert command_timeout.filter["token"] == {"$in": ["older", "other"]}
    assert end.update == {"$set": {"former": []}}


def test_claim_buries_a_document_with_an_invalid_id() -> None:
    """The document comes from foreign code; a claim of one message finds the documents after it."""
    bench = Bench()
    bench.push(5, 6.5)  # type: ignore[arg-type]
    bench.world.time += 1
    bench.push("good")
    claims, token = bench.adopted()
    assert bench.run(claims.claim(token, 1, LEASE)) == 1
    assert bench.run(claims.ids(token, 0, 1)) == ["good"]
    assert [bench.stored(id)["q"] for id in (5, 6.5)] == ["a.dead", "a.dead"]  # type: ignore[arg-type]
    assert bench.run(claims.claim(token, 1, LEASE)) is None


def test_unknown_group_has_no_progress() -> None:
    standing = Bench(1).run(Bench().claims().progress())
    assert (standing.acknowledged, standing.claimed, standing.token) == (0, 0, "")


def test_refused_document_is_found_by_halves_and_buried() -> None:
    """The server refuses the whole command because of one foreign document."""
    marked: list[Id] = []
    put_away: list[Any] = []

    def answer(command: Any) -> Any:
        if isinstance(command, Find):
            return []  # nothing waits for the document
        assert isinstance(command, Update)
        if "claim" not in command.update["$set"]:
            put_away.append(command.filter["_id"])
            return Change(1, None)
        ids = command.filter["_id"]["$in"]
        if "m3" in ids:
            raise InvalidMessage("cannot increment")
        marked.extend(ids)
        return Change(len(ids), None)

    runner = Runner(*[answer] * 9)
    runner.run(
        NamedClaims(standard(), "g")._stamp_some([f"m{n}" for n in range(5)], 1, "t", LEASE, None)
    )
    assert sorted(marked) == ["m0", "m1", "m2", "m4"]
    assert put_away == ["m3"]
    assert [(each.verb, [one.id for one in each.items]) for each in runner.told] == [
        ("bury", ["m3"])
    ]
    assert len(runner.commands) == 9


# ---- held messages


def test_acknowledgement_into_history_takes_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STAMP", 2)
    bench = Bench(6)
    claims, token = bench.claimed(5, 5)
    assert bench.run(claims.marks(token, 2)) == {}
    bench.run(claims.mark(token, ["m0000", "m0001", "m0002", "m0003", "m0004"], 7))
    bench.run(claims.mark(token, ["m0001", "m0005"], 8))
    noted = {"m0000": 7, "m0001": 8, "m0002": 7, "m0003": 7, "m0004": 7}
    assert bench.run(claims.marks(token, 1)) == noted
    assert bench.run(claims.marks(token, 2)) == noted | {"m0005": 8}
    bench.run(claims.mark("another's", ["m0000"], 9))
    assert bench.run(claims.marks(token, 2))["m0000"] == 7


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_ranges_hold_every_id_of_both_types(parts: int) -> None:
    bench = Bench(3)
    bench.push(*(ObjectId() for _ in range(4)))
    claims, token = bench.claimed(4, 10)
    spans = bench.run(claims.ranges(token, 0, 2, parts))
    assert len(spans) == parts
    read = [each["_id"] for span in spans for each in bench.run(claims.read(span))]
    assert Counter(read) == Counter(each["_id"] for each in bench.messages)
    (second,) = bench.run(claims.ranges(token, 1, 2, 1))
    assert len(bench.run(claims.read(second))) == 3


def test_acknowledgement_keeps_history_with_and_without_key() -> None:
    bench = Bench(2, history=60)
    bench.push("keyed", key="k")
    claims, token = bench.claimed(10)
    assert bench.run(claims.acknowledge(token, 1)) == 3
    assert all(each["outcome"] == "committed" for each in bench.messages)
    assert (bench.stored("keyed").get("key"), bench.stored("keyed")["last_key"]) == (None, "k")


# ---- numbers


def test_claims_are_numbered() -> None:
    bench = Bench(5)
    claims, token = bench.adopted()
    assert [bench.run(claims.claim(token, 2, LEASE)) for _ in range(4)] == [1, 2, 3, None]
    assert Counter(each["claim"]["n"] for each in bench.messages) == {1: 2, 2: 2, 3: 1}
    assert {each["claim"]["g"] for each in bench.messages} == {"a~g"}
    assert {each["token"] for each in bench.messages} == {token}
    standing = bench.run(claims.progress(token))
    assert (standing.acknowledged, standing.claimed) == (0, 3)
    assert bench.run(claims.acknowledge(token, 2)) == 4
    assert (bench.state()["n"], bench.state()["claimed"]) == (2, 3)
    assert bench.run(claims.acknowledge(token, 1)) == 0  # numbers never decrease
    assert bench.state()["n"] == 2
    # A checkpoint may name a number of a state that was lost.
    assert bench.run(claims.acknowledge(token, 9)) == 1
    assert (bench.state()["n"], bench.state()["claimed"]) == (9, 9)


def test_large_claim_is_marked_in_batches_under_one_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "STAMP", 3)
    bench = Bench(10)
    claims, token = bench.adopted()
    assert bench.run(claims.claim(token, 100, LEASE)) == 1
    updates = [each for each in bench.process.commands if isinstance(each, Update) and each.many]
    stamps = [each.filter["_id"]["$in"] for each in updates if "_id" in each.filter]
    assert [len(each) for each in stamps] == [3, 3, 3, 1]
    assert {(each["claim"]["n"], each["token"]) for each in bench.messages} == {(1, token)}


def test_claim_size_is_limited_by_one_acknowledgement() -> None:
    runner = Runner([{"n": 0, "claimed": 0, "token": "t"}], [], [])
    assert runner.run(NamedClaims(standard(), "g").claim("t", 10**9, LEASE)) is None
    scan = runner.commands[-1]
    assert isinstance(scan, Find)
    assert scan.limit == MAX_CLAIM


def test_commands_of_a_claim_wait_for_the_clients_durability() -> None:
    """A fail-over must not roll back a state that a restarted process reads."""
    bench = Bench(3)
    claims, token = bench.claimed(5)
    bench.run(claims.renew(token, LEASE))
    bench.run(claims.adopt(LEASE))
    assert not [each for each in bench.process.commands if each.w1]


def test_later_messages_are_not_settled() -> None:
    bench = Bench(2)
    since = instant(int(bench.world.time))
    bench.world.time += 5
    bench.push("later")
    bench.world.time += 5
    claims, token = bench.adopted()
    assert bench.run(claims.claim(token, 10, LEASE, since=since)) == 1
    assert "claim" not in bench.stored("later")
    assert bench.run(claims.claim(token, 10, LEASE, since=since)) is None
    assert bench.run(claims.claim(token, 10, LEASE)) == 2


def test_claim_ends_at_its_bytes_or_its_count() -> None:
    """The first message is claimed even if it is too large."""
    bench = Bench(9)
    size = len(bson.encode(bench.stored("m0000")))
    claims, token = bench.adopted()
    cases = [(9, 3 * size, 3), (9, size // 2, 1), (2, 9 * size, 2), (9, None, 3)]
    for n, (limit, max_bytes, count) in enumerate(cases, 1):
        assert bench.run(claims.claim(token, limit, LEASE, max_bytes=max_bytes)) == n
        assert len(bench.run(claims.ids(token, n - 1, n))) == count
    assert bench.run(claims.claim(token, 9, LEASE, max_bytes=1)) is None


def test_claim_that_lost_every_message_scans_again() -> None:
    state = {"n": 4, "claimed": 4, "token": "t"}

    def answer(request: Any) -> Any:
        if isinstance(request, Find):
            if request.filter.get("_id") == "~claim:a~g":
                return [dict(state)]
            if "$or" in request.filter:  # messages to bury
                return []
            if "token" in request.filter:  # messages that it holds
                return [{"_id": "m2"}] if "m2" in stamped else []
            if request.filter.get("_id") == "~queue:a":
                return []
            return [{"_id": "m2"}] if state["n"] == 5 else [{"_id": "m1"}]
        update = request.update
        if request.many:
            stamped.extend(request.filter["_id"]["$in"])
        else:
            for fields in update.values():
                state.update(fields)
        return Update.read(request, type("Raw", (), {"matched_count": 1, "upserted_id": None}))

    stamped: list[str] = []
    runner = Runner(*[answer] * 40)
    assert runner.run(NamedClaims(standard(max_tries=None), "g").claim("t", 1, LEASE)) == 6
    assert stamped == ["m1", "m2"]
    assert (state["n"], state["claimed"]) == (5, 6)  # the empty claim is not waited for


# ---- the runner of a group


def test_takeover_holds_abandoned_messages_at_once() -> None:
    bench = Bench(3)
    claims, first = bench.claimed(2)
    second = bench.run(claims.adopt(LEASE))
    assert second != first
    token, upto, ids = bench.run(claims.begin(5, LEASE))
    assert token not in (first, second)
    assert upto == 1
    assert sorted(ids) == ["m0000", "m0001"]
    assert [bench.stored(id)["tries"] for id in ids] == [3, 3]
    assert {bench.stored(id)["token"] for id in ids} == {token}
    assert bench.state()["former"] == []


@pytest.mark.parametrize("plan", ["claim", "acknowledge", "renew", "read", "rollback", "standing"])
def test_former_runner_is_fenced(plan: str) -> None:
    bench = Bench(4)
    claims, first = bench.claimed(2)
    (span,) = bench.run(claims.ranges(first, 0, 1, 1))
    bench.run(claims.adopt(LEASE))
    before = {id: dict(each) for id, each in bench.world.store.documents.items()}
    plans: dict[str, Plan[Any]] = {
        "claim": claims.claim(first, 2, LEASE),
        "acknowledge": claims.acknowledge(first, 1),
        "renew": claims.renew(first, LEASE),
        "read": claims.read(span),
        "rollback": claims.rollback(first, 1),
        "standing": claims.progress(first),
    }
    with pytest.raises(Fenced, match=r"group 'g' of queue 'a'"):
        bench.run(plans[plan])
    assert bench.world.store.documents == before


def marking(request: Any) -> bool:
    """Return whether a request changes several messages."""
    return isinstance(request, Update) and request.many


def interrupted(
    bench: Bench,
    plan: Plan[Any],
    meddle: Callable[[], object],
    before: Callable[[Any], bool] = marking,
) -> Any:
    """Run a plan, and call ``meddle`` just before its first matching request."""
    happened = False
    try:
        request = next(plan)
        while True:
            if not happened and before(request):
                happened = True
                meddle()
            request = plan.send(bench.run(one(request)))
    except StopIteration as stop:
        return stop.value
    finally:
        assert happened


def one(request: Any) -> Plan[Any]:
    """Run one request as a plan."""
    return (yield request)


class Died(Exception):
    """The process ends here."""


@pytest.mark.parametrize("deleted", [0, 2, 5])
def test_finished_claim_is_never_seen_in_part(deleted: int) -> None:
    """The process dies at any command. The server has deleted some messages by then.

    Work that overwrites the output under its claim number must not see a part of the claim.
    """
    # It notes that the work is done, reads the progress and the time, deletes, and advances by one.
    assert [finish_and_die(place, deleted) for place in range(5)] == [True] + [False] * 4


def finish_and_die(place: int, deleted: int) -> bool:
    """Die before a command of ``finish``. Return whether the next process gets the same claim."""
    bench = Bench(5)
    claims = bench.claims()
    token, n, _ = bench.run(claims.begin(9, LEASE))
    places = itertools.count()

    def dies(request: Any) -> bool:
        here = next(places) == place
        if here and isinstance(request, Delete):
            for each in bench.messages[:deleted]:
                del bench.world.store.documents[each["_id"]]
        return here

    def die() -> None:
        raise Died

    with pytest.raises(Died):
        interrupted(bench, claims.finish(token, n), die, dies)
    bench.push("new")
    _, again, ids = bench.run(claims.begin(9, LEASE))
    if again == n:
        assert len(ids) == 5, f"died at command {place}"
    else:
        assert ids == ["new"]
    return bool(again == n)


def test_takeover_within_a_claim_gives_back_later_stamps() -> None:
    """The former runner gives back messages it marks after the takeover, and no try is counted."""
    bench = Bench(2)
    claims, first = bench.adopted()
    with pytest.raises(Fenced):
        interrupted(bench, claims.claim(first, 5, LEASE), lambda: bench.run(claims.adopt(LEASE)))
    assert [(each["tries"], "token" in each, "claim" in each) for each in bench.messages] == [
        (0, False, False)
    ] * 2


def test_claim_and_acknowledgement_may_run_at_once() -> None:
    """Each of them runs as a whole before each request of the other one."""
    places = [
        [place for place in range(20) if at_once(place, claims_first=claims_first)]
        for claims_first in (False, True)
    ]
    assert places == [[*range(4)], [*range(11)]]


def at_once(place: int, *, claims_first: bool) -> bool:
    """Run one plan before request number ``place`` of the other. Return whether it exists."""
    bench = Bench(5)
    claims, token = bench.adopted()
    assert bench.run(claims.claim(token, 3, LEASE)) == 1
    claim, acknowledgement = claims.claim(token, 9, LEASE), claims.acknowledge(token, 1, 3)
    outer, inner = (claim, acknowledgement) if claims_first else (acknowledgement, claim)
    places, results = itertools.count(), []

    def here(request: Any) -> bool:
        return next(places) == place

    try:
        results.append(interrupted(bench, outer, lambda: results.append(bench.run(inner)), here))
    except AssertionError:  # the plan has fewer requests
        assert not results
        return False
    assert sorted(results) == [2, 3]  # claim number 2, and 3 settled messages
    assert [each["claim"] for each in bench.messages] == [{"g": "a~g", "n": 2}] * 2
    expected = {"n": 1, "claimed": 2, "settled": 3, "taken": 3}
    assert {name: bench.state()[name] for name in expected} == expected
    assert bench.run(claims.acknowledge(token, 2)) == 2
    return True


def test_interrupted_takeover_is_finished_by_the_next() -> None:
    """It is cut short before each of its commands in turn."""
    for steps in range(1, 8):
        bench = Bench(3)
        claims, _ = bench.claimed(3)
        dying = claims.adopt(LEASE)
        bench.world.spawn(cut(bench.process.run(dying), steps), bench.world.time)
        bench.world.run(bench.world.time + 1000)
        token, _, ids = bench.run(claims.begin(5, LEASE))
        assert len(ids) == 3
        assert {each["token"] for each in bench.messages} == {token}


def cut(task: Generator[Pause, None, Any], steps: int) -> Task:
    """End a process after this number of steps."""
    yield from islice(task, steps)


def test_lapsed_claim_is_not_adopted_from_a_later_holder() -> None:
    bench = Bench(2)
    claims, _ = bench.claimed(2)
    bench.world.time += LEASE * 1000
    other, other_group = bench.adopted("h")
    assert bench.run(other.claim(other_group, 1, LEASE)) == 1
    _, _, ids = bench.run(claims.begin(5, LEASE))
    assert ids == ["m0001"]
    assert bench.stored("m0000")["token"] == other_group
    assert bench.stored("m0000")["claim"] == {"g": "a~h", "n": 1}


def test_groups_with_similar_names_are_separate() -> None:
    """ "a" of queue "b>c" differs from "c~a" of any queue: no name contains "~"."""
    assert NamedClaims(standard("a>b"), "c").tag != NamedClaims(standard("a"), "b>c").tag
    bench = Bench(2)
    (one, token), two = bench.claimed(1), bench.claims("gg")
    assert bench.run(two.begin(5, LEASE))[2] == ["m0001"]
    assert bench.run(one.acknowledge(token, 99)) == 1
    assert [each["_id"] for each in bench.messages] == ["m0001"]


# ---- settling


def test_acknowledgement_is_one_delete_by_the_token() -> None:
    bench = Bench(3)
    claims, token = bench.claimed(3)
    bench.process.commands.clear()
    assert bench.run(claims.acknowledge(token, 1)) == 3
    (delete,) = (each for each in bench.process.commands if isinstance(each, Delete))
    assert delete.many
    bad = {"claim.bad": {"$exists": False}}  # these are buried
    assert delete.filter == {"claim.g": "a~g", "claim.n": {"$lte": 1}, "token": token} | bad


def taken_away(bench: Bench, id: str) -> Callable[[], None]:
    """Take a message away, as ``on_duplicate="replace"`` does."""
    return lambda: bench.stored(id).update(token="other_group", claim=None)


def test_rollback_gives_back_messages_still_held() -> None:
    bench = Bench(3)
    claims, token = bench.claimed(3)
    interrupted(bench, claims.rollback(token, 1), taken_away(bench, "m0001"))
    assert bench.state()["n"] == 1
    held = [("token" in each, each["tries"]) for each in bench.messages]
    assert held == [(False, 1), (True, 1), (False, 1)]


def test_bury_takes_messages_still_held() -> None:
    bench = Bench(3, max_tries=2)
    claims, token = bench.adopted()
    for id in ("m0000", "m0001"):
        bench.stored(id)["tries"] = 2

    def burying(request: Any) -> bool:
        return isinstance(request, Concurrently)  # the burials of both

    claim, taking = claims.claim(token, 3, LEASE), taken_away(bench, "m0001")
    assert interrupted(bench, claim, taking, burying) == 1
    assert bench.run(claims.ids(token, 0, 1)) == ["m0002"]
    assert (bench.stored("m0000")["q"], bench.stored("m0001")["q"]) == ("a.dead", "a")


# ---- ranges


@pytest.mark.parametrize("kind", ["str", "ObjectId", "both"])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 10, 101])
def test_ranges_are_disjoint_and_complete(kind: str, count: int) -> None:
    rng = random.Random(count)
    ids: list[Id] = []
    for number in range(count):
        text = kind == "str" or (kind == "both" and rng.random() < 0.5)
        ids.append(f"{rng.random()}-{number}" if text else ObjectId())

    def within(part: Any) -> list[Id]:
        """Return the ids in one of the ranges of a part."""
        return [
            id
            for id in ids
            if any(type(id) is type(least) and least <= id <= most for least, most in part)
        ]

    for parts in (1, 2, 3, 7, 200):
        held = [within(part) for part in divided(ids, parts)]
        assert len(held) == min(parts, count)
        assert sorted(map(str, (id for part in held for id in part))) == sorted(map(str, ids))
        sizes = [len(part) for part in held]
        assert not sizes or max(sizes) - min(sizes) <= 1


# ---- everything at once


@dataclass
class Checker:
    """Watches which messages are read and which are finished."""

    #: The messages that were read, each with the token.
    read: set[tuple[Id, str]] = field(default_factory=set)
    finished: list[Id] = field(default_factory=list)
    #: The numbers of claims in the order of the claims.
    claimed: list[int] = field(default_factory=list)
    fenced: int = 0

    def changed(self, before: dict[str, Any], after: dict[str, Any] | None) -> None:
        """Record a change."""
        state = before["_id"] == "~claim:a~g"
        if state and after is not None and after["claimed"] != before["claimed"]:
            assert after["claimed"] > before["claimed"]
            self.claimed.append(after["claimed"])
        if after is None:
            assert (before["_id"], before["token"]) in self.read, f"{before} was finished unread"
            self.finished.append(before["_id"])


def runner(
    process: Process, backend: QueuePlans, checker: Checker, rng: random.Random, lease: float
) -> Task:
    """Process one batch after the other, until nothing is left or a takeover fences the runner.

    The runner sometimes renews, and sometimes fails.
    """
    claims, world = NamedClaims(backend, "g"), process.world
    try:
        while True:
            token, upto, ids = yield from process.run(claims.begin(rng.randint(1, 8), lease))
            if not ids:
                return
            for span in (yield from process.run(claims.ranges(token, 0, upto, rng.randint(1, 3)))):
                for document in (yield from process.run(claims.read(span))):
                    checker.read.add((document["_id"], token))
            for _ in range(rng.randint(0, 2)):
                yield world.sleep(rng.uniform(0, 1000 * lease))
                yield from process.run(claims.renew(token, lease))
            if rng.random() < 0.2:
                yield from process.run(claims.rollback(token, upto, "by chance"))
            else:
                yield from process.run(claims.acknowledge(token, upto))
    except Fenced:
        checker.fenced += 1


def other_group(
    process: Process, backend: QueuePlans, checker: Checker, rng: random.Random, lease: float
) -> Task:
    """Take expired messages, as another group does, and give some of them back."""
    claims, world = NamedClaims(backend, "other_group"), process.world
    for _ in range(10):
        yield world.sleep(rng.uniform(0, 2000 * lease))
        token, upto, ids = yield from process.run(claims.begin(rng.randint(1, 3), lease))
        if rng.random() < 0.5:
            yield from process.run(claims.rollback(token, upto))
        else:
            checker.read |= {(id, token) for id in ids}
            yield from process.run(claims.acknowledge(token, upto))


@pytest.mark.parametrize("seed", sampled(range(60), few=20))
def test_dying_runners_lose_nothing_and_finish_nothing_unread(seed: int) -> None:
    rng = random.Random(seed)
    world = World(seed)
    backoff = Backoff(base=0.01, maximum=0.05)
    backend = plans_of("a", Options(dead_letter="a.dead", max_tries=None, backoff=backoff))
    ids = [f"m{number:02}" for number in range(25)]
    lease = rng.choice([0.02, 0.1, 5.0])
    checker = Checker()
    world.store.on_change = checker.changed
    store(world, *ids)
    for number in range(6):
        process = Process(world, "a")
        task: Generator[Pause, None, Any] = runner(process, backend, checker, rng, lease)
        if number < 5:  # the last one survives
            task = cut(task, rng.randint(1, 60))
        world.spawn(task, rng.uniform(0, 300) if number < 5 else 400)
    world.spawn(
        cut(other_group(Process(world, "a"), backend, checker, rng, lease), rng.randint(1, 100))
    )
    world.run(60_000)
    last = Process(world, "a")
    world.spawn(runner(last, backend, checker, random.Random(seed), lease), 60_000)
    world.run(300_000)
    assert sorted(checker.finished) == ids
    assert [id for id in world.store.documents if not str(id).startswith("~")] == []
    # No number occurs twice, and none decreases.
    assert checker.claimed == sorted({*checker.claimed})


def test_simulation_reaches_fencing_and_crashes() -> None:
    """Runners are fenced and die with messages; otherwise the test would prove nothing."""
    fenced = 0
    for seed in range(20):
        rng, world, checker = random.Random(seed), World(seed), Checker()
        backoff = Backoff(base=0)
        backend = plans_of("a", Options(dead_letter="a.dead", max_tries=None, backoff=backoff))
        store(world, *(f"m{number}" for number in range(25)))
        for _ in range(3):
            world.spawn(runner(Process(world, "a"), backend, checker, rng, 0.1), rng.uniform(0, 50))
        world.run(60_000)
        fenced += checker.fenced
    assert fenced > 10
