"""Many: one message becomes several, in a transaction where there are any; elsewhere with ids that a repetition has again."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel
from pymongo.errors import AutoReconnect

from pyqueue import AsyncQueue, Backoff, Delivery, LeaseLost, Many, To, Worker
from pyqueue.connecting import AsyncConnection, Connection
from pyqueue.requests import Plan
from tests.pipeline.conftest import Place, adds_up

NOW = Backoff(base=0)


def split(place: Place, function: Any, **options: Any) -> dict[str, int]:
    """Have the queue "in" handled by a choice of "a" and "b"; answers the counters that are not 0."""
    report = place.run(
        lambda client: client.pipeline().choice("in", function, to=["a", "b"], **options),
        until_empty=True,
    )
    assert adds_up(report)
    return {name: count for name, count in report.stages["in"].items() if count}


def ids(place: Place, *names: str) -> list[Any]:
    return [each.id for name in names for each in place.queue(name).peek(1000)]


def test_one_message_becomes_many(place: Place) -> None:
    place.queue("in").push_many([1, 10], headers={"trace": "t"})
    counters = split(place, lambda x: Many([To("a", x), To("a", x + 1), To("b"), To("a", x + 2)]))
    assert counters == {"in": 2, "out": 2}
    assert sorted(place.payloads("a")) == [1, 2, 3, 10, 11, 12]
    assert sorted(place.payloads("b")) == [1, 10]
    assert {each.headers["trace"] for each in place.queue("a").peek()} == {"t"}
    assert place.queue("in").counts().total == 0


def test_the_outputs_of_one_message_stay_in_order(place: Place) -> None:
    place.queue("in").push("x")
    split(place, lambda x: Many([To("a", n) for n in range(50)]))
    assert place.payloads("a") == list(range(50))


def test_none_at_all_is_an_end(place: Place) -> None:
    place.queue("in").push("x")
    assert split(place, lambda x: Many([])) == {"in": 1, "out": 1}


class Part(BaseModel):
    """What the next stage takes."""

    number: int


def test_outputs_are_of_the_next_stages_models(memory: Place) -> None:
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
def test_a_wrong_output_buries_the_message(place: Place, case: str) -> None:
    answer, reason = WRONG[case]
    place.queue("in").push("x")
    assert split(place, lambda x: Many([To("a"), answer])) == {"in": 1, "dead": 1}
    (message,) = place.queue("in.dead").peek()
    assert message.error is not None
    assert reason in message.error["message"]
    if place.server:  # elsewhere what was written before stays
        assert ids(place, "a", "b") == []


def test_an_aborted_transaction_leaves_nothing(
    server: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit of the input fails after its outputs were written."""
    real = AsyncQueue.commit
    seen: list[int] = []

    async def fail(self: Any, *reservations: Any, session: Any = None, **options: Any) -> None:
        assert session is not None
        inside = await self._runner.run(_counting(session))
        seen.append(inside)
        if len(seen) == 1:
            assert ids(server, "a", "b") == []  # nobody sees them
            raise OSError("the cable")
        await real(self, *reservations, session=session, **options)

    monkeypatch.setattr(AsyncQueue, "commit", fail)
    server.queue("in").push("x")
    assert split(server, lambda x: Many([To("a"), To("b")]), backoff=NOW) == {
        "in": 2,
        "retried": 1,
        "out": 1,
    }
    assert seen == [2, 2]
    assert len(ids(server, "a")) == len(ids(server, "b")) == 1


def _counting(session: Any) -> Plan[int]:
    from pyqueue.backends.namespace import HOT
    from pyqueue.requests import Count

    written = {"q": {"$in": ["a", "b"]}, "record": {"$exists": False}}
    found: int = yield Count(written, HOT, session=session)
    return found


def test_a_lost_lease_undoes_the_outputs(server: Place) -> None:
    def steal(payload: Any, delivery: Delivery[Any]) -> Any:
        if delivery.message.tries == 1:
            server.raw().update_one(
                {"payload": "x"}, {"$set": {"token": "another's", "when": delivery.message.pushed}}
            )
        return Many([To("a", delivery.message.tries)])

    server.queue("in").push("x")
    assert split(server, steal) == {"in": 2, "lost": 1, "out": 1}
    assert server.payloads("a") == [2]


