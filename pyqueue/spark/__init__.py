"""Spark: queues as tables and streams, and stages that transform the messages between two queues.

This package needs ``pip install "pyqueue-mongo[spark]"``. ``import pyqueue`` imports neither this
package nor PySpark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyqueue.errors import Fenced
from pyqueue.lazy import importer

if TYPE_CHECKING:
    from pyqueue.spark.listener import QueueProgressListener
    from pyqueue.spark.models import struct_of
    from pyqueue.spark.outputs import Report
    from pyqueue.spark.registration import register, spark_session
    from pyqueue.spark.source import QueueDataSource
    from pyqueue.spark.stage import SparkStage

__all__ = [
    "Fenced",
    "QueueDataSource",
    "QueueProgressListener",
    "Report",
    "SparkStage",
    "register",
    "spark_session",
    "struct_of",
]

if not TYPE_CHECKING:
    # Executors import the data source only: they may lack the packages of stages and models.
    __getattr__ = importer(
        __name__,
        {
            "listener": ["QueueProgressListener"],
            "models": ["struct_of"],
            "outputs": ["Report"],
            "registration": ["register", "spark_session"],
            "source": ["QueueDataSource"],
            "stage": ["SparkStage"],
        },
    )
