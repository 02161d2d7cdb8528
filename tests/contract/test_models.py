"""Typed queues: payloads are stored from the model and come back as the model.

An invalid payload never reaches a consumer.
"""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal
from uuid import UUID

import pytest
from bson import Decimal128
from pydantic import BaseModel, Field

from pyqueue import InvalidMessage
from tests.contract.world import AnyClient, AnyQueue, World, hold


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Part(BaseModel):
    name: str
    price: Decimal


class Everything(BaseModel):
    n: int
    price: Decimal
    ident: UUID
    day: dt.date
    at: dt.datetime
    length: dt.timedelta
    colour: Colour
    tags: set[str]
    pair: tuple[int, str]
    part: Part
    parts: list[Part]
    prices: dict[str, Decimal]
    by_colour: dict[Colour, int]
    raw: bytes
    maybe: Decimal | None = None


class Order(BaseModel):
    n: Annotated[int, Field(ge=0)]


class Later(BaseModel):
    n: int
    note: str = "none"


EVERYTHING = Everything(
    n=1,
    price=Decimal("12.30"),
    ident=UUID("00112233-4455-6677-8899-aabbccddeeff"),
    day=dt.date(2013, 1, 31),
    at=dt.datetime(2013, 1, 1, 5, 17, tzinfo=dt.UTC),
    length=dt.timedelta(minutes=90, milliseconds=5),
    colour=Colour.BLUE,
    tags={"a", "b"},
    pair=(1, "x"),
    part=Part(name="bolt", price=Decimal("0.05")),
    parts=[Part(name="nut", price=Decimal(1))],
    prices={"usd": Decimal("1.5")},
    by_colour={Colour.RED: 3},
    raw=b"\x00\xff",
)


@pytest.mark.needs("pop")
def test_model_round_trip(world: World, name: str) -> None:
    queue = world.client.queue(name, Everything)
    id = queue.push(EVERYTHING)
    stored = world.document(id)
    assert stored["type"] == "Everything"
    assert stored["payload"]["price"] == Decimal128("12.30")
    assert stored["payload"]["part"]["price"] == Decimal128("0.05")
    assert stored["payload"]["ident"] == EVERYTHING.ident
    assert stored["payload"]["day"] == "2013-01-31"
    assert stored["payload"]["at"] == EVERYTHING.at
    assert stored["payload"]["colour"] == "blue"
    assert sorted(stored["payload"]["tags"]) == ["a", "b"]
    assert stored["payload"]["by_colour"] == {"red": 3}
    assert stored["payload"]["raw"] == b"\x00\xff"
    assert queue.get(id).payload == EVERYTHING
    assert queue.peek()[0].payload == EVERYTHING
    held = queue.reserve(0)
    assert held.payload == EVERYTHING
    assert str(held.payload.price) == "12.30"
    queue.rollback(held, delay=0)
    assert queue.pop(0).payload == EVERYTHING


@pytest.mark.needs("pop")
@pytest.mark.parametrize(
    ("model", "value"),
    [
        (int, 7),
        (Decimal, Decimal("1.10")),
        (UUID, UUID(int=5)),
        (dt.date, dt.date(2013, 1, 1)),
        (list[Order], [Order(n=1), Order(n=2)]),
        (dict[str, Order], {"a": Order(n=1)}),
        (Order | None, None),
        (Colour, Colour.RED),
        (set[int], {1, 2}),
        (Literal["a", "b"], "b"),
        (tuple[int, ...], (1, 2)),
        (Any, {"a": 1}),
    ],
    ids=lambda value: str(value)[:30],
)
def test_any_pydantic_type_is_a_model(client: AnyClient, name: str, model: Any, value: Any) -> None:
    queue = client.queue(name, model)
    queue.push(value)
    message = queue.pop(0)
    assert message.payload == value
    assert type(message.payload) is type(value)


@pytest.mark.needs("pop")
def test_valid_payload_is_stored(client: AnyClient, name: str) -> None:
    queue = client.queue(name, Order)
    queue.push({"n": 1})
    queue.push_many([Order(n=2), {"n": "3"}])
    assert sorted(each.payload.n for each in queue.pop_many(3, timeout=0)) == [1, 2, 3]


def test_invalid_payload_is_refused(world: World, name: str) -> None:
    queue = world.client.queue(name, Order)
    for bad in ({"n": "x"}, {"n": -1}, {}, None, 5, "text"):
        with pytest.raises(InvalidMessage, match="Order") as caught:
            queue.push(bad)
        assert isinstance(caught.value, ValueError)
        with pytest.raises(InvalidMessage):
            queue.push_many([{"n": 1}, bad])
    assert world.stored(queue) == []


