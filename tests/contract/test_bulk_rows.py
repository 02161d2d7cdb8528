"""Rows of bulk writes: when they become ready, which queue they enter, how a taken key fails.

They run on a blocking client, as Spark's tasks do, over mongomock and a server.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import product
from typing import Any, Literal

import pytest
from bson import ObjectId

from pyqueue import (
    Client,
    ConfigurationError,
    DuplicateKey,
    LeaseLost,
    Message,
    Queue,
    QueueError,
)
from pyqueue.backends.bulk.epochs import EpochWrites
from pyqueue.backends.bulk.staging import Staging, append, place_of
from pyqueue.backends.options import NewMessage
from pyqueue.queue_base import backend_of
from pyqueue.requests import Delete, Plan, Request, Signal, Update
from pyqueue.runtime.connecting import runner_of
from tests.support.samples import sampled

#: No message is later than this because of the time that a test takes.
SLACK = timedelta(minutes=5)
HOUR = timedelta(hours=1)


@pytest.fixture
def client(blocking_client: Client) -> Client:
    """Return a client of an empty database."""
    return blocking_client


@pytest.fixture
def queue(client: Client) -> Queue[Any]:
    """Return an empty queue."""
    return client.queue("q")


def staging_of(queue: Queue[Any], on_duplicate: str = "ignore") -> Staging:
    """Return a staging job."""
    return Staging(backend_of(queue).target, "job", on_duplicate)


def run(client: Client, plan: Plan[Any]) -> Any:
    """Run a plan to its end."""
    return runner_of(client).run(plan)


def meddled(client: Client, plan: Plan[Any], at: type[Request[Any]] | int, what: Any) -> list[Any]:
    """Run a plan. Call ``what`` before one request: the first of a type, or the one at a position.

    Return all requests.
    """
    requests: list[Request[Any]] = []

    def one(request: Request[Any]) -> Plan[Any]:
        return (yield request)

    answer = None
    while True:
        try:
            request = plan.send(answer)
        except StopIteration:
            return requests
        if isinstance(at, int):
            now = len(requests) == at
        else:
            now = isinstance(request, at) and not any(isinstance(each, at) for each in requests)
        if now:
            what()
        requests.append(request)
        answer = run(client, one(request))


def signals(requests: list[Any]) -> dict[str, datetime | None]:
    """Return the signals among requests: the queues, and the instants."""
    return {each.queue: each.when for each in requests if isinstance(each, Signal)}


def nothing() -> None:
    pass


def messages(client: Client, queue: Queue[Any]) -> dict[Any, Message[Any]]:
    """Return the messages of a queue by payload, also those that are scheduled."""
    found = [queue.get(each["_id"]) for each in stored(client, queue.name)]
    return {each.payload: each for each in found if isinstance(each, Message)}


def stored(client: Client, *queues: str) -> list[dict[str, Any]]:
    """Return the documents of these queues, sorted by payload, without the records."""
    match = {"q": {"$in": list(queues)}, "record": {"$exists": False}}
    found = client.database["pyqueue"].find(match)
    return sorted(found, key=lambda each: str(each["payload"]))


def hidden(client: Client) -> int:
    """Return the number of staged messages."""
    count: int = client.database["pyqueue"].count_documents({"staged": {"$exists": True}})
    return count


def write(
    client: Client, queue: Queue[Any], rows: list[NewMessage], on_duplicate: str, staged: bool
) -> Any:
    """Write rows in one of the two ways."""
    if not staged:
        return run(client, append(backend_of(queue).target, rows, on_duplicate))
    staging = staging_of(queue, on_duplicate)
    return run(client, staging.publish({"x": run(client, staging.write("x", rows))}))


# ---- when


@pytest.mark.parametrize("staged", [True, False])
def test_rows_become_ready_at_their_instants(
    client: Client, queue: Queue[Any], staged: bool
) -> None:
    now = datetime.now(UTC)
    rows = [
        NewMessage(None, "at", None, None, None, now + HOUR),
        NewMessage(None, "delay", None, "k", 600),
        NewMessage(None, "past", None, None, None, now - HOUR),
        NewMessage(None, "plain"),
    ]
    assert write(client, queue, rows, "ignore", staged) == 4
    found = messages(client, queue)
    assert abs(found["at"].when - (now + HOUR)) < timedelta(milliseconds=1)
    assert abs(found["delay"].when - (now + timedelta(minutes=10))) < SLACK
    ready = sorted(each.payload for each in queue.reserve_many(10, timeout=0))
    assert ready == ["past", "plain"]
    assert all(each["due"] == each["when"] for each in stored(client, "q") if "token" not in each)


def test_shown_rows_are_not_older_than_their_appearance(client: Client, queue: Queue[Any]) -> None:
    """A consumer that has looked past the instant of the write would not find them."""
    staging = staging_of(queue)
    run(client, staging.write("x", [NewMessage(None, 1), NewMessage(None, 2, None, "k")]))
    past = datetime.now(UTC) - HOUR
    client.database["pyqueue"].update_many({"staged": True}, {"$set": {"when": past, "due": past}})
    run(client, staging.publish({"x": 2}))
    for each in queue.peek(2):
        assert each.when > past + timedelta(minutes=30)
    assert all(each["due"] == each["when"] for each in stored(client, "q"))


def test_append_signals_the_earliest_instant(client: Client, queue: Queue[Any]) -> None:
    now = datetime.now(UTC)
    rows = [
        NewMessage(None, 1, None, None, None, now + 2 * HOUR),
        NewMessage(None, 2, None, None, None, now + HOUR),
    ]
    requests = meddled(client, append(backend_of(queue).target, rows), Signal, nothing)
    when = signals(requests)["q"]
    assert when is not None
    assert abs(when - (now + HOUR)) < timedelta(milliseconds=1)


# ---- taken keys


@pytest.mark.parametrize("on_duplicate", ["ignore", "replace"])
@pytest.mark.parametrize("staged", [True, False])
def test_taken_key_does_as_in_a_push(
    client: Client, queue: Queue[Any], on_duplicate: Literal["ignore", "replace"], staged: bool
) -> None:
    now, other = datetime.now(UTC), client.queue("other")
    for each in (queue, other):
        each.push("old", key="k", headers={"h": "old"})
    rows = [
        NewMessage(None, "new", {"h": "new"}, "k", None, now + HOUR),
        NewMessage(None, "free", {"h": "new"}, "free", None, now + HOUR),
        NewMessage(None, "plain", {"h": "new"}, None, None, now + HOUR),
    ]
    write(client, queue, rows, on_duplicate, staged)
    payloads, keys = [each.payload for each in rows], [each.key for each in rows]
    headers = {"h": "new"}
    other.push_many(payloads, keys=keys, headers=headers, at=now + HOUR, on_duplicate=on_duplicate)

    def seen(queue: Queue[Any]) -> list[Any]:
        found = messages(client, queue).values()
        return [(each.payload, each.key, each.headers, each.state) for each in found]

    assert seen(queue) == seen(other)
    assert hidden(client) == 0


def test_replaced_message_is_lost_to_its_holder(client: Client, queue: Queue[Any]) -> None:
    """The message keeps its id, and is ready again."""
    id = queue.push("old", key="k", headers={"h": 1})
    held = queue.reserve(0)
    assert held is not None
    staging = staging_of(queue, "replace")
    counts = {"x": run(client, staging.write("x", [NewMessage(None, "new", None, "k")]))}
    assert [each["payload"] for each in stored(client, "q")] == ["old"]
    assert run(client, staging.publish(counts)) == 1
    with pytest.raises(LeaseLost):
        queue.commit(held)
    (message,) = queue.peek(2)
    assert (message.id, message.payload, message.headers) == (id, "new", {})
    assert (message.tries, message.state) == (0, "ready")
    assert hidden(client) == 0


def test_last_row_of_a_key_replaces_those_before(client: Client, queue: Queue[Any]) -> None:
    staging = staging_of(queue, "replace")
    rows = [NewMessage(None, 1, None, "k"), NewMessage(None, 2), NewMessage(None, 3, None, "k")]
    counts = {"x": run(client, staging.write("x", rows))}
    counts["y"] = run(client, staging.write("y", [NewMessage(None, 4, None, "k")]))
    assert counts == {"x": 2, "y": 1}
    run(client, staging.publish(counts))
    found = [(each["payload"], each.get("key")) for each in stored(client, "q")]
    assert found == [(2, None), (4, "k")]


@pytest.mark.parametrize("rows", [1, 2])
def test_row_enters_if_what_it_replaces_is_gone(
    client: Client, queue: Queue[Any], rows: int
) -> None:
    """The other message finishes after it has kept the row out."""
    queue.push("old", key="k")
    staging = staging_of(queue, "replace")
    messages = [NewMessage(None, "new", None, "k"), NewMessage(None, "plain")][:rows]
    counts = {"x": run(client, staging.write("x", messages))}
    meddled(client, staging.publish(counts), Delete, lambda: queue.pop(0))
    assert sorted(each["payload"] for each in stored(client, "q")) == ["new", "plain"][:rows]
    assert hidden(client) == 0


#: A row that replaces, and the messages after it. Before, "a" has the key "j" and "b" has "k".
REPLACED: dict[str, tuple[NewMessage, dict[str, tuple[str, str | None]]]] = {
    "id": (NewMessage("a", "new"), {"a": ("new", None), "b": ("b", "k")}),
    "id, free key": (NewMessage("a", "new", key="l"), {"a": ("new", "l"), "b": ("b", "k")}),
    "key before id": (NewMessage("a", "new", key="k"), {"a": ("a", "j"), "b": ("new", "k")}),
    "key": (NewMessage("c", "new", key="k"), {"a": ("a", "j"), "b": ("new", "k")}),
    "finished": (NewMessage("f", "new", key="l"), {"a": ("a", "j"), "b": ("b", "k")}),
    "finished, key": (NewMessage("f", "new", key="k"), {"a": ("a", "j"), "b": ("new", "k")}),
    "moved": (NewMessage("m", "new"), {"a": ("a", "j"), "b": ("b", "k")}),
    "new": (NewMessage("c", "new"), {"a": ("a", "j"), "b": ("b", "k"), "c": ("new", None)}),
}


@pytest.mark.parametrize("case", REPLACED)
def test_row_replaces_by_its_key_or_else_by_its_id(client: Client, case: str) -> None:
    """A message that has left the queue, or is in its history, stays unchanged."""
    queue, other = client.queue("q", history=60), client.queue("other")
    queue.push_many(["f", "m"], ids=["f", "m"])
    queue.pop(0)
    queue.move(*queue.reserve_many(1, timeout=0), to=other)
    queue.push_many(["a", "b"], ids=["a", "b"], keys=["j", "k"])
    elsewhere = stored(client, "other")
    row, live = REPLACED[case]
    for _ in range(2):
        plan = append(backend_of(queue).target, [row], "replace", by_id=True)
        assert run(client, plan) == 1
        assert {each.id: (each.payload, each.key) for each in queue.peek(9)} == live
    assert stored(client, "other") == elsewhere
    assert [each.id for each in queue.history()] == ["f"]


@pytest.mark.parametrize("on_duplicate", ["ignore", "replace", "error"])
@pytest.mark.parametrize("key", [None, "k"])
def test_id_of_another_queue_is_an_error(
    client: Client, queue: Queue[Any], on_duplicate: str, key: str | None
) -> None:
    client.queue("other").push("theirs", id="x")
    queue.push("old", key="k")
    rows = [NewMessage("x", "new", key=key), NewMessage("y", "plain")]
    with pytest.raises(DuplicateKey, match="never in queue 'q'") as caught:
        run(client, append(backend_of(queue).target, rows, on_duplicate, by_id=True))
    assert caught.value.ids == ["x"]
    assert [each["payload"] for each in stored(client, "other", "q")] == ["old", "plain", "theirs"]


@pytest.mark.parametrize("staged", [True, False])
def test_taken_key_is_an_error_if_asked(client: Client, queue: Queue[Any], staged: bool) -> None:
    """A staged write shows nothing. A direct one writes all other rows, as a push does."""
    queue.push("old", key="k")
    rows = [NewMessage(None, "new", None, "k"), NewMessage(None, "plain")]
    with pytest.raises(DuplicateKey, match=r"has messages with the keys \['k'\]") as caught:
        write(client, queue, rows, "error", staged)
    assert caught.value.keys == ["k"]
    seen = [each["payload"] for each in stored(client, "q")]
    assert seen == (["old"] if staged else ["old", "plain"])


def test_key_of_several_rows_is_an_error_if_asked(client: Client, queue: Queue[Any]) -> None:
    staging = staging_of(queue, "error")
    row = NewMessage(None, 1, None, "k")
    with pytest.raises(DuplicateKey, match="more than one row") as caught:
        run(client, staging.write("x", [row, NewMessage(None, 2), row]))
    assert caught.value.keys == ["k"]
    assert hidden(client) == 0
    counts = {place: run(client, staging.write(place, [row])) for place in ("x", "y")}
    with pytest.raises(DuplicateKey, match="the keys"):
        run(client, staging.publish(counts))
    assert stored(client, "q") == []
    run(client, staging.discard())
    assert hidden(client) == 0


def shown_by_another_process(client: Client, queue: Queue[Any], row: NewMessage) -> None:
    """Write a row by epoch, as Spark does: the driver has not used the queue before."""
    writes = EpochWrites(backend_of(queue).target, "s", "query")
    attempt = run(client, writes.join("job", 0))
    counts = {"x": run(client, writes.write(0, attempt, 1, "x", [row]))}
    with Client(client.database, signals="none:") as driver:
        run(driver, writes.commit("job", 0, attempt, counts))


#: How a row with a key enters a queue.
ENTERING: dict[str, Callable[[Client, Queue[Any], NewMessage], object]] = {
    "ignore": lambda client, queue, row: write(client, queue, [row], "ignore", staged=True),
    "error": lambda client, queue, row: write(client, queue, [row], "error", staged=True),
    "epoch": shown_by_another_process,
    "by id": lambda client, queue, row: run(
        client, append(backend_of(queue).target, [row], "error", by_id=True)
    ),
}


@pytest.mark.parametrize("way", ENTERING)
def test_row_takes_a_key_that_is_free_again(client: Client, way: str) -> None:
    """A finished message has kept it for the time of its ``unique_for``."""
    queue = client.queue("q", history=600)
    id = queue.push("old", key="k", unique_for=60)
    queue.pop(0)
    past = datetime.now(UTC) - timedelta(seconds=1)
    client.database["pyqueue"].update_one({"_id": id}, {"$set": {"free": past}})
    ENTERING[way](client, queue, NewMessage("new", "new", key="k"))
    assert [(each.id, each.key) for each in queue.peek(5)] == [("new", "k")]
    assert hidden(client) == 0


def test_key_taken_after_the_check_is_an_error(client: Client, queue: Queue[Any]) -> None:
    """Then the other rows are published, as after a push."""
    staging = staging_of(queue, "error")
    rows = [NewMessage(None, "new", None, "k"), NewMessage(None, "plain")]
    counts = {"x": run(client, staging.write("x", rows))}
    plan = staging.publish(counts)
    with pytest.raises(DuplicateKey) as caught:
        meddled(client, plan, Update, lambda: queue.push("old", key="k"))
    assert caught.value.keys == ["k"]
    assert [each["payload"] for each in stored(client, "q")] == ["old", "plain"]
    assert hidden(client) == 0


@pytest.mark.parametrize(
    ("on_duplicate", "way"), sampled(product(["ignore", "replace", "error"], ["staged", "epoch"]))
)
def test_row_deleted_while_it_is_shown_is_missed(
    client: Client, on_duplicate: str, way: str
) -> None:
    """Another job writes the same ids before each command in turn, and shows nothing."""
    errors = []
    for at in range(100):
        queue = client.queue(f"q{at}")
        rows = [NewMessage(f"{at}-1", 1), NewMessage(f"{at}-2", 2, None, "k")]
        one, two = staging_of(queue, on_duplicate), Staging(backend_of(queue).target, "two")
        epochs = EpochWrites(backend_of(queue).target, "s", "query")
        run(client, epochs.join("job", 0))
        counts = {"x": run(client, one.write("x", rows))}
        other = epochs.write(0, 1, 1, "y", rows) if way == "epoch" else two.write("y", rows)
        requests: list[Any] = []
        try:
            requests = meddled(client, one.publish(counts), at, partial(run, client, other))
        except QueueError as error:
            errors.append(str(error))
        else:
            assert {each.payload for each in queue.peek(9)} == {1, 2}, f"silent at {at}"
        if requests and len(requests) <= at:
            break
    assert any("nothing was published" in each for each in errors)
    assert any("2 of 2 staged messages were deleted" in each for each in errors)
    assert any("1 of 2 staged messages were deleted" in each for each in errors)


# ---- ids of messages that share documents


def write_by_id(client: Client, queue: Queue[Any], rows: list[NewMessage], way: str) -> Any:
    """Write rows in one of the three ways. Return how many were written."""
    if way == "append":
        return run(client, append(backend_of(queue).target, rows, by_id=True))
    if way == "staged":
        return write(client, queue, rows, "ignore", staged=True)
    writes = EpochWrites(backend_of(queue).target, "s", "query")
    attempt = run(client, writes.join("job", 0))
    counts = {"x": run(client, writes.write(0, attempt, 1, "x", rows))}
    return run(client, writes.commit("job", 0, attempt, counts))


@pytest.mark.parametrize("way", ["append", "staged", "epoch"])
def test_row_with_the_id_of_a_packed_message(client: Client, way: str) -> None:
    """It is the same message, also once that has left its pack. In another queue it is an error."""
    bucket, other = (client.queue(name, kind="bucket") for name in ("q", "other"))
    ids = [str(id) for id in bucket.push_many(range(3))]
    bucket.remove(ids[0])
    rows = [NewMessage(id, n) for n, id in enumerate([*ids, f"{ObjectId()}:0000"])]
    assert write_by_id(client, bucket, rows, way) == (4 if way == "append" else 1)
    assert sorted(each.payload for each in bucket.peek(9)) == [1, 2, 3]
    with pytest.raises(DuplicateKey, match="never in queue 'other'") as caught:
        write_by_id(client, other, rows[:3], way)
    assert caught.value.ids == ids
    assert (other.counts().total, hidden(client)) == (0, 0)
    bad = NewMessage(ids[1], "{", fault="no JSON")
    for queue in (other, bucket):
        write_by_id(client, queue, [bad._replace(queue=queue.name)], "append")
        assert queue.peek(9)[-1].id == f"{ids[1]}~bad~{queue.name}"


@pytest.mark.parametrize(
    ("on_duplicate", "staged"), [("error", True), ("error", False), ("replace", False)]
)
def test_packed_message_is_never_replaced(client: Client, on_duplicate: str, staged: bool) -> None:
    bucket = client.queue("q", kind="bucket")
    ids = [str(id) for id in bucket.push_many(range(2))]
    rows = [NewMessage("new", "n"), NewMessage(ids[0], "changed")]
    direct = append(backend_of(bucket).target, rows, on_duplicate, by_id=True)
    plan = staging_of(bucket, on_duplicate).write("x", rows) if staged else direct
    with pytest.raises(DuplicateKey) as caught:
        run(client, plan)
    assert caught.value.ids == ids[:1]
    assert ([each.payload for each in bucket.peek(9)], hidden(client)) == ([0, 1], 0)


# ---- several queues


def test_staged_rows_appear_in_their_queues(client: Client, queue: Queue[Any]) -> None:
    staging = staging_of(queue)
    rows = {
        place_of("x", "q"): [NewMessage(None, 1)],
        place_of("x", "other"): [NewMessage(None, 2), NewMessage(None, 3, None, "k")],
        "y": [NewMessage(None, 4)],
    }
    counts = {place: run(client, staging.write(place, some)) for place, some in rows.items()}
    assert stored(client, "q", "other") == []
    requests = meddled(client, staging.publish(counts), Signal, nothing)
    assert [each["payload"] for each in stored(client, "q")] == [1, 4]
    assert [each["payload"] for each in stored(client, "other")] == [2, 3]
    assert signals(requests).keys() == {"q", "other"}
    assert [each.name for each in client.queues()] == ["other", "q"]
    assert [each.payload for each in client.queue("other").pop_many(5, timeout=0)] == [2, 3]
    assert hidden(client) == 0


def test_row_missing_in_one_queue_shows_none_in_any(client: Client, queue: Queue[Any]) -> None:
    staging = staging_of(queue)
    row, places = NewMessage(None, 1), ("x", place_of("x", "other"))
    counts = {place: run(client, staging.write(place, [row])) for place in places}
    with pytest.raises(QueueError, match="2 messages were staged at x@other, but 1 are there"):
        run(client, staging.publish(counts | {"x@other": 2}))
    assert stored(client, "q", "other") == []
    run(client, staging.discard())
    assert hidden(client) == 0


def test_key_is_taken_in_its_own_queue_only(client: Client, queue: Queue[Any]) -> None:
    queue.push("old", key="k")
    staging = staging_of(queue, "error")
    place = place_of("x", "other")
    counts = {place: run(client, staging.write(place, [NewMessage(None, 1, None, "k")]))}
    assert run(client, staging.publish(counts)) == 1
    assert [each["payload"] for each in stored(client, "other")] == [1]


def test_place_of_a_queue_of_another_kind_is_refused(client: Client, queue: Queue[Any]) -> None:
    client.queue("other").push(1)
    match = {"_id": "~queue:other"}
    client.database["pyqueue"].update_one(match, {"$set": {"kind": "odd"}})
    with Client(client.database, signals="none:") as fresh, pytest.raises(ConfigurationError):
        run(fresh, staging_of(fresh.queue("q")).write("x@other", [NewMessage(None, 1)]))
    assert hidden(client) == 0
