"""The arguments and results of handlers, as plain values; ``pipeline.verdicts`` acts on them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, Protocol, TypeVar

from pyqueue import arguments
from pyqueue.errors import ConfigurationError, LeaseLost
from pyqueue.messages import UNCHANGED, Duration, Reservation

T = TypeVar("T")
Q = TypeVar("Q", bound=str)


class To(Generic[Q]):
    """A handler's answer: move the message to this queue, which the stage's ``to`` must list.

    The return annotation ``To[Literal["late", "on-time"]]`` of a handler is checked against ``to``
    before anything runs.

    Args:
        queue: The name of the queue.
        payload: The new payload; by default the message keeps its payload.
        priority: Its priority in that queue, if it has priorities. By default the message keeps its
            priority, and each output of ``Many`` gets the priority of the message.
        group: Its group in that queue, if it is ordered. By default the message keeps its group.

    Raises:
        ConfigurationError: The priority or the group is not allowed.
    """

    __slots__ = ("group", "payload", "priority", "queue")

    def __init__(
        self,
        queue: Q,
        payload: Any = UNCHANGED,
        *,
        priority: int | None = None,
        group: str | None = None,
    ) -> None:
        self.queue = queue
        self.payload = payload
        self.priority = None if priority is None else arguments.priority(priority)
        self.group = None if group is None else arguments.ordered_group(group)

    def __repr__(self) -> str:
        if self.payload is UNCHANGED:
            return f"To({self.queue!r})"
        return f"To({self.queue!r}, {self.payload!r})"


class Drop:
    """A handler's answer: the message is finished and moves to no other queue."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "Drop()"


class Many:
    """A handler's answer: the message is finished, and each output becomes a new message.

    Either all of this happens or none of it. No transaction is needed.

    Args:
        outputs: A ``To`` for each output. A ``To`` without a payload keeps the payload of the
            message.

    Raises:
        ConfigurationError: An output is not a ``To``.
    """

    __slots__ = ("outputs",)

    def __init__(self, outputs: Iterable[To[Any]]) -> None:
        if isinstance(outputs, To):
            raise ConfigurationError("outputs: expected a list of To(...), found To")
        self.outputs = list(outputs)
        for each in self.outputs:
            if not isinstance(each, To):
                raise ConfigurationError(
                    f"outputs: expected a list of To(...), found {type(each).__name__} in it"
                )

    def __repr__(self) -> str:
        return f"Many({self.outputs!r})"


class Reject(Exception):
    """Raise or return it to send the message to the dead-letter queue, with this reason."""


class RetryLater(Exception):
    """Raise or return it to have the message tried again after some time. This try counts.

    Args:
        delay: Seconds or a timedelta.
        reason: The reason, shown in ``Message.error``.
    """

    def __init__(self, delay: Duration, reason: str | None = None) -> None:
        super().__init__(reason or f"again after {delay} s")
        self.delay = arguments.duration("delay", delay)
        self.reason = reason


class BatchFailed(Exception):
    """Raise it from a handler of batches when only some messages failed. The rest are settled.

    Each exception applies only to its message, as if a handler of that message had raised it.

    Args:
        errors: The exceptions, by the index of the message in the batch.
        results: The results of the batch, as the handler would have returned them. In a link or a
            choice, they are required. The results of failed messages are ignored.

    Raises:
        ConfigurationError: An index is not an int, or a value is not an exception.
    """

    def __init__(
        self, errors: Mapping[int, BaseException], results: list[Any] | None = None
    ) -> None:
        if not isinstance(errors, Mapping) or not all(
            isinstance(index, int) and isinstance(error, BaseException)
            for index, error in errors.items()
        ):
            raise ConfigurationError("errors: expected a dict of exceptions, such as {3: error}")
        super().__init__(errors, results)
        self.errors = dict(errors)
        self.results = results

    def __str__(self) -> str:
        return f"{len(self.errors)} messages of a batch failed"


class TakesNotes(Protocol):
    """Stores progress and checkpoints of messages: a queue, or a part of a stage."""

    def progress(self, reservation: Any, fraction: float, note: str | None = None) -> Any:
        """Store how far the work has come."""

    def checkpoint(self, reservation: Any, state: Any) -> Any:
        """Store the state of the work."""


class Delivery(Generic[T]):
    """The second argument of a handler: the message, and the operations on it while it is reserved.

    A handler of batches takes a list of deliveries.

    An async handler awaits ``progress`` and ``checkpoint``; a plain handler calls them. Both raise
    ``LeaseLost`` once the handler no longer holds the message.
    """

    __slots__ = ("_loop", "_notes", "lost", "message")

    def __init__(
        self,
        message: Reservation[T],
        notes: TakesNotes,
        loop: asyncio.AbstractEventLoop | None,
    ) -> None:
        #: The message: its id, tries, headers, error, the checkpoint of the last try, and so on.
        self.message = message
        #: Whether the handler no longer holds the message, because the lease was lost, the time
        #: limit was reached or the worker was stopped. An async handler is then cancelled. A
        #: handler in a thread should check this from time to time, and return if it is true.
        self.lost = False
        self._notes = notes
        self._loop = loop  # None for an async handler, which runs in the loop itself

    def progress(self, fraction: float, note: str | None = None) -> Any:
        """Store how far the work has come. Any process can read it in ``Message.progress``.

        A message of a stream cannot store progress, nor can a message that shares a document with
        other messages of a bucket. For these messages, the call changes nothing, and the first such
        call of a run logs a warning.

        Args:
            fraction: From 0 to 1.
            note: A few words.
        """
        return self._run(self._notes.progress, fraction, note)

    def checkpoint(self, state: Any) -> Any:
        """Store the state of the work. The next try finds it in ``message.checkpoint``.

        Args:
            state: Any BSON value.
        """
        return self._run(self._notes.checkpoint, state)

    def _run(self, operation: Callable[..., Any], *args: Any) -> Any:
        if self.lost:
            raise LeaseLost(
                f"this handler no longer holds message {self.message.id}; stop and return",
                lost=[self.message],
            )
        if self._loop is None:
            return operation(self.message, *args)
        return asyncio.run_coroutine_threadsafe(operation(self.message, *args), self._loop).result()
