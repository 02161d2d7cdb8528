"""Waiting consumers and a bus that drops, doubles and delays: real plans in virtual time. No database.

Whatever becomes of the signals, every message is received at the latest by the fallback poll, none under another's live lease, none again
after it was finished, and none is lost. Consumers of several clients wait at three queues, and everything that makes messages ready is
done meanwhile: pushes with delays and keys, rollbacks, releases, leases that run out, moves, burials, redrives, replays, a pause.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyqueue import UNCHANGED, Backoff, LeaseLost, Reservation
from pyqueue.backends import receiving, transitions
from pyqueue.backends.options import Options
from pyqueue.backends.queue_plans import QueuePlans
from pyqueue.backends.receiving import PAUSE_READ_INTERVAL_S
from pyqueue.backends.scan import ScanState
from pyqueue.requests import Plan, Signal
from tests.model.profiles import LONG, SHORT
from tests.plans.store import Process, Task, World, instant

# Everything here is in milliseconds of virtual time.
POLL = 15_000.0
#: What the commands and the work of the others add to a limit.
TOLERANCE = 1_500.0
STEP = 250.0
#: By how much the clocks of clients are off at most.
SKEW = 40.0

QUEUES = ("a", "b", "a.dead")
FATES = [(0.0, 0.0, 0.0), (1.0, 0.0, 0.0), (0.4, 0.4, 0.4), (0.0, 1.0, 1.0)]


class Broken(AssertionError):
    """A promise was not kept."""


@dataclass(frozen=True, slots=True)
class Push:
    at: float
    client: int = 0
    queue: str = "a"
    count: int = 1
    delay: float = 0
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Consumer:
    """One who receives again and again, and ends what it got in these ways by turns."""

    client: int = 0
    queue: str = "a"
    limit: int = 1
    timeout: float | None = None
    ends: tuple[str, ...] = ("commit",)
    lease: float = 5_000
    pop: bool = False


@dataclass(frozen=True, slots=True)
class Deed:
    """Something that anyone does."""

    at: float
    client: int
    queue: str
    what: str


class Seat(Process):
    """What one client has of one queue; its other queues know at once what this one says of them."""

    def __init__(self, world: World, queue: str, client: dict[str, Seat], skew: float) -> None:
        super().__init__(world, queue, skew=skew, head=ScanState)
        self.client = client
        client[queue] = self

    def _answer(self, request: Any, slow: float) -> Generator[Any, None, Any]:
        if (
            isinstance(request, Signal)
            and request.queue != self.queue
            and request.queue in self.client
        ):
            other = self.client[request.queue]
            other.line.on_signal(request.when, other.now())
        return (yield from super()._answer(request, slow))


class Scene:
    """A world, what is done in it, and the watch over it."""

    def __init__(
        self,
        *,
        consumers: list[Consumer],
        pushes: list[Push] = [],  # noqa: B006  # never changed
        deeds: list[Deed] = [],  # noqa: B006
        clients: int = 1,
        fate: tuple[float, float, float] = (0, 0, 0),
        seed: int = 0,
    ) -> None:
        self.world = World(seed, lost=fate[0], doubled=fate[1], late=fate[2])
        self.random = self.world.random
        options = Options(
            dead_letter="a.dead", max_tries=3, poll=POLL / 1000, backoff=Backoff(jitter=0)
        )
        self.queues = {name: QueuePlans(name, options) for name in QUEUES}
        self.queues["b"] = QueuePlans("b", replace(options, history=10**6))
        self.clients: list[dict[str, Seat]] = []
        for _ in range(clients):
            client: dict[str, Seat] = {}
            skew = self.random.uniform(-SKEW, SKEW) if clients > 1 else 0
            for name in QUEUES:
                Seat(self.world, name, client, skew)
            self.clients.append(client)
        #: Where somebody waits for ever, so that everything is received.
        self.served = {each.queue for each in consumers if each.timeout is None}
        self.pushed: set[Any] = set()
        self.delivered: list[Any] = []
        self.tokens: set[tuple[Any, str]] = set()
        self.finished: set[Any] = set()
        #: Since when a queue is paused; and when it was resumed last.
        self.paused: dict[str, float] = {}
        self.resumed = dict.fromkeys(QUEUES, 0.0)
        #: How many a purge has deleted.
        self.purged = 0
        self.world.store.on_change = self._changed
        for each in consumers:
            self.world.spawn(self._consume(self.clients[each.client][each.queue], each))
        for push in pushes:
            self.world.spawn(self._push(self.clients[push.client][push.queue], push), push.at)
        for deed in deeds:
            self.world.spawn(self._do(self.clients[deed.client][deed.queue], deed), deed.at)

    # ---- what happens

    def _push(self, seat: Seat, push: Push) -> Task:
        plan = self.queues[push.queue].push(
            range(push.count),
            delay=push.delay / 1000,
            keys=[push.key] * push.count if push.key else None,
            on_duplicate="replace",
        )
        self.pushed.update((yield from seat.run(plan)))

    def _consume(self, seat: Seat, consumer: Consumer) -> Task:
        turn = 0
        timeout = None if consumer.timeout is None else consumer.timeout / 1000
        queue = self.queues[consumer.queue]
        while True:
            began = self.world.time
            lease = None if consumer.pop else consumer.lease / 1000
            given = yield from seat.run(
                queue.receive(
                    seat.line, consumer.limit, timeout=timeout, pop=consumer.pop, lease=lease
                )
            )
            took = self.world.time - began
            if not given and not -2 <= took - (consumer.timeout or 0) <= TOLERANCE:
                raise Broken(
                    f"a receive with a time-out of {consumer.timeout} ms took {took:.0f} ms"
                )
            for each in given:
                self._deliver(consumer.queue, each)
            for each in given if not consumer.pop else ():
                yield self.world.sleep(self.random.uniform(0, 5))
                often = self.delivered.count(each.id) > 8  # or some would go round and round
                yield from self._settle(
                    seat,
                    queue,
                    each,
                    "commit" if often else consumer.ends[turn % len(consumer.ends)],
                )
                turn += 1

    def _deliver(self, queue: str, each: Any) -> None:
        time = self.world.time
        if each.id in self.finished:
            raise Broken(f"{each.id} came again after it was finished, at {time:.0f}")
        if time - self.paused.get(queue, time) > 1000 * PAUSE_READ_INTERVAL_S + TOLERANCE:
            raise Broken(
                f"{each.id} came from {queue} at {time:.0f}, which is paused since {self.paused[queue]:.0f}"
            )
        self.delivered.append(each.id)
        if not isinstance(each, Reservation):
            self.finished.add(each.id)
        elif (each.id, each.token) in self.tokens:
            raise Broken(f"{each.id} came twice by one claim, at {time:.0f}")
        else:
            self.tokens.add((each.id, each.token))

    def _settle(self, seat: Seat, queue: QueuePlans, each: Reservation[Any], how: str) -> Task:
        plans: dict[str, Callable[[], Plan[None]]] = {
            "commit": lambda: queue.commit((each,)),
            "rollback": lambda: queue.rollback((each,), delay=0),
            "later": lambda: queue.rollback((each,), delay=0.7),
            "release": lambda: queue.release((each,)),
            "extend": lambda: queue.extend((each,), lease=1),
            "bury": lambda: queue.bury((each,)),
            "move": lambda: queue.move(
                [(each, UNCHANGED)], to=self.queues["b" if queue.queue == "a" else "a"]
            ),
        }
        if how == "abandon" or (how == "bury" and each.dead):
            return
        try:
            yield from seat.run(plans[how]())
        except LeaseLost:
            if each.key is None and each.until > instant(self.world.time + 2 * SKEW):
                raise Broken(
                    f"{each.id} was lost under a live lease, at {self.world.time:.0f}"
                ) from None
        else:
            if how == "commit":
                self.finished.add(each.id)

    def _do(self, seat: Seat, deed: Deed) -> Task:
        queue, first = self.queues[deed.queue], min(self.pushed, default="none")
        plans: dict[str, Callable[[], Plan[Any]]] = {
            "redrive": queue.redrive,
            "notify": queue.notify,
            "pause": lambda: queue.pause(True),
            "resume": lambda: queue.pause(False),
            "purge": queue.purge,
            "remove": lambda: queue.remove(first),
        }
        if deed.what == "replay":
            done = [each.id for each in (yield from seat.run(queue.history(3)))]
            self.finished.difference_update(done)
            yield from seat.run(queue.replay(tuple(done)))
            return
        answer = yield from seat.run(plans[deed.what]())
        if deed.what == "purge":
            self.purged += answer
        elif deed.what == "remove" and answer:
            self.finished.add(first)
        elif deed.what == "pause":
            self.paused.setdefault(deed.queue, self.world.time)
        elif deed.what == "resume":
            self.paused.pop(deed.queue, None)
            self.resumed[deed.queue] = self.world.time

    # ---- what must hold

    def _changed(self, before: dict[str, Any], after: dict[str, Any] | None) -> None:
        """No claim takes what is held under a live lease."""
        held = before.get("token") is not None and before["when"] > instant(
            self.world.time + 2 * SKEW
        )
        if (
            held
            and after
            and "processed" not in after
            and after.get("token") not in (None, before["token"])
        ):
            raise Broken(
                f"{before['_id']} was claimed under a live lease, at {self.world.time:.0f}"
            )

    def run(self, seconds: float) -> None:
        """Let it happen, and watch."""
        end = self.world.time + seconds * 1000
        while self.world.time < end:
            self.world.run(self.world.time + STEP)
            for queue in self.served - set(self.paused):
                for since, document in self.world.store.ready(queue):
                    waits = self.world.time - max(since, self.resumed[queue])
                    if waits > POLL + TOLERANCE:
                        raise Broken(
                            f"{document['_id']} waits in {queue} for {waits:.0f} ms, at {self.world.time:.0f}"
                        )
        gone = self.pushed - set(self.world.store.documents) - self.finished
        if len(gone) != self.purged:
            raise Broken(f"gone are {gone}, of which {self.purged} were purged")


# ---- whatever happens

ENDS = [
    "commit",
    "commit",
    "rollback",
    "later",
    "release",
    "abandon",
    "extend",
    "bury",
    "move",
    "move",
]
DEEDS = [
    "redrive",
    "redrive",
    "replay",
    "replay",
    "notify",
    "pause",
    "pause",
    "resume",
    "resume",
    "purge",
    "remove",
]


@st.composite
def scenes(draw: st.DrawFn) -> dict[str, Any]:
    clients = draw(st.integers(1, 3))
    which = st.integers(0, clients - 1)
    consumers = draw(
        st.lists(
            st.builds(
                Consumer,
                client=which,
                queue=st.sampled_from(["a", "a", "b", "a.dead"]),
                limit=st.sampled_from([1, 1, 3, 20]),
                timeout=st.sampled_from([None, None, None, 700.0]),
                ends=st.lists(st.sampled_from(ENDS), min_size=1, max_size=5).map(tuple),
                lease=st.sampled_from([500.0, 3_000.0, 30_000.0]),
                pop=st.sampled_from([False, False, False, True]),
            ),
            min_size=2,
            max_size=6,
        )
    )
    pushes = draw(
        st.lists(
            st.builds(
                Push,
                at=st.integers(0, 18_000).map(float),
                client=which,
                queue=st.sampled_from(["a", "a", "b"]),
                count=st.sampled_from([1, 1, 5, 25]),
                delay=st.sampled_from([0.0, 0.0, 300.0, 2_500.0]),
            )
            | st.builds(Push, at=st.integers(0, 18_000).map(float), client=which, key=st.just("k")),
            min_size=1,
            max_size=10,
        )
    )
    deeds = draw(
        st.lists(
            st.builds(
                Deed,
                at=st.integers(500, 15_000).map(float),
                client=which,
                queue=st.sampled_from(QUEUES),
                what=st.sampled_from(DEEDS),
            ),
            max_size=6,
        )
    )
    return {
        "consumers": consumers,
        "pushes": pushes,
        "deeds": deeds,
        "clients": clients,
        "fate": draw(st.sampled_from(FATES)),
        "seed": draw(st.integers(0, 2**16)),
    }


def play(scene: dict[str, Any]) -> Scene:
    played = Scene(**scene)
    played.run(38)
    return played


@SHORT(max_examples=60)
@given(scenes())
def test_every_message_is_received_by_the_poll_and_none_twice(scene: dict[str, Any]) -> None:
    play(scene)


@pytest.mark.slow
@LONG(max_examples=1_500)
@given(scenes())
def test_every_message_is_received_by_the_poll_and_none_twice_at_length(
    scene: dict[str, Any],
) -> None:
    play(scene)


# ---- without its rules, the watch objects

#: A message of another client, whose signal is lost.
UNTOLD: dict[str, Any] = {
    "consumers": [Consumer()],
    "pushes": [Push(4_000, client=1)],
    "clients": 2,
    "fate": (1.0, 0.0, 0.0),
}
#: One who dies with a message, and another who waits.
LEFT: dict[str, Any] = {
    "consumers": [Consumer(ends=("abandon",), lease=2_000), Consumer(client=1, lease=2_000)],
    "pushes": [Push(300), Push(400, client=1)],
    "clients": 2,
}


def sleepy(queue: str, scan: ScanState, now: datetime, poll_s: float) -> Plan[datetime]:
    """Wait for the bus alone."""
    yield from WAKE_TIME(queue, scan, now, poll_s)
    return now + timedelta(hours=1)


WAKE_TIME = receiving._wake_time


def greedy(queue: str, now: datetime, start: Any) -> dict[str, Any]:
    """Claim whatever there is."""
    return {"q": queue, "_id": {"$ne": transitions.record_id(queue)}}


def test_without_the_poll_it_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(play(UNTOLD).delivered) == 1
    monkeypatch.setattr(receiving, "_wake_time", sleepy)
    with pytest.raises(Broken, match="waits in a for"):
        play(UNTOLD)


def test_without_the_time_in_the_claim_it_is_received_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert len(play(LEFT).delivered) > 2
    monkeypatch.setattr(transitions, "claimable", greedy)
    with pytest.raises(Broken, match="under a live lease"):
        play(LEFT)
