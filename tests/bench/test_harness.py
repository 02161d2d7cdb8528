"""The benchmark: medians, ratios, targets, counts, plots and its command. No times are tested."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from tests.bench import telemetry
from tests.bench.__main__ import SECTIONS, main
from tests.bench.concurrency import Stock
from tests.bench.figures import (
    Cpu,
    Curve,
    Dots,
    Row,
    at_least,
    at_most,
    histogram,
    noise,
    quantile,
    ratios,
    table,
)
from tests.bench.harness import Bench, compared, interleave
from tests.bench.plots import comparison, svg
from tests.bench.report import markdown, refreshed
from tests.bench.sketch import Joiner, held_filter
from tests.bench.soak import Sample, slope, summary
from tests.support.svg import Scale


def test_quantile_is_interpolated() -> None:
    assert quantile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert quantile([1.0, 2.0, 3.0, 4.0, 5.0], 0.25) == 2.0
    assert quantile([7.0], 0.99) == 7.0


def test_ratios_pair_the_rounds() -> None:
    assert ratios([4.0, 9.0], [2.0, 3.0]) == [2.0, 3.0]
    with pytest.raises(ValueError, match="shorter"):
        ratios([1.0, 2.0], [1.0])


def test_interleave_alternates_and_drops_the_first_round() -> None:
    calls: list[str] = []

    def side(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    raw, ours = interleave(2, lambda: side("raw"), lambda: side("ours"))
    assert calls == ["raw", "ours", "ours", "raw", "raw", "ours"]
    assert (raw, ours) == ([4.0, 5.0], [3.0, 6.0])


def test_compared_measures_the_raw_side_twice() -> None:
    values = iter([9.0, 9.0, 9.0, 4.0, 5.0, 8.0])  # the second round runs backwards
    before, after, same = compared(1, lambda: next(values), lambda: next(values))
    assert (before, after, same) == ([8.0], [5.0], [2.0])


def test_noise_is_small_for_equal_sides() -> None:
    assert noise([1.0] * 7) == 0
    steady, wild = [0.99, 1.01, 1.0, 1.02, 0.98], [0.5, 1.5, 1.0, 2.0, 0.6]
    assert noise(steady) == pytest.approx(0.02)
    assert 0.4 < noise(wild) <= 1.0


def test_target_is_met_within_the_noise() -> None:
    def met(value: float, noise: float) -> bool | None:
        return Row("a", "x", [value], 1, at_least(0.95), noise=noise).met

    assert met(0.93, 0.03)
    assert not met(0.93, 0.01)
    assert not met(0.8, 0.5), "a run that is too noisy shows nothing"


def test_cpu_is_for_each_message() -> None:
    assert str((Cpu(3.0, 1.0) - Cpu(1.0, 0.5)).each(1000)) == "2000 + 500"
    assert Cpu(1.0).each(0) == Cpu(1.0)


@pytest.mark.parametrize(
    ("target", "value", "met"),
    [
        (at_least(0.85), 0.85, True),
        (at_least(0.85), 0.84, False),
        (at_most(1.25), 1.25, True),
        (at_most(1.25), 1.26, False),
    ],
)
def test_target_is_met_at_its_limit(target: Any, value: float, met: bool) -> None:
    assert Row("a", "x", [value], 1, target).met is met


def test_row_is_summary_by_its_median() -> None:
    assert Row("a", "x", [9.0, 1.0, 1.1], 3, at_most(1.25)).met is True
    assert Row("a", "x", [9.0], 1).met is None
    shown = Row("a", "x", [1.0, 2.0, 3.0], 30, at_most(1.5)).shown()
    assert (shown["median"], shown["quartiles"], shown["n"]) == (2.0, [1.5, 2.5], 30)
    assert (shown["target"], shown["met"]) == ("<= 1.5", False)


def test_row_is_wrong_after_a_loss_only() -> None:
    assert Row("lost", "count", [1], 10, at_most(0)).wrong
    assert not Row("lost", "count", [0], 10, at_most(0)).wrong
    assert not Row("slow", "x raw cost", [9.0], 10, at_most(1.25)).wrong


class Store:
    """A fake collection of message numbers."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def with_options(self, **_: object) -> Store:
        return self

    def insert_many(self, documents: list[dict[str, Any]], **_: object) -> None:
        self.numbers += [document["payload"]["n"] for document in documents]

    def find(self, _: object) -> list[dict[str, Any]]:
        return [{"payload": {"n": number}} for number in self.numbers]


@pytest.mark.parametrize(
    ("consumed", "left", "faults"),
    [
        ([0, 1, 2], [3, 4], {"lost": 0, "twice": 0}),
        ([0, 1, 1], [2, 3, 4], {"lost": 0, "twice": 1}),
        ([0, 1], [1, 2, 3, 4], {"lost": 0, "twice": 1}),
        ([0, 1], [3, 4], {"lost": 1, "twice": 0}),
    ],
)
def test_stock_counts_losses_and_duplicates(
    consumed: list[int], left: list[int], faults: dict[str, int]
) -> None:
    store, counted = Store(), {"lost": 0, "twice": 0}
    stock = Stock(store, "q", 5)
    assert store.numbers == [0, 1, 2, 3, 4]
    store.numbers = left
    stock.check(consumed, counted)
    assert counted == faults


