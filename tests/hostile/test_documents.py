"""Foreign documents in the collection, of any content.

A receive delivers their neighbours and buries each invalid message, with the reason. No read
and no consumer fails on it. No receive finds a document whose ``when`` is not a date: it stays, and
``pyqueue doctor`` names it. Nothing waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import bson
import pytest
from bson import MaxKey, MinKey, ObjectId, Regex, Timestamp
from bson.datetime_ms import DatetimeMS
from bson.raw_bson import RawBSONDocument
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, model_validator
from pymongo.errors import PyMongoError
from typer.testing import CliRunner

from pyqueue import (
    AsyncClient,
    Client,
    ConfigurationError,
    InvalidMessage,
    Limit,
    Message,
    QueueError,
    Worker,
)
from pyqueue.backends.recovering import SCHEDULES
from pyqueue.backends.schedules.ticking import find_due
from pyqueue.cli import app, doctor, trace
from pyqueue.cli.common import as_json_text
from pyqueue.payloads import OPTIONS
from pyqueue.runtime.waiters import Waiters
from tests.contract.world import AnyQueue
from tests.hostile.conftest import Place
from tests.hostile.values import ODD, Given, odd
from tests.support.eventually import LONG

bounded = settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
long = settings(
    max_examples=2_000,
    derandomize=False,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

#: The fields that a message may have.
FIELDS = (
    *("q", "when", "due", "tries", "headers", "key", "last_key", "token", "owner", "reserved"),
    *("claim", "pushed", "error", "progress", "checkpoint", "trail", "dead", "processed"),
    *("outcome", "expires", "type", "payload", "record", "_id", "deliveries"),
    "attempts",
)
#: The ways to receive.
VERBS = ("reserve", "reserve_many", "pop", "pop_many")
#: The odd values that most cases try in every field, and those that one case tries: each message
#: takes several commands.
FEW = ["null", "text", "array of instants"]
MANY = [*FEW, "64 bits", "NaN", "operator", "before year 1"]


@pytest.fixture
def quick_rescans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rescan often, for tests whose messages are found by rescans only."""
    monkeypatch.setattr("pyqueue.backends.scan.BUSY_RESCAN_S", 0.2)
    monkeypatch.setattr("pyqueue.backends.scan.IDLE_RESCAN_S", 0.05)


by_rescans = pytest.mark.usefixtures("quick_rescans")


def message(queue: str, **fields: Any) -> dict[str, Any]:
    """Return a message as a push stores it, ready for five seconds, with these fields changed."""
    past = datetime.now(UTC).replace(microsecond=0) - timedelta(seconds=5)
    message = {"_id": ObjectId(), "q": queue, "when": past, "due": past, "pushed": past}
    return message | {"tries": 0, "payload": "poison"} | fields


def poisoned(queue: str, field: str, value: Any) -> dict[str, Any]:
    """Return a message with an odd field. An odd queue name stands beside the right one."""
    return message(queue, **{field: [queue, value] if field == "q" else value})


def put(place: Place, documents: list[dict[str, Any]]) -> int:
    """Insert the documents the server accepts, not every _id; return the number."""
    done = 0
    for document in documents:
        try:
            place.raw.insert_one(document)
        except PyMongoError:
            continue
        done += 1
    return done


def receive(queue: AnyQueue, verb: str) -> list[Message[Any]]:
    if verb.endswith("many"):
        return list(getattr(queue, verb)(10, timeout=0))
    found = getattr(queue, verb)(0)
    return [] if found is None else [found]


def drain(queue: AnyQueue, verb: str, most: int) -> list[Message[Any]]:
    """Receive and settle until nothing is ready, which may take until the next rescan."""
    received: list[Message[Any]] = []
    end = time.monotonic() + LONG
    while queue.counts().ready:
        found = receive(queue, verb)
        received += found
        if found and verb.startswith("reserve"):
            queue.commit(*found)
        assert len(received) <= most
        assert time.monotonic() < end, f"still ready messages after {received[-3:]}"
    return received


def read(queue: AnyQueue) -> None:
    """Read a queue in every way."""
    queue.peek(1000)
    queue.counts()
    queue.next_when()
    queue.history()
    for name in ("poison", "0" * 24):
        queue.get(name)


