"""The report of a run: recovery times and outages, the progress bar, and the text for people."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tests.chaos.checker import MUST_BE_ZERO, Times
from tests.chaos.starvation import LONGEST_WAIT_AFTER_FAULT_S, LONGEST_WAIT_S, TIMELY

#: The figures that must be 0.
VERDICT = (*MUST_BE_ZERO, *TIMELY, "miscounted", "unfinished")

#: Shown in one line, next to the figures that must be 0.
FIGURES = (
    *("messages", "pushed", "acknowledged", "received", "settled", "redelivered", "refused"),
    *("refused_though_done", "claims_undone", "stored", "dead"),
)

Result = dict[str, Any]


def is_good(result: Result) -> bool:
    """Return whether nothing happened that must not."""
    return not failed_checks(result)


def failed_checks(result: Result) -> list[str]:
    """Return the names of the figures that are not 0, although they must be."""
    return [name for name in VERDICT if result[name]]


def timings(times: Times, events: Sequence[Mapping[str, Any]], begun: float) -> Result:
    """Return outages, recovery times, and the faults with times since the beginning.

    Args:
        times: The times in the ledgers.
        events: The faults, with times on the monotonic clock.
        begun: When the run began.
    """
    suspended: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        if event["kind"] == "consumer suspended":
            span = (event["at"], event["at"] + event["seconds"])
            suspended.setdefault(event["what"], []).append(span)
    shown = [
        {
            "kind": event["kind"],
            "what": event["what"],
            "at": round(event["at"] - begun, 2),
            "seconds": round(event["seconds"], 2),
            "recovered": {
                name: None if seconds is None else round(seconds, 2)
                for name, seconds in times.recovered(event["at"]).items()
            },
        }
        for event in events
    ]
    return {
        "longest_outage": {
            "producer": round(times.outage("producer", suspended), 2),
            "consumer": round(times.outage("mover consumer", suspended), 2),
        },
        "recovery": _recovery(shown),
        "events": shown,
    }


def _recovery(events: Sequence[Mapping[str, Any]]) -> Result:
    """Return the median and the longest recovery from each kind of fault."""
    found: Result = {kind: {} for kind in sorted({event["kind"] for event in events})}
    for kind, recovery in found.items():
        for name in ("push", "settle"):
            times = [event["recovered"][name] for event in events if event["kind"] == kind]
            if known := [seconds for seconds in times if seconds is not None]:
                median = round(statistics.median(known), 2)
                recovery[name] = {"median": median, "longest": max(known)}
    return found


@contextmanager
def progress(total: float) -> Iterator[Callable[[float, int, list[str]], None]]:
    """Show a progress bar on stderr if that is a terminal.

    Args:
        total: The expected seconds.

    Yields:
        A function to call with the seconds so far, the number of faults, and the active faults.
    """
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

        def update(passed: float, faults: int, active: list[str]) -> None:
            description = "  ".join(filter(None, active))
            bar.update(task, completed=passed, faults=faults, description=description)

        yield update


def show(result: Result) -> None:
    """Print the result for people."""
    from rich.console import Console
    from rich.table import Column, Table

    console = Console(highlight=False, markup=False)
    columns = (Column(name, justify="right") for name in ("times", "push again", "settle again"))
    grid = Table("fault", *columns)
    for kind, times in sorted(result["kinds"].items()):
        recovery = result["recovery"].get(kind, {})
        cells = [recovery.get(name, {}) for name in ("push", "settle")]
        grid.add_row(
            kind,
            str(times),
            *(f"{cell['median']:.1f} s, {cell['longest']:.1f} s" if cell else "" for cell in cells),
        )
    console.print(grid)
    console.print(
        "Push again, settle again: seconds from the beginning of a fault to the first successful "
        "push or settle that began after it; the median and the longest."
    )
    outage = result["longest_outage"]
    console.print(
        f"Longest time without a successful call: {outage['producer']:.1f} s for a producer, "
        f"{outage['consumer']:.1f} s for a consumer."
    )
    starved = result["longest_starvation"]
    console.print(
        "Longest time that a message could be received and consumers asked in vain: "
        f"{starved['without_fault']:.1f} s without a fault (limit {LONGEST_WAIT_S:g} s), "
        f"{starved['with_fault']:.1f} s after the recovery from faults "
        f"(limit {LONGEST_WAIT_AFTER_FAULT_S:g} s)."
    )
    excuses = (
        f"{reason} {each['used']} of at most {each['allowed']}"
        for reason, each in result["excuses"].items()
    )
    console.print(
        f"Popped messages that may be with a call without a result: {', '.join(excuses)}."
    )
    console.print(
        f"seed {result['seed']}, {result['faults']} faults of {len(result['kinds'])} kinds "
        f"in {result['seconds']:.0f} s"
    )
    console.print(_figures(result, FIGURES))
    for name, lines in result["wrong"].items():
        for line in lines:
            console.print(f"WRONG: {name.replace('_', ' ')}: {line}")
    console.print(_figures(result, VERDICT))
    if "mutant" in result:
        found = "not noticed in ten minutes"
        if result["noticed"] is not None:
            found = f"noticed after {result['noticed']:.0f} s: {', '.join(failed_checks(result))}"
        console.print(f"mutant {result['mutant']}: {found}")


def _figures(result: Result, names: Sequence[str]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {result[name]}" for name in names)
