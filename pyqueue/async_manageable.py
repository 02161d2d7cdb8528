# Generated from manageable.py by `make faces`. Edit manageable.py, and run `make faces`.
"""``AsyncManageable``: the methods of a queue that change messages without receiving them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from pyqueue.async_readable import AsyncReadable
from pyqueue.backends.browsing import BrowseOptions
from pyqueue.messages import Cancelled, Id, Page, State

T = TypeVar("T")


class AsyncManageable(AsyncReadable[T]):
    """The methods by which operators manage a queue, for async code."""

    async def redrive(self, limit: int | None = None) -> int:
        """Send buried messages back to the queues that they came from.

        Their tries are reset. A message gets its key back if the key is free in its queue.

        Args:
            limit: The maximum number of messages, or None for all.

        Returns:
            The number of messages that were sent back; 0 for a queue without buried messages.

        Raises:
            Unavailable: The server did not answer. The text says how many messages were sent back.
        """
        return await self._runner.run(self._backend.redrive(limit))

    async def remove(self, id: Id) -> bool:
        """Remove a message from the queue.

        Args:
            id: The id of the message; an ObjectId may be given as text.

        Returns:
            False if the id is unknown, or the message is finished or held under a live lease.
        """
        return await self._runner.run(self._backend.remove(id))

    async def cancel(self, id: Id, force: bool = False) -> Cancelled | None:
        """Cancel a message. A message that is not held ends at once, with the outcome "cancelled".

        If the message is held, its holder is asked to end it: a worker cancels the handler, or sets
        ``Delivery.cancelled``. The holder can still commit the message. If the holder moves it or
        puts it back in the queue, the next claim ends it.

        Args:
            id: As in ``remove``.
            force: Whether to end even a held message at once. Its holder gets ``LeaseLost``.

        Returns:
            "cancelled" if the message has ended, "requested" if its holder was asked to end it.
            None if the id is unknown in this queue, or the message is already finished.

        Raises:
            ConfigurationError: The message is held in a pack of a bucket.
        """
        return await self._runner.run(self._cancel(id, force))

    async def requeue(self, id: Id) -> bool:
        """Make a scheduled or dead message ready now.

        A scheduled message keeps its tries, and in an ordered queue its place in its group. A dead
        message goes back to the queue that it came from, as with ``redrive``.

        Args:
            id: As in ``remove``.

        Returns:
            False if the id is unknown in this queue, or the message is finished or held. A message
            of a pack also counts as held if another message of the pack is held.

        Raises:
            ConfigurationError: The message is dead and came from a stream; use ``move`` instead.
        """
        return await self._runner.run(self._requeue(id))

    async def reprioritize(self, id: Id, priority: int) -> bool:
        """Change the priority of a message. If the message is held, this affects its next try.

        Args:
            id: As in ``remove``.
            priority: As in ``push``.

        Returns:
            False if the id is unknown in this queue, or the message is finished.
        """
        return await self._runner.run(self._reprioritize(id, priority))

    async def browse(
        self,
        state: State | None = None,
        where: Mapping[str, object] | None = None,
        after: str | None = None,
        limit: int = 100,
        newest: bool = False,
        budget: int = 5000,
    ) -> Page[T]:
        """Return a page of messages in any state, sorted by the time when they become eligible.

        A held message is eligible at the end of its lease; finished messages come last. If no
        message changes in the meantime, the pages together contain each message once.

        Args:
            state: "scheduled", "ready", "reserved", "finished" or "dead", or None for any state.
            where: A mapping from paths, such as "payload.n", "headers.tenant" or "error.type", to
                values or to conditions of ``pyqueue.where``.
            after: The ``after`` of the previous page, or None for the first page.
            limit: The maximum number of messages to return.
            newest: Whether to return the messages in the opposite order, the last message first.
            budget: The maximum number of messages to examine. If it is reached, the page may have
                fewer than ``limit`` messages even if it is not the last page.

        Returns:
            The page. A message that does not fit the model has its raw payload and an ``error``.

        Raises:
            ConfigurationError: An argument is not allowed, or the name belongs to a stream.
        """
        options = BrowseOptions(
            state=state, where=where, after=after, limit=limit, newest=newest, budget=budget
        )
        return await self._runner.run(self._browse(options))

    async def pause(self) -> None:
        """Stop the consumers of every process from receiving. Pushes still work.

        With a bus, consumers notice this at once; without a bus, within 5 s.
        """
        return await self._runner.run(self._backend.pause(True))

    async def resume(self) -> None:
        """Let the consumers of every process receive again."""
        return await self._runner.run(self._backend.pause(False))

    async def notify(self) -> None:
        """Wake waiting consumers. Call this after a transaction that you committed yourself."""
        return await self._runner.run(self._notify())

    async def purge(self) -> int:
        """Delete all ready and scheduled messages.

        The history and messages under a lease stay. Messages that an open transaction has locked
        are deleted last, when the transaction ends.

        Returns:
            The number of deleted messages. If the call raises ``Unavailable``, because the server
            did not answer or a transaction is still open, the text says how many were deleted.
        """
        return await self._runner.run(self._backend.purge())

    async def replay(self, *ids: Id) -> int:
        """Make finished messages ready again.

        Their tries are reset. A message gets its key back if the key is free.

        Args:
            ids: The ids of messages in the history, as in ``get``.

        Returns:
            The number of messages that were found and made ready.
        """
        return await self._runner.run(self._backend.replay(ids))
