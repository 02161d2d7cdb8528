"""Spark imports every top-level module named pyspark_*, and registers its DefaultSource. The wheel installs this one there."""

from pyqueue.spark.source import QueueDataSource as DefaultSource

__all__ = ["DefaultSource"]
