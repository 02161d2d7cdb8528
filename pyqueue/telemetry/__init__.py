"""Telemetry: figures about queues, which clients count in hooks and store beside the queues.

A client with telemetry counts in memory (``figures``, ``counting``) and adds the figures to
documents every few seconds (``storing``, ``flushing``); ``presence`` shows which workers run.
``Queue.stats`` (``reading``) and ``metrics_text`` (``prometheus``) read them. Nothing here is part
of an operation on messages, and no failure here makes an operation fail.
"""

from typing import TYPE_CHECKING

from pyqueue.lazy import importer
from pyqueue.telemetry.values import Latency, QueueStats

if TYPE_CHECKING:
    from pyqueue.telemetry.prometheus import CONTENT_TYPE, metrics_text

__all__ = ["CONTENT_TYPE", "Latency", "QueueStats", "metrics_text"]

if not TYPE_CHECKING:
    # Most programs that import pyqueue serve no metrics.
    __getattr__ = importer(__name__, {"prometheus": ["CONTENT_TYPE", "metrics_text"]})
