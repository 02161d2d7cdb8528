"""Results and errors of handlers, and the fate of the message."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from bson import Decimal128
from pydantic import BaseModel

from pyqueue import (
    AsyncQueue,
    Backoff,
    ConfigurationError,
    Delivery,
    Drop,
    JobFailed,
    LeaseLost,
    Many,
    Pipeline,
    Push,
    QueueError,
    Reject,
    RetryLater,
    To,
    Worker,
)
from tests.pipeline.place import Build, Gate, Place, counted, fail_first
from tests.support.eventually import eventually

NOW = Backoff(base=0)


def test_message_passes_through_all_kinds_of_stages(place: Place) -> None:
    stored: list[Any] = []

    def build(client: Any) -> Pipeline:
        pipeline: Pipeline = client.pipeline("flights")

        @pipeline.link("raw", to="parsed")
        def parse(row: str) -> int:
            return int(row)

        @pipeline.choice("parsed", to=["late", "on-time"])
        async def route(delay: int) -> Any:
            if delay < 0:
                return Drop()
            return To("late", {"delay": delay}) if delay > 15 else To("on-time")

        @pipeline.sink("late")
        def store(flight: dict[str, int], delivery: Delivery[Any]) -> str:
            stored.append((delivery.message.id, flight["delay"]))
            return "ignored"

        assert parse("7") == 7  # a decorator returns the function unchanged
        return pipeline

    ids = place.queue("raw").push_many(["20", "3", "-5", "60"])
    report = place.run(build, until_empty=True)
    assert sorted(stored, key=lambda each: each[1]) == [(ids[0], 20), (ids[3], 60)]
    assert place.payloads("on-time") == [3]
    assert place.queue("late").counts().total == 0
    assert counted(report, "raw") == {"in": 4, "out": 4}
    assert counted(report, "parsed") == {"in": 4, "out": 3, "dropped": 1}
    assert counted(report, "late") == {"in": 2, "out": 2}
    assert report.seconds > 0


def test_chained_stages_are_a_pipeline(memory: Place) -> None:
    seen: list[int] = []

    def build(client: Any) -> Pipeline:
        pipeline = (
            Pipeline(client)
            .link("raw", int, to="parsed")
            .choice("parsed", lambda x: To("late", x + 1), to=["late"])
        )
        return pipeline.sink("late", seen.append)

    memory.queue("raw").push("20")
    memory.run(build, until_empty=True)
    assert seen == [21]


def test_worker_commits(place: Place) -> None:
    seen: list[Any] = []

    def build(client: Any) -> Worker:
        worker = Worker(client, concurrency=4)

        @worker.on("orders", history=60)
        async def ship(order: int) -> None:
            seen.append(order)

        return worker.on("letters", seen.append)

    place.queue("orders", history=60).push_many([1, 2, 3])
    place.queue("letters").push("a")
    report = place.run(build, until_empty=True)
    assert sorted(map(str, seen)) == ["1", "2", "3", "a"]
    assert [each.outcome for each in place.queue("orders").history()] == ["committed"] * 3
    assert report.stages["orders"]["out"] == 3


def test_answer_is_the_result_if_one_was_asked_for(place: Place) -> None:
    queue = place.queue("in")
    ids = queue.push_many([Push(1, result=60), Push(2), Push(3, result=60)])
    assert place.run_worker(lambda payload: {"ten times": payload * 10}) == {"in": 3, "out": 3}
    found = [place.client.wait(str(id), 0).result for id in (ids[0], ids[2])]
    assert found == [{"ten times": 10}, {"ten times": 30}]
    assert queue.counts().history == 2


def test_history_alone_keeps_no_answer(memory: Place) -> None:
    queue = memory.queue("in", history=60)
    queue.push(1)
    memory.run_worker(lambda payload: payload * 10, history=60)
    assert [(each.outcome, each.result) for each in queue.history()] == [("committed", None)]


def test_answers_of_a_batch_are_results(memory: Place) -> None:
    ids = memory.queue("in").push_many([Push(n, result=60) for n in range(3)])
    memory.run_worker(lambda payloads: [each + 1 for each in payloads], batch=5)
    assert [memory.client.wait(str(id), 0).result for id in ids] == [1, 2, 3]


class Size(BaseModel):
    """The result of a handler."""

    width: Decimal


@pytest.mark.parametrize(
    ("answer", "result"),
    [
        (None, None),
        (Size(width=Decimal("1.5")), {"width": Decimal128("1.5")}),
        (Drop(), None),
        (Many([]), None),
        (Many([To("a", 1)]), None),
        (object(), None),
        ("x" * 300_000, None),
    ],
)
def test_result_never_fails_its_message(
    memory: Place, caplog: pytest.LogCaptureFixture, answer: Any, result: Any
) -> None:
    ids = memory.queue("in").push_many([Push(n, result=60) for n in range(2)])
    counts = memory.run_worker(lambda _: answer, to=["a"])
    assert counts in ({"in": 2, "out": 2}, {"in": 2, "dropped": 2})
    assert [memory.client.wait(str(id), 0).result for id in ids] == [result] * 2
    left_out = [each for each in caplog.messages if "was left out" in each]
    assert len(left_out) == (1 if answer.__class__ in (object, str) else 0)


def test_result_comes_from_the_last_stage(memory: Place) -> None:
    id = memory.queue("raw").push("5", result=60)

    def build(client: Any) -> Pipeline:
        return Pipeline(client).link("raw", int, to="parsed").sink("parsed", lambda n: n + 1)

    memory.run(build, until_empty=True)
    assert memory.client.wait(str(id), 0).result == 6


def test_failed_handler_fails_the_wait(memory: Place) -> None:
    id = memory.queue("in").push("x", result=60)
    memory.run_worker(int, max_tries=1)
    with pytest.raises(JobFailed, match="buried") as caught:
        memory.client.wait(str(id), 0)
    assert caught.value.job.error.type == "ValueError"


def test_worker_names_the_kinds_of_its_queues(place: Place) -> None:
    """A list of queues has them from the start. An output stays open."""
    place.queue("bucket", kind="bucket").push_many([1, 2])
    place.queue("open").push(1)
    seen: list[Any] = []

    def build(client: Any) -> Worker:
        worker = Worker(client).on("bucket", seen.append).on("new", seen.append)
        return worker.on("open", lambda _: Many([To("made", 3), To("made", 4)]), to=["made"])

    place.run(build, until_empty=True)
    assert sorted(seen) == [1, 2]
    kinds = {"bucket": "bucket", "new": "standard", "open": "standard", "made": "standard"}
    assert {each.name: each.kind for each in place.client.queues()} == kinds
    stored = place.collection().distinct("q", {"open": True})
    assert stored == ["made"]
    made = place.queue("made", kind="bucket")
    assert [each.payload for each in made.reserve_many(9, timeout=0)] == [3, 4]


@pytest.mark.parametrize("payload", [To("a", None), 0, "", [], {"a": 1}, 2.5])
def test_link_takes_any_value_as_payload(memory: Place, payload: Any) -> None:
    memory.queue("in").push("x")
    assert memory.run_stage(lambda _: payload, stage="link", to="a") == {"in": 1, "out": 1}
    assert memory.payloads("a") == [None if isinstance(payload, To) else payload]


@pytest.mark.parametrize(("kind", "to"), [("link", "a"), ("choice", ["a"]), ("sink", ["a"])])
def test_to_and_drop_are_answers_of_every_kind(memory: Place, kind: str, to: Any) -> None:
    memory.queue("in").push_many(["go", "keep", "drop"])
    answers = {"go": To("a", 1), "keep": To("a"), "drop": Drop()}
    assert memory.run_stage(answers.get, stage=kind, to=to) == {"in": 3, "out": 2, "dropped": 1}
    assert sorted(map(str, memory.payloads("a"))) == ["1", "keep"]


# ---- failures


def dead(place: Place) -> Mapping[str, Any]:
    (message,) = place.queue("in.dead").peek()
    assert message.dead is not None
    return message.dead


def test_reject_buries_with_the_reason(place: Place) -> None:
    def refuse(payload: Any, delivery: Any) -> None:
        raise Reject("no such airport")

    place.queue("in").push("x")
    assert place.run_stage(place.handler(refuse)) == {"in": 1, "dead": 1}
    assert dead(place)["error"]["message"] == "no such airport"
    assert dead(place)["reason"] == "buried"
    assert dead(place)["tries"] == 1


def test_retry_later_tries_again(place: Place) -> None:
    tries: list[tuple[int, Any]] = []

    def later(payload: Any, delivery: Any) -> Any:
        tries.append((delivery.message.tries, delivery.message.error))
        if delivery.message.tries < 3:
            raise RetryLater(0.05, "the door is closed")
        return To("a")

    place.queue("in").push("x")
    assert place.run_stage(place.handler(later)) == {"in": 3, "retried": 2, "out": 1}
    assert [number for number, _ in tries] == [1, 2, 3]
    assert tries[0][1] is None
    assert tries[1][1]["message"] == "the door is closed"


@pytest.mark.parametrize("batch", [None, 2])
def test_retry_later_may_leave_the_try_uncounted(place: Place, batch: Any) -> None:
    seen: list[tuple[Any, int, int]] = []

    def later(payload: Any, delivery: Any) -> Any:
        message = delivery.message
        seen.append((payload, message.tries, message.deliveries))
        return RetryLater(0, "closed", counted=False) if message.deliveries < 4 else To("a")

    def several(payloads: Any, deliveries: Any) -> Any:
        return [later(*each) for each in zip(payloads, deliveries, strict=True)]

    place.queue("in").push_many(["x", "y"])
    handler = place.handler(later if batch is None else several)
    counters = place.run_stage(handler, max_tries=2, batch=batch)
    assert counters == {"in": 8, "retried": 6, "out": 2}
    assert sorted(seen) == [(each, 1, number) for each in ("x", "y") for number in (1, 2, 3, 4)]
    assert [each.error for each in place.queue("a").peek()] == [None, None]


def test_uncounted_retry_after_the_last_try_buries_nothing(memory: Place) -> None:
    def later(payload: Any, delivery: Any) -> Any:
        if delivery.message.deliveries == 1:
            raise RetryLater(0, counted=False)
        raise RetryLater(0, "broken")

    memory.queue("in").push("x")
    counters = memory.run_stage(memory.handler(later), max_tries=1)
    assert counters == {"in": 2, "retried": 1, "dead": 1}
    assert (dead(memory)["tries"], dead(memory)["error"]["message"]) == (1, "broken")
    with pytest.raises(ConfigurationError, match="counted: expected True or False"):
        RetryLater(1, counted="no")  # type: ignore[arg-type]


def test_exception_retries_and_the_last_try_buries(place: Place) -> None:
    def fail(payload: Any, delivery: Any) -> None:
        raise OSError(f"try {delivery.message.tries}")

    place.queue("in").push("x")
    counters = place.run_stage(place.handler(fail), max_tries=3, backoff=NOW)
    assert counters == {"in": 3, "retried": 2, "dead": 1}
    error = dead(place)["error"]
    assert (error["type"], error["message"]) == ("OSError", "try 3")
    assert error["where"].startswith(f"{__name__}:")
    assert dead(place)["reason"] == "tries"


@pytest.mark.parametrize(
    "error", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, StopIteration]
)
def test_stage_survives_any_exception(
    memory: Place, awaited: bool, error: type[BaseException]
) -> None:
    memory.awaited = awaited

    def fail(payload: Any, delivery: Any) -> Any:
        if delivery.message.tries == 1 and payload == "bad":
            raise error("no")
        return To("a")

    memory.queue("in").push_many(["good", "bad", "good"])
    assert memory.run_stage(memory.handler(fail), backoff=NOW) == {"in": 4, "retried": 1, "out": 3}
    assert sorted(memory.payloads("a")) == ["bad", "good", "good"]


class Flight(BaseModel):
    """A payload of the next stage."""

    number: int


WRONG = {
    "unlisted": ("choice", To("c"), "To('c'), but its stage leads to a, b"),
    "no target": ("choice", 5, "a value of type int, but a choice returns To, Drop or Many"),
    "nothing": ("choice", None, "returned None, but a choice returns To, Drop or Many"),
    "not BSON": ("choice", To("a", object()), "not storable as BSON"),
    "not of the model": ("link", {"number": "many"}, "not a valid Flight"),
    "too large": ("choice", To("a", "x" * (16 * 1024 * 1024)), "bytes, and the limit is"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_answer_is_buried_with_the_reason(place: Place, case: str) -> None:
    kind, answer, reason = WRONG[case]
    good: Any = {"number": 1} if kind == "link" else To("a")

    def build(client: Any) -> Any:
        pipeline = getattr(client.pipeline(), kind)(
            "in", lambda x: answer if x == "bad" else good, to="a" if kind == "link" else ["a", "b"]
        )
        return pipeline.sink("a", lambda x: None, model=Flight if kind == "link" else None)

    place.queue("in").push_many(["good", "bad", "good"])
    report = place.run(build, until_empty=True)
    assert counted(report, "in") == {"in": 3, "out": 2, "dead": 1}
    assert reason in dead(place)["error"]["message"]


def test_dead_message_is_retried_instead_of_buried(place: Place) -> None:
    source = place.queue("in")
    source.push("x")
    reservation = source.reserve(5)
    assert reservation is not None
    source.bury(reservation)
    tries: list[int] = []

    def repair(payload: Any, delivery: Delivery[Any]) -> None:
        tries.append(delivery.message.tries)
        if len(tries) < 3:
            raise Reject("not yet")

    counters = place.run_worker(repair, "in.dead", backoff=NOW, max_tries=1)
    assert counters == {"in": 3, "retried": 2, "out": 1}
    assert tries == [1, 2, 3]


def test_settling_that_fails_is_retried(
    server: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An unforeseen failure to settle costs a try, and is logged once a minute."""
    failed = fail_first(
        monkeypatch, AsyncQueue, "move_many", QueueError("the disk is full"), times=2
    )
    server.queue("in").push("x")
    assert server.run_stage(lambda x: To("a"), backoff=NOW) == {"in": 3, "retried": 2, "out": 1}
    assert len(failed) == 2
    texts = [each.getMessage() for each in caplog.records]
    assert len([text for text in texts if text.endswith("'in' could not be settled")]) == 1


