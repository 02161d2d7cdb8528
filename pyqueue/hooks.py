"""Hooks: functions that a client calls when messages are pushed, received, handled or settled.

``Hooks`` lists them and says when each is called. Metrics, traces and adapters are attached here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Literal, Protocol

from pyqueue.delivery import Delivery
from pyqueue.errors import ConfigurationError
from pyqueue.messages import Id, Message
from pyqueue.payloads import log_failure
from pyqueue.requests import Request


class Uncommitted(Exception):
    """The ``error`` that hooks get for a call that succeeded in a transaction of the program.

    The program controls this transaction, so the client does not know whether it will be committed.
    In a transaction of ``Client.transaction`` or ``Client.run_transaction``, hooks are called only
    after the commit.
    """


@dataclass(frozen=True, slots=True)
class Pushing:
    """A message that is about to be pushed, or appended to a stream."""

    #: The payload, as the caller gave it.
    payload: Any
    #: The headers, which a hook may change.
    headers: dict[str, Any]


class Running(Protocol):
    """A worker or a pipeline that is running."""

    name: str

    def describe(self) -> dict[str, Any]:
        """Return the kind, the name, the stages, the counters and the messages in progress."""


class Hooks:
    """The base class for the hooks of a client: override any of its methods.

    The methods are synchronous, also for ``AsyncClient``. Each is called once for each call of the
    program, in the thread or the task of the caller. A call returns only after its hooks, so hooks
    should return at once. Their exceptions are logged and otherwise ignored. Events that concurrent
    calls share, such as the burial of an invalid message, may be reported in another thread or task
    of the client, and so may the settlements that a loop over ``each`` makes in the background.

    ``queue`` is the name of a queue or of a stream; for a consumer group it is the name of the
    stream, "~" and the name of the group.
    """

    def pushing(self, queue: str, items: Sequence[Pushing]) -> None:
        """Run before messages are pushed or appended. This method may change their headers.

        The headers are checked afterwards. Other queues of a push with ``also`` get the changes.

        Args:
            queue: The queue or the stream.
            items: The messages of the call.
        """

    def pushed(self, queue: str, ids: Sequence[Id | None], error: BaseException | None) -> None:
        """Run after a push or an append.

        This method is also called for the outputs of ``Many``, once they are published, and for
        each further queue of a push with ``also``.

        Args:
            queue: The queue or the stream.
            ids: The ids of the messages; None for each message that was not written because its key
                was taken. A push that was repeated, or that replaced a message, has the id of the
                stored message. After ``DuplicateKey``, the written ids; empty after other errors.
            error: The error that the caller gets; None on success; ``Uncommitted`` if this is in a
                transaction that the program controls.
        """

    def received(self, queue: str, messages: Sequence[Message[Any]], waited: float) -> None:
        """Run after a call has received at least one message.

        Args:
            queue: The queue or the consumer group.
            messages: The popped messages or the reservations. For ``Queue.claim``, reservations
                without payloads.
            waited: How long the call took, in seconds.
        """

    def settled(
        self,
        queue: str,
        verb: str,
        reservations: Sequence[Message[Any]],
        error: BaseException | None,
        to: str | None,
    ) -> None:
        """Run after reservations were settled, or after an attempt to settle them failed.

        For messages of a rollback that have no try left, the verb is "bury". It is also "bury" if a
        consumer buries messages that it could not deliver; these are not reservations.

        Args:
            queue: The queue or the consumer group.
            verb: "commit", "rollback", "release", "move" or "bury"; "cancel" if a worker or a claim
                ended a cancelled message; "expire" if an expired message ended; or "lost" if a
                renewal found that a lease was lost, so that nothing was settled.
            reservations: The messages. After a rollback or a "bury", their ``error`` is the error
                that the holder gave.
            error: The error that the caller gets. ``LeaseLost`` names the messages that were not
                settled; all other messages were. The rollback of a ``Queue.claim`` raises no
                ``LeaseLost``, but hooks get it. None if all were settled, or ``Uncommitted`` if
                they were settled in a transaction that the program controls.
            to: The queue to which a "move" or a "bury" sent them, or None.
        """

    def handling(self, deliveries: Sequence[Delivery[Any]]) -> AbstractContextManager[object]:
        """Return a context manager that is entered around the handler of a worker or a stage.

        The handler sees the context variables that the context manager sets. If the handler raises
        an exception, the context manager gets it, but cannot suppress it.

        Args:
            deliveries: The messages of the call: one, or all messages of a batch.

        Returns:
            The context manager.
        """
        return nullcontext()

    def running(self, runner: Running) -> AbstractContextManager[object]:
        """Return a context manager that is entered around a run of a worker or a pipeline.

        The context manager gets the error that ends the run, but cannot suppress it.

        Args:
            runner: The worker or the pipeline.

        Returns:
            The context manager.
        """
        return nullcontext()


#: The names of the methods of ``Hooks``.
EVENTS: Final = ("pushing", "pushed", "received", "settled", "handling", "running")


@dataclass(slots=True)
class Tell(Request[None]):
    """Report an event to the hooks of the client. If it has no hooks, this does nothing."""

    #: The method of the hooks; see ``Hooks``.
    event: Literal["pushed", "received", "settled"]
    queue: str
    #: The ids, messages or reservations.
    items: Sequence[Any]
    verb: str = ""
    error: BaseException | None = None
    to: str | None = None
    waited: float = 0.0
    #: The session of the caller's transaction, or None.
    session: Any = None


def tell_burial(queue: str, message: Any, to: str) -> Tell:
    """Return the event that tells hooks about the burial of a message that was never delivered."""
    return Tell("settled", queue, [message], verb="bury", to=to)


class HookCalls:
    """The hooks of a client, grouped by event.

    Args:
        given: The objects whose methods are the hooks.

    Raises:
        ConfigurationError: An object has none of the methods of ``Hooks``, or one of them is async.
    """

    def __init__(self, given: Iterable[object]) -> None:
        self._calls: dict[str, list[Callable[..., Any]]] = {event: [] for event in EVENTS}
        for hook in given:
            self.add(hook)

    def add(self, hook: object) -> None:
        """Add an object whose methods are hooks.

        Raises:
            ConfigurationError: The object has none of the methods of ``Hooks``, or an async one.
        """
        for event, method in _methods(hook).items():
            self._calls[event].append(method)

    def takes(self, event: str) -> bool:
        """Return whether there is a hook for an event."""
        return bool(self._calls[event])

    def pushing(self, queue: str, items: Sequence[Pushing]) -> None:
        """Call the hooks before a push."""
        self._call("pushing", queue, items)

    def tell(self, told: Tell, at_commit: list[Any] | None = None) -> None:
        """Call the hooks for an event.

        Args:
            told: The event, and the values to report with it.
            at_commit: The events to report once the client's transaction is committed; this event
                is added to them. None without a transaction, or if the program controls it.
        """
        if told.session is not None and at_commit is not None:
            at_commit.append(told)
            return
        error = told.error
        if told.session is not None and error is None:
            error = Uncommitted("the transaction may be aborted")
        values: tuple[object, ...] = (told.items, error)
        if told.event == "received":
            values = (told.items, told.waited)
        elif told.event == "settled":
            values = (told.verb, told.items, error, told.to)
        self._call(told.event, told.queue, *values)

    def handling(self, deliveries: Sequence[Delivery[Any]]) -> AbstractContextManager[object]:
        """Return a context manager that enters the context managers of all ``handling`` hooks."""
        calls = self._calls["handling"]
        return _Around(calls, deliveries, _labelled) if calls else nullcontext()

    def running(self, runner: Running) -> AbstractContextManager[object]:
        """Return a context manager that enters the context managers of all ``running`` hooks."""
        calls = self._calls["running"]
        return _Around(calls, runner, _named) if calls else nullcontext()

    def _call(self, event: str, queue: str, *values: object) -> None:
        for call in self._calls[event]:
            try:
                call(queue, *values)
            except Exception as failure:
                log_failure(failure, "queue %r: the hook %r failed", queue, event)


class _Around(AbstractContextManager[None]):
    """The context managers of hooks around one call of a handler, or around one run.

    Args:
        calls: The hooks, which return the context managers.
        given: The argument of each hook.
        failed: Takes ``given``, and returns the name of the hook that failed, for the log.
    """

    def __init__(
        self, calls: Sequence[Callable[..., Any]], given: Any, failed: Callable[[Any], str]
    ) -> None:
        self._calls = calls
        self._given = given
        self._failed = failed
        self._entered: list[Any] = []

    def __enter__(self) -> None:
        for call in self._calls:
            try:
                manager = call(self._given)
                manager.__enter__()
            except Exception as failure:
                self._log(failure)
            else:
                self._entered.append(manager)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        while self._entered:
            try:
                self._entered.pop().__exit__(kind, error, trace)
            except Exception as failure:
                if failure is not error:
                    self._log(failure)

    def _log(self, failure: Exception) -> None:
        log_failure(failure, "%s failed", self._failed(self._given))


def _labelled(deliveries: Sequence[Delivery[Any]]) -> str:
    return f"queue {deliveries[0].message.queue!r}: the hook 'handling'"


def _named(runner: Running) -> str:
    return f"{runner.name!r}: the hook 'running'"


def calls_of(given: object) -> HookCalls | None:
    """Return the hooks of a client, or None if there are none.

    Raises:
        ConfigurationError: ``given`` is not a list of objects with methods of ``Hooks``.
    """
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise ConfigurationError(
            f"hooks: expected a list of objects with methods of pyqueue.Hooks, found "
            f"{type(given).__name__}"
        )
    hooks = list(given)
    return HookCalls(hooks) if hooks else None


def _methods(hook: object) -> dict[str, Callable[..., Any]]:
    """Return the methods of an object that are hooks, keyed by event."""
    name = type(hook).__name__
    if isinstance(hook, type):
        raise ConfigurationError(f"hooks: {hook.__name__} is a class; pass an instance")
    found: dict[str, Callable[..., Any]] = {}
    for event in EVENTS:
        method = getattr(hook, event, None)
        if callable(method) and getattr(method, "__func__", None) is not getattr(Hooks, event):
            found[event] = method
    if not found:
        raise ConfigurationError(
            f"hooks: {name} has none of the methods {', '.join(EVENTS)}; define at least one"
        )
    for event, method in found.items():
        plain = inspect.unwrap(method)
        if inspect.iscoroutinefunction(plain) or inspect.isasyncgenfunction(plain):
            raise ConfigurationError(
                f"hooks: {event} of {name} is async; make it synchronous: it may start a task"
            )
    return found
