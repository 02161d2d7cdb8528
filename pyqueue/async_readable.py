# Generated from readable.py by `make faces`. Edit readable.py, and run `make faces`.
"""``AsyncReadable``: the methods of a queue that only read its messages and its state."""

from __future__ import annotations

from datetime import datetime
from typing import TypeVar

from pyqueue.async_selections import AsyncSelectable
from pyqueue.messages import Counts, Duration, Finished, Id, Message
from pyqueue.telemetry.reading import stats
from pyqueue.telemetry.values import QueueStats

T = TypeVar("T")


class AsyncReadable(AsyncSelectable[T]):
    """The methods of a queue that only read, for async code."""

    async def get(self, id: Id) -> Message[T] | Finished[T] | None:
        """Return a message in any state.

        Args:
            id: The id of the message; an ObjectId may be given as text.

        Returns:
            The message, or None if the id is unknown in this queue. A message that does not fit the
            model has its raw payload.
        """
        return await self._runner.run(self._backend.get(id))

    async def peek(self, limit: int = 10) -> list[Message[T]]:
        """Return the next messages without receiving them. Invalid messages have an ``error``.

        Args:
            limit: The maximum number of messages.
        """
        return await self._runner.run(self._backend.peek(limit))

    async def counts(self, cap: int | None = None) -> Counts:
        """Count the messages by state. The more messages there are, the longer this takes.

        On a replica set, all numbers describe the same instant. On a standalone server and on
        "memory:", a message that changes its state during the count may be counted twice, or not at
        all.

        Args:
            cap: Count up to this number in each state. A count of ``cap`` means "``cap`` or
                more".
        """
        return await self._runner.run(self._backend.counts(cap))

    async def stats(self, since: Duration | datetime = 3600) -> QueueStats:
        """Return rates and latencies, as clients with telemetry have stored them.

        The last few seconds may be missing.

        Args:
            since: The beginning: a number of seconds ago, or an instant. At most 30 days ago.

        Returns:
            The stats in whole minutes, or in whole hours if they begin more than a day ago.
        """
        return await self._runner.run(stats(self.name, since))

    async def next_when(self) -> datetime | None:
        """Return when the first message becomes or became eligible, or None if there is none.

        A reserved message becomes eligible at the end of its lease.
        """
        return await self._runner.run(self._backend.next_when())

    async def paused(self) -> bool:
        """Return whether the queue is paused."""
        return await self._runner.run(self._backend.paused())

    async def history(
        self, limit: int = 100, *, since: datetime | None = None
    ) -> list[Finished[T]]:
        """Return finished messages, newest first, with ``outcome`` and ``processed``.

        Args:
            limit: The maximum number of messages.
            since: Return only messages that were finished at or after this instant.
        """
        return await self._runner.run(self._backend.history(limit, since=since))
