"""Spark stages among Python stages, in code and in recipes.

Most tests give the transform a ``Frame`` instead of a DataFrame, so they need no JVM. The tests of
the batches themselves are in tests/spark.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pymongo
import pytest

from pyqueue import AsyncClient, Client, ConfigurationError, Pipeline
from pyqueue.backends.claims.claims import NamedClaims
from pyqueue.backends.claims.groups import Candidate
from pyqueue.messages import BatchOptions
from pyqueue.pipeline import spark_stage
from pyqueue.pipeline.graph import SparkOptions
from pyqueue.queue_base import backend_of
from pyqueue.runtime.connecting import runner_of
from tests.pipeline.place import Place, counted
from tests.spark.fakes import Frame, faked, no_session
from tests.support.recorder import Books

__all__ = ["faked"]  # a fixture


def positive(df: Any) -> Any:
    """Keep the positive numbers."""
    if isinstance(df, Frame):
        rows = [row for row in df.rows() if json.loads(row["payload"])["n"] > 0]
        return df.made_of(rows, "id", "payload")
    return df.where("cast(get_json_object(payload, '$.n') as int) > 0").select("id", "payload")


def sorted_out(df: Any) -> Any:
    """Send even and odd numbers to different queues."""
    if isinstance(df, Frame):
        rows = df.rows()
        for row in rows:
            row["queue"] = ("even", "odd")[json.loads(row["payload"])["n"] % 2]
        return df.made_of(rows, "id", "payload", "queue")
    odd = "cast(get_json_object(payload, '$.n') as int) % 2 = 1"
    return df.selectExpr("id", "payload", f"if({odd}, 'odd', 'even') AS queue")


def broken(df: Any) -> Any:
    """Fail on every batch."""
    raise RuntimeError("no luck")


@pytest.fixture
def frames(faked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark stages pass Frames to their transforms, and start no session."""
    monkeypatch.setattr(spark_stage, "_session", no_session)


@pytest.fixture(
    params=[
        "frames",
        pytest.param("spark", marks=[pytest.mark.spark_long, pytest.mark.xdist_group("spark")]),
    ]
)
def engine(request: pytest.FixtureRequest) -> None:
    """Let the stages of a test run on Frames, and on Spark."""
    request.getfixturevalue(request.param)


def numbers(client: Client, queue: str, *, end: int = 5) -> None:
    client.queue(queue).push_many([{"n": number} for number in range(end)])


@pytest.mark.usefixtures("engine")
def test_spark_stage_mixes_with_python_stages(client: Client) -> None:
    """A Spark stage runs between two Python stages."""
    pipeline = client.pipeline("mixed")
    pipeline.link("a", lambda value: {"n": value["n"] - 1}, to="b")
    pipeline.spark("b", positive, to="c")
    seen = []
    pipeline.sink("c", lambda value: seen.append(value["n"]))
    numbers(client, "a")
    report = pipeline.run(until_empty=True)
    assert sorted(seen) == [1, 2, 3]
    assert counted(report, "b") == {"in": 5, "out": 3, "dropped": 2}
    assert {each.counts.total for each in client.queues()} == {0}
    assert "positive" in pipeline.show()


@pytest.mark.usefixtures("engine")
def test_spark_stage_chooses_by_the_column_queue(client: Client) -> None:
    """The stage chooses between an output and a Python stage."""
    pipeline = client.pipeline("chosen").spark("b", sorted_out, to=["even", "odd"])
    seen = []
    pipeline.sink("odd", lambda value: seen.append(value["n"]))
    numbers(client, "b")
    report = pipeline.run(until_empty=True)
    assert sorted(seen) == [1, 3]
    assert sorted(each.payload["n"] for each in client.queue("even").peek()) == [0, 2, 4]
    assert counted(report, "b") == {"in": 5, "out": 5}


SUNK: dict[int, list[int]] = {}


def sink(df: Any, number: int) -> None:
    """Keep the numbers of a claim."""
    rows = df.rows() if isinstance(df, Frame) else df.collect()
    SUNK[number] = sorted(json.loads(row["payload"])["n"] for row in rows)


RECIPE = """
[[stages]]
queue = "b"
spark = "tests.pipeline.test_spark:positive"
to = "c"
max_messages = 2
members = 2
"""


@pytest.mark.usefixtures("frames")
def test_spark_stage_row_of_another_queue_ends_the_run(client: Client) -> None:
    numbers(client, "b")
    pipeline = client.pipeline().spark("b", sorted_out, to=["even", "uneven"])
    with pytest.raises(ConfigurationError, match="'odd' is not one of even, uneven"):
        pipeline.run(until_empty=True)
    assert [each.name for each in client.queues() if each.counts.total] == ["b"]
    assert client.queue("b").counts().ready == 5


