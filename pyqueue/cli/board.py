"""The lines of ``pyqueue top``: one for each queue, and for each consumer group of a stream."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from math import inf
from typing import Any, Final, NamedTuple

from pyqueue import AsyncClient, AsyncConsumer, AsyncQueue, ConsumerInfo, QueueInfo, QueueStats
from pyqueue.backends.namespace import STREAM
from pyqueue.backends.tallies import dead_letter_of
from pyqueue.cli.common import own_options
from pyqueue.errors import QueueError
from pyqueue.runtime.connecting import runner_of
from pyqueue.telemetry.watching import moved_in, recent_stats

#: The number at which the count of the messages in one state stops.
CAP: Final = 10_000
#: Rates cover the last minute or two, because stats cover whole minutes.
_RECENT_MIN: Final = 1
#: The minutes that a history covers, and the seconds after which it is read again.
MINUTES: Final = 30
_HISTORY_AGE_S: Final = 30.0


class Flow(NamedTuple):
    """The flow of messages through a queue, as telemetry has stored it."""

    #: The messages per second that were pushed or moved into the queue, or None if unknown.
    into: float | None
    #: The messages per second that were finished or moved on.
    done: float
    #: The failed tries per minute.
    failed: float
    #: The 95th percentile of the working time, in seconds, or None if unknown.
    p95: float | None = None
    #: How many messages were done in each of the last 30 minutes.
    minutes: tuple[int, ...] = ()


class Line(NamedTuple):
    """A line of the table: a queue, a stream or a consumer group."""

    #: The queue, or the stream of the group.
    info: QueueInfo
    group: ConsumerInfo | None = None
    flow: Flow | None = None
    #: Whether the lines of the stream's groups follow.
    unfolded: bool = False

    @property
    def key(self) -> str:
        """The name of the queue or stream. For a group: the stream, "~" and the group."""
        return self.info.name if self.group is None else f"{self.info.name}~{self.group.name}"

    @property
    def is_stream(self) -> bool:
        """Whether the line is for a stream, and not for one of its groups."""
        return self.info.kind == STREAM and self.group is None

    @property
    def ready(self) -> int:
        """The number of ready messages. For a stream: the number of messages that it keeps."""
        return (self.group or self.info).counts.ready

    @property
    def work(self) -> int:
        """The number of messages that consumers hold."""
        return (self.group or self.info).counts.reserved

    @property
    def scheduled(self) -> int:
        """The number of messages that wait for a later time."""
        return (self.group or self.info).counts.scheduled

    @property
    def paused(self) -> bool:
        """Whether the delivery of messages is paused."""
        return (self.group or self.info).paused

    @property
    def dead(self) -> int | None:
        """The number of messages in the dead-letter queue, or None if it is unknown."""
        return self.info.dead if self.group is None else None

    @property
    def dead_letter(self) -> str:
        """The name of the dead-letter queue, if the line is for a queue."""
        return dead_letter_of(self.info.name, self.info.options)

    @property
    def oldest(self) -> datetime | None:
        """The instant at which the oldest message began to wait, or None if none waits."""
        return self.info.oldest if self.group is None else None


class Picture(NamedTuple):
    """All lines of one screen, and how long it took to read their data."""

    lines: Sequence[Line]
    took_s: float


def queue_of(client: AsyncClient, info: QueueInfo) -> AsyncQueue[Any]:
    """Return a queue with its last stored options, or with defaults if an option is invalid."""
    try:
        return client.queue(info.name, **own_options(info.options))
    except QueueError:
        return client.queue(info.name)


def group_of(client: AsyncClient, line: Line) -> AsyncConsumer[Any]:
    """Return the consumer group of a line."""
    assert line.group is not None
    return client.stream(line.info.name).consumer(line.group.name)


class Board:
    """Reads the lines of the table for all queues and streams of a namespace.

    Args:
        client: The client of the namespace.
    """

    def __init__(self, client: AsyncClient) -> None:
        self.client = client
        #: All queues as last read, keyed by name. Dead-letter queues without a line are included.
        self.infos: Mapping[str, QueueInfo] = {}
        #: The stats of the last 30 minutes, and when they were read.
        self._past: Mapping[str, QueueStats] = {}
        self._past_read_at = -inf

    async def read(self, unfolded: Iterable[str] | None = None, history: bool = True) -> Picture:
        """Read all lines.

        A dead-letter queue that only one queue uses has no line: the line of that queue shows how
        many dead messages there are.

        Args:
            unfolded: The names of the streams whose groups have lines, or None for all streams.
            history: Whether to read the latencies and the last 30 minutes, too.
        """
        began = time.monotonic()
        infos = await self.client.queues(cap=CAP)
        self.infos = {each.name: each for each in infos}
        hidden = {
            dead_letter_of(each.name, each.options) for each in infos if each.dead is not None
        }
        lines: list[Line] = []
        for info in infos:
            if info.name not in hidden:
                opened = info.kind == STREAM and (unfolded is None or info.name in unfolded)
                lines.append(Line(info, unfolded=opened))
                if opened:
                    groups = await self.client.stream(info.name).consumers()
                    lines += [Line(info, group) for group in groups]
        flows = await self._flows(history)
        lines = [each._replace(flow=flows.get(each.key)) for each in lines]
        return Picture(lines, time.monotonic() - began)

    async def _flows(self, history: bool) -> dict[str, Flow]:
        """Return the flows by the keys of lines; {} if the user may not read the telemetry."""
        run = runner_of(self.client).run
        recent = await run(recent_stats(_RECENT_MIN))
        if history and time.monotonic() - self._past_read_at > _HISTORY_AGE_S:
            self._past, self._past_read_at = await run(recent_stats(MINUTES)), time.monotonic()
        past = self._past if history else {}
        came = moved_in(recent)
        return {
            key: flow_of(recent.get(key), came.get(key, 0.0), past.get(key))
            for key in {*recent, *came, *past}
        }


def flow_of(recent: QueueStats | None, came: float, past: QueueStats | None) -> Flow:
    """Return the flow of a queue.

    Args:
        recent: The stats of the last minute or two, or None if nothing was counted.
        came: The messages per second that came from other queues.
        past: The stats of the last 30 minutes, or None.
    """
    flow = Flow(into=came, done=0.0, failed=0.0)
    if recent is not None:
        flow = Flow(
            into=recent.rate("pushed") + came,
            done=recent.rate("finished") + recent.rate("moved"),
            failed=60 * (recent.rate("retried") + recent.rate("dead")),
        )
    if past is None:
        return flow
    last = past.until.replace(second=0, microsecond=0)
    starts = [last - timedelta(minutes=ago) for ago in range(MINUTES - 1, -1, -1)]
    points = [past.points.get(each, {}) for each in starts]
    minutes = tuple(each.get("finished", 0) + each.get("moved", 0) for each in points)
    return flow._replace(p95=past.working.p95, minutes=minutes)
