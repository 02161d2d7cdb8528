"""The progress of ``pyqueue pipeline run``, on stderr.

At a terminal it is the table of ``pyqueue top`` for the stages of the run. Otherwise it is one line
every 10 seconds, for a log.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Final, NamedTuple

from pyqueue import AsyncClient, QueueError, QueueInfo
from pyqueue.backends import all_queues
from pyqueue.cli.board import Flow, Line
from pyqueue.cli.columns import COLUMNS, Grid, rate_in_unit, span
from pyqueue.cli.common import note
from pyqueue.cli.watching import EVERY_S, pause_after
from pyqueue.pipeline import Runner
from pyqueue.queue_base import backend_of
from pyqueue.runtime.connecting import runner_of

#: The seconds between two lines.
LINE_EVERY_S: Final = 10.0
#: The number at which the count of the messages in one state stops.
CAP: Final = 100_000
#: The time over which rates are measured, in seconds.
WINDOW_S: Final = 60.0
#: The columns of the table: the figures that a run knows without telemetry.
_COLUMNS: Final = tuple(each for each in COLUMNS if each.name not in ("in", "history", "p95"))
#: The counters of messages that a stage has finished or moved on.
_DONE: Final = ("out", "dropped")
_FAILED: Final = ("retried", "dead")

log = logging.getLogger("pyqueue")

Counters = Mapping[str, Mapping[str, int]]


class Sample(NamedTuple):
    """The state of a run at one time."""

    #: The time by the monotonic clock, in seconds.
    at: float
    #: The queues of the stages.
    infos: Sequence[QueueInfo]
    #: The counters of the run so far, keyed by stage.
    counters: Counters

    @property
    def left(self) -> int:
        """The number of messages in the queues of the stages."""
        return sum(each.counts.total for each in self.infos)

    @property
    def capped(self) -> bool:
        """Whether there may be more messages than ``left`` says."""
        counts = [each.counts for each in self.infos]
        return any(CAP in (each.ready, each.scheduled, each.reserved) for each in counts)

    def count(self, names: Sequence[str], stage: str | None = None) -> int:
        """Return the sum of the counters with these names, of one stage or of all stages."""
        chosen = self.counters.values() if stage is None else [self.counters.get(stage, {})]
        return sum(each.get(name, 0) for each in chosen for name in names)


class Progress:
    """The progress of a run, computed from samples of it.

    Args:
        runner: The pipeline that runs.
        client: The client of the pipeline.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        runner: Runner[Any],
        client: AsyncClient,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner, self._client, self._clock = runner, client, clock
        self._samples: deque[Sample] = deque()

    async def sample(self) -> None:
        """Read the queues of the stages. Their dead-letter queues are counted, too."""
        stages = self._runner.graph.stages
        dead = [backend_of(each.queue).options.dead_letter for each in stages.values()]
        only = [*dict.fromkeys([*stages, *dead])]
        infos = await runner_of(self._client).run(all_queues.queues(CAP, held=True, only=only))
        chosen = [each for each in infos if each.name in stages]
        self.add(Sample(self._clock(), chosen, self._runner.counters))

    def add(self, sample: Sample) -> None:
        """Add a sample. Samples before the window are forgotten."""
        self._samples.append(sample)
        while len(self._samples) > 2 and sample.at - self._samples[1].at >= WINDOW_S:
            self._samples.popleft()

    def _rate(self, names: Sequence[str], stage: str | None = None) -> float:
        """Return by how much the counters with these names grew per second, over the window."""
        first, last = self._samples[0], self._samples[-1]
        number = last.count(names, stage) - first.count(names, stage)
        return max(0, number) / (last.at - first.at) if last.at > first.at else 0.0

    def line(self) -> str:
        """Return how many messages are left, the rate, the dead messages and the remaining time."""
        last = self._samples[-1]
        left = f"{last.left:,}{'+' if last.capped else ''}"
        dead, eta_s = last.count(["dead"]), self.eta_s()
        eta = "unknown" if eta_s is None else "0s" if eta_s < 1 else span(eta_s)
        return (
            f"{self._runner.name}: {left} left, {rate_in_unit(self._rate(_DONE))}, {dead:,} dead, "
            f"ETA {eta}"
        )

    def eta_s(self) -> float | None:
        """Return the seconds until no message is left, if the run continues at this rate.

        Returns:
            The seconds, or None if the number of messages does not fall or is not known.
        """
        first, last = self._samples[0], self._samples[-1]
        fewer = first.left - last.left
        if last.left == 0:
            return 0.0
        if fewer <= 0 or first.capped or last.capped:
            return None
        return last.left * (last.at - first.at) / fewer

    def lines(self) -> list[Line]:
        """Return the stages in the order of the pipeline."""
        infos = {each.name: each for each in self._samples[-1].infos}
        return [
            Line(
                infos[stage],
                flow=Flow(None, self._rate(_DONE, stage), 60 * self._rate(_FAILED, stage)),
            )
            for stage in self._runner.graph.stages
            if stage in infos
        ]


@asynccontextmanager
async def shown(
    runner: Runner[Any], client: AsyncClient, say: Callable[[str], object] = note
) -> AsyncIterator[None]:
    """Show the progress of a run until the block ends. If the display fails, the run continues.

    Args:
        runner: The pipeline that runs.
        client: The client of the pipeline.
        say: Prints a line.
    """
    progress = Progress(runner, client)
    task = asyncio.create_task(_table(progress) if sys.stderr.isatty() else _lines(progress, say))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("the progress of %r cannot be shown: %r", runner.name, error)


async def _lines(progress: Progress, say: Callable[[str], object]) -> None:
    """Print a line every 10 seconds."""
    with suppress(QueueError):
        await progress.sample()
    wait_s = LINE_EVERY_S
    while True:
        await asyncio.sleep(wait_s)
        began = time.monotonic()
        with suppress(QueueError):
            await progress.sample()
            say(progress.line())
        wait_s = pause_after(time.monotonic() - began, LINE_EVERY_S)


async def _table(progress: Progress) -> None:
    """Show a table and keep it up to date. It disappears at the end."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    live = Live(
        console=Console(stderr=True, highlight=False, markup=False),
        auto_refresh=False,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),  # output that goes into a file stays there
    )
    with live, _logs_above():
        while True:
            began = time.monotonic()
            with suppress(QueueError):
                await progress.sample()
                table = Grid(progress.lines(), _COLUMNS)
                live.update(Group(table, Text(progress.line())), refresh=True)
            await asyncio.sleep(pause_after(time.monotonic() - began, EVERY_S))


@contextmanager
def _logs_above() -> Iterator[None]:
    """Print the log above a live table, through the ``sys.stderr`` that the table has set."""
    handlers = [
        each
        for each in logging.getLogger().handlers
        if isinstance(each, logging.StreamHandler) and each.stream is sys.__stderr__
    ]
    for each in handlers:
        each.setStream(sys.stderr)
    try:
        yield
    finally:
        for each in handlers:
            each.setStream(sys.__stderr__)
