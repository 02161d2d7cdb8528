"""Objects that name no kind: they take the one of the record, and leave a new queue open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pyqueue import Client, ConfigurationError, Limit
from pyqueue.backends import all_queues, kind, namespace
from pyqueue.backends.options import Options
from pyqueue.backends.queue_plans import QueuePlans, found, plans_of
from pyqueue.backends.receiving import Waiting
from pyqueue.errors import TargetRefused
from pyqueue.requests import EnsureQueue, Find, Plan
from pyqueue.runtime import known_queues
from pyqueue.runtime.connecting import runner_of
from pyqueue.runtime.waiters import Waiters
from tests.plans.runner import NOW, message, record_of
from tests.plans.steps import Steps, at_each_command, lasting

KINDS = ["standard", "priority", "ordered", "bucket"]


def plans(queue: str = "a", kind: str | None = None, **options: Any) -> QueuePlans:
    return plans_of(queue, Options(dead_letter=f"{queue}.dead", **options), kind=kind)


def receive(kind: str | None, timeout: float | None = 0, **options: Any) -> Plan[list[Any]]:
    waiting: Waiting = Waiters("a")
    return plans(kind=kind, **options).receive(waiting, 10, timeout=timeout)


def made(by: str | None = None) -> Steps:
    """Return a store. ``by``: a kind that a consumer has named."""
    steps = lasting()
    if by is not None:
        steps.run(receive(by))
    return steps


def push() -> Plan[Any]:
    """Push values that can be iterated over once."""
    return plans().push(iter([1, 2, 3]), keys=["x", "y", None])


def move() -> Plan[Any]:
    """Move messages into an object that names no kind."""
    held = yield from plans("b", "standard").receive(Waiters("b"), 10, timeout=0)
    yield from plans("b").move([(each, each.payload) for each in held], to=plans())


# ---- messages that enter


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("enter", [push, move])
@pytest.mark.parametrize("dies", [False, True])
def test_kind_is_named_while_messages_enter(
    name: str, enter: Callable[[], Plan[Any]], dies: bool
) -> None:
    """The first consumer comes before each command. It receives all of them, once."""

    def before() -> Steps:
        steps = made()
        steps.run(plans("b", "standard").push([1, 2, 3]))
        return steps

    for steps, running in at_each_command(before, enter, least=2):
        payloads = [each.payload for each in steps.run(receive(name))]
        if dies:
            running.close()
        else:
            list(running)
            payloads += [each.payload for each in steps.run(receive(name))]
            assert sorted(payloads) == [1, 2, 3]
        assert (record_of(steps)["kind"], "open" in record_of(steps)) == (name, False)
    steps = before()
    steps.run(enter())
    assert record_of(steps)["open"], "an object that names no kind leaves it open"
    assert len(steps.run(receive(name))) == 3


@pytest.mark.parametrize("name", KINDS)
def test_stale_producer_is_received(name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client knows an open record for up to 5 s after another one has named the kind."""
    monkeypatch.setattr(known_queues, "_SHAPED_LIFETIME_S", 3600.0)
    with Client("memory:") as first, Client(first.database) as second:
        producer = first.queue("a")
        pushed = [producer.push(1)]
        consumer = second.queue("a", kind=name)
        assert [each.id for each in consumer.reserve_many(9, timeout=0)] == pushed
        more = [producer.push(2), *producer.push_many([3, 4])]
        # A scan by level misses messages without a priority; one in 16 goes by age.
        looks = [consumer.reserve_many(9, timeout=0) for _ in range(16)]
        assert [each.id for held in looks for each in held] == more
        for held in filter(None, looks):
            consumer.commit(*held)
        assert runner_of(first).open().known._records["a"][0].open, "it was stale"
        # Code that needs the kind finds out at once that it has changed.
        assert producer.purge() == 0
        assert producer.push_many([5, 6])
        assert len(second.queue("a").reserve_many(9, timeout=0)) == 2


def test_target_that_is_a_stream_is_refused() -> None:
    steps = made()
    steps.run(namespace.read_or_create_record(EnsureQueue("a", "stream")))
    steps.run(plans("b", "standard").push([1]))
    with pytest.raises(TargetRefused, match="stream"):
        steps.run(move())
    with pytest.raises(ConfigurationError, match=r"open it with client\.stream\(\)"):
        steps.run(plans().push([1]))


# ---- operations that make no record


@pytest.mark.parametrize(
    "operation",
    [
        *(lambda one: one.peek(), lambda one: one.counts(), lambda one: one.history()),
        *(lambda one: one.get("m"), lambda one: one.remove("m"), lambda one: one.replay(["m"])),
        *(lambda one: one.purge(), lambda one: one.redrive(), lambda one: one.next_when()),
        *(lambda one: one.receive(Waiters("a"), 1, timeout=0), found),
        lambda one: one.receive(Waiters("a"), 1, timeout=40, pop=True),
        lambda one: one.push([]),
    ],
)
@pytest.mark.parametrize("deleted", [False, True])
def test_mistyped_name_leaves_nothing(
    operation: Callable[[QueuePlans], Plan[Any]], deleted: bool
) -> None:
    steps = made()
    if deleted:
        steps.run(namespace.read_or_create_record(EnsureQueue("a", "bucket")))
        steps.run(all_queues.bury_record("a"))
        steps.seconds = 121
    before = steps.all()
    steps.run(operation(plans(lease=5)))
    assert steps.all() == before