REFUSED = {
    "priority": (To("a", priority=9), "priority: queue 'a' is of kind 'standard'"),
    "group": (To("a", group="g"), "group: queue 'a' is of kind 'standard'"),
    "priority of Many": (Many([To("a", priority=9)]), "priority: queue 'a' is of kind"),
    "group of Many": (Many([To("b"), To("a", group="g")]), "group: queue 'a' is of kind"),
    "stream": (To("log"), "'log' is a stream, and messages cannot move there"),
    "stream of Many": (Many([To("log")]), "'log' is a stream, and messages cannot move there"),
    "option of a stream": (To("log", priority=9), "'log' is a stream"),
}


@pytest.mark.parametrize("batch", [None, 5])
@pytest.mark.parametrize("case", REFUSED)
def test_option_that_the_target_lacks_buries(memory: Place, case: str, batch: Any) -> None:
    """The target may become a stream during the run."""
    answer, reason = REFUSED[case]

    def handle(payload: Any, delivery: Any) -> Any:
        memory.client.stream("log").append(1)
        return answer if batch is None else [answer] * len(payload)

    memory.queue("in").push_many(["x", "y"])
    handler, to = memory.handler(handle), ["a", "b", "log"]
    counters = memory.run_stage(handler, to=to, backoff=NOW, max_tries=2, batch=batch)
    assert counters == {"in": 2, "dead": 2}
    for each in memory.queue("in.dead").peek():
        assert each.error is not None
        assert (reason in each.error["message"], each.error["type"]) == (True, "Reject")
    assert memory.ids("a", "b") == []


