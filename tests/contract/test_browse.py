"""Browse and find: the messages of a queue in any state, page by page, and a message by its id."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from bson import ObjectId
from pydantic import BaseModel

from pyqueue import ConfigurationError, Finished, Limit, Message, Page, StreamMessage
from pyqueue.where import contains, exists, gt, one_of
from tests.contract.world import AnyClient, AnyQueue, World, hold, near, payloads, refuses


class Order(BaseModel):
    n: int
    price: Decimal


def pages(queue: AnyQueue, **options: Any) -> list[Page[Any]]:
    """Return all pages of a queue."""
    found = [queue.browse(**options)]
    while not found[-1].complete:
        found.append(queue.browse(**options, after=found[-1].after))
    return found


def browsed(queue: AnyQueue, **options: Any) -> list[Any]:
    """Return the messages of all pages."""
    return [each for page in pages(queue, **options) for each in page.messages]


def in_states(queue: AnyQueue) -> dict[str, Any]:
    """Fill a queue with a message in each live state. Return their ids by state."""
    reserved = hold(queue, "held")
    found = {"reserved": reserved.id, "ready": queue.push("ready")}
    found["scheduled"] = queue.push("scheduled", delay=60)
    return found


# ---- browse


@pytest.mark.parametrize("limit", [1, 7, 100])
def test_pages_have_each_message_once(queue: AnyQueue, limit: int) -> None:
    ids = set(queue.push_many(range(12)))
    ids |= set(queue.push_many(range(5), ids=[f"{queue.name}/{n}" for n in range(5)]))
    ids |= set(queue.push_many(range(5), delay=60))
    forward = [each.id for each in browsed(queue, limit=limit)]
    assert len(forward) == 22
    assert set(forward) == ids
    assert [each.id for each in browsed(queue, limit=limit, newest=True)] == forward[::-1]
    assert {len(page.messages) for page in pages(queue, limit=limit)[:-1]} <= {limit}
    assert sum(page.looked for page in pages(queue, limit=limit)) == 22


def test_browse_by_state(queue: AnyQueue) -> None:
    ids = in_states(queue)
    for state, id in ids.items():
        (found,) = browsed(queue, state=state)
        assert (found.id, found.state, found.payload) == (id, state, queue.get(id).payload)
    assert browsed(queue, state="dead") == browsed(queue, state="finished") == []
    assert {each.state: each.id for each in browsed(queue)} == ids
    assert type(browsed(queue)[0]) is Message


@pytest.mark.needs("history")
def test_browse_of_the_history(client: AnyClient, name: str) -> None:
    queue = client.queue(name, history=60)
    queue.push_many(range(5))
    queue.commit(*queue.reserve_many(4, timeout=0))
    found = browsed(queue, state="finished", limit=3)
    assert len(found) == 4
    assert {type(each) for each in found} == {Finished}
    (live,) = browsed(queue, state="ready")
    assert [each.state for each in browsed(queue)] == ["ready", *["finished"] * 4]
    assert browsed(queue, newest=True)[-1].id == live.id


def test_browse_of_dead_letters(client: AnyClient, queue: AnyQueue) -> None:
    queue.bury(hold(queue, {"n": 1}), error=ValueError("one"))
    queue.bury(hold(queue, {"n": 2}), error=KeyError("two"))
    dead = client.queue(f"{queue.name}.dead")
    assert [each.state for each in browsed(dead)] == ["dead"] * 2
    assert browsed(dead, state="ready") == []
    held = dead.reserve(0)
    (rest,) = browsed(dead, state="dead")
    assert [each.id for each in browsed(dead, state="reserved")] == [held.id]
    (found,) = browsed(dead, where={"dead.from": queue.name, "error.type": rest.error["type"]})
    assert found.id == rest.id
    assert client.find(held.id).state == "reserved"
    assert client.find(rest.id).state == "dead"
    assert dead.get(rest.id).state == "ready"
    dead.rollback(held, delay=60)
    assert {each.state for each in browsed(dead)} == {"dead"}


def test_browse_with_conditions(queue: AnyQueue) -> None:
    now = datetime.now(UTC)
    queue.push_many([{"n": n, "tags": [str(n)], "at": now} for n in range(9)], headers={"by": "a"})
    queue.push({"n": 9, "odd": {"$gt": 1}}, headers={"by": "b"}, key="k")
    for where, expected in (
        ({"payload.n": 3}, [3]),
        ({"payload.n": gt(6), "headers.by": "a"}, [7, 8]),
        ({"payload.n": one_of(1, 2.0, "3")}, [1, 2]),
        ({"payload.tags": contains("5")}, [5]),
        ({"payload.tags.0": "5"}, [5]),
        ({"payload.at": exists(False)}, [9]),
        ({"payload.at": now.astimezone(), "payload.n": gt(7)}, [8]),
        ({"payload.odd": {"$gt": 1}}, [9]),
        ({"payload.n": {"$gt": 1}}, []),
        ({"key": "k"}, [9]),
        ({"key": exists(), "tries": 0, "error": None}, [9]),
        ({"pushed": gt(now + timedelta(hours=1))}, []),
    ):
        for limit in (1, 100):
            found = browsed(queue, where=where, limit=limit)
            assert sorted(each.payload["n"] for each in found) == expected, where


def test_browse_of_a_typed_queue(client: AnyClient, queue: AnyQueue) -> None:
    typed = client.queue(queue.name, Order)
    typed.push_many([Order(n=n, price=Decimal(n)) for n in range(3)])
    queue.push("no order")
    (found,) = browsed(typed, where={"payload.price": Decimal("1.0")})
    assert found.payload == Order(n=1, price=Decimal(1))
    (misfit,) = browsed(typed, where={"payload": "no order"})
    assert (misfit.payload, misfit.error["type"]) == ("no order", "InvalidMessage")


def test_browse_examines_no_more_than_its_budget(queue: AnyQueue) -> None:
    queue.push_many(range(30))
    queue.push("wanted")
    found = pages(queue, where={"payload": "wanted"}, budget=8)
    assert payloads(each for page in found for each in page.messages) == ["wanted"]
    assert [page.looked for page in found] == [8, 8, 8, 7]


def test_browse_changes_nothing(world: World, queue: AnyQueue) -> None:
    in_states(queue)
    before = world.stored(queue)
    browsed(queue, limit=1)
    browsed(queue, state="reserved", where={"payload": "held"})
    assert world.stored(queue) == before


def test_browse_of_an_unused_queue_creates_none(world: World, queue: AnyQueue) -> None:
    assert queue.browse() == Page([], None, 0)
    assert world.stored(queue) == []


def test_wrong_arguments_of_browse_are_refused(queue: AnyQueue) -> None:
    queue.push(1)
    refuses("state: 'live' is not allowed", lambda: queue.browse("live"))
    refuses("state: ", lambda: queue.browse(["ready"]))
    refuses("where: unknown path 'n'", lambda: queue.browse(where={"n": 1}))
    refuses("after: this is not a cursor", lambda: queue.browse(after="MTIz"))
    refuses("after: ", lambda: queue.browse(after="é"), lambda: queue.browse(after=b"x"))
    refuses("limit: 0 is not", lambda: queue.browse(limit=0))
    refuses("budget: 0 is not", lambda: queue.browse(budget=0))
    refuses("newest: expected True or False, found int", lambda: queue.browse(newest=1))


@pytest.mark.needs("standard")
@pytest.mark.parametrize("kind", [None, "standard"])
def test_browse_of_a_stream_is_refused(client: AnyClient, name: str, kind: str | None) -> None:
    client.stream(name).append(1)
    refuses(r"browse: .* is a stream; use .*read\(\)", client.queue(name, kind=kind).browse)


@pytest.mark.needs("packs")
def test_browse_looks_into_packs(client: AnyClient, queue: AnyQueue) -> None:
    ids = queue.push_many([{"n": n} for n in range(20)])
    queue.push({"n": 20})
    assert queue.remove(ids[3])
    assert len(browsed(client.queue(queue.name, kind="standard"))) == 20, "the record decides"
    assert [page.looked for page in pages(queue, budget=6)] == [6, 6, 6, 2]
    (found,) = browsed(queue, where={"payload.n": 7}, budget=6)
    assert found.id == ids[7]
    held = queue.reserve(0)
    state = {each.id: each.state for each in browsed(queue)}
    assert (state[held.id], len(state)) == ("reserved", 20)
    assert len(browsed(queue, state="reserved")) == 19
    assert client.find(ids[7]).state == "reserved"
    assert client.find(ids[3]) is None


# ---- deferred


@pytest.mark.needs("ordered")
def test_message_behind_its_group_is_deferred(queue: AnyQueue) -> None:
    queue.push_many([1, 2], groups=["g", "g"])
    queue.push(3, group="h", delay=60)
    held = queue.reserve(0)
    assert queue.reserve(0) is None  # this meets the second message
    found = {each.payload: (each.state, each.deferred) for each in browsed(queue)}
    assert found == {
        1: ("reserved", None),
        2: ("scheduled", "group"),
        3: ("scheduled", None),
    }
    (waits,) = browsed(queue, where={"group": "g"}, state="scheduled")
    assert near(waits.when, 0)
    queue.commit(held)
    (freed,) = browsed(queue, state="ready")
    assert (freed.payload, freed.deferred) == (2, None)


@pytest.mark.needs("per")
def test_message_behind_its_limit_is_deferred(client: AnyClient, name: str) -> None:
    queue = client.queue(name, limit=Limit(concurrency=1, per="headers.tenant"))
    queue.push_many([1, 2], headers={"tenant": "t"})
    held = queue.reserve_many(2, timeout=0)
    assert len(held) == 1
    assert queue.reserve(0) is None
    (waits,) = browsed(queue, state="scheduled")
    assert waits.deferred == queue.get(waits.id).deferred == "limit"
    assert client.find(waits.id).deferred == "limit"


# ---- find


def test_find_in_every_state(client: AnyClient, queue: AnyQueue) -> None:
    for state, id in in_states(queue).items():
        found = client.find(id)
        assert (found.id, found.queue, found.state) == (id, queue.name, state)
    assert client.find("unknown") is None
    assert client.find(ObjectId()) is None


def test_find_takes_the_text_of_an_id(client: AnyClient, queue: AnyQueue) -> None:
    id = queue.push({"n": 1}, key="k")
    found = client.find(str(id))
    assert (found.id, found.payload, found.key) == (id, {"n": 1}, "k")
    assert queue.push("text", id=str(id)) == str(id)
    assert client.find(str(id)).payload == "text"
    assert client.find(id).payload == {"n": 1}


@pytest.mark.needs("history")
def test_find_in_a_history_and_after_a_move(client: AnyClient, name: str) -> None:
    queue, other = client.queue(name), client.queue(f"{name}-other", history=60)
    held = hold(queue, 1)
    queue.move(held, to=other)
    assert client.find(held.id).queue == other.name
    other.commit(other.reserve(0))
    found = client.find(held.id)
    assert (type(found), found.outcome, found.state) == (Finished, "committed", "finished")
    queue.commit(gone := hold(queue, 2))
    assert client.find(gone.id) is None


@pytest.mark.needs("standard")
def test_find_in_a_stream(client: AnyClient, name: str) -> None:
    log = client.stream(name)
    log.append_many(["a", "b", "c"], headers={"h": 1})
    found = client.find(f"{name}~1")
    assert type(found) is StreamMessage
    assert (found.payload, found.position, found.queue, found.headers) == ("b", 1, name, {"h": 1})
    for id in (f"{name}~3", f"{name}~01", f"{name}~", "none~0", f"{name}~x", f"a~{name}~1"):
        assert client.find(id) is None
    group = log.consumer("g")
    group.bury(group.reserve(0), error="bad")
    (buried,) = browsed(client.queue(f"{name}.g.dead"))
    assert client.find(buried.id).dead["position"] == 0
    assert client.find(f"{name}~0").payload == "a"


@pytest.mark.needs("standard")
def test_find_sees_no_hidden_documents(world: World, client: AnyClient, name: str) -> None:
    queue = client.queue(name)
    for q in (f"~handover:{name}", f"~staged:{name}~x"):
        id = queue.push(1)
        world.raw().update_one({"_id": id}, {"$set": {"q": q}})
        assert client.find(id) is None
        world.raw().delete_one({"_id": id})
    for id in ("~queue:x", 5, None, ""):
        with pytest.raises(ConfigurationError, match="id: "):
            client.find(id)
