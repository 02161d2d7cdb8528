"""A run of the fault suite: start the cluster, inject faults, drain the queues, check the records.

``members`` starts the servers, ``proxies`` the network in front of them, ``workload`` the
processes that use the queues. ``nemesis`` has the faults and ``schedule`` their order.
``change_log`` reads the story of each message from the database, and ``checker`` compares it with
the ``ledger`` of each process.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.chaos import ledger
from tests.chaos.checker import ChangeLog, Ledgers, Times, check
from tests.chaos.cluster import Cluster, ids_of
from tests.chaos.mutants import MUTANTS
from tests.chaos.nemesis import CLIENT_FAULTS, SCOPES, SERVER_FAULTS
from tests.chaos.plot import draw, per_second
from tests.chaos.pop_checker import Disturbances
from tests.chaos.queues import QUEUES
from tests.chaos.report import Result, is_good, progress, timings
from tests.chaos.schedule import PAUSE_S, POLL_S, Event, Schedule
from tests.chaos.starvation import Availability, check_times
from tests.chaos.telemetry_checker import check_telemetry
from tests.chaos.windows import windows_of

#: The servers, the network and the load share the processors. With a rate of more than this for
#: each processor, consumers get too little time to renew their leases and to ask in time.
RATE = 8.0 * (os.cpu_count() or 1)
#: In the last part of each period no fault begins, so that the run also shows times without faults.
PERIOD_S, QUIET_S = 120.0, 30.0
#: The length of a round with a mutant, and the time until a mutant must be noticed.
ROUND_MINUTES, MUTANT_S = 0.75, 600.0
#: How many lines of a figure are shown.
MOST_SHOWN = 10
ALL_FAULTS = (*SERVER_FAULTS, *CLIENT_FAULTS)


def run(
    minutes: float,
    seed: int,
    *,
    kinds: Collection[str] = ALL_FAULTS,
    at_least: int = 0,
    haste: float = 1.0,
    pause: tuple[float, float] = PAUSE_S,
    plot: Path | None = None,
    rate: float = RATE,
    keep: Path | None = None,
    mutant: str | None = None,
) -> Result:
    """Run the suite once.

    Args:
        minutes: For how long faults are injected.
        seed: The seed of all random choices: the faults, their order and lengths, the workload.
        kinds: The faults to inject, by name.
        at_least: How often to inject each kind of fault, even if that takes longer.
        haste: The factor for the lengths of faults.
        pause: The shortest and the longest pause between two faults, in seconds.
        plot: The path of a chart to draw.
        rate: Messages pushed per second.
        keep: A folder to keep the records in: the ledgers, the change log and the faults.
        mutant: The change of the product to run with.

    Returns:
        The result, as ``show`` takes it.

    Raises:
        Unavailable: The servers did not start or recover.
        QueueError: A process of the workload ended early.
    """
    with TemporaryDirectory(prefix="pyqueue-faults-", ignore_cleanup_errors=True) as folder:
        path = Path(folder)
        with Cluster(path, seed, rate, mutant) as cluster, progress(minutes * 60) as update:
            begun = time.monotonic()
            schedules = _schedules(cluster, kinds, seed, haste, pause, quiet=minutes > 0)
            _inject(cluster, schedules, begun, minutes * 60, at_least, update)
            ended = time.monotonic()
            stored = cluster.finish()
            drained = time.monotonic()
        servers, clients = (each.events for each in schedules)
        events = sorted(servers + clients, key=lambda event: float(event["at"]))
        times, found = _judge(cluster, stored, servers, events, keep)
    timed = timings(times, events, begun)
    if plot is not None:  # one way only: as above
        title = f"{len(events)} faults, seed {seed}"
        plot.write_text(draw(_rates(times, begun, ended), timed["events"], title))
    return {
        "seed": seed,
        "minutes": minutes,
        "seconds": round(ended - begun, 1),
        "faults": len(events),
        "kinds": dict(Counter(event["kind"] for event in events)),
        **found,
        **timed,
        "drained_in": round(drained - ended, 1),
    }


def _judge(
    cluster: Cluster,
    stored: list[dict[str, Any]],
    servers: list[Event],
    events: list[Event],
    keep: Path | None,
) -> tuple[Times, Result]:
    """Check the records of a run, and return the times in them and the findings."""
    broken = [(event["at"], event["at"] + event["seconds"]) for event in servers]
    known = Disturbances(cluster.workload.killed, broken)
    if keep is not None:  # one way only: a run takes long, so the tests make one, and it keeps
        _keep(keep, cluster, known, events)
    ledgers = Ledgers({path.stem: ledger.read(path) for path in cluster.workload.ledgers})
    changes = ChangeLog(ledger.read(cluster.change_log))
    ids = [id for each in stored for id in ids_of(each)]
    found = check(ledgers, changes, ids, known, cluster.contents)
    counts = check_telemetry(ledgers.processes, cluster.metrics, broken)
    found["miscounted"] = len(counts)
    if counts:
        found["wrong"]["miscounted"] = counts[:MOST_SHOWN]
    found["unfinished"] = cluster.unfinished(stored)
    recovered = {event["at"]: _recovered(ledgers.times, event["at"]) for event in servers}
    windows = windows_of(events, recovered, SCOPES, cluster.locks)
    available = Availability(ledger.read(cluster.change_log), QUEUES)
    in_time = check_times(ledgers, available, windows)
    found["wrong"] |= in_time.pop("wrong")
    return ledgers.times, found | in_time


def run_mutant(name: str, seed: int, *, keep: Path | None = None) -> Result:
    """Run with a mutant of the product, round by round, until a check fails.

    Args:
        name: The name of the mutant.
        seed: The seed of the first round.
        keep: As of ``run``; each round replaces the records of the one before.

    Returns:
        The result of the last round, with ``mutant``, and under ``noticed`` the seconds since the
        beginning, or None if ten minutes passed without a failed check.
    """
    begun = time.monotonic()
    for number in itertools.count():
        result = run(
            ROUND_MINUTES,
            seed + number,
            kinds=MUTANTS[name].kinds,
            haste=0.5,
            pause=(0.5, 1.5),
            keep=keep,
            mutant=name,
        )
        passed, good = time.monotonic() - begun, is_good(result)
        if not good or passed > MUTANT_S:
            return {**result, "mutant": name, "noticed": None if good else round(passed, 1)}
    raise AssertionError("unreachable")


def _recovered(times: Times, at: float) -> float:
    """Return the seconds from ``at`` to the first successful push and settle that began later."""
    return max(seconds or 0.0 for seconds in times.recovered(at).values())


def _rates(times: Times, begun: float, ended: float) -> dict[str, list[tuple[float, float]]]:
    return {
        "pushed": per_second(times.pushes, begun, ended),
        "settled": per_second(times.settles, begun, ended),
    }


def _inject(
    cluster: Cluster,
    schedules: tuple[Schedule, Schedule],
    begun: float,
    seconds: float,
    at_least: int,
    update: Callable[[float, int, list[str]], None],
) -> None:
    """Inject faults until the time is over and each kind was injected often enough."""
    active = True
    while active:
        passed = time.monotonic() - begun
        more = [passed < seconds or each.rounds < at_least for each in schedules]
        broken = [each.step(more=go_on) for each, go_on in zip(schedules, more, strict=True)]
        cluster.broken, active = broken[0], any(more) or any(broken)
        cluster.check()
        names = [each.active for each in schedules] if active else ["draining the queues"]
        update(passed, sum(len(each.events) for each in schedules), names)
        time.sleep(POLL_S)


def _schedules(
    cluster: Cluster,
    kinds: Collection[str],
    seed: int,
    haste: float,
    pause: tuple[float, float],
    *,
    quiet: bool,
) -> tuple[Schedule, Schedule]:
    """Return the schedules of server faults and of client faults, which run side by side.

    With ``quiet``, no fault begins in the last part of each period.
    """
    begun = time.monotonic()

    def is_quiet() -> bool:
        return quiet and (time.monotonic() - begun) % PERIOD_S > PERIOD_S - QUIET_S

    def may_break() -> bool:
        return not is_quiet() and not cluster.calm and cluster.servers.healthy()

    servers = {name: fault for name, fault in SERVER_FAULTS.items() if name in kinds}
    clients = {name: fault for name, fault in CLIENT_FAULTS.items() if name in kinds}
    return (
        Schedule(servers, cluster, f"{seed}/servers", may_break, haste, pause),
        Schedule(clients, cluster, f"{seed}/clients", lambda: not is_quiet(), haste, pause),
    )


def _keep(folder: Path, cluster: Cluster, known: Disturbances, events: list[Event]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in (*cluster.workload.ledgers, cluster.change_log):
        shutil.copy(path, folder)
    (folder / "known.json").write_text(json.dumps(asdict(known)))
    (folder / "metrics.json").write_text(json.dumps(cluster.metrics, default=str))
    faults = {"events": events, "locks": cluster.locks}
    (folder / "faults.json").write_text(json.dumps(faults))
