"""Gathers in runs of workers and pipelines."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from pyqueue import ConfigurationError, Delivery, Many, To, Worker
from pyqueue.runtime.connecting import runner_of
from tests.pipeline.place import Place
from tests.support.eventually import eventually


def test_then_comes_after_all_outputs(place: Place) -> None:
    """The run with ``until_empty`` waits for it."""
    seen: list[Any] = []

    def split(number: int) -> Many:
        return Many([To("part", n) for n in range(number)], then=To("report", "all"))

    def build(client: Any) -> Any:
        pipeline = client.pipeline().choice("in", split, to=["part", "report"])
        return pipeline.sink("part", seen.append).sink("report", seen.append)

    place.queue("in").push(3)
    place.run(build, until_empty=True)
    assert (sorted(seen[:-1]), seen[-1]) == ([0, 1, 2], "all")


def test_then_without_outputs_comes_at_once(memory: Place) -> None:
    memory.queue("in").push("x", headers={"h": 1})
    assert memory.run_stage(lambda x: Many([], then=To("a"))) == {"in": 1, "out": 1}
    eventually(lambda: memory.payloads("a") == ["x"], "the message")
    assert memory.queue("a").peek()[0].headers == {"h": 1}


def test_handler_adds_messages_to_its_gather(memory: Place) -> None:
    seen: list[Any] = []

    def build(client: Any) -> Worker:
        queue = memory.queue("page")

        def visit(page: int, delivery: Delivery[Any]) -> None:
            if page < 3:
                queue.push(page + 1, gather=delivery.message.gather)
            seen.append(page)

        worker = Worker(client).on("page", visit, concurrency=1)
        return worker.on("report", seen.append)

    with memory.client.gather(To("report", "all")) as g:
        memory.queue("page").push(1, gather=g)
    memory.run(build, until_empty=True)
    assert seen == [1, 2, 3, "all"]


def test_worker_looks_at_a_gather_that_is_due(place: Place) -> None:
    """Its last message was purged, so no process has looked."""
    with place.client.gather(To("report", "done")) as g:
        place.queue("in").push("x", gather=g)
    looks = runner_of(place.client).open().looks
    eventually(lambda: not looks.pending, "the look after the seal")
    place.queue("in").purge()
    due = {"$set": {"when": datetime.now(UTC)}}
    assert place.collection().update_one({"_id": g.id, "q": "~gather"}, due).matched_count == 1
    running = place.start(lambda client: Worker(client).on("other", print))
    eventually(lambda: place.payloads("report") == ["done"], "the message")
    running.finish()


@pytest.mark.parametrize("answer", [To("c", 1), To("b", object())], ids=["unlisted", "not BSON"])
def test_wrong_then_buries_the_message(memory: Place, answer: To) -> None:
    memory.queue("in").push("x")
    counters = memory.run_stage(lambda x: Many([To("a")], then=answer))
    assert counters == {"in": 1, "dead": 1}
    assert memory.ids("a", "b") == []


def test_many_refuses_other_values() -> None:
    with pytest.raises(ConfigurationError, match="then: expected a To or None, found str"):
        Many([], then="report")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="dead: 'no' is not allowed"):
        Many([], dead="no")  # type: ignore[arg-type]
    assert repr(Many([To("a")], To("b", 1))) == "Many([To('a')], then=To('b', 1))"
