"""What a handler answers or raises, and what becomes of the message."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pytest
from pydantic import BaseModel

from pyqueue import Backoff, Delivery, Drop, LeaseLost, Pipeline, Reject, RetryLater, To, Worker
from tests.pipeline.conftest import Place, adds_up, handler

NOW = Backoff(base=0)


def one(
    place: Place, function: Any, *, kind: str = "choice", to: Any = ("a", "b"), **options: Any
) -> dict[str, int]:
    """Have one stage handle what is in its queue; answers its counters."""

    def build(client: Any) -> Any:
        return getattr(client.pipeline(), kind)("in", function, to=to, **options)

    report = place.run(build, until_empty=True)
    assert adds_up(report)
    return {name: count for name, count in report.stages["in"].items() if count}


def test_a_message_passes_through_all_kinds_of_stages(place: Place) -> None:
    stored: list[Any] = []

    def build(client: Any) -> Pipeline:
        pipeline: Pipeline = client.pipeline("flights")

        @pipeline.link("raw", to="parsed")
        def parse(row: str) -> int:
            return int(row)

        @pipeline.choice("parsed", to=["late", "on-time"])
        async def route(delay: int) -> Any:
            return (
                Drop()
                if delay < 0
                else To("late", {"delay": delay})
                if delay > 15
                else To("on-time")
            )

        @pipeline.sink("late")
        def store(flight: dict[str, int], delivery: Delivery[Any]) -> str:
            stored.append((delivery.message.id, flight["delay"]))
            return "whatever it answers"

        assert parse("7") == 7  # decorated, they are what they were
        return pipeline

    ids = place.queue("raw").push_many(["20", "3", "-5", "60"])
    report = place.run(build, until_empty=True)
    assert sorted(stored, key=lambda each: each[1]) == [(ids[0], 20), (ids[3], 60)]
    assert place.payloads("on-time") == [3]
    assert place.queue("late").counts().total == 0
    assert {
        name: (each["in"], each["out"], each["dropped"]) for name, each in report.stages.items()
    } == {
        "raw": (4, 4, 0),
        "parsed": (4, 3, 1),
        "late": (2, 2, 0),
    }
    assert adds_up(report)
    assert report.seconds > 0


def test_the_fluent_form_is_the_same(memory: Place) -> None:
    seen: list[int] = []

    def build(client: Any) -> Pipeline:
        pipeline = (
            Pipeline(client)
            .link("raw", int, to="parsed")
            .choice("parsed", lambda x: To("late", x + 1), to=["late"])
        )
        return pipeline.sink("late", seen.append)

    place = memory
    place.queue("raw").push("20")
    place.run(build, until_empty=True)
    assert seen == [21]


def test_a_worker_commits(place: Place) -> None:
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


@pytest.mark.parametrize("payload", [None, 0, "", [], {"a": 1}, 2.5])
def test_any_value_is_a_payload(memory: Place, payload: Any) -> None:
    memory.queue("in").push("x")
    assert one(memory, lambda _: payload, kind="link", to="a") == {"in": 1, "out": 1}
    assert memory.payloads("a") == [payload]


@pytest.mark.parametrize(("kind", "to"), [("link", "a"), ("choice", ["a"]), ("sink", ["a"])])
def test_to_and_drop_are_answers_anywhere(memory: Place, kind: str, to: Any) -> None:
    memory.queue("in").push_many(["go", "keep", "drop"])
    answers = {"go": To("a", 1), "keep": To("a"), "drop": Drop()}
    assert one(memory, answers.get, kind=kind, to=to) == {"in": 3, "out": 2, "dropped": 1}
    assert sorted(map(str, memory.payloads("a"))) == ["1", "keep"]


# ---- what goes wrong


def dead(place: Place) -> dict[str, Any]:
    (message,) = place.queue("in.dead").peek()
    assert message.dead is not None
    return message.dead


def test_reject_buries_with_the_reason(place: Place, awaited: bool) -> None:
    def refuse(payload: Any, delivery: Any) -> None:
        raise Reject("no such airport")

    place.queue("in").push("x")
    assert one(place, handler(refuse, awaited)) == {"in": 1, "dead": 1}
    assert dead(place)["error"]["message"] == "no such airport"
    assert dead(place)["reason"] == "buried"
    assert dead(place)["tries"] == 1


def test_retry_later_comes_again_after_its_delay(place: Place, awaited: bool) -> None:
    tries: list[tuple[int, Any]] = []

    def later(payload: Any, delivery: Any) -> Any:
        tries.append((delivery.message.tries, delivery.message.error))
        if delivery.message.tries < 3:
            raise RetryLater(0.05, "the door is closed")
        return To("a")

    place.queue("in").push("x")
    assert one(place, handler(later, awaited)) == {"in": 3, "retried": 2, "out": 1}
    assert [number for number, _ in tries] == [1, 2, 3]
    assert tries[0][1] is None
    assert tries[1][1]["message"] == "the door is closed"


def test_an_exception_is_another_try_and_the_last_one_buries(place: Place, awaited: bool) -> None:
    def fail(payload: Any, delivery: Any) -> None:
        raise OSError(f"try {delivery.message.tries}")

    place.queue("in").push("x")
    assert one(place, handler(fail, awaited), max_tries=3, backoff=NOW) == {
        "in": 3,
        "retried": 2,
        "dead": 1,
    }
    assert dead(place)["error"]["type"] == "OSError"
    assert dead(place)["error"]["message"] == "try 3"
    assert dead(place)["reason"] == "tries"


@pytest.mark.parametrize(
    "error", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, StopIteration]
)
def test_a_stage_outlives_any_exception(
    memory: Place, awaited: bool, error: type[BaseException]
) -> None:
    def fail(payload: Any, delivery: Any) -> Any:
        if delivery.message.tries == 1 and payload == "bad":
            raise error("no")
        return To("a")

    memory.queue("in").push_many(["good", "bad", "good"])
    assert one(memory, handler(fail, awaited), backoff=NOW) == {"in": 4, "retried": 1, "out": 3}
    assert sorted(memory.payloads("a")) == ["bad", "good", "good"]


class Flight(BaseModel):
    """As the next stage takes it."""

    number: int


WRONG = {
    "unlisted": ("choice", To("c"), "To('c'); its stage leads to a, b"),
    "no target": ("choice", 5, "returned 5; a choice returns To, Drop or Many"),
    "nothing": ("choice", None, "returned None; a choice returns To, Drop or Many"),
    "not BSON": ("choice", To("a", object()), "not storable as BSON"),
    "not of the model": ("link", {"number": "many"}, "not a valid Flight"),
    "too large": ("choice", To("a", "x" * (16 * 1024 * 1024)), "bytes; at most"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_answer_is_buried_with_the_reason_and_the_stage_lives(
    place: Place, case: str
) -> None:
    kind, answer, reason = WRONG[case]
    good: Any = {"number": 1} if kind == "link" else To("a")

    def build(client: Any) -> Any:
        pipeline = getattr(client.pipeline(), kind)(
            "in", lambda x: answer if x == "bad" else good, to="a" if kind == "link" else ["a", "b"]
        )
        return pipeline.sink("a", lambda x: None, model=Flight if kind == "link" else None)

    place.queue("in").push_many(["good", "bad", "good"])
    report = place.run(build, until_empty=True)
    assert adds_up(report)
    assert {name: count for name, count in report.stages["in"].items() if count} == {
        "in": 3,
        "out": 2,
        "dead": 1,
    }
    assert reason in dead(place)["error"]["message"]


def test_what_is_dead_already_is_tried_again_instead(place: Place) -> None:
    source = place.queue("in")
    source.push("x")
    reservation = source.reserve(5)
    assert reservation is not None
    source.bury(reservation)
    tries: list[int] = []

    def mend(payload: Any, delivery: Delivery[Any]) -> None:
        tries.append(delivery.message.tries)
        if len(tries) < 3:
            raise Reject("not yet")

    report = place.run(
        lambda client: Worker(client).on("in.dead", mend, backoff=NOW, max_tries=1),
        until_empty=True,
    )
    assert report.stages["in.dead"]["retried"] == 2
    assert report.stages["in.dead"]["out"] == 1
    assert tries == [1, 2, 3]


def test_an_update_that_the_server_refuses_is_no_end(
    server: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure to settle that nobody foresaw: another try, and if that fails too the lease gives the message back."""
    from pyqueue import AsyncQueue, QueueError

    real = AsyncQueue.move
    failed: list[int] = []

    async def refuse(self: Any, *reservations: Any, **options: Any) -> None:
        if len(failed) < 2:
            failed.append(1)
            raise QueueError("the disk is full")
        await real(self, *reservations, **options)

    monkeypatch.setattr(AsyncQueue, "move", refuse)
    server.queue("in").push("x")
    assert one(server, lambda x: To("a"), backoff=NOW) == {"in": 3, "retried": 2, "out": 1}


