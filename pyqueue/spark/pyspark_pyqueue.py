"""Make Spark find the data source by itself.

Spark imports every top-level module whose name begins with ``pyspark_`` and registers its
``DefaultSource``. The wheel installs this file as such a module.
"""

from pyqueue.spark.source import QueueDataSource as DefaultSource

__all__ = ["DefaultSource"]
