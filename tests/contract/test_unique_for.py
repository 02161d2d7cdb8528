"""``unique_for``: a key stays taken for a while after the end of its message."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest

from pyqueue import Counts, DuplicateKey, Push
from tests.contract.world import AnyClient, AnyQueue, World, near, refuses

pytestmark = pytest.mark.needs("keys")


def let_free(world: World, id: Any) -> None:
    """Let the time pass for which the end of a message keeps its key."""
    past = datetime.now(UTC) - timedelta(seconds=1)
    done = world.raw().update_one({"_id": id}, {"$set": {"free": past}})
    assert done.matched_count == 1


WAYS: dict[str, Callable[[AnyQueue], object]] = {
    "commit": lambda queue: queue.commit(queue.reserve(0)),
    "pop": lambda queue: queue.pop(0),
    "pop_many": lambda queue: queue.pop_many(5, timeout=0),
}


@pytest.mark.parametrize("way", WAYS)
def test_key_stays_taken_after_the_end(
    world: World, client: AnyClient, queue: AnyQueue, way: str
) -> None:
    if "pop" in way and "pop" not in world.place.offers:
        pytest.skip("this kind has no pop")
    id = queue.push("x", key="k", unique_for=60)
    WAYS[way](queue)
    assert queue.push("y", key="k") is None
    assert queue.push("y", key="k", on_duplicate="replace") is None
    with pytest.raises(DuplicateKey):
        queue.push("y", key="k", on_duplicate="error")
    assert queue.push("y", key="other") is not None
    assert near(world.document(id)["free"], 60)
    let_free(world, id)
    assert queue.push("z", key="k", unique_for=60) is not None
    assert sorted(each.payload for each in queue.reserve_many(9, timeout=0)) == ["y", "z"]


def test_end_is_not_in_the_history(world: World, client: AnyClient, queue: AnyQueue) -> None:
    id = queue.push("x", key="k", unique_for=60)
    queue.commit(queue.reserve(0))
    assert queue.counts() == Counts()
    found = client.find(id)
    assert (found.state, found.outcome, found.key, found.payload) == (
        *("finished", "committed", "k", None),
    )
    [info] = [each for each in client.queues() if each.name == queue.name]
    assert info.counts == Counts()
    assert queue.browse(state="finished").messages == []
    if "history" in world.place.offers:
        assert queue.history() == []
        assert queue.replay(id) == 0


@pytest.mark.needs("history")
def test_history_outlives_the_key(world: World, client: AnyClient, name: str) -> None:
    queue = client.queue(name, history=600)
    id = queue.push("x", key="k", unique_for=60)
    queue.commit(queue.reserve(0))
    assert queue.push("y", key="k") is None
    [end] = queue.history()
    assert (end.key, end.payload) == ("k", "x")
    let_free(world, id)
    assert queue.push("y", key="k") is not None
    assert queue.get(id).key == "k", "it shows the key that it had"


FREEING: dict[str, Callable[[AnyQueue, Any], object]] = {
    "cancel": lambda queue, id: queue.cancel(id),
    "remove": lambda queue, id: queue.remove(id),
    "bury": lambda queue, id: queue.bury(queue.reserve(0)),
}


@pytest.mark.parametrize("way", FREEING)
def test_end_without_success_frees_the_key(queue: AnyQueue, way: str) -> None:
    id = queue.push("x", key="k", unique_for=60)
    FREEING[way](queue, id)
    assert queue.push("y", key="k") is not None


@pytest.mark.needs("server")
@pytest.mark.parametrize("how", ["ignore", "replace"])
def test_push_in_a_transaction_meets_ends(
    world: World, client: AnyClient, queue: AnyQueue, how: Any
) -> None:
    id = queue.push("x", key="k", unique_for=60)
    queue.commit(queue.reserve(0))

    def again(session: Any) -> Any:
        return queue.push("y", key="k", on_duplicate=how, session=session)

    assert client.run_transaction(again) is None
    let_free(world, id)
    assert client.run_transaction(again) is not None
    assert queue.reserve(0).payload == "y"


def test_settled_together_each_keeps_its_own(world: World, queue: AnyQueue) -> None:
    pushes = [Push(n, key=f"k{n}", unique_for=60 * n or None) for n in range(3)]
    ids = queue.push_many([*pushes, Push(3, key="k3", unique_for=60, result=30)])
    queue.commit(*queue.reserve_many(9, timeout=0))
    kept = {each: world.raw().find_one({"_id": each}) for each in ids}
    free = [None if each is None else each["free"] - each["processed"] for each in kept.values()]
    assert free == [None, *(timedelta(seconds=s) for s in (60, 120, 60))]


def test_wrong_times_are_refused(world: World, queue: AnyQueue) -> None:
    queue.push("x", key="k")
    before = world.stored(queue)
    for value in (0, -1, True, "60"):
        refuses("unique_for: ", partial(queue.push, "x", key="y", unique_for=value))
    refuses(
        "unique_for: requires a message key, but key is None; pass key=",
        partial(queue.push, "x", unique_for=60),
        partial(queue.push_many, [Push("x", key="y"), Push("z", unique_for=60)]),
    )
    assert world.stored(queue) == before


@pytest.mark.needs("move")
def test_move_takes_a_key_that_is_free_again(
    world: World, queue: AnyQueue, other: AnyQueue
) -> None:
    id = queue.push("x", key="k", unique_for=60)
    queue.commit(queue.reserve(0))
    other.push("y")
    held = other.reserve(0)
    with pytest.raises(DuplicateKey):
        other.move(held, to=queue, key="k")
    let_free(world, id)
    other.move(held, to=queue, key="k")
    assert queue.reserve(0).key == "k"


@pytest.mark.needs("dead_letter")
def test_redrive_takes_a_key_that_is_free_again(
    world: World, client: AnyClient, queue: AnyQueue
) -> None:
    queue.push("y", key="k")
    queue.bury(queue.reserve(0))
    id = queue.push("x", key="k", unique_for=60)
    queue.commit(queue.reserve(0))
    let_free(world, id)
    assert client.queue(f"{queue.name}.dead").redrive() == 1
    assert queue.reserve(0).key == "k"
