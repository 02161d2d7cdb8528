"""Select: many messages are changed as they were read, wherever the process dies or sleeps.

The contract suite selects in all kinds, and on servers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any

import pytest

from pyqueue import BulkResult, ConfigurationError, LeaseLost, QueueError, Unavailable
from pyqueue.backends import changing, recovering, selecting
from pyqueue.backends.bucket import holding, packs
from pyqueue.backends.changing import Change, MoveTo, Redrive, Remove, Reprioritize, Requeue
from pyqueue.backends.managing import as_read
from pyqueue.backends.options import Options
from pyqueue.backends.queue_plans import QueuePlans, plans_of
from pyqueue.messages import Reservation
from pyqueue.requests import Document, Find, FindAndModify, Plan, Update, UpdateEach
from pyqueue.runtime.waiters import Waiters
from pyqueue.where import one_of
from tests.plans import test_packs
from tests.plans.faults import each_command
from tests.plans.runner import NOW, after, message, record, standard
from tests.plans.steps import FAULT_AT, WRITES, Cut, Steps, at_each_command, lost_request, resume

#: The selected messages of a scene. The rest must stay untouched.
EVEN = {"payload": one_of(0, 2, 4, 6, 8, 10)}
CHANGES: dict[str, Callable[[], Change]] = {
    "remove": Remove,
    "move": lambda: MoveTo("b"),
    "requeue": lambda: Requeue(None),
    "requeue at": lambda: Requeue(after(500)),
}
each_change = pytest.mark.parametrize("change", CHANGES)


def made(kind: str) -> QueuePlans:
    """Return the plans of a queue; "limited" is a standard queue with a limit per tenant."""
    if kind == "bucket":
        return test_packs.plans()
    shape = {"limit": {"concurrency": 2, "per": "headers.t"}} if kind == "limited" else {}
    name = "standard" if kind == "limited" else kind
    return plans_of("a", Options(dead_letter="a.dead", shape=shape), kind=name, owner="me")


KINDS = ("standard", "ordered", "priority", "limited", "bucket")
each_kind = pytest.mark.parametrize("kind", KINDS)


def select(plans: QueuePlans, how: Change, **options: Any) -> Plan[BulkResult]:
    """Return a change of the messages that match."""
    chosen = {name: options.get(name) for name in ("where", "state", "older", "error")}
    pace = selecting.paced(*(options.get(name) for name in ("limit", "rate", "progress")))
    return selecting.change(plans.terms, selecting.selected(**chosen), how, pace)


def received(steps: Steps, plans: QueuePlans, limit: int = 100) -> list[Reservation[Any]]:
    """Receive as a process that knows nothing yet."""
    return steps.run(plans.receive(Waiters("a"), limit, timeout=0))


def scene(kind: str) -> tuple[Steps, QueuePlans, list[Reservation[Any]]]:
    """Return a queue with 12 messages, of which some are scheduled and some are held."""
    steps, plans = Steps(), made(kind)
    more: dict[str, Any] = {}
    if kind == "ordered":
        more["groups"] = ["g", "h", None] * 3
    if kind == "limited":
        more["headers"] = {"t": "x"}
    steps.run(plans.push(range(9), **more))
    steps.run(plans.push(range(9, 12), delay=100))
    return steps, plans, received(steps, plans, 2)


def numbers(steps: Steps, queue: str = "a") -> list[int]:
    """Return the payloads of the messages of a queue."""
    found: list[int] = []
    for each in steps.collection.find({"q": queue, "record": {"$exists": False}}):
        if "n" in each:
            alive = packs.alive_of(each)
            found += [each["b"][place]["p"] for place in packs.places(alive)]
        else:
            found.append(each["payload"])
    return sorted(found)


def dead(name: str, origin: str = "home", **fields: Any) -> Document:
    """Return a dead message."""
    death = {"from": origin, "at": NOW, "reason": "r", "tries": 1, "error": None}
    return message(name, dead=death, **fields)


# ---- each change, without faults


@each_kind
@each_change
def test_selected_messages_are_changed_or_passed(kind: str, change: str) -> None:
    steps, plans, held = scene(kind)
    # A consumer holds a whole pack.
    kept = {0, 1, 2, 3, 4} if kind == "bucket" else {each.payload for each in held}
    result = steps.run(select(plans, CHANGES[change](), where=EVEN))
    free = {n for n in range(0, 12, 2) if n not in kept}
    if change == "requeue":  # the other messages are ready already
        assert result == BulkResult(1, 0)
    else:
        assert result == BulkResult(len(free), 6 - len(free))
    if change in ("remove", "move"):
        assert numbers(steps) == sorted(set(range(12)) - free)
    assert numbers(steps, "b") == (sorted(free) if change == "move" else [])
    steps.run(plans.commit(held))


@each_kind
def test_requeued_messages_become_ready(kind: str) -> None:
    steps, plans, held = scene(kind)
    steps.run(plans.commit(held))
    steps.run(select(plans, Requeue(after(500)), where={"payload": one_of(4, 7)}))
    assert steps.run(select(plans, Requeue(None), state="scheduled")).passed == 0
    found: list[int] = []
    while some := received(steps, plans):
        found += [each.payload for each in some]
        assert {each.tries for each in some} <= {1, 2}
        steps.run(plans.commit(some))
    done = {each.payload for each in held}
    assert sorted(found) == sorted(set(range(12)) - done)


def test_requeue_at_ends_a_lapsed_claim_and_keeps_tries() -> None:
    steps, plans, held = scene("ordered")
    steps.seconds += 61
    result = steps.run(select(plans, Requeue(after(500)), where=EVEN))
    assert result == BulkResult(6, 0)
    (first,) = [each for each in held if each.payload == 0]
    document = steps.collection.find_one({"_id": first.id})
    assert (document["tries"], "token" in document, "lock" in document) == (1, False, False)
    assert document["group"].endswith(":g")
    steps.seconds += 500
    order = []
    while some := received(steps, plans):
        order += [each.payload for each in some if each.group == "g"]
        steps.run(plans.commit(some))
    assert order == [3, 6, 0], "they are the last of their group, by their former times"


def test_dead_messages_go_home_by_one_bulk_write() -> None:
    documents = [dead(f"m{n}") for n in range(5)]
    documents += [dead(f"k{n}", last_key=f"key{n}") for n in range(2)]
    documents += [dead("odd", "no queue name"), message("alive"), dead("held", token="t")]
    documents[-1]["when"] = after(60)
    steps = Steps([record(), *documents])
    result = steps.run(select(standard(), Redrive()))
    assert result == BulkResult(7, 2), "one is held, and one does not say where it came from"
    assert sum(isinstance(each, UpdateEach) for each in steps.commands) == 1
    assert numbers_of_ids(steps, "home") == ["k0", "k1", "m0", "m1", "m2", "m3", "m4"]
    assert steps.collection.find_one({"_id": "k1"})["key"] == "key1"
    assert {each for each in steps.signals if each[0] == "home"} == {("home", NOW)}


def numbers_of_ids(steps: Steps, queue: str) -> list[str]:
    """Return the ids of the messages of a queue."""
    found = steps.collection.find({"q": queue, "record": {"$exists": False}})
    return sorted(each["_id"] for each in found)


def test_dead_messages_are_requeued_at_an_instant() -> None:
    steps = Steps([record(), dead("m"), message("alive")])
    assert steps.run(select(standard(), Requeue(after(9)), state="dead")) == BulkResult(1, 0)
    found = steps.collection.find_one({"_id": "m"})
    assert (found["q"], found["when"].second, "dead" in found) == ("home", 9, False)


@pytest.mark.parametrize("how", [Redrive(), Requeue(None)])
def test_dead_letters_of_a_stream_are_refused(how: Change) -> None:
    log = {**record("stream"), "_id": "~queue:log", "q": "log"}
    steps = Steps([record(), log, dead("m0"), dead("m1", "log")])
    before = steps.all()
    with pytest.raises(ConfigurationError, match=r"m1 came from the stream 'log'.*move\(\)"):
        steps.run(select(standard(), how))
    assert [each for each in steps.all() if each["q"] != "home"] == before
    assert steps.run(select(standard(), MoveTo("b"))) == BulkResult(2, 0)
    assert numbers_of_ids(steps, "b") == ["m0", "m1"]


def test_priority_changes_only_where_it_differs() -> None:
    steps, plans, held = scene("priority")
    assert steps.run(select(plans, Reprioritize(7), where=EVEN)) == BulkResult(5, 1)
    assert steps.run(select(plans, Reprioritize(7), where=EVEN)) == BulkResult(0, 1)
    assert [each.payload for each in received(steps, plans, 4)] == [2, 4, 6, 8]
    assert {each.payload for each in held} == {0, 1}
    with pytest.raises(ConfigurationError, match=r"priority: .* does not support it"):
        steps.run(select(made("bucket"), Reprioritize(7)))


# ---- faults


@each_command(8)
@pytest.mark.parametrize("fault", FAULT_AT)
@pytest.mark.parametrize("kind", ["ordered", "bucket"])
@pytest.mark.parametrize("change", ["remove", "move"])
def test_call_that_dies_can_be_repeated(fault: str, kind: str, change: str, every: int) -> None:
    """Each message is in one place, whatever the first call has done."""
    for at in range(0, 100, every):
        steps, plans, held = scene(kind)
        steps.run(plans.commit(held))
        rest = numbers(steps)
        with suppress(Cut, QueueError):
            steps.run(select(plans, CHANGES[change](), where=EVEN), FAULT_AT[fault](at))
        if len(steps.commands) <= at:
            assert at > 4, "fewer commands than expected"
            return
        steps.seconds += 40  # a pack that the dead process holds comes back
        steps.run(recovering.recover_all())
        steps.seconds += 40
        steps.run(select(plans, CHANGES[change](), where=EVEN))
        even = [n for n in rest if n % 2 == 0]
        assert numbers(steps) == [n for n in rest if n % 2], at
        assert numbers(steps, "b") == (even if change == "move" else []), at
        steps.seconds += 1000
        assert len(received(steps, plans)) > 0
    raise AssertionError("more commands than expected")


@pytest.mark.parametrize("fault", FAULT_AT)
def test_redrive_that_dies_can_be_repeated(fault: str) -> None:
    for at in range(100):
        steps = Steps([record(), *[dead(f"m{n}") for n in range(3)], dead("k", last_key="k")])
        with suppress(Cut, QueueError):
            steps.run(select(standard(), Redrive()), FAULT_AT[fault](at))
        if len(steps.commands) <= at:
            assert at > 4, "fewer commands than expected"
            return
        steps.run(select(standard(), Redrive()))
        assert numbers_of_ids(steps, "home") == ["k", "m0", "m1", "m2"]
        assert numbers_of_ids(steps, "a") == []
    raise AssertionError("more commands than expected")


@each_command(4)
@each_kind
@each_change
def test_message_received_during_the_call_stays_held(kind: str, change: str, every: int) -> None:
    """A consumer receives everything, at each command of the call."""
    for at in range(0, 100, every):
        steps, plans, held = scene(kind)
        running = steps.stalled(select(plans, CHANGES[change](), where=EVEN), at)
        if running is None:
            assert at > 3, "fewer commands than expected"
            return
        held += received(steps, plans)
        resume(running)
        steps.run(plans.commit(held))  # raises LeaseLost if the call has changed one of them
        elsewhere = numbers(steps, "b")
        assert all(n % 2 == 0 for n in elsewhere)
        gone = set(range(12)) - set(numbers(steps)) - set(elsewhere)
        done = {each.payload for each in held}
        assert done <= gone
        assert change == "remove" or gone == done
        assert all(n % 2 == 0 for n in gone - done), "it changed a message that does not match"
    raise AssertionError("more commands than expected")


@pytest.mark.parametrize("change", ["remove", "move", "requeue at"])
def test_deferrals_do_not_keep_messages_from_changing(change: str) -> None:
    """Consumers of other queues change ``when`` all the time."""
    deferred: dict[str, Any] = {"q": "a", "token": {"$exists": False}, "record": {"$exists": False}}
    for steps, running in at_each_command(
        lambda: scene("standard")[0],
        lambda: select(made("standard"), CHANGES[change](), where=EVEN),
        3,
    ):
        steps.collection.update_many(deferred, {"$set": {"when": after(3600)}})
        assert resume(running) == BulkResult(5, 1)


# ---- messages that change after they were read


def stopped_before_write(steps: Steps, plan: Plan[BulkResult]) -> Any:
    """Run a plan up to its first write of messages."""
    running = steps.steps(plan)
    for request in running:
        if isinstance(request, WRITES):
            return running
    raise AssertionError("it writes nothing")


def is_received() -> None:
    """A consumer receives the messages. Only the token tells."""
    steps, plans, held = scene("standard")
    running = stopped_before_write(steps, select(plans, Remove(), where=EVEN))
    held += received(steps, plans)
    assert resume(running) == BulkResult(1, 5), "only the scheduled message is free"
    steps.run(plans.commit(held))


def is_extended() -> None:
    """A lapsed lease is extended. Only ``when`` tells."""
    for kind in ("standard", "bucket"):
        steps, plans, held = scene(kind)
        steps.seconds += 61
        running = stopped_before_write(steps, select(plans, Remove(), where={"payload": 0}))
        steps.run(plans.extend(held))
        assert resume(running) == BulkResult(0, 1)
        steps.run(plans.commit(held))


def is_tried() -> None:
    """A consumer receives a message and gives it back. Only ``due`` tells."""
    steps, plans = Steps([record(), message("m")]), standard()
    running = stopped_before_write(steps, select(plans, Remove(), where={"tries": 0}))
    steps.run(plans.rollback(received(steps, plans), delay=9))
    assert resume(running) == BulkResult(0, 1)
    assert steps.collection.find_one({"_id": "m"})["tries"] == 1


PARTS = {"token": is_received, "when": is_extended, "due": is_tried}


@pytest.mark.parametrize("part", PARTS)
def test_message_that_changed_is_passed(part: str) -> None:
    PARTS[part]()


@pytest.mark.parametrize("part", PARTS)
def test_match_without_one_part_is_noticed(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def mutant(queue: str, document: Mapping[str, Any], now: datetime) -> dict[str, object]:
        match = as_read(queue, dict(document), now)
        del match[part]
        return match

    for module in (changing, holding):
        monkeypatch.setattr(module, "as_read", mutant)
    with pytest.raises((AssertionError, LeaseLost)):
        PARTS[part]()


def test_message_that_is_replaced_in_the_same_instant_is_passed() -> None:
    steps, plans = Steps([record(), message("m", key="k", payload=1)]), standard()
    running = stopped_before_write(steps, select(plans, Remove(), where={"payload": 1}))
    steps.run(plans.push([2], keys=["k"], on_duplicate="replace"))
    assert resume(running) == BulkResult(0, 1)
    assert steps.collection.find_one({"_id": "m"})["payload"] == 2


def test_message_that_leaves_its_pack_is_passed() -> None:
    steps, plans, held = scene("bucket")
    steps.run(plans.release(held))
    ids = [each.id for each in held]
    running = steps.steps(select(plans, Remove(), where={"payload": one_of(0, 2)}))
    next(each for each in running if isinstance(each, FindAndModify))
    assert steps.run(plans.remove(ids[0]))
    assert resume(running) == BulkResult(1, 1)
    assert not [each for each in steps.all() if "token" in each], "the claim has ended"


# ---- the messages behind


def test_next_message_of_a_group_is_brought_forward() -> None:
    steps, plans = Steps(), made("ordered")
    steps.run(plans.push(range(3), groups=["g"] * 3))
    received(steps, plans)
    received(steps, plans)  # defers the rest of the group
    assert times(steps)[2] > after(1000)
    assert steps.run(select(plans, Remove(), where={"payload": 1})) == BulkResult(1, 0)
    assert times(steps)[2] == NOW


@pytest.mark.parametrize("change", ["remove", "move", "requeue at"])
def test_next_message_of_a_key_is_brought_forward(change: str) -> None:
    steps, plans = Steps(), made("limited")
    steps.run(plans.push(range(5), headers={"t": "x"}))
    received(steps, plans)
    received(steps, plans)  # defers the rest of the key
    assert times(steps)[3] > after(1000)
    assert steps.run(select(plans, CHANGES[change](), where={"payload": 2})) == BulkResult(1, 0)
    assert times(steps)[3] == NOW
    assert ("a", NOW) in steps.signals


def times(steps: Steps) -> dict[int, datetime]:
    """Return ``when`` of the messages of a queue, by their payloads."""
    return {each["payload"]: each["when"] for each in steps.all() if "payload" in each}


# ---- portions


@pytest.fixture
def small_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a portion have two messages."""
    monkeypatch.setattr(selecting, "_PORTION", 2)


