"""``pyqueue demo --spark``: a Spark stage parses the flights, and Spark sums them from claims.

The transform of the stage leaves out the rows that are broken on purpose. The stage finishes their
messages, so they never arrive in ``parsed``.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  # the usual name in Spark programs

from pyqueue import Client
from pyqueue.demo.figures import Figures, compare, expected
from pyqueue.demo.flights import LATE
from pyqueue.demo.report import Progress
from pyqueue.demo.rows import BROKEN, Line, with_broken
from pyqueue.spark import Report, SparkStage, spark_session

QUIET = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
}
#: The approximate number of batches of the stage. The first batch warms Spark up.
BATCHES = 5
FIELDS = ("id", "month", "day", "dep_time", "arr_delay", "carrier", "flight")


def parsed(df: DataFrame) -> DataFrame:
    """Convert rows, which are strings in JSON, to flights. Leave out the rows that are broken."""
    row = F.from_json("payload", ", ".join(f"{name} string" for name in FIELDS))
    rows = df.withColumn("row", row)

    def number(name: str) -> Any:
        return F.col(f"row.{name}").try_cast("int")

    def minutes(name: str) -> Any:
        return number(name).isNotNull() | (F.col(f"row.{name}") == "NA")

    valid = (
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
    return rows.where(F.coalesce(valid, F.lit(False))).select("id", flight.alias("payload"))


def sums(df: DataFrame) -> DataFrame:
    """Return the totals for each carrier. The payloads contain the flights as JSON."""
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


def run(
    client: Client, lines: list[Line], stack: ExitStack, show_progress: Progress
) -> dict[str, Any]:
    """Run the flights through Spark, and return the result that ``report`` prints.

    Args:
        client: A client on an empty namespace.
        lines: The lines of the file.
        stack: The stack that stops Spark when it is closed.
        show_progress: A function that is called after each batch.
    """
    begun = time.monotonic()
    spark = spark_session("pyqueue demo", master="local[2]", config=QUIET)
    stack.callback(spark.stop)
    ready = time.monotonic()
    raw = client.queue("raw", lease=600, max_tries=5)  # the options of the stage
    pushed = 0
    rows = with_broken(iter(lines), len(lines))
    while batch := list(itertools.islice(rows, 1000)):
        pushed += len(raw.push_many(batch))
    queues = {"raw": raw, "parsed": client.queue("parsed")}

    def progress() -> None:
        counts = {name: queue.counts().total for name, queue in queues.items()}
        show_progress(counts, 2 * counts["raw"] + counts["parsed"])

    progress()
    reports: list[Report] = []
    for report in _stage(client, max(1, pushed // BATCHES)).run(spark, until_empty=True):
        reports.append(report)
        progress()
    carriers, claims = _sum_claims(client, spark, progress)
    seconds = time.monotonic() - ready
    figures: Figures = {
        "carriers": carriers,
        "moved by the stage": sum(report.written for report in reports),
        "dropped by the stage": sum(report.dropped for report in reports),
        "left in the queues": sum(queue.counts().total for queue in queues.values()),
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
        "seconds_of_the_first_batch": round(sum(each.seconds for each in reports[:1]), 3),
        "messages_per_second": _rate(reports[1:]),
        "batches": len(reports),
        "claims": claims,
        "moved": figures["moved by the stage"],
        "dropped": figures["dropped by the stage"],
        "carriers": carriers,
        "check": {"equal": not wrong, "compared": compared, "different": wrong},
    }


def _rate(reports: list[Report]) -> int:
    """Return how many messages the stage claimed per second."""
    seconds = sum(each.seconds for each in reports)
    return round(sum(each.claimed for each in reports) / max(0.001, seconds))


def _stage(client: Client, max_messages: int) -> SparkStage:
    return SparkStage(
        uri=client.url,
        namespace=client.namespace,
        source="raw",
        to="parsed",
        group="raw>parsed",
        transform=parsed,
        max_messages=max_messages,
        telemetry=False,  # its figures would stay in the user's database
    )


def _sum_claims(
    client: Client, spark: SparkSession, progress: Callable[[], None]
) -> tuple[Figures, int]:
    """Sum the flights in ``parsed`` per carrier. Return the sums, and the number of claims."""
    queue = client.queue("parsed")
    totals: dict[str, Counter[str]] = {}
    claims = 0
    while True:
        with queue.claim("parsed>sums", limit=10_000) as claim:
            if not claim.ids:
                break
            for row in sums(claim.dataframe(spark)).collect():
                counts = row.asDict()
                totals.setdefault(counts.pop("carrier"), Counter()).update(counts)
            claim.commit()
            claims += 1
        progress()
    carriers = {
        name: {
            "flights": total["flights"],
            "late": total["late"],
            "cancelled": total["cancelled"],
            "mean_delay": total["minutes"] / total["arrived"] if total["arrived"] else None,
        }
        for name, total in sorted(totals.items())
    }
    return carriers, claims