@pytest.mark.parametrize("lease", [5, 600])
def test_a_message_is_held_for_longer_than_an_orphan_of_its_transaction_lives(
    server: Place, monkeypatch: pytest.MonkeyPatch, lease: float
) -> None:
    """The server keeps a dead process's transaction for 60 s; with a lapsed lease under it, nobody could claim anything."""
    real = AsyncQueue.commit
    held: list[float] = []

    async def look(self: Any, *reservations: Any, **options: Any) -> None:
        document = server.raw().find_one({"payload": "x"})  # outside the transaction
        held.append((document["when"] - document["reserved"]).total_seconds())
        await real(self, *reservations, **options)

    monkeypatch.setattr(AsyncQueue, "commit", look)
    server.queue("in").push("x")
    assert split(server, lambda x: Many([To("a")]), lease=lease) == {"in": 1, "out": 1}
    assert (70 < held[0] < 90) if lease < 70 else held[0] == pytest.approx(lease, abs=1), (
        "a long lease is not cut short"
    )


def test_a_transaction_that_the_server_does_not_answer_is_tried_again(
    server: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls = Connection if server.blocking else AsyncConnection
    real: Any = cls.run_transaction
    failed: list[int] = []

    def fail(self: Any, fn: Any) -> Any:
        if len(failed) < 2:
            failed.append(1)
            raise AutoReconnect("the cable")
        return real(self, fn)

    monkeypatch.setattr(cls, "run_transaction", fail)
    server.queue("in").push("x")
    assert split(server, lambda x: Many([To("a"), To("b")])) == {"in": 1, "out": 1}
    assert len(failed) == 2
    assert len(ids(server, "a")) == len(ids(server, "b")) == 1


# ---- elsewhere


@pytest.fixture
def first_commit_fails(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The worker dies between the outputs and the commit, as far as the queue can tell."""
    real = AsyncQueue.commit
    failed: list[int] = []

    async def fail(self: Any, *reservations: Any, **options: Any) -> None:
        if not failed:
            failed.append(1)
            raise OSError("the cable")
        await real(self, *reservations, **options)

    monkeypatch.setattr(AsyncQueue, "commit", fail)
    return failed


def test_a_repetition_writes_no_second_copy(memory: Place, first_commit_fails: list[int]) -> None:
    memory.queue("in").push("x")
    assert split(memory, lambda x: Many([To("a", 1), To("a", 2), To("b")]), backoff=NOW) == {
        "in": 2,
        "retried": 1,
        "out": 1,
    }
    assert first_commit_fails
    assert sorted(memory.payloads("a")) == [1, 2]
    assert memory.payloads("b") == ["x"]


def test_nor_does_one_after_a_redrive(memory: Place, first_commit_fails: list[int]) -> None:
    queue = memory.queue("in")
    queue.push("x")
    fan = lambda x: Many([To("a", 1), To("b")])  # noqa: E731
    assert split(memory, fan, max_tries=1) == {"in": 1, "dead": 1}
    assert memory.queue("in.dead").redrive() == 1
    assert split(memory, fan, max_tries=1) == {"in": 1, "out": 1}
    assert len(ids(memory, "a")) == len(ids(memory, "b")) == 1


def test_a_replay_writes_new_ones(memory: Place) -> None:
    queue = memory.queue("in", history=60)
    id = queue.push("x")
    assert id is not None
    fan = lambda x: Many([To("a", 1), To("b")])  # noqa: E731
    split(memory, fan, history=60)
    assert queue.replay(id) == 1
    split(memory, fan, history=60)
    assert len(ids(memory, "a")) == len(ids(memory, "b")) == 2


def test_so_does_another_arrival(memory: Place) -> None:
    """A message that comes back by a move is worked on anew."""
    memory.queue("in", history=60).push("x")
    split(memory, lambda x: Many([To("a", 1)]), history=60)
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
    split(memory, lambda x: Many([To("a", 1)]))
    assert len(ids(memory, "a")) == 2


def test_ids_differ_by_place_and_target(memory: Place) -> None:
    memory.queue("in").push_many([1, 2])
    split(memory, lambda x: Many([To("a"), To("a"), To("b"), To("b")]))
    found = ids(memory, "a", "b")
    assert len(set(found)) == len(found) == 8


def test_a_sink_may_fan_out_to_what_it_lists(memory: Place) -> None:
    memory.queue("in").push(1)
    memory.run(
        lambda client: Worker(client).on("in", lambda x: Many([To("a"), To("a", 2)]), to=["a"]),
        until_empty=True,
    )
    assert memory.payloads("a") == [1, 2]


def test_lost_lease_elsewhere_is_lost(memory: Place) -> None:
    def settle(payload: Any, delivery: Delivery[Any]) -> Any:
        memory.raw().update_one(
            {"payload": "x"}, {"$set": {"token": "another's", "when": delivery.message.pushed}}
        )
        raise LeaseLost("as a call of the queue said")

    memory.queue("in").push("x")
    report = memory.run(
        lambda client: Worker(client).on("in", settle, max_tries=2), until_empty=True
    )
    assert report.stages["in"]["lost"] == 2
    assert adds_up(report)
