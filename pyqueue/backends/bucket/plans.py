"""The operations of a bucket that differ from other queues, because messages share documents."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

from pyqueue.backends.bucket import managing, pushing
from pyqueue.backends.bucket.kind import Bucket
from pyqueue.backends.bucket.receiving import claims_of
from pyqueue.backends.bucket.stock import Stock
from pyqueue.backends.pushing import PushOptions
from pyqueue.backends.queue_plans import QueuePlans, register
from pyqueue.backends.receiving import Claims, Waiting
from pyqueue.messages import Counts, Id, Message
from pyqueue.requests import Plan


class BucketPlans(QueuePlans):
    """The operations of one bucket, as plans (sequences of commands)."""

    __slots__ = ()

    def push(
        self, payloads: Iterable[Any], **options: Unpack[PushOptions]
    ) -> Plan[list[Id | None]]:
        """Push messages, which share documents if possible. Return their ids."""
        return pushing.push(self.queue, self.kind, self.codec, self.options, payloads, **options)

    def claims(self, waiting: Waiting, *, pop: bool) -> Claims:
        """Return the functions that claim messages and that take back unused messages."""
        return claims_of(waiting.scan.of(Stock))

    def remove(self, id: Id) -> Plan[bool]:
        """Remove a message that is not held. Return whether it was removed."""
        return managing.remove(self.queue, self.kind, id)

    def purge(self) -> Plan[int]:
        """Delete the messages that are ready or scheduled. Return how many were deleted."""
        return managing.purge(self.queue, self.kind)

    def get(self, id: Id) -> Plan[Message[Any] | None]:
        """Return the message with this id, in any state, or None if the queue does not have it."""
        return managing.get(self.queue, self.codec, id)

    def peek(self, limit: int = 10) -> Plan[list[Message[Any]]]:
        """Return up to ``limit`` messages that would be received next, in that order."""
        return managing.peek(self.queue, self.kind, self.codec, limit)

    def counts(self, cap: int | None = None) -> Plan[Counts]:
        """Count the messages in each state, up to ``cap`` for each state."""
        return managing.counts(self.queue, cap)


register(Bucket.name, BucketPlans)
