"""The stages of the demo, the graph that they make, and the check of its figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pymongo.collection import Collection
from typer.testing import CliRunner

from pyqueue import UNCHANGED, Client, Delivery, Pipeline
from pyqueue.cli import app
from pyqueue.demo import figures, flights, rows
from pyqueue.queue_base import backend_of
from tests.demo.lines import flight
from tests.support.processes import ROOT

RECIPE = ROOT / "docs/examples/flights.toml"
NUMBER = 40

# ---- the stages


def test_parse_returns_a_flight() -> None:
    assert flight().model_dump(mode="json") == {
        "id": 1,
        "name": "UA1545 EWR-IAH",
        "carrier": "UA",
        "day": "2013-01-01",
        "departed": True,
        "delay": 11,
    }


@pytest.mark.parametrize(
    ("columns", "queue"),
    [
        ({"arr_delay": "14"}, "on-time"),
        ({"arr_delay": "-60"}, "on-time"),
        ({"arr_delay": "15"}, "late"),
        ({"arr_delay": "NA"}, "late"),  # diverted
        ({"dep_time": "NA", "arr_delay": "NA"}, "cancelled"),
    ],
)
def test_route_decides_by_the_delay(columns: dict[str, str], queue: str) -> None:
    [to] = flights.route([flight(**columns)])
    assert (to.queue, to.payload) == (queue, UNCHANGED)


def test_store_can_be_repeated(client: Client, results: Collection[dict[str, Any]]) -> None:
    late = client.queue("late", flights.Flight)
    late.push(flight(arr_delay="99"))
    [reservation] = late.reserve_many(1)
    for _ in range(2):
        flights.store([reservation.payload], [Delivery(reservation, late, None)])
    assert list(results.find()) == [
        {"_id": 1, "carrier": "UA", "delay": 99, "passed": ["late"], "writes": 2}
    ]


# ---- the graph


def shape(pipeline: Pipeline) -> dict[str, Any]:
    return {
        name: (
            *(stage.kind, stage.handler, stage.to, backend_of(stage.queue).codec.model),
            *(stage.batch, stage.window, stage.on_invalid),
        )
        for name, stage in pipeline.graph.stages.items()
    }


def test_the_recipe_is_the_same_graph() -> None:
    client = Client("memory:")  # never opened
    recipe = Pipeline.from_recipe(client, RECIPE)
    assert shape(recipe) == shape(flights.pipeline(client))
    assert tuple(recipe.graph.stages) == flights.QUEUES
    assert recipe.name == flights.pipeline(client).name


def test_the_first_example_is_short() -> None:
    assert len(Path(str(flights.__file__)).read_text().splitlines()) <= 300


# ---- the check


class Drained(NamedTuple):
    """A pipeline through which all rows went."""

    client: Client
    results: Collection[dict[str, Any]]
    lines: list[dict[str, str]]

    def different(self) -> list[str]:
        """Return the names of the figures that differ from the file."""
        pushed = len(self.lines) + rows.BROKEN
        found = figures.measured(self.client, self.results, pushed, [])
        compared, different = figures.compare(figures.expected(self.lines, 0), found)
        assert compared > 20
        return [each["figure"] for each in different]


@pytest.fixture
def pushed(client: Client, results: Collection[dict[str, Any]]) -> Drained:
    """A pipeline into which some rows were pushed."""
    lines = list(rows.find_lines(NUMBER)[2]())
    client.queue("raw").push_many(rows.with_broken(lines, len(lines)))
    return Drained(client, results, lines)


@pytest.fixture
def drained(pushed: Drained) -> Drained:
    """A pipeline through which some rows went, in this process."""
    flights.pipeline(pushed.client).run(until_empty=True)
    return pushed


def test_the_cli_runs_the_recipe(pushed: Drained, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    command = ["pipeline", "run", str(RECIPE), "--until-empty", "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.stderr
    stages = json.loads(result.stdout)["stages"]
    assert stages["raw"]["out"] == stages["parsed"]["out"] == NUMBER
    assert sum(stages[name]["out"] for name in ("late", "on-time", "cancelled")) == NUMBER
    assert pushed.different() == []


def test_broken_rows_alone_do_not_stop_a_consumer(client: Client) -> None:
    [row, *_] = rows.find_lines(1)[2]()
    client.queue("raw").push_many([row | {"month": "13"}] * 30)
    flights.pipeline(client).run(until_empty=True)
    assert client.queue("raw.dead").counts().ready == 30


def test_check_finds_each_error(drained: Drained) -> None:
    """One after the other; each is taken back, and the check passes again."""
    assert drained.different() == []
    results = drained.results

    def seen(after: dict[str, Any]) -> set[str]:
        """Return the findings of the check if the flight 1 is stored like this, or not at all."""
        [before] = results.find({"_id": 1})
        results.delete_one({"_id": 1})
        if after:
            results.insert_one(before | after)
        found = set(drained.different())
        results.replace_one({"_id": 1}, before, upsert=True)
        assert drained.different() == []
        return found

    missing = {"carriers, UA, flights", "carriers, UA, mean_delay", "queues, on-time, out"}
    assert missing <= seen({})
    assert seen({"delay": 12}) == {"carriers, UA, mean_delay"}
    elsewhere = {"carriers, UA, late", "queues, late, in", "queues, on-time, out"}
    assert elsewhere <= seen({"passed": ["raw", "parsed", "late"]})

    late = drained.client.queue("late", flights.Flight)
    late.push(flight())
    assert drained.different() == ["queues, late, in"]
    late.purge()

    raw = drained.client.queue("raw")
    raw.push(drained.lines[0])  # a good row among the dead letters
    [good] = raw.reserve_many(1)
    raw.bury(good)
    assert drained.different() == ["queues, raw, dead"]
    drained.client.queue("raw.dead").remove(good.id)
    assert drained.different() == []
    drained.client.queue("raw.dead").pop(0)
    assert drained.different() == ["queues, raw, dead", figures.DEAD]


def test_check_counts_flights_that_were_stored_again(drained: Drained) -> None:
    """The killed consumer held the flights 1 and 17, and only 1 was stored again."""
    drained.results.update_one({"_id": 1}, {"$inc": {"writes": 1}})
    found = figures.measured(drained.client, drained.results, 0, [1, 17])
    assert found[figures.BACK] == 1


def test_a_carrier_in_one_place_only_is_a_difference() -> None:
    assert figures.compare({"a": {"b": 1}}, {"a": {"b": 1, "c": 2}}) == (
        2,
        [{"figure": "a, c", "file": None, "here": 2}],
    )