# ---- the options of an answer

LATER = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=1)
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "delay": {"delay": 3600},
    "at": {"at": LATER},
    "key": {"key": "k"},
    "headers": {"headers": {"trace": "new", "n": 1}},
    "flag": {"headers": {"n": True}},
}


@pytest.mark.parametrize("batch", [None, 9])
@pytest.mark.parametrize("many", [False, True], ids=["one", "many"])
def test_answer_moves_with_its_options(place: Place, many: bool, batch: Any) -> None:
    def answer(name: str) -> Any:
        to = To("a", name.upper(), **OPTIONS[name])
        return Many([to]) if many else to

    def several(names: list[str]) -> list[Any]:
        return list(map(answer, names))

    place.queue("in").push_many(list(OPTIONS), headers={"trace": "t"})
    counters = place.run_stage(answer if batch is None else several, batch=batch)
    assert counters == {"in": len(OPTIONS), "out": len(OPTIONS)}
    found = {each.payload.lower(): each for each in place.queue("a").browse().messages}
    assert found.keys() == OPTIONS.keys()
    states = {name for name, each in found.items() if each.state == "scheduled"}
    assert states == {"delay", "at"}
    assert found["at"].when == LATER
    assert abs(found["delay"].when - LATER) < timedelta(minutes=10)
    assert {name: each.key for name, each in found.items() if each.key} == {"key": "k"}
    headers = {"headers": {"trace": "new", "n": 1}, "flag": {"trace": "t", "n": True}}
    for name, each in found.items():
        assert each.headers == headers.get(name, {"trace": "t"})
    assert found["flag"].headers["n"] is True


