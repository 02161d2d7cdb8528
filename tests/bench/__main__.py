"""``python -m tests.bench``: speed as ratios to raw pymongo, on a mongod that it starts and stops.

The exit status is 1 if a message was lost or received twice. A missed target is shown and does not
change the exit status, because machines differ.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path

from rich.console import Console

from tests.bench import (
    batches,
    bound,
    buckets,
    concurrency,
    cpu,
    depth,
    groups,
    idle,
    limits,
    listing,
    pipeline,
    plots,
    priorities,
    replicas,
    single,
    spark,
    streams,
    telemetry,
    tombstones,
    wakeups,
)
from tests.bench.harness import Section, measure
from tests.bench.peers import section as peers
from tests.bench.report import markdown, refreshed

SECTIONS: dict[str, Section] = {
    "single": single.run,
    "cpu": cpu.run,
    "batches": batches.run,
    "bound": bound.run,
    "concurrency": concurrency.run,
    "depth": depth.run,
    "tombstones": tombstones.run,
    "buckets": buckets.run,
    "priorities": priorities.run,
    "groups": groups.run,
    "limits": limits.run,
    "listing": listing.run,
    "wakeups": wakeups.run,
    "idle": idle.run,
    "pipeline": pipeline.run,
    "streams": streams.run,
    "telemetry": telemetry.run,
    "spark": spark.run,
    "replicas": replicas.run,
    "peers": peers.run,
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench", description="Measure speed as ratios to raw pymongo."
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="two minutes instead of twenty: fewer rounds, smaller depths",
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=SECTIONS, help="run only these sections"
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="also write a JSON report; - is standard output",
    )
    parser.add_argument(
        "--plots", type=Path, metavar="DIR", help="also draw the curves as SVG files"
    )
    parser.add_argument(
        "--list", action="store_true", help="print the names of the sections and exit"
    )
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="measure nothing; print a JSON report as Markdown tables",
    )
    parser.add_argument(
        "--page",
        type=Path,
        metavar="FILE",
        help="with --report: write the tables into a page, and the plots beside it",
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    if given.report is not None:
        return show(given.report, given.plots, given.page)
    if given.list:
        print("\n".join(SECTIONS))
        return 0
    # An exception, so that the servers are stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    quiet = given.json is not None and str(given.json) == "-"
    console = Console(stderr=quiet, width=None if sys.stdout.isatty() else 170)
    chosen = {
        name: section
        for name, section in SECTIONS.items()
        if given.only is None or name in given.only
    }
    report, rows = measure(chosen, quick=given.quick, console=console)
    if given.json is not None:
        text = json.dumps(report, indent=1)
        print(text) if quiet else given.json.write_text(text + "\n")
    if given.plots is not None:
        plots.write(report, given.plots)
    missed = [row for row in rows if row.met is False]
    met = sum(row.met is True for row in rows)
    console.print(f"{report['seconds']:.0f} s, {met} targets met, {len(missed)} missed")
    for row in missed:
        console.print(f"  missed: {row.name}: {row.median:.3g} {row.unit}, target {row.target}")
    return int(any(row.wrong for row in rows))


def show(report: Path, folder: Path | None, page: Path | None) -> int:
    """Print a report as Markdown, draw its plots, and put its tables into a page."""
    found = json.loads(report.read_text())
    if folder is not None:
        plots.write(found, folder)
    if page is None:
        print(markdown(found))
    else:
        page.write_text(refreshed(page.read_text(), found))
        plots.write(found, page.parent, only=page.read_text())
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
