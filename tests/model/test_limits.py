"""A machine over a queue with a limit that changes, compared with a model of possible starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pyqueue import Backoff, LeaseLost, Limit, Reservation
from pyqueue.backends import reshaping
from pyqueue.backends.limits import rates, scan, slots, waiting
from pyqueue.limits import FollowedLimit, key_of
from pyqueue.requests import Plan
from tests.model.limit_reference import MAX_TRIES, QUEUE, Item, Limited
from tests.model.places import Cluster, Place, memory_place, plans_place, virtual_time
from tests.model.profiles import LONG, SHORT

pytestmark = pytest.mark.xdist_group("hypothesis")

LEASE_MS = 10_000
ASIDE, DEAD = "b", "a.dead"

COUNTED = [
    Limit(concurrency=1),
    Limit(concurrency=3),
    Limit(concurrency=1, per="headers.t"),
    Limit(concurrency=2, per="headers.t"),
    Limit(concurrency=1, per="headers.u"),
]
PACED = [
    Limit(rate=1, period=2, burst=3),
    Limit(rate=4, burst=2),
    Limit(rate=1, burst=2, concurrency=2),
]
PACED_KEYS = [
    Limit(rate=1, period=2, burst=3, per="headers.t"),
    Limit(rate=1, period=20, burst=2, per="headers.t"),
    Limit(rate=1, burst=2, concurrency=1, per="headers.t"),
]
#: The limits of a queue of each kind.
OF_KIND: Mapping[str, Sequence[Limit]] = {
    "standard": [*COUNTED, *PACED, *PACED_KEYS],
    "priority": [*COUNTED, *PACED, *PACED_KEYS],
    "ordered": [each for each in [*COUNTED, *PACED] if each.per is None],
}

clients = st.integers(0, 2)
headers = st.sampled_from(
    [{"t": "x"}, {"t": "x"}, {"t": "x"}, {"t": "y"}, {"t": 1}, {"t": "1", "u": 2}, {}]
)
groups = st.sampled_from(["g", "g", "h", None])
levels = st.sampled_from([0, 4, 4, 9])
keys = st.sampled_from([None, None, None, "k", "l"])
delays = st.sampled_from([0, 0, 0, 1, 4, 12])
#: Positions in a list; the first entries are the most useful.
places = st.sampled_from([0, 0, 0, 1, 1, 2, 3, 5])


class LimitMachine(RuleBasedStateMachine):
    """Clients that use one queue whose limit changes."""

    #: Creates an empty database with clients of it.
    make: Callable[[], Cluster]
    kind: ClassVar[Literal["standard", "priority", "ordered"]] = "standard"
    limits: ClassVar[Sequence[Limit]] = ()

    def __init__(self) -> None:
        super().__init__()
        self.cluster = type(self).make()
        self.model = Limited(self.kind)
        self.handles: list[Reservation[Any]] = []

    def teardown(self) -> None:
        try:
            self.drain()
        finally:
            self.cluster.close()

    def queue(self, client: int, name: str = QUEUE) -> Any:
        """Return a queue of a client."""
        kind: dict[str, Any] = {"kind": self.kind, "dead_letter": DEAD, "max_tries": MAX_TRIES}
        if self.kind == "priority":
            kind["strict"] = True
        return self.cluster.clients[client].queue(
            name,
            lease=LEASE_MS / 1000,
            backoff=Backoff(base=0, jitter=0),
            **kind if name == QUEUE else {"max_tries": None},
        )

    @initialize(which=places, some=st.lists(headers, min_size=2, max_size=6))
    def begin(self, which: int, some: list[dict[str, Any]]) -> None:
        """Store a limit and messages."""
        assert self.queue(0).reserve(0) is None
        self.reshape(0, which, heard=True)
        for each in some:
            self.push(0, [each], None, 0, 4, None)

    # ---- in

    @rule(
        client=clients,
        some=st.lists(headers, min_size=1, max_size=4),
        key=keys,
        delay=delays,
        level=levels,
        group=groups,
    )
    def push(
        self,
        client: int,
        some: list[dict[str, Any]],
        key: str | None,
        delay: int,
        level: int,
        group: str | None,
    ) -> None:
        """Push messages with these headers. A key replaces the message that has it."""
        for each in some:
            id = f"m{self.model.entered:05d}"
            given: dict[str, Any] = {"headers": each, "delay": delay or None, "id": id}
            item = Item(id, each, 0, 0)
            if self.kind == "priority":
                given["priority"] = item.priority = level
            if self.kind == "ordered":
                given["group"] = item.group = group
            elif key is not None:
                given |= {"key": key, "on_duplicate": "replace"}
                item.key = key
                known = (each for each in self.model.of(QUEUE) if each.key == key)
                if (twin := next(known, None)) is not None:
                    item.id = twin.id
            answer = self.queue(client).push(id, **given)
            assert answer == item.id
            self.model.enter(item, self.cluster.now, delay=1000 * delay)

    @rule(client=clients, header=headers)
    def bring(self, client: int, header: dict[str, Any]) -> None:
        """Move a message in, with other headers."""
        held = self.queue(client, ASIDE).reserve(0)
        aside = self.model.of(ASIDE)
        assert (held is None) == (not aside)
        if held is not None:
            self.queue(client, ASIDE).move(held, to=self.queue(client), headers=header)
            item = self.model.live[held.id]
            item.headers = item.headers | header
            if held.priority is not None:  # a move takes the priority of its reservation
                item.priority = held.priority
            self.model.enter(item, self.cluster.now)

    @rule(client=clients)
    def redrive(self, client: int) -> None:
        dead = self.model.of(DEAD)
        assert self.queue(client, DEAD).redrive() == len(dead)
        for item in dead:
            self.model.enter(item, self.cluster.now)

    # ---- out

    @rule(client=clients, wanted=st.sampled_from([1, 1, 1, 2, 3, 20]))
    def reserve(self, client: int, wanted: int) -> None:
        self.receive(client, wanted)

    def receive(self, client: int, wanted: int) -> list[Reservation[Any]]:
        """Receive from the queue, and compare it with the model."""
        now, model = self.cluster.now, self.model
        may, surely = model.startable(client, now)
        ordered = model.keeps_order(now)  # a scan may end the claim of a slot that it meets
        held: list[Reservation[Any]] = self.queue(client).reserve_many(wanted, timeout=0)
        buried = self.learn(may)
        for dead in buried:
            model.leave(model.live[dead], DEAD, now)
        if buried:  # the next of its group may start in the same call
            may += [each for each in model.startable(client, now)[0] if each not in may]
        items = [model.live[str(each.id)] for each in held]
        assert len(items) == len(set(map(id, items))) <= wanted
        assert set(map(id, items)) <= set(map(id, may)), "one may not start"
        assert held or buried or not surely, f"{[each.id for each in surely]} could start"
        if ordered:
            first = [each for each in may if each.id not in buried][: len(items)]
            assert items == first, "not in the order of the queue"
        model.started(client, wanted, items, now)
        model.spend([model.live[each] for each in buried], now, started=False)
        for item, each in zip(items, held, strict=True):
            model.claim(item, each, now + LEASE_MS)
            assert each.tries == item.tries
        self.handles += held
        return held

    def learn(self, may: Sequence[Item]) -> set[str]:
        """Learn which lapsed claims a scan has ended. Return the messages it buried."""
        now, buried = self.cluster.now, set()
        stored = self.cluster.stored()
        for item in self.model.of(QUEUE):
            message, token = stored[item.id]
            if message.queue == DEAD:
                assert item.tries >= MAX_TRIES
                assert item in may
                buried.add(item.id)
            elif token is None and item.token is not None and item.when <= now:
                item.free()
        return buried

    # ---- settled by present and former holders

    @precondition(lambda self: self.handles)
    @rule(
        client=clients,
        place=places,
        end=st.sampled_from(
            [*("commit", "commit", "rollback", "rollback", "release", "bury", "move", "stay")]
        ),
        delay=delays,
        header=headers,
    )
    def settle(self, client: int, place: int, end: str, delay: int, header: dict[str, Any]) -> None:
        """End a claim. A former holder is refused."""
        held = self.handles.pop(place % len(self.handles))
        item, now = self.model.live.get(str(held.id)), self.cluster.now
        given: dict[str, Any] = {}
        if end == "rollback":
            given = {"delay": delay}
        elif end in ("move", "stay"):
            given = {"to": ASIDE if end == "move" else QUEUE, "headers": header}
        call = getattr(self.queue(client), "move" if end == "stay" else end)
        if item is None or item.token != held.token:
            with pytest.raises(LeaseLost):
                call(held, **given)
            return
        call(held, **given)
        if end == "commit":
            del self.model.live[item.id]
        elif end == "release":
            item.tries, item.when = item.tries - 1, item.due
            item.free()
        elif end == "bury" or (end == "rollback" and item.tries >= MAX_TRIES):
            self.model.leave(item, DEAD, now)
        elif end == "rollback":
            item.when = item.due = now + 1000 * delay
            item.free()
        else:
            item.headers = item.headers | header
            self.model.leave(item, ASIDE, now)
            if end == "stay":
                turn = item.place
                self.model.enter(item, now)
                item.place = turn

    @precondition(lambda self: self.handles)
    @rule(client=clients, place=places)
    def die(self, client: int, place: int) -> None:
        """End a claim, and die before the next message of its key is released."""
        held = self.handles[place % len(self.handles)]
        item, now = self.model.live.get(str(held.id)), self.cluster.now
        if item is None or item.token != held.token or not item.is_held(now):
            return
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(slots, "free", _nothing)
            self.queue(client).commit(held)
        if item.slot is not None:  # the next message comes when the lease would have ended
            self.model.left[item.slot[0]] = max(self.model.left.get(item.slot[0], 0), item.when)
        del self.model.live[item.id]

    @precondition(lambda self: self.handles)
    @rule(client=clients, place=places, seconds=st.sampled_from([1, 10, 30]))
    def extend(self, client: int, place: int, seconds: int) -> None:
        held = self.handles[place % len(self.handles)]
        item = self.model.live.get(str(held.id))
        if item is None or item.token != held.token:
            with pytest.raises(LeaseLost):
                self.queue(client).extend(held, lease=seconds)
            return
        self.queue(client).extend(held, lease=seconds)
        item.when = self.cluster.now + 1000 * seconds

    # ---- operations of any client

    @rule(client=clients, place=places, heard=st.booleans())
    def reshape(self, client: int, place: int, heard: bool) -> None:
        """Change the limit. Without a bus, all follow 5 s later."""
        limits = [*self.limits, None]
        limit = limits[(place + self.model.entered) % len(limits)]
        self.cluster.deaf = not heard
        self.cluster.clients[client].reshape(QUEUE, limit=limit or False)
        self.cluster.deaf = False
        if not heard:
            self.cluster.advance(5001)
        self.model.reshape(limit, self.cluster.now)

    @rule(
        client=clients,
        place=places,
        how=st.sampled_from(["remove", "remove", "remove", "purge", "pause", "resume", "resume"]),
    )
    def tidy(self, client: int, place: int, how: str) -> None:
        queue, model, now = self.queue(client), self.model, self.cluster.now
        free = [each for each in model.of(QUEUE) if not each.is_held(now)]
        if how == "remove":
            some = model.of(QUEUE)
            if some:
                item = some[place % len(some)]
                assert queue.remove(item.id) == (item in free)
                free = [item] if item in free else []
        elif how == "purge":
            assert queue.purge() == len(free)
        else:
            queue.pause() if how == "pause" else queue.resume()
            model.paused = how == "pause"
        if how in ("remove", "purge"):
            for item in free:
                del model.live[item.id]

    @precondition(lambda self: self.kind == "priority" and self.model.of(QUEUE))
    @rule(client=clients, place=places, level=levels)
    def reprioritize(self, client: int, place: int, level: int) -> None:
        some = self.model.of(QUEUE)
        item = some[place % len(some)]
        assert self.queue(client).reprioritize(item.id, level)
        item.priority = level

    @rule(milliseconds=st.sampled_from([1, 250, 1000, 4000, 10_000, 12_000, 100_000]))
    def advance(self, milliseconds: int) -> None:
        self.cluster.advance(milliseconds)

    # ---- invariants

    @rule(client=clients)
    def counts(self, client: int) -> None:
        found, now = self.queue(client).counts(), self.cluster.now
        some = self.model.of(QUEUE)
        held = sum(each.is_held(now) for each in some)
        assert (found.total, found.reserved) == (len(some), held)
        ready = sum(each.when <= now for each in some)
        limit = self.model.limit
        if self.kind == "ordered" or (limit is not None and limit.per is not None):
            assert found.ready <= ready  # deferred messages count as scheduled
        else:
            assert found.ready == ready

    @invariant()
    def stored_is_as_expected(self) -> None:
        stored = self.cluster.stored()
        found = {id: (message.queue, token) for id, (message, token) in stored.items()}
        assert found == {each.id: (each.queue, each.token) for each in self.model.live.values()}, (
            "a message is lost, or another claim holds it"
        )
        self.model.check(self.cluster.now)

    def drain(self) -> None:
        """Receive and commit everything. Nothing is forgotten."""
        self.queue(0).resume()
        self.model.paused = False
        left = self.model.of(QUEUE)
        while left:
            before = left
            for _ in range(10):
                while held := self.receive(0, 10):
                    self.queue(0).commit(*held)
                    for each in held:
                        del self.model.live[str(each.id)]
                self.cluster.advance(LEASE_MS)
            left = self.model.of(QUEUE)
            assert len(left) < len(before), "it does not go on"


def play(
    place: Place,
    how: settings,
    kind: Literal["standard", "priority", "ordered"] = "standard",
    limits: Sequence[Limit] | None = None,
) -> None:
    """Run the machine on a place."""
    with virtual_time() as time:

        class Here(LimitMachine):
            make = staticmethod(lambda: Cluster(place, time))

        Here.kind, Here.limits = kind, OF_KIND[kind] if limits is None else limits
        run_state_machine_as_test(Here, settings=how)


each_kind = pytest.mark.parametrize("kind", OF_KIND)


@each_kind
def test_limits_follow_the_model(kind: Any) -> None:
    play(plans_place(), SHORT(max_examples=12, stateful_step_count=30), kind)


def test_limits_follow_the_model_on_a_server(server: Place) -> None:
    """The server counts rates by its own clock, which a test cannot advance."""
    play(server, SHORT(max_examples=2, stateful_step_count=20), limits=COUNTED)


@pytest.mark.slow
@each_kind
def test_limits_follow_the_model_in_the_long_run(kind: Any) -> None:
    play(plans_place(), LONG(max_examples=1_000, stateful_step_count=60), kind)


@pytest.mark.slow
def test_limits_follow_the_model_on_mongomock() -> None:
    play(memory_place(), LONG(max_examples=100, stateful_step_count=40))


@pytest.mark.slow
def test_limits_follow_the_model_on_a_server_for_long(server: Place) -> None:
    play(server, LONG(max_examples=200, stateful_step_count=60), limits=COUNTED)


# ---- a broken rule is detected


def _nothing(*_: object, **__: object) -> Plan[None]:
    """Do nothing."""
    yield from ()


def _restores_nothing(*_: object, **__: object) -> Plan[waiting.Restored]:
    """Leave deferred messages."""
    yield from ()
    return waiting.Restored([], 0)


def _grants_all(self: rates.TakePermits, raw: Any) -> rates.Granted:
    return rates.Granted(self.wanted, raw["at"], raw["asked"])


def _one_more(concurrency: int, wanted: Mapping[str, int]) -> dict[str, slots.FreeSlots]:
    return ANY_SLOTS(concurrency + 1, wanted)


def _text_of(limit: Limit, document: Mapping[str, Any]) -> str:
    """Return one key for values that are equal as text."""
    return KEY_OF(limit, document).removeprefix("=")


def _follow_first(self: FollowedLimit, queue: str, shape: object) -> None:
    """Obey the first limit for ever."""
    if not self.known:
        FOLLOW(self, queue, shape)


ANY_SLOTS, KEY_OF, FOLLOW = slots.any_slots, key_of, FollowedLimit.follow

#: Changes of the product: the owners, the name, and the replacement.
BROKEN: dict[str, tuple[Sequence[object], str, object]] = {
    "a slot more": ([slots], "any_slots", _one_more),
    "lapsed claims have slots": ([slots], "_has_lapsed", lambda document, now: False),
    "the next one is left": ([slots], "free", _nothing),
    "deferred ones are left": ([waiting], "restore", _restores_nothing),
    "a removed limit defers": ([waiting, reshaping], "lift", _nothing),
    "changes are ignored": ([FollowedLimit], "follow", _follow_first),
    "keys are mixed up": ([scan], "key_of", _text_of),
    "permits are not counted": ([rates.TakePermits], "read", _grants_all),
}
#: Changes that show only when a consumer dies, or when a limit for each key is removed.
RARE = ("deferred ones are left", "a removed limit defers")


@pytest.mark.parametrize(
    "rule", [pytest.param(each, marks=[pytest.mark.slow] * (each in RARE)) for each in BROKEN]
)
def test_broken_rule_of_limits_is_detected(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    owners, name, value = BROKEN[rule]
    for owner in owners:
        monkeypatch.setattr(owner, name, value)
    how = SHORT(max_examples=1000, stateful_step_count=30, phases=[Phase.generate])
    with pytest.raises(AssertionError):
        play(plans_place(), how, limits=PACED if "permits" in rule else COUNTED)
