"""Tables that are drawn again and again: their columns, ``ls --watch``, the progress of a run."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pyqueue import AsyncClient, Client, Counts, Pipeline, QueueInfo
from pyqueue.cli import progress, watching
from pyqueue.cli.board import Line
from pyqueue.cli.columns import COLUMNS, bars, fitted, layout, number, order, rate, span
from pyqueue.cli.progress import CAP, Progress, Sample
from pyqueue.cli.watching import pause_after
from tests.cli.shell import Shell
from tests.cli.test_queues import screen_of, terminal

# ---- texts


def test_numbers_are_short() -> None:
    assert [*map(number, (None, 0, 9999, 10_000))] == ["", "0", "9,999", "10k+"]
    assert [*map(rate, (None, 0.0, 0.05, 0.001, 18.46, 99.96, 9999.4, 12_345.0))] == [
        *("", "0.0", "3.0/m", "3.6/h", "18.5", "100", "9,999", "12k"),
    ]
    assert [rate(each, "min") for each in (0.0, 2.0, 0.05)] == ["0.0", "2.0", "3.0/h"]
    lengths = (None, 0.0004, 0.765, 2.44, 59.6, 125, 16 * 60, 7201, 5 * 86400)
    assert [*map(span, lengths)] == ["", "0ms", "765ms", "2.4s", "60s", "2m", "16m", "2h", "5d"]


def test_bars_and_names_fit() -> None:
    assert bars([0, 1, 4, 8]) == " ▁▄█"
    assert bars([0, 0]) == "  "
    assert fitted("orders", 6) == "orders"
    assert (fitted("orders-of-today", 9), len(fitted("orders-of-today", 8))) == ("orde…oday", 8)


@pytest.mark.parametrize("width", [40, 78, 100, 140, 200])
def test_layout_fits_the_width(width: int) -> None:
    found = layout(width)
    used = found.name + 2 + sum(each.width + 2 for each in found.columns)
    assert used <= max(width, 71)
    assert ("p95" in [each.name for each in found.columns]) == (width >= 100)
    assert ("history" in [each.name for each in found.columns]) == (width >= 140)


def test_lines_without_a_value_come_last() -> None:
    lines = [Line(QueueInfo(name, Counts(), False, dead=dead)) for name, dead in DEAD.items()]
    assert order(lines, "dead") == ["c", "b", "a", "d"]
    assert order(lines, "queue") == ["a", "b", "c", "d"]


DEAD: Mapping[str, int | None] = {"d": None, "a": 0, "b": 2, "c": 9}


def test_every_order_is_a_column() -> None:
    from pyqueue.cli.columns import ORDERS

    assert {*ORDERS} <= {"queue", *(each.name for each in COLUMNS)}


def test_slow_reads_are_rare() -> None:
    assert pause_after(0.01, 2) == 2
    assert pause_after(1.0, 2) == pytest.approx(9)
    assert pause_after(0, 0) > 0


# ---- ls --watch


class Enough(KeyboardInterrupt):
    """Stands for Ctrl-C."""


def stop_after(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """End after some reads of the queues."""
    reads: list[int] = []
    queues = AsyncClient.queues

    async def counted(self: AsyncClient, **options: Any) -> list[QueueInfo]:
        reads.append(1)
        if len(reads) > number:
            raise Enough
        return await queues(self, **options)

    monkeypatch.setattr(AsyncClient, "queues", counted)
    monkeypatch.setattr("pyqueue.cli.queues.EVERY_S", 0.0)
    monkeypatch.setattr(watching, "LEAST_S", 0.0)


def test_ls_watch_lists_again_until_ctrl_c(
    shell: Shell, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.queue("orders").push(1)
    stop_after(monkeypatch, 2)
    status, out, errors = shell.run("ls", "--watch")
    assert (status, errors) == (130, "")
    tables = out.split("\n\n")
    assert [each.splitlines()[1].split("\t")[0] for each in tables[:2]] == ["orders", "orders"]
    assert "--watch" in shell.refused("ls", "--watch", "--json")


def test_ls_watch_at_a_terminal_draws_in_place(
    shell: Shell, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.queue("orders").push(1)
    stop_after(monkeypatch, 2)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    with terminal() as (ours, theirs), open(theirs, "w", closefd=False) as stdout:
        assert shell.stream("ls", "--watch", stdout=stdout) == 130
        text = screen_of(ours, theirs)
    assert text.count("orders") >= 2
    assert "\x1b[2K" in text, "the table before is erased"


# ---- the progress of a run


def sample(at: float, left: int, out: int = 0, dead: int = 0) -> Sample:
    infos = [QueueInfo("raw", Counts(ready=left), False), QueueInfo("parsed", Counts(), False)]
    return Sample(at, infos, {"raw": {"out": out, "dead": dead}, "parsed": {"out": 0}})


def progress_of(*samples: Sample) -> Progress:
    stages = dict.fromkeys(["raw", "parsed"])
    runner = SimpleNamespace(name="flights", graph=SimpleNamespace(stages=stages))
    found = Progress(cast(Any, runner), cast(Any, None))
    for each in samples:
        found.add(each)
    return found


@pytest.mark.parametrize(
    ("samples", "line"),
    [
        ([sample(0, 500)], "500 left, 0.0/s, 0 dead, ETA unknown"),
        (
            [sample(0, 12_000), sample(10, 11_000, 1000, 2)],
            "11,000 left, 100/s, 2 dead, ETA 110s",
        ),
        ([sample(0, 100), sample(10, 300, 50)], "300 left, 5.0/s, 0 dead, ETA unknown"),
        ([sample(0, 9), sample(10, 0, 9)], "0 left, 0.9/s, 0 dead, ETA 0s"),
        ([sample(0, 9), sample(30, 0, 2)], "0 left, 4.0/m, 0 dead, ETA 0s"),
        ([sample(0, CAP), sample(10, CAP, 50)], "100,000+ left, 5.0/s, 0 dead, ETA unknown"),
    ],
)
def test_line_tells_what_is_left_and_how_long(samples: list[Sample], line: str) -> None:
    assert progress_of(*samples).line() == f"flights: {line}"


def test_rates_are_of_the_last_minute() -> None:
    found = progress_of(*(sample(at, 10_000 - at, out=10 * at) for at in range(0, 300, 10)))
    found.add(sample(300, 1000, out=2900))
    assert found.line() == "flights: 1,000 left, 8.3/s, 0 dead, ETA 6.8s"


def test_pipe_gets_a_line_about_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.001)
    said: list[str] = []
    heard = asyncio.Event()

    def say(line: str) -> None:
        said.append(line)
        heard.set()

    async def main() -> None:
        client = AsyncClient("memory:")
        pipeline = client.pipeline("numbers")

        @pipeline.sink("in")
        async def keep(number: int) -> None:
            await heard.wait()

        await client.queue("in").push_many(range(3))
        async with client, progress.shown(pipeline, client, say):
            report = await pipeline.run(until_empty=True, handle_signals=False)
        assert report.stages["in"]["out"] == 3

    asyncio.run(main())
    assert said[0].startswith("numbers: 3 left, ")


def test_terminal_gets_a_table_about_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = asyncio.Event()

    async def main() -> None:
        client = AsyncClient("memory:")
        pipeline = client.pipeline("numbers")

        @pipeline.sink("in")
        async def keep(number: int) -> None:
            await drawn.wait()
            logging.getLogger("shop").warning("kept %d", number)

        await client.queue("in").push(7)
        lines = Progress.lines

        def noted(self: Progress) -> list[Line]:
            drawn.set()
            return lines(self)

        monkeypatch.setattr(Progress, "lines", noted)
        async with client, progress.shown(pipeline, client):
            await pipeline.run(until_empty=True, handle_signals=False)

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    with terminal() as (ours, theirs), open(theirs, "w", closefd=False) as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        asyncio.run(main())
        text = screen_of(ours, theirs)
    assert "DONE/S" in text
    assert "numbers: 1 left" in text


def test_pipeline_run_shows_its_progress(
    shell: Shell, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.001)
    Path("waiting.py").write_text(
        "import asyncio\nfrom pyqueue.cli import progress\nheard = asyncio.Event()\n"
        "async def keep(n): await heard.wait()\n"
    )
    Path("numbers.toml").write_text('[[stages]]\nqueue = "in"\nhandler = "waiting:keep"\n')
    monkeypatch.setenv("PYQUEUE_NAMESPACE", "pyqueue")  # `run` sets it, so take that back
    line = Progress.line

    def noted(self: Progress) -> str:
        sys.modules["waiting"].heard.set()
        return line(self)

    monkeypatch.setattr(Progress, "line", noted)
    client.queue("in").push_many(range(3))
    status, out, errors = shell.run("pipeline", "run", "numbers.toml", "--until-empty", "--json")
    assert status == 0
    assert '"out": 3' in out
    assert "pyqueue: numbers: 3 left, " in errors


def test_failure_of_the_progress_does_not_fail_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(self: Progress) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Progress, "sample", fail)

    async def main() -> None:
        client = AsyncClient("memory:")
        pipeline: Pipeline[Any] = client.pipeline("numbers")
        pipeline.sink("in", lambda number: None)
        async with client, progress.shown(pipeline, client):
            await pipeline.run(until_empty=True, handle_signals=False)

    asyncio.run(main())
