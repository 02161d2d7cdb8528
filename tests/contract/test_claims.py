"""Claims of many messages at once: ``Queue.claim``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest

from pyqueue import (
    Backoff,
    ConfigurationError,
    Fenced,
    Finished,
    LeaseLost,
    QueueError,
    Unavailable,
)
from pyqueue.backends.named_claims import NamedClaims
from pyqueue.requests import Plan
from tests.contract.world import AnyClient, AnyQueue, World, near, wait_until


class Oops(Exception):
    """What a block raises."""


def failing(queue: AnyQueue, work: Callable[[Any], object] = len) -> None:
    """A block that raises."""
    with queue.claim("g", limit=5) as claim:
        work(claim)
        raise Oops("that went wrong")


@pytest.fixture
def again(client: AnyClient, name: str) -> AnyQueue:
    """A queue whose messages come back at once when they are rolled back."""
    return client.queue(name, backoff=Backoff(base=0))


@pytest.fixture
def left(client: AnyClient) -> Iterator[Callable[..., Any]]:
    """Begins claims that are left as a process leaves them that dies: neither settled nor, from now
    on, renewed.
    """

    def end(context: AbstractContextManager[Any]) -> None:
        with suppress(QueueError):
            context.__exit__(None, None, None)

    with ExitStack() as stack:

        def begin(queue: AnyQueue, group: str = "g", **options: Any) -> Any:
            context: AbstractContextManager[Any] = queue.claim(group, **({"limit": 100} | options))
            claim = context.__enter__()
            stack.callback(end, context)
            return claim

        yield begin


# ---- what a claim is


def test_a_claim_holds_what_is_ready(world: World, queue: AnyQueue) -> None:
    ids = queue.push_many(range(5))
    queue.push(5, delay=600)
    with queue.claim("g", limit=100, lease=90) as claim:
        assert sorted(claim.ids) == sorted(ids)
        assert len(claim) == 5
        assert (claim.group, claim.lease) == ("g", 90)
        assert queue.counts().reserved == 5
        assert queue.reserve(0) is None
        messages = [queue.get(id) for id in ids]
        assert all(each.state == "reserved" and each.tries == 1 for each in messages)
        assert all(near(world.document(id)["when"], 90) for id in ids)
        claim.commit()
    assert queue.counts().total == queue.counts().scheduled == 1


def test_a_claim_takes_what_is_first(world: World, queue: AnyQueue) -> None:
    ids = [queue.push(number) for number in range(6)]
    with queue.claim("g", limit=4) as claim:
        assert sorted(claim.ids) == sorted(ids[:4] if "fifo" in world.place.offers else ids[2:])
        assert queue.counts().ready == 2
        claim.commit()
    assert queue.counts().total == 2


def test_more_than_one_claim_of_a_receiver_takes(world: World, queue: AnyQueue) -> None:
    ids = queue.push_many(range(world.many))
    with queue.claim("g", limit=100_000) as claim:
        assert sorted(claim.ids) == sorted(ids)
        claim.commit()
    assert queue.counts().total == 0


def test_the_lease_is_the_queues(client: AnyClient, name: str) -> None:
    queue = client.queue(name, lease=timedelta(seconds=77))
    with queue.claim("g", limit=1) as claim:
        assert claim.lease == 77


def test_an_empty_queue(queue: AnyQueue) -> None:
    with queue.claim("g", limit=5) as claim:
        assert (claim.ids, len(claim)) == ([], 0)
        claim.commit()
    with queue.claim("g", limit=5) as claim:
        assert claim.ids == []  # and none was committed
    queue.push(1)
    with queue.claim("g", limit=5) as claim:
        assert len(claim) == 1
        claim.commit()
    assert queue.counts().total == 0


def test_a_paused_queue(queue: AnyQueue) -> None:
    queue.push(1)
    queue.pause()
    with queue.claim("g", limit=5) as claim:
        assert claim.ids == []
    assert queue.counts().ready == 1
    queue.resume()
    with queue.claim("g", limit=5) as claim:
        assert len(claim) == 1
        claim.commit()


def test_what_it_keeps_of_itself_is_no_message(
    client: AnyClient, queue: AnyQueue, world: World
) -> None:
    queue.push_many([1, 2])
    with queue.claim("g", limit=1) as claim:
        claim.commit()
    before = world.document(f"~claim:{queue.name}~g")
    assert queue.purge() == 1
    assert queue.counts().total == 0
    assert queue.peek() == []
    assert queue.pop(0) is None
    assert queue.get(before["_id"].replace("~", "")) is None
    assert [each.name for each in client.queues() if queue.name in each.name] == [queue.name]
    assert world.document(before["_id"]) == before


def test_how_it_looks(queue: AnyQueue) -> None:
    queue.push_many(["secret", "secret"])
    with queue.claim("g", limit=5) as claim:
        assert repr(claim).endswith(f"Claim({queue.name!r}, group='g', 2 messages)")
        claim.commit()


def test_groups_share_nothing(queue: AnyQueue) -> None:
    queue.push_many(range(10))
    with queue.claim("a", limit=4) as first, queue.claim("b", limit=100) as second:
        assert len(first) == 4
        assert len(second) == 6
        assert not {*first.ids} & {*second.ids}
        first.commit()
        assert queue.counts().reserved == 6
        second.commit()
    assert queue.counts().total == 0


def test_groups_of_one_name_share_nothing(queue: AnyQueue, other: AnyQueue) -> None:
    queue.push_many(range(3))
    other.push_many(range(5))
    with queue.claim("g", limit=100) as first, other.claim("g", limit=100) as second:
        assert (len(first), len(second)) == (3, 5)
        second.commit()
        assert queue.counts().reserved == 3
        first.commit()


BAD: list[tuple[str, Any]] = [
    *(("group", value) for value in ("", "a~b", "a" * 111, 5, None)),
    *(("limit", value) for value in (0, -1, 100_001, 1.0, True, None)),
    *(("lease", value) for value in (0, -1, float("nan"), "60")),
]


def test_bad_arguments(world: World, queue: AnyQueue) -> None:
    queue.push(1)
    before = world.stored(queue)
    for name, value in BAD:
        options = {"group": "g", "limit": 5} | {name: value}
        with pytest.raises(ConfigurationError, match=f"^{name}: "), queue.claim(**options):
            pytest.fail("it began")
    assert world.stored(queue) == before
    assert world.raw().count_documents({"_id": {"$regex": f"^~claim:{queue.name}"}}) == 0


# ---- settling


def test_a_rollback(world: World, client: AnyClient, name: str) -> None:
    queue = client.queue(name, backoff=Backoff(base=100, jitter=0))
    ids = queue.push_many([1, 2])
    with queue.claim("g", limit=5) as claim:
        claim.rollback("a reason")
    assert queue.counts().scheduled == 2
    for id in ids:
        message = queue.get(id)
        assert message.tries == 1
        assert message.error["message"] == "a reason"
        assert near(message.when, 100)
        assert not {"claim", "token", "owner", "reserved"} & {*world.document(id)}


def test_leaving_without_a_commit_rolls_back(again: AnyQueue) -> None:
    (id,) = again.push_many([1])
    with again.claim("g", limit=5):
        pass
    message = again.get(id)
    assert (message.state, message.tries, message.error) == ("ready", 1, None)


def test_an_exception_rolls_back_and_goes_on(again: AnyQueue) -> None:
    ids = again.push_many([1, 2])
    with pytest.raises(Oops):
        failing(again)
    for id in ids:
        message = again.get(id)
        assert (message.state, message.tries) == ("ready", 1)
        assert message.error["type"] == "Oops"
        assert message.error["message"] == "that went wrong"


def test_an_exception_after_the_commit(queue: AnyQueue) -> None:
    queue.push_many([1, 2])
    with pytest.raises(Oops):
        failing(queue, lambda claim: claim.commit())
    assert queue.counts().total == 0


@pytest.mark.parametrize("first", ["commit", "rollback"])
@pytest.mark.parametrize("second", ["commit", "rollback"])
def test_it_is_settled_once(again: AnyQueue, first: str, second: str) -> None:
    again.push_many([1, 2])
    with again.claim("g", limit=5) as claim:
        getattr(claim, first)()
        with pytest.raises(ConfigurationError, match="already"):
            getattr(claim, second)()
    assert again.counts().ready == (0 if first == "commit" else 2)


@pytest.mark.needs("history")
def test_the_history(world: World, client: AnyClient, name: str) -> None:
    queue = client.queue(name, history=300)
    ids = [queue.push(1, key="k"), queue.push(2)]
    with queue.claim("g", limit=5) as claim:
        claim.commit()
    assert queue.counts().total == 0
    assert queue.counts().history == 2
    for id, key in zip(ids, ("k", None), strict=True):
        finished = queue.get(id)
        assert isinstance(finished, Finished)
        assert (finished.outcome, finished.key) == ("committed", key)
        assert near(finished.processed, 0)
        assert near(world.document(id)["expires"], 300)
        assert "claim" not in world.document(id)
    assert queue.push(3, key="k") is not None
    assert queue.replay(*ids) == 2
    with queue.claim("g", limit=5) as claim:
        assert len(claim) == 3


@pytest.mark.needs("keys")
def test_a_commit_frees_the_keys(queue: AnyQueue) -> None:
    queue.push(1, key="k")
    with queue.claim("g", limit=5) as claim:
        assert queue.push(2, key="k") is None
        claim.commit()
        assert queue.push(3, key="k") is not None
    assert queue.counts().ready == 1


@pytest.mark.needs("keys")
def test_a_message_that_is_replaced_meanwhile_is_no_longer_held(queue: AnyQueue) -> None:
    queue.push(1)
    queue.push(2, key="k")
    with queue.claim("g", limit=5) as claim:
        queue.push(3, key="k", on_duplicate="replace")
        with pytest.raises(LeaseLost, match="1 of 2"):
            claim.commit()
    (message,) = queue.peek()
    assert (message.payload, message.tries) == (3, 0)


# ---- others


def test_a_commit_leaves_what_a_thief_holds(world: World, queue: AnyQueue) -> None:
    ids = queue.push_many(range(4))
    with queue.claim("g", limit=5) as claim:
        world.ready(ids[2])
        thief = queue.reserve(0)
        assert thief is not None
        before = world.bytes(ids[2])
        with pytest.raises(LeaseLost, match="1 of 4"):
            claim.commit()
    assert world.bytes(ids[2]) == before
    assert queue.counts().total == 1
    queue.commit(thief)


@pytest.mark.needs("history")
def test_a_commit_into_the_history_leaves_what_a_thief_holds(
    world: World, client: AnyClient, name: str
) -> None:
    queue = client.queue(name, history=300)
    ids = queue.push_many(range(4))
    with queue.claim("g", limit=5) as claim:
        world.ready(ids[2])
        thief = queue.reserve(0)
        before = world.bytes(ids[2])
        with pytest.raises(LeaseLost, match="1 of 4"):
            claim.commit()
    assert world.bytes(ids[2]) == before
    assert queue.counts().history == 3
    queue.commit(thief)


def test_a_rollback_leaves_what_a_thief_holds(world: World, again: AnyQueue) -> None:
    ids = again.push_many(range(4))
    with again.claim("g", limit=5) as claim:
        world.ready(ids[2])
        thief = again.reserve(0)
        before = world.bytes(ids[2])
        claim.rollback()
    assert world.bytes(ids[2]) == before
    assert again.counts().ready == 3
    again.commit(thief)


@pytest.mark.needs("move", "dead_letter")
@pytest.mark.parametrize("way", ["rollback", "release", "move", "bury", "commit"])
def test_what_a_thief_gave_back_is_no_longer_the_claims(
    world: World, again: AnyQueue, other: AnyQueue, left: Callable[..., Any], way: str
) -> None:
    """Not of the claim that it was taken from, nor of one that takes that over."""
    (id,) = again.push_many([1])
    claim = left(again)
    world.ready(id)
    thief = again.reserve(0)
    settle: dict[str, Callable[[], None]] = {
        "rollback": partial(again.rollback, thief),
        "release": partial(again.release, thief),
        "move": partial(again.move, thief, to=other),
        "bury": partial(again.bury, thief),
        "commit": partial(again.commit, thief),
    }
    settle[way]()
    before = [world.stored(each) for each in (again, other, f"{again.name}.dead")]
    with pytest.raises(LeaseLost, match="1 of 1"):
        claim.commit()
    assert [world.stored(each) for each in (again, other, f"{again.name}.dead")] == before


def test_lapsed_lease_commits_if_not_reclaimed(world: World, queue: AnyQueue) -> None:
    ids = queue.push_many([1, 2])
    with queue.claim("g", limit=5) as claim:
        for id in ids:
            world.ready(id)
        claim.commit()
    assert queue.counts().total == 0


def test_a_claim_is_renewed(world: World, queue: AnyQueue) -> None:
    ids = queue.push_many([1, 2])
    with queue.claim("g", limit=5, lease=0.6) as claim:
        first = [world.document(id)["when"] for id in ids]
        wait_until(
            lambda: all(
                world.document(id)["when"] > when + timedelta(seconds=1)
                for id, when in zip(ids, first, strict=True)
            ),
            "it is renewed more than once",
        )
        assert queue.reserve(0) is None
        claim.commit()
    assert queue.counts().total == 0


def test_failed_renewal_is_logged_by_group_and_tried_again(
    world: World, queue: AnyQueue, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    renew, failures = NamedClaims.renew, ["the server went away"]

    def failing_first(claims: NamedClaims, token: str, lease: float) -> Plan[None]:
        if failures:
            raise Unavailable(failures.pop())
        yield from renew(claims, token, lease)

    monkeypatch.setattr(NamedClaims, "renew", failing_first)
    (id,) = queue.push_many([1])
    with queue.claim("g", limit=5, lease=0.6) as claim:
        first = world.document(id)["when"]
        wait_until(lambda: world.document(id)["when"] > first, "it is tried again")
        claim.commit()
    assert (
        "could not renew the lease of group 'g', trying again: the server went away" in caplog.text
    )
    assert queue.counts().total == 0


def test_a_claim_that_is_settled_is_renewed_no_longer(
    world: World, client: AnyClient, name: str
) -> None:
    queue = client.queue(name, backoff=Backoff(base=50, jitter=0))
    (id,) = queue.push_many([1])
    with queue.claim("g", limit=5, lease=0.3) as claim:
        claim.rollback()
        when = world.document(id)["when"]
        with queue.claim("h", limit=5, lease=0.3):
            seen = client.stats["commands"]
            wait_until(lambda: client.stats["commands"] >= seen + 3, "the other is renewed")
        assert world.document(id)["when"] == when


# ---- taken over


def test_what_a_process_left_behind_is_taken_over_at_once(
    world: World, queue: AnyQueue, left: Callable[..., Any]
) -> None:
    queue.push_many(range(3))
    former = left(queue, lease=600)
    queue.push_many(range(7))
    with queue.claim("g", limit=2, lease=50) as claim:
        assert sorted(claim.ids) == sorted(former.ids)  # all of it, and nothing else
        assert all(world.document(id)["tries"] == 2 for id in claim.ids)
        assert all(near(world.document(id)["when"], 50) for id in claim.ids)
        claim.commit()
    assert queue.counts().ready == queue.counts().total == 7
    with queue.claim("g", limit=100) as claim:
        assert len(claim) == 7
        claim.commit()


def test_by_another_client(world: World, queue: AnyQueue, left: Callable[..., Any]) -> None:
    queue.push_many(range(3))
    former = left(queue)
    with world.connect().queue(queue.name).claim("g", limit=5) as claim:
        assert sorted(claim.ids) == sorted(former.ids)
        claim.commit()
    with pytest.raises(Fenced, match="group 'g'"):
        former.commit()


@pytest.mark.parametrize("way", ["commit", "rollback"])
def test_the_former_runner_is_fenced(
    world: World, queue: AnyQueue, left: Callable[..., Any], way: str
) -> None:
    queue.push_many(range(3))
    former = left(queue)
    with queue.claim("g", limit=5) as claim:
        before = world.stored(queue), world.document(f"~claim:{queue.name}~g")
        with pytest.raises(Fenced, match="group 'g'"):
            getattr(former, way)()
        assert (world.stored(queue), world.document(f"~claim:{queue.name}~g")) == before
        claim.commit()
    assert queue.counts().total == 0


def test_a_block_that_was_fenced_says_so(queue: AnyQueue) -> None:
    queue.push_many(range(3))
    with pytest.raises(Fenced), queue.claim("g", limit=5), queue.claim("g", limit=5) as second:
        second.commit()
    assert queue.counts().total == 0


def test_an_exception_is_heard_of_rather_than_the_fence(queue: AnyQueue) -> None:
    queue.push_many(range(3))

    def taken_over(_: Any) -> None:
        with queue.claim("g", limit=5) as second:
            second.commit()

    with pytest.raises(Oops):
        failing(queue, taken_over)
    assert queue.counts().total == 0


def test_a_fenced_claim_renews_nothing(
    world: World, queue: AnyQueue, left: Callable[..., Any]
) -> None:
    """The new runner's lease is its own."""
    queue.push_many([1, 2])
    left(queue, lease=0.3, limit=1)
    with (
        queue.claim("g", limit=5, lease=600) as claim,
        queue.claim("h", limit=5, lease=0.3) as other,
    ):
        when, first = (world.document(each.ids[0])["when"] for each in (claim, other))
        wait_until(
            lambda: world.document(other.ids[0])["when"] > first + timedelta(seconds=0.6),
            "leases of 0.3 s are renewed",
        )
        assert world.document(claim.ids[0])["when"] == when
        claim.commit()


