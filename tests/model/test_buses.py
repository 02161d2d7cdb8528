"""Waiting consumers and a bus that loses, repeats and delays signals. There is no database.

Real plans run in virtual time. Whatever happens to the signals:

- the fallback poll receives every message at the latest,
- no message is received while another consumer holds a live lease on it,
- no message is received after it was finished, and none is lost.

Consumers of several clients wait at three queues. Messages become ready in every way:
pushes with delays and keys, rollbacks, releases, expired leases, moves, burials, redrives, replays
and a pause.
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
from pyqueue.backends import managing, receiving, transitions
from pyqueue.backends.options import Options
from pyqueue.backends.queue_plans import QueuePlans, plans_of
from pyqueue.backends.receiving import PAUSE_READ_INTERVAL
from pyqueue.backends.scan import ScanState
from pyqueue.requests import Plan, Signal
from tests.model.profiles import LONG, SHORT
from tests.plans.store import Process, Task, World, instant

# Everything here is in milliseconds of virtual time.
POLL = 15_000.0
#: How much the commands and the work of other consumers add to a limit.
TOLERANCE = 1_500.0
STEP = 250.0
#: The largest error of a client's clock.
SKEW = 40.0

QUEUES = ("a", "b", "a.dead")
FAULT_RATES = [(0.0, 0.0, 0.0), (1.0, 0.0, 0.0), (0.4, 0.4, 0.4), (0.0, 1.0, 1.0)]


class PromiseBroken(AssertionError):
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
    """Receives again and again, and settles by these ways in turn."""

    client: int = 0
    queue: str = "a"
    limit: int = 1
    timeout: float | None = None
    ends: tuple[str, ...] = ("commit",)
    lease: float = 5_000
    pop: bool = False


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a client."""

    at: float
    client: int
    queue: str
    what: str


class ClientQueue(Process):
    """One queue of one client.

    A signal that it sends reaches the other queues of the same client at once.
    """

    def __init__(
        self, world: World, queue: str, client: dict[str, ClientQueue], skew: float
    ) -> None:
        super().__init__(world, queue, skew=skew, scan=ScanState)
        self.client = client
        client[queue] = self

    def _answer(self, request: Any, slow: float) -> Generator[Any, None, Any]:
        if (
            isinstance(request, Signal)
            and request.queue != self.queue
            and request.queue in self.client
        ):
            other = self.client[request.queue]
            other.waiters.on_signal(request.when, other.now())
        return (yield from super()._answer(request, slow))


