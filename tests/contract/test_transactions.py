"""transaction(), run_transaction() and session=, on servers and in memory."""

from __future__ import annotations

from typing import Any

import pytest

from pyqueue import ConfigurationError, DuplicateKey, LeaseLost
from tests.contract.world import AnyClient, AnyQueue, World, expect_error, hold, waiting

sessions = pytest.mark.needs("keys", "move", "dead_letter")


class Oops(Exception):
    pass


def test_what_is_not_a_session_is_refused(queue: AnyQueue) -> None:
    with pytest.raises(ConfigurationError, match="session"):
        queue.push(1, session=object())
    held = hold(queue)
    with pytest.raises(ConfigurationError, match="session"):
        queue.commit(held, session=object())
    assert queue.counts().reserved == 1


@sessions
class TestTransactions:
    def test_pushed_messages_appear_after_the_commit(
        self, client: AnyClient, queue: AnyQueue
    ) -> None:
        queue.push("before")
        with client.transaction() as session:
            id = queue.push("a", session=session)
            ids = queue.push_many(["b", "c"], keys=["k", None], session=session)
            assert queue.get(id) is None
            assert queue.counts().total == 1
        assert {each.payload for each in queue.peek()} == {"before", "a", "b", "c"}
        assert queue.get(ids[0]) is not None

    def test_exception_undoes_everything(
        self, client: AnyClient, queue: AnyQueue, other: AnyQueue
    ) -> None:
        held = hold(queue, "held")
        with pytest.raises(Oops), client.transaction() as session:  # noqa: PT012
            other.push("new", session=session)
            queue.commit(held, session=session)
            raise Oops
        assert other.counts().total == 0
        assert queue.counts().reserved == 1
        queue.commit(held)

    def test_push_without_the_session_stays(self, client: AnyClient, queue: AnyQueue) -> None:
        queue.push("before")
        with pytest.raises(Oops), client.transaction() as session:  # noqa: PT012
            queue.push("inside", session=session)
            queue.push("outside")
            assert queue.counts().total == 2
            raise Oops
        assert sorted(each.payload for each in queue.peek()) == ["before", "outside"]

    @pytest.mark.parametrize(
        "way",
        [
            *("commit", "rollback", "last rollback", "uncounted rollback"),
            *("move", "move_many", "move key"),
        ],
    )
    def test_settling_with_other_writes(
        self, world: World, name: str, other: AnyQueue, way: str
    ) -> None:
        queue = world.client.queue(name, max_tries=5 if way == "rollback" else 1)
        dead = world.client.queue(f"{name}.dead")
        queue.pause()  # the records exist before the transaction
        other.resume()
        dead.resume()
        queue.resume()
        held = hold(queue, "x")
        with world.client.transaction() as session:
            if way == "commit":
                queue.commit(held, session=session)
            elif way.endswith("rollback"):
                counted = way != "uncounted rollback"
                queue.rollback(held, delay=0, counted=counted, session=session)
            elif way == "move_many":
                queue.move_many([(held, "y")], to=other, session=session)
            else:
                queue.move(held, to=other, key="k" if way == "move key" else None, session=session)
            other.push("beside", session=session)
            assert queue.counts().reserved == 1
        counts = {
            "commit": (0, 1, 0),
            "rollback": (1, 1, 0),
            "last rollback": (0, 1, 1),
            "uncounted rollback": (1, 1, 0),
            "move": (0, 2, 0),
            "move_many": (0, 2, 0),
            "move key": (0, 2, 0),
        }
        assert (queue.counts().total, other.counts().total, dead.counts().total) == counts[way]

    def test_duplicate_does_not_abort_the_transaction(
        self, client: AnyClient, queue: AnyQueue, other: AnyQueue
    ) -> None:
        mine = f"{queue.name}/1"
        queue.push("live", key="k")
        queue.push("mine", id=mine)
        with client.transaction() as session:
            assert queue.push("x", key="k", session=session) is None
            with expect_error(DuplicateKey, keys=["k"]):
                queue.push("x", key="k", on_duplicate="error", session=session)
            assert queue.push("x", id=mine, session=session) == mine
            assert queue.push_many(["y", "z"], keys=["k", "l"], session=session)[0] is None
            with expect_error(DuplicateKey, ids=[mine]):
                other.push("x", id=mine, session=session)
            assert queue.push("again", key="l", session=session) is None
            assert queue.push("stored", session=session) is not None
        assert {each.payload for each in queue.peek()} == {"live", "mine", "z", "stored"}
        assert other.counts().total == 0

    def test_replace(self, client: AnyClient, queue: AnyQueue) -> None:
        live = queue.push("old", key="k")
        with client.transaction() as session:
            assert queue.push("new", key="k", on_duplicate="replace", session=session) == live
            assert queue.push("first", key="l", on_duplicate="replace", session=session) is not None
            assert queue.get(live).payload == "old"
        assert {each.payload for each in queue.peek()} == {"new", "first"}

    def test_run_transaction(self, client: AnyClient, queue: AnyQueue, other: AnyQueue) -> None:
        other.push("there")  # creates both collections and records
        held = hold(queue)

        def work(session: Any) -> str:
            other.push("result", session=session)
            queue.commit(held, session=session)
            return "answer"

        assert client.run_transaction(work) == "answer"
        assert queue.counts().total == 0
        assert {each.payload for each in other.peek()} == {"there", "result"}

    def test_run_transaction_undoes_and_raises_the_exception(
        self, client: AnyClient, queue: AnyQueue
    ) -> None:
        def work(session: Any) -> None:
            queue.push("x", session=session)
            raise Oops

        with pytest.raises(Oops):
            client.run_transaction(work)
        assert queue.counts().total == 0

    def test_run_transaction_repeats_after_a_write_conflict(
        self, world: World, queue: AnyQueue, other: AnyQueue
    ) -> None:
        other.push("there", key="k")
        held = hold(queue)
        calls = 0

        def work(session: Any) -> None:
            nonlocal calls
            calls += 1
            assert other.push("seen", session=session) is not None  # the transaction begins
            if calls == 1:
                queue.extend(held, lease=99)  # written outside: the next write conflicts
            queue.commit(held, session=session)

        world.client.run_transaction(work)
        assert calls == 2
        assert queue.counts().total == 0
        assert other.counts().ready == 2

    @pytest.mark.needs("documents")
    def test_short_lease_is_refused(self, world: World, queue: AnyQueue, other: AnyQueue) -> None:
        queue.push_many(["a", "b"])
        held = queue.reserve(0, lease=60)
        short = queue.reserve(0, lease=30)
        world.lapse(held)
        for each in (held, short):
            if each is short:
                assert (short.lease / 3, short.lease) == (10, 30)
                world.raw().update_one({"_id": short.id}, {"$set": {"when": short.when}})
                short.until = short.when  # nothing is left
            before = world.bytes(each.id)
            for settle in (queue.commit, queue.rollback):
                with (
                    pytest.raises(ConfigurationError, match=r"extend\(\).*lease="),
                    world.client.transaction() as session,
                ):
                    settle(each, session=session)
            with (
                pytest.raises(ConfigurationError, match="extend"),
                world.client.transaction() as session,
            ):
                queue.move(each, to=other, session=session)
            assert world.bytes(each.id) == before
            queue.extend(each, lease=60)
            with world.client.transaction() as session:
                queue.commit(each, session=session)
        assert queue.counts().total == 0

    def test_short_lease_that_is_fresh_is_accepted(
        self, client: AnyClient, queue: AnyQueue
    ) -> None:
        queue.push(1)
        held = queue.reserve(0, lease=12)  # at least 4 s are left
        with client.transaction() as session:
            queue.commit(held, session=session)
        assert queue.counts().total == 0

    def test_transaction_inside_reserved(
        self, client: AnyClient, queue: AnyQueue, other: AnyQueue
    ) -> None:
        other.push("there")
        queue.push(1)
        with queue.reserved(0) as held, client.transaction() as session:
            other.push("result", session=session)
            queue.commit(held, session=session)
        assert queue.counts().total == 0
        assert other.counts().ready == 2

    def test_reserved_rolls_back_when_the_transaction_fails(
        self, client: AnyClient, queue: AnyQueue
    ) -> None:
        queue.push(1)
        with pytest.raises(Oops), queue.reserved(0) as held, client.transaction() as session:  # noqa: PT012
            queue.commit(held, session=session)
            raise Oops
        message = queue.peek()[0] if queue.peek() else None
        assert message is None  # the backoff of the queue
        assert queue.counts().scheduled == 1

    @pytest.mark.needs("pop")
    @pytest.mark.parametrize("own", [False, True], ids=["transaction", "run_transaction"])
    def test_signals_wait_for_the_commit(
        self, client: AnyClient, queue: AnyQueue, own: bool
    ) -> None:
        queue.push(0)
        assert queue.pop(0) is not None
        received = waiting(client, queue, lambda: queue.pop(60))

        def work(session: Any) -> None:
            sent = client.stats["signals"]
            queue.push("x", session=session)
            assert client.stats["signals"] == sent

        if own:
            client.run_transaction(work)
        else:
            with client.transaction() as session:
                work(session)
        assert received.result(10).payload == "x"  # the fallback poll is at 15 s

    @pytest.mark.needs("documents")
    def test_lost_lease_raises_inside_the_transaction(self, world: World, queue: AnyQueue) -> None:
        queue.push_many([1, 2])
        held = queue.reserve_many(2, timeout=0)
        world.lapse(held[0], known=False)
        assert queue.reserve(0) is not None
        with expect_error(LeaseLost, lost=(held[0],)), world.client.transaction() as session:
            queue.commit(*held, session=session)
        assert queue.counts().reserved == 2  # the transaction was aborted
