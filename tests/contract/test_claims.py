"""Claims of many messages at once: ``Queue.claim``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, suppress
from datetime import UTC, datetime, timedelta
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
from pyqueue.backends.claims.claims import NamedClaims
from pyqueue.requests import Plan
from tests.contract.world import AnyClient, AnyQueue, World, near
from tests.support.eventually import eventually

pytestmark = pytest.mark.needs("claim", "documents")


class Oops(Exception):
    """Raised by a block."""


def failing(queue: AnyQueue, work: Callable[[Any], object] = len) -> None:
    """Raise inside a claim block."""
    with queue.claim("g", limit=5) as claim:
        work(claim)
        raise Oops("that went wrong")


@pytest.fixture
def again(client: AnyClient, name: str) -> AnyQueue:
    """Return a queue without backoff: rolled-back messages are ready at once."""
    return client.queue(name, backoff=Backoff(base=0))


@pytest.fixture
def abandoned(client: AnyClient) -> Iterator[Callable[..., Any]]:
    """Return a function that begins a claim and abandons it, as a process does that dies.

    The claim is neither settled nor renewed.
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


def state(world: World, queue: AnyQueue) -> dict[str, Any]:
    """Return the state of the group, without the end of the runner's lease, which is renewed."""
    found: dict[str, Any] = world.document(f"~claim:{queue.name}~g")
    return {name: value for name, value in found.items() if name != "until"}


# ---- the content of a claim


def test_claim_holds_the_ready_messages(world: World, queue: AnyQueue) -> None:
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


def test_claim_takes_the_first_messages(world: World, queue: AnyQueue) -> None:
    ids = [queue.push(number) for number in range(6)]
    with queue.claim("g", limit=4) as claim:
        assert sorted(claim.ids) == sorted(ids[:4] if "fifo" in world.place.offers else ids[2:])
        assert queue.counts().ready == 2
        claim.commit()
    assert queue.counts().total == 2


def test_claim_takes_more_than_one_batch(world: World, queue: AnyQueue) -> None:
    ids = queue.push_many(range(world.many))
    with queue.claim("g", limit=100_000) as claim:
        assert sorted(claim.ids) == sorted(ids)
        claim.commit()
    assert queue.counts().total == 0


def test_claim_keeps_to_max_bytes(queue: AnyQueue) -> None:
    """It holds a first message of any size, and an adopted claim whole."""
    queue.push_many([bytes(1000)] * 10)
    for max_bytes, count in ((5000, 4), (1, 1), (64 * 2**20, 5)):
        with queue.claim("g", limit=100, max_bytes=max_bytes) as claim:
            assert (len(claim), queue.counts().reserved) == (count, count)
            claim.commit()
    assert queue.counts().total == 0


@pytest.mark.parametrize("value", [0, -1, 1.5, "64 MB", True, None])
def test_claim_refuses_invalid_max_bytes(queue: AnyQueue, value: Any) -> None:
    queue.push(1)
    with (
        pytest.raises(ConfigurationError, match=r"^max_bytes: .*use a whole number from 1"),
        queue.claim("g", limit=1, max_bytes=value),
    ):
        pass
    assert queue.counts().ready == 1


def test_claim_uses_the_lease_of_the_queue(client: AnyClient, name: str) -> None:
    queue = client.queue(name, lease=timedelta(seconds=77))
    with queue.claim("g", limit=1) as claim:
        assert claim.lease == 77


def test_claim_of_an_empty_queue_is_empty(queue: AnyQueue) -> None:
    with queue.claim("g", limit=5) as claim:
        assert (claim.ids, len(claim)) == ([], 0)
        claim.commit()
    with queue.claim("g", limit=5) as claim:
        assert claim.ids == []  # nothing was committed
    queue.push(1)
    with queue.claim("g", limit=5) as claim:
        assert len(claim) == 1
        claim.commit()
    assert queue.counts().total == 0


def test_claim_of_a_paused_queue_is_empty(queue: AnyQueue) -> None:
    queue.push(1)
    queue.pause()
    with queue.claim("g", limit=5) as claim:
        assert claim.ids == []
    assert queue.counts().ready == 1
    queue.resume()
    with queue.claim("g", limit=5) as claim:
        assert len(claim) == 1
        claim.commit()


def test_claim_record_is_not_a_message(client: AnyClient, queue: AnyQueue, world: World) -> None:
    queue.push_many([1, 2])
    with queue.claim("g", limit=1) as claim:
        claim.commit()
    before = state(world, queue)
    assert queue.purge() == 1
    assert queue.counts().total == 0
    assert queue.peek() == []
    assert queue.pop(0) is None
    assert queue.get(before["_id"].replace("~", "")) is None
    assert [each.name for each in client.queues() if queue.name in each.name] == [queue.name]
    assert state(world, queue) == before


