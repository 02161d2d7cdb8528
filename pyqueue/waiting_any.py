"""One wait for several queues: a request for a consumer that receives from all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyqueue.requests import Request, Wait


@dataclass(slots=True)
class WaitForAny(Request[bool]):
    """Wait among the consumers of each of several queues, until one of these waits ends.

    The answer is whether to scan for messages: False if every event was about a later instant. The
    consumer no longer waits in any of the queues then. In each queue, it may have used up a wake
    that was meant for one consumer. So it scans the queue, or passes the wake on.
    """

    waits: Sequence[Wait]
