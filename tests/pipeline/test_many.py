"""Many: one message becomes several, all or none of them, with and without transactions."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from bson import ObjectId
from pydantic import BaseModel

from pyqueue import Delivery, Drop, LeaseLost, Many, To, Unavailable
from pyqueue.backends import recovering
from pyqueue.backends.outputs import Output
from pyqueue.backends.settling import fan_out
from pyqueue.queue_base import backend_of
from pyqueue.requests import Insert, Update, UpdateEach
from pyqueue.runtime.connecting import runner_of
from pyqueue.runtime.drivers import AsyncDriver, Driver
from tests.pipeline.place import Place


def test_many_outputs_of_one_message(place: Place) -> None:
    place.queue("in").push_many([1, 10], headers={"trace": "t"})
    counters = place.run_stage(
        lambda x: Many([To("a", x), To("a", x + 1), To("b"), To("a", x + 2)])
    )
    assert counters == {"in": 2, "out": 2}
    assert sorted(place.payloads("a")) == [1, 2, 3, 10, 11, 12]
    assert sorted(place.payloads("b")) == [1, 10]
    assert {each.headers["trace"] for each in place.queue("a").peek()} == {"t"}
    assert place.queue("in").counts().total == 0


def test_many_keeps_the_order_of_its_outputs(place: Place) -> None:
    place.queue("in").push("x")
    place.run_stage(lambda x: Many([To("a", n) for n in range(50)]))
    assert place.payloads("a") == list(range(50))


def test_many_without_outputs_commits(place: Place) -> None:
    place.queue("in").push("x")
    assert place.run_stage(lambda x: Many([])) == {"in": 1, "out": 1}


class Part(BaseModel):
    """A payload of the next stage."""

    number: int


def test_many_outputs_have_the_models_of_their_stages(memory: Place) -> None:
    seen: list[Any] = []
    memory.queue("in", model=Part).push(Part(number=1))

    def build(client: Any) -> Any:
        pipeline = client.pipeline().choice(
            "in",
            lambda part: Many([To("a"), To("b"), To("a", {"number": 2})]),
            to=["a", "b"],
            model=Part,
        )
        return pipeline.sink("a", seen.append, model=Part)

    memory.run(build, until_empty=True)
    assert sorted(part.number for part in seen) == [1, 2]
    assert memory.payloads("b") == [{"number": 1}]


WRONG = {
    "unlisted": (To("c"), "its stage leads to a, b"),
    "too large": (To("b", "x" * (16 * 1024 * 1024)), "bytes, and the limit is"),
    "not BSON": (To("b", object()), "not storable as BSON"),
}


@pytest.mark.parametrize("case", WRONG)
def test_many_wrong_output_buries_the_message(place: Place, case: str) -> None:
    answer, reason = WRONG[case]
    place.queue("in").push("x")
    assert place.run_stage(lambda x: Many([To("a"), answer])) == {"in": 1, "dead": 1}
    (message,) = place.queue("in.dead").peek()
    assert message.error is not None
    assert reason in message.error["message"]
    assert place.ids("a", "b") == []


def lose_answers(
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    numbers: range,
    *,
    done: bool,
    error: Exception | None = None,
) -> list[int]:
    """Have some of the writes at majority of a fan-out fail.

    Args:
        monkeypatch: The fixture.
        owner: The class of the driver.
        numbers: The numbers of these writes. 0 writes the outputs, 1 decides, 2 publishes them.
        done: Whether the server carries them out.
        error: The error that they raise; None: the outcome is unknown.

    Returns:
        A list that grows by the number of each such write.
    """
    real = owner.ask
    seen: list[int] = []

    def lost(request: Any) -> bool:
        if not isinstance(request, (Insert, Update, UpdateEach)) or not request.majority:
            return False
        seen.append(len(seen))
        return seen[-1] in numbers

    def ask(self: Any, request: Any) -> Any:
        lose = lost(request)
        answer = real(self, request) if done or not lose else None
        if lose:
            raise error or Unavailable("the cable")
        return answer

    async def ask_async(self: Any, request: Any) -> Any:
        lose = lost(request)
        answer = await real(self, request) if done or not lose else None
        if lose:
            raise error or Unavailable("the cable")
        return answer

    monkeypatch.setattr(owner, "ask", ask if owner is Driver else ask_async)
    return seen


@pytest.mark.parametrize("done", [True, False])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_many_with_a_lost_answer_makes_its_outputs_once(
    place: Place, monkeypatch: pytest.MonkeyPatch, number: int, done: bool
) -> None:
    """The settlement is repeated after each write, while the lease lasts."""
    place.queue("in", history=60).push("x")
    owner = Driver if place.blocking else AsyncDriver
    seen = lose_answers(monkeypatch, owner, range(number, number + 1), done=done)
    assert place.run_stage(lambda x: Many([To("a"), To("b")]), history=60) == {"in": 1, "out": 1}
    assert len(seen) > number
    assert len(place.ids("a")) == len(place.ids("b")) == 1
    (finished,) = place.queue("in").history()
    assert (finished.outcome, finished.payload) == ("committed", "x")


def test_many_lost_lease_makes_no_outputs(place: Place) -> None:
    def steal(payload: Any, delivery: Delivery[Any]) -> Any:
        if delivery.message.tries == 1:
            place.steal(delivery)
        return Many([To("a", delivery.message.tries)])

    place.queue("in").push("x")
    assert place.run_stage(steal) == {"in": 2, "lost": 1, "out": 1}
    assert place.payloads("a") == [2]
    assert hidden(place) == []


def hidden(place: Place) -> list[Any]:
    """The documents that belong to no queue."""
    return list(place.collection().find({"q": {"$regex": "^~handover"}}))


@pytest.mark.parametrize("history", [None, 60])
def test_many_leaves_nothing_behind(place: Place, history: float | None) -> None:
    queue = place.queue("in", history=history)
    id = queue.push("x", key="k", headers={"trace": "t"})
    fan = lambda x: Many([To("a"), To("b")])  # noqa: E731
    assert place.run_stage(fan, history=history) == {"in": 1, "out": 1}
    assert hidden(place) == []
    assert queue.push("y", key="k") is not None
    found = [(each.id, each.outcome, each.key, each.headers) for each in queue.history()]
    assert found == ([] if history is None else [(id, "committed", "k", {"trace": "t"})])


def die_after_the_decision(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave a message as a process does that dies before it publishes the outputs."""
    queue = place.queue("in")
    queue.push("x")
    held = queue.reserve(0)
    assert held is not None
    targets = [backend_of(place.queue(name)).target for name in ("a", "b")]
    outputs = [Output(ObjectId(), target, "x", None) for target in targets]
    with monkeypatch.context() as broken:
        lose_answers(broken, Driver, range(2, 3), done=False, error=OSError("the cable"))
        with pytest.raises(OSError, match="the cable"):
            runner_of(place.client).run(fan_out(backend_of(queue).terms, held, outputs))
    ended = {"$set": {"ended.at": datetime(2020, 1, 1, tzinfo=UTC)}}
    assert place.collection().update_one({"ended": {"$exists": True}}, ended).matched_count


