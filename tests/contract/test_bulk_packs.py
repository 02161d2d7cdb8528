"""Bulk writes to buckets, and reads of them: rows share packs, which are hidden until they appear.

They run on a blocking client, as Spark's tasks do.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import bson
import pytest

from pyqueue import Client, ConfigurationError, InvalidMessage, Queue, QueueError
from pyqueue.backends.bulk.partitions import EVERYTHING, Choice, encoded_page, page, slices
from pyqueue.backends.bulk.staging import Staging, append
from pyqueue.backends.contents import contents_of
from pyqueue.backends.kind import lookup
from pyqueue.backends.options import NewMessage
from pyqueue.payloads import OPTIONS
from pyqueue.queue_base import backend_of
from pyqueue.requests import Plan
from pyqueue.runtime.connecting import runner_of
from tests.contract import test_epochs as epochs
from tests.contract.test_epochs import Scene, advance, length, run_of
from tests.support.samples import at_each, some_or_all

CONTENTS = contents_of(lookup("bucket"))
#: The rows of an epoch, in two tasks: packs of 2, a message alone in its pack, and one with a key.
ROWS = [
    [*(NewMessage(None, number) for number in range(5)), NewMessage(None, 5, None, "k")],
    [NewMessage(None, 6), NewMessage(None, 7, {"h": 1})],
]
ONCE = Counter(range(8))


@pytest.fixture
def client(blocking_client: Client, monkeypatch: pytest.MonkeyPatch) -> Client:
    """Return a client of an empty database. The epochs of ``run_of`` have the rows above."""
    monkeypatch.setattr(epochs, "TASKS", ROWS)
    return blocking_client


@pytest.fixture
def queue(client: Client) -> Queue[Any]:
    """Return an empty bucket with packs of 2."""
    return client.queue("q", kind="bucket", pack=2)


class PackScene(Scene):
    """A query that writes to a new bucket, and a consumer."""

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self.queue = client.queue(self.queue.name, kind="bucket", pack=2)
        self.other = client.queue(self.other.name, kind="bucket", pack=2)
        self.writes = self.query("query-1")

    def consume(self) -> None:
        """Finish all messages that are visible."""
        for each in stored(self.client, self.queue.name, self.other.name):
            self.client.database["pyqueue"].delete_one({"_id": each["_id"]})
            self.seen.update(one["payload"] for one in CONTENTS.messages(each))


def run(client: Client, plan: Plan[Any]) -> Any:
    return runner_of(client).run(plan)


def stored(client: Client, *queues: str) -> list[dict[str, Any]]:
    """Return the documents of these queues, without the records."""
    match = {"q": {"$in": list(queues)}, "record": {"$exists": False}}
    return list(client.database["pyqueue"].find(match))


def hidden(client: Client) -> list[int]:
    """Return how many messages each hidden document has."""
    found = client.database["pyqueue"].find({"staged": {"$exists": True}})
    return sorted(map(CONTENTS.size, found))


# ---- epochs


@some_or_all
def test_packs_of_an_epoch_appear_once_wherever_a_run_ends(client: Client, few: int | None) -> None:
    """The driver is killed before each command in turn, and runs the epoch again."""
    partly = 0

    def killed(at: int) -> int:
        nonlocal partly
        if at == 0:
            return length(PackScene(client)) + 1
        scene = PackScene(client)
        advance(scene.steps(run_of(scene.writes, "a")), at)
        partly += 0 < scene.seen.total() < len(ONCE)
        assert not advance(scene.steps(run_of(scene.writes, "b")), 1000)
        assert scene.seen == ONCE, f"killed before command {at}"
        assert scene.run(run_of(scene.writes, "c")) == 0
        assert (scene.seen, scene.hidden()) == (ONCE, 0)
        return at

    assert at_each(killed, few) > 12
    assert partly or few, "no kill came while the epoch was shown"


def test_packs_of_an_epoch_appear_once_beside_a_run_that_goes_on(client: Client) -> None:
    """One run is suspended; the next one runs for a while; then both go on."""
    dice, most = random.Random(4), length(PackScene(client)) + 1
    for _ in range(5):
        scene = PackScene(client)
        one, two = (scene.steps(run_of(scene.writes, job)) for job in ("a", "b"))
        advance(one, dice.randint(1, most))
        advance(two, dice.randint(1, most))
        advance(one, 1000)
        advance(two, 1000)
        assert not advance(scene.steps(run_of(scene.writes, "c")), 1000)
        assert (scene.seen, scene.hidden()) == (ONCE, 0)


def test_epoch_counts_the_messages_of_packs(client: Client) -> None:
    scene = PackScene(client)
    attempt = scene.run(scene.writes.join("a", 0))
    assert scene.run(scene.writes.write(0, attempt, 1, "x", ROWS[0])) == 6
    assert hidden(client) == [1, 1, 2, 2]
    with pytest.raises(QueueError, match="7 messages were written at x, but 6 are there"):
        scene.run(scene.writes.commit("a", 0, attempt, {"x": 7}))
    assert scene.run(scene.writes.commit("a", 0, attempt, {"x": 6})) == 6
    received = scene.queue.reserve_many(10, timeout=0)
    assert sorted(each.payload for each in received) == [*range(6)]
    scene.queue.commit(*received)
    assert scene.queue.counts().total == 0


# ---- batch writes


def test_staged_rows_share_packs(client: Client, queue: Queue[Any]) -> None:
    rows = [*ROWS[0], NewMessage("chosen", 6), NewMessage(None, 7, delay=600)]
    staging = Staging(backend_of(queue).target, "job")
    assert run(client, staging.write("a", rows)) == 8
    assert (queue.counts().total, hidden(client)) == (0, [1] * 4 + [2] * 2)
    assert run(client, staging.publish({"a": 8})) == 8
    assert hidden(client) == []
    assert (queue.counts().ready, queue.counts().scheduled) == (7, 1)
    chosen = queue.get("chosen")
    assert chosen is not None
    assert chosen.payload == 6
    received = queue.reserve_many(10, timeout=0)
    assert sorted(each.payload for each in received) == [*range(7)]
    assert {len(str(each.id)) for each in received} == {6, 24, 29}  # chosen, alone, in a pack


def test_staged_pack_that_is_missing_is_an_error(client: Client, queue: Queue[Any]) -> None:
    staging = Staging(backend_of(queue).target, "job")
    run(client, staging.write("a", ROWS[0]))
    client.database["pyqueue"].delete_one({"staged": True, "n": 2})
    with pytest.raises(QueueError, match="6 messages were staged at a, but 4 are there"):
        run(client, staging.publish({"a": 6}))
    run(client, staging.discard())
    assert hidden(client) == []


@pytest.mark.parametrize(
    ("bad", "error", "says"),
    [
        (NewMessage(None, {1: 2}), InvalidMessage, "; in row 2$"),
        (NewMessage(None, 1, None, ""), ConfigurationError, "key"),
        (NewMessage(None, 1, {"$a.b": object()}), ConfigurationError, "headers"),
    ],
)
def test_bad_row_beside_packs_writes_nothing(
    client: Client, queue: Queue[Any], bad: NewMessage, error: type[Exception], says: str
) -> None:
    rows = [*ROWS[1], bad]
    for plan in (
        append(backend_of(queue).target, rows),
        Staging(backend_of(queue).target, "job").write("a", rows),
    ):
        with pytest.raises(error, match=says):
            run(client, plan)
    assert (stored(client, "q"), hidden(client)) == ([], [])


def test_append_shares_packs_in_a_transaction(url: str) -> None:
    with Client(url) as client:
        queue = client.queue("q", kind="bucket", pack=2)
        queue.reserve(0)
        plan = append(backend_of(queue).target, ROWS[0])
        with client.transaction() as session:
            again = append(backend_of(queue).target, ROWS[1], session=session)
            assert run(client, again) == 2
            assert queue.counts().total == 0
        assert run(client, plan) == 6
        assert queue.counts().ready == 8
        assert sorted(map(CONTENTS.size, stored(client, "q"))) == [1, 1, 2, 2, 2]


# ---- reads


@pytest.mark.parametrize("encoded", [False, True], ids=["decoded", "BSON"])
def test_slices_of_a_bucket_have_each_message_once(url: str, encoded: bool) -> None:
    with Client(url) as client:
        queue = client.queue("q", kind="bucket", pack=3)
        for _ in range(4):
            queue.push_many(range(7))
            queue.push("alone", id=f"s{_}")
        queue.push("later", delay=600)
        held = queue.reserve_many(4, timeout=0)
        queue.commit(*held[1:3])
        queue.rollback(held[0], delay=0)
        queue.release(held[3])
        expected = Counter(each.payload for each in queue.peek(100))
        assert expected.total() == 30
        kind = backend_of(queue).kind
        choice = (
            Choice(fields={"_id": 1, "q": 1, "when": 1, "payload": 1}) if encoded else EVERYTHING
        )
        for parts in (1, 2, 3, 7):
            found: list[Any] = []
            for part in run(client, slices("q", kind, parts)):
                rest = part
                while True:
                    read = (encoded_page if encoded else page)("q", kind, rest, 2, choice)
                    some: Any = run(client, read)
                    if not some:
                        break
                    if encoded:
                        found += bson.decode_all(b"".join(CONTENTS.encoded(some)), OPTIONS)
                        some = bson.decode_all(b"".join(some), OPTIONS)
                    else:
                        found += [one for each in some for one in CONTENTS.messages(each)]
                    rest = replace(rest, above=(some[-1]["when"], some[-1]["_id"]))
            assert Counter(each["payload"] for each in found) == expected
            assert len({each["_id"] for each in found}) == 30


def test_read_without_payloads_reads_no_payloads(url: str) -> None:
    with Client(url) as client:
        queue = client.queue("q", kind="bucket")
        ids = queue.push_many(["secret", "secret"])
        kind, choice = backend_of(queue).kind, Choice(fields={"_id": 1, "q": 1, "when": 1})
        (part,) = run(client, slices("q", kind, 1))
        found = run(client, encoded_page("q", kind, part, 10, choice))
        assert b"secret" not in b"".join(found)
        messages = bson.decode_all(b"".join(CONTENTS.encoded(found)), OPTIONS)
        assert [each["_id"] for each in messages] == ids