@pytest.mark.usefixtures("small_portions")
def test_progress_is_told_after_each_portion() -> None:
    steps, told = Steps([record(), *[message(f"m{n}") for n in range(5)]]), list[BulkResult]()
    steps.collection.update_one({"_id": "m3"}, {"$set": {"token": "t", "when": after(60)}})
    result = steps.run(select(standard(), Remove(), progress=told.append))
    assert result == BulkResult(4, 1) == told[-1]
    assert [each.done for each in told] == [2, 4, 4]


@pytest.mark.usefixtures("small_portions")
@pytest.mark.parametrize("limit", [1, 2, 3, 5, 9])
def test_limit_takes_the_oldest_messages(limit: int) -> None:
    steps = Steps([record(), *[message(f"m{n}", when=after(n - 9)) for n in range(5)]])
    result = steps.run(select(standard(), Remove(), limit=limit))
    assert result == BulkResult(min(limit, 5), 0)
    assert numbers_of_ids(steps, "a") == [f"m{n}" for n in range(limit, 5)]


def test_rate_makes_the_call_wait() -> None:
    steps = Steps([record(), *[message(f"m{n}") for n in range(5)]])
    assert steps.run(select(standard(), Remove(), rate=2)) == BulkResult(5, 0)
    assert steps.seconds == 2, "the last portion needs no wait"
    steps = Steps([record(), *[message(f"m{n}") for n in range(3)]])
    assert steps.run(select(standard(), Remove(), rate=0.25, limit=2)) == BulkResult(2, 0)
    assert steps.seconds == 4


