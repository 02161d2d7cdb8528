"""Kinds of queues, and the plans that carry out their operations.

Read ``transitions`` first. Importing this package registers every kind of this release, and the
deletion of unused queues.
"""

from pyqueue.backends.bucket.bulk import PackContents
from pyqueue.backends.bucket.form import Packed
from pyqueue.backends.bucket.kind import Bucket
from pyqueue.backends.bucket.plans import BucketPlans
from pyqueue.backends.bucket.requeueing import requeue_packed
from pyqueue.backends.ordered.kind import Ordered
from pyqueue.backends.priority.kind import Priority
from pyqueue.backends.standard import Standard
from pyqueue.backends.unused import delete_unused

__all__ = [
    "Bucket",
    "BucketPlans",
    "Ordered",
    "PackContents",
    "Packed",
    "Priority",
    "Standard",
    "delete_unused",
    "requeue_packed",
]