def test_a_claim_that_was_taken_from_a_dead_process_by_others(
    world: World, again: AnyQueue, left: Callable[..., Any]
) -> None:
    """Its lease lapsed before a takeover, so the messages belong to their new holders."""
    ids = again.push_many(range(3))
    left(again)
    for id in ids:
        world.ready(id)
    thief = again.reserve(0)
    assert thief is not None
    before = world.bytes(thief.id)
    with again.claim("g", limit=5) as claim:
        assert sorted(claim.ids) == sorted({*ids} - {thief.id})
        claim.commit()
    assert world.bytes(thief.id) == before
    again.commit(thief)


# ---- burying


@pytest.mark.needs("dead_letter")
def test_the_last_try_rolled_back_is_buried(client: AnyClient, name: str) -> None:
    queue = client.queue(name, max_tries=2, backoff=Backoff(base=0))
    queue.push_many(["a", "b"])
    for _ in range(2):
        with pytest.raises(Oops):
            failing(queue)
    assert queue.counts().total == 0
    graves = client.queue(f"{name}.dead").peek()
    assert sorted(each.payload for each in graves) == ["a", "b"]
    for each in graves:
        assert each.dead["from"] == name
        assert each.dead["reason"] == "tries"
        assert each.dead["tries"] == 2
        assert each.error["message"] == "that went wrong"