def test_consumer_without_a_kind_waits_for_the_record() -> None:
    steps = made()
    running = steps.steps(receive(None, timeout=None))
    for _ in range(10):
        next(running)
    assert 30 < steps.seconds < 100, "it reads at each poll, and no more"
    assert record_of(steps) == {}
    steps.run(push())
    received: list[Any] = []

    def rest() -> Iterator[Any]:
        received.extend((yield from running))

    list(rest())
    assert sorted(each.payload for each in received) == [1, 2, 3]
    assert "open" not in record_of(steps), "to receive names the kind"
    assert record_of(steps)["kind"] == "standard"


@pytest.mark.parametrize("waiting", [False, True])
def test_waiting_for_a_record_keeps_to_the_timeout(waiting: bool) -> None:
    """Also once there is a record: nothing is ready, and the rest of the time is left."""
    steps = made()
    running = steps.steps(receive(None, timeout=50))
    while steps.seconds < 30:
        next(running)
    if waiting:
        steps.run(plans().push([1], delay=3600))
    assert list(running)
    assert 50 <= steps.seconds <= 65


@pytest.mark.parametrize("wrong", [{"limit": 0}, {"max_bytes": 0}, {"timeout": -1}, {"lease": 0}])
def test_wrong_arguments_are_refused_without_a_record(wrong: dict[str, Any]) -> None:
    call: dict[str, Any] = {"limit": 1, "timeout": 0} | wrong
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        made().run(plans().receive(Waiters("a"), call.pop("limit"), **call))


def test_message_without_a_record_is_received() -> None:
    """The record was lost. A queue with messages is not a mistyped name."""
    steps = made()
    steps.collection.insert_one(message("m"))
    assert [each.id for each in steps.run(receive(None))] == ["m"]


# ---- the kind that is there


@pytest.mark.parametrize("name", KINDS)
def test_object_without_a_kind_takes_the_kind_of_the_record(name: Any) -> None:
    with Client("memory:") as client:
        client.queue("a", kind=name).push_many([1, 2])
        queue = client.queue("a", lease=7)
        known_queues.KnownQueues.forget_records(runner_of(client).open().known)
        held = queue.reserve_many(9, timeout=0)
        assert [each.payload for each in held] == [1, 2]
        queue.commit(*held)
        stored = record_of(client)
        assert (stored["kind"], stored["options"]) == (name, {"lease": 7})
        assert queue.counts().total == 0
        assert queue.push_many([3, 4])
        assert client.queue("a", kind=name).purge() == 2


@pytest.mark.parametrize("receives", [False, True])
def test_receive_races_with_the_first_name(receives: bool) -> None:
    """Whichever names the kind first, both continue in it or are refused."""

    def before() -> Steps:
        steps = made()
        steps.run(plans().push([1]))
        return steps

    def plan() -> Plan[Any]:
        return receive(None) if receives else plans().pause(True)

    for steps, running in at_each_command(before, plan, least=2):
        try:
            steps.run(namespace.ensure("a", kind.lookup("bucket"), Options()))
        except ConfigurationError:
            assert receives
            assert record_of(steps)["kind"] == "standard"
        list(running)
        assert record_of(steps).get("paused", False) is not receives


# ---- options without a kind


def test_option_of_one_kind_needs_the_kind_or_such_a_queue() -> None:
    steps = made()
    text = r"pack: queue 'a' is of kind 'standard'.*kind='bucket'"
    for operation in (plans(shape={"pack": 5}).push([1]), receive(None, shape={"pack": 5})):
        with pytest.raises(ConfigurationError, match=text):
            steps.run(operation)
    assert record_of(steps) == {}
    steps = made("bucket")
    steps.run(plans(shape={"pack": 5}).push([1, 2]))
    assert record_of(steps)["shape"]["pack"] == 5


@pytest.mark.parametrize("receives", [False, True])
def test_limit_is_named_in_any_kind(receives: bool) -> None:
    limit = {"limit": Limit(rate=5).stored()}
    for name in (None, *KINDS):
        steps = made(name)
        steps.run(receive(None, shape=limit) if receives else plans(shape=limit).push([1]))
        stored = record_of(steps)
        assert stored["shape"]["limit"] == limit["limit"]
        assert stored["kind"] == (name or "standard")
        assert ("open" in stored) is (name is None and not receives)


def test_operation_on_another_named_kind_runs_once() -> None:
    """A target whose object names another kind stays refused."""
    steps = made("bucket")
    steps.run(plans("b").push([1]))
    [held] = steps.run(plans("b").receive(Waiters("b"), 1, timeout=0))
    with pytest.raises(ConfigurationError, match=r"'bucket'.*'ordered'"):
        steps.run(plans("b").move([(held, 1)], to=plans(kind="ordered")))
    reads = [each for each in steps.commands if isinstance(each, Find) and each.projection]
    assert len(reads) == 1, "it reads once who made the queue"


def test_deleted_queue_is_not_known_from_a_read() -> None:
    """A move by name after it makes the queue live again."""
    with Client("memory:") as client:
        queue, other = client.queue("a"), client.queue("b", kind="standard")
        other.push(2)
        queue.push(1)
        client.delete_queue("a", force=True)
        assert (queue.counts().total, len(client.queues())) == (0, 1)
        other.move(*other.reserve_many(1, timeout=0), to="a")
        stored = record_of(client)
        assert stored
        assert "deleted" not in stored
        known = runner_of(client).open().known
        assert known.kind_of(EnsureQueue("a", None)) == "standard", "an open kind is known, too"


def test_consumer_that_gives_up_wakes_the_next() -> None:
    waiting, woken = Waiters("a"), list[str]()
    for wake in (print, lambda: woken.append("the next")):
        waiting.enter(wake, NOW)
    waiting.leave(print, led=True)
    assert made().run(plans().receive(waiting, 1, timeout=20)) == []
    assert woken == ["the next"]