TAKEN = {
    "one": To("a", key="k"),
    "many": Many([To("b"), To("a", key="k")]),
    "twice": Many([To("b"), To("a", key="new"), To("a", key="new")]),
}


@pytest.mark.parametrize("case", TAKEN)
def test_taken_key_buries_with_the_reason(
    place: Place, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    place.queue("a").push("there", key="k")
    place.queue("in").push("x")
    assert place.run_stage(lambda x: TAKEN[case], max_tries=5) == {"in": 1, "dead": 1}
    reason = dead(place)["error"]["message"]
    assert re.fullmatch("key: queue 'a' already has a message with the key '(k|new)'", reason)
    assert (dead(place)["reason"], dead(place)["tries"]) == ("buried", 1)
    assert [each.getMessage() for each in caplog.records if reason in each.getMessage()] != []
    assert (place.payloads("a"), place.payloads("b")) == (["there"], [])


def test_taken_keys_do_not_stop_the_stage(memory: Place) -> None:
    """The answers are right."""
    memory.queue("in").push_many(range(30))
    assert memory.run_stage(lambda x: To("a", key="k")) == {"in": 30, "out": 1, "dead": 29}


def test_worker_sends_on_with_options(memory: Place) -> None:
    memory.queue("in").push("x")
    to = To("a", delay=timedelta(hours=1), key="k", headers={"n": 1})
    assert memory.run_worker(lambda x: to, to=["a"]) == {"in": 1, "out": 1}
    [message] = memory.queue("a").browse().messages
    assert (message.payload, message.key, message.headers) == ("x", "k", {"n": 1})
    assert message.state == "scheduled"


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"delay": -1}, "delay: -1 is not allowed"),
        ({"at": datetime(2020, 1, 1)}, "at: .* has no time zone"),
        ({"delay": 1, "at": LATER}, "delay, at: pass one of the two"),
        ({"key": ""}, "key: '' is not allowed"),
        ({"headers": {"a.b": 1}}, "headers: the name 'a.b' is not allowed"),
    ],
    ids=["delay", "at", "both", "key", "headers"],
)
def test_answer_with_an_invalid_option_is_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        To("a", **options)


