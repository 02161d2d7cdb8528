"""Programs of an older release and of this release on the same queues.

``Older`` stands for the older programs. "How to upgrade" says what they keep and what they lose.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest
from pymongo.errors import DuplicateKeyError

from pyqueue import Client, JobFailed, LeaseLost, To
from pyqueue.backends import gathering
from pyqueue.backends.expiring import end_expired
from pyqueue.backends.gathering import Known
from pyqueue.facts import WhenDead
from pyqueue.runtime.connecting import runner_of
from tests.hostile.older import Document, Older
from tests.support.eventually import LONG

#: The fields that came after the older release.
LATER: Final = ("keep", "unique", "dies", "best_before", "gather", "attempts", "deliveries")
#: The later fields of a message that ``push`` makes.
ASKED: Final = {"keep", "unique", "dies", "gather"}


@pytest.fixture
def older(client: Client) -> Older:
    return Older(client.database["pyqueue"])


def push(client: Client, dead: WhenDead = "hold", **options: Any) -> tuple[Any, Any]:
    """Push a message of a gather with everything that a producer may ask for.

    Returns:
        Its id, and the id of the gather.
    """
    asked: dict[str, Any] = {"result": 60, "unique_for": 3600, "expires": 3600} | options
    with client.gather(To("report", "done"), dead=dead) as g:
        id = client.queue("a").push("x", key="k", headers={"h": 1}, gather=g, **asked)
    return id, g.id


def stored(older: Older, id: Any) -> Document:
    found = older.collection.find_one({"_id": id})
    assert found is not None
    return found


def later(document: Document) -> Document:
    """Return the later fields of a stored message."""
    return {name: document[name] for name in LATER if name in document}


def expire(older: Older, id: Any) -> None:
    """Let the instant of expiry of a message pass."""
    past = datetime.now(UTC) - timedelta(seconds=1)
    match = {"_id": id, "dies": {"$exists": True}}
    assert older.collection.update_one(match, {"$set": {"dies": past}}).matched_count == 1


def is_over(client: Client, gather: Any) -> bool:
    """Return whether a gather is over, as a worker finds out that ticks schedules."""
    return runner_of(client).run(gathering.look(gather, Known()))


def reported(client: Client) -> None:
    """Check that the message of the gather comes."""
    held = client.queue("report").reserve(LONG)
    assert held is not None
    assert held.payload == "done"


# ---- messages of this release, tried by the older release


def test_tries_by_an_older_release_keep_every_later_field(client: Client, older: Older) -> None:
    id, _ = push(client)
    asked = later(stored(older, id))
    assert asked.keys() == ASKED
    assert older.release(older.claim("a"))
    assert older.rollback(older.claim("a"))
    assert later(stored(older, id)) == asked
    queue = client.queue("a")
    held = queue.reserve(LONG)
    assert held is not None
    assert (held.payload, held.headers, held.key) == ("x", {"h": 1}, "k")
    assert (held.tries, held.deliveries, held.attempts) == (2, 2, ())
    queue.rollback(held, delay=0, error="no")
    before = later(stored(older, id))
    assert before.keys() == ASKED - {"dies"} | {"best_before", "attempts", "deliveries"}
    assert older.rollback(older.claim("a"))
    assert later(stored(older, id)) == before
    held = queue.reserve(LONG)
    assert held is not None
    assert (held.tries, [each.number for each in held.attempts]) == (4, [2])
    queue.commit(held, result="r")
    assert client.wait(id, LONG).result == "r"
    assert queue.push("y", key="k") is None, "unique_for"
    reported(client)


def test_move_by_an_older_release_keeps_result_and_gather(client: Client, older: Older) -> None:
    """It also takes along the attempts, and the key stays behind."""
    id, gather = push(client, expires=None)
    queue = client.queue("a")
    held = queue.reserve(LONG)
    assert held is not None
    queue.rollback(held, delay=0, error="no")
    assert older.move(older.claim("a"), "b")
    assert not is_over(client, gather)
    assert queue.push("y", key="k") is not None
    target = client.queue("b")
    moved = target.reserve(LONG)
    assert moved is not None
    assert (moved.id, moved.tries, moved.key, len(moved.attempts)) == (id, 1, None, 1)
    assert [stop["q"] for stop in moved.trail] == ["a"]
    target.commit(moved, result="r")
    assert client.wait(id, LONG).result == "r"
    reported(client)


def test_commit_by_an_older_release_loses_the_result(client: Client, older: Older) -> None:
    """The key is free at once, and the gather is over, but no process was told."""
    id, gather = push(client)
    assert older.commit(older.claim("a"))
    with pytest.raises(JobFailed) as caught:
        client.wait(id, LONG)
    assert caught.value.reason == "gone"
    assert client.queue("a").push("y", key="k") is not None
    assert is_over(client, gather)
    reported(client)


def test_history_of_an_older_release_holds_the_gather(client: Client, older: Older) -> None:
    id, gather = push(client)
    assert older.commit(older.claim("a"), history_s=3600)
    finished = client.wait(id, LONG)
    assert (finished.outcome, finished.result, finished.key) == ("committed", None, "k")
    assert client.queue("a", history=3600).push("y", key="k") is not None
    assert not is_over(client, gather)
    older.collection.delete_one({"_id": id})  # as the server does after the hour
    assert is_over(client, gather)
    reported(client)


@pytest.mark.parametrize("dead", ["hold", "end"])
def test_burial_by_an_older_release_holds_the_gather(
    client: Client, older: Older, dead: WhenDead
) -> None:
    id, gather = push(client, dead)
    assert older.bury(older.claim("a"))
    with pytest.raises(JobFailed) as caught:
        client.wait(id, LONG)
    assert caught.value.reason == "dead"
    assert not is_over(client, gather)
    assert client.queue("a.dead").redrive() == 1
    assert "dies" not in stored(older, id)
    queue = client.queue("a")
    held = queue.reserve(LONG)
    assert held is not None
    queue.commit(held)
    reported(client)


def test_older_release_redrives_a_later_dead_letter(client: Client, older: Older) -> None:
    id, gather = push(client)
    queue = client.queue("a")
    held = queue.reserve(LONG)
    assert held is not None
    queue.bury(held, error="bad")
    before = later(stored(older, id))
    assert before.keys() == {"keep", "gather", "attempts"}
    assert older.redrive("a.dead")
    assert later(stored(older, id)) == before
    again = queue.reserve(LONG)
    assert again is not None
    assert (again.tries, again.dead, len(again.attempts)) == (1, None, 1)
    queue.commit(again, result="r")
    assert client.wait(id, LONG).result == "r"
    reported(client)
    assert is_over(client, gather)


# ---- expiry


@pytest.mark.parametrize("verb", ["release", "rollback"])
def test_older_release_delivers_an_expired_message(client: Client, older: Older, verb: str) -> None:
    """If its try counts, the message no longer expires."""
    queue = client.queue("a", history=60)
    id = queue.push("x", expires=3600)
    assert stored(older, "~queue:a")["v"] == 2, "the first release refuses it"
    expire(older, id)
    assert getattr(older, verb)(older.claim("a"))
    held = queue.reserve(0.5)
    assert (held is None) == (verb == "release")
    outcomes = [each.outcome for each in queue.history()]
    assert outcomes == (["expired"] if verb == "release" else [])


LEAVES: Final[dict[str, Callable[[Older, Document], bool]]] = {
    "b": lambda older, held: older.move(held, "b"),
    "a.dead": lambda older, held: older.bury(held),
}


@pytest.mark.parametrize("to", LEAVES)
def test_expiry_follows_a_move_by_an_older_release(client: Client, older: Older, to: str) -> None:
    """So the message may expire in the other queue, even as a dead letter."""
    id = client.queue("a").push("x", expires=3600)
    assert LEAVES[to](older, older.claim("a"))
    assert client.queue(to).counts().ready == 1
    expire(older, id)
    assert runner_of(client).run(end_expired()) == 1
    assert older.collection.find_one({"_id": id}) is None


# ---- cancelling, keys and leases


def test_cancel_outlasts_a_rollback_by_an_older_release(client: Client, older: Older) -> None:
    """Its claim delivers the message."""
    queue = client.queue("a", history=60)
    id = queue.push("x")
    held = older.claim("a")
    assert client.cancel(id) == "requested"
    assert older.rollback(held)
    assert older.rollback(older.claim("a"))
    assert queue.reserve(0.5) is None
    assert [each.outcome for each in queue.history()] == ["cancelled"]


def test_key_that_stays_taken_is_taken_for_an_older_release(client: Client, older: Older) -> None:
    queue = client.queue("a")
    queue.push("x", key="k", unique_for=3600)
    assert queue.pop(LONG) is not None
    with pytest.raises(DuplicateKeyError):
        older.push("a", "y", key="k")


def test_lease_fences_both_releases(client: Client, older: Older) -> None:
    queue = client.queue("a")
    id = queue.push("x")
    lapsed = older.claim("a", lease=0.0)
    held = queue.reserve(LONG)
    assert held is not None
    assert held.id == id
    assert not older.commit(lapsed)
    past = {"$set": {"when": datetime.now(UTC) - timedelta(seconds=1)}}
    assert older.collection.update_one({"_id": id}, past).matched_count == 1
    again = older.claim("a")
    with pytest.raises(LeaseLost):
        queue.commit(held)
    assert older.commit(again)


# ---- messages of the older release


def test_tries_of_both_releases_count_together(client: Client, older: Older) -> None:
    """The attempts of the older release are missing in the list."""
    queue = client.queue("a", max_tries=4)
    id = older.push("a", "x", key="k", headers={"h": 1})
    for number in (2, 4):
        assert older.rollback(older.claim("a"))
        held = queue.reserve(LONG)
        assert held is not None
        assert (held.id, held.tries, held.deliveries) == (id, number, number)
        queue.rollback(held, delay=0, error="no")
    (dead,) = client.queue("a.dead").peek()
    assert dead.dead is not None
    assert (dead.payload, dead.key, dead.dead.reason, dead.dead.tries) == ("x", "k", "tries", 4)
    assert [each.number for each in dead.attempts] == [2, 4]


@pytest.mark.parametrize("verb", ["commit", "rollback", "release", "bury"])
def test_older_release_settles_beside_this_one(client: Client, older: Older, verb: str) -> None:
    """Each settles the message that it holds."""
    queue = client.queue("a")
    ids = [older.push("a", number) for number in range(2)]
    first, second = older.claim("a"), queue.reserve(LONG)
    assert second is not None
    assert [first["_id"], second.id] == ids
    assert getattr(older, verb)(first)
    queue.commit(second)
    left = {"commit": (0, 0), "bury": (0, 1)}.get(verb, (1, 0))
    assert (queue.counts().total, client.queue("a.dead").counts().total) == left