@by_rescans
@pytest.mark.parametrize("verb", ["reserve_many", "pop"])
def test_odd_values_in_every_field(place: Place, verb: str) -> None:
    receive_all(place, verb, MANY if (place.kind, verb) == ("blocking", "reserve_many") else FEW)


@pytest.mark.slow
@by_rescans
@pytest.mark.parametrize("verb", VERBS)
def test_every_odd_value_in_every_field(place: Place, verb: str) -> None:
    receive_all(place, verb, list(ODD))


def receive_all(place: Place, verb: str, kinds: list[str]) -> None:
    name = place.name()
    queue, dead = place.client.queue(name), place.client.queue(f"{name}.dead")
    documents = []
    for field in FIELDS:
        documents += [poisoned(name, field, ODD[kind]) for kind in kinds] + [
            message(name, payload="good")
        ]
    inserted = put(place, documents)
    assert inserted >= len(documents) - 12  # ids that the server refuses
    read(queue)
    received = drain(queue, verb, len(documents))
    assert sum(each.payload == "good" for each in received) == len(FIELDS)
    for each in received:
        check_sound(each, name)
    read(dead)
    no_record = {"record": {"$exists": False}}
    buried = list(place.raw.find({"q": dead.name, **no_record}, {"dead": 1, "error": 1}))
    fault = "the stored document has invalid fields: "
    for letter in buried:
        assert (letter["dead"]["reason"], letter["dead"]["from"]) == ("invalid", name)
        assert letter["error"]["message"].startswith(fault)
    hidden = list(place.raw.find({"q": name, **no_record}, {"when": 1, "_id": 1}))
    whens = [each.get("when") for each in hidden]
    assert not [each for each in whens if isinstance(each, datetime) and each.year < 8000]
    assert len(received) + len(buried) + len(hidden) == inserted
    assert len(buried) > inserted / 3
    # A dead message returns unless its id is invalid; by then it is valid unless it has no payload.
    named = [each for each in buried if isinstance(each["_id"], (ObjectId, str))]
    assert dead.redrive() == len(named)
    assert queue.counts().ready == len(named)
    assert len(drain(queue, "reserve_many", len(documents))) >= len(named) - 1
    place.raw.delete_many({})


EARLY = datetime(2026, 1, 1, tzinfo=UTC)
BESIDE = [
    *({"_id": 5}, {"_id": None}, {"due": datetime(7000, 1, 1, tzinfo=UTC)}, {"due": "x"}),
    {"when": [EARLY]},
]


@pytest.mark.parametrize("odd", BESIDE, ids=repr)
@pytest.mark.parametrize("verb", ["reserve", "reserve_many", "pop"])
def test_invalid_document_hides_no_neighbour(place: Place, odd: dict[str, Any], verb: str) -> None:
    """An odd document does not move the start of the scan past messages of the same instant."""
    name = place.name()
    past = datetime.now(UTC).replace(microsecond=0) - timedelta(seconds=5)
    same = {"when": past, "due": past}
    place.raw.insert_one(message(name, **same | {"_id": f" first of {name}"} | odd))
    place.raw.insert_many(
        [message(name, _id=id, payload="good", **same) for id in (f"id of {name}", ObjectId())]
    )
    queue = place.client.queue(name)
    found = [each.payload for _ in range(3) for each in receive(queue, verb)]
    assert found.count("good") == 2
    place.raw.delete_many({"q": {"$in": [name, f"{name}.dead"]}})


def check_sound(each: Message[Any], name: str) -> None:
    """Check that a received message has the documented types."""
    assert each.queue == name
    assert isinstance(each.id, (ObjectId, str))
    assert isinstance(each.when, datetime)
    assert isinstance(each.pushed, datetime)
    assert type(each.tries) is int
    assert isinstance(each.headers, dict)
    assert all(isinstance(value, (str, int, float)) for value in each.headers.values())
    for stop in each.trail:
        assert isinstance(stop["q"], str)
        assert isinstance(stop["at"], datetime)
    assert each.key is None or isinstance(each.key, str)
    for part in (each.error, each.progress, each.dead):
        assert part is None or isinstance(part, Mapping)