@pytest.mark.usefixtures("small_portions")
def test_call_ends_although_messages_keep_coming() -> None:
    steps = Steps([record(), *[message(f"m{n}") for n in range(5)]])

    def push(so_far: BulkResult) -> None:
        steps.seconds += 2
        new = [f"n{steps.seconds}-{n}" for n in range(9)]
        steps.collection.insert_many(
            [message(id, when=steps.now, due=steps.now, pushed=steps.now) for id in new]
        )

    assert steps.run(select(standard(), Remove(), progress=push)) == BulkResult(5, 0)
    assert not [each for each in numbers_of_ids(steps, "a") if each.startswith("m")]


@pytest.mark.usefixtures("small_portions")
def test_message_that_comes_back_is_not_selected_again() -> None:
    """A dead message that fails again comes into the queue after the call began."""
    steps = Steps([record(), *[dead(f"m{n}", when=after(n)) for n in range(5)]])

    def fail_again(_: BulkResult) -> None:
        steps.seconds += 10
        stop = {"q": "home", "at": steps.now}
        again = {"q": "a", "when": steps.now, "dead": dead("x")["dead"]}
        home = {"q": "home", "record": {"$exists": False}}
        steps.collection.update_many(home, {"$set": again, "$push": {"trail": stop}})

    result = steps.run(select(standard(), Redrive(), progress=fail_again))
    assert result == BulkResult(5, 0)


