"""pyqueue: a queue middleware on MongoDB, with fenced leases, delay, dead letter, history and atomic move-to-queue.

``Client`` is for blocking code, ``AsyncClient`` for async code; both give queues. See the documentation for a start.
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