def test_spark_stage_of_several_targets_is_a_choice(offline: Client) -> None:
    pipeline = offline.pipeline("chosen").spark("b", sorted_out, to=["even", "odd"])
    pipeline.sink("odd", print)
    stage = pipeline.graph.stages["b"]
    assert (stage.to, pipeline.graph.outputs) == (("even", "odd"), ["even"])
    assert stage.spark is not None
    assert stage.spark.group == "b", "it stays if the stage gets another target"
    assert pipeline.show() == (
        "chosen\n"
        "  b ── sorted_out ┬─> even\n"
        "                  └─> odd\n"
        "  even (output)\n"
        "  odd ── print ──■\n"
    )
    pipeline.link("even", print, to="b")
    with pytest.raises(ConfigurationError, match="b -> even -> b is a cycle"):
        pipeline.graph.check(allow_cycles=False)


@pytest.mark.usefixtures("frames")
def test_spark_stage_without_a_target_is_a_sink(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "sunk.toml"
    recipe = RECIPE.replace('to = "c"', "").replace("members = 2", "")
    path.write_text(recipe.replace(":positive", ":sink"))
    pipeline = Pipeline.from_recipe(client, path).link("a", dict, to="b")
    stage = pipeline.graph.stages["b"]
    assert (stage.to, stage.spark and stage.spark.group) == ((), "b")
    assert pipeline.show().splitlines()[2:] == ["  b ── sink ──■"]
    assert "|sink| q1end" in pipeline.show("mermaid").replace('"', "")
    assert "<circle" in pipeline.show("svg")
    numbers(client, "a")
    SUNK.clear()
    report = pipeline.run(until_empty=True)
    assert sorted(n for part in SUNK.values() for n in part) == [*range(5)]
    assert len(SUNK) > 2, "a batch has two messages at most"
    assert counted(report, "b") == {"in": 5, "out": 5}


@pytest.mark.usefixtures("frames")
def test_spark_stage_runs_on_every_client(server: Place) -> None:
    """Beside an async client, the batches run on a blocking connection to the same server."""
    numbers(server.client, "b")
    report = server.run(
        lambda client: client.pipeline().spark("b", positive, to="c"), until_empty=True
    )
    assert counted(report, "b") == {"in": 5, "out": 4, "dropped": 1}
    assert server.queue("c").counts().ready == 4


@pytest.mark.spark_long
@pytest.mark.usefixtures("spark")
def test_spark_stage_runs_on_an_async_client(url: str, client: Client) -> None:
    numbers(client, "b")

    async def main() -> None:
        async with AsyncClient(url) as ours:
            report = await ours.pipeline().spark("b", positive, to="c").run(until_empty=True)
            assert (report.stages["b"]["out"], report.stages["b"]["dropped"]) == (4, 1)

    asyncio.run(main())
    assert client.queue("c").counts().ready == 4


@pytest.mark.usefixtures("frames")
def test_spark_stage_buries_what_its_transform_fails_on(client: Client) -> None:
    """Every message fails, so the batch fails as a whole. The stage continues nevertheless."""
    pipeline = client.pipeline("broken").spark("b", broken, to="c", max_tries=1)
    client.queue("b").push_many([1, 2])
    pipeline.run(until_empty=True)
    buried = client.queue("b.dead")
    assert buried.counts().ready == 2
    assert {each.error["message"] for each in buried.peek() if each.error} == {"no luck"}


@pytest.mark.usefixtures("frames")
def test_spark_stage_without_a_data_frame_ends_the_run(client: Client) -> None:
    client.queue("b").push_many([1, 2])
    with pytest.raises(ConfigurationError, match="expected a DataFrame as its result, found int"):
        client.pipeline().spark("b", lambda df: 5, to="c").run(until_empty=True)
    assert sorted(each.payload for each in client.queue("b").peek()) == [1, 2]
    assert client.queue("c").counts().total == 0


@pytest.mark.usefixtures("frames")
def test_spark_stage_taken_over_stands_by_and_continues(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """The other runner dies with the batch. The stage waits for the end of its lease."""
    backend = backend_of(client.queue("b"))
    backend.terms = replace(backend.terms, owner=partial(str, "other"))
    claims = NamedClaims(backend, "b>c")
    batches: list[Any] = []

    def overtaken(df: Any) -> Any:
        if not batches:
            batches.append(runner_of(client).run(claims.begin(10, 2.0))[2])
            assert batches[0], "the other process goes on with this batch"
        return positive(df)

    numbers(client, "b")
    report = client.pipeline().spark("b", overtaken, to="c").run(until_empty=True)
    assert client.queue("c").counts().total == 4
    assert client.queue("b").counts().total == 0
    assert counted(report, "b") == {"in": 5, "out": 4, "dropped": 1}
    assert "another runner" in caplog.text


@pytest.mark.usefixtures("frames")
def test_spark_stage_releases_its_group_at_the_end(client: Client) -> None:
    """So another process takes over at once."""
    client.pipeline().spark("b", positive, to="c").run(until_empty=True)
    claims = NamedClaims(backend_of(client.queue("b")), "b>c")
    runner_of(client).run(claims.adopt(600, Candidate("other")))


def test_spark_stage_without_pyspark_names_the_remedy(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyqueue.spark.batches", None)
    with pytest.raises(
        ConfigurationError, match=r'queue .b. needs PySpark; pip install "pyqueue-mongo\[spark\]"'
    ):
        client.pipeline().spark("b", positive, to="c").run(until_empty=True)


def test_spark_stage_can_be_a_decorator(offline: Client) -> None:
    pipeline = offline.pipeline()

    @pipeline.spark("b", to="c", max_messages=2)
    def double(df: Any) -> Any:
        return df + df

    assert double(2) == 4, "a decorator returns the function unchanged"
    stage = pipeline.graph.stages["b"]
    assert (stage.kind, stage.handler, stage.to) == ("spark", double, ("c",))
    batches: BatchOptions = {"output": "move", "max_messages": 2, "members": 1}
    assert stage.spark == SparkOptions("b>c", batches, by_column=False)


@pytest.mark.usefixtures("engine")
def test_recipe_names_a_transform(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "mixed.toml"
    path.write_text(RECIPE)
    numbers(client, "b")
    Pipeline.from_recipe(client, path).run(until_empty=True)
    assert client.queue("c").counts().ready == 4


def test_recipe_gives_a_spark_stage_several_targets(offline: Client, tmp_path: Path) -> None:
    path = tmp_path / "chosen.toml"
    path.write_text(RECIPE.replace('"c"', '["c", "d"]'))
    stage = Pipeline.from_recipe(offline, path).graph.stages["b"]
    assert (stage.to, stage.spark and stage.spark.by_column) == (("c", "d"), True)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (('to = "c"', 'to = ["c", "c"]'), "lists 'c' twice"),
        (('to = "c"', "to = []"), "leads nowhere"),
        (('to = "c"', "to = 5"), r"stages\[0\].to"),
        (("tests.pipeline.test_spark:positive", "nothing.there:x"), "cannot be imported"),
        (('to = "c"', 'to = "c"\nhandler = "a:b"'), r"stages\[0\].handler"),
        (("members = 2", 'members = "2"'), r"stages\[0\].members"),
        (('to = "c"', 'to = "c"\nconcurrency = 2'), r"stages\[0\].concurrency"),
    ],
)
def test_recipe_wrong_spark_stage_is_refused(
    offline: Client, tmp_path: Path, change: tuple[str, str], complaint: str
) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(RECIPE.replace(*change))
    with pytest.raises(ConfigurationError, match=complaint):
        Pipeline.from_recipe(offline, path)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"group": "a~b"}, "group"),
        ({"output": "copy"}, "output"),
        ({"output": "transaction", "max_messages": 10_001}, "max_messages"),
        ({"max_messages": 0}, "max_messages"),
        ({"members": 0}, "members"),
        ({"members": 101}, "members"),
    ],
)
def test_spark_stage_wrong_option_is_refused(
    offline: Client, options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        offline.pipeline().spark("b", positive, to="c", **options).run(until_empty=True)


def test_spark_stage_transform_must_be_a_function(offline: Client) -> None:
    with pytest.raises(ConfigurationError, match="transform"):
        offline.pipeline().spark("b", "positive", to="c")  # type: ignore[call-overload]


def test_spark_stage_on_an_async_client_needs_a_url(url: str) -> None:
    async def main() -> None:
        async with (
            pymongo.AsyncMongoClient[dict[str, Any]](url) as mongo,
            AsyncClient(mongo["t"]) as ours,
        ):
            with pytest.raises(ConfigurationError, match="a client that was created from a URL"):
                await ours.pipeline().spark("b", positive, to="c").run(until_empty=True)

    asyncio.run(main())


@pytest.mark.usefixtures("frames")
def test_spark_stage_of_an_async_client_is_told(url: str) -> None:
    books = Books()

    async def main() -> None:
        async with AsyncClient(url, hooks=[books]) as client:
            await client.queue("b").push_many([{"n": number} for number in range(3)])
            pipeline = client.pipeline().spark("b", positive, to="c")
            await pipeline.run(until_empty=True, handle_signals=False)

    asyncio.run(main())
    assert +books.left == {("b", "move"): 2, ("b", "commit"): 1}
