"""``pyqueue faults``: a queue under load while its servers, network and clients are made to fail, and the audit of what came of it.

``members`` starts the servers, ``proxies`` the network before them, ``load`` the processes that use the queue. ``kinds`` says what goes wrong,
``witness`` reads from the database what happened to each message, and ``audit`` holds that against the ``ledger`` of each process. This module
runs it all.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pymongo.errors import PyMongoError

from pyqueue.errors import Unavailable
from tests.chaos import ledger
from tests.chaos.checker import MUST_BE_ZERO, Ledgers, Times, Witnessed, audit
from tests.chaos.cluster import World
from tests.chaos.nemesis import OF_CLIENTS, OF_SERVERS, Fault, Kind, rounds
from tests.chaos.plot import draw, per_second
from tests.chaos.pop_checker import Circumstances

__all__ = ["is_good", "run", "show"]

RATE = 400.0  # messages that are pushed in a second, while nothing is broken
PATIENCE = 60.0  # seconds that a fault, or the recovery from it, may take
PAUSE = (2.0, 8.0)  # seconds between a fault and the next: at least and at most
LOOK = 0.05

#: What is shown in one line, beside what must be zero.
FIGURES = (
    *(
        "messages",
        "pushed",
        "acknowledged",
        "received",
        "settled",
        "redelivered",
        "refused",
        "refused_though_done",
    ),
    *("claims_undone", "stored", "dead", "unfinished"),
)

Result = dict[str, Any]
Pause = tuple[float, float]


class Lane:
    """Faults one after the other, of some kinds. What went wrong by now is in ``events``."""

    def __init__(
        self,
        kinds: dict[str, Kind],
        world: World,
        seed: str,
        ready: Callable[[], bool],
        haste: float,
        pause: Pause,
    ) -> None:
        self._world, self._ready, self._haste, self._pause = world, ready, haste, pause
        self._dice = random.Random(seed)
        self._kinds, self._number = rounds(kinds, self._dice), len(kinds)
        self._fault: Fault | None = None
        self._due = self._began = time.monotonic()
        self.events: list[Result] = []
        #: What is going wrong now.
        self.now = ""

    @property
    def rounds(self) -> int:
        """How many times each kind has been."""
        return (len(self.events) - bool(self.now)) // self._number

    def step(self, *, more: bool) -> bool:
        """Go on, if it is time to. Whether something is going wrong; no new fault begins unless there are to be ``more``."""
        now = time.monotonic()
        if now >= self._due:
            if self._fault is None:
                self._begin(more)
            if self._fault is not None:
                self._go_on(self._fault)
            if self._fault is not None and now - self._began > PATIENCE:
                raise Unavailable(f"after {PATIENCE:.0f} s this is not over: {self.now}")
        return self._fault is not None

    def _begin(self, more: bool) -> None:
        if more and self._ready():
            self.now, kind = next(self._kinds)
            self._began = time.monotonic()
            self._fault = kind(self._world, self._dice)
            self.events.append({"kind": self.now})

    def _go_on(self, fault: Fault) -> None:
        try:
            seconds = next(fault)
            self.events[-1].setdefault(
                "at", time.monotonic()
            )  # broken by now: what began before does not count
            self._due = time.monotonic() + (LOOK if seconds is None else seconds * self._haste)
        except PyMongoError as error:
            raise Unavailable(f"{self.now}: {error}") from error
        except StopIteration as stop:
            self._began = time.monotonic()
            at = self.events[-1].setdefault("at", self._began)
            self.events[-1] |= {"seconds": self._began - at, "what": stop.value}
            self._due = self._began + self._dice.uniform(*self._pause)
            self._fault, self.now = None, ""


def run(
    minutes: float,
    seed: int,
    *,
    at_least: int = 0,
    haste: float = 1.0,
    pause: Pause = PAUSE,
    plot: Path | None = None,
    rate: float = RATE,
    keep: Path | None = None,
) -> Result:
    """Run it.

    Args:
        minutes: for how long faults are made.
        seed: of all that is drawn by lot: the faults, their order and lengths, and what the load does.
        at_least: how often each kind of fault is made, if that takes longer.
        haste: what the lengths of faults are multiplied by.
        pause: seconds between a fault and the next, at least and at most.
        plot: the path of a drawing to be made.
        rate: messages pushed in a second.
        keep: a folder for what the audit reads: the ledgers, the witness's lines, and what the program did.

    Returns:
        What ``show`` shows.

    Raises:
        Unavailable: the servers did not start, or did not recover.
        QueueError: a process of the load ended by itself.
    """
    with tempfile.TemporaryDirectory(
        prefix="pyqueue-faults-", ignore_cleanup_errors=True
    ) as folder:
        with World(Path(folder), seed, rate) as world, progress(minutes * 60) as show_progress:
            begun = time.monotonic()
            lanes = [
                Lane(
                    OF_SERVERS,
                    world,
                    f"{seed}/servers",
                    lambda: not world.calm and world.servers.healthy(),
                    haste,
                    pause,
                ),
                Lane(OF_CLIENTS, world, f"{seed}/clients", lambda: True, haste, pause),
            ]
            busy = True
            while busy:
                passed = time.monotonic() - begun
                more = [passed < minutes * 60 or lane.rounds < at_least for lane in lanes]
                broken = [lane.step(more=each) for lane, each in zip(lanes, more, strict=True)]
                world.broken, busy = broken[0], any(more) or any(broken)
                world.check()
                show_progress(
                    passed, sum(len(lane.events) for lane in lanes), [lane.now for lane in lanes]
                )
                time.sleep(LOOK)
            ended = time.monotonic()
            show_progress(
                ended - begun, sum(len(lane.events) for lane in lanes), ["finishing what is there"]
            )
            stored = world.finish()
            drained = time.monotonic()
        events = sorted(
            (event for lane in lanes for event in lane.events), key=lambda event: float(event["at"])
        )
        ledgers = Ledgers({path.stem: ledger.read(path) for path in world.crew.ledgers})
        troubles = [(event["at"], event["at"] + event["seconds"]) for event in lanes[0].events]
        known = Circumstances(world.crew.killed, troubles)
        if (
            keep is not None
        ):  # one way only: a run takes its time, so there is one in the tests, and it keeps
            keep.mkdir(parents=True, exist_ok=True)
            for path in (*world.crew.ledgers, world.witnessed):
                shutil.copy(path, keep)
            (keep / "known.json").write_text(json.dumps(asdict(known)))
        found = audit(
            ledgers,
            Witnessed(ledger.read(world.witnessed)),
            [str(each["_id"]) for each in stored],
            known,
        )
        found["unfinished"] = world.unfinished(stored)
    return {
        "seed": seed,
        "minutes": minutes,
        "seconds": round(ended - begun, 1),
        "faults": len(events),
        "kinds": dict(Counter(event["kind"] for event in events)),
        **found,
        **_timed(ledgers.times, events, begun, ended, plot, seed),
        "drained_in": round(drained - ended, 1),
    }


def is_good(result: Result) -> bool:
    """Whether nothing happened that must not."""
    return not any(result[name] for name in MUST_BE_ZERO)


def _timed(
    times: Times, events: list[Result], begun: float, ended: float, plot: Path | None, seed: int
) -> Result:
    """What the times of the ledgers tell, with the times of the faults counted from the beginning from here on."""
    suspended: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        if event["kind"] == "consumer suspended":
            suspended.setdefault(event["what"], []).append(
                (event["at"], event["at"] + event["seconds"])
            )
    for event in events:
        event["recovered"] = {
            name: None if seconds is None else round(seconds, 2)
            for name, seconds in times.recovered(event["at"]).items()
        }
        event["at"], event["seconds"] = round(event["at"] - begun, 2), round(event["seconds"], 2)
    if plot is not None:
        lines = {
            "pushed": per_second(times.pushes, begun, ended),
            "settled": per_second(times.settles, begun, ended),
        }
        plot.write_text(draw(lines, events, f"{len(events)} faults, seed {seed}"))
    recovery: Result = {kind: {} for kind in sorted({event["kind"] for event in events})}
    for kind, both in recovery.items():
        for name in ("push", "settle"):
            times_of = [event["recovered"][name] for event in events if event["kind"] == kind]
            if known := [seconds for seconds in times_of if seconds is not None]:
                both[name] = {"median": round(statistics.median(known), 2), "longest": max(known)}
    return {
        "longest_outage": {
            "producer": round(times.outage("producer", suspended), 2),
            "consumer": round(times.outage("mover consumer", suspended), 2),
        },
        "recovery": recovery,
        "events": events,
    }


@contextmanager
def progress(total: float) -> Iterator[Callable[[float, int, list[str]], None]]:
    """A bar on stderr, if that is a terminal."""
    from rich import progress as rich
    from rich.console import Console

    console = Console(stderr=True)
    columns = (
        rich.BarColumn(),
        rich.TimeElapsedColumn(),
        rich.TextColumn("{task.fields[faults]} faults"),
        rich.TextColumn("{task.description}"),
    )
    with rich.Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True
    ) as bar:
        task = bar.add_task("starting", total=total, faults=0)

        def show_progress(passed: float, faults: int, now: list[str]) -> None:
            bar.update(
                task, completed=passed, faults=faults, description="  ".join(filter(None, now))
            )

        yield show_progress


def show(result: Result) -> None:
    """Print the result for people."""
    from rich.console import Console
    from rich.table import Column, Table

    console = Console(highlight=False, markup=False)
    grid = Table(
        "fault",
        *(Column(name, justify="right") for name in ("times", "push again", "settle again")),
    )
    for kind, times in sorted(result["kinds"].items()):
        again = result["recovery"].get(kind, {})
        cells = [again.get(name, {}) for name in ("push", "settle")]
        grid.add_row(
            kind,
            str(times),
            *(f"{cell['median']:.1f} s, {cell['longest']:.1f} s" if cell else "" for cell in cells),
        )
    console.print(grid)
    console.print(
        "Push again, settle again: seconds from the beginning of a fault until a push or settle that began after it was answered "
        "well; the median and the longest."
    )
    outage = result["longest_outage"]
    console.print(
        f"Longest time without an answer: {outage['producer']:.1f} s of a producer, {outage['consumer']:.1f} s of a consumer."
    )
    console.print(", ".join(f"{name.replace('_', ' ')} {result[name]}" for name in FIGURES))
    for error, times in result["errors"].items():
        console.print(f"error, {times} times: {error}")
    for name, lines in result["wrong"].items():
        for line in lines:
            console.print(f"WRONG: {name.replace('_', ' ')}: {line}")
    console.print(", ".join(f"{name.replace('_', ' ')} {result[name]}" for name in MUST_BE_ZERO))
