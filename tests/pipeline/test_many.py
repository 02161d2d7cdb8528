"""Many: one message becomes several.

On a replica set that is one transaction. Elsewhere each output has the same id in every try.
"""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel
from pymongo.errors import AutoReconnect

from pyqueue import AsyncQueue, Backoff, Delivery, LeaseLost, Many, To, Worker
from pyqueue.backends.namespace import HOT
from pyqueue.connecting import AsyncConnection, Connection
from pyqueue.requests import Count, Plan
from tests.pipeline.place import Place, counted, fail_first

NOW = Backoff(base=0)


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
    """What the next stage takes."""

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
    "too large": (To("b", "x" * (16 * 1024 * 1024)), "bytes; at most"),
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
    if place.server:  # elsewhere an output that was written stays
        assert place.ids("a", "b") == []


def test_many_aborted_transaction_leaves_nothing(
    server: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit of the input fails after its outputs were written."""
    real = AsyncQueue.commit
    seen: list[int] = []

    def count(session: Any) -> Plan[int]:
        written = {"q": {"$in": ["a", "b"]}, "record": {"$exists": False}}
        found: int = yield Count(written, HOT, session=session)
        return found

    async def fail(self: Any, *reservations: Any, session: Any = None, **options: Any) -> None:
        assert session is not None
        seen.append(await self._runner.run(count(session)))
        if len(seen) == 1:
            assert server.ids("a", "b") == []  # outside the transaction they are not visible
            raise OSError("the cable")
        await real(self, *reservations, session=session, **options)

    monkeypatch.setattr(AsyncQueue, "commit", fail)
    server.queue("in").push("x")
    counters = server.run_stage(lambda x: Many([To("a"), To("b")]), backoff=NOW)
    assert counters == {"in": 2, "retried": 1, "out": 1}
    assert seen == [2, 2]
    assert len(server.ids("a")) == len(server.ids("b")) == 1


def test_many_lost_lease_undoes_the_outputs(server: Place) -> None:
    def steal(payload: Any, delivery: Delivery[Any]) -> Any:
        if delivery.message.tries == 1:
            server.steal(delivery)
        return Many([To("a", delivery.message.tries)])

    server.queue("in").push("x")
    assert server.run_stage(steal) == {"in": 2, "lost": 1, "out": 1}
    assert server.payloads("a") == [2]


@pytest.mark.parametrize(("lease", "expected"), [(5, 30), (60, 60), (600, 600)])
def test_many_holds_the_message_for_30_s_at_least(
    server: Place, monkeypatch: pytest.MonkeyPatch, lease: float, expected: float
) -> None:
    """A settlement in a transaction is refused with less than 20 s left."""
    real = AsyncQueue.commit
    held: list[float] = []

    async def look(self: Any, *reservations: Any, **options: Any) -> None:
        document = server.collection().find_one({"payload": "x"})  # outside the transaction
        held.append((document["when"] - document["reserved"]).total_seconds())
        await real(self, *reservations, **options)

    monkeypatch.setattr(AsyncQueue, "commit", look)
    server.queue("in").push("x")
    assert server.run_stage(lambda x: Many([To("a")]), lease=lease) == {"in": 1, "out": 1}
    # The extension begins some time after the claim. A lease that is long enough stays.
    assert expected <= held[0] < expected + 20
    assert lease == 5 or held[0] == expected


def test_many_transaction_is_retried_while_unavailable(
    server: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = Connection if server.blocking else AsyncConnection
    cable = AutoReconnect("the cable")
    failed = fail_first(monkeypatch, owner, "run_transaction", cable, times=2)
    server.queue("in").push("x")
    assert server.run_stage(lambda x: Many([To("a"), To("b")])) == {"in": 1, "out": 1}
    assert len(failed) == 2
    assert len(server.ids("a")) == len(server.ids("b")) == 1


# ---- without transactions


@pytest.fixture
def first_commit_fails(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """For the queue, the worker dies between the outputs and the commit."""
    return fail_first(monkeypatch, AsyncQueue, "commit", OSError("the cable"))


def test_many_second_try_writes_no_second_copy(
    memory: Place, first_commit_fails: list[tuple[Any, ...]]
) -> None:
    memory.queue("in").push("x")
    assert memory.run_stage(lambda x: Many([To("a", 1), To("a", 2), To("b")]), backoff=NOW) == {
        "in": 2,
        "retried": 1,
        "out": 1,
    }
    assert first_commit_fails
    assert sorted(memory.payloads("a")) == [1, 2]
    assert memory.payloads("b") == ["x"]


def test_many_redrive_writes_no_second_copy(
    memory: Place, first_commit_fails: list[tuple[Any, ...]]
) -> None:
    queue = memory.queue("in")
    queue.push("x")
    fan = lambda x: Many([To("a", 1), To("b")])  # noqa: E731
    assert memory.run_stage(fan, max_tries=1) == {"in": 1, "dead": 1}
    assert memory.queue("in.dead").redrive() == 1
    assert memory.run_stage(fan, max_tries=1) == {"in": 1, "out": 1}
    assert len(memory.ids("a")) == len(memory.ids("b")) == 1


def test_many_replay_writes_new_outputs(memory: Place) -> None:
    queue = memory.queue("in", history=60)
    id = queue.push("x")
    assert id is not None
    fan = lambda x: Many([To("a", 1), To("b")])  # noqa: E731
    memory.run_stage(fan, history=60)
    assert queue.replay(id) == 1
    memory.run_stage(fan, history=60)
    assert len(memory.ids("a")) == len(memory.ids("b")) == 2


def test_many_second_arrival_writes_new_outputs(memory: Place) -> None:
    """A message that comes back by a move is handled again."""
    memory.queue("in", history=60).push("x")
    memory.run_stage(lambda x: Many([To("a", 1)]), history=60)
    back = memory.queue("in", history=60)
    back.replay(back.history()[0].id)

    def go_round(client: Any) -> Any:
        return (
            client.pipeline()
            .link("in", lambda x: x, to="elsewhere")
            .link("elsewhere", lambda x: x, to="again")
        )

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
    memory.run(
        lambda client: Worker(client).on("in", lambda x: Many([To("a"), To("a", 2)]), to=["a"]),
        until_empty=True,
    )
    assert memory.payloads("a") == [1, 2]


def test_handler_that_raises_lease_lost_has_lost_it(memory: Place) -> None:
    def lose(payload: Any, delivery: Delivery[Any]) -> Any:
        memory.steal(delivery)
        raise LeaseLost("as a call of the queue said")

    memory.queue("in").push("x")
    report = memory.run(lambda client: Worker(client).on("in", lose, max_tries=2), until_empty=True)
    assert counted(report, "in") == {"in": 2, "lost": 2}
