"""Stages that read and write buckets."""

from __future__ import annotations

from collections import Counter
from typing import Any

from pyqueue import Backoff, Drop, Many, Reject, To
from tests.pipeline.place import Place


def test_stages_settle_messages_of_a_pack_alone(place: Place) -> None:
    """A pack of forty: some move on, one is buried, one fails at first, and one has outputs."""
    place.queue("in", kind="bucket", pack=50).push_many(range(40))
    failed: list[int] = []

    def route(number: int) -> Any:
        if number == 3:
            raise Reject("not this one")
        if number == 4 and not failed:
            failed.append(number)
            raise ValueError("not now")
        if number == 5:
            return Many([To("out", 100), To("out", 101)])
        return Drop() if number % 2 else To("out")

    def build(client: Any) -> Any:
        quick = Backoff(base=0.01)
        return client.pipeline().choice(
            "in", route, to=["out"], kind="bucket", pack=50, backoff=quick, concurrency=8
        )

    place.run(build, until_empty=True)
    out = Counter(each.payload for each in place.queue("out").pop_many(99, timeout=0))
    assert out == Counter([*range(0, 40, 2), 100, 101])
    (dead,) = place.queue("in.dead").pop_many(9, timeout=0)
    assert dead.payload == 3
    assert place.queue("in", kind="bucket").counts().total == 0


def test_batch_handlers_take_a_pack_at_once(place: Place) -> None:
    place.queue("in", kind="bucket", pack=20).push_many(range(20))
    sizes: list[int] = []

    def store(numbers: list[int]) -> None:
        sizes.append(len(numbers))

    def build(client: Any) -> Any:
        return client.pipeline().sink("in", store, kind="bucket", pack=20, batch=20)

    place.run(build, until_empty=True)
    assert sizes == [20]
    assert place.queue("in", kind="bucket").counts().total == 0


def test_batch_of_a_pack_becomes_many(place: Place) -> None:
    place.queue("in", kind="bucket", pack=20).push_many(range(20))

    def split(numbers: list[int]) -> list[Any]:
        return [Many([To("a", n), To("b", -n)]) for n in numbers]

    def build(client: Any) -> Any:
        return client.pipeline().choice(
            "in", split, to=["a", "b"], kind="bucket", pack=20, batch=20
        )

    place.run(build, until_empty=True)
    assert sorted(place.payloads("a")) == list(range(20))
    assert sorted(place.payloads("b")) == sorted(-n for n in range(20))
    assert place.queue("in", kind="bucket").counts().total == 0
