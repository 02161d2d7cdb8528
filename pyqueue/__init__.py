"""Queues on MongoDB: fenced leases, delays, dead letters, history and atomic moves between queues.

``Client`` is for blocking code, ``AsyncClient`` for async code. The documentation starts at
docs/quickstart.md.
"""

from typing import TYPE_CHECKING

from pyqueue.errors import (
    ConfigurationError,
    Disconnected,
    DuplicateKey,
    Fenced,
    InvalidMessage,
    InvalidName,
    JobFailed,
    LeaseLost,
    QueueClosed,
    QueueError,
    TimedOut,
    Unavailable,
)
from pyqueue.facts import Attempt, Burial, ErrorInfo, Gather, Progress
from pyqueue.lazy import importer
from pyqueue.limits import Limit
from pyqueue.messages import (
    UNCHANGED,
    Backoff,
    BulkResult,
    ConsumerCounts,
    ConsumerInfo,
    Counts,
    Finished,
    Message,
    Page,
    Push,
    QueueInfo,
    Reservation,
    ScheduleInfo,
    StreamMessage,
    StreamReservation,
)

if TYPE_CHECKING:
    from pyqueue.async_client import AsyncClient
    from pyqueue.async_queues import AsyncQueue
    from pyqueue.async_selections import AsyncSelection
    from pyqueue.async_streams import AsyncConsumer, AsyncStream
    from pyqueue.client import Client
    from pyqueue.delivery import BatchFailed, Delivery, Drop, Many, Reject, RetryLater, To
    from pyqueue.hooks import Hooks
    from pyqueue.pipeline import Pipeline, Report
    from pyqueue.queues import Queue
    from pyqueue.selections import Selection
    from pyqueue.specs import QueueSpec
    from pyqueue.streams import Consumer, Stream
    from pyqueue.telemetry.values import Latency, QueueStats
    from pyqueue.worker import Worker

__all__ = [
    "UNCHANGED",
    "AsyncClient",
    "AsyncConsumer",
    "AsyncQueue",
    "AsyncSelection",
    "AsyncStream",
    "Attempt",
    "Backoff",
    "BatchFailed",
    "BulkResult",
    "Burial",
    "Client",
    "ConfigurationError",
    "Consumer",
    "ConsumerCounts",
    "ConsumerInfo",
    "Counts",
    "Delivery",
    "Disconnected",
    "Drop",
    "DuplicateKey",
    "ErrorInfo",
    "Fenced",
    "Finished",
    "Gather",
    "Hooks",
    "InvalidMessage",
    "InvalidName",
    "JobFailed",
    "Latency",
    "LeaseLost",
    "Limit",
    "Many",
    "Message",
    "Page",
    "Pipeline",
    "Progress",
    "Push",
    "Queue",
    "QueueClosed",
    "QueueError",
    "QueueInfo",
    "QueueSpec",
    "QueueStats",
    "Reject",
    "Report",
    "Reservation",
    "RetryLater",
    "ScheduleInfo",
    "Selection",
    "Stream",
    "StreamMessage",
    "StreamReservation",
    "TimedOut",
    "To",
    "Unavailable",
    "Worker",
]

__version__ = "0.2.0.dev0"

if not TYPE_CHECKING:
    # These modules need pydantic and anyio, which the executors of a Spark cluster may lack.
    __getattr__ = importer(
        __name__,
        {
            "async_client": ["AsyncClient"],
            "async_queues": ["AsyncQueue"],
            "async_selections": ["AsyncSelection"],
            "async_streams": ["AsyncConsumer", "AsyncStream"],
            "client": ["Client"],
            "delivery": [
                *("BatchFailed", "Delivery", "Drop", "Many", "Reject", "RetryLater", "To"),
            ],
            "hooks": ["Hooks"],
            "pipeline": ["Pipeline", "Report"],
            "queues": ["Queue"],
            "specs": ["QueueSpec"],
            "selections": ["Selection"],
            "streams": ["Consumer", "Stream"],
            "telemetry.values": ["Latency", "QueueStats"],
            "worker": ["Worker"],
        },
    )

    def __dir__() -> list[str]:
        return [*globals(), *__all__]