@pytest.mark.needs("pop")
def test_payload_of_another_type_is_validated(client: AnyClient, name: str) -> None:
    client.queue(name).push({"n": 1})
    client.queue(name, Order).push(Order(n=2))
    received = client.queue(name, Later).pop_many(2, timeout=0)
    assert {(each.payload.n, each.payload.note) for each in received} == {(1, "none"), (2, "none")}


@pytest.mark.needs("pop")
def test_raw_queue_shows_the_stored_payload(client: AnyClient, name: str) -> None:
    client.queue(name, Order).push(Order(n=2))
    message = client.queue(name).pop(0)
    assert message.payload == {"n": 2}


# ---- invalid payloads


@pytest.mark.needs("dead_letter")
class TestInvalidPayloads:
    @pytest.mark.needs("pop")
    @pytest.mark.parametrize("verb", ["pop", "reserve", "pop_many", "reserve_many"])
    def test_invalid_payload_is_buried_and_not_delivered(
        self, world: World, name: str, verb: str
    ) -> None:
        queue: AnyQueue = world.client.queue(name, Order)
        bad = world.client.queue(name).push({"n": "many"}, key="k")
        queue.push(Order(n=1))
        if verb.endswith("many"):
            received = getattr(queue, verb)(5, timeout=0)
        else:
            received = [getattr(queue, verb)(0)]
            assert getattr(queue, verb)(0) is None
        assert [each.payload for each in received] == [Order(n=1)]
        assert queue.get(bad) is None
        dead = world.client.queue(f"{name}.dead").get(bad)
        assert (dead.payload, dead.key) == ({"n": "many"}, "k")
        assert (dead.dead["from"], dead.dead["reason"]) == (name, "invalid")
        assert "valid integer" in dead.error["message"]
        assert dead.dead["error"] == dead.error

    @pytest.mark.needs("pop")
    def test_only_invalid_payloads_delivers_nothing(self, client: AnyClient, name: str) -> None:
        client.queue(name).push_many([{"n": "x"}] * 5)
        queue = client.queue(name, Order)
        assert queue.reserve(0) is None
        assert queue.pop_many(2, timeout=0) == []
        assert queue.counts().total == 0
        assert client.queue(f"{name}.dead").counts().ready == 5

    def test_reads_show_the_raw_payload_and_bury_nothing(
        self, client: AnyClient, name: str
    ) -> None:
        id = client.queue(name).push({"n": "x"})
        queue = client.queue(name, Order)
        for seen in (queue.peek()[0], queue.get(id)):
            assert seen.payload == {"n": "x"}
            assert seen.error is not None
        assert queue.counts().ready == 1

    def test_dead_invalid_payload_is_delivered_raw(self, client: AnyClient, name: str) -> None:
        client.queue(name).push({"n": "x"})
        assert client.queue(name, Order).reserve(0) is None
        dead = client.queue(f"{name}.dead", Order)
        held = dead.reserve(0)
        assert held.payload == {"n": "x"}
        assert held.error is not None
        dead.release(held)
        assert dead.pop(0).payload == {"n": "x"}

    @pytest.mark.needs("pop")
    def test_redriven_invalid_payload_is_buried_again(self, client: AnyClient, name: str) -> None:
        client.queue(name).push({"n": "x"})
        queue, dead = client.queue(name, Order), client.queue(f"{name}.dead")
        assert queue.pop(0) is None
        assert dead.redrive() == 1
        assert queue.pop(0) is None
        assert dead.counts().ready == 1

    def test_document_without_a_payload_is_buried(self, world: World, queue: AnyQueue) -> None:
        id = queue.push(1)
        world.raw().update_one({"_id": id}, {"$unset": {"payload": ""}})
        assert queue.reserve(0) is None
        dead = world.client.queue(f"{queue.name}.dead").get(id)
        assert dead.dead["reason"] == "invalid"


@pytest.mark.needs("history")
def test_history_of_a_typed_queue(client: AnyClient, name: str) -> None:
    queue = client.queue(name, Order, history=60)
    held = hold(queue, Order(n=1))
    queue.commit(held, payload=Order(n=2))
    assert [each.payload for each in queue.history()] == [Order(n=2)]
    held = hold(queue, Order(n=3))
    with pytest.raises(InvalidMessage):
        queue.commit(held, payload={"n": "x"})
    queue.commit(held)
