"""The operations of a stream, as plans."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from pyqueue import arguments
from pyqueue.backends.options import Options
from pyqueue.backends.streams import appending, consumers, log, retention
from pyqueue.backends.streams.consumers import GroupPlans
from pyqueue.backends.streams.log import LogState
from pyqueue.limits import stored_limit
from pyqueue.messages import ConsumerInfo, StreamMessage
from pyqueue.payloads import Codec
from pyqueue.requests import Plan


class StreamPlans:
    """The operations of one stream, as plans (sequences of commands).

    Args:
        stream: The name of the stream.
        codec: How payloads are stored.
        shape: The options that the caller gave and that all users of the stream must agree on.
        owner: The label that reservations carry, or a function that returns it.
        command_timeout: The time limit of one command, in seconds.
    """

    __slots__ = ("codec", "command_timeout", "owner", "shape", "state", "stream")

    def __init__(
        self,
        stream: str,
        codec: Codec[Any],
        shape: Mapping[str, object],
        *,
        owner: str | Callable[[], str] = "",
        command_timeout: float = 30,
    ) -> None:
        if (limit := shape.get("limit")) is not None:
            log.require_limit(stream, stored_limit(limit))
        self.stream = stream
        self.codec = codec
        self.shape = shape
        self.owner = partial(str, owner) if isinstance(owner, str) else owner
        self.command_timeout = command_timeout
        self.state = LogState()

    def append(
        self,
        payloads: Iterable[Any],
        headers: Mapping[str, Any] | None = None,
        labels: Sequence[Mapping[str, Any]] | None = None,
    ) -> Plan[list[int]]:
        """Append messages. Return their positions.

        Args:
            payloads: The payloads of the messages, in order.
            headers: The headers of every message.
            labels: The headers of each message. They replace ``headers``.
        """
        listed = arguments.payloads(payloads, "append()")
        return appending.append(
            self.stream,
            self.codec,
            self.shape,
            self.state,
            listed,
            labels=arguments.each_headers(headers, labels, len(listed)),
            limit_s=self.command_timeout,
        )

    def read(self, after: object = None, limit: int = 1000) -> Plan[list[StreamMessage[Any]]]:
        """Return up to ``limit`` messages in the order of positions, beginning after ``after``."""
        return log.read(self.stream, self.codec, self.state, after, limit)

    def group(self, name: str, options: Options, start: object) -> GroupPlans:
        """Return the operations of a consumer group. ``start``: where the group begins if new."""
        return GroupPlans(
            self.stream,
            name,
            options,
            self.codec,
            start=start,
            shape=self.shape,
            owner=self.owner,
        )

    def groups(self) -> Plan[list[ConsumerInfo]]:
        """Return the consumer groups of the stream."""
        yield from log.check(self.stream, self.state)
        return (yield from consumers.groups(self.stream))

    def delete_group(self, name: str) -> Plan[bool]:
        """Delete a consumer group. Return whether it existed."""
        return consumers.delete_group(self.stream, name)

    def trim(self, before: object) -> Plan[int]:
        """Delete packs that end before a position or instant. Return the first position left."""
        return retention.trim(self.stream, self.state, before)
