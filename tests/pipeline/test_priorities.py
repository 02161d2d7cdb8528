"""Stages that read and write queues with priorities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pyqueue import ConfigurationError, Many, Pipeline, To, Worker
from tests.pipeline.place import Place

RECIPE = """
[[stages]]
queue = "in"
kind = "priority"
strict = true
handler = "tests.pipeline.stages:store"
"""


def test_stages_pass_priorities_on(place: Place) -> None:
    urgent = place.queue("urgent", kind="priority")
    urgent.push("seed", priority=5)
    place.queue("in", kind="priority").push_many(["a", "b"], priorities=[1, 8])
    seen: list[Any] = []

    def build(client: Any) -> Any:
        pipeline = client.pipeline().choice(
            "in",
            lambda text: To("urgent", priority=9) if text == "a" else To("urgent"),
            to=["urgent"],
            kind="priority",
        )
        return pipeline.sink("urgent", seen.append, kind="priority", concurrency=1)

    place.run(build, until_empty=True, concurrency=1)
    assert sorted(seen) == ["a", "b", "seed"]


def test_outputs_take_priorities(place: Place) -> None:
    """A queue that no stage reads takes them too: its record has the kind."""
    out = place.queue("out", kind="priority")
    out.push("seed", priority=5)
    place.queue("in").push_many(["x", "y"])

    def split(text: str) -> Any:
        if text == "x":
            return To("out", priority=9)
        return Many([To("out", "low", priority=1), To("out", "default"), To("out", 8, priority=8)])

    place.run(lambda client: client.pipeline().choice("in", split, to=["out"]), until_empty=True)
    found = [(each.payload, each.priority) for each in out.pop_many(9, timeout=0)]
    assert found == [("x", 9), (8, 8), ("seed", 5), ("default", 4), ("low", 1)]


def test_outputs_of_many_inherit_the_priority(place: Place) -> None:
    """A single output keeps it too. A queue without priorities takes none."""
    urgent, plain = place.queue("urgent", kind="priority"), place.queue("plain")
    urgent.push("seed", priority=5)
    place.queue("in", kind="priority").push("x", priority=8)

    def build(client: Any) -> Any:
        outputs = [To("urgent"), To("urgent", "low", priority=1), To("plain")]
        return client.pipeline().choice(
            "in", lambda _: Many(outputs), to=["urgent", "plain"], kind="priority"
        )

    place.run(build, until_empty=True)
    found = [(each.payload, each.priority) for each in urgent.pop_many(9, timeout=0)]
    assert found == [("x", 8), ("seed", 5), ("low", 1)]
    assert [(each.payload, each.priority) for each in plain.peek()] == [("x", None)]


def test_workers_and_recipes_take_the_kind(memory: Place, tmp_path: Path) -> None:
    path = tmp_path / "jobs.toml"
    path.write_text(RECIPE)
    queue = memory.queue("in", kind="priority", strict=True)
    queue.push(1, priority=9)
    memory.run(lambda client: Pipeline.from_recipe(client, path), until_empty=True)
    queue.push(2, priority=3)
    seen: list[int] = []

    def build(client: Any) -> Worker:
        worker = Worker(client)
        worker.on("in", kind="priority")(seen.append)
        return worker

    memory.run(build, until_empty=True)
    assert seen == [2]
    assert queue.counts().total == 0


@pytest.mark.parametrize("value", [10, "9", True])
def test_answer_with_an_invalid_priority_is_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"priority: .*0 to 9"):
        To("out", priority=value)