def documents() -> st.SearchStrategy[Given]:
    """Generate messages with some odd fields, and some fields missing."""
    changes = st.dictionaries(st.sampled_from(FIELDS), odd(), max_size=4)
    missing = st.sets(st.sampled_from(FIELDS), max_size=3)
    return st.builds(lambda change, gone: Given((change, gone)), changes, missing)


class Strict(BaseModel):
    a: int


def consume(
    place: Place, change: dict[str, Any], missing: set[str], verb: str, typed: bool
) -> None:
    name = place.name()
    queue: AnyQueue = place.client.queue(
        name, Strict if typed else None, history=60 if "many" in verb else None
    )
    place.client.queue(name).push({"a": 1})
    document = {key: each for key, each in message(name, **change).items() if key not in missing}
    if "q" in change:
        document["q"] = [name, change["q"]]
    try:
        place.raw.insert_one(document)
    except PyMongoError:
        assume(False)
    place.client.queue(name).push({"a": 2})
    read(queue)
    received = drain(queue, verb, 10)
    mine = [each.payload for each in received if each.id != document["_id"]]
    assert mine == ([Strict(a=1), Strict(a=2)] if typed else [{"a": 1}, {"a": 2}])
    read(queue)
    dead = place.client.queue(f"{name}.dead")
    read(dead)
    drain(dead, verb, 10)
    place.client.queues()
    with Client(place.raw.database, signals="none:") as client:
        assert doctor.check_documents(client).level in ("ok", "advice")


@by_rescans
@bounded
@given(documents(), st.sampled_from(sorted(VERBS)), st.booleans())
def test_any_document_between_messages(place: Place, given: Given, verb: str, typed: bool) -> None:
    change, missing = given.value
    consume(place, change, missing, verb, typed)
    place.raw.delete_many({})


@pytest.mark.slow
@by_rescans
@long
@given(documents(), st.sampled_from(sorted(VERBS)), st.booleans())
def test_any_document_between_messages_at_length(
    place: Place, given: Given, verb: str, typed: bool
) -> None:
    change, missing = given.value
    consume(place, change, missing, verb, typed)
    place.raw.delete_many({})


def test_dates_before_year_1_hold_up_no_schedule(place: Place) -> None:
    """There are more of them than one read returns."""
    odd = {"q": SCHEDULES, "when": DatetimeMS(-(1 << 62))}
    ready = {"_id": "~cron:ready", "q": SCHEDULES, "when": EARLY}
    place.raw.insert_many([*({"_id": f"~cron:{number}", **odd} for number in range(150)), ready])
    with Client(place.client.url, signals="none:") as client:
        ids, _ = client._connection.run(find_due(Waiters(SCHEDULES), set()))
    assert ids == ["~cron:ready"]
    place.raw.delete_many({"q": SCHEDULES})


# ---- messages that cannot be claimed or read


def unreadable(queue: str) -> list[RawBSONDocument]:
    """Return messages that Python cannot read: invalid UTF-8, and a UUID of five bytes."""
    text = message(queue, _id=f"a text of {queue}", payload="POISON")
    name = message(queue, payload={"POISON": 1})
    uuid = message(queue, payload=bson.Binary(b"five!", 5))
    spoilt = [bson.encode(each).replace(b"POISON", b"POISO\xff") for each in (text, name)]
    spoilt.append(bson.encode(uuid).replace(b"\x05five!", b"\x04five!"))
    return [RawBSONDocument(each) for each in spoilt]


@pytest.mark.parametrize("verb", ["reserve", "reserve_many", "pop_many"])
def test_unreadable_message_is_buried(place: Place, verb: str) -> None:
    name = place.name()
    queue = place.client.queue(name)
    queue.push("first")
    place.raw.insert_many(unreadable(name))
    queue.push("last")
    assert [each.payload for each in drain(queue, verb, 2)] == ["first", "last"]
    buried = list(place.raw.find({"q": f"{name}.dead", "dead": {"$exists": True}}, {"payload": 0}))
    assert len(buried) == 3
    for each in buried:
        assert each["dead"]["reason"] == "invalid"
        assert "decode" in each["error"]["message"]


def test_pop_of_an_unreadable_message_raises_once(place: Place) -> None:
    name = place.name()
    queue = place.client.queue(name)
    place.raw.insert_many(unreadable(name)[:1])
    queue.push("next")
    with pytest.raises(InvalidMessage, match="popped message cannot be decoded, and was deleted"):
        queue.pop(0)
    popped = queue.pop(0)
    assert popped is not None
    assert popped.payload == "next"