def test_claim_repr(queue: AnyQueue) -> None:
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


def test_groups_with_one_name_in_two_queues_share_nothing(queue: AnyQueue, other: AnyQueue) -> None:
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


def test_claim_refuses_bad_arguments(world: World, queue: AnyQueue) -> None:
    queue.push(1)
    before = world.stored(queue)
    for name, value in BAD:
        options = {"group": "g", "limit": 5} | {name: value}
        with pytest.raises(ConfigurationError, match=f"^{name}: "), queue.claim(**options):
            pytest.fail("it began")
    assert world.stored(queue) == before
    assert world.raw().count_documents({"_id": {"$regex": f"^~claim:{queue.name}"}}) == 0


# ---- settling


def test_claim_rollback_returns_messages(world: World, client: AnyClient, name: str) -> None:
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


def test_claim_rolls_back_without_a_commit(again: AnyQueue) -> None:
    (id,) = again.push_many([1])
    with again.claim("g", limit=5):
        pass
    message = again.get(id)
    assert (message.state, message.tries, message.error) == ("ready", 1, None)


def test_claim_rolls_back_on_an_exception(again: AnyQueue) -> None:
    ids = again.push_many([1, 2])
    with pytest.raises(Oops):
        failing(again)
    for id in ids:
        message = again.get(id)
        assert (message.state, message.tries) == ("ready", 1)
        assert (message.error["type"], message.error["message"]) == ("Oops", "that went wrong")


def test_exception_after_the_commit_keeps_the_commit(queue: AnyQueue) -> None:
    queue.push_many([1, 2])
    with pytest.raises(Oops):
        failing(queue, lambda claim: claim.commit())
    assert queue.counts().total == 0


@pytest.mark.parametrize("first", ["commit", "rollback"])
@pytest.mark.parametrize("second", ["commit", "rollback"])
def test_claim_is_settled_once(again: AnyQueue, first: str, second: str) -> None:
    again.push_many([1, 2])
    with again.claim("g", limit=5) as claim:
        getattr(claim, first)()
        with pytest.raises(ConfigurationError, match="already"):
            getattr(claim, second)()
    assert again.counts().ready == (0 if first == "commit" else 2)


@pytest.mark.needs("history")
def test_claim_commit_writes_history(world: World, client: AnyClient, name: str) -> None:
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
def test_commit_frees_the_keys(queue: AnyQueue) -> None:
    queue.push(1, key="k")
    with queue.claim("g", limit=5) as claim:
        assert queue.push(2, key="k") is None
        claim.commit()
        assert queue.push(3, key="k") is not None
    assert queue.counts().ready == 1


@pytest.mark.needs("keys")
def test_claim_loses_a_message_that_was_replaced(queue: AnyQueue) -> None:
    queue.push(1)
    queue.push(2, key="k")
    with queue.claim("g", limit=5) as claim:
        queue.push(3, key="k", on_duplicate="replace")
        with pytest.raises(LeaseLost, match="1 of 2"):
            claim.commit()
    (message,) = queue.peek()
    assert (message.payload, message.tries) == (3, 0)


# ---- other holders


def settle_beside(world: World, queue: AnyQueue, settle: Callable[[Any], object]) -> Any:
    """Settle a claim of four messages, one of which another holder has received.

    Return the counts of the queue.
    """
    ids = queue.push_many(range(4))
    with queue.claim("g", limit=5) as claim:
        world.ready(ids[2])
        other_holder = queue.reserve(0)
        assert other_holder is not None
        before = world.bytes(ids[2])
        settle(claim)
    assert world.bytes(ids[2]) == before
    counts = queue.counts()
    queue.commit(other_holder)
    return counts


def commit_in_part(claim: Any) -> None:
    """Commit a claim that has lost one of four messages."""
    with pytest.raises(LeaseLost, match="1 of 4"):
        claim.commit()


def test_commit_leaves_messages_of_another_holder(world: World, queue: AnyQueue) -> None:
    assert settle_beside(world, queue, commit_in_part).total == 1


@pytest.mark.needs("history")
def test_history_commit_leaves_messages_of_another_holder(
    world: World, client: AnyClient, name: str
) -> None:
    assert settle_beside(world, client.queue(name, history=300), commit_in_part).history == 3


