"""The record of a queue: options all users must agree on, and fields shown to people."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest

from pyqueue import Client, ConfigurationError, Limit
from pyqueue.backends import all_queues, kind, namespace, reading, reshaping
from pyqueue.backends.options import Options
from pyqueue.backends.queue_plans import plans_of
from pyqueue.backends.standard import Standard
from pyqueue.backends.streams import log
from pyqueue.requests import EnsureQueue, Plan, Update
from pyqueue.runtime import known_queues
from pyqueue.runtime.connecting import runner_of
from pyqueue.runtime.waiters import Waiters
from tests.plans.runner import message, record_of
from tests.plans.steps import Steps, at_each_command, lasting


class Shaped(Standard):
    """A kind with two options on which all users of a queue must agree."""

    name = "shaped"
    shape: Mapping[str, object] = {"on_failure": "block", "limit": None}


@pytest.fixture(autouse=True)
def shaped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kind._kinds, "shaped", Shaped())


def push(client: Client, **shape: object) -> None:
    """Push to queue "a" of the kind with a shape."""
    plans = plans_of("a", Options(dead_letter="a.dead", shape=shape), kind="shaped")
    runner_of(client).run(plans.push([1]))


# ---- the shape


def test_shape_is_stored_with_defaults_and_a_version(client: Client) -> None:
    push(client, on_failure="skip")
    assert record_of(client)["shape"] == {"on_failure": "skip", "limit": None}
    assert record_of(client)["v"] == 2 == namespace.LATEST_VERSION


def test_shape_that_is_not_given_comes_from_the_record(client: Client) -> None:
    push(client, on_failure="skip")
    before = record_of(client)
    push(client)
    push(client, on_failure="skip")
    assert record_of(client) == before


@pytest.mark.parametrize("lifetime", [0.0, 3600.0])
def test_different_shape_is_refused(
    client: Client, monkeypatch: pytest.MonkeyPatch, lifetime: float
) -> None:
    """Also if another object of this client has just read the record."""
    monkeypatch.setattr(known_queues, "_LIFETIME_S", lifetime)
    push(client, on_failure="skip")
    before = client.queues()
    with pytest.raises(ConfigurationError, match=r"on_failure='skip'.*on_failure='block'"):
        push(client, on_failure="block")
    assert client.queues() == before


def test_producer_follows_a_reshape_within_5_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program reshapes a bucket. A queue without such options is read more rarely."""
    now = 1000.0
    monkeypatch.setattr(known_queues, "time", SimpleNamespace(monotonic=lambda: now))
    with Client("memory:") as client:
        bucket, plain = (
            client.queue("a", kind="bucket", pack=4),
            client.queue("plain", kind="standard"),
        )
        assert plain.push(1)
        assert [int(str(id)[-4:]) for id in bucket.push_many([1] * 4)] == [0, 1, 2, 3]
        put = {"$set": {"shape.pack": 2}}
        client.database["pyqueue"].update_one({"_id": "~queue:a"}, put)
        now += 5
        assert [int(str(id)[-4:]) for id in bucket.push_many([1] * 4)] == [0, 1, 0, 1]
        known = runner_of(client).open().known
        assert known.kind_of(EnsureQueue("plain", "standard")) == "standard"
        now += 25
        assert known.kind_of(EnsureQueue("plain", "standard")) is None


def test_shape_survives_a_deletion(client: Client) -> None:
    push(client, on_failure="skip")
    client.delete_queue("a", force=True)
    with pytest.raises(ConfigurationError, match="on_failure"):
        push(client, on_failure="block")
    push(client)
    assert record_of(client)["shape"]["on_failure"] == "skip"


def test_kind_without_a_shape_refuses_one_and_stores_none(client: Client) -> None:
    client.queue("a").push(1)
    assert "shape" not in record_of(client)
    assert record_of(client)["v"] == 1
    with pytest.raises(ConfigurationError, match="on_failure"):
        plans_of("a", Options(shape={"on_failure": "skip"}))


# ---- the records of deleted queues


def use(kind: str, by: str) -> Plan[str]:
    """Use queue "a" as one of a kind. Return the kind that it has."""
    record = yield from namespace.read_or_create_record(EnsureQueue("a", kind), by=by)
    return record.kind


def receive() -> Plan[list[Any]]:
    """Wait for a message of a bucket."""
    plans = plans_of("a", Options(dead_letter="a.dead"), kind="bucket", owner="carol")
    return plans.receive(Waiters("a"), 1, timeout=None)


def made(kind: str = "bucket") -> Steps:
    """Return a store with a queue."""
    steps = lasting()
    steps.run(use(kind, "alice"))
    return steps


def deleted(after_s: float) -> Steps:
    """Return a store with a bucket that was deleted so long ago."""
    steps = made()
    steps.run(all_queues.delete_queue("a", False))
    steps.seconds = after_s
    return steps


