"""Messages that do not fit the model of a stage: warnings, counts, and a stop at too many."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from pyqueue import Client, ConfigurationError, Pipeline, Worker
from pyqueue.backends.invalid import Misfits
from tests.pipeline.place import Place, counted
from tests.plans.runner import NOW


class Order(BaseModel):
    n: int


GOOD, BAD = {"n": 1}, {"m": 1}


def build(on_invalid: Any = None) -> Any:
    options = {} if on_invalid is None else {"on_invalid": on_invalid}
    return lambda client: Worker(client).on("in", lambda order: None, model=Order, **options)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if "is not valid" in each.getMessage()]


# ---- consumers


@pytest.mark.parametrize("verb", ["reserve", "pop", "reserve_many", "pop_many"])
def test_consumer_warns_of_a_misfit(
    memory: Place, caplog: pytest.LogCaptureFixture, verb: str
) -> None:
    id = memory.queue("in").push(BAD)
    queue = memory.client.queue("in", Order)
    limit = [10] if verb.endswith("many") else []
    assert not getattr(queue, verb)(*limit, timeout=0)
    (text,) = warnings(caplog)
    assert text == (
        f"queue 'in': message {id} is not valid and goes to 'in.dead' (1 so far): "
        "payload: does not match Order: n: Field required"
    )
    assert memory.client.stats["dead"] == 1


def test_consumer_warns_ever_more_rarely(memory: Place, caplog: pytest.LogCaptureFixture) -> None:
    memory.queue("in").push_many([BAD] * 20)
    assert memory.client.queue("in", Order).reserve_many(20, timeout=0) == []
    numbers = [text.partition("(")[2].partition(" ")[0] for text in warnings(caplog)]
    assert numbers == ["1", "2", "4", "8", "16"]
    assert memory.client.stats["dead"] == 20


def test_consumer_warns_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    misfits = Misfits()
    for seconds in range(600):
        now = NOW + timedelta(seconds=seconds)
        misfits.add("in", "Order", "in.dead", seconds, "several\nlines", now)
    # 1, 2, 4 up to 512, and after each minute without a warning.
    assert 15 < len(warnings(caplog)) < 22
    assert all(text.endswith("several lines") for text in warnings(caplog))


# ---- stages


def test_stage_counts_a_misfit_as_dead(place: Place) -> None:
    place.queue("in").push_many([GOOD, BAD, GOOD])
    report = place.run(build(), until_empty=True)
    assert counted(report, "in") == {"in": 3, "out": 2, "dead": 1}


def test_stage_counts_misfits_without_valid_ones(memory: Place) -> None:
    memory.queue("in").push_many([BAD] * 9)
    report = memory.run(build(), until_empty=True)
    assert counted(report, "in") == {"in": 9, "dead": 9}


def test_stage_stops_if_its_model_is_wrong(place: Place) -> None:
    place.queue("in").push_many([BAD] * 30)
    with pytest.raises(ConfigurationError) as caught:
        place.run(build(), until_empty=True, concurrency=4)
    dead = place.queue("in.dead").counts().ready
    assert 10 <= dead < 10 + 4  # one fetch may bring more than the tenth
    assert place.queue("in").counts().ready == 30 - dead  # nothing is held
    text = str(caught.value)
    assert f"the stage of queue 'in' stops: {dead} of its first {dead} messages" in text
    assert "are not valid Order payloads, and went to 'in.dead'; the last one, " in text
    assert "payload: does not match Order: n: Field required" in text
    assert '"pyqueue redrive in.dead"' in text
    assert 'on_invalid="bury"' in text
    assert place.queue("in.dead").redrive() == dead
    assert place.queue("in").counts().ready == 30


def test_stage_that_buries_goes_on(place: Place) -> None:
    place.queue("in").push_many([*[BAD] * 30, GOOD])
    report = place.run(build("bury"), until_empty=True)
    assert counted(report, "in") == {"in": 31, "out": 1, "dead": 30}


@pytest.mark.parametrize("batch", [None, 40])
@pytest.mark.parametrize("answer", [None, object()], ids=["no return", "not BSON"])
def test_stage_stops_if_most_answers_are_wrong(place: Place, answer: Any, batch: Any) -> None:
    """Some messages go to the dead-letter queue. The rest stays, without a counted try."""

    def handle(payload: Any, delivery: Any) -> Any:
        return answer if batch is None else [answer] * len(payload)

    ids = place.queue("in").push_many(range(40))
    with pytest.raises(ConfigurationError) as caught:
        place.run_stage(place.handler(handle), stage="link", to="a", batch=batch)
    left, dead = place.queue("in").peek(40), place.queue("in.dead").peek(40)
    # The server's part of an answer is known only when the message moves.
    assert len(dead) == 10 if answer is None else 10 <= len(dead) < 40 - 10
    assert {each.tries for each in left} == {0}
    assert {each.id for each in [*left, *dead]} == set(ids)
    text = str(caught.value)
    assert re.search(r"the stage of queue 'in' stops: \d+ of its first \d+ answers are wrong", text)
    assert ("return Drop(), and to send None on, return To('a', None)" in text) == (answer is None)
    assert '"pyqueue redrive in.dead"; or set on_invalid="bury" for the stage' in text


def test_stage_that_buries_wrong_answers_goes_on(memory: Place) -> None:
    memory.queue("in").push_many(range(40))
    counters = memory.run_stage(lambda x: None, stage="link", to="a", on_invalid="bury")
    assert counters == {"in": 40, "dead": 40}


@pytest.mark.parametrize(
    ("fits", "stops_at"),
    [
        ([False] * 9, None),
        ([False] * 10, 10),
        ([True] * 9 + [False] * 10, 19),
        ([True] * 10 + [False] * 10, None),
        ([True] * 49 + [False] * 51, 99),
        ([True] * 50 + [False] * 200, None),
        ([True, False] * 100, None),
        ([True] * 100 + [False] * 200, None),
    ],
)
@pytest.mark.parametrize("stop", [True, False])
def test_misfits_stop_if_most_of_the_first_are_invalid(
    fits: list[bool], stops_at: int | None, stop: bool
) -> None:
    misfits = Misfits(stop=stop)
    for number, each in enumerate(fits, start=1):
        if each:
            misfits.count_valid()
        else:
            misfits.add("in", None, "in.dead", number, "why", NOW)
        if misfits.verdict is not None:
            assert (number, stop) == (stops_at, True)
            return
    assert stops_at is None or not stop


def test_stage_keeps_the_valid_ones_of_the_last_fetch(memory: Place) -> None:
    """The claim with the tenth misfit has valid messages too, which are handled."""
    memory.queue("in").push_many([*[BAD] * 12, GOOD, GOOD])
    handled: list[Order] = []

    def build(client: Any) -> Worker:
        return Worker(client).on("in", handled.append, model=Order)

    with pytest.raises(ConfigurationError, match="12 of its first"):
        memory.run(build, concurrency=16)
    assert len(handled) == 2
    assert memory.queue("in").counts().total == 0


def test_on_invalid_is_checked(memory: Place) -> None:
    with pytest.raises(ConfigurationError, match="on_invalid: 'drop' is not allowed"):
        build("drop")(memory.client)


def test_recipe_has_on_invalid(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    stage = '[[stages]]\nqueue = "in"\nhandler = "builtins:print"\non_invalid = '
    with Client("memory:") as client:
        path.write_text(stage + '"bury"\n')
        pipeline = Pipeline.from_recipe(client, path)
        assert pipeline.graph.stages["in"].on_invalid == "bury"
        path.write_text(stage + '"drop"\n')
        with pytest.raises(ConfigurationError, match="on_invalid: 'drop' is not allowed"):
            Pipeline.from_recipe(client, path)
