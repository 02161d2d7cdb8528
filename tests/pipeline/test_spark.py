"""Stages of Spark's among stages of Python, in code and in recipes. The batches themselves are tests/spark's."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pymongo
import pytest

from pyqueue import AsyncClient, Client, ConfigurationError, Fenced, Pipeline
from pyqueue.backends.named_claims import NamedClaims
from pyqueue.connecting import runner_of
from pyqueue.queues import backend_of


def positive(df: Any) -> Any:
    """A transform: leave out what is not positive."""
    return df.where("cast(get_json_object(payload, '$.n') as int) > 0").select("id", "payload")


def broken(df: Any) -> Any:
    """A transform that fails on everything."""
    raise RuntimeError("no luck")


@pytest.mark.spark_long
@pytest.mark.usefixtures("spark")
def test_one_graph_mixes_python_and_spark(client: Client) -> None:
    pipeline = client.pipeline("mixed")
    pipeline.link("a", lambda value: {"n": value["n"] - 1}, to="b")
    pipeline.spark("b", positive, to="c")
    seen = []
    pipeline.sink("c", lambda value: seen.append(value["n"]))
    client.queue("a").push_many([{"n": number} for number in range(5)])
    report = pipeline.run(until_empty=True)
    assert sorted(seen) == [1, 2, 3]
    assert report.stages["b"] == {
        "in": 5,
        "out": 3,
        "dropped": 2,
        "retried": 0,
        "dead": 0,
        "lost": 0,
        "released": 0,
    }
    assert {each.counts.total for each in client.queues()} == {0}
    assert "positive" in pipeline.show()


@pytest.mark.spark_long
@pytest.mark.usefixtures("spark")
def test_on_an_async_client(url: str, client: Client) -> None:
    client.queue("b").push_many([{"n": number} for number in range(5)])

    async def main() -> None:
        async with AsyncClient(url) as ours:
            report = await ours.pipeline().spark("b", positive, to="c").run(until_empty=True)
            assert (report.stages["b"]["out"], report.stages["b"]["dropped"]) == (4, 1)

    asyncio.run(main())
    assert client.queue("c").counts().ready == 4


@pytest.mark.spark_long
@pytest.mark.usefixtures("spark")
def test_a_transform_that_fails_on_everything_is_tried_again(client: Client) -> None:
    pipeline = client.pipeline("broken").spark("b", broken, to="c", max_tries=1)
    client.queue("b").push_many([1, 2])
    pipeline.run(until_empty=True)
    assert client.queue("b.dead").counts().ready == 2
    assert {each.error["message"] for each in client.queue("b.dead").peek() if each.error} == {
        "no luck"
    }


@pytest.mark.spark_long
@pytest.mark.usefixtures("spark")
def test_a_transform_that_answers_no_data_frame_ends_the_run(client: Client) -> None:
    client.queue("b").push_many([1, 2])
    with pytest.raises(ConfigurationError, match="it returned int: return a DataFrame"):
        client.pipeline().spark("b", lambda df: 5, to="c").run(until_empty=True)
    assert sorted(each.payload for each in client.queue("b").peek()) == [1, 2]
    assert client.queue("c").counts().total == 0


@pytest.mark.spark_long
@pytest.mark.usefixtures("spark")
def test_a_stage_that_another_process_takes_over_ends_the_run(client: Client) -> None:
    claims = NamedClaims(backend_of(client.queue("b")), "b>c")

    def overtaken(df: Any) -> Any:
        assert runner_of(client).run(claims.begin(10, 30.0))[2], "the other goes on with this batch"
        return positive(df)

    client.queue("b").push_many([{"n": number} for number in range(5)])
    with pytest.raises(Fenced):
        client.pipeline().spark("b", overtaken, to="c").run(until_empty=True)
    assert client.queue("c").counts().total == 0


def test_without_pyspark_the_remedy_is_named(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyqueue.spark.batches", None)
    with pytest.raises(
        ConfigurationError, match=r'queue .b. needs PySpark: pip install "pyqueue-mongo\[spark\]"'
    ):
        client.pipeline().spark("b", positive, to="c").run(until_empty=True)


def test_a_stage_of_sparks_may_be_decorated(client: Client) -> None:
    pipeline = client.pipeline()

    @pipeline.spark("b", to="c", max_messages=2)
    def double(df: Any) -> Any:
        return df + df

    assert double(2) == 4, "it is what it was"
    stage = pipeline.graph.stages["b"]
    assert (stage.kind, stage.handler, stage.to) == ("spark", double, ("c",))
    assert stage.batches == {"group": "b>c", "output": "move", "max_messages": 2}


@pytest.mark.spark_long
@pytest.mark.usefixtures("spark")
def test_a_recipe_names_a_transform(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "mixed.toml"
    path.write_text(
        """
        [[stages]]
        queue = "b"
        spark = "tests.pipeline.test_spark:positive"
        to = "c"
        max_messages = 2
        """
    )
    client.queue("b").push_many([{"n": number} for number in range(5)])
    Pipeline.from_recipe(client, path).run(until_empty=True)
    assert client.queue("c").counts().ready == 4


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            'queue = "b"\nspark = "tests.pipeline.test_spark:positive"',
            r"stages\[0\].to: Field required",
        ),
        ('queue = "b"\nspark = "nothing.there:x"\nto = "c"', "cannot be imported"),
        (
            'queue = "b"\nspark = "tests.pipeline.test_spark:positive"\nto = "c"\nhandler = "a:b"',
            r"stages\[0\].handler",
        ),
        (
            'queue = "b"\nspark = "tests.pipeline.test_spark:positive"\nto = "c"\nconcurrency = 2',
            r"stages\[0\].concurrency",
        ),
    ],
)
def test_a_recipe_that_is_wrong(client: Client, tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(f"[[stages]]\n{text}")
    with pytest.raises(ConfigurationError, match=complaint):
        Pipeline.from_recipe(client, path)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"group": "a~b"}, "group"),
        ({"output": "copy"}, "output"),
        ({"output": "transaction", "max_messages": 10_001}, "max_messages"),
        ({"max_messages": 0}, "max_messages"),
    ],
)
def test_what_a_stage_of_sparks_may_be_given(
    client: Client, options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        client.pipeline().spark("b", positive, to="c", **options).run(until_empty=True)


def test_a_transform_is_a_function(client: Client) -> None:
    with pytest.raises(ConfigurationError, match="transform"):
        client.pipeline().spark("b", "positive", to="c")  # type: ignore[call-overload]


def test_an_async_client_without_a_url_is_refused(url: str) -> None:
    async def main() -> None:
        async with (
            pymongo.AsyncMongoClient[dict[str, Any]](url) as mongo,
            AsyncClient(mongo["t"]) as ours,
        ):
            with pytest.raises(ConfigurationError, match="needs a client that was given a URL"):
                await ours.pipeline().spark("b", positive, to="c").run(until_empty=True)

    asyncio.run(main())
