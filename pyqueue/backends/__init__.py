"""Kinds of queues, and the plans that carry out their operations.

Read ``transitions`` first. Importing this package registers every kind of this release.
"""

from pyqueue.backends import bucket, ordered, priority, standard

__all__ = ["bucket", "ordered", "priority", "standard"]