def test_table_shows_every_figure() -> None:
    console = Console(width=200, record=True, file=Path("/dev/null").open("w"))  # noqa: SIM115
    console.print(
        table(
            "single", [Row("push", "x raw speed", [0.5, 0.75, 1.0], 300, at_least(0.85), "a note")]
        )
    )
    console.file.close()
    text = console.export_text()
    for part in (
        "single",
        "push",
        "0.75",
        "0.625 - 0.875",
        "x raw speed",
        "300",
        ">= 0.85",
        "missed",
        "a note",
    ):
        assert part in text


def curve(**options: Any) -> Curve:
    return Curve(
        "c",
        "a <title>",
        "x & x",
        "y",
        {"one": [(1e3, 1.0), (1e6, 40.0)], "two": [(1e4, 0.5)]},
        **options,
    )


@pytest.mark.parametrize("logs", [(True, True), (True, False), (False, False)])
def test_plot_is_well_formed_and_inside_its_frame(logs: tuple[bool, bool]) -> None:
    root = ElementTree.fromstring(svg(curve(log_x=logs[0], log_y=logs[1])))
    space = "{http://www.w3.org/2000/svg}"
    texts = [each.text for each in root.iter(f"{space}text")]
    assert {"a <title>", "x & x", "y", "one", "two"} <= set(texts)
    assert len(root.findall(f"{space}polyline")) == 2
    circles = root.findall(f"{space}circle")
    assert len(circles) == 3
    assert all(
        80 <= float(each.attrib["cx"]) <= 520 and 50 <= float(each.attrib["cy"]) <= 380
        for each in circles
    )


def test_comparison_has_a_dot_for_each_value() -> None:
    dots = Dots("d", "a <title>", "x raw")
    dots.add("push", "pyqueue", 5.0)
    dots.add("push", "a peer", 0.2)
    dots.add("receive", "pyqueue", 12.0)
    root = ElementTree.fromstring(comparison(dots))
    space = "{http://www.w3.org/2000/svg}"
    texts = {each.text for each in root.iter(f"{space}text")}
    assert {"a <title>", "pyqueue", "a peer", "push", "receive", "0.1", "100"} <= texts
    titles = {each.text for each in root.iter(f"{space}title")}
    assert titles == {"pyqueue, push: 5", "a peer, push: 0.2", "pyqueue, receive: 12"}


REPORT: dict[str, Any] = {
    "machine": {"cpus": 2},
    "quick": False,
    "seconds": 7,
    "sections": {"cpu": {"rows": [Row("a", "x", [2.0], 1, cpu=Cpu(1e-6)).shown()]}},
    "curves": [],
    "dots": [{"name": "peers", "title": "t", "x": "x", "groups": {"push": {"a": 2.0}}}],
}


def test_page_gets_new_tables_between_its_marks() -> None:
    page = "a\n<!-- bench: cpu -->\nold\n<!-- end -->\nb\n<!-- bench: c -->\nc\n<!-- end -->\n"
    new = refreshed(page, REPORT)
    assert "old" not in new
    assert "| a | 2 | 2 to 2 | x |  |  | 1 + 0 |  |" in new
    assert new.startswith("a\n<!-- bench: cpu -->\n")
    assert new.endswith("<!-- end -->\nb\n<!-- bench: c -->\nc\n<!-- end -->\n")
    assert refreshed(new, REPORT) == new


def test_page_gets_one_row_for_each_peer() -> None:
    rows = [
        Row("raw: push 64", "x raw", [1.0], 1, None, "9/s; on disk; a note", cpu=Cpu(1e-6, 2e-6)),
        Row("raw: lost", "count", [0], 1, at_most(0)),
        Row("b: push 64", "x raw", [3.5], 1, None, "31/s; in memory"),
        Row("b: waking p50, spaced", "x raw p50", [0.5], 1, None, "2 ms"),
        Row("c", "not run", [0], 0, None, "skipped: c is not installed"),
    ]
    report = REPORT | {"sections": {"peers": {"rows": [row.shown() for row in rows]}}}
    new = refreshed("<!-- bench: peers --><!-- end -->", report).splitlines()
    assert new[2] == "![t](peers.svg)"
    assert new[6:11] == [
        "| | push 64 | waking p50, spaced | |",
        "|---|---|---|---|",
        "| raw | 1 (1 + 2) |  | on disk; a note |",
        "| b | 3.5 | 0.5 | in memory |",
        "| c |  |  | skipped: c is not installed |",
    ]