def test_what_can_be_settled_in_no_way_is_left_to_its_lease(
    server: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from pyqueue import AsyncQueue, QueueError

    failed: list[str] = []

    def once(name: str) -> None:
        real = getattr(AsyncQueue, name)

        async def refuse(self: Any, *reservations: Any, **options: Any) -> None:
            if name not in failed:
                failed.append(name)
                raise QueueError("the disk is full")
            await real(self, *reservations, **options)

        monkeypatch.setattr(AsyncQueue, name, refuse)

    once("move")
    once("rollback")
    server.queue("in").push("x")
    assert one(server, lambda x: To("a"), lease=0.3) == {"in": 2, "lost": 1, "out": 1}
    assert failed == ["move", "rollback"]
    assert server.payloads("a") == ["x"]
    assert "is left to its lease" in caplog.text


class Shy:
    """A value that cannot even be shown."""

    def __repr__(self) -> str:
        raise OSError("not to be seen")


def test_an_answer_that_cannot_be_shown_is_another_try(memory: Place, awaited: bool) -> None:
    def answer(payload: Any, delivery: Any) -> Any:
        if delivery.message.tries == 1:
            return Shy()
        assert delivery.message.error["message"] == "not to be seen"
        return To("a")

    memory.queue("in").push("x")
    assert one(memory, handler(answer, awaited), backoff=NOW) == {"in": 2, "retried": 1, "out": 1}


# ---- models


class Row(BaseModel):
    """A raw line."""

    number: int
    price: Decimal


@dataclass
class Point:
    """A value that is no BSON."""

    x: int


def test_payloads_are_of_the_models(place: Place) -> None:
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


def test_values_of_pydantic_and_dataclasses_go_to_outputs_by_their_own_type(memory: Place) -> None:
    memory.queue("in").push_many([1, 2])
    one(memory, lambda x: To("a", Flight(number=x) if x == 1 else Point(x)))
    assert sorted(memory.payloads("a"), key=str) == [{"number": 1}, {"x": 2}]


def test_a_misfit_of_the_model_never_reaches_the_handler(place: Place) -> None:
    seen: list[Any] = []

    def drop(flight: Flight) -> Drop:
        seen.append(flight)
        return Drop()

    place.queue("in").push_many([{"number": 1}, {"number": "many"}])
    assert one(place, drop, model=Flight) == {"in": 1, "dropped": 1}
    assert seen == [Flight(number=1)]
    assert dead(place)["reason"] == "invalid"


# ---- what handlers take


def test_progress_and_checkpoint(place: Place, awaited: bool) -> None:
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
    assert one(place, carried if awaited else plain, backoff=NOW) == {
        "in": 2,
        "retried": 1,
        "out": 1,
    }
    assert seen == [(None, 0.4, "encoding"), ({"frame": 1}, 0.4, "encoding")]


def test_what_is_called_with_what(memory: Place) -> None:
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


def test_a_handler_may_settle_the_message_itself(place: Place) -> None:
    """For instance in a transaction with its effect. Then it is left alone."""
    queue = place.queue("in")

    def commit(payload: Any, delivery: Delivery[Any]) -> None:
        queue.commit(delivery.message)
        with pytest.raises(LeaseLost):
            delivery.progress(1)

    if place.blocking:

        def build(client: Any) -> Any:
            nonlocal queue
            queue = client.queue("in")
            return Worker(client).on("in", commit)
    else:

        def build(client: Any) -> Any:
            async def work(payload: Any, delivery: Delivery[Any]) -> None:
                await client.queue("in").commit(delivery.message)

            return Worker(client).on("in", work)

    queue.push_many([1, 2, 3])
    report = place.run(build, until_empty=True)
    assert report.stages["in"] == dict.fromkeys(report.stages["in"], 0) | {"in": 3, "out": 3}


def committing(place: Place, before: Any, after: Any) -> Any:
    """What builds a worker whose handler commits each message itself, with something to do before and after."""

    def build(client: Any) -> Worker:
        def plain(payload: Any, delivery: Delivery[Any]) -> None:
            before(delivery)
            client.queue("in").commit(delivery.message)
            after(delivery)

        async def carried(payload: Any, delivery: Delivery[Any]) -> None:
            before(delivery)
            await client.queue("in").commit(delivery.message)
            after(delivery)

        return Worker(client).on("in", plain if place.blocking else carried)

    return build


def test_what_its_handler_has_settled_does_not_come_again_though_the_handler_fails_then(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(delivery: Delivery[Any]) -> None:
        raise OSError("too late to matter")

    place.queue("in").push_many([1, 2])
    report = place.run(committing(place, lambda delivery: None, fail), until_empty=True)
    assert report.stages["in"] == dict.fromkeys(report.stages["in"], 0) | {"in": 2, "out": 2}
    assert "a handler failed after it had settled its message" in caplog.text
    assert "too late to matter" in caplog.text


def test_a_handler_that_cannot_settle_its_message_any_more_has_lost_it(place: Place) -> None:
    def steal(delivery: Delivery[Any]) -> None:
        if delivery.message.tries == 1:
            place.raw().update_one(
                {"payload": "x"}, {"$set": {"token": "another's", "when": delivery.message.pushed}}
            )

    place.queue("in").push("x")
    report = place.run(committing(place, steal, lambda delivery: None), until_empty=True)
    assert report.stages["in"] == dict.fromkeys(report.stages["in"], 0) | {
        "in": 2,
        "lost": 1,
        "out": 1,
    }


def test_effect_and_commit_in_one_transaction(server: Place) -> None:
    counters = server.client.database["counters"]

    def build(client: Any) -> Worker:
        def blocking(payload: int, delivery: Delivery[int]) -> None:
            def work(session: Any) -> None:
                client.database["counters"].update_one(
                    {"_id": 1}, {"$inc": {"n": payload}}, upsert=True, session=session
                )
                client.queue("in").commit(delivery.message, session=session)
                if delivery.message.tries == 1:
                    raise OSError("once")

            client.run_transaction(work)

        async def awaited(payload: int, delivery: Delivery[int]) -> None:
            async def work(session: Any) -> None:
                await client.database["counters"].update_one(
                    {"_id": 1}, {"$inc": {"n": payload}}, upsert=True, session=session
                )
                await client.queue("in").commit(delivery.message, session=session)
                if delivery.message.tries == 1:
                    raise OSError("once")

            await client.run_transaction(work)

        return Worker(client).on("in", blocking if server.blocking else awaited, backoff=NOW)

    server.queue("in").push_many([1, 10, 100])
    report = server.run(build, until_empty=True)
    assert counters.find_one({"_id": 1})["n"] == 111
    assert report.stages["in"]["out"] == 3
    assert report.stages["in"]["retried"] == 3
    assert adds_up(report)
