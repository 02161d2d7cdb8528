"""``pyqueue demo --spark``: the flights pass from ``raw`` to ``parsed`` by a Spark stage, and are summed per carrier from claims.

The rows that are broken on purpose do not make it through ``parsed``: the transform leaves them out, and the stage finishes them.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from contextlib import ExitStack
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  # as all of Spark's users call it

from pyqueue import Client
from pyqueue.demo.figures import Figures, compare, expected
from pyqueue.demo.flights import LATE
from pyqueue.demo.rows import BROKEN, Line, with_broken
from pyqueue.spark import SparkStage, spark_session

__all__ = ["parsed", "run", "sums"]

QUIET = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
}
FIELDS = ("id", "month", "day", "dep_time", "arr_delay", "carrier", "flight")


def parsed(df: DataFrame) -> DataFrame:
    """Make flights of rows, which are strings in JSON; leave out what is no flight."""
    row = F.from_json("payload", ", ".join(f"{name} string" for name in FIELDS))
    rows = df.withColumn("row", row)

    def number(name: str) -> Any:
        return F.col(f"row.{name}").try_cast("int")

    def minutes(name: str) -> Any:
        return number(name).isNotNull() | (F.col(f"row.{name}") == "NA")

    sound = (
        number("month").between(1, 12)
        & number("day").between(1, 31)
        & number("flight").isNotNull()
        & minutes("dep_time")
        & minutes("arr_delay")
        & F.col("row.carrier").rlike("^[A-Z0-9]{2}$")
    )
    departed = number("dep_time").isNotNull()
    delay = number("arr_delay")
    flight = F.struct(
        number("id").alias("id"),
        F.col("row.carrier").alias("carrier"),
        delay.alias("delay"),
        (departed & (delay.isNull() | (delay >= LATE))).alias("late"),
        (~departed).alias("cancelled"),
    )
    return rows.where(F.coalesce(sound, F.lit(False))).select("id", flight.alias("payload"))


def sums(df: DataFrame) -> DataFrame:
    """Count per carrier, of flights in JSON."""
    flight = df.select(
        F.from_json("payload", "carrier string, delay int, late boolean, cancelled boolean").alias(
            "flight"
        )
    ).select("flight.*")
    return flight.groupBy("carrier").agg(
        F.count("*").alias("flights"),
        F.count_if("late").alias("late"),
        F.count_if("cancelled").alias("cancelled"),
        F.count("delay").alias("arrived"),
        F.coalesce(F.sum("delay"), F.lit(0)).alias("minutes"),
    )


def run(client: Client, lines: list[Line], stack: ExitStack) -> dict[str, Any]:
    """Run it; the answer is what ``show`` shows."""
    begun = time.monotonic()
    spark = spark_session("pyqueue demo", master="local[2]", config=QUIET)
    stack.callback(spark.stop)
    ready = time.monotonic()
    raw = client.queue("raw", lease=600, max_tries=5)  # as the stage has them
    queue = client.queue("parsed")
    pushed = 0
    rows = with_broken(iter(lines), len(lines))
    while some := list(itertools.islice(rows, 1000)):
        pushed += len(raw.push_many(some))
    stage = SparkStage(
        uri=client.url,
        namespace=client.namespace,
        source="raw",
        to="parsed",
        group="raw>parsed",
        transform=parsed,
        max_messages=10_000,
    )
    stage_reports = list(stage.run(spark, until_empty=True))
    totals: dict[str, Counter[str]] = {}
    claims = 0
    while True:
        with queue.claim("parsed>sums", limit=10_000) as claim:
            if not claim.ids:
                break
            for row in sums(claim.dataframe(spark)).collect():
                totals.setdefault(row["carrier"], Counter()).update(
                    {k: v for k, v in row.asDict().items() if k != "carrier"}
                )
            claim.commit()
            claims += 1
    seconds = time.monotonic() - ready
    carriers = {
        name: {
            "flights": total["flights"],
            "late": total["late"],
            "cancelled": total["cancelled"],
            "mean_delay": total["minutes"] / total["arrived"] if total["arrived"] else None,
        }
        for name, total in sorted(totals.items())
    }
    figures: Figures = {
        "carriers": carriers,
        "moved by the stage": sum(report.written for report in stage_reports),
        "dropped by the stage": sum(report.dropped for report in stage_reports),
        "left in the queues": raw.counts().total + queue.counts().total,
    }
    file = {
        "carriers": expected(lines, 0)["carriers"],
        "moved by the stage": len(lines),
        "dropped by the stage": BROKEN,
        "left in the queues": 0,
    }
    compared, wrong = compare(file, figures)
    return {
        "by": "spark",
        "seconds_to_start_spark": round(ready - begun, 3),
        "seconds": round(seconds, 3),
        "messages_per_second": round(pushed / seconds),
        "batches": len(stage_reports),
        "claims": claims,
        "moved": figures["moved by the stage"],
        "dropped": figures["dropped by the stage"],
        "carriers": carriers,
        "check": {"equal": not wrong, "compared": compared, "different": wrong},
    }
