"""The sampler: it reads the state of all queues once for all viewers, and only on request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Final, NamedTuple

from pyqueue.async_client import AsyncClient
from pyqueue.backends.all_queues import groups_of
from pyqueue.backends.blocked import Blocked, blocked
from pyqueue.backends.namespace import STREAM
from pyqueue.backends.tallies import dead_letter_of
from pyqueue.messages import (
    NEVER,
    ConsumerInfo,
    Message,
    QueueInfo,
    ScheduleInfo,
    StreamMessage,
)
from pyqueue.runtime.connecting import runner_of
from pyqueue.telemetry.values import QueueStats
from pyqueue.telemetry.watching import (
    ErrorSummary,
    GraphSummary,
    RunSummary,
    error_groups,
    graphs,
    moved_in,
    recent_stats,
    runs,
)
from pyqueue.web.charts import per_minute
from pyqueue.web.shapes import length

#: The minimum time between two samples, in seconds. Samples take at most a tenth of the time.
INTERVAL_S: Final = 2.0
_SHARE: Final = 10
#: The number at which the count of one state stops: the lower one if counting is slow.
CAP: Final = 10_001
LOW_CAP: Final = 1001
_FAST_S, _SLOW_S = 0.1, 0.5
#: A request waits for a new sample if the last one took less than this.
_WAIT_S: Final = 1.0
#: A sample that is older than this is not shown.
_OLD_S: Final = 300.0
#: The maximum numbers of consumer groups, and of ordered queues whose blocking group is read.
_MAX_GROUPS: Final = 1000
_MAX_BLOCKED: Final = 20
#: Rates are measured over this number of whole minutes and the current minute.
RATE_MIN: Final = 5
#: The minutes over which a trend is measured, and the minimum number of messages for a trend.
_TREND_MIN: Final = 5
_LEAST_TREND: Final = 10
#: A queue that will be empty in less time, in seconds, has no badge for it.
_LEAST_LEFT_S: Final = 5.0
#: A ready message that waits longer than this, in seconds, seems to have no worker.
_UNATTENDED_S: Final = 60.0

Badge = tuple[str, str]
_DONE: Final = ("finished", "moved", "dead", "cancelled", "expired")


def rate_of(stats: QueueStats | None, names: Sequence[str]) -> float | None:
    """Return the sum of the counts with these names per second, over the last few minutes."""
    if stats is None:
        return None
    passed_s = stats.until.second + stats.until.microsecond / 1e6
    return sum(per_minute(stats, names, RATE_MIN + 1)) / (60 * RATE_MIN + passed_s)


@dataclass(frozen=True, slots=True)
class Row:
    """A queue or a stream in a sample."""

    info: QueueInfo
    #: The figures of the last hour, or None if there are none.
    stats: QueueStats | None
    #: The groups of a stream, and their figures.
    groups: Sequence[ConsumerInfo]
    group_stats: Mapping[str, QueueStats]
    #: How many workers and pipelines receive from the queue.
    workers: int
    #: The badges, each with its look and its text.
    badges: Sequence[Badge]
    #: How many messages per second moved to which queue in the last few minutes; 0 for a queue to
    #: which messages moved earlier in the hour.
    moves: Mapping[str, float] = field(default_factory=dict)
    #: How many messages per second moved here from other queues in the last few minutes.
    came: float = 0.0
    #: The group that holds up an ordered queue, or None.
    blocked: Blocked | None = None
    #: Whether the messages of this queue are dead letters.
    holds_dead: bool = False

    @property
    def dead_letter(self) -> str:
        """The name of the dead-letter queue of this queue."""
        return dead_letter_of(self.info.name, self.info.options)

    def last_minutes(self, *names: str) -> int:
        """Return the sum of the counts with these names over the last five whole minutes."""
        return sum(per_minute(self.stats, names, _TREND_MIN + 1)[:-1])


@dataclass(frozen=True, slots=True)
class Sample:
    """The state of a namespace at an instant."""

    number: int
    at: datetime
    took_s: float
    cap: int
    rows: Mapping[str, Row]
    runs: Sequence[RunSummary]
    errors: Sequence[ErrorSummary]
    #: The graphs of pipelines that run, or have run in the last few days.
    graphs: Sequence[GraphSummary]
    schedules: Sequence[ScheduleInfo]

    @property
    def interval_s(self) -> float:
        """How long this sample is used before another one is taken."""
        return max(INTERVAL_S, (_SHARE - 1) * self.took_s)


class Sampler:
    """Takes samples. All viewers of a process share them."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._sample: Sample | None = None
        self._taken = 0.0
        self._task: asyncio.Task[Sample] | None = None
        self._cap = LOW_CAP

    def expire(self) -> None:
        """Let the next request take a new sample, because an action has changed something."""
        if self._sample is not None:
            self._sample = replace(self._sample, took_s=0.0)
            self._taken, self._task = -_OLD_S, None

    async def sample(self) -> Sample:
        """Return the last sample, or take a new one if it is too old.

        Raises:
            QueueError: The server did not answer, and there is no recent sample.
        """
        last, age_s = self._sample, time.monotonic() - self._taken
        if last is not None and age_s < last.interval_s:
            return last
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._take(), name="pyqueue-dashboard")
            self._task.add_done_callback(_retrieve)
        if last is not None and last.took_s > _WAIT_S and age_s < _OLD_S:
            return last
        return await asyncio.shield(self._task)  # other viewers may wait for it, too

    async def _take(self) -> Sample:
        began, cap = time.monotonic(), self._cap
        run = runner_of(self._client).run
        infos = await self._client.queues(cap=cap)
        last = await run(recent_stats(RATE_MIN))
        read = _Read(
            hour=await run(recent_stats()),
            last=last,
            came=moved_in(last),
            blocked=await run(blocked(_ordered(infos), cap)),
            running=await run(runs()),
            dead_letters={
                dead_letter_of(each.name, each.options)
                for each in infos
                if not each.name.endswith(".dead")
            },
            now=datetime.now(UTC),
        )
        errors, drawn = await run(error_groups()), await run(graphs())
        planned = await self._client.schedules()
        streams = [each.name for each in infos if each.kind == STREAM]
        groups = await run(groups_of(streams, _MAX_GROUPS))
        rows = {each.name: _row(each, groups.get(each.name, ()), read) for each in infos}
        took_s = time.monotonic() - began
        if took_s < _FAST_S:
            self._cap = CAP
        elif took_s > _SLOW_S:
            self._cap = LOW_CAP
        number = 1 if self._sample is None else self._sample.number + 1
        sample = Sample(
            number=number,
            at=read.now,
            took_s=took_s,
            cap=cap,
            rows=rows,
            runs=read.running,
            errors=errors,
            graphs=drawn,
            schedules=planned,
        )
        self._sample, self._taken = sample, time.monotonic()
        return sample