class Scenario:
    """A simulated world, the operations in it, and the checks of the promises."""

    def __init__(
        self,
        *,
        consumers: list[Consumer],
        pushes: list[Push] = [],  # noqa: B006  # never modified
        operations: list[Operation] = [],  # noqa: B006
        clients: int = 1,
        fault_rates: tuple[float, float, float] = (0, 0, 0),
        seed: int = 0,
    ) -> None:
        self.world = World(seed, lost=fault_rates[0], doubled=fault_rates[1], late=fault_rates[2])
        self.random = self.world.random
        options = Options(
            dead_letter="a.dead", max_tries=3, poll=POLL / 1000, backoff=Backoff(jitter=0)
        )
        self.queues = {name: plans_of(name, options) for name in QUEUES}
        self.queues["b"] = plans_of("b", replace(options, history=10**6))
        self.clients: list[dict[str, ClientQueue]] = []
        for _ in range(clients):
            client: dict[str, ClientQueue] = {}
            skew = self.random.uniform(-SKEW, SKEW) if clients > 1 else 0
            for name in QUEUES:
                ClientQueue(self.world, name, client, skew)
            self.clients.append(client)
        #: Queues at which a consumer waits for ever, so that every message is received.
        self.served = {each.queue for each in consumers if each.timeout is None}
        self.pushed: set[Any] = set()
        self.delivered: list[Any] = []
        self.tokens: set[tuple[Any, str]] = set()
        self.finished: set[Any] = set()
        #: Since when each queue is paused, and when each was last resumed.
        self.paused: dict[str, float] = {}
        self.resumed = dict.fromkeys(QUEUES, 0.0)
        #: How many messages a purge deleted.
        self.purged = 0
        self.world.store.on_change = self._changed
        for each in consumers:
            self.world.spawn(self._consume(self.clients[each.client][each.queue], each))
        for push in pushes:
            self.world.spawn(self._push(self.clients[push.client][push.queue], push), push.at)
        for operation in operations:
            self.world.spawn(
                self._do(self.clients[operation.client][operation.queue], operation), operation.at
            )

    # ---- the operations

    def _push(self, client_queue: ClientQueue, push: Push) -> Task:
        plan = self.queues[push.queue].push(
            range(push.count),
            delay=push.delay / 1000,
            keys=[push.key] * push.count if push.key else None,
            on_duplicate="replace",
        )
        self.pushed.update((yield from client_queue.run(plan)))

    def _consume(self, client_queue: ClientQueue, consumer: Consumer) -> Task:
        turn = 0
        timeout = None if consumer.timeout is None else consumer.timeout / 1000
        queue = self.queues[consumer.queue]
        while True:
            began = self.world.time
            lease = None if consumer.pop else consumer.lease / 1000
            given = yield from client_queue.run(
                queue.receive(
                    client_queue.waiters,
                    consumer.limit,
                    timeout=timeout,
                    pop=consumer.pop,
                    lease=lease,
                )
            )
            took = self.world.time - began
            if not given and not -2 <= took - (consumer.timeout or 0) <= TOLERANCE:
                raise PromiseBroken(
                    f"a receive with a time-out of {consumer.timeout} ms took {took:.0f} ms"
                )
            for each in given:
                self._deliver(consumer.queue, each)
            for each in given if not consumer.pop else ():
                yield self.world.sleep(self.random.uniform(0, 5))
                often = self.delivered.count(each.id) > 8  # otherwise some would circulate for ever
                yield from self._settle(
                    client_queue,
                    queue,
                    each,
                    "commit" if often else consumer.ends[turn % len(consumer.ends)],
                )
                turn += 1

    def _deliver(self, queue: str, each: Any) -> None:
        time = self.world.time
        if each.id in self.finished:
            raise PromiseBroken(f"{each.id} came again after it was finished, at {time:.0f}")
        if (
            time - self.paused.get(queue, time)
            > 1000 * PAUSE_READ_INTERVAL.total_seconds() + TOLERANCE
        ):
            raise PromiseBroken(
                f"{each.id} came from {queue} at {time:.0f}, paused since {self.paused[queue]:.0f}"
            )
        self.delivered.append(each.id)
        if not isinstance(each, Reservation):
            self.finished.add(each.id)
        elif (each.id, each.token) in self.tokens:
            raise PromiseBroken(f"{each.id} came twice by one claim, at {time:.0f}")
        else:
            self.tokens.add((each.id, each.token))

    def _settle(
        self, client_queue: ClientQueue, queue: QueuePlans, each: Reservation[Any], how: str
    ) -> Task:
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
            yield from client_queue.run(plans[how]())
        except LeaseLost:
            if each.key is None and each.until > instant(self.world.time + 2 * SKEW):
                raise PromiseBroken(
                    f"{each.id} was lost under a live lease, at {self.world.time:.0f}"
                ) from None
        else:
            if how == "commit":
                self.finished.add(each.id)

    def _do(self, client_queue: ClientQueue, operation: Operation) -> Task:
        queue, first = self.queues[operation.queue], min(self.pushed, default="none")
        plans: dict[str, Callable[[], Plan[Any]]] = {
            "redrive": queue.redrive,
            "notify": lambda: managing.notify(queue.queue),
            "pause": lambda: queue.pause(True),
            "resume": lambda: queue.pause(False),
            "purge": queue.purge,
            "remove": lambda: queue.remove(first),
        }
        if operation.what == "replay":
            done = [each.id for each in (yield from client_queue.run(queue.history(3)))]
            self.finished.difference_update(done)
            yield from client_queue.run(queue.replay(tuple(done)))
            return
        answer = yield from client_queue.run(plans[operation.what]())
        if operation.what == "purge":
            self.purged += answer
        elif operation.what == "remove" and answer:
            self.finished.add(first)
        elif operation.what == "pause":
            self.paused.setdefault(operation.queue, self.world.time)
        elif operation.what == "resume":
            self.paused.pop(operation.queue, None)
            self.resumed[operation.queue] = self.world.time

    # ---- the promises

    def _changed(self, before: dict[str, Any], after: dict[str, Any] | None) -> None:
        """Check that no claim takes a message under a live lease."""
        held = before.get("token") is not None and before["when"] > instant(
            self.world.time + 2 * SKEW
        )
        if (
            held
            and after
            and "processed" not in after
            and after.get("token") not in (None, before["token"])
        ):
            raise PromiseBroken(
                f"{before['_id']} was claimed under a live lease, at {self.world.time:.0f}"
            )

    def run(self, seconds: float) -> None:
        """Run the operations and check the promises."""
        end = self.world.time + seconds * 1000
        while self.world.time < end:
            self.world.run(self.world.time + STEP)
            for queue in self.served - set(self.paused):
                for since, document in self.world.store.ready(queue):
                    waits = self.world.time - max(since, self.resumed[queue])
                    if waits > POLL + TOLERANCE:
                        raise PromiseBroken(
                            f"{document['_id']} waits in {queue} for {waits:.0f} ms, "
                            f"at {self.world.time:.0f}"
                        )
        gone = self.pushed - set(self.world.store.documents) - self.finished
        if len(gone) != self.purged:
            raise PromiseBroken(f"gone are {gone}, of which {self.purged} were purged")