@pytest.mark.usefixtures("small_portions")
@pytest.mark.parametrize("state", ["ready", "lapsed", "resting"])
def test_packs_are_divided_among_portions(state: str) -> None:
    steps, consumer = Steps(), test_packs.Consumer()
    steps.run(consumer.plans.push(range(7)))
    if state == "resting":  # its process keeps it, but holds none of its messages
        steps.run(consumer.plans.commit(steps.run(consumer.receive(2))))
    elif state == "lapsed":
        steps.run(consumer.receive(3))
        steps.seconds += 61
    result = steps.run(select(test_packs.plans(), Remove(), where=EVEN, limit=3))
    assert result == BulkResult(3, 0)
    result = steps.run(select(test_packs.plans(), Remove(), where=EVEN))
    assert result == BulkResult(0 if state == "resting" else 1, 0)
    assert numbers(steps) == ([3, 5] if state == "resting" else [1, 3, 5])
    assert not [each for each in steps.all() if "token" in each], "no claim is left"


@pytest.mark.usefixtures("small_portions")
def test_error_tells_how_many_messages_were_changed() -> None:
    stored = [record(), *[message(f"m{n}") for n in range(5)]]
    for at in range(100):
        steps = Steps(stored)
        try:
            steps.run(select(standard(), Remove()), lost_request(at))
        except Unavailable as error:
            told = re.search(r"; (\d+) messages were changed; call remove\(\) again", str(error))
            changed = 5 - len(numbers_of_ids(steps, "a"))
            assert changed == (0 if told is None else int(told[1]))
            assert told is not None or at < 2
        else:
            assert at > 6
            return


