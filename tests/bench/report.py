"""The JSON report of a run as Markdown tables, for the documentation."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from tests.bench.figures import Cpu, number


def markdown(report: Mapping[str, Any]) -> str:
    """Return a report that ``--json`` wrote as Markdown."""
    return "\n".join(_lines(report))


def refreshed(page: str, report: Mapping[str, Any]) -> str:
    """Return a page with new tables between ``<!-- bench: SECTION -->`` and ``<!-- end -->``.

    The pictures of a comparison stand before its table.
    """
    for name, section in report["sections"].items():
        lines = [f"<!-- bench: {name} -->", ""]
        if name == "peers":
            for dots in report["dots"]:
                lines += [f"![{dots['title']}]({dots['name']}.svg)", ""]
        table = _matrix(section) if name == "peers" else _table(section)
        lines += [_measured(report), "", *table, ""]
        pattern = rf"<!-- bench: {re.escape(name)} -->.*?(?=<!-- end -->)"
        text = "\n".join(lines).replace("\\", r"\\")
        page = re.sub(pattern, text, page, flags=re.DOTALL)
    return page


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    yield _measured(report)
    for name, section in report["sections"].items():
        yield from ("", f"### {name}", "", *_table(section))


def _measured(report: Mapping[str, Any]) -> str:
    machine = ", ".join(
        f"{name.replace('_', ' ')} {value}" for name, value in report["machine"].items()
    )
    kind = "Quick run" if report["quick"] else "Full run"
    return f"Machine: {machine}. {kind}, {report['seconds']:.0f} s."


def _matrix(section: Mapping[str, Any]) -> Iterator[str]:
    """Yield a table with a row for each peer and a column for each cell."""
    peers: dict[str, dict[str, str]] = {}
    about: dict[str, str] = {}
    for row in section["rows"]:
        peer, _, cell = row["name"].partition(": ")
        if not cell:
            about[peer] = row["note"]
            peers[peer] = {}
        elif row["unit"].startswith("x raw"):
            cpu = f" ({Cpu(**row['cpu'])})" if row.get("cpu") and "64" in cell else ""
            peers.setdefault(peer, {})[cell] = number(row["median"]) + cpu
            if "waking" not in cell:  # the rate, the durability and the note
                about.setdefault(peer, row["note"].partition("; ")[2])
    cells = list(dict.fromkeys(cell for found in peers.values() for cell in found))
    yield "| | " + " | ".join(cells) + " | |"
    yield "|---" * (len(cells) + 2) + "|"
    for peer, found in peers.items():
        shown = [peer, *(found.get(cell, "") for cell in cells), about.get(peer, "")]
        yield "| " + " | ".join(shown) + " |"


def _table(section: Mapping[str, Any]) -> Iterator[str]:
    yield "| figure | median | quartiles | unit | target | | CPU us | absolute |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in section["rows"]:
        low, high = map(number, row["quartiles"])
        met = {True: "met", False: "**missed**", None: ""}[row["met"]]
        noise = row.get("noise")
        cells = (
            row["name"],
            number(row["median"]),
            f"{low} to {high}",
            row["unit"],
            (row["target"] or "") + ("" if noise is None else f" ±{noise:.2f}"),
            met,
            Cpu(**row["cpu"]) if row.get("cpu") else "",
            row["note"],
        )
        yield "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"