@pytest.mark.parametrize("after_s", [119, 120])
@pytest.mark.parametrize("left", [False, True])
def test_name_of_a_deleted_queue_gets_another_kind(after_s: int, left: bool) -> None:
    """After two minutes, unless a deletion that broke off left messages."""
    steps = deleted(after_s)
    if left:
        steps.collection.insert_one(message("m"))
    before = record_of(steps)
    if after_s >= 120 and not left:
        assert steps.run(namespace.kind_of("a")) is None
        steps.run(namespace.ensure("a", kind.lookup("standard"), Options()))
        assert (record_of(steps)["kind"], record_of(steps)["q"]) == ("standard", "a")
        assert not {"deleted", "expires", "shape"} & record_of(steps).keys()
        return
    text = r"'bucket', made by alice at \d{4}-.* UTC, deleted .*'standard'"
    with pytest.raises(ConfigurationError, match=text):
        steps.run(namespace.ensure("a", kind.lookup("standard"), Options()))
    assert record_of(steps) == before, "another kind does not make it live again"
    assert steps.run(use("bucket", "bob")) == "bucket"
    assert record_of(steps)["made"]["by"] == "bob"
    assert record_of(steps)["q"] == "a"


def test_consumer_that_waits_keeps_its_queue() -> None:
    steps = made()
    running = steps.steps(receive())
    for _ in range(20):
        next(running)
    steps.run(all_queues.delete_queue("a", False))
    while "deleted" in record_of(steps):
        next(running)
    assert record_of(steps)["made"]["by"] == "carol"
    # It is suspended. The queue is deleted again, and made with another kind.
    steps.run(all_queues.delete_queue("a", False))
    steps.seconds += 120
    steps.run(use("standard", "bob"))
    with pytest.raises(ConfigurationError, match=r"'standard', made by bob at .*'bucket'"):
        list(islice(running, 100))


def test_name_of_a_deleted_stream_stays_taken() -> None:
    """Its positions continue if it is used again."""
    steps = made("stream")
    steps.run(all_queues.bury_record("a"))
    steps.seconds = 120
    assert steps.run(use("standard", "bob")) == "stream"


@pytest.mark.parametrize("quick", ["standard", "bucket", "waits", "deletes"])
@pytest.mark.parametrize("dies", [False, True])
def test_race_for_the_name_of_a_deleted_queue(quick: str, dies: bool) -> None:
    """One program makes it as a queue with priorities, another one comes before each command."""
    use_it = partial(use, "priority", "alice")
    for steps, running in at_each_command(partial(deleted, 120), use_it, least=2):
        if quick == "deletes":
            steps.run(all_queues.delete_queue("a", False))
        elif quick == "waits":
            with suppress(ConfigurationError):
                waiting = steps.steps(receive())
                while "deleted" in record_of(steps):
                    next(waiting)
        else:
            seen = steps.run(use(quick, "bob"))
            assert record_of(steps)["kind"] == seen
        if dies:
            running.close()
        else:
            list(running)
        if quick in ("standard", "bucket"):
            assert record_of(steps)["kind"] == seen, "the kind that a program received stays"
        steps.seconds += 120 if quick == "deletes" else 0
        final = steps.run(use("ordered", "dave"))
        assert (final, "deleted" in record_of(steps)) == (record_of(steps)["kind"], False)


# ---- queues that are known by their names only


def moved_in(**fields: object) -> Steps:
    """Return a store with a queue that was made by its name, and a message that was moved to it."""
    steps = lasting()
    steps.run(namespace.target("a"))
    steps.collection.insert_one(message("m", **fields))
    return steps


def consume(kind: str, **shape: object) -> Plan[list[Any]]:
    """Receive once with an object that names a kind."""
    plans = plans_of("a", Options(dead_letter="a.dead", shape=shape), kind=kind, owner="carol")
    return plans.receive(Waiters("a"), 1, timeout=0)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *(("standard", {}), ("priority", {}), ("priority", {"strict": True})),
        *(("ordered", {"on_failure": "skip"}), ("bucket", {"pack": 5})),
    ],
)
@pytest.mark.parametrize("priority", [None, 7])
def test_first_program_names_the_kind(
    name: str, shape: Mapping[str, object], priority: int | None
) -> None:
    """It receives messages moved there before; a message keeps a priority from elsewhere."""
    steps = moved_in(**({} if priority is None else {"priority": priority}))
    assert (record_of(steps)["kind"], record_of(steps)["open"]) == ("standard", True)
    found = steps.run(namespace.target("a", [7]))
    steps.run(namespace.ensure("a", found.kind, found.options))
    assert record_of(steps)["open"], "another move leaves it open"
    assert [each.id for each in steps.run(consume(name, **shape))] == ["m"]
    record = record_of(steps)
    assert (record["kind"], "open" in record) == (name, False)
    assert record.get("shape", {}) == {**kind.lookup(name).shape, **shape}
    assert record["v"] == (2 if record.get("shape") else 1)
    assert steps.run(namespace.target("a")).kind.name == name
    other = "priority" if name != "priority" else "bucket"
    with pytest.raises(ConfigurationError, match=f"is of kind '{name}'.* not '{other}'"):
        steps.run(consume(other))