def test_rollback_leaves_messages_of_another_holder(world: World, again: AnyQueue) -> None:
    assert settle_beside(world, again, lambda claim: claim.rollback()).ready == 3


@pytest.mark.needs("move", "dead_letter")
@pytest.mark.parametrize("way", ["rollback", "release", "move", "bury", "commit"])
def test_claim_loses_messages_that_another_holder_settled(
    world: World, again: AnyQueue, other: AnyQueue, abandoned: Callable[..., Any], way: str
) -> None:
    """Neither the abandoned claim nor the claim that takes it over settles the message."""
    (id,) = again.push_many([1])
    claim = abandoned(again)
    world.ready(id)
    other_holder = again.reserve(0)
    getattr(again, way)(other_holder, **({"to": other} if way == "move" else {}))
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


@pytest.mark.differs_by("client")
def test_claim_lease_is_renewed(world: World, queue: AnyQueue) -> None:
    ids = queue.push_many([1, 2])
    with queue.claim("g", limit=5, lease=1.5) as claim:
        first = [world.document(id)["when"] for id in ids]
        eventually(
            lambda: all(
                world.document(id)["when"] > when + timedelta(seconds=1)
                for id, when in zip(ids, first, strict=True)
            ),
            "it is renewed more than once",
        )
        assert queue.reserve(0) is None
        claim.commit()
    assert queue.counts().total == 0


@pytest.mark.differs_by("client")
def test_claim_holds_its_group_until_it_is_settled(world: World, queue: AnyQueue) -> None:
    """So a Spark stage of the group stands by, however long the block takes."""

    def until(group: str) -> datetime:
        found: datetime = world.document(f"~claim:{queue.name}~{group}")["until"]
        return found

    queue.push(1)
    with queue.claim("g", limit=5, lease=2) as claim:
        first = until("g")
        assert near(first, 0.5)
        eventually(lambda: until("g") > first + timedelta(seconds=0.3), "it is renewed twice")
        claim.commit()
        last = until("g")
        with queue.claim("h", limit=5, lease=0.9):
            seen = until("h")
            eventually(lambda: until("h") > seen + timedelta(seconds=0.6), "the other is renewed")
        assert until("g") - last < timedelta(seconds=0.5)


