"""Bulk plans: slices of a queue, staging, appending, passing on.

They run on a blocking client, as Spark's tasks do, over mongomock and a server.
"""

from __future__ import annotations

import pickle
from collections import Counter
from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any

import pytest
from bson import ObjectId

from pyqueue import (
    Client,
    ConfigurationError,
    DuplicateKey,
    InvalidMessage,
    LeaseLost,
    Queue,
    QueueError,
)
from pyqueue.backends.bulk import staging as staging_module
from pyqueue.backends.bulk.partitions import Slice, page, slices
from pyqueue.backends.bulk.staging import Staging, append
from pyqueue.backends.kind import Kind
from pyqueue.backends.moving import move_each
from pyqueue.backends.options import NewMessage
from pyqueue.queue_base import backend_of
from pyqueue.requests import Command, Plan, Signal, WriteFailure
from pyqueue.runtime.connecting import runner_of
from tests.contract.world import AnyQueue
from tests.plans.runner import Runner
from tests.support.samples import sampled


@pytest.fixture
def client(blocking_client: Client) -> Client:
    """Return a client of an empty database."""
    return blocking_client


@pytest.fixture
def queue(client: Client) -> Queue[Any]:
    """Return an empty queue."""
    return client.queue("q")


@pytest.fixture
def staging(queue: Queue[Any]) -> Staging:
    """Return a staging job for the queue."""
    return Staging(backend_of(queue).target, "job")


def run(client: Client, plan: Plan[Any]) -> Any:
    """Run a plan to its end."""
    return runner_of(client).run(plan)


def add(client: Client, queue: Queue[Any], *rows: NewMessage) -> Any:
    """Append rows to a queue. Return how many were written."""
    return run(client, append(backend_of(queue).target, rows))


def place(queue: AnyQueue) -> tuple[str, Kind]:
    """Return the name and the kind of a queue."""
    backend = backend_of(queue)
    return backend.queue, backend.kind


def payloads(queue: Queue[Any]) -> list[Any]:
    """Return the payloads of a queue, in order."""
    return [each.payload for each in queue.peek(limit=1000)]


def stored(client: Client, *queues: str) -> list[dict[str, Any]]:
    """Return the documents of these queues sorted by id, without the records."""
    found = client.database["pyqueue"].find(
        {"q": {"$in": list(queues)}, "record": {"$exists": False}}
    )
    return sorted(found, key=lambda each: str(each["_id"]))


def staged_count(client: Client) -> int:
    """Return the number of staged messages."""
    count: int = client.database["pyqueue"].count_documents({"staged": True})
    return count


# ---- slices


def read(client: Client, queue: Queue[Any], parts: list[Slice], limit: int) -> list[list[Any]]:
    """Read each slice page by page."""
    answer = []
    for each in parts:
        part, seen = each, list[Any]()
        while found := run(client, page(*place(queue), part, limit)):
            assert len(found) <= limit
            seen += [one["payload"] for one in found]
            part = Slice(part.now, (found[-1]["when"], found[-1]["_id"]), part.upto)
        answer.append(seen)
    return answer


@pytest.mark.parametrize(
    ("kind", "count", "limit", "instants"),
    sampled(product(["str", "ObjectId", "both"], [0, 1, 2, 30], [1, 7, 1000], [1, 5]), few=11),
)
def test_slices_are_disjoint_complete_even_and_in_order(
    client: Client, queue: Queue[Any], kind: str, count: int, limit: int, instants: int
) -> None:
    """The messages became ready in ``instants`` milliseconds; their ids have one type, or two."""
    ids: list[Any] = [
        f"m{number * 7919 % 1000}"
        if kind == "str" or (kind == "both" and number % 2)
        else ObjectId()
        for number in range(count)
    ]
    queue.push_many(range(count), ids=ids)
    queue.push("later", delay=600)
    now = datetime.now(UTC)
    for instant in range(instants):
        past = now - timedelta(milliseconds=instant)
        client.database["pyqueue"].update_many(
            {"_id": {"$in": ids[instant::instants]}}, {"$set": {"when": past}}
        )
    order = [each.payload for each in queue.peek(limit=1000)][:count]
    for parts in (1, 2, 3, 7):
        found = run(client, slices(*place(queue), parts))
        assert len(found) == max(1, min(parts, count))
        assert (found[0].above, found[-1].upto) == (None, None)
        assert [part.above for part in found[1:]] == [part.upto for part in found[:-1]]
        seen = read(client, queue, found, limit)
        assert [each for part in seen for each in part] == order
        assert max(map(len, seen)) - min(map(len, seen)) <= 1