@pytest.mark.needs("dead_letter")
def test_claim_buries_exhausted_messages_and_gives_the_rest(
    world: World, client: AnyClient, name: str
) -> None:
    queue = client.queue(name, max_tries=3)
    ids = queue.push_many(["a", "b", "c"])
    world.raw().update_one({"_id": ids[1]}, {"$set": {"tries": 3}})
    with queue.claim("g", limit=5) as claim:
        assert sorted(claim.ids) == sorted([ids[0], ids[2]])
        claim.commit()
    (grave,) = client.queue(f"{name}.dead").peek()
    assert (grave.id, grave.payload, grave.tries) == (ids[1], "b", 0)
    assert (grave.dead["reason"], grave.dead["tries"]) == ("tries", 3)
    assert "claim" not in world.document(grave.id)


@pytest.mark.needs("dead_letter")
def test_a_claim_looks_again_if_all_it_saw_was_buried(
    world: World, client: AnyClient, name: str
) -> None:
    queue = client.queue(name, max_tries=3)
    ids = [queue.push(letter) for letter in "abc"]
    last = ids.pop(-1 if "fifo" in world.place.offers else 0)
    world.raw().update_many({"_id": {"$in": ids}}, {"$set": {"tries": 3}})
    with queue.claim("g", limit=2) as claim:
        assert claim.ids == [last]
        claim.commit()
    assert client.queue(f"{name}.dead").counts().ready == 2


