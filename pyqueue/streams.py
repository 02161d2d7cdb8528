"""``Stream``: a log that any number of consumer groups read, each at its pace."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Generic, TypeVar

from pyqueue.backends.stream_plans import StreamPlans
from pyqueue.messages import Headers, StreamMessage
from pyqueue.plan_runner import PlanRunner, RunnerBase
from pyqueue.requests import Plan

__all__ = ["Stream", "StreamBase"]

T = TypeVar("T")
R = TypeVar("R")
Runs = TypeVar("Runs", bound=RunnerBase)


class StreamBase(Generic[T, Runs]):
    """The part of a stream that is the same for blocking and for async code."""

    def __init__(self, runner: Runs, backend: StreamPlans) -> None:
        self._runner = runner
        self._backend = backend
        #: The name of the stream.
        self.name = backend.stream

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, namespace={self._runner.namespace!r})"


class Stream(StreamBase[T, PlanRunner]):
    """A stream, for blocking code. ``Client.stream`` makes it, without I/O.

    Each message has a position: 0, 1, 2, ... without gaps. A reader that saw a position never sees
    a message appear below it later. Every operation may raise ``Unavailable`` and ``QueueClosed``.
    """

    def _run(self, plan: Plan[R]) -> R:
        return self._runner.run(plan)

    def append(self, payload: T, *, headers: Headers | None = None) -> int:
        """Append a message.

        Args:
            payload: a BSON value, or a value of the model of the stream.
            headers: small labels, {str: str | int | float | bool}.

        Returns:
            The position of the message.

        Raises:
            InvalidMessage: The payload is not BSON, is too large or does not fit the model.
            Unavailable: The message may be stored. If it is appended again, it may be there twice.
        """
        return self._run(self._backend.append([payload], headers))[0]

    def append_many(self, payloads: Iterable[T], *, headers: Headers | None = None) -> list[int]:
        """Append many messages, in packs of 1000. If one is invalid, none is appended.

        Messages of other callers may come between two packs.

        Args:
            payloads: the payloads.
            headers: the headers of every message.

        Returns:
            The positions of the messages.

        Raises:
            InvalidMessage: A payload cannot be stored. Nothing was written.
            Unavailable: Some messages may be stored. The text says how many surely are.
        """
        return self._run(self._backend.append(payloads, headers))

    def read(self, *, after: int | None = None, limit: int = 1000) -> list[StreamMessage[T]]:
        """Return messages by position. This takes nothing and belongs to no consumer group.

        Args:
            after: the position before the first message; None: begin with the first one.
            limit: how many messages at most. Large messages end the result sooner.

        Returns:
            Messages in order. The list is empty at the end of the stream. If the first messages
            after ``after`` were deleted, it begins with the next one. A message that does not fit
            the model has its raw payload, and ``error`` says why.
        """
        return self._run(self._backend.read(after, limit))

    def trim(self, *, before: int | datetime) -> int:
        """Delete old messages, in whole packs.

        The last pack stays, and so do packs that are younger than 10 minutes.

        Args:
            before: packs that lie wholly before this position, or were appended before this
                instant, are deleted.

        Returns:
            The position of the first message that is left.
        """
        return self._run(self._backend.trim(before))
