"""Spark: queues as its tables and streams, and stages whose batches its driver takes out of one queue and into the next.

Needs ``pip install "pyqueue-mongo[spark]"``. ``import pyqueue`` does not import it, nor PySpark.
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