@pytest.mark.needs("dead_letter")
def test_dead_messages_are_never_buried_again(client: AnyClient, name: str) -> None:
    queue = client.queue(name)
    queue.push("a")
    queue.bury(queue.reserve(0))
    grave = client.queue(f"{name}.dead", max_tries=1, backoff=Backoff(base=0))
    for tries in (1, 2, 3):
        with grave.claim("g", limit=5) as claim:
            assert len(claim) == 1
            message = grave.get(claim.ids[0])
            assert (message.tries, message.dead["from"]) == (tries, name)
    assert client.queue(f"{name}.dead.dead").counts().total == 0
    with grave.claim("g", limit=5) as claim:
        claim.commit()
    assert grave.counts().total == 0


@pytest.mark.needs("sessions", "dead_letter")  # mongomock takes any value for a number
def test_what_others_wrote_is_buried_and_the_rest_is_claimed(
    world: World, queue: AnyQueue, client: AnyClient
) -> None:
    good = queue.push("good")
    now = datetime.now(UTC) - timedelta(seconds=1)
    odd = {"q": queue.name, "when": now, "due": now, "pushed": now, "payload": 1}
    world.raw().insert_many(
        [odd | {"_id": f"{queue.name}-tries", "tries": "two"}, odd | {"_id": 5, "tries": 0}]
    )
    with queue.claim("group", limit=10) as claim:
        assert claim.ids == [good]
        claim.commit()
    dead = list(world.raw().find({"q": f"{queue.name}.dead", "record": {"$exists": False}}))
    assert {each["dead"]["reason"] for each in dead} == {"invalid"}
    assert {each["_id"] for each in dead} == {f"{queue.name}-tries", 5}
    world.raw().delete_many({"q": f"{queue.name}.dead"})


