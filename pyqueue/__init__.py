"""Queues on MongoDB: fenced leases, delays, dead letters, history and atomic moves between queues.

``Client`` is for blocking code, ``AsyncClient`` for async code. Both give queues. The documentation
begins with docs/quickstart.md.
"""

from pyqueue.async_client import AsyncClient
from pyqueue.async_queues import AsyncQueue
from pyqueue.client import Client
from pyqueue.delivery import Delivery, Drop, Many, Reject, RetryLater, To
from pyqueue.errors import (
    ConfigurationError,
    DuplicateKey,
    Fenced,
    InvalidMessage,
    InvalidName,
    LeaseLost,
    QueueClosed,
    QueueError,
    Unavailable,
)
from pyqueue.messages import UNCHANGED, Backoff, Counts, Finished, Message, QueueInfo, Reservation
from pyqueue.pipeline import Pipeline
from pyqueue.queues import Queue
from pyqueue.worker import Worker

__all__ = [
    "UNCHANGED",
    "AsyncClient",
    "AsyncQueue",
    "Backoff",
    "Client",
    "ConfigurationError",
    "Counts",
    "Delivery",
    "Drop",
    "DuplicateKey",
    "Fenced",
    "Finished",
    "InvalidMessage",
    "InvalidName",
    "LeaseLost",
    "Many",
    "Message",
    "Pipeline",
    "Queue",
    "QueueClosed",
    "QueueError",
    "QueueInfo",
    "Reject",
    "Reservation",
    "RetryLater",
    "To",
    "Unavailable",
    "Worker",
]

__version__ = "0.1.0"