class _Read(NamedTuple):
    """The values of a sample that are read once for all queues."""

    #: The figures of the last hour, and of the last few minutes.
    hour: Mapping[str, QueueStats]
    last: Mapping[str, QueueStats]
    #: How many messages per second moved to each queue.
    came: Mapping[str, float]
    #: The groups that block queues.
    blocked: Mapping[str, Blocked]
    running: Sequence[RunSummary]
    #: The names of dead-letter queues.
    dead_letters: Set[str]
    now: datetime


def _retrieve(task: asyncio.Task[Sample]) -> None:
    """Take the error of a sample that no request waits for, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


def _ordered(infos: Sequence[QueueInfo]) -> list[str]:
    """Return the ordered queues in which messages wait, those with the oldest messages first."""
    found = [each for each in infos if each.kind == "ordered" and each.counts.scheduled]
    found.sort(key=lambda each: (each.oldest or NEVER, -each.counts.scheduled))
    return [each.name for each in found[:_MAX_BLOCKED]]


def _row(info: QueueInfo, groups: Sequence[ConsumerInfo], read: _Read) -> Row:
    stats, last = read.hour.get(info.name), read.last.get(info.name)
    moves: dict[str, float] = {} if stats is None else dict.fromkeys(stats.moved, 0.0)
    if last is not None:
        moves |= {target: number / last.seconds for target, number in last.moved.items()}
    row = Row(
        info=info,
        stats=stats,
        groups=groups,
        group_stats={
            each.name: read.hour[f"{info.name}~{each.name}"]
            for each in groups
            if f"{info.name}~{each.name}" in read.hour
        },
        workers=sum(each.works_on(info.name) and not each.silent for each in read.running),
        badges=(),
        moves=moves,
        came=read.came.get(info.name, 0.0),
        blocked=read.blocked.get(info.name),
        holds_dead=info.name.endswith(".dead") or info.name in read.dead_letters,
    )
    return replace(row, badges=tuple(_badges(row, read.now)))


def _badges(row: Row, now: datetime) -> list[Badge]:
    """Return the badges of a queue: what a person should know about it."""
    info, counts = row.info, row.info.counts
    found: list[Badge] = []
    if info.paused:
        found.append(("warn", "paused"))
    if info.limit is not None:
        found.append(("calm", "limited"))
    if info.kind == STREAM:
        return found
    waits_s = (now - info.oldest).total_seconds() if info.oldest is not None else 0.0
    if waits_s > 0 and not counts.ready:
        found.append(("warn", "blocked"))
    received = sum(per_minute(row.stats, ("received",), _TREND_MIN + 1))  # until a while ago
    idle = not (counts.reserved or row.workers or received or info.paused)
    if counts.ready and idle and waits_s > _UNATTENDED_S and not row.holds_dead:
        found.append(("bad", "no worker"))
    found += _trend(row)
    return found


def _trend(row: Row) -> list[Badge]:
    """Return a badge if a queue is growing, or one that says when it will be empty, or none."""
    ready, minutes = row.info.counts.ready, _TREND_MIN
    pushed = row.last_minutes("pushed") + row.came * 60 * minutes
    done = row.last_minutes(*_DONE)
    if not ready or max(pushed, done) < _LEAST_TREND:
        return []
    if pushed > 1.1 * done:
        return [("warn", "growing")]
    if done > 1.1 * pushed:
        left_s = ready / ((done - pushed) / minutes / 60)
        return [("calm", f"empty in {length(left_s)}")] if left_s >= _LEAST_LEFT_S else []
    return []


def why_waiting(message: Message[object], row: Row | None, group: str | None, now: datetime) -> str:
    """Return why no consumer is working on a message, or "" if one is, or none should be.

    ``group``: the group of the message, as the viewer may see it.
    """
    if isinstance(message, StreamMessage) or message.state in ("reserved", "finished"):
        return ""
    if message.state == "dead":
        return "It is dead: it waits until a person sends it back or removes it."
    if message.deferred == "group":
        return f"It waits for an earlier message of its group {group!r}."
    if message.deferred == "limit":
        return "It waits because the limit of its queue is used up."
    if message.state == "scheduled":
        left_s = max(0.0, (message.when - now).total_seconds())
        cause = f" after try {message.tries} failed" if message.tries and message.error else ""
        return f"It is scheduled{cause}, for {length(left_s)} more."
    if row is not None and row.info.paused:
        return "Its queue is paused."
    if row is not None and any(text == "no worker" for _, text in row.badges):
        return "It is ready, but no worker receives from its queue."
    return "It is ready. Consumers receive the messages before it first."