def test_stream_as_target_is_refused_before_the_run(place: Place) -> None:
    place.client.stream("log").append(1)
    place.queue("in").push("x")
    with pytest.raises(ConfigurationError, match="to: 'log' is a stream"):
        place.run_stage(lambda x: To("log"), to=["log"])
    [message] = place.queue("in").peek()
    assert message.tries == 0


NOT_TO_BLAME: dict[str, Any] = {
    "moves": To("late"),
    "is replaced": Many([To("late")]),
    "is buried": Reject("no"),
    "is committed": Drop(),
    "is tried again": OSError("the disk is full"),
}


@pytest.mark.parametrize("batch", [None, 5])
@pytest.mark.parametrize("case", NOT_TO_BLAME)
def test_wrong_setup_stops_the_stage_and_costs_no_try(
    place: Place, monkeypatch: pytest.MonkeyPatch, case: str, batch: Any
) -> None:
    """The records of targets are of a newer release. Other commands are not permitted."""
    for name in ("commit", "rollback"):
        fail_first(monkeypatch, AsyncQueue, name, ConfigurationError("not permitted"), times=99)

    def handle(payload: Any, delivery: Any) -> Any:
        put = {"$set": {"kind": "newer", "v": 99, "q": "late", "record": True}}
        for name in ("late", "in.dead"):
            place.collection().update_one({"_id": f"~queue:{name}"}, put, upsert=True)
        return NOT_TO_BLAME[case] if batch is None else [NOT_TO_BLAME[case]] * len(payload)

    ids = place.queue("in").push_many(["x", "y"])
    with pytest.raises(ConfigurationError, match=r"kind .newer., version 99|not permitted"):
        place.run_stage(place.handler(handle), to=["late"], max_tries=2, batch=batch)
    assert [(each.id, each.tries) for each in place.queue("in").peek()] == [(id, 0) for id in ids]


