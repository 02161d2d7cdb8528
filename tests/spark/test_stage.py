"""Stages and claims with a real session."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from pyqueue import Client
from pyqueue.spark import SparkStage
from tests.spark.fakes import Flow
from tests.spark.session import URI_ENV


class Flight(BaseModel):
    carrier: str
    delay: int
    tags: list[str] = []


FLIGHTS = [{"carrier": carrier, "delay": delay, "tags": ["x"]} for carrier in ("AA", "UA") for delay in (-5, 0, 10)]


def stage_of(flow: Flow, transform: Any, **options: Any) -> SparkStage:
    """A stage between a flow's queues."""
    return SparkStage(
        uri_env=URI_ENV,
        source=flow.source,
        to=flow.target,
        group="g",
        model=Flight,
        transform=transform,
        **options,
    )


def test_a_stage_that_moves(spark: Any, flow: Flow) -> None:
    flow.raw.push_many(FLIGHTS, headers={"n": 5})
    stage = stage_of(
        flow,
        lambda df: df.where("payload.delay > 0").selectExpr("id", "payload", "headers", "payload.carrier AS key"),
    )
    (report,) = stage.run(spark, until_empty=True)
    assert (report.claimed, report.written, report.dropped, report.failed, report.lost) == (6, 2, 4, 0, 0)
    moved = flow.clean.peek()
    assert [(each.payload, each.headers, each.key) for each in moved] == [
        ({"carrier": carrier, "delay": 10, "tags": ["x"]}, {"n": 5}, carrier) for carrier in ("AA", "UA")
    ]
    assert [[stop["q"] for stop in each.trail] for each in moved] == [[flow.source]] * 2
    assert flow.left() == []


@pytest.mark.filterwarnings("ignore:Cannot infer the eval type:UserWarning")
def test_a_stage_by_transaction(spark: Any, flow: Flow) -> None:
    """Any rows, a message that fails among them: it does not keep its neighbours."""
    from pyspark.sql.functions import udf

    flow.raw.push_many([*FLIGHTS, {"carrier": "ZZ", "delay": 7}])

    def check(carrier):  # type: ignore[no-untyped-def]  # Spark makes something of its own of hints
        if carrier == "ZZ":
            raise ArithmeticError("no such carrier")
        return carrier

    checked = udf(check, "string")
    stage = stage_of(
        flow,
        lambda df: (
            df.groupBy(checked("payload.carrier").alias("carrier"))
            .count()
            .selectExpr("struct(carrier, count) AS payload")
        ),
        output="transaction",
        max_tries=1,
    )
    report = stage.run_once(spark)
    assert (report.claimed, report.failed, report.lost) == (7, 1, 0)
    total: dict[str, int] = {}
    for each in flow.clean.peek(100):
        total[each.payload["carrier"]] = total.get(each.payload["carrier"], 0) + each.payload["count"]
    assert total == {"AA": 3, "UA": 3}
    (grave,) = flow.client.queue(f"{flow.source}.dead").peek()
    assert grave.payload["carrier"] == "ZZ"
    assert grave.error is not None
    assert "no such carrier" in grave.error["message"]
    assert flow.left() == []


def test_a_claim_as_a_frame(spark: Any, database: str, flow: Flow) -> None:
    flow.raw.push_many(FLIGHTS)
    queue = flow.client.queue(flow.source, Flight)
    with queue.claim("g", limit=100) as claim:
        df = claim.dataframe(spark)
        rows = df.groupBy("payload.carrier").sum("payload.delay").collect()
        assert {row[0]: row[1] for row in rows} == {"AA": 5, "UA": 5}
        assert df.count() == 6
        claim.commit()
        assert df.count() == 6  # it holds its rows
    assert flow.left() == []
    with Client("memory:") as memory:
        memory.queue("a").push({"x": 1})
        with memory.queue("a").claim("g", limit=5) as claim:
            assert claim.dataframe(spark).collect()[0].payload == '{"x": 1}'


def test_a_claim_whose_messages_do_not_fit_the_model(spark: Any, flow: Flow) -> None:
    (good, bad) = flow.raw.push_many([FLIGHTS[0], {"carrier": "AA", "delay": 0.5}])
    assert good != bad
    queue = flow.client.queue(flow.source, Flight)
    with pytest.raises(ValueError, match=f"message {bad} does not fit"), queue.claim("g", limit=100) as claim:
        claim.dataframe(spark)
    assert queue.counts().total == 2