def test_portion_takes_one_bulk_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call without matches writes nothing."""
    monkeypatch.setattr(selecting, "_PORTION", 20)
    steps = Steps([record(), *[message(f"m{n:04}") for n in range(30)]])
    steps.run(select(standard(), Remove(), where={"payload": "m0003"}))
    writes = [each for each in steps.commands if isinstance(each, WRITES)]
    assert [len(each.pairs) for each in writes if isinstance(each, UpdateEach)] == [1]
    steps.run(select(standard(), Remove(), where={"payload": "none"}))
    assert {type(each) for each in steps.commands} == {Find}
    steps.run(select(standard(), MoveTo("b")))
    sizes = [len(each.pairs) for each in steps.commands if isinstance(each, UpdateEach)]
    assert sizes == [20, 9]
    assert not [each for each in steps.commands if type(each) is Update]


def test_foreign_documents_are_passed() -> None:
    """They are counted, and only removed: nothing else is known about them."""
    odd = [message("odd", headers=1), message("due", due="soon"), message("no", dead={"from": 1})]
    for how in (MoveTo("b"), Requeue(after(9))):
        steps = Steps([record(), *odd[:2]])
        assert steps.run(select(standard(), how)) == BulkResult(0, 2)
    steps = Steps([record(), *odd])
    assert steps.run(select(standard(), Redrive())) == BulkResult(0, 1)
    assert steps.run(select(standard(), Remove())) == BulkResult(3, 0)