def test_wrong_setup_lets_other_handlers_end(
    server: Place, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several messages meet the wrong setup."""
    failed = fail_first(
        monkeypatch, AsyncQueue, "bury", ConfigurationError("not permitted"), times=99
    )

    def build(client: Any) -> Worker:
        return Worker(client).on("in", lambda x: Reject("no")).on("slow", gate.handler)

    server.queue("slow").push("x")
    running = server.start(build)
    eventually(lambda: bool(gate.begun), "a handler that waits")
    server.queue("in").push_many([1, 2])
    eventually(
        lambda: bool(failed) and server.queue("in").counts().ready == 2, "messages given back"
    )
    gate.open.set()
    with pytest.raises(ConfigurationError, match="not permitted"):
        running.join()
    assert (gate.ended, gate.cancelled) == (["x"], [])
    assert server.queue("slow").counts().total == 0


def test_wrong_setup_leaves_the_message_to_its_lease(
    server: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("commit", "release"):
        fail_first(monkeypatch, AsyncQueue, name, ConfigurationError("not permitted"), times=99)
    server.queue("in").push("x")
    with pytest.raises(ConfigurationError, match="not permitted"):
        server.run_stage(lambda x: None, stage="sink")
    assert server.queue("in").counts().reserved == 1


def test_message_that_cannot_be_settled_is_left_to_its_lease(
    server: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The move fails, and so does the rollback that follows."""
    moves = fail_first(monkeypatch, AsyncQueue, "move_many", QueueError("the disk is full"))
    rollbacks = fail_first(monkeypatch, AsyncQueue, "rollback", QueueError("the disk is full"))
    server.queue("in").push("x")
    assert server.run_stage(lambda x: To("a"), lease=1) == {"in": 2, "lost": 1, "out": 1}
    assert (len(moves), len(rollbacks)) == (1, 1)
    assert server.payloads("a") == ["x"]
    assert "stays held until its lease ends" in caplog.text


class Shy:
    """A value whose repr fails."""

    def __repr__(self) -> str:
        raise OSError("not to be seen")


def test_answer_whose_repr_fails_is_buried(memory: Place) -> None:
    memory.queue("in").push("x")
    handler = memory.handler(lambda payload, delivery: Shy())
    assert memory.run_stage(handler) == {"in": 1, "dead": 1}
    assert "returned a value of type Shy" in dead(memory)["error"]["message"]


# ---- models


class Row(BaseModel):
    """A raw line."""

    number: int
    price: Decimal


@dataclass
class Point:
    """A value that BSON lacks."""

    x: int


def test_payloads_have_the_types_of_the_models(place: Place) -> None:
    seen: list[Any] = []

    def parse(row: Row) -> Flight:
        seen.append(row)
        return Flight(number=row.number)

    def price(flight: Flight) -> Row:
        seen.append(flight)
        return Row(number=1, price=Decimal("1.5"))

    def build(client: Any) -> Pipeline:
        pipeline: Pipeline = client.pipeline().link("in", parse, to="parsed", model=Row)
        return pipeline.link("parsed", price, to="out", model=Flight)

    place.queue("in", model=Row).push(Row(number=7, price=Decimal("2.5")))
    place.run(build, until_empty=True)
    assert seen == [Row(number=7, price=Decimal("2.5")), Flight(number=7)]
    (message,) = place.queue("out", model=Row).peek()
    assert message.payload == Row(number=1, price=Decimal("1.5"))


def test_outputs_are_dumped_by_their_own_type(memory: Place) -> None:
    memory.queue("in").push_many([1, 2])
    memory.run_stage(lambda x: To("a", Flight(number=x) if x == 1 else Point(x)))
    assert sorted(memory.payloads("a"), key=str) == [{"number": 1}, {"x": 2}]


def test_invalid_payload_never_reaches_the_handler(place: Place) -> None:
    seen: list[Any] = []

    def drop(flight: Flight) -> Drop:
        seen.append(flight)
        return Drop()

    place.queue("in").push_many([{"number": 1}, {"number": "many"}])
    assert place.run_stage(drop, model=Flight) == {"in": 2, "dropped": 1, "dead": 1}
    assert seen == [Flight(number=1)]
    assert dead(place)["reason"] == "invalid"


# ---- arguments and actions of handlers


def test_progress_and_checkpoint_are_stored(place: Place) -> None:
    seen: list[Any] = []

    def check(delivery: Delivery[Any]) -> None:
        message = place.queue("in").get(delivery.message.id)
        assert message is not None
        assert message.progress is not None
        seen.append(
            (delivery.message.checkpoint, message.progress["fraction"], message.progress["note"])
        )
        if delivery.message.tries == 1:
            raise OSError

    def plain(payload: Any, delivery: Delivery[Any]) -> Any:
        delivery.progress(0.4, "encoding")
        delivery.checkpoint({"frame": delivery.message.tries})
        check(delivery)
        return To("a")

    async def carried(payload: Any, delivery: Delivery[Any]) -> Any:
        await delivery.progress(0.4, note="encoding")
        await delivery.checkpoint({"frame": delivery.message.tries})
        check(delivery)
        return To("a")

    place.queue("in").push("x")
    counters = place.run_stage(carried if place.awaited else plain, backoff=NOW)
    assert counters == {"in": 2, "retried": 1, "out": 1}
    assert seen == [(None, 0.4, "encoding"), ({"frame": 1}, 0.4, "encoding")]


def test_handler_arguments_follow_its_signature(memory: Place) -> None:
    seen: list[Any] = []

    def defaults(payload: Any, times: int = 3) -> None:
        seen.append(("defaults", payload, times))

    def optional(payload: Any, delivery: Delivery[Any] | None = None) -> None:
        assert delivery is not None
        seen.append(("optional", payload, delivery.message.payload))

    class Callable_:  # noqa: N801
        async def __call__(self, payload: Any, delivery: Delivery[Any]) -> None:
            seen.append(("callable", payload, delivery.message.payload))

    def coroutine(payload: Any) -> Any:
        return Callable_()(payload, Delivery(message, memory.queue("z"), None))

    memory.queue("z").push(0)
    (message,) = memory.queue("z").reserve_many(1)

    def build(client: Any) -> Worker:
        worker = Worker(client)
        worker.on("a", defaults).on("b", optional).on("c", Callable_()).on("d", coroutine)
        return worker.on("e", print)

    for name in "abcde":
        memory.queue(name).push(name)
    memory.run(build, until_empty=True)
    assert sorted(seen) == [
        ("callable", "c", "c"),
        ("callable", "d", 0),
        ("defaults", "a", 3),
        ("optional", "b", "b"),
    ]


def committing(
    place: Place,
    before: Callable[[Delivery[Any]], object] = lambda delivery: None,
    after: Callable[[Delivery[Any]], object] = lambda delivery: None,
) -> Build:
    """Return a builder of a worker whose handler commits each message itself."""

    def build(client: Any) -> Worker:
        def blocking(payload: Any, delivery: Delivery[Any]) -> None:
            before(delivery)
            client.queue("in").commit(delivery.message)
            after(delivery)

        async def awaited(payload: Any, delivery: Delivery[Any]) -> None:
            before(delivery)
            await client.queue("in").commit(delivery.message)
            after(delivery)

        return Worker(client).on("in", blocking if place.blocking else awaited)

    return build


def test_message_settled_by_its_handler_is_left_alone(place: Place) -> None:
    def progress(delivery: Delivery[Any]) -> None:
        with pytest.raises(LeaseLost):
            delivery.progress(1)

    place.queue("in").push_many([1, 2, 3])
    report = place.run(
        committing(place, after=progress if place.blocking else print), until_empty=True
    )
    assert counted(report, "in") == {"in": 3, "out": 3}


def test_message_settled_by_a_failing_handler_is_done(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(delivery: Delivery[Any]) -> None:
        raise OSError("too late to matter")

    place.queue("in").push_many([1, 2])
    report = place.run(committing(place, after=fail), until_empty=True)
    assert counted(report, "in") == {"in": 2, "out": 2}
    assert "a handler failed after it had settled its message" in caplog.text
    assert "too late to matter" in caplog.text


def test_handler_that_settles_too_late_has_lost_its_message(place: Place) -> None:
    def steal(delivery: Delivery[Any]) -> None:
        if delivery.message.tries == 1:
            place.steal(delivery)

    place.queue("in").push("x")
    report = place.run(committing(place, before=steal), until_empty=True)
    assert counted(report, "in") == {"in": 2, "lost": 1, "out": 1}


def test_effect_and_commit_are_one_transaction(server: Place) -> None:
    effects = f"effects-{server.namespace}"

    def build(client: Any) -> Worker:
        def blocking(payload: int, delivery: Delivery[int]) -> None:
            def work(session: Any) -> None:
                client.database[effects].update_one(
                    {"_id": 1}, {"$inc": {"n": payload}}, upsert=True, session=session
                )
                client.queue("in").commit(delivery.message, session=session)
                if delivery.message.tries == 1:
                    raise OSError("once")

            client.run_transaction(work)

        async def awaited(payload: int, delivery: Delivery[int]) -> None:
            async def work(session: Any) -> None:
                await client.database[effects].update_one(
                    {"_id": 1}, {"$inc": {"n": payload}}, upsert=True, session=session
                )
                await client.queue("in").commit(delivery.message, session=session)
                if delivery.message.tries == 1:
                    raise OSError("once")

            await client.run_transaction(work)

        return Worker(client).on("in", blocking if server.blocking else awaited, backoff=NOW)

    server.queue("in").push_many([1, 10, 100])
    report = server.run(build, until_empty=True)
    assert server.client.database[effects].find_one({"_id": 1})["n"] == 111
    assert counted(report, "in") == {"in": 6, "retried": 3, "out": 3}
