"""Operations of a holder: commit, rollback, extend, release, progress, checkpoint, and the
reserved() block.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from pyqueue import (
    AsyncClient,
    Backoff,
    ConfigurationError,
    Finished,
    LeaseLost,
    Reservation,
    Unavailable,
)
from pyqueue.backends.queue_plans import QueuePlans
from pyqueue.requests import Plan
from pyqueue.runtime.connecting import runner_of
from tests.contract.world import (
    AnyClient,
    AnyQueue,
    World,
    expect_error,
    hold,
    near,
    refuses,
)
from tests.support.eventually import eventually

by_client = pytest.mark.differs_by("client")


# ---- commit


def test_commit_takes_several_or_none(queue: AnyQueue) -> None:
    queue.push_many(range(20))
    held = [*queue.reserve_many(10, timeout=0), *queue.reserve_many(10, timeout=0)]
    queue.commit(*held[5:15], *held[5:8])  # from two claims; some are given twice
    assert queue.counts().reserved == 10
    queue.commit()
    queue.commit(*held[:5], *held[15:])
    assert queue.counts().total == 0


def test_commit_is_final(queue: AnyQueue) -> None:
    held = hold(queue)
    queue.commit(held)
    assert queue.get(held.id) is None
    assert queue.counts().total == 0
    with expect_error(LeaseLost, lost=(held,), unknown=()):
        queue.commit(held)


def test_lapsed_lease_commits_if_not_reclaimed(world: World, queue: AnyQueue) -> None:
    queue.push_many([1, 2, 3])
    held = queue.reserve_many(3, timeout=0)
    world.lapse(held[0])
    world.lapse(held[1], known=False)
    queue.commit(*held)
    assert queue.counts().total == 0


@pytest.mark.needs("documents")
def test_batch_with_lost_leases_settles_the_rest(world: World, queue: AnyQueue) -> None:
    queue.push_many(range(4))
    held = queue.reserve_many(4, timeout=0)
    world.lapse(held[1], known=False)
    again = queue.reserve(0)
    with expect_error(LeaseLost, lost=(held[1],), unknown=()):
        queue.commit(*held)
    assert queue.counts().total == 1
    queue.commit(again)


#: The operations that settle or extend several reservations.
BATCHES: dict[str, Callable[..., Any]] = {
    "commit": lambda queue, held, to: queue.commit(*held),
    "rollback": lambda queue, held, to: queue.rollback(*held, delay=0, error="no"),
    "release": lambda queue, held, to: queue.release(*held),
    "extend": lambda queue, held, to: queue.extend(*held),
    "bury": lambda queue, held, to: queue.bury(*held),
    "move": lambda queue, held, to: queue.move(*held, to=to),
    "move_many": lambda queue, held, to: queue.move_many([(each, 1) for each in held], to=to),
}


@pytest.mark.needs("documents")
@pytest.mark.parametrize("verb", BATCHES)
def test_batch_names_exactly_the_lost_reservations(
    world: World, queue: AnyQueue, other: AnyQueue, verb: str
) -> None:
    queue.push_many(range(4))
    held = queue.reserve_many(4, timeout=0)
    world.lapse(held[1], known=False)
    again = queue.reserve(0)
    with expect_error(LeaseLost, lost=(held[1],), unknown=()):
        BATCHES[verb](queue, held, other)
    queue.commit(again)


@pytest.mark.needs("documents")
def test_batch_without_history_reports_unknown_for_gone(world: World, queue: AnyQueue) -> None:
    queue.push_many(range(3))
    held = queue.reserve_many(3, timeout=0)
    world.raw().delete_one({"_id": held[1].id})
    with pytest.raises(LeaseLost) as caught:
        queue.commit(*held)
    assert held[1] in caught.value.unknown
    assert caught.value.lost == ()
    assert queue.counts().total == 0


@pytest.mark.needs("history")
def test_batch_with_history_knows_the_lost_ones(client: AnyClient, name: str) -> None:
    queue = client.queue(name, history=60)
    queue.push_many(range(3))
    held = queue.reserve_many(3, timeout=0)
    queue.commit(held[1])
    # Two settlements within one millisecond cannot be told apart.
    time.sleep(0.002)
    with expect_error(LeaseLost, lost=(held[1],), unknown=()):
        queue.commit(*held)
    assert queue.counts().history == 3


@pytest.mark.needs("history")
@pytest.mark.parametrize("payload", [None, {"result": [1, 2]}, "done"], ids=repr)
def test_commit_with_a_payload_for_the_history(client: AnyClient, name: str, payload: Any) -> None:
    queue = client.queue(name, history=timedelta(hours=1))
    held = hold(queue, "work", key="k", headers={"a": 1})
    queue.commit(held, payload=payload)
    message = queue.get(held.id)
    assert isinstance(message, Finished)
    assert (message.payload, message.key, message.headers) == (payload, "k", {"a": 1})
    assert (message.outcome, message.state, message.tries) == ("committed", "finished", 1)
    assert near(message.processed, 0)
    assert message.when == held.when


# ---- rollback


def test_rollback_waits_for_the_backoff_of_the_try(world: World, name: str) -> None:
    queue = world.client.queue(name, backoff=Backoff(base=100, factor=3, maximum=500, jitter=0))
    held = hold(queue)
    for expected in (100, 300, 500, 500):
        queue.rollback(held)
        message = queue.get(held.id)
        assert message.state == "scheduled"
        assert near(message.when, expected)
        assert queue.reserve(0) is None
        world.ready(held.id)
        again = queue.reserve(0)
        assert again.tries == held.tries + 1
        held = again


@pytest.mark.parametrize("delay", [0, timedelta(0)], ids=repr)
def test_rollback_without_delay(queue: AnyQueue, delay: Any) -> None:
    held = hold(queue)
    queue.rollback(held, delay=delay)
    again = queue.reserve(0)
    assert (again.id, again.tries, again.error) == (held.id, 2, None)
    assert again.token != held.token


@pytest.mark.parametrize(("delay", "seconds"), [(timedelta(minutes=5), 300), (None, 1)])
def test_rollback_with_a_delay(queue: AnyQueue, delay: timedelta | None, seconds: float) -> None:
    """The default is the backoff of the queue."""
    held = hold(queue)
    queue.rollback(held, delay=delay)
    message = queue.get(held.id)
    assert near(message.when, seconds)
    assert near(queue.next_when(), seconds)
    assert message.state == "scheduled"


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        ("no such carrier", "error", "no such carrier"),
        (KeyError("UA"), "KeyError", "'UA'"),
        ("ü" * 5000, "error", "ü" * 1024),
        ("x" + "ü" * 5000, "error", "x" + "ü" * 1023),
        (ValueError("a \ud800"), "ValueError", "a ?"),
    ],
    ids=["str", "exception", "long", "cut within a letter", "not Unicode"],
)
def test_rollback_with_an_error(queue: AnyQueue, error: Any, kind: str, text: str) -> None:
    held = hold(queue)
    queue.rollback(held, delay=0, error=error)
    again = queue.reserve(0)
    assert (again.error["type"], again.error["message"]) == (kind, text)
    assert near(again.error["at"], 0)


def test_error_stays_until_the_next_error(queue: AnyQueue) -> None:
    held = hold(queue)
    queue.rollback(held, delay=0, error="first")
    held = queue.reserve(0)
    queue.rollback(held, delay=0)
    message = queue.get(held.id)
    assert message.error["message"] == "first"


# ---- rollback that does not count the try


def test_uncounted_rollback_takes_the_try_back(world: World, name: str) -> None:
    """It is never the last one."""
    queue = world.client.queue(name, max_tries=1)
    held = hold(queue)
    queue.rollback(held, delay=60, error="busy", counted=False)
    message = queue.get(held.id)
    assert (message.state, message.tries, message.deliveries) == ("scheduled", 0, 1)
    assert (message.error.message, message.attempts) == ("busy", ())
    assert near(message.when, 60)
    world.ready(held.id)
    again = queue.reserve(0)
    assert (again.id, again.tries, again.deliveries) == (held.id, 1, 2)
    queue.rollback(again, error="broken")
    assert queue.get(held.id) is None, "a counted try is the last one"


def test_uncounted_rollback_waits_for_the_backoff_of_the_try(world: World, name: str) -> None:
    queue = world.client.queue(name, backoff=Backoff(base=100, factor=3, jitter=0))
    held = hold(queue)
    for _ in range(2):
        queue.rollback(held, counted=False)
        assert near(queue.get(held.id).when, 100)
        world.ready(held.id)
        held = queue.reserve(0)


@pytest.mark.needs("documents")
def test_batch_of_an_uncounted_rollback_reports_lost_leases(world: World, queue: AnyQueue) -> None:
    queue.push_many(range(4))
    held = queue.reserve_many(4, timeout=0)
    world.lapse(held[1], known=False)
    again = queue.reserve(0)
    with expect_error(LeaseLost, lost=(held[1],), unknown=()):
        queue.rollback(*held, delay=0, counted=False)
    assert sorted(each.tries for each in queue.peek()) == [0, 0, 0]
    assert queue.get(again.id).tries == 2


@pytest.mark.parametrize("counted", [None, 1, "no"], ids=repr)
def test_counted_must_be_true_or_false(world: World, queue: AnyQueue, counted: Any) -> None:
    held = hold(queue)
    before = world.bytes(held.id)
    refuses("counted: expected True or False", lambda: queue.rollback(held, counted=counted))
    assert world.bytes(held.id) == before


#: Where a dead message came from, why and after how many tries.
ORIGIN = ("from", "reason", "tries")


@pytest.mark.needs("dead_letter")
class TestLastTry:
    def test_last_rollback_buries_at_once(self, client: AnyClient, name: str) -> None:
        queue, dead = client.queue(name, max_tries=2), client.queue(f"{name}.dead")
        held = hold(queue, "x", key="k", headers={"a": 1})
        queue.rollback(held, delay=0, error="first")
        assert dead.counts().total == 0
        held = queue.reserve(0)
        queue.rollback(held, delay=0, error=ValueError("second"))
        assert queue.get(held.id) is None
        assert queue.counts().total == 0
        buried = dead.get(held.id)
        assert (buried.payload, buried.key, buried.headers) == ("x", "k", {"a": 1})
        assert (buried.state, buried.tries) == ("ready", 0)
        assert [buried.dead[field] for field in ORIGIN] == [name, "tries", 2]
        error = buried.dead["error"]
        assert (error["type"], error["message"]) == ("ValueError", "second")
        assert near(buried.dead["at"], 0)
        assert [each["q"] for each in buried.trail] == [name]
        assert queue.push("y", key="k", on_duplicate="error") is not None

    def test_last_rollback_uses_the_chosen_dead_queue(
        self, client: AnyClient, name: str, other: AnyQueue
    ) -> None:
        queue = client.queue(name, max_tries=1, dead_letter=other.name)
        held = hold(queue)
        queue.rollback(held)
        assert other.get(held.id) is not None
        assert client.queue(f"{name}.dead").counts().total == 0

    def test_max_tries_none_never_buries(self, world: World, name: str) -> None:
        queue = world.client.queue(name, max_tries=None)
        held = hold(queue)
        world.raw().update_one({"_id": held.id}, {"$set": {"tries": 1000}})
        held.tries = 1000
        queue.rollback(held, delay=0)
        assert queue.reserve(0).tries == 1001

    def test_rollback_of_first_and_last_tries_in_a_batch(
        self, client: AnyClient, name: str
    ) -> None:
        queue, dead = client.queue(name, max_tries=2), client.queue(f"{name}.dead")
        queue.push_many(["a", "b"])
        queue.rollback(*queue.reserve_many(2, timeout=0), delay=0)
        queue.push_many(["c", "d"])
        held = queue.reserve_many(4, timeout=0)
        queue.rollback(*held, delay=60, error="no")
        assert sorted(each.payload for each in dead.peek()) == ["a", "b"]
        assert queue.counts().scheduled == 2
        assert dead.counts().ready == 2

    def test_claim_buries_a_message_in_a_crash_loop(self, client: AnyClient, name: str) -> None:
        """A message that kills its consumers is never rolled back; the next claim buries it."""
        queue, dead = client.queue(name, max_tries=3), client.queue(f"{name}.dead")
        id = queue.push("killer", key="k")
        for tries in (1, 2, 3):
            held = queue.reserve(10, lease=0.002)
            assert held.tries == tries
        eventually(lambda: queue.counts().ready == 1, "the lease has run out")
        assert queue.reserve(0) is None
        assert queue.counts().total == 0
        buried = dead.get(id)
        assert [buried.dead[field] for field in ORIGIN] == [name, "tries", 3]
        assert buried.key == "k"
        with pytest.raises(LeaseLost):
            queue.commit(held)

    @pytest.mark.parametrize("limit", [1, 3, 200])
    @pytest.mark.needs("documents")
    def test_claim_scans_on_after_burying_every_message(
        self, world: World, name: str, limit: int
    ) -> None:
        queue = world.client.queue(name, max_tries=1)
        queue.push_many(range(5))
        worn = queue.reserve_many(5, timeout=0)
        queue.push("good")
        world.lapse(*worn)
        assert [each.payload for each in queue.reserve_many(limit, timeout=0)] == ["good"]
        if limit > 1:
            assert world.client.queue(f"{name}.dead").counts().ready == 5

    @pytest.mark.needs("pop")
    def test_pop_ignores_max_tries(self, world: World, name: str) -> None:
        queue = world.client.queue(name, max_tries=1)
        held = hold(queue)
        world.lapse(held)
        assert queue.pop(0) is not None

    def test_dead_message_is_never_buried_again(self, world: World, name: str) -> None:
        queue = world.client.queue(name, max_tries=1)
        dead = world.client.queue(f"{name}.dead", max_tries=1)
        queue.rollback(hold(queue), error="first")
        held = dead.reserve(0)
        dead.rollback(held, delay=0)
        # The consumers of the dead-letter queue crash too.
        for _ in range(3):
            held = dead.reserve(0)
            world.lapse(held)
        held = dead.reserve(0)
        dead.rollback(held, delay=0)
        assert dead.counts().ready == 1
        assert world.client.queue(f"{name}.dead.dead").counts().total == 0


# ---- extend, release


def test_extend(queue: AnyQueue) -> None:
    held = hold(queue)
    queue.extend(held, lease=600)
    assert near(held.until, 600)
    assert near(queue.next_when(), 600)
    assert held.until <= queue.next_when()  # the holder's end is not later than the stored one
    queue.extend(held)
    assert near(held.until, 600)  # as long as the last lease
    queue.extend(held, lease=timedelta(seconds=5))
    assert near(held.until, 5)
    assert held.until <= queue.next_when()
    queue.commit(held)


def test_extend_of_many(queue: AnyQueue) -> None:
    queue.push_many(range(3))
    held = queue.reserve_many(2, timeout=0, lease=100)
    held += queue.reserve_many(1, timeout=0, lease=200)
    queue.extend(*held)
    assert [near(each.until, 200 if each is held[2] else 100) for each in held] == [True] * 3
    queue.extend(*held, lease=300)
    assert all(near(each.until, 300) for each in held)
    assert near(queue.next_when(), 300)


def test_extend_keeps_an_expired_unclaimed_lease(world: World, queue: AnyQueue) -> None:
    held = hold(queue)
    world.lapse(held)
    queue.extend(held)
    assert near(held.until, 60)
    assert queue.reserve(0) is None


@pytest.mark.needs("documents")
def test_extend_reports_lost_reservations(world: World, queue: AnyQueue) -> None:
    queue.push_many(range(3))
    held = queue.reserve_many(3, timeout=0)
    world.lapse(held[0], known=False)
    assert queue.reserve(0) is not None
    before, until = world.bytes(held[0].id), held[0].until
    with expect_error(LeaseLost, lost=(held[0],)):
        queue.extend(*held, lease=600)
    assert world.bytes(held[0].id) == before
    assert held[0].until == until
    assert near(held[1].until, 600)
    assert near(held[2].until, 600)


def test_release(world: World, queue: AnyQueue) -> None:
    id = queue.push(1, key="k")
    before = world.document(id)
    held = queue.reserve(0)
    queue.release(held)
    assert world.document(id).keys() - {"deliveries"} == before.keys()
    assert queue.peek()[0].when == held.when
    again = queue.reserve(0)
    assert (again.tries, again.when) == (1, held.when)


@pytest.mark.needs("documents")
def test_release_of_a_message_without_due(world: World, queue: AnyQueue) -> None:
    """Another program wrote it. Its ``when`` is the end of the lease and not its place."""
    id = queue.push(1)
    world.raw().update_one({"_id": id}, {"$unset": {"due": ""}})
    held = queue.reserve(0)
    assert near(held.when, 0)
    queue.release(held)
    assert queue.reserve(0) is not None


def test_release_of_many(queue: AnyQueue) -> None:
    queue.push_many(range(5))
    held = queue.reserve_many(5, timeout=0)
    queue.release(*held)
    again = queue.reserve_many(5, timeout=0)
    assert {each.tries for each in again} == {1}
    with pytest.raises(LeaseLost):
        queue.commit(held[0])


# ---- progress, checkpoint


def test_progress(queue: AnyQueue) -> None:
    held = hold(queue)
    queue.progress(held, 0.25)
    queue.progress(held, 0.5, "half way")
    message = queue.get(held.id)
    assert (message.progress["fraction"], message.progress["note"]) == (0.5, "half way")
    assert near(message.progress["at"], 0)
    queue.progress(held, 1, "x" * 2048)
    queue.commit(held)


@pytest.mark.parametrize("state", [{"page": 3}, 0, "", [], None], ids=repr)
def test_next_try_gets_the_checkpoint(queue: AnyQueue, state: Any) -> None:
    held = hold(queue)
    queue.checkpoint(held, "early")
    queue.checkpoint(held, state)
    queue.rollback(held, delay=0)
    assert queue.reserve(0).checkpoint == state


def test_next_try_gets_the_checkpoint_after_a_crash(world: World, queue: AnyQueue) -> None:
    held = hold(queue)
    queue.checkpoint(held, {"page": 3})
    world.lapse(held)
    assert queue.reserve(0).checkpoint == {"page": 3}


# ---- reserved


class Oops(Exception):
    pass


def test_reserved_commits(queue: AnyQueue) -> None:
    id = queue.push("x")
    with queue.reserved(0) as held:
        assert (held.id, held.payload) == (id, "x")
        assert queue.counts().reserved == 1
    assert queue.get(id) is None


@pytest.mark.needs("history")
def test_reserved_commits_into_the_history(client: AnyClient, name: str) -> None:
    queue = client.queue(name, history=60)
    queue.push("x")
    with queue.reserved(0):
        pass
    assert queue.history()[0].outcome == "committed"


def test_reserved_rolls_back_and_raises_the_exception(queue: AnyQueue) -> None:
    id = queue.push("x")
    with pytest.raises(Oops, match="what happened"), queue.reserved(0):
        raise Oops("what happened")
    message = queue.get(id)
    assert (message.error["type"], message.error["message"]) == ("Oops", "what happened")
    assert (message.state, message.tries) == ("scheduled", 1)  # the backoff of the queue


def test_reserved_begins_although_the_clock_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """No command comes between the claim and the block. It might fail, and strand the message."""

    async def main() -> None:
        async with AsyncClient("memory:") as client:
            queue = client.queue("jobs")
            await queue.push("x")
            driver, reserve = runner_of(client).open(), queue.reserve

            async def claim(*args: Any, **options: Any) -> Reservation[Any] | None:
                held = await reserve(*args, **options)
                driver.clock.expire()
                return held

            async def prepare(limit_s: float = 0) -> None:
                raise Unavailable("no primary")

            monkeypatch.setattr(queue, "reserve", claim)
            monkeypatch.setattr(driver, "prepare", prepare)
            async with queue.reserved(0, lease=60) as held:
                monkeypatch.undo()
                assert held is not None
            assert (await queue.counts()).total == 0

    asyncio.run(main())


@by_client
def test_reserved_returns_none_after_the_timeout(queue: AnyQueue) -> None:
    with queue.reserved(0) as held:
        assert held is None
    with queue.reserved(timeout=0.01) as held:
        assert held is None


@by_client
@pytest.mark.parametrize("raises", [False, True], ids=["ends", "raises"])
@pytest.mark.parametrize("way", ["commit", "rollback", "release", "move", "bury"])
def test_reserved_leaves_a_message_settled_inside(
    world: World, queue: AnyQueue, other: AnyQueue, way: str, raises: bool
) -> None:
    id = queue.push("x")
    options = {"rollback": {"delay": 0}, "move": {"to": other}}.get(way, {})
    before = b""
    try:
        with queue.reserved(0) as held:
            getattr(queue, way)(held, **options)
            if way != "commit":
                before = world.bytes(id)
            if raises:
                raise Oops
    except Oops:
        assert raises
    if way == "commit":
        assert queue.get(id) is None
    else:
        assert world.bytes(id) == before


@by_client
def test_reserved_renews_a_short_lease(world: World, queue: AnyQueue) -> None:
    queue.push("slow")
    with queue.reserved(0, lease=1.5) as held:
        end = held.until
        eventually(
            lambda: queue.next_when() > end + timedelta(seconds=1), "the first lease has passed"
        )
        assert world.connect().queue(queue.name).reserve(0) is None
        assert held.until > end
    assert queue.counts().total == 0


#: The errors of a block whose lease was lost. Its own exception comes first.
LOSSES: tuple[Any, ...] = (LeaseLost, Oops)


@by_client
def test_reserved_raises_a_lost_lease(world: World, queue: AnyQueue) -> None:
    for error in LOSSES:
        queue.push("x")
        taken = []
        with pytest.raises(error) as caught, queue.reserved(0) as held:  # noqa: PT012  # its exit raises
            world.lapse(held, known=False)
            taken = queue.reserve_many(1, timeout=0)
            if error is Oops:
                raise Oops
        assert error is Oops or caught.value.lost == (held,)
        queue.commit(*taken)
        assert queue.counts().total == 0


@by_client
def test_reserved_tells_at_once_that_a_lease_was_lost(world: World, queue: AnyQueue) -> None:
    """The renewer finds it while the block runs. The exit raises it, or the block's exception."""
    lost: list[Reservation[Any]] = []
    for error in LOSSES:
        lost.clear()
        id = queue.push("x")
        with (  # noqa: PT012  # the exit of the block raises
            pytest.raises(error, match="while the block ran") as caught,
            queue.reserved(0, lease=0.9, on_lost=lost.append) as held,
        ):
            fields = {"token": "another's", "when": datetime.now(UTC) + timedelta(minutes=5)}
            world.raw().update_one({"_id": id}, {"$set": fields})  # as a claim after a lapse does
            eventually(lambda: lost, "on_lost is called")
            if error is Oops:
                raise Oops("while the block ran")
        assert lost == [held]
        assert error is Oops or caught.value.lost == (held,)
        assert world.document(id)["token"] == "another's"


