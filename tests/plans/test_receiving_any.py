"""Receiving from several sources: their order, and who is woken when the caller leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

import pytest

from pyqueue import Client, QueueError, Unavailable, client_receiving
from pyqueue.backends.receiving_any import Source, receive
from pyqueue.backends.streams.plans import StreamPlans
from pyqueue.payloads import Codec
from pyqueue.requests import Coalesce, Plan
from pyqueue.runtime.connecting import runner_of
from pyqueue.waiting_any import WaitForAny
from tests.plans.faults import each_command
from tests.plans.runner import Runner, after
from tests.plans.steps import FAULT_AT, Cut, Steps

# ---- with prepared answers


class Place:
    """A source that gives prepared answers: messages or an error for each round, then nothing."""

    def __init__(self, name: str, *answers: Any, wakes: float = 15) -> None:
        self.answers = list(answers)
        self.wakes = wakes
        #: The limits of the receives from it, and how often a wake was passed on.
        self.limits: list[int] = []
        self.passed = 0
        self.given_back: list[Any] = []
        waiting: Any = self
        self.source = Source(name, waiting, self.receive, self.give_back, self.wake_time)

    def wake_next(self, found: bool) -> None:
        self.passed += 1

    def receive(self, limit: int) -> Plan[list[Any]]:
        yield from ()
        self.limits.append(limit)
        answer = self.answers.pop(0) if self.answers else []
        self.wake_next(bool(answer))  # as every receive does
        if isinstance(answer, Exception):
            raise answer
        return list(answer)

    def give_back(self, held: Sequence[Any]) -> Plan[None]:
        yield from ()
        self.given_back += held

    def wake_time(self) -> Plan[datetime]:
        yield from ()
        return after(self.wakes)


def run(places: Sequence[Place], limit: int = 9, timeout: float | None = 0) -> list[Any]:
    """Receive from places. Every wait ends at its time."""
    runner = Runner()
    runner.on_wait = runner.pass_time
    return runner.run(receive([each.source for each in places], limit, timeout))


def at_the_wait(places: Sequence[Place]) -> Plan[list[Any]]:
    """Return a receive that waits for the first time."""
    runner, plan = Runner(), receive([each.source for each in places], 9, None)
    request = next(plan)
    while not isinstance(request, WaitForAny):
        request = plan.send(runner._answer(request))
    return plan


def test_sources_are_received_from_in_order_up_to_the_limit() -> None:
    one, two, three = Place("a", "ab"), Place("b", "cd"), Place("c", "e")
    assert run([one, two, three], 4) == ["a", "b", "c", "d"]
    assert (one.limits, two.limits, three.limits) == ([4], [2], [])


def test_round_starts_again_at_the_first_source() -> None:
    one, two = Place("a", "", "x"), Place("b", "", "y", wakes=3)
    assert run([one, two], 1, None) == ["x"]
    assert (one.limits, two.limits) == ([1, 1], [1])


def test_wait_ends_at_the_timeout() -> None:
    one, two = Place("a"), Place("b", wakes=3)
    assert run([one, two], timeout=2) == []
    assert (len(one.limits), len(two.limits)) == (2, 2)
    assert run([one, two], timeout=0) == []
    assert len(one.limits) == 3


def test_error_counts_only_if_nothing_was_found() -> None:
    gone = Unavailable("no answer")
    assert run([Place("a", "x"), Place("b", gone), Place("c", "z")]) == ["x"]
    with pytest.raises(Unavailable, match="no answer"):
        run([Place("a"), Place("b", gone), Place("c", "z")])


def test_caller_that_leaves_passes_its_wakes_on() -> None:
    """A round passes on the wake of each source that it reaches, and the caller the rest."""
    one, two = Place("a", "", "x"), Place("b")
    assert run([one, two], 1, None) == ["x"]
    assert (one.passed, two.passed) == (2, 2)
    failing = Place("a", "", Unavailable("no answer"))
    two = Place("b")
    with pytest.raises(Unavailable):
        run([failing, two], 1, None)
    assert (failing.passed, two.passed) == (2, 2)


@pytest.mark.parametrize("error", [asyncio.CancelledError, KeyboardInterrupt, GeneratorExit])
def test_cancelled_wait_passes_its_wakes_on(error: type[BaseException]) -> None:
    places = [Place("a"), Place("b"), Place("c")]
    plan = at_the_wait(places)
    with pytest.raises(error):
        plan.throw(error())
    assert [each.passed for each in places] == [2, 2, 2]


def test_cancelled_round_passes_its_wakes_on_and_gives_back() -> None:
    """The batch of the round continues without its caller."""
    places = [Place("a", "", "xy"), Place("b", "", "z")]
    plan = at_the_wait(places)
    batch = plan.send(True)
    assert isinstance(batch, Coalesce)
    with pytest.raises(asyncio.CancelledError):
        plan.throw(asyncio.CancelledError())
    assert [each.passed for each in places] == [2, 2]
    (found,) = Runner().run(batch.batch([batch.item]))
    assert batch.undo is not None
    Runner().run(batch.undo(found))
    assert [each.given_back for each in places] == [["x", "y"], ["z"]]


def test_nothing_is_given_back_after_an_empty_round() -> None:
    """An empty result counts as false, and is not given back."""
    plan = receive([Place("a").source], 1, 0)
    next(plan)
    batch = plan.send(0.0)
    assert isinstance(batch, Coalesce)
    assert Runner().run(batch.batch([batch.item])) == [[]]


def test_received_messages_are_told_by_source() -> None:
    runner = Runner()
    places = [Place("a", "x"), Place("b"), Place("c", "yz")]
    runner.run(receive([each.source for each in places], 9, None))
    told = [(each.event, each.queue, each.items) for each in runner.told]
    assert told == [("received", "a", ["x"]), ("received", "c", ["y", "z"])]


# ---- with queues


@pytest.fixture
def client() -> Iterator[Client]:
    """Return a client whose queues are received from in a store of steps."""
    with Client("memory:", owner="me") as client:
        yield client


def filled() -> Steps:
    """Return a store with two messages in each of two queues and in a stream."""
    steps = Steps()
    with Client("memory:") as maker:
        for name in ("a", "b"):
            queue = maker.queue(name, kind="standard")
            steps.run(queue._push_many([f"{name}1", f"{name}2"], {}))
    steps.run(StreamPlans("log", Codec(), {}).append(["log1", "log2"]))
    return steps


def taking(client: Client, limit: int) -> Plan[list[Any]]:
    """Return a plan that receives from the group, then from both queues."""
    queues = [
        client.stream("log").consumer("g", max_tries=None),
        client.queue("a", kind="standard", max_tries=None),
        client.queue("b", kind="standard", max_tries=None),
    ]
    return client_receiving.receive(runner_of(client), queues, limit, 0)


def test_each_queue_is_checked_after_its_own_part_of_the_poll(client: Client) -> None:
    queues = [client.queue(name, kind="standard", poll=16) for name in map(str, range(20))]
    steps, driver = Steps(), runner_of(client)
    sources = [client_receiving._source(driver, queue) for queue in queues]
    waits = list[float]()
    for source, queue in zip(sources, queues, strict=True):
        scan = driver.waiters(queue.name).scan
        scan.due_known, scan.rescan_at = True, None
        waits.append((steps.run(source.wake_time()) - steps.now).total_seconds())
    assert 12 <= min(waits) < max(waits) <= 16
    assert len(set(waits)) == 20


def test_queues_and_groups_are_received_in_order(client: Client) -> None:
    steps = filled()
    held = steps.run(taking(client, 5))
    assert [each.payload for each in held] == ["log1", "log2", "a1", "a2", "b1"]
    assert [each.payload for each in steps.run(taking(client, 5))] == ["b2"]
    assert steps.run(taking(client, 5)) == []


@each_command(3)
@pytest.mark.parametrize("fault", FAULT_AT)
def test_receive_is_disturbed_anywhere(client: Client, fault: str, every: int) -> None:
    """Whatever it does not return comes back: a message that was claimed, when its lease ends."""
    at, ended = 0, False
    while not ended:
        steps, held = filled(), list[Any]()
        with Client("memory:", owner="me") as process:
            try:
                held = steps.run(taking(process, 6), FAULT_AT[fault](at))
                ended = len(steps.commands) <= at
            except (Cut, QueueError):
                pass
        steps.seconds += 61
        steps.collection.delete_many({"_id": {"$in": [each.id for each in held]}})
        with Client("memory:", owner="me") as heir:
            rest = list[Any]()
            while some := steps.run(taking(heir, 9)):  # lapsed messages come one by one
                rest += some
        mine = {each.payload for each in held}
        expected = {"a1", "a2", "b1", "b2", "log1", "log2"}
        assert {each.payload for each in rest} | mine == expected
        assert all(each.tries <= 2 for each in rest)
        at += every
    assert len(held) == 6
    assert at > 6


def test_cancelled_receive_leaves_messages_as_before(client: Client) -> None:
    """The same place, tries and deliveries."""
    steps = filled()
    before = {each["_id"]: each for each in steps.all() if "payload" in each}
    plan = taking(client, 5)
    request = next(plan)
    while not isinstance(request, Coalesce):
        request = plan.send(0.0)  # the monotonic time
    (found,) = steps.run(request.batch([request.item]))
    assert sum(len(some) for _, some in found) == 5
    assert request.undo is not None
    steps.run(request.undo(found))
    left = {each["_id"]: each for each in steps.all() if "payload" in each}
    for each in left.values():
        if each.get("deliveries") == 0:
            del each["deliveries"]
    assert left == before
    again = steps.run(taking(client, 9))
    assert [(each.payload, each.tries) for each in again] == [
        (payload, 1) for payload in ("log1", "log2", "a1", "a2", "b1", "b2")
    ]
