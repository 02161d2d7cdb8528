"""The request of a consumer that waits for several queues at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyqueue.requests import Request, Wait


@dataclass(slots=True)
class WaitForAny(Request[bool]):
    """Wait for several queues at once, as one of the consumers of each, until one wait ends.

    The answer is whether to scan for messages: False if every event was about a later instant. By
    then, the consumer no longer waits for any of the queues. In each queue, it may have received a
    wake-up that only one consumer gets. So it must scan that queue, or wake the next consumer.
    """

    waits: Sequence[Wait]