def test_slices_show_messages_ready_then_and_now(client: Client, queue: Queue[Any]) -> None:
    queue.push_many(range(6))
    parts = run(client, slices(*place(queue), 2))
    held = queue.pop(0)
    assert held is not None
    late = {"_id": "late", "payload": "late", "when": datetime.now(UTC) + timedelta(seconds=1)}
    client.database["pyqueue"].insert_one(stored(client, "q")[0] | late)
    assert read(client, queue, parts, 10) == [[1, 2], [3, 4, 5]]


def test_slices_of_fewer_messages_than_were_counted(queue: Queue[Any]) -> None:
    """Messages are claimed between the count and the reads of the bounds."""
    plan, now = slices(*place(queue), 4), datetime.now(UTC)
    answers: list[Any] = [None, now, 4, 0]
    for answer in answers:
        plan.send(answer)
    with pytest.raises(StopIteration) as stop:
        plan.send([])
    assert stop.value.value == [Slice(now, None, None)]


# ---- appending


def test_append(client: Client, queue: Queue[Any]) -> None:
    began = datetime.now(UTC)
    assert add(client, queue, NewMessage("a", 1, {"h": "x"}, "k"), NewMessage(None, 2)) == 2
    first = queue.get("a")
    assert first is not None
    assert (first.payload, first.headers, first.key, first.state) == (1, {"h": "x"}, "k", "ready")
    assert abs(first.pushed - began) < timedelta(seconds=5)
    assert payloads(queue) == [1, 2]
    # An id that is stored already is the same message. A taken key keeps its message out.
    rows = [NewMessage("a", 1), NewMessage(None, 3, None, "k"), NewMessage(None, 4)]
    assert add(client, queue, *rows) == 2
    assert payloads(queue) == [1, 2, 4]
    assert add(client, queue) == 0


def test_append_is_part_of_a_transaction(url: str) -> None:
    with Client(url) as client:
        queue = client.queue("q")

        def undone() -> None:
            rows = [NewMessage("a", 1), NewMessage(None, 2)]
            with client.transaction() as session:
                run(client, append(backend_of(queue).target, rows, session=session))
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            undone()
        assert payloads(queue) == []


def test_append_of_nothing_makes_no_record(client: Client, queue: Queue[Any]) -> None:
    add(client, queue)
    assert client.queues() == []


@pytest.mark.parametrize("stage", [False, True])
@pytest.mark.parametrize(
    ("fresh", "error", "says"),
    [
        (
            [NewMessage("a", 1), NewMessage("b", 2), NewMessage("a", 3)],
            ConfigurationError,
            "several rows have the id 'a'",
        ),
        ([NewMessage(None, 1), NewMessage("b", {1: 2})], InvalidMessage, "; in row 1 with id b$"),
        ([NewMessage(None, 1), NewMessage(None, 2**70)], InvalidMessage, "; in row 1$"),
        ([NewMessage("", 1)], ConfigurationError, "id"),
        ([NewMessage(None, 1, None, "")], ConfigurationError, "key"),
        ([NewMessage(None, 1, {"$a.b": object()})], ConfigurationError, "headers"),
    ],
)
def test_bad_rows_write_nothing(
    client: Client,
    queue: Queue[Any],
    staging: Staging,
    fresh: list[NewMessage],
    error: type[Exception],
    says: str,
    stage: bool,
) -> None:
    plan = staging.write("a", fresh) if stage else append(backend_of(queue).target, fresh)
    with pytest.raises(error, match=says):
        run(client, plan)
    assert client.database["pyqueue"].count_documents({"record": {"$exists": False}}) == 0


@pytest.mark.parametrize("stage", [False, True])
def test_id_of_another_queues_message_is_refused(
    client: Client, queue: Queue[Any], staging: Staging, stage: bool
) -> None:
    client.queue("other").push(1, id="theirs")
    rows = [NewMessage("theirs", 2), NewMessage("ours", 3)]
    plan = staging.write("a", rows) if stage else append(backend_of(queue).target, rows)
    with pytest.raises(DuplicateKey) as caught:
        run(client, plan)
    assert caught.value.ids == ["theirs"]
    (theirs,) = stored(client, "other")
    assert theirs["payload"] == 1


# ---- staging


