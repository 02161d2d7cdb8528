"""The request of a consumer that waits for several queues at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyqueue.requests import Request, Wait


@dataclass(slots=True)
class WaitForAny(Request[bool]):
    """Wait among the consumers of each of several queues, until one of these waits ends.

    The answer is whether to scan for messages: False if every event was about a later instant. By
    then, the consumer no longer waits in any queue. In each queue, it may have received a wake-up
    that was meant for one consumer. So it must scan that queue, or wake the next consumer.
    """

    waits: Sequence[Wait]
