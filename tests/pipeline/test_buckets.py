"""Stages that read and write buckets."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from pyqueue import Backoff, ConfigurationError, Delivery, Drop, Many, Reject, To
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

    options: dict[str, Any] = {"kind": "bucket", "pack": 50, "backoff": Backoff(base=0.01)}
    place.run_stage(route, to=["out"], concurrency=8, **options)
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

    place.run_worker(store, kind="bucket", pack=20, batch=20)
    assert sizes == [20]
    assert place.queue("in", kind="bucket").counts().total == 0


def test_progress_in_a_pack_costs_no_try(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """Messages of a pack store no progress. A message with a key has its own document."""
    bucket = place.queue("in", kind="bucket", pack=20)
    bucket.push_many(range(3))
    bucket.push(3, key="k")
    shown: list[Any] = []

    def work(number: int, delivery: Delivery[int]) -> Drop:
        delivery.progress(0.5)
        with pytest.raises(ConfigurationError, match="fraction: 2 is not allowed"):
            delivery.progress(2)
        return show(number, delivery)

    async def awaited(number: int, delivery: Delivery[int]) -> Drop:
        await delivery.progress(0.5)
        with pytest.raises(ConfigurationError, match="fraction: 2 is not allowed"):
            await delivery.progress(2)
        return show(number, delivery)

    def show(number: int, delivery: Delivery[int]) -> Drop:
        stored = bucket.get(delivery.message.id)
        shown.append((number, stored and stored.progress and stored.progress["fraction"]))
        return Drop()

    handler = awaited if place.awaited else work
    counters = place.run_worker(handler, kind="bucket", pack=20)
    assert counters == {"in": 4, "dropped": 4}
    assert sorted(shown, key=str) == [(0, None), (1, None), (2, None), (3, 0.5)]
    texts = [each.getMessage() for each in caplog.records]
    assert len([text for text in texts if "'in': progress is not stored" in text]) == 1


def test_batch_of_a_pack_becomes_many(place: Place) -> None:
    place.queue("in", kind="bucket", pack=20).push_many(range(20))

    def split(numbers: list[int]) -> list[Any]:
        return [Many([To("a", n), To("b", -n)]) for n in numbers]

    place.run_stage(split, kind="bucket", pack=20, batch=20)
    assert sorted(place.payloads("a")) == list(range(20))
    assert sorted(place.payloads("b")) == sorted(-n for n in range(20))
    assert place.queue("in", kind="bucket").counts().total == 0
