"""Any value as any argument: it works as documented, or an error names the argument.

A refused call writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta, timezone
from functools import partial
from typing import Any

import bson
import pytest
from bson.errors import BSONError
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from pyqueue import (
    AsyncClient,
    Backoff,
    Client,
    ConfigurationError,
    InvalidMessage,
    InvalidName,
    QueueError,
    Reservation,
)
from pyqueue.backends.options import Options
from pyqueue.documents import message_of
from pyqueue.payloads import OPTIONS
from pyqueue.where import le
from tests.contract.world import AnyQueue
from tests.hostile.conftest import Place
from tests.hostile.test_documents import message, record
from tests.hostile.values import INJECTED, ODD, Given, anything, bson_values

bounded = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
long = settings(
    max_examples=4_000,
    derandomize=False,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

Call = Callable[[AnyQueue, Any, Any], Any]

#: For each argument: its name in error texts, and a call with a queue, its held message and a
#: value. The queue also has messages to receive.
ARGUMENTS: dict[str, tuple[str, Call]] = {
    "push delay": ("delay", lambda q, h, v: q.push(1, delay=v)),
    "push at": ("at", lambda q, h, v: q.push(1, at=v)),
    "push key": ("key", lambda q, h, v: q.push(1, key=v)),
    "push replacing key": ("key", lambda q, h, v: q.push(1, key=v, on_duplicate="replace")),
    "push id": ("id", lambda q, h, v: q.push(1, id=v)),
    "push headers": ("headers", lambda q, h, v: q.push(1, headers=v)),
    "push header": ("headers", lambda q, h, v: q.push(1, headers={"a": v})),
    "push header name": ("headers", lambda q, h, v: q.push(1, headers=_named(v))),
    "push on_duplicate": ("on_duplicate", lambda q, h, v: q.push(1, on_duplicate=v)),
    "push_many delay": ("delay", lambda q, h, v: q.push_many([1, 2], delay=v)),
    "push_many keys": ("keys|key", lambda q, h, v: q.push_many([1, 2], keys=v)),
    "push_many key": ("key", lambda q, h, v: q.push_many([1, 2], keys=["a", v])),
    "push_many ids": ("ids|id", lambda q, h, v: q.push_many([1, 2], ids=v)),
    "push_many id": ("id", lambda q, h, v: q.push_many([1, 2], ids=[None, v])),
    "pop timeout": ("timeout", lambda q, h, v: q.pop(v)),
    "pop_many limit": ("limit", lambda q, h, v: q.pop_many(v, timeout=0)),
    "reserve timeout": ("timeout", lambda q, h, v: q.reserve(v)),
    "reserve lease": ("lease", lambda q, h, v: q.reserve(0, lease=v)),
    "reserve_many limit": ("limit", lambda q, h, v: q.reserve_many(v, timeout=0)),
    "commit": ("reservations", lambda q, h, v: q.commit(v)),
    "commit payload": ("payload", lambda q, h, v: q.commit(h, payload=v)),
    "rollback delay": ("delay", lambda q, h, v: q.rollback(h, delay=v)),
    "rollback error": ("error", lambda q, h, v: q.rollback(h, error=v)),
    "rollback counted": ("counted", lambda q, h, v: q.rollback(h, counted=v)),
    "extend": ("reservations", lambda q, h, v: q.extend(v)),
    "extend lease": ("lease", lambda q, h, v: q.extend(h, lease=v)),
    "release": ("reservations", lambda q, h, v: q.release(v)),
    "move": ("reservations", lambda q, h, v: q.move(v, to=f"{q.name}-to")),
    "move to": ("to|name", lambda q, h, v: q.move(h, to=v)),
    "move payload": ("payload", lambda q, h, v: q.move(h, to=f"{q.name}-to", payload=v)),
    "move headers": ("headers", lambda q, h, v: q.move(h, to=f"{q.name}-to", headers=v)),
    "move delay": ("delay", lambda q, h, v: q.move(h, to=f"{q.name}-to", delay=v)),
    "move at": ("at", lambda q, h, v: q.move(h, to=f"{q.name}-to", at=v)),
    "move key": ("key", lambda q, h, v: q.move(h, to=f"{q.name}-to", key=v)),
    "move update": ("update|payload", lambda q, h, v: q.move(h, to=f"{q.name}-to", update=v)),
    "move_many payload": ("payload", lambda q, h, v: q.move_many([(h, v)], to=f"{q.name}-to")),
    "bury error": ("error", lambda q, h, v: q.bury(h, error=v)),
    "progress": ("fraction", lambda q, h, v: q.progress(h, v)),
    "checkpoint": ("payload|state", lambda q, h, v: q.checkpoint(h, v)),
    "redrive limit": ("limit", lambda q, h, v: q.redrive(v)),
    "remove": ("id", lambda q, h, v: q.remove(v)),
    "get": ("id", lambda q, h, v: q.get(v)),
    "peek limit": ("limit", lambda q, h, v: q.peek(v)),
    "history limit": ("limit", lambda q, h, v: q.history(v)),
    "history since": ("since", lambda q, h, v: q.history(since=v)),
    "browse state": ("state", lambda q, h, v: q.browse(v)),
    "browse where": ("where", lambda q, h, v: q.browse(where=v)),
    "browse value": ("where", lambda q, h, v: q.browse(where={"payload.a": v})),
    "browse bound": ("where", lambda q, h, v: q.browse(where={"payload": le(v)})),
    "browse after": ("after", lambda q, h, v: q.browse(after=v)),
    "browse limit": ("limit", lambda q, h, v: q.browse(limit=v)),
    "browse budget": ("budget", lambda q, h, v: q.browse(budget=v)),
    "replay": ("id", lambda q, h, v: q.replay(v)),
}


def _named(value: Any) -> Any:
    try:
        return {value: 1}
    except TypeError:
        return value


def refused(error: QueueError, words: str, kinds: tuple[type[QueueError], ...]) -> None:
    """Check the type of an error, and that its text begins with the name of the argument."""
    assert isinstance(error, kinds), repr(error)
    assert isinstance(error, ValueError)
    assert str(error).split(":")[0].split(".")[0] in words.split("|"), str(error)


def refusal(call: Callable[[], Any]) -> QueueError | None:
    """Return the error that refuses a call, or None if it works. Raise any foreign error."""
    try:
        call()
    except QueueError as error:
        return error
    return None


#: The history of the queue to which the arguments are passed.
HISTORY = 60.0


def set_up(place: Place) -> tuple[AnyQueue, Reservation[Any]]:
    """Return a queue with ready messages and one held; a target and a dead-letter queue exist."""
    name, now = place.name(), datetime.now(UTC).replace(microsecond=0)
    queue = place.client.queue(name, history=HISTORY)
    options = Options(dead_letter=f"{name}.dead", history=HISTORY).shown(name)
    until = now + timedelta(hours=1)
    held = message(name, when=until, tries=1, token="t", owner="o", payload={"a": 1})
    place.raw.delete_many({"q": {"$nin": ["bystander"]}})
    place.raw.insert_many(
        [
            *(record(name, options=options), record(f"{name}.dead"), record(f"{name}-to")),
            *(message(name, payload="ready"), message(name, payload={"a": 1}), held),
        ]
    )
    reservation = message_of(held, held["payload"], now, lease=3600)
    assert isinstance(reservation, Reservation)
    return queue, reservation


def pass_it(place: Place, argument: str, value: Any) -> None:
    words, call = ARGUMENTS[argument]
    queue, held = set_up(place)
    touched = {queue.name, f"{queue.name}.dead", f"{queue.name}-to"}
    before = place.bytes()
    error = refusal(lambda: call(queue, held, value))
    after = place.bytes()
    if error is not None:
        refused(error, words, (ConfigurationError, InvalidMessage, InvalidName))
        assert after == before
    elif argument == "move to":
        touched.add(value)
    if error is None:
        assert outside(touched, after) == outside(touched, before)


def outside(queues: Iterable[str], documents: Iterable[bytes]) -> list[bytes]:
    """Return the documents of other queues. Not each value in them can be decoded."""
    marks = [bson.encode({"q": each})[4:-1] for each in queues]
    return [each for each in documents if not any(mark in bytes(each) for mark in marks)]


@pytest.fixture
def bystander(place: Place) -> Place:
    """A place with messages of a queue that no call names."""
    place.client.queue("bystander").push_many([1, {"a": 2}], keys=["a", None], headers={"a": "b"})
    return place


@settings(bounded, max_examples=50)
@given(st.sampled_from(sorted(ARGUMENTS)), anything())
@example("push key", Given("\ud800"))
@example("push id", Given("\ud800"))
@example("push header", Given("\ud800"))
@example("push header name", Given("\ud800"))
@example("get", Given("\ud800"))
@example("push delay", Given(10**400))
@example("extend lease", Given(-(10**6000)))
@example("peek limit", Given(10**30))
@example("progress", Given(10**6000))
@example("history since", Given(datetime.min.replace(tzinfo=timezone(timedelta(hours=14)))))
@example("history since", Given(datetime(3500, 1, 1, tzinfo=UTC)))
def test_any_argument_works_or_is_refused(bystander: Place, argument: str, given: Given) -> None:
    pass_it(bystander, argument, given.value)


@pytest.mark.slow
@long
@given(st.sampled_from(sorted(ARGUMENTS)), anything())
def test_any_argument_works_or_is_refused_at_length(
    bystander: Place, argument: str, given: Given
) -> None:
    pass_it(bystander, argument, given.value)


@pytest.mark.parametrize("value", INJECTED[:3], ids=repr)
def test_operators_are_values_in_every_argument(bystander: Place, value: Any) -> None:
    """An operator in the place of a value is refused, or stored as a plain value."""
    for argument in ARGUMENTS:
        pass_it(bystander, argument, value)


# ---- payloads


def as_stored(value: Any) -> Any:
    """Return a value as BSON stores it; raise the errors of bson."""
    return bson.decode(bson.encode({"a": value}, codec_options=OPTIONS), OPTIONS)["a"]


def same(one: Any, other: Any) -> bool:
    first, second = (bson.encode({"a": each}, codec_options=OPTIONS) for each in (one, other))
    return first == second


def push_it(place: Place, value: Any) -> None:
    queue = place.client.queue(place.name())
    error = refusal(lambda: queue.push(value))
    if error is not None:
        refused(error, "payload", (InvalidMessage,))
        with pytest.raises(InvalidMessage):
            queue.push_many([1, value])
        assert place.raw.count_documents({"q": queue.name, "record": {"$exists": False}}) == 0
        return
    try:
        expected = as_stored(value)
    except BSONError:  # bson writes values that it cannot read: buried, with the reason
        assert queue.reserve(0) is None
        dead_letter = {"q": f"{queue.name}.dead", "dead": {"$exists": True}}
        dead = place.raw.find_one(dead_letter, {"payload": 0})
        assert dead is not None
        assert dead["dead"]["reason"] == "invalid"
        return
    [held] = queue.reserve_many(1, timeout=0)
    assert same(held.payload, expected)
    queue.commit(held)
    assert queue.counts().total == 0


@bounded
@given(st.one_of(anything(), bson_values().map(Given)))
def test_payload_round_trips_or_is_refused(place: Place, given: Given) -> None:
    push_it(place, given.value)


@pytest.mark.slow
@long
@given(st.one_of(anything(), bson_values().map(Given)))
def test_payload_round_trips_or_is_refused_at_length(place: Place, given: Given) -> None:
    push_it(place, given.value)


# ---- names, options, clients


OPTIONS_OF_A_QUEUE = ("lease", "max_tries", "dead_letter", "history", "backoff", "poll")


@settings(bounded, max_examples=40)
@given(st.sampled_from(OPTIONS_OF_A_QUEUE), anything())
def test_any_queue_option_works_or_is_refused(place: Place, option: str, given: Given) -> None:
    value = given.value
    before = place.bytes()
    name = place.name()
    error = refusal(lambda: place.client.queue(name, **{option: value}))
    if error is not None:
        refused(error, f"{option}|name", (ConfigurationError, InvalidName))
        assert place.bytes() == before
        return
    queue: AnyQueue = place.client.queue(name, **{option: value})
    queue.push(1)
    held = queue.reserve(0)
    assert held is not None
    queue.rollback(held)


@bounded
@given(
    st.sampled_from(["base", "factor", "maximum", "jitter"]),
    st.one_of(anything(), st.floats(0, 10).map(Given), st.floats(min_value=0).map(Given)),
    st.integers(1, 10_000),
)
def test_any_backoff_waits_or_is_refused(field: str, given: Given, tries: int) -> None:
    client = Client("memory:")
    backoff = Backoff(**{field: given.value})
    error = refusal(lambda: client.queue("a", backoff=backoff))
    if error is not None:
        assert str(error).startswith(f"backoff.{field}: ")
    else:
        assert 0 <= backoff.delay(tries) <= 2 * 100 * 365 * 86400


@settings(bounded, max_examples=20)
@given(anything())
def test_any_queue_name_works_or_is_refused(place: Place, given: Given) -> None:
    value = given.value
    before = place.bytes()
    error = refusal(lambda: place.client.queue(value))
    if error is not None:
        refused(error, "name", (InvalidName,))
        assert place.bytes() == before
    else:
        queue: AnyQueue = place.client.queue(value)
        assert queue.push(1) is not None
        assert queue.pop(0) is not None


NAMESPACES = st.from_regex(
    r"[A-Za-z_][\w.\-]{0,9}", fullmatch=True, alphabet=st.characters(codec="ascii")
)


@settings(bounded, max_examples=12)
@given(st.one_of(anything(), NAMESPACES.map(Given)))
@example(Given("a."))
@example(Given("a..b"))
@example(Given("system.a"))
@example(Given("a\n"))
def test_any_namespace_works_or_is_refused(client: Client, given: Given) -> None:
    value, database = given.value, client.database
    client.queue("a").push(1, id="bystander")
    before = list(database["pyqueue"].find())
    error = refusal(lambda: Client(database, namespace=value))
    if error is not None:
        refused(error, "namespace", (InvalidName,))
        with pytest.raises(InvalidName):
            AsyncClient("memory:", namespace=value)
        return
    assume(value != "pyqueue")
    with Client(database, namespace=value, signals="none:") as other:
        other.queue("a").push(1)
        assert database[value].count_documents({"q": "a"}) == 2
        assert list(database["pyqueue"].find()) == before
        database.drop_collection(value)


@bounded
@given(st.sampled_from(["durability", "command_timeout"]), anything())
def test_any_client_option_works_or_is_refused(option: str, given: Given) -> None:
    for kind in (Client, AsyncClient):
        options: dict[str, Any] = {option: given.value}
        error = refusal(partial(kind, "memory:", **options))
        if error is not None:
            refused(error, option, (ConfigurationError,))


# ---- updates


FIELDS = st.one_of(
    st.sampled_from(
        [
            *("a", "a.b", "l.0", "$", "l.$", "l.$[]", "l.$[x]", "..", ".", "_id", "q", "a\0b"),
            *("\ud800", "__proto__"),
        ]
    ),
    st.text(min_size=1, max_size=4),
)


OPERATORS = ["$set", "$unset", "$inc", "$mul", "$min", "$max", "$push", "$pull", "$addToSet"]
EDITS = st.lists(
    st.tuples(st.sampled_from(OPERATORS), FIELDS, st.sampled_from([*ODD.values(), *INJECTED, 1])),
    max_size=2,
)


@settings(bounded, max_examples=25)
@given(EDITS)
def test_update_changes_only_the_payload(
    bystander: Place, edits: list[tuple[str, str, Any]]
) -> None:
    update: dict[str, Any] = {}
    for operator, field, value in edits:
        update.setdefault(operator, {})[field] = value
    queue, target = (bystander.client.queue(bystander.name()) for _ in range(2))
    queue.push({"a": {"b": 1}, "l": [1, 2]}, key="k", headers={"h": 1})
    target.push("there")
    held = queue.reserve(0)
    assert held is not None
    before = bystander.bytes()
    others = bystander.bytes(queue.name, target.name)
    error = refusal(lambda: queue.move(held, to=target, update=update))
    if error is not None:
        refused(error, "payload|update", (InvalidMessage, ConfigurationError))
        assert bystander.bytes() == before
    else:
        moved = bystander.raw.find_one({"_id": held.id}, {"payload": 0})
        assert moved is not None
        names = {"_id", "q", "when", "due", "tries", "pushed", "headers", "last_key", "trail"}
        assert set(moved) == names
        assert (moved["q"], moved["tries"], moved["headers"]) == (target.name, 0, {"h": 1})
        assert bystander.bytes(queue.name, target.name) == others
    bystander.raw.delete_many({"q": {"$in": [queue.name, target.name]}})