# ---- random scenarios

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
OPERATIONS = [
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
def scenarios(draw: st.DrawFn) -> dict[str, Any]:
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
    operations = draw(
        st.lists(
            st.builds(
                Operation,
                at=st.integers(500, 15_000).map(float),
                client=which,
                queue=st.sampled_from(QUEUES),
                what=st.sampled_from(OPERATIONS),
            ),
            max_size=6,
        )
    )
    return {
        "consumers": consumers,
        "pushes": pushes,
        "operations": operations,
        "clients": clients,
        "fault_rates": draw(st.sampled_from(FAULT_RATES)),
        "seed": draw(st.integers(0, 2**16)),
    }


def play(scenario: dict[str, Any]) -> Scenario:
    played = Scenario(**scenario)
    played.run(38)
    return played


@SHORT(max_examples=20)
@given(scenarios())
def test_poll_receives_every_message_and_none_twice(scenario: dict[str, Any]) -> None:
    play(scenario)


@pytest.mark.slow
@LONG(max_examples=1_500)
@given(scenarios())
def test_poll_receives_every_message_once_in_the_long_run(
    scenario: dict[str, Any],
) -> None:
    play(scenario)


# ---- without a rule, the checks fail

#: The signal for the message of another client is lost.
LOST_SIGNAL: dict[str, Any] = {
    "consumers": [Consumer()],
    "pushes": [Push(4_000, client=1)],
    "clients": 2,
    "fault_rates": (1.0, 0.0, 0.0),
}
#: One consumer dies with a message while another one waits.
ABANDONED: dict[str, Any] = {
    "consumers": [Consumer(ends=("abandon",), lease=2_000), Consumer(client=1, lease=2_000)],
    "pushes": [Push(300), Push(400, client=1)],
    "clients": 2,
}


def sleepy(queue: str, scan: ScanState, now: datetime, poll_s: float) -> Plan[datetime]:
    """Wait for the bus alone."""
    yield from WAKE_TIME(queue, scan, now, poll_s)
    return now + timedelta(hours=1)


WAKE_TIME = receiving.wake_time


def greedy(queue: str, now: datetime, start: Any) -> dict[str, Any]:
    """Claim any message."""
    return {"q": queue, "_id": {"$ne": transitions.record_id(queue)}}


def test_consumer_without_a_poll_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(play(LOST_SIGNAL).delivered) == 1
    monkeypatch.setattr(receiving, "wake_time", sleepy)
    with pytest.raises(PromiseBroken, match="waits in a for"):
        play(LOST_SIGNAL)


def test_claim_without_the_time_receives_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert len(play(ABANDONED).delivered) > 2
    monkeypatch.setattr(transitions, "claimable", greedy)
    with pytest.raises(PromiseBroken, match="under a live lease"):
        play(ABANDONED)