STRANGE: dict[str, Any] = {
    "tries as text": {"$set": {"tries": "x"}},
    "tries as bool": {"$set": {"tries": True}},
    "no payload": {"$unset": {"payload": 1}},
    "due as text": {"$set": {"due": "x"}},
    "pushed as number": {"$set": {"pushed": 3}},
    "headers as number": {"$set": {"headers": 5}},
    "key as number": {"$set": {"key": 4}},
    "trail as number": {"$set": {"trail": 3}},
    "dead as text": {"$set": {"dead": "x"}},
    "processed": {"$set": {"processed": 1}},
}


@pytest.mark.needs("sessions", "dead_letter")
def test_claim_buries_invalid_documents_and_takes_the_rest(
    world: World, client: AnyClient, name: str
) -> None:
    """On a server: it refuses what mongomock takes."""
    queue = client.queue(name)
    for change in STRANGE.values():
        queue.push_many(range(3))
        middle = sorted(each.id for each in queue.peek())[1]
        world.raw().update_one({"_id": middle}, change)
        with queue.claim("g", limit=10) as claim:
            assert len(claim) == 2, change
            assert middle not in claim.ids
            claim.commit()
        assert queue.counts().total == 0, change
    graves = client.queue(f"{name}.dead").peek(100)
    assert len(graves) == len(STRANGE)
    assert {each.dead["reason"] for each in graves} == {"invalid"}
