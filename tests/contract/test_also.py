"""Pushes into several queues: all of them get the message, or none does."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from pydantic import BaseModel

from pyqueue import ConfigurationError, DuplicateKey, Gather, InvalidMessage, InvalidName
from tests.contract.world import AnyClient, AnyQueue, World, near, payloads, refuses, waiting
from tests.support.recorder import Recorder

KINDS = ("standard", "priority", "ordered", "bucket")


class Order(BaseModel):
    n: int


class Other(BaseModel):
    n: int
    copies: int = 1


def check_nothing_is_stored(world: World, queue: AnyQueue) -> None:
    """Check that nothing is stored of the queues of a refused push, not even a record."""
    assert world.stored(queue, "audit", "new", "x", f"~handover:{queue.name}") == []


def finish(queue: AnyQueue) -> Any:
    """Receive the only message of a queue, and commit it."""
    held = queue.reserve(5)
    assert held is not None
    queue.commit(held)
    assert queue.counts().total == 0
    return held


def test_every_queue_gets_the_message(queue: AnyQueue, other: AnyQueue, name: str) -> None:
    id = queue.push({"n": 1}, headers={"h": 1}, also=[f"{name}-other", f"{name}-third"])
    held = finish(queue)
    assert (held.id, held.payload, held.headers) == (id, {"n": 1}, {"h": 1})
    copy = finish(other)
    assert (copy.payload, copy.headers, copy.trail) == ({"n": 1}, {"h": 1}, [])
    assert (copy.pushed, copy.when) == (held.pushed, held.when)
    assert copy.id != id


def test_third_queue_is_made(client: AnyClient, queue: AnyQueue, name: str) -> None:
    """A queue that is known only by its name gets its kind from the first program that names it."""
    queue.push(1, also=[f"{name}-new"])
    assert [each.name for each in client.queues() if each.name == f"{name}-new"]
    assert finish(client.queue(f"{name}-new", kind="priority")).priority is None


@pytest.mark.parametrize("kind", KINDS)
def test_queue_of_each_kind_gets_a_copy(
    client: AnyClient, queue: AnyQueue, name: str, kind: str
) -> None:
    target = client.queue(f"{name}-{kind}", kind=kind)
    target.resume()  # makes its record
    queue.push("by name", also=[target.name])
    assert finish(target).payload == "by name"
    queue.push("by object", also=[target])
    held = target.reserve(5)
    target.bury(held, error="no")
    assert client.queue(f"{target.name}.dead").redrive() == 1
    assert finish(target).payload == "by object"
    assert queue.counts().ready == 2


def test_copies_of_one_push_have_own_documents(world: World, name: str) -> None:
    """A pack has room for several messages. Each copy is an ordinary message all the same."""
    bucket = world.client.queue(f"{name}-bucket", kind="bucket")
    target = world.client.queue(f"{name}-target", kind="bucket")
    target.resume()
    id = bucket.push(1, also=[target])
    assert world.document(id)["payload"] == 1
    (copy,) = target.peek()
    assert world.document(copy.id)["payload"] == 1


def test_copies_take_the_options_that_their_queue_has(client: AnyClient, name: str) -> None:
    urgent = client.queue(f"{name}-urgent", kind="priority")
    turns = client.queue(f"{name}-turns", kind="ordered")
    plain = client.queue(f"{name}-plain", kind="standard")
    for each in (urgent, turns, plain):
        each.resume()
    urgent.push("p", priority=9, also=[f"{name}-urgent2", plain, turns])
    turns.push("g", group="g", also=[urgent])
    assert payloads(urgent.reserve_many(5, timeout=0)) == ["p", "g"]
    assert plain.reserve(0).priority is None
    first = turns.push("1", group="h", also=[plain])
    turns.push("2", group="h")
    found = {each.payload: each for each in turns.reserve_many(5, timeout=0)}
    assert found.keys() == {"p", "g", "1"}
    assert (found["1"].id, found["p"].group, found["g"].group) == (first, None, "g")


def test_groups_of_copies_keep_their_order(client: AnyClient, name: str) -> None:
    source = client.queue(f"{name}-source", kind="ordered")
    target = client.queue(f"{name}-target", kind="ordered")
    target.resume()
    for number in range(3):
        source.push(number, group="g", also=[target])
    for number in range(3):
        (held,) = target.reserve_many(5, timeout=5)
        assert held.payload == number
        target.commit(held)


def test_delay_and_expiry_hold_for_copies(
    world: World, queue: AnyQueue, other: AnyQueue, name: str
) -> None:
    id = queue.push("x", delay=60, expires=timedelta(hours=1), also=[other, f"{name}-third"])
    for each in (queue, other, world.client.queue(f"{name}-third")):
        assert each.counts().scheduled == 1
        (found,) = each.browse().messages
        stored = world.document(found.id)
        assert near(stored["when"], 60)
        assert near(stored["dies"], 3600)
        assert (found.id == id) == (each is queue)
    assert world.raw().find_one({"_id": f"~queue:{name}-third"})["shape"]["expires"] is True


def test_result_is_of_the_first_message_only(
    world: World, client: AnyClient, queue: AnyQueue, other: AnyQueue
) -> None:
    id = queue.push("x", result=60, also=[other])
    copy = finish(other)
    assert world.raw().find_one({"_id": copy.id}) is None
    held = queue.reserve(5)
    queue.commit(held, result=7)
    assert client.wait(id, timeout=5).result == 7


def test_payload_of_each_model_is_checked(client: AnyClient, name: str) -> None:
    orders = client.queue(name, Order)
    others = client.queue(f"{name}-other", Other)
    ints = client.queue(f"{name}-ints", int)
    orders.push(Order(n=1), also=[f"{name}-raw"])
    assert client.queue(f"{name}-raw").reserve(5).payload == {"n": 1}
    orders.push({"n": 2}, also=[others])
    assert others.reserve(5).payload == Other(n=2)
    with pytest.raises(InvalidMessage):
        orders.push(Order(n=3), also=[ints])
    assert orders.counts().total == 2


def test_waiting_consumer_of_a_copy_is_woken(
    client: AnyClient, queue: AnyQueue, other: AnyQueue
) -> None:
    consumer = waiting(client, other, lambda: other.reserve(30))
    queue.push("x", also=[other])
    assert consumer.result(10).payload == "x"


# ---- refused forms


#: For each refused form: the options of the push, and words of the error.
REFUSED: dict[str, tuple[Callable[[AnyQueue], dict[str, Any]], str]] = {
    "a name": (lambda queue: {"also": "audit"}, "also: expected a list of queues, found str"),
    "a queue": (lambda queue: {"also": queue}, "also: expected a list of queues"),
    "a dict": (lambda queue: {"also": {"audit": 1}}, "also: expected a list of queues, found dict"),
    "no queue": (lambda queue: {"also": []}, "also: expected at least one queue"),
    "itself": (lambda queue: {"also": ["audit", queue.name]}, "also: expected other queues"),
    "itself as an object": (lambda queue: {"also": [queue]}, "also: expected other queues"),
    "one twice": (lambda queue: {"also": ["x", "audit", "x"]}, "also: .*'x' twice"),
    "a number": (lambda queue: {"also": ["audit", 5]}, "also: expected a Queue or the name"),
    "a key": (lambda queue: {"key": "k"}, "key: cannot be combined with also=, found 'k'; use id="),
    "a time for a key": (lambda queue: {"unique_for": 5}, "unique_for: cannot be combined"),
    "a stream": (lambda queue: {"also": ["new", "log"]}, "also: 'log' is a stream"),
    "a bad delay": (lambda queue: {"delay": -1}, "delay"),
    "a bad id": (lambda queue: {"id": "~x"}, "id"),
}


@pytest.mark.parametrize("form", REFUSED)
def test_refused_form_writes_nothing(
    world: World, client: AnyClient, queue: AnyQueue, form: str
) -> None:
    client.stream("log").append("x")
    make, words = REFUSED[form]
    options = {"also": ["audit"], **make(queue)}
    refuses(words, lambda: queue.push(1, **options))
    check_nothing_is_stored(world, queue)


@pytest.mark.parametrize("reserved", ["~handover:a", "~queue:a", "a b", "", "log~group"])
def test_reserved_name_is_refused(world: World, queue: AnyQueue, reserved: str) -> None:
    with pytest.raises(InvalidName, match="also: invalid queue name"):
        queue.push(1, also=["audit", reserved])
    check_nothing_is_stored(world, queue)


def test_group_of_a_stream_is_refused(client: AnyClient, queue: AnyQueue, name: str) -> None:
    group = client.stream(f"{name}-log").consumer("g")
    with pytest.raises(InvalidName, match="also"):
        queue.push(1, also=[group])


def test_queue_elsewhere_is_refused(world: World, queue: AnyQueue) -> None:
    far = world.connect(namespace="elsewhere").queue("audit")
    refuses("also: queue 'audit' is in another database", lambda: queue.push(1, also=[far]))


def test_queue_of_another_kind_is_refused(client: AnyClient, queue: AnyQueue, name: str) -> None:
    client.queue(f"{name}-o", kind="ordered").resume()
    wrong = client.queue(f"{name}-o", kind="priority")
    refuses("is of kind 'ordered'", lambda: queue.push(1, also=[wrong]))
    assert queue.counts().total == 0


def test_priority_needs_a_queue_that_has_priorities(client: AnyClient, name: str) -> None:
    urgent = client.queue(f"{name}-urgent", kind="priority")
    plain = client.queue(f"{name}-plain", kind="standard")
    refuses("priority: queue", lambda: plain.push(1, priority=9, also=[urgent]))
    assert urgent.counts().total == 0


# ---- ids


def test_push_repeated_with_its_id_is_one(queue: AnyQueue, other: AnyQueue, name: str) -> None:
    for _ in range(2):
        assert queue.push("x", id=f"{name}-1", also=[other]) == f"{name}-1"
    assert (queue.counts().total, other.counts().total) == (1, 1)


def test_id_of_a_message_elsewhere_is_refused(queue: AnyQueue, other: AnyQueue, name: str) -> None:
    other.push("far", id=f"{name}-far")
    with pytest.raises(DuplicateKey) as refused:
        queue.push("x", id=f"{name}-far", also=[f"{name}-third"])
    assert refused.value.ids == [f"{name}-far"]
    assert (queue.counts().total, other.counts().total) == (0, 1)


def test_id_of_a_packed_message_is_known(client: AnyClient, name: str) -> None:
    bucket = client.queue(f"{name}-bucket", kind="bucket")
    target = client.queue(f"{name}-target", kind="standard")
    ids = bucket.push_many(range(3))
    assert bucket.push("x", id=ids[1], also=[target]) == ids[1]
    assert (bucket.counts().total, target.counts().total) == (3, 0)


# ---- transactions


def test_copies_appear_with_the_commit(
    client: AnyClient, queue: AnyQueue, other: AnyQueue, name: str
) -> None:
    for each in (queue, other):
        each.resume()  # the records exist before the transaction
    with client.transaction() as session:
        queue.push("x", also=[other], session=session)
        queue.push("y", id=f"{name}-y", also=[other], session=session)
        assert queue.push("y", id=f"{name}-y", also=[other], session=session) == f"{name}-y"
        assert (queue.counts().total, other.counts().total) == (0, 0)
    assert sorted(payloads(queue.peek())) == sorted(payloads(other.peek())) == ["x", "y"]


def test_aborted_transaction_leaves_no_copy(
    client: AnyClient, queue: AnyQueue, other: AnyQueue
) -> None:
    for each in (queue, other):
        each.resume()
    with pytest.raises(ZeroDivisionError), client.transaction() as session:  # noqa: PT012
        queue.push("x", also=[other], session=session)
        raise ZeroDivisionError
    assert (queue.counts().total, other.counts().total) == (0, 0)


# ---- gathers and hooks


def test_gather_waits_for_the_first_message_only(
    world: World, queue: AnyQueue, other: AnyQueue, name: str
) -> None:
    gather = Gather(f"{name}-g", "hold")
    id = queue.push("x", gather=gather, also=[other])
    assert world.document(id)["gather"] == {"id": f"{name}-g", "dead": "hold"}
    assert "gather" not in world.document(other.peek()[0].id)


def test_hooks_are_told_of_each_queue(world: World, client: AnyClient, name: str) -> None:
    recorder = Recorder()
    told = world.connect(hooks=[recorder])
    queue, other = told.queue(name), told.queue(f"{name}-other")
    id = queue.push("x", also=[other])
    copies = [each.id for each in other.peek()]
    expected = [
        ("pushing", name, ["x"]),
        ("pushed", other.name, copies, None),
        ("pushed", name, [id], None),
    ]
    assert recorder.take() == expected
    other.push("far", id=f"{name}-far")
    recorder.take()
    with pytest.raises(DuplicateKey):
        queue.push("y", id=f"{name}-far", also=[f"{name}-third"])
    assert recorder.take("pushed") == [(name, [], DuplicateKey)]
    with pytest.raises(ConfigurationError):
        queue.push("y", key="k", also=[other])
    assert recorder.take() == []


def test_hooks_are_told_at_the_commit(world: World, client: AnyClient, name: str) -> None:
    recorder = Recorder()
    told = world.connect(hooks=[recorder])
    queue, other = told.queue(name), told.queue(f"{name}-other")
    for each in (queue, other):
        each.resume()
    with told.transaction() as session:
        queue.push("x", also=[other], session=session)
        assert recorder.take("pushed") == []
    assert sorted(each for each, _, _ in recorder.take("pushed")) == [name, other.name]


def test_headers_of_a_hook_are_on_each_copy(world: World, client: AnyClient, name: str) -> None:
    class Marks(Recorder):
        def pushing(self, queue: str, items: Any) -> None:
            items[0].headers["mark"] = queue

    queue = world.connect(hooks=[Marks()]).queue(name)
    queue.push("x", also=[f"{name}-other"])
    for each in (name, f"{name}-other"):
        assert client.queue(each).peek()[0].headers == {"mark": name}


def test_figures_count_each_copy(world: World, client: AnyClient, name: str) -> None:
    told = world.connect(telemetry=True)
    names = [name, f"{name}-b", f"{name}-c"]
    for number in (2, 3, 2):
        told.queue(name).push(number, also=names[1:number])
    told.close()
    found = [client.queue(each).stats().counts["pushed"] for each in names]
    assert found == [3, 3, 1]
