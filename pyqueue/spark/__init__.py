"""Spark: queues as tables and streams, and stages that transform the messages between two queues.

This package needs ``pip install "pyqueue-mongo[spark]"``. ``import pyqueue`` imports neither this
package nor PySpark.
"""

from __future__ import annotations

from pyqueue.errors import Fenced
from pyqueue.spark.batches import Report
from pyqueue.spark.frames import struct_of
from pyqueue.spark.listener import QueueProgressListener
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