def test_many_is_recovered_after_a_death(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then no queue shows the outputs, and deleting the queue does not lose them."""
    die_after_the_decision(place, monkeypatch)
    assert place.ids("a", "b") == []
    found = {each.name: each.counts.total for each in place.client.queues()}
    assert found == {"in": 0, "a": 0, "b": 0}
    place.client.delete_queue("in")
    assert place.payloads("a") == place.payloads("b") == ["x"]
    assert hidden(place) == []


def test_run_until_empty_waits_for_outputs_of_the_dead(
    memory: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    die_after_the_decision(memory, monkeypatch)
    monkeypatch.setattr(recovering, "INTERVAL", timedelta())
    seen: list[str] = []

    def build(client: Any) -> Any:
        pipeline = client.pipeline().choice("in", lambda x: Drop(), to=["a", "b"])
        return pipeline.sink("a", seen.append).sink("b", seen.append)

    memory.run(build, until_empty=True)
    assert seen == ["x", "x"]


def test_many_replay_makes_new_outputs(place: Place) -> None:
    queue = place.queue("in", history=60)
    id = queue.push("x")
    assert id is not None
    fan = lambda x: Many([To("a", 1), To("b")])  # noqa: E731
    place.run_stage(fan, history=60)
    assert queue.replay(id) == 1
    place.run_stage(fan, history=60)
    assert len(place.ids("a")) == len(place.ids("b")) == 2


def test_many_second_arrival_writes_new_outputs(memory: Place) -> None:
    """A message that comes back by a move is handled again."""
    memory.queue("in", history=60).push("x")
    memory.run_stage(lambda x: Many([To("a", 1)]), history=60)
    back = memory.queue("in", history=60)
    back.replay(back.history()[0].id)

    def go_round(client: Any) -> Any:
        pipeline = client.pipeline().link("in", lambda x: x, to="elsewhere")
        return pipeline.link("elsewhere", lambda x: x, to="again")

    memory.run(go_round, until_empty=True)
    reservation = memory.queue("again").reserve(1)
    assert reservation is not None
    memory.queue("again").move(reservation, to="in")
    memory.run_stage(lambda x: Many([To("a", 1)]))
    assert len(memory.ids("a")) == 2


def test_many_ids_differ_by_place_and_target(memory: Place) -> None:
    memory.queue("in").push_many([1, 2])
    memory.run_stage(lambda x: Many([To("a"), To("a"), To("b"), To("b")]))
    found = memory.ids("a", "b")
    assert len(set(found)) == len(found) == 8


def test_many_from_a_sink_goes_to_what_it_lists(memory: Place) -> None:
    memory.queue("in").push(1)
    memory.run_worker(lambda x: Many([To("a"), To("a", 2)]), to=["a"])
    assert memory.payloads("a") == [1, 2]


def test_handler_that_raises_lease_lost_has_lost_it(memory: Place) -> None:
    def lose(payload: Any, delivery: Delivery[Any]) -> Any:
        memory.steal(delivery)
        raise LeaseLost("as a call of the queue said")

    memory.queue("in").push("x")
    assert memory.run_worker(lose, max_tries=2) == {"in": 2, "lost": 2}