def test_message_too_large_to_claim_is_hidden(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """There is no room for a lease or a burial, so it is hidden, and doctor reports it."""
    name = place.name()
    queue = place.client.queue(name)
    whole = message(name, payload=b"")
    whole["payload"] = b"x" * (16 * 1024 * 1024 - len(bson.encode(whole)))
    place.raw.insert_one(whole)
    queue.push("next")
    caplog.set_level(logging.ERROR, "pyqueue")
    received = drain(queue, "reserve_many", 1)
    assert [each.payload for each in received] == ["next"]
    [record] = caplog.records
    assert "cannot be buried and is hidden" in record.getMessage()
    assert str(whole["_id"]) in record.getMessage()
    assert queue.counts().total == 0
    with Client(place.raw.database, signals="none:") as client:
        found = doctor.check_documents(client)
    assert found.level == "advice"
    assert str(whole["_id"]) in found.text
    place.raw.delete_many({})


def test_batch_refused_half_way_is_delivered(place: Place) -> None:
    """Messages before and after the invalid one are delivered, with one try counted."""
    name = place.name()
    queue = place.client.queue(name)
    for payload in range(6):
        queue.push(payload)
        when = datetime.now(UTC) - timedelta(seconds=1 - payload / 10)
        place.raw.insert_one(message(name, tries="many", when=when))
    received = queue.reserve_many(4, timeout=0)
    received += queue.reserve_many(100, timeout=0)
    assert sorted(each.payload for each in received) == list(range(6))
    assert {each.tries for each in received} == {1}
    assert queue.counts().total == 6
    assert place.client.queue(f"{name}.dead").counts().ready == 6


@pytest.mark.parametrize("verb", ["reserve", "reserve_many", "pop_many"])
def test_schema_validation_buries_nothing(place: Place, verb: str) -> None:
    """Here the collection has a rule that no message with a lease fits."""
    name = place.name()
    queue = place.client.queue(name, kind="standard")
    queue.push_many([1, 2])
    rule = {"q": {"$ne": name}}, {"token": {"$exists": False}}
    place.raw.database.command("collMod", "pyqueue", validator={"$or": list(rule)})
    try:
        before = place.bytes()
        with pytest.raises(QueueError, match="validation"):
            receive(queue, verb)
        assert place.bytes() == before
    finally:
        place.raw.database.command("collMod", "pyqueue", validator={})
    assert len(drain(queue, verb, 2)) == 2


@pytest.mark.parametrize("error", [KeyError("b"), ZeroDivisionError(), RecursionError("deep")])
def test_any_exception_of_a_model_buries_the_message(place: Place, error: Exception) -> None:
    class Raising(BaseModel):
        a: int

        @model_validator(mode="before")
        @classmethod
        def check(cls, value: Any) -> Any:
            if value == {"a": "poison"}:
                raise error
            return value

    name = place.name()
    place.client.queue(name).push_many([{"a": "poison"}, {"a": 1}])
    queue: AnyQueue = place.client.queue(name, Raising)
    assert queue.peek()[0].error["type"] == type(error).__name__
    assert [each.payload for each in drain(queue, "reserve", 2)] == [Raising(a=1)]
    [dead] = place.client.queue(f"{name}.dead").peek()
    assert dead.error is not None
    assert dead.error["type"] == type(error).__name__


# ---- messages that other messages wait for


#: Values of ``when`` other than a date in the usual range. GONE: the field is missing.
GONE = object()
NO_DATES = ("tomorrow", None, 0, [datetime(2999, 1, 1, tzinfo=UTC)], DatetimeMS(1 << 62), GONE)
#: Queues in which messages wait for each other: all have the same header, and the same group.
ONE_AT_A_TIME: dict[str, dict[str, Any]] = {
    "group": {"kind": "ordered"},
    "slot": {"limit": Limit(concurrency=1)},
    "slot of a group": {"kind": "ordered", "limit": Limit(concurrency=1)},
    "slot of a key": {"limit": Limit(concurrency=1, per="headers.key")},
    "slot and rate": {"limit": Limit(concurrency=1, rate=1e6, per="headers.key")},
}
#: With each value, a rescan has to find the next message.
each_no_date = pytest.mark.parametrize(
    "dates",
    [
        pytest.param(NO_DATES[:1], id="text"),
        pytest.param(NO_DATES[1:], id="rest", marks=pytest.mark.slow),
    ],
)
one_at_a_time = pytest.mark.parametrize("terms", ONE_AT_A_TIME.values(), ids=ONE_AT_A_TIME.keys())


def damage(place: Place, id: object, **fields: Any) -> None:
    """Write odd fields into a stored message."""
    put = {name: value for name, value in fields.items() if value is not GONE}
    gone = {name: "" for name, value in fields.items() if value is GONE}
    update = {"$set": put, "$unset": gone}
    changes = {name: each for name, each in update.items() if each}
    changed = place.raw.update_one({"_id": id}, changes)
    assert changed.modified_count == 1


def fill(place: Place, terms: dict[str, Any], numbers: int) -> tuple[AnyQueue, list[Any]]:
    """Return a queue and the ids of messages that wait for each other."""
    queue: AnyQueue = place.client.queue(place.name(), **terms)
    more = {"group": "a"} if "kind" in terms else {}
    ids = [queue.push(number, headers={"key": "a"}, **more) for number in range(numbers)]
    return queue, ids


def receive_one_by_one(queue: AnyQueue, number: int) -> list[Any]:
    """Receive and commit messages, and hold one at a time. Return the payloads."""
    found = []
    for _ in range(number):
        held = queue.reserve_many(10, timeout=LONG)
        assert len(held) == 1
        assert queue.reserve(0) is None
        found.append(held[0].payload)
        queue.commit(*held)
    assert queue.reserve(0) is None
    return found


@by_rescans
@one_at_a_time
@each_no_date
def test_held_message_without_a_date_stops_none(
    place: Place, terms: dict[str, Any], dates: tuple[object, ...]
) -> None:
    """The end of its lease is unknown, so no message waits for it. It may still end."""
    for when in dates:
        queue, _ = fill(place, terms, 3)
        held = queue.reserve(0)
        assert held is not None
        assert queue.reserve(0) is None  # the rest waits now
        damage(place, held.id, when=when)
        assert receive_one_by_one(queue, 2) == [1, 2]
        queue.commit(held)
        assert place.raw.count_documents({"q": queue.name, "payload": {"$exists": True}}) == 0


@by_rescans
@one_at_a_time
@each_no_date
@pytest.mark.parametrize("bad", [[0], [1, 2]], ids=["first", "next"])
def test_waiting_message_without_a_date_stops_none(
    place: Place, terms: dict[str, Any], bad: list[int], dates: tuple[object, ...]
) -> None:
    """It stays in its place, as in a queue whose messages do not wait for each other."""
    for when in dates:
        queue, ids = fill(place, terms, 4)
        good = [number for number in range(4) if number not in bad]
        held = [] if 0 in bad else queue.reserve_many(10, timeout=0)  # now the rest waits
        for number in bad:
            damage(place, ids[number], when=when)
        if held:
            queue.commit(*held)
            assert [each.payload for each in held] == [good.pop(0)]
        assert receive_one_by_one(queue, len(good)) == good
        left = place.raw.find({"q": queue.name, "payload": {"$exists": True}}).sort("payload", 1)
        assert [each["_id"] for each in left] == [ids[number] for number in bad]
        place.raw.delete_many({"q": queue.name})


@by_rescans
@pytest.mark.parametrize("field", ["slot", "lock", "limited", "group"])
def test_array_that_messages_wait_for_stops_none(place: Place, field: str) -> None:
    """An index has an array under each of its values, so it hides the real documents."""
    limit = Limit(concurrency=1, per="headers.key") if field in ("slot", "limited") else None
    queue, ids = fill(place, {"limit": limit} if limit else {"kind": "ordered"}, 3)
    held = queue.reserve_many(10, timeout=0)
    assert len(held) == 1
    queue.reserve(0)  # now the rest waits
    id = held[0].id if field in ("slot", "lock") else ids[1]
    stored = place.raw.find_one({"_id": id})
    assert stored is not None
    damage(place, id, **{field: [stored[field]]})
    if field in ("limited", "group"):
        queue.commit(*held)
    for payload in (1, 2) if field in ("slot", "lock") else (2,):
        received = queue.reserve(LONG)
        assert received is not None
        assert received.payload == payload
        queue.commit(received)


@pytest.mark.parametrize("per", [None, "headers.key"], ids=["queue", "key"])
@pytest.mark.parametrize("field", ["at", "tokens"])
def test_odd_bucket_of_a_rate_stops_none(place: Place, field: str, per: str | None) -> None:
    # The server deletes a full bucket; this one is full again after minutes.
    queue, _ = fill(place, {"limit": Limit(rate=8, burst=8, period=3600, per=per)}, 8)
    assert queue.reserve(LONG) is not None
    bucket = {"_id": {"$regex": f"^~limit:{queue.name}~"}}
    for number, value in enumerate((None, "text", [1], MaxKey(), {}, GONE), 1):
        found = place.raw.find_one(bucket)
        assert found is not None
        damage(place, found["_id"], **{field: value})
        held = queue.reserve(LONG)
        assert held is not None
        assert held.payload == number
        queue.commit(held)


# ---- records


def record(queue: str, **fields: Any) -> dict[str, Any]:
    """Return the record of a queue as this release stores it, with these fields changed."""
    known = {"_id": f"~queue:{queue}", "q": queue, "when": datetime.now(UTC), "record": True}
    return known | {"kind": "standard", "v": 1} | fields


RECORDS = {
    "options": ["null", "operator", "document"],
    "paused": ["null", "bool", "NaN", "text", "empty array", "least"],
    "when": ["null", "text", "array of instants", "before year 1", "year 8500", "most"],
    "kind": ["null", "bool", "operator"],
    "v": ["null", "float", "text", "64 bits", "array", "negative"],
    "key": ["text", "operator"],
    "token": ["null", "text", "operator"],
    "payload": ["text"],
    "processed": ["now"],
}


@pytest.mark.parametrize("field", RECORDS)
def test_odd_records_work_or_are_refused(place: Place, field: str) -> None:
    """An unknown record raises ConfigurationError and stays unchanged; any other record works."""
    for kind in RECORDS[field]:
        name = place.name()
        place.raw.insert_one(record(name, **{field: ODD[kind]}))
        queue = place.client.queue(name)
        if field in ("kind", "v") and kind != "negative":
            before = place.bytes()
            calls: list[partial[Any]] = [partial(queue.push, 1), partial(queue.reserve, 0)]
            for call in (*calls, partial(queue.pop_many, 2, timeout=0)):
                with pytest.raises(ConfigurationError, match=name):
                    call()
            assert place.bytes() == before
            continue
        assert queue.push(1, key="k") is not None
        assert queue.paused() is bool(ODD[kind]) or field != "paused"
        queue.resume()
        read(queue)
        assert [each.payload for each in queue.peek()] == [1]
        received = queue.reserve(0) if field != "paused" else queue.reserve(10)
        assert received is not None
        assert (received.payload, received.key) == (1, "k")
        queue.commit(received)
        assert queue.counts().total == 0
        queue.push(2)
        assert queue.purge() == 1
        assert place.raw.count_documents({"_id": f"~queue:{name}"}) == 1


# ---- workers


def poison(name: str) -> list[dict[str, Any]]:
    return [
        message(name, tries="x"),
        message(name, trail="x"),
        message(name, headers=["x"]),
        message(name, due=None),
        message(name, _id={"a": 1}),
        message(name, _id=7),
        message(name, error="x"),
        message(name, processed=datetime(2026, 1, 1, tzinfo=UTC)),
        {key: value for key, value in message(name).items() if key != "payload"},
    ]


@pytest.mark.parametrize("kind", ["blocking", "async"])
def test_worker_outlives_invalid_messages(url: str, kind: str) -> None:
    """It handles the valid messages, buries the rest, and ends when the queue is empty."""
    seen: list[Any] = []

    def handle(payload: Any) -> None:
        seen.append(payload)

    with Client(url) as client:
        jobs = client.queue("jobs")
        for place, bad in enumerate(poison("jobs")):
            client.database["pyqueue"].insert_one(bad)
            jobs.push(place)
        if kind == "blocking":
            Worker(client).on("jobs", handle).run(until_empty=True)
        else:

            async def main() -> None:
                async with AsyncClient(url) as other:
                    await Worker(other).on("jobs", handle).run(until_empty=True)

            asyncio.run(main())
        assert sorted(seen) == list(range(len(poison("jobs"))))
        dead = client.queue("jobs.dead")
        assert dead.counts().ready == len(poison("jobs"))
        # The dead-letter queue can be worked on, too.
        Worker(client).on("jobs.dead", seen.append).run(until_empty=True)
        assert seen[len(poison("jobs")) :].count("poison") == len(poison("jobs")) - 1


# ---- the command line


def test_trace_shows_any_document(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    now = datetime.now(UTC)
    fields = [field for field in FIELDS if field != "_id"]  # the document was found by its id
    for field in fields:
        for value in ODD.values():
            encoded = bson.encode(message("a", **{field: value}), codec_options=OPTIONS)
            document = bson.decode(encoded, OPTIONS)
            shown = trace.to_json(document, now, 20)
            trace.show(shown)
            assert as_json_text(shown)
        bare = {key: value for key, value in message("a").items() if key != field}
        trace.show(trace.to_json(bare, now, None))
    assert capsys.readouterr().out.count("message    ") == len(fields) * (len(ODD) + 1)


def test_trace_names_the_invalid_field(url: str) -> None:
    with Client(url) as client:
        client.queue("a").push(1)
        client.database["pyqueue"].insert_one(message("a", _id="bad", trail="x", when="tomorrow"))
    result = CliRunner(env={"PYQUEUE_URL": url}).invoke(app, ["trace", "bad"])
    assert 'wrong      trail is "x"' in result.stdout
    assert 'wrong      when is "tomorrow"' in result.stdout


def test_doctor_names_messages_no_receive_finds(url: str) -> None:
    with Client(url) as client:
        assert doctor.check_documents(client).level == "ok"
        client.queue("a").push_many(range(5))
        client.queue("a").push("later", delay=1000)
        client.queue("a", history=60).pop(0)
        held = client.queue("a").reserve(0)
        assert held is not None
        with client.queue("a").claim("group", limit=1):  # leaves a document of the group
            pass
        assert doctor.check_documents(client).level == "ok"
        collection = client.database["pyqueue"]
        far = [datetime(8500, 1, 1, tzinfo=UTC), datetime.max.replace(tzinfo=UTC)]
        whens: list[Any] = [
            *(None, "tomorrow", 5, {"$date": 5}, True, [], MinKey(), Timestamp(1, 1), Regex(".")),
            *(MaxKey(), DatetimeMS(1 << 60), *far),
        ]
        for place, when in enumerate(whens):
            collection.insert_one(message("a", _id=f"odd-{place}", when=when))
            found = doctor.check_documents(client)
            assert found.level == "advice"
            assert f"of queue 'a': odd-{place}" in found.text
            collection.delete_one({"_id": f"odd-{place}"})
        names: list[Any] = [None, 5, {"a": 1}, b"a", MaxKey()]
        for place, name in enumerate(names):
            collection.insert_one(message("a", _id=f"odd-{place}") | {"q": name})
            found = doctor.check_documents(client)
            assert f"of no queue: odd-{place}" in found.text
            collection.delete_one({"_id": f"odd-{place}"})
        collection.insert_many([message("b", _id=f"odd-{place}", when="x") for place in range(5)])
        assert "of queue 'b': odd-0, odd-1, odd-2 and more" in doctor.check_documents(client).text
        client.queue("a").commit(held)


def test_invalid_options_in_a_record_are_skipped(url: str) -> None:
    with Client(url) as client:
        client.queue("a").push(1)
        some = {"lease": "x"}, {"max_tries": -1}, {"dead_letter": "no name"}, {"history": [1]}
        for options in (*some, [1], "x", None):
            change = {"$set": {"options": options}}
            client.database["pyqueue"].update_one({"_id": "~queue:a"}, change)
            result = CliRunner(env={"PYQUEUE_URL": url}).invoke(app, ["redrive", "a"])
            assert (result.exit_code, result.stdout) == (0, "0\n")
            assert ("are ignored" in result.stderr) == isinstance(options, dict)
