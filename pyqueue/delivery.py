"""The arguments and results of handlers, as plain values; ``pipeline.verdicts`` acts on them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import datetime
from types import GenericAlias
from typing import TYPE_CHECKING, Any, Generic, Protocol

from pyqueue import arguments
from pyqueue.clock import BAND
from pyqueue.errors import ConfigurationError, LeaseLost
from pyqueue.facts import WhenDead
from pyqueue.messages import UNCHANGED, Duration, Headers, Reservation

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    T = TypeVar("T", default=Any)
    S = TypeVar("S", default=Any)
    Q = TypeVar("Q", bound=str, default=str)
else:  # Python 3.11 knows no defaults, and typing_extensions may be missing
    from typing import TypeVar

    T, S, Q = TypeVar("T"), TypeVar("S"), TypeVar("Q", bound=str)


class To(Generic[Q]):
    """A handler's answer: move the message to this queue, which the stage's ``to`` must list.

    A return annotation such as ``To[Literal["late", "on-time"]]`` is checked against ``to`` before
    anything runs. In ``Many``, each ``To`` is a new message, with the headers of the handled one.

    Args:
        queue: The name of the queue.
        payload: The new payload; by default the message keeps its payload.
        delay: Seconds until the message can be received in that queue; not with ``at``.
        at: The instant from which the message can be received in that queue.
        key: The message key in that queue. If a live message there has this key, the moved message
            is buried.
        headers: Headers to merge into the headers of the message.
        priority: The priority in that queue, if it has priorities. By default the message keeps its
            priority, and each output of ``Many`` gets the priority of the handled message.
        group: The group in that queue, if it is ordered. By default the message keeps its group.

    Raises:
        ConfigurationError: An option is not allowed.
    """

    __slots__ = ("at", "delay", "group", "headers", "key", "payload", "priority", "queue")

    def __init__(
        self,
        queue: Q,
        payload: Any = UNCHANGED,
        *,
        delay: Duration | None = None,
        at: datetime | None = None,
        key: str | None = None,
        headers: Headers | None = None,
        priority: int | None = None,
        group: str | None = None,
    ) -> None:
        self.queue = queue
        self.payload = payload
        arguments.starting(BAND, delay, at)  # only checks them
        self.delay = delay
        self.at = at
        self.key = None if key is None else arguments.key(key)
        self.headers = arguments.headers(headers)
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
            handled message.
        then: Another message, which is pushed once all outputs have ended; see ``Client.gather``.
        dead: Whether an output in a dead-letter queue delays ``then`` ("hold"), or counts as ended
            ("end").

    Raises:
        ConfigurationError: An output, or ``then``, is not a ``To``.
    """

    __slots__ = ("dead", "outputs", "then")

    def __init__(
        self,
        outputs: Iterable[To[Any]],
        then: To[Any] | None = None,
        *,
        dead: WhenDead = "hold",
    ) -> None:
        if isinstance(outputs, To):
            raise ConfigurationError("outputs: expected a list of To(...), found To")
        self.outputs = list(outputs)
        for each in self.outputs:
            if not isinstance(each, To):
                raise ConfigurationError(
                    f"outputs: expected only To(...) in the list, found {type(each).__name__}"
                )
        if then is not None and not isinstance(then, To):
            raise ConfigurationError(f"then: expected a To or None, found {type(then).__name__}")
        #: The message to push once all outputs have ended, or None.
        self.then = then
        arguments.one_of("dead", dead, ("hold", "end"))
        self.dead = dead

    def __repr__(self) -> str:
        then = "" if self.then is None else f", then={self.then!r}"
        return f"Many({self.outputs!r}{then})"


class Reject(Exception):
    """Raise or return this to bury the message. The text of the ``Reject`` is the reason."""


class RetryLater(Exception):
    """Raise or return a ``RetryLater`` to have the message tried again after some time.

    Args:
        delay: Seconds or a timedelta.
        reason: The reason, which is kept in ``Message.error``.
        counted: Whether this try counts toward ``max_tries`` of the queue.

    Raises:
        ConfigurationError: An argument is not allowed.
    """

    def __init__(self, delay: Duration, reason: str | None = None, *, counted: bool = True) -> None:
        super().__init__(reason or f"again after {delay} s")
        self.delay = arguments.duration("delay", delay)
        self.reason = reason
        self.counted = arguments.flag("counted", counted)


class BatchFailed(Exception):
    """Raise this in a batch handler if only some messages failed, to settle the remaining ones.

    Each exception applies only to its message, as if a handler of that message had raised it.

    Args:
        errors: The exceptions, keyed by the index of the message in the batch.
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


class Delivery(Generic[T, S]):
    """The second argument of a handler: the message, and the operations on it while it is reserved.

    A handler of batches takes a list of deliveries.

    Async code awaits ``progress`` and ``checkpoint``; other code calls them. Both raise
    ``LeaseLost`` once the handler no longer holds the message.

    ``Delivery[Order, State]`` is the type for payloads of the model ``Order``, and a lifespan whose
    value is a ``State``. Both parameters are optional.
    """

    __slots__ = ("_loop", "_notes", "cancelled", "lost", "message", "state")

    if not TYPE_CHECKING:  # the second parameter has a default
        __class_getitem__ = classmethod(GenericAlias)

    def __init__(
        self,
        message: Reservation[T],
        notes: TakesNotes,
        loop: asyncio.AbstractEventLoop | None,
        state: S | None = None,
    ) -> None:
        #: The message, with its id, tries, headers, error, the last try's checkpoint, and so on.
        self.message = message
        #: Whether the handler no longer holds the message, because the lease was lost, the time
        #: limit was reached or the worker was stopped. An async handler is then cancelled. A
        #: handler in a thread should check this from time to time, and return if it is true.
        self.lost = False
        #: The value of the lifespan of the worker, or None without a lifespan.
        self.state: S = state  # type: ignore[assignment]  # S is None without a lifespan
        #: Whether the message was cancelled; see ``Queue.cancel``. An async handler is then
        #: cancelled, unless its batch has other messages. A handler in a thread should check this
        #: from time to time, and raise an exception if it is true. Any exception then ends the
        #: message. If the handler returns, its answer counts.
        self.cancelled = False
        self._notes = notes
        self._loop = loop  # None for an async handler, which runs in the loop itself

    def progress(self, fraction: float, note: str | None = None) -> Awaitable[None]:
        """Store how far the work has come. Any process can read it in ``Message.progress``.

        A message of a stream cannot store progress, nor can a message that shares a document with
        other messages of a bucket. For these messages, the call changes nothing, and the first such
        call of a run logs a warning.

        Args:
            fraction: From 0 to 1.
            note: A short text for people, or None.
        """
        done: Awaitable[None] = self._run(self._notes.progress, fraction, note)
        return done

    def checkpoint(self, state: Any) -> Awaitable[None]:
        """Store the state of the work. The next try finds it in ``message.checkpoint``.

        Args:
            state: Any BSON value.
        """
        done: Awaitable[None] = self._run(self._notes.checkpoint, state)
        return done

    def _run(self, operation: Callable[..., Any], *args: Any) -> Any:
        if self.lost:
            raise LeaseLost(
                f"this handler no longer holds message {self.message.id}; stop and return",
                lost=[self.message],
            )
        if self._loop is None or _running_loop() is self._loop:  # in middleware, for example
            return operation(self.message, *args)
        return asyncio.run_coroutine_threadsafe(operation(self.message, *args), self._loop).result()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that runs in this thread, or None."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