def test_kind_is_named_by_any_operation() -> None:
    steps = moved_in()
    steps.run(plans_of("a", Options()).purge())
    assert record_of(steps)["open"], "a standard queue need not name its kind for it"
    steps.run(plans_of("a", Options(), kind="bucket").purge())
    assert record_of(steps)["kind"] == "bucket"
    assert [each.majority for each in steps.commands if isinstance(each, Update)][:1] == [True]


def test_stream_never_takes_an_open_name() -> None:
    steps = moved_in()
    before = record_of(steps)
    with pytest.raises(ConfigurationError, match=r"is a queue .*delete_queue\(\)"):
        steps.run(log.ensure("a", {}))
    assert record_of(steps) == before


def test_limit_of_an_open_queue_must_suit_the_kind() -> None:
    steps = moved_in()
    limit = Limit(concurrency=2).stored()
    steps.run(reshaping.reshape("a", {"limit": limit}, collection="pyqueue", by="bob"))
    before = record_of(steps)
    with pytest.raises(ConfigurationError, match=r"limit\.concurrency: .*'bucket'"):
        steps.run(consume("bucket"))
    assert record_of(steps) == before
    assert steps.run(consume("priority"))
    assert record_of(steps)["shape"] == {"strict": False, "limit": limit}


@pytest.mark.parametrize("quick", ["standard", "bucket", "moves", "reshapes", "deletes"])
@pytest.mark.parametrize("dies", [False, True])
def test_race_to_name_the_kind(quick: str, dies: bool) -> None:
    """One program names "priority", another one comes before each command."""
    name = partial(consume, "priority", strict=True)
    for steps, running in at_each_command(partial(moved_in, priority=7), name, least=5):
        seen = ""
        if quick == "moves":
            steps.run(namespace.target("a", [3]))
        elif quick == "reshapes":
            limit = {"limit": Limit(rate=5).stored()}
            steps.run(reshaping.reshape("a", limit, collection="pyqueue", by="bob"))
        elif quick == "deletes":
            steps.run(all_queues.delete_queue("a", True))
        else:
            with suppress(ConfigurationError):
                steps.run(namespace.ensure("a", kind.lookup(quick), Options()))
                seen = quick
        if dies:
            running.close()
        else:
            with suppress(ConfigurationError):
                list(running)
        record = record_of(steps)
        assert record["kind"] == (seen or record["kind"]), "the kind that a program received stays"
        if quick == "reshapes":
            assert record["shape"]["limit"] == Limit(rate=5).stored()
        if quick in ("moves", "reshapes") and not dies:
            assert (record["kind"], record["shape"]["strict"]) == ("priority", True)
        if dies and record["kind"] == "priority" and quick != "deletes":
            assert record["levels"] == list(range(10)), "its message is found"


def test_process_names_the_kind_of_a_queue_that_it_knows(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that names the kind reads an open record again at once, by name after 5 s."""
    monkeypatch.setattr(known_queues, "_LIFETIME_S", 3600.0)
    known, runner = known_queues.KnownQueues("pyqueue"), runner_of(client)
    for request, is_open in [
        (EnsureQueue("a", "standard", guessed=True), True),
        (EnsureQueue("a", "bucket"), False),
    ]:
        runner.run(known._ensure_each([request]))
        assert ("open" in record_of(client)) is is_open
    known._records["b"] = namespace.QueueRecord("standard", {}, open=True), time.monotonic()
    by_name = EnsureQueue("b", "standard", guessed=True)
    assert (known.kind_of(by_name), known.kind_of(EnsureQueue("b", "standard"))) == (
        "standard",
        None,
    )
    monkeypatch.setattr(known_queues, "_SHAPED_LIFETIME_S", 0.0)
    assert known.kind_of(by_name) is None


# ---- the options


def test_other_options_do_not_rewrite_the_record(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """A producer sets nothing, and two consumers differ: each writes once and warns once."""
    caplog.set_level(logging.WARNING, "pyqueue")
    producer = client.queue("a")
    consumers = [client.queue("a", lease=5, history=60), client.queue("a", lease=7)]
    written = []
    for _ in range(5):
        producer.push(1)
        for consumer in consumers:
            consumer.pop(0)
            written.append(record_of(client)["options"])
    assert written[0] == {"lease": 5.0, "history": 60.0}
    assert written[1:] == [{"lease": 7.0, "history": 60.0}] * 9
    assert [each.getMessage() for each in caplog.records] == [
        "queue 'a' is used with different options than before: lease=7.0 (before: 5.0)"
    ]


def test_default_options_are_not_stored(client: Client) -> None:
    client.queue("a", lease=60, max_tries=20, dead_letter="a.dead").push(1)
    assert record_of(client)["options"] == {}
    shown = runner_of(client).run(reading.options_of("a"))
    assert shown == {"lease": 60, "max_tries": 20, "dead_letter": "a.dead", "history": None}


def test_index_may_be_added_while_more_are_made(client: Client) -> None:
    """After a fail-over a client makes its indexes, and other calls continue."""
    making = runner_of(client).open().known.make_indexes()
    next(making)
    client.queue("a", kind="priority").push(1)
    assert len(list(making)) > 0