@by_client
def test_reserved_refuses_what_cannot_be_called(queue: AnyQueue) -> None:
    async def never_awaited(held: Any) -> None:
        pass

    queue.push("x")
    for wrong in ("a name", never_awaited):
        with pytest.raises(ConfigurationError, match="on_lost"), queue.reserved(0, on_lost=wrong):
            pass
    assert queue.counts().ready == 1


@by_client
def test_reserved_logs_a_failed_rollback(
    queue: AnyQueue, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    queue.push("x")

    def fail(*given: Any, **options: Any) -> Plan[None]:
        yield from ()
        raise Unavailable("the server went away")

    monkeypatch.setattr(QueuePlans, "rollback", fail)
    with pytest.raises(Oops), queue.reserved(0):
        raise Oops
    assert "was not rolled back; it comes back when its lease ends: the server" in caplog.text


@by_client
def test_renewals_of_a_queue_share_commands(client: AnyClient, queue: AnyQueue) -> None:
    queue.push_many(range(30))
    with ExitStack() as blocks:
        held = [blocks.enter_context(queue.reserved(0, lease=1.8)) for _ in range(30)]
        sent = client.stats["commands"]
        ends = [each.until for each in held]
        eventually(
            lambda: all(each.until > end for each, end in zip(held, ends, strict=True)),
            "each is renewed",
        )
        assert client.stats["commands"] - sent < 30
