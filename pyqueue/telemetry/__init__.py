"""Telemetry: figures about queues, which clients count by hooks and store beside the queues.

``Client(telemetry=True)`` counts in memory (``figures``, ``counting``) and adds the figures to
documents every few seconds (``storing``, ``flushing``); ``presence`` shows which workers run.
``Queue.stats`` (``reading``) and ``metrics_text`` (``prometheus``) read them. Nothing here is part
of an operation on messages, and no failure here makes one fail.
"""

from pyqueue.telemetry.prometheus import CONTENT_TYPE, metrics_text
from pyqueue.telemetry.values import Latency, QueueStats

__all__ = ["CONTENT_TYPE", "Latency", "QueueStats", "metrics_text"]
