"""Show the progress and the results of the demo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich import progress as rich
from rich.console import Console
from rich.table import Column, Table

#: Takes the number of messages in each queue, and the number of steps that are left.
Progress = Callable[[dict[str, int], int], None]

CARRIER_COLUMNS = ["flights", "late", "cancelled", "mean_delay"]


@contextmanager
def progress_bar(total: int) -> Iterator[Progress]:
    """Show a progress bar on stderr if that is a terminal. Yield a function that updates it."""
    console = Console(stderr=True)
    columns = (
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TimeElapsedColumn(),
        rich.TextColumn("{task.description}"),
    )
    with rich.Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True
    ) as bar:
        task = bar.add_task("starting", total=total)

        def show_progress(counts: dict[str, int], left: int) -> None:
            description = "  ".join(f"{name} {count}" for name, count in counts.items())
            bar.update(task, completed=max(0, total - left), description=description)

        yield show_progress


def print_result(result: dict[str, Any]) -> None:
    """Print the result of ``run``."""
    console = Console(highlight=False, markup=False)
    _print_source(console, result)
    _print_table(console, "queue", ["in", "out", "dead"], result["queues"])
    _print_carriers(console, result)
    console.print(f"A dead letter says: {' '.join(str(result['a_dead_letter_says']).split())}")
    console.print(
        f"A consumer process was killed when it had stored {result['held_by_the_killed']} flights "
        f"and not committed them. In all, {result['redelivered']} messages that it held were "
        "delivered again, to the other consumers."
    )
    console.print(
        f"{result['seconds']:.1f} s with the start of the processes: "
        f"{result['messages_per_second']} messages/s. Each message is moved twice and committed "
        f"once: {result['steps_per_second']} steps/s."
    )
    _print_check(console, result["check"])


def print_spark_result(result: dict[str, Any]) -> None:
    """Print the result of ``run_spark``."""
    console = Console(highlight=False, markup=False)
    _print_source(console, result)
    _print_carriers(console, result)
    console.print(
        f"A Spark stage moved {result['moved']} messages from raw to parsed in "
        f"{result['batches']} batches, and finished {result['dropped']} that it left out. "
        f"The sums come from {result['claims']} claims on parsed."
    )
    console.print(
        f"Starting Spark took {result['seconds_to_start_spark']:.1f} s, the rest "
        f"{result['seconds']:.1f} s. The first batch of the stage took "
        f"{result['seconds_of_the_first_batch']:.1f} s, because Spark compiles the job; after it "
        f"the stage moved {result['messages_per_second']} messages/s."
    )
    _print_check(console, result["check"])


def _print_source(console: Console, result: dict[str, Any]) -> None:
    console.print(
        f"{result['rows']} rows ({result['source']}) and {result['broken']} copies that are "
        "broken on purpose."
    )


def _print_carriers(console: Console, result: dict[str, Any]) -> None:
    _print_table(console, "carrier", CARRIER_COLUMNS, result["carriers"])
    console.print(
        "Late: arrived 15 minutes late or more, or was diverted. "
        "Mean delay: in minutes, of the flights that arrived."
    )


def _print_table(
    console: Console, title: str, columns: list[str], rows: dict[str, dict[str, Any]]
) -> None:
    grid = Table(title, *(Column(name.replace("_", " "), justify="right") for name in columns))
    for name, figures in rows.items():
        cells = (figures[column] for column in columns)
        grid.add_row(
            name, *(f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in cells)
        )
    console.print(grid)


def _print_check(console: Console, check: dict[str, Any]) -> None:
    for wrong in check["different"]:
        console.print(
            f"NOT EQUAL: {wrong['figure']}: {wrong['file']} in the file, {wrong['here']} here"
        )
    if check["equal"]:
        console.print(
            f"Check: {check['compared']} figures, all equal to those counted from the file."
        )