def test_command_refreshes_a_page_and_its_plots(tmp_path: Path) -> None:
    report, page = tmp_path / "run.json", tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    report.write_text(json.dumps(REPORT))
    page.write_text("![x](peers.svg)\n<!-- bench: cpu --><!-- end -->")
    assert main(["--report", str(report), "--page", str(page)]) == 0
    assert "| a | 2 |" in page.read_text()
    assert [each.name for each in sorted(page.parent.iterdir())] == ["page.md", "peers.svg"]
    assert "| a | 2 |" in markdown(REPORT)


async def _joined(calls: int) -> tuple[list[int], list[int]]:
    sizes: list[int] = []

    async def double(items: list[int]) -> list[int]:
        sizes.append(len(items))
        await asyncio.sleep(0)
        return [2 * item for item in items]

    joiner = Joiner[int, int](double, 1, 4)
    return list(await asyncio.gather(*(joiner(number) for number in range(calls)))), sizes


def test_sketch_joins_calls_and_returns_to_each_its_own() -> None:
    results, sizes = asyncio.run(_joined(10))
    assert results == [2 * number for number in range(10)]
    assert sizes == [4, 4, 2]


def test_sketch_commits_by_pairs_of_id_and_token() -> None:
    claimed = [{"_id": 1, "token": "a"}, {"_id": 2, "token": "b"}, {"_id": 3, "token": "a"}]
    assert held_filter(claimed[:1]) == {"_id": {"$in": [1]}, "token": "a"}
    assert held_filter(claimed) == {
        "$or": [{"_id": {"$in": [1, 3]}, "token": "a"}, {"_id": {"$in": [2]}, "token": "b"}]
    }


def test_plot_of_nothing_is_well_formed() -> None:
    assert ElementTree.fromstring(svg(Curve("c", "t", "x", "y"))).tag.endswith("svg")


def test_scale_ticks_and_pixels() -> None:
    log = Scale([1_000, 1_000_000], 0, 300, log=True)
    assert log.ticks() == [1e3, 1e4, 1e5, 1e6]
    assert [round(log(value)) for value in (1e3, 1e4, 1e6, 0)] == [0, 100, 300, 0]
    assert Scale([7, 48], 0, 100, log=False).ticks() == [0, 10, 20, 30, 40]


def test_histogram_has_all_values() -> None:
    drawn = curve()
    histogram(drawn, "new", [0.5, 2.0, 2.1, 30.0])
    assert sum(share for _, share in drawn.lines["new"]) == pytest.approx(100)


def test_command_lists_the_sections(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert capsys.readouterr().out.split() == list(SECTIONS)


def test_command_refuses_an_unknown_section(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--only", "nothing"])
    assert end.value.code == 2
    assert "nothing" in capsys.readouterr().err


def sample(at: float, **seen: float) -> Sample:
    given: dict[str, Any] = {
        "memory": 50.0,
        "threads": 9,
        "tasks": 40,
        "files": 30,
        "connections": 12,
        "lag": 0.01,
        "lag99": 0.05,
        "received": 10,
    }
    return Sample(at=at, **given | seen)


def test_soak_finds_what_grows() -> None:
    flat = [sample(at) for at in range(0, 100, 10)]
    assert summary(flat, 0)["leaks"] == []
    assert summary(flat, 0)["memory"]["per_hour"] == 0
    for name, step in (
        ("memory", 1),
        ("threads", 1),
        ("tasks", 3),
        ("files", 1),
        ("connections", 1),
    ):
        start = getattr(flat[0], name)
        growing = [
            sample(at, **{name: start + step * index}) for index, at in enumerate(range(0, 100, 10))
        ]
        assert summary(growing, 0)["leaks"] == [name]
    warming = [sample(at, memory=40 if at < 20 else 50) for at in range(0, 100, 10)]
    assert summary(warming, 0)["leaks"] == []
    busier = [sample(at, tasks=90 if at > 50 and at % 20 else 40) for at in range(0, 100, 10)]
    assert summary(busier, 0)["leaks"] == []
    assert summary(flat, 0)["lag99_ms"] == {"median": 50, "most": 50}


def test_soak_slope_is_per_hour() -> None:
    assert slope([(0, 5), (60, 6), (120, 7)]) == pytest.approx(60)
    assert slope([(0, 5)]) == 0


class Machine(Bench):
    """A run without a server. Each message costs the client 1 s of processor time."""

    def __init__(self) -> None:
        self.quick = True
        self.rows = []
        self.spent = 0.0

    def cpu(self) -> Cpu:
        return Cpu(client=self.spent)


def test_telemetry_is_compared_with_two_clients_without_it() -> None:
    machine, calls = Machine(), list[str]()

    def work(side: str) -> int:
        calls.append(side)
        machine.spent += 2 if side == "on" else 1
        return 1

    assert telemetry.compare(machine, "push", work, lambda side: calls.append("flush")) == 5
    assert calls[:6] == ["off", "flush", "on", "flush", "again", "flush"]
    with_it, without, processor = machine.rows
    assert (with_it.name, with_it.target) == ("push, with telemetry", at_least(1))
    assert with_it.noise == noise(without.values)
    assert (processor.values, processor.target, processor.noise) == ([2.0] * 4, at_most(1.02), 0)