def test_staged_messages_are_hidden_until_published(
    client: Client, queue: Queue[Any], staging: Staging
) -> None:
    queue.push("there")
    rows = [NewMessage("a", 1, {"h": "x"}), NewMessage("b", 2, None, "k")]
    assert run(client, staging.write("a", rows)) == 2
    assert run(client, staging.write("b", [NewMessage(None, 3)])) == 1
    assert payloads(queue) == ["there"]
    assert queue.counts().total == 1
    assert [each.name for each in client.queues()] == ["q"]
    assert staged_count(client) == 3
    assert run(client, staging.publish({"a": 2, "b": 1})) == 3
    assert staged_count(client) == 0
    assert sorted(map(str, payloads(queue))) == ["1", "2", "3", "there"]
    for each in stored(client, "q"):
        assert not {"staged", "processed", "expires"} & each.keys()
    shown = queue.get("b")
    assert shown is not None
    assert (shown.key, shown.state, shown.tries) == ("k", "ready", 0)
    first = queue.get("a")
    assert first is not None
    assert first.headers == {"h": "x"}


def test_staged_messages_expire_after_a_week(client: Client, staging: Staging) -> None:
    run(client, staging.write("a", [NewMessage("a", 1)]))
    (document,) = client.database["pyqueue"].find({"staged": True})
    assert isinstance(document["processed"], datetime)
    lifetime = document["expires"] - document["processed"]
    assert lifetime == timedelta(days=7) == staging_module.STAGED_LIFETIME


def test_job_is_small_and_pickles(client: Client, queue: Queue[Any], staging: Staging) -> None:
    data = pickle.dumps(staging)
    assert len(data) < 2000
    run(client, pickle.loads(data).write("a", [NewMessage("a", 1)]))
    assert run(client, staging.publish({"a": 1})) == 1
    assert not hasattr(staging, "__dict__")


def test_staging_again_replaces_the_first_attempt(
    client: Client, queue: Queue[Any], staging: Staging
) -> None:
    run(client, staging.write("first", [NewMessage(id, "old") for id in "ab"]))
    assert run(client, staging.write("second", [NewMessage(id, "new") for id in "abc"])) == 3
    assert run(client, staging.publish({"second": 3})) == 3
    assert payloads(queue) == ["new", "new", "new"]
    assert staged_count(client) == 0


def test_staging_a_message_of_the_queue_adds_nothing(
    client: Client, queue: Queue[Any], staging: Staging
) -> None:
    queue.push("there", id="a")
    assert run(client, staging.write("a", [NewMessage("a", "again"), NewMessage("b", "new")])) == 1
    assert run(client, staging.publish({"a": 1})) == 1
    assert payloads(queue) == ["there", "new"]


def test_staging_a_message_that_moved_on_adds_nothing(
    client: Client, queue: Queue[Any], staging: Staging
) -> None:
    queue.push("there", id="a")
    held = queue.reserve(0)
    assert held is not None
    queue.move(held, to="further")
    assert run(client, staging.write("a", [NewMessage("a", "again")])) == 0


def test_publish_shows_one_message_per_key(
    client: Client, queue: Queue[Any], staging: Staging
) -> None:
    queue.push("there", key="taken")
    rows = [NewMessage("a", 1, None, "k"), NewMessage("b", 2, None, "taken"), NewMessage("c", 3)]
    run(client, staging.write("a", rows))
    run(client, staging.write("b", [NewMessage("d", 4, None, "k")]))
    assert run(client, staging.publish({"a": 3, "b": 1})) == 2
    assert sorted(map(str, payloads(queue))) == ["1", "3", "there"]
    assert staged_count(client) == 0


# mongomock does not say which index refused a message.
@pytest.mark.parametrize("blocking_client", ["mongod"], indirect=True)
def test_one_write_stages_one_message_per_key(
    client: Client, queue: Queue[Any], staging: Staging
) -> None:
    rows = [NewMessage("a", 1, None, "k"), NewMessage("b", 2), NewMessage("c", 3, None, "k")]
    assert run(client, staging.write("a", rows)) == 2
    assert run(client, staging.publish({"a": 2})) == 2
    assert payloads(queue) == [1, 2]


def test_publish_of_many_keys_takes_batches(
    client: Client, queue: Queue[Any], staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging_module, "MAX_BATCH", 3)
    queue.push("there", key="k4")
    run(client, staging.write("a", [NewMessage(f"m{n}", n, None, f"k{n}") for n in range(8)]))
    assert run(client, staging.publish({"a": 8})) == 7
    assert sorted(map(str, payloads(queue))) == [*"0123567", "there"]


@pytest.mark.parametrize("places", [{"a": 1}, {"a": 3}, {"a": 2, "b": 1}, {"b": 1, "a": 2}])
def test_publish_with_a_missing_message_shows_nothing(
    client: Client, queue: Queue[Any], staging: Staging, places: dict[str, int]
) -> None:
    run(client, staging.write("a", [NewMessage("a", 1), NewMessage("b", 2)]))
    wrong, there = ("b", 0) if "b" in places else ("a", 2)
    text = f"{places[wrong]} messages were staged at {wrong}, but {there} are there"
    with pytest.raises(QueueError, match=text):
        run(client, staging.publish(places))
    assert payloads(queue) == []
    assert staged_count(client) == 2


