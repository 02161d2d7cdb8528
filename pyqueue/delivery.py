"""What handlers are given and what they answer. Plain values: the engine (``pipeline.engine``) acts on them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Generic, TypeVar

from pyqueue import arguments
from pyqueue.errors import ConfigurationError, LeaseLost
from pyqueue.messages import UNCHANGED, Reservation

__all__ = ["Delivery", "Drop", "Many", "Reject", "RetryLater", "To"]

T = TypeVar("T")
Q = TypeVar("Q", bound=str)


class To(Generic[Q]):
    """An answer: pass the message on to this queue, which the stage's ``to`` lists.

    ``To[Literal["late", "on-time"]]`` as the handler's return annotation is checked against ``to`` before anything runs.

    Args:
        queue: its name.
        payload: the new payload; left out, the message keeps the one it has.
    """

    __slots__ = ("payload", "queue")

    def __init__(self, queue: Q, payload: Any = UNCHANGED) -> None:
        self.queue = queue
        self.payload = payload

    def __repr__(self) -> str:
        return (
            f"To({self.queue!r})"
            if self.payload is UNCHANGED
            else f"To({self.queue!r}, {self.payload!r})"
        )


class Drop:
    """An answer: the message is finished here and goes nowhere."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "Drop()"


class Many:
    """An answer: the message is finished, and each of these is a new message.

    On a replica set that is one transaction. Elsewhere the outputs are written first, with ids that a repetition has again.

    Args:
        outputs: a ``To`` for each; one without a payload takes the message's.
    """

    __slots__ = ("outputs",)

    def __init__(self, outputs: Iterable[To[Any]]) -> None:
        self.outputs = list(outputs)
        for each in self.outputs:
            if not isinstance(each, To):
                raise ConfigurationError(
                    f"outputs: give a list of To(...), not of {type(each).__name__}"
                )

    def __repr__(self) -> str:
        return f"Many({self.outputs!r})"


class Reject(Exception):
    """Raise it to send the message to the dead-letter queue, with this reason."""


class RetryLater(Exception):
    """Raise it to have the message again after some seconds. The try counts.

    Args:
        delay: seconds or a timedelta.
        reason: kept in ``Message.error``.
    """

    def __init__(self, delay: float | timedelta, reason: str | None = None) -> None:
        super().__init__(reason or f"again after {delay} s")
        self.delay = arguments.duration("delay", delay)
        self.reason = reason


class Delivery(Generic[T]):
    """What a handler that asks for it gets beside the payload.

    Its two methods are awaited in async handlers and called plainly in others. Both raise ``LeaseLost`` once the message is not this
    handler's any more.
    """

    __slots__ = ("_loop", "_queue", "lost", "message")

    def __init__(
        self, message: Reservation[T], queue: Any, loop: asyncio.AbstractEventLoop | None
    ) -> None:
        #: The message: its id, tries, headers, error and checkpoint of the last try, and so on.
        self.message = message
        #: Whether the message is not this handler's any more: its lease was lost, its time is up or the worker was stopped.
        #: An async handler is cancelled then; one in a thread should look here now and then, and return.
        self.lost = False
        self._queue = queue
        self._loop = loop  # None: called in the loop itself

    def progress(self, fraction: float, note: str | None = None) -> Any:
        """Say how far the work is, for others to read in ``Message.progress``.

        Args:
            fraction: from 0 to 1.
            note: a few words.
        """
        return self._carry(self._queue.progress, fraction, note)

    def checkpoint(self, state: Any) -> Any:
        """Keep a state of the work, for the next try to find in ``message.checkpoint``.

        Args:
            state: any BSON value.
        """
        return self._carry(self._queue.checkpoint, state)

    def _carry(self, operation: Any, *args: Any) -> Any:
        if self.lost:
            raise LeaseLost(
                f"message {self.message.id} is not this handler's any more", lost=[self.message]
            )
        if self._loop is None:
            return operation(self.message, *args)
        return asyncio.run_coroutine_threadsafe(operation(self.message, *args), self._loop).result()
