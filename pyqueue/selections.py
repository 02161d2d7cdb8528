"""``Selection``: count or change many messages of a queue. ``Queue.select`` makes it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, TypeVar

from pyqueue.backends.selecting import OnProgress, paced, selected
from pyqueue.messages import BulkResult, Duration, State
from pyqueue.queue_base import QueueBase
from pyqueue.runtime.plan_runner import PlanRunner
from pyqueue.selection_base import SelectionBase

T = TypeVar("T")


class Selection(SelectionBase[PlanRunner]):
    """The messages of a queue that match when a method is called, for blocking code.

    Each method works in portions of up to 1000 messages, oldest first. It never changes a message
    that a consumer holds, that changed after it was read, or that came into the queue after the
    call began. A message whose ``when`` a consumer changes during the call may be missed.

    The methods that change messages take ``limit``, the maximum number of messages to change;
    ``rate``, the maximum number of messages per second; and ``progress``, a function that is called
    after each portion with the totals so far. If that function raises an exception, the call ends.
    These methods raise ``ConfigurationError`` if the queue does not support the change. The text of
    an ``Unavailable`` error says how many messages had been changed by then.
    """

    def count(self, limit: int | None = None) -> int:
        """Return how many messages match, including messages that a consumer holds.

        Args:
            limit: Stop counting at this number.
        """
        return self._runner.run(self._count(limit))

    def remove(
        self,
        *,
        limit: int | None = None,
        rate: float | None = None,
        progress: OnProgress | None = None,
    ) -> BulkResult:
        """Remove messages. If the queue has a history, they are kept there."""
        return self._runner.run(self._remove(paced(limit, rate, progress)))

    def redrive(
        self,
        *,
        limit: int | None = None,
        rate: float | None = None,
        progress: OnProgress | None = None,
    ) -> BulkResult:
        """Send dead messages back to their queues, as ``Queue.redrive`` does."""
        return self._runner.run(self._redrive(paced(limit, rate, progress)))

    def move(
        self,
        to: QueueBase[Any, Any] | str,
        *,
        limit: int | None = None,
        rate: float | None = None,
        progress: OnProgress | None = None,
    ) -> BulkResult:
        """Move messages to another queue, where they are ready at once. Their tries are reset.

        A message loses its message key. A dead message becomes an ordinary message there.

        Args:
            to: A Queue of the same namespace, or the name of a queue.
        """
        return self._runner.run(self._move(to, paced(limit, rate, progress)))

    def requeue(
        self,
        at: datetime | None = None,
        *,
        limit: int | None = None,
        rate: float | None = None,
        progress: OnProgress | None = None,
    ) -> BulkResult:
        """Make scheduled and dead messages ready now, or at another time.

        Messages keep their tries, but dead messages go back to the queues that they came from, and
        their tries are reset. Messages that already have this time are not counted.

        Args:
            at: The new time. None or a past time means now. With a future time, ready messages also
                wait for it, and messages of an ordered queue become the last of their groups.
        """
        return self._runner.run(self._requeue(at, paced(limit, rate, progress)))

    def reprioritize(
        self,
        priority: int,
        *,
        limit: int | None = None,
        rate: float | None = None,
        progress: OnProgress | None = None,
    ) -> BulkResult:
        """Change the priority of messages, except messages that already have this priority.

        Args:
            priority: As in ``Queue.push``.
        """
        return self._runner.run(self._reprioritize(priority, paced(limit, rate, progress)))


class Selectable(QueueBase[T, PlanRunner]):
    """The method of a queue that selects messages, for blocking code."""

    def select(
        self,
        where: Mapping[str, object] | None = None,
        state: State | None = None,
        older: Duration | None = None,
        error: str | type[BaseException] | None = None,
    ) -> Selection:
        """Select unfinished messages, to count, remove, redrive, move or requeue them.

        This does no I/O. A message is selected if it meets all conditions.

        Args:
            where: As in ``browse``: paths, each with a value or a condition.
            state: "scheduled", "ready", "reserved" or "dead", or None for any of these.
            older: Only messages that were first pushed longer ago than this duration.
            error: Only messages whose last error has this type: an exception class, or its name.

        Raises:
            ConfigurationError: An argument is not allowed. If the name belongs to a stream, the
                methods of the result raise this error.
        """
        return Selection(self, self._runner, selected(where, state, older, error))