def test_failed_renewal_is_logged_by_group_and_retried(
    world: World, queue: AnyQueue, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    renew, failures = NamedClaims.renew, ["the server went away"]

    def failing_first(claims: NamedClaims, token: str, lease: float) -> Plan[None]:
        if failures:
            raise Unavailable(failures.pop())
        yield from renew(claims, token, lease)

    monkeypatch.setattr(NamedClaims, "renew", failing_first)
    (id,) = queue.push_many([1])
    with queue.claim("g", limit=5, lease=1.5) as claim:
        first = world.document(id)["when"]
        eventually(lambda: world.document(id)["when"] > first, "it is tried again")
        claim.commit()
    text = "could not renew the lease of group 'g', trying again: the server went away"
    assert text in caplog.text
    assert queue.counts().total == 0


def test_settled_claim_is_not_renewed(world: World, client: AnyClient, name: str) -> None:
    queue = client.queue(name, backoff=Backoff(base=50, jitter=0))
    (id,) = queue.push_many([1])
    with queue.claim("g", limit=5, lease=0.9) as claim:
        claim.rollback()
        when = world.document(id)["when"]
        with queue.claim("h", limit=5, lease=0.9):
            seen = client.stats["commands"]
            eventually(lambda: client.stats["commands"] >= seen + 3, "the other is renewed")
        assert world.document(id)["when"] == when


# ---- takeover


def test_abandoned_claim_is_taken_over_at_once(
    world: World, queue: AnyQueue, abandoned: Callable[..., Any]
) -> None:
    queue.push_many(range(3))
    former = abandoned(queue, lease=600)
    queue.push_many(range(7))
    with queue.claim("g", limit=2, lease=50) as claim:
        assert sorted(claim.ids) == sorted(former.ids)  # exactly the abandoned messages
        assert claim.number == former.number
        assert all(world.document(id)["tries"] == 2 for id in claim.ids)
        assert all(near(world.document(id)["when"], 50) for id in claim.ids)
        claim.commit()
    assert queue.counts().ready == queue.counts().total == 7
    with queue.claim("g", limit=100) as claim:
        assert len(claim) == 7
        assert claim.number > former.number
        claim.commit()


def test_takeover_by_another_client(
    world: World, queue: AnyQueue, abandoned: Callable[..., Any]
) -> None:
    queue.push_many(range(3))
    former = abandoned(queue)
    with world.connect().queue(queue.name).claim("g", limit=5) as claim:
        assert sorted(claim.ids) == sorted(former.ids)
        claim.commit()
    with pytest.raises(Fenced, match="group 'g'"):
        former.commit()


@pytest.mark.parametrize("way", ["commit", "rollback"])
def test_former_runner_is_fenced(
    world: World, queue: AnyQueue, abandoned: Callable[..., Any], way: str
) -> None:
    queue.push_many(range(3))
    former = abandoned(queue)
    with queue.claim("g", limit=5) as claim:
        before = world.stored(queue), state(world, queue)
        with pytest.raises(Fenced, match="group 'g'"):
            getattr(former, way)()
        assert (world.stored(queue), state(world, queue)) == before
        claim.commit()
    assert queue.counts().total == 0


def test_fenced_block_raises_fenced(queue: AnyQueue) -> None:
    queue.push_many(range(3))
    with pytest.raises(Fenced), queue.claim("g", limit=5), queue.claim("g", limit=5) as second:
        second.commit()
    assert queue.counts().total == 0


def test_block_exception_is_raised_instead_of_fenced(
    queue: AnyQueue, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has the error of the rollback."""
    queue.push_many(range(3))

    def taken_over(_: Any) -> None:
        with queue.claim("g", limit=5) as second:
            second.commit()

    with pytest.raises(Oops):
        failing(queue, taken_over)
    assert queue.counts().total == 0
    assert f"the claim of group 'g' of queue {queue.name!r} was not rolled back" in caplog.text


def test_fenced_claim_renews_nothing(
    world: World, queue: AnyQueue, abandoned: Callable[..., Any]
) -> None:
    """The abandoned claim does not renew the lease of the new holder."""
    queue.push_many([1, 2])
    abandoned(queue, lease=0.9, limit=1)
    with (
        queue.claim("g", limit=5, lease=600) as claim,
        queue.claim("h", limit=5, lease=0.9) as other,
    ):
        when, first = (world.document(each.ids[0])["when"] for each in (claim, other))
        eventually(
            lambda: world.document(other.ids[0])["when"] > first + timedelta(seconds=0.6),
            "leases of 0.9 s are renewed",
        )
        assert world.document(claim.ids[0])["when"] == when
        claim.commit()


def test_takeover_leaves_messages_of_other_holders(
    world: World, again: AnyQueue, abandoned: Callable[..., Any]
) -> None:
    """The lease expired before the takeover, so the message belongs to the new holder."""
    ids = again.push_many(range(3))
    abandoned(again)
    for id in ids:
        world.ready(id)
    other_holder = again.reserve(0)
    assert other_holder is not None
    before = world.bytes(other_holder.id)
    with again.claim("g", limit=5) as claim:
        assert sorted(claim.ids) == sorted({*ids} - {other_holder.id})
        claim.commit()
    assert world.bytes(other_holder.id) == before
    again.commit(other_holder)


# ---- burying


@pytest.mark.needs("dead_letter")
def test_rollback_of_the_last_try_buries(client: AnyClient, name: str) -> None:
    queue = client.queue(name, max_tries=2, backoff=Backoff(base=0))
    queue.push_many(["a", "b"])
    for _ in range(2):
        with pytest.raises(Oops):
            failing(queue)
    assert queue.counts().total == 0
    graves = client.queue(f"{name}.dead").peek()
    assert sorted(each.payload for each in graves) == ["a", "b"]
    for each in graves:
        assert (each.dead["from"], each.dead["reason"], each.dead["tries"]) == (name, "tries", 2)
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
def test_claim_scans_again_if_every_message_was_buried(
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


@pytest.mark.needs("server", "dead_letter")  # mongomock accepts any value as a number
def test_foreign_documents_are_buried_and_the_rest_claimed(
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
    "deliveries as text": {"$set": {"deliveries": "x"}},
    "no payload": {"$unset": {"payload": 1}},
    "due as text": {"$set": {"due": "x"}},
    "pushed as number": {"$set": {"pushed": 3}},
    "headers as number": {"$set": {"headers": 5}},
    "key as number": {"$set": {"key": 4}},
    "trail as number": {"$set": {"trail": 3}},
    "attempts as number": {"$set": {"attempts": 3}},
    "dead as text": {"$set": {"dead": "x"}},
    "processed": {"$set": {"processed": 1}},
}


@pytest.mark.needs("server", "dead_letter")
def test_claim_buries_invalid_documents_and_takes_the_rest(
    world: World, client: AnyClient, name: str
) -> None:
    """This runs on a server, which refuses updates that mongomock accepts."""
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
