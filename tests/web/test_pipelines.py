"""The page of pipelines: its graph, what it leaves out, and where it draws things."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any

import pytest

from pyqueue.web.graphs import drawing, levels
from pyqueue.web.live import events
from pyqueue.web.pipelines_page import MOST_NODES
from tests.web.test_live import parsed, site_of, viewer_of
from tests.web.test_pages import MOST_BYTES
from tests.web.world import HOSTILE, World


@pytest.fixture
def flights(world: World) -> World:
    """A namespace with a pipeline of three queues, of which one has not been used."""

    async def fill() -> None:
        raw = world.client.queue("raw")
        await raw.push_many(range(40))
        await raw.move(*await raw.reserve_many(30, timeout=0), to="parsed")
        held = await raw.reserve(0)
        assert held is not None
        await raw.bury(held, error="torn")

    world.run(fill)
    world.graph("flights", {"raw": ["parsed", "late"], "parsed": []})
    world.flush()
    return world


def edges(values: Any) -> dict[tuple[str, str], float]:
    (pipeline,) = values["pipelines"]
    return {(each["source"], each["target"]): each["rate"] for each in pipeline["edges"]}


def test_pipeline_shows_numbers_and_rates(flights: World) -> None:
    pages = flights.pages()
    values = pages.json("/pipelines")
    nodes = {each["name"]: each for each in values["pipelines"][0]["nodes"]}
    assert [*nodes] == ["raw", "parsed", "late"]
    assert (nodes["raw"]["texts"]["ready"], nodes["raw"]["dead"]) == ("9", 1)
    assert (nodes["parsed"]["texts"]["ready"], nodes["late"]["known"]) == ("30", False)
    found = edges(values)
    assert 30 / 360 <= found["raw", "parsed"] <= 30 / 300
    assert found["raw", "late"] == 0
    text = pages.get("/pipelines")
    assert len(re.findall(r'<tspan data-live="raw:to:parsed">[56]\.\d/min<', text)) == 2
    assert text.count('data-live="raw:dead">1</tspan> dead · ') == 2
    assert "does not run" in text
    assert pages.json("/pipelines?name=flights")["wanted"] == "flights"
    pages.get("/pipelines?name=none", 404)


def test_messages_that_moved_here_count_as_in(flights: World) -> None:
    pages = flights.pages()
    values = pages.json("/")
    rows = {each["name"]: each for each in values["rows"]}
    assert 30 / 360 <= rows["parsed"]["in"] <= 30 / 300
    assert rows["raw"]["in"] == values["tiles"]["in"]
    assert rows["parsed"]["texts"]["in"].endswith("/min")


def test_rates_between_queues_are_live(flights: World) -> None:
    async def work() -> None:
        site = site_of(flights.pages())
        stream = events(site, viewer_of(site), every_s=0)
        await anext(stream)
        _, texts = parsed(await anext(stream))
        assert texts["raw:to:parsed"].endswith("/min")

    flights.run(work)


def test_run_of_a_pipeline_stores_its_graph(world: World) -> None:
    flushed = asyncio.Event()

    async def work() -> None:
        pipeline = world.client.pipeline("numbers")

        @pipeline.link("words", to="numbers")
        async def parse(word: str) -> int:
            return int(word)

        @pipeline.sink("numbers")
        async def keep(number: int) -> None:
            telemetry: Any = world.client._telemetry
            await telemetry.flush()
            flushed.set()

        await world.client.queue("words").push("42")
        await pipeline.run(until_empty=True, handle_signals=False)

    world.run(work)
    assert flushed.is_set()
    (pipeline,) = world.pages().json("/pipelines")["pipelines"]
    assert [(each["name"], each["handler"]) for each in pipeline["nodes"]] == [
        *[("words", "parse"), ("numbers", "keep")]
    ]
    assert [(each["source"], each["target"]) for each in pipeline["edges"]] == [
        ("words", "numbers")
    ]


def test_pipeline_that_runs_says_so(flights: World) -> None:
    flights.report("flights", "raw", kind="pipeline")
    flights.report("flights", "raw", kind="pipeline", _id="other", every=-1.0)
    text = flights.pages().get("/pipelines")
    assert ">1 process<" in text
    assert ">1 silent<" in text


def test_hidden_stage_is_not_drawn(flights: World) -> None:
    flights.graph("secrets", {"parsed": ["hidden"]})
    flights.graph("whole", {"hidden": ["raw"], "late": []})

    def allow(request: Any, action: str, queue: str | None) -> bool:
        return queue not in ("parsed", "hidden", "raw.dead")

    pages = flights.pages(allow=allow)
    text = pages.get("/pipelines")
    for word in ("parsed", "hidden", "secrets", "raw.dead", ":dead"):
        assert word not in text
    (first, second) = pages.json("/pipelines")["pipelines"]
    assert [each["name"] for each in first["nodes"]] == ["raw", "late"]
    assert ([each["name"] for each in second["nodes"]], second["edges"]) == (["late"], [])


def test_hostile_graphs_are_escaped_and_bounded(world: World) -> None:
    evil = HOSTILE[0]
    world.graph(evil, {f"{each} {number}": [evil] for number, each in enumerate(HOSTILE)})
    world.graph("large", {f"q{n}": [f"q{n + 1}"] for n in range(MOST_NODES + 40)})
    pages = world.pages()
    for path in ("/pipelines", "/pipelines?name=large"):
        text = pages.get(path)
        assert "<script>alert" not in text
        assert "<img" not in text
        assert len(text.encode()) < MOST_BYTES
    assert "It has more queues than a page shows." in pages.get("/pipelines?name=large")
    assert [each["name"] for each in pages.json("/pipelines")["rest"]] == ["large"]


# ---- the drawing


def node(name: str) -> dict[str, Any]:
    texts = dict.fromkeys(("ready", "reserved", "done", "dead", "dying", "p95"), "0")
    about = {"about": "work", "look": "", "known": True, "path": f"/q/{name}"}
    return {"name": name, "dead": 0, "dead_path": "/q/d", "texts": texts, **about}


def pipeline(*pairs: str) -> dict[str, Any]:
    """Return a pipeline with an arrow for each pair of letters."""
    names = dict.fromkeys("".join(pairs))
    arrows = [
        {"source": a, "target": b, "rate": 1.0, "text": "1.0/s"} for a, b in map(tuple, pairs)
    ]
    return {"name": "p", "nodes": [node(each) for each in names], "edges": arrows}


def boxes(look: str, *pairs: str) -> dict[str, tuple[float, float, float, float]]:
    """Return the left, top, right and bottom of each queue in a form of the graph."""
    text = str(drawing(pipeline(*pairs), ""))
    (form,) = re.findall(rf'<svg class="graph {look}".*?</svg>', text)
    width, height = map(float, re.findall(r'viewBox="0 0 (\d+) (\d+)"', form)[0])
    found = {}
    box = r'class="box " x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="(\d+)".*?class="queue"'
    for *numbers, name in re.findall(box + r"[^>]*>(\w)<", form):
        x, y, wide, high = map(float, numbers)
        found[name] = (x, y, x + wide, y + high)
        assert min(x, y) >= 0
        assert (x + wide <= width, y + high <= height) == (True, True)
    return found


GRAPHS: Sequence[Sequence[str]] = (
    ("ab", "bc", "bd", "be"),
    ("ab", "cb", "bd", "ad"),
    ("ab", "bc", "ca"),
    ("aa", "ab"),
    tuple(f"{a}{b}" for a, b in zip("abcdefghij", "bcdefghijk", strict=True)),
)


@pytest.mark.parametrize("pairs", GRAPHS)
@pytest.mark.parametrize("look", ["wide", "narrow"])
def test_boxes_do_not_overlap(look: str, pairs: Sequence[str]) -> None:
    found = [*boxes(look, *pairs).values()]
    assert len(found) == len(set("".join(pairs)))
    for place, one in enumerate(found):
        for other in found[place + 1 :]:
            beside = one[2] <= other[0] or other[2] <= one[0]
            below = one[3] <= other[1] or other[3] <= one[1]
            assert beside or below


def test_arrows_lead_forward() -> None:
    def found(*pairs: str) -> dict[str, int]:
        graph = pipeline(*pairs)
        return levels([each["name"] for each in graph["nodes"]], graph["edges"])

    assert found("ab", "bc", "bd", "be") == {"a": 0, "b": 1, "c": 2, "d": 2, "e": 2}
    assert [*found("ab", "bc", "bd", "be")] == ["a", "b", "c", "d", "e"]
    assert found("ab", "cb", "bd", "ad") == {"a": 0, "c": 0, "b": 1, "d": 2}
    assert found("ab", "bc", "ca") == {"a": 0, "b": 1, "c": 2}
    assert found("aa", "ab") == {"a": 0, "b": 1}
    wide, narrow = boxes("wide", "ab", "bc"), boxes("narrow", "ab", "bc")
    assert wide["a"][2] < wide["b"][0] < wide["b"][2] < wide["c"][0]
    assert narrow["a"][3] < narrow["b"][1] < narrow["b"][3] < narrow["c"][1]


def test_busy_arrows_are_wide_and_idle_arrows_dotted() -> None:
    graph = pipeline("ab", "ac", "ad")
    graph["edges"][1]["rate"], graph["edges"][2]["rate"] = 0.5, 0.0
    text = str(drawing(graph, ""))
    assert re.findall(r'class="arrow([ \w]*)" d="[^"]*" stroke-width="([\d.]+)"', text)[:3] == [
        *[("", "4.0"), ("", "2.8"), (" idle", "1.5")]
    ]