def test_discard_deletes_only_messages_of_the_job(
    client: Client, queue: Queue[Any], staging: Staging
) -> None:
    queue.push("there")
    client.queue("q2").push("there too")
    jobs = ("jo", "job2", "jobA", "joc")
    other_jobs = [Staging(backend_of(queue).target, job) for job in jobs]
    other_jobs.append(Staging(backend_of(client.queue("q2")).target, "job"))
    for number, other in enumerate(other_jobs):
        run(client, other.write("a", [NewMessage(None, number)]))
    for place in ("a", "b", "z:~"):
        run(client, staging.write(place, [NewMessage(None, place)]))
    run(client, staging.discard())
    assert staged_count(client) == len(other_jobs)
    assert (payloads(queue), payloads(client.queue("q2"))) == (["there"], ["there too"])
    # Publishing no places shows nothing, and does not fail.
    run(client, staging.publish({}))


def requests_of(client: Client, plan: Plan[Any]) -> list[Any]:
    """Return the requests of a plan to its driver."""
    requests: list[Any] = []

    def noted() -> Any:
        answer = None
        while True:
            try:
                requests.append(plan.send(answer))
            except StopIteration as stop:
                return stop.value
            answer = yield requests[-1]

    run(client, noted())
    return requests


def count(client: Client, plan: Plan[Any], kind: type[Any]) -> int:
    """Return how many requests of a type a plan makes."""
    return sum(isinstance(each, kind) for each in requests_of(client, plan))


def test_publish_signals_only_if_it_shows_a_message(client: Client, staging: Staging) -> None:
    run(client, staging.write("a", [NewMessage("a", 1)]))
    assert count(client, staging.publish({"a": 1}), Signal) == 1
    assert count(client, staging.publish({}), Signal) == 0


def test_publish_costs_per_place_and_per_batch_of_keys(
    client: Client, staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging_module, "MAX_BATCH", 3)

    def commands(free: int, keyed: int) -> int:
        rows = [NewMessage(None, n, None, f"{free} {keyed} {n}") for n in range(keyed)]
        rows += [NewMessage(None, n) for n in range(free)]
        run(client, staging.write("a", rows))
        return count(client, staging.publish({"a": len(rows)}), Command)

    least = commands(1, 0)
    assert commands(50, 0) == least
    assert commands(50, 3) == least + 1
    assert commands(0, 7) == least + 3


def test_staging_fails_on_other_server_errors(staging: Staging) -> None:
    refused = InvalidMessage("payload: the server rejected it")
    runner = Runner([WriteFailure(1, None, refused)])
    with pytest.raises(InvalidMessage) as caught:
        runner.run(staging.write("a", [NewMessage("a", 1), NewMessage("b", 2)]))
    assert caught.value is refused


# ---- passing on


def test_pass_on(client: Client, queue: Queue[Any]) -> None:
    target = client.queue("target")
    queue.push_many(
        range(3), headers={"old": 1, "both": 1}, keys=["k0", "k1", None], ids=["m0", "m1", "m2"]
    )
    held = queue.reserve_many(3, timeout=0)
    assert len(held) == 3
    lost = held[2]
    client.database["pyqueue"].update_one({"_id": lost.id}, {"$set": {"token": "another's"}})
    fresh = [
        NewMessage(None, "a", {"both": 2, "new": 2}, "new key"),
        NewMessage(None, "b"),
        NewMessage(None, "c"),
    ]
    moves = list(zip(held, fresh, strict=True))
    outcomes = run(client, move_each(backend_of(queue).terms, backend_of(target).target, moves))
    assert [each for each, _ in outcomes] == held
    first, second = target.get("m0"), target.get("m1")
    assert first is not None
    assert second is not None
    headers = {"old": 1, "both": 2, "new": 2}
    assert (first.payload, first.headers, first.key) == ("a", headers, "new key")
    assert (second.payload, second.headers, second.key) == ("b", {"old": 1, "both": 1}, None)
    assert [each["last_key"] for each in stored(client, "target")] == ["k0", "k1"]
    assert queue.get("m0") is None
    (stays,) = stored(client, "q")
    assert stays["_id"] == lost.id
    with pytest.raises(LeaseLost):
        queue.commit(lost)
    assert Counter(payloads(target)) == Counter(["a", "b"])
