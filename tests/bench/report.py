"""The JSON report of a run as Markdown tables, for the documentation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tests.bench.figures import number

__all__ = ["markdown"]


def markdown(report: Mapping[str, Any]) -> str:
    """Return a report that ``--json`` wrote as Markdown."""
    return "\n".join(_lines(report))


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    machine = ", ".join(
        f"{name.replace('_', ' ')} {value}" for name, value in report["machine"].items()
    )
    kind = "Quick run" if report["quick"] else "Full run"
    yield f"Machine: {machine}. {kind}, {report['seconds']:.0f} s."
    for name, section in report["sections"].items():
        yield ""
        yield f"### {name}"
        yield ""
        yield "| figure | median | quartiles | unit | target | | absolute |"
        yield "|---|---|---|---|---|---|---|"
        for row in section["rows"]:
            low, high = map(number, row["quartiles"])
            met = {True: "met", False: "**missed**", None: ""}[row["met"]]
            cells = (
                row["name"],
                number(row["median"]),
                f"{low} to {high}",
                row["unit"],
                row["target"] or "",
                met,
                row["note"],
            )
            yield "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"
