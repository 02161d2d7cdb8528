"""The comparison with other queues, as far as it can be tested without their servers."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.bench.figures import Row
from tests.bench.harness import Bench
from tests.bench.peers import ours, program, section, servers
from tests.bench.peers.program import Inbox, fill, looping
from tests.bench.peers.section import PEERS, RAW, Failed, Peer, Side, command_of


class Memory:
    """A queue in memory, which may lose or repeat messages."""

    def __init__(self, faults: dict[int, int] | None = None) -> None:
        self.waiting: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.sizes: list[int] = []
        self._faults = faults or {}

    async def push(self, body: dict[str, Any]) -> None:
        for _ in range(self._faults.get(body["n"], 1)):
            self.waiting.put_nowait(body)

    async def push_many(self, bodies: Any) -> None:
        self.sizes.append(len(bodies))
        for body in bodies:
            await self.push(body)

    @asynccontextmanager
    async def consume(self, callers: int, batch: int, handle: Any) -> AsyncIterator[None]:
        async with looping(callers, self.waiting.get, handle):
            yield

    async def delete(self) -> None:
        assert self.waiting.empty()


def test_program_fills_in_batches_from_a_number_on() -> None:
    async def run() -> Memory:
        queue = Memory()
        await fill(queue, {"count": 250, "first": 20, "callers": 1, "batch": 100})
        return queue

    queue = asyncio.run(run())
    assert queue.sizes == [100, 100, 30]


@pytest.mark.parametrize(
    ("faults", "expected"),
    [({}, (0, 0)), ({3: 2}, (0, 1)), ({5: 0}, (1, 0)), ({1: 0, 2: 3}, (1, 2))],
)
def test_program_counts_losses_and_duplicates(
    monkeypatch: pytest.MonkeyPatch, faults: dict[int, int], expected: tuple[int, int]
) -> None:
    monkeypatch.setattr(program, "LOST_AFTER_S", 0.05)

    async def run() -> dict[str, Any]:
        queue, given = Memory(faults), {"count": 8, "callers": 3, "batch": 1}
        await fill(queue, given)
        return await program.drain(queue, given)

    result = asyncio.run(run())
    assert (result["lost"], result["twice"]) == expected


@pytest.mark.parametrize("more", ["", "bucket"])
def test_ours_drains_the_messages_it_filled(more: str) -> None:
    async def run() -> dict[str, Any]:
        async with ours.peer("memory:", more) as opened:
            queue, given = await opened("q"), {"count": 8, "callers": 4, "batch": 1}
            await fill(queue, given)
            return await program.drain(queue, given)

    result = asyncio.run(run())
    assert (result["lost"], result["twice"]) == (0, 0)


def test_program_exchanges_messages_with_an_echo() -> None:
    async def run() -> tuple[dict[str, Any], dict[str, Any]]:
        ping, pong, given = Memory(), Memory(), {"count": 4, "settle": 0}
        both = await asyncio.gather(
            program.echo(ping, pong, given), program.exchange(ping, pong, given)
        )
        return both[0], both[1]

    for result in asyncio.run(run()):
        assert (len(result["times"]), result["lost"], result["twice"]) == (4, 0, 0)


def test_consumers_finish_what_they_work_on() -> None:
    done = []

    async def run() -> None:
        given = iter([1])
        started = asyncio.Event()

        async def receive() -> Any:
            return next(given, None) or await asyncio.Event().wait()

        async def work(number: int) -> None:
            started.set()
            await asyncio.sleep(0)
            done.append(number)

        async with looping(3, receive, work):
            await started.wait()

    asyncio.run(run())
    assert done == [1]


def test_inbox_measures_the_pace_after_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 11.0, 12.0, 12.5, 13.0, 13.5])

    async def run() -> Inbox:
        inbox = Inbox(6)
        for number in range(6):
            await inbox.handle({"n": number, "pushed": 0.0})
        return inbox

    with monkeypatch.context() as patched:
        patched.setattr(time, "perf_counter", lambda: next(clock))
        inbox = asyncio.run(run())
    assert inbox.seconds(1) == pytest.approx(3.5 * 6 / 5)
    assert inbox.seconds(3) == pytest.approx(1.5 * 6 / 3)
    assert inbox.seconds(100) == pytest.approx(0.5 * 6)


def test_missing_server_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    for name in ("postgres", "rabbitmq", "nats"):
        with (
            pytest.raises(servers.Missing, match=r"is not installed \(Debian: "),
            servers.SERVERS[name](),
        ):
            raise AssertionError("unreachable")
    with pytest.raises(Failed, match="node is not installed"):
        command_of(Peer("a", "a.js"))


def test_every_peer_has_a_program_and_a_server() -> None:
    assert PEERS[0].name == RAW
    for peer in PEERS:
        path = Path(section.__file__).with_name(peer.program)
        assert (path if path.suffix else path.with_suffix(".py")).exists()
        assert peer.server in {"mongo", *servers.SERVERS}


class FakeProgram:
    """A program that needs the same time for each message."""

    def __init__(self, lost: int = 0) -> None:
        self.asked: list[tuple[str, int]] = []
        self._lost = lost

    def call(self, do: str, queue: str, *, count: int, **_: Any) -> dict[str, Any]:
        self.asked.append((do, count))
        each = {"fill": 0.002, "drain": 0.001}[do]
        return {"seconds": each * count, "cpu": 0.0, "lost": self._lost, "twice": 0}


def side_of(name: str, kind: str, lost: int = 0) -> tuple[Side, FakeProgram]:
    fake = FakeProgram(lost)
    peer = Peer(name, kind, cells=("1", "64"))
    started = servers.Started("", 2**22 + 1, "on disk")
    return Side(peer, started, [fake], 0.25, 1), fake  # type: ignore[list-item]


def test_side_learns_how_many_messages_a_cell_needs() -> None:
    side, fake = side_of("a", "a")
    side.round(0)
    assert not side.cells
    fake.asked.clear()
    side.round(1)
    # 500 pushes and 1 000 receives a second: 125 pushes are measured and 125 more are stored.
    assert fake.asked[:3] == [("fill", 125), ("fill", 250), ("drain", 250)]
    assert side.cells["push 1"].seconds == [pytest.approx(0.002)]
    assert side.cells["receive 1"].messages == 250


def rows_of(sides: dict[str, Side], skipped: dict[str, str]) -> list[Row]:
    bench: Any = object.__new__(Bench)
    bench.rows, bench.dots = [], []
    section.report(bench, sides, skipped, [0.001, 0.002])
    rows: list[Row] = bench.rows
    return rows


def test_report_is_wrong_for_losses_of_ours_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for lost in (0, 1):
        raw, ours, peer = (
            side_of(name, kind, lost if name != RAW else 0)[0]
            for name, kind in ((RAW, "raw_loop"), ("pyqueue", "ours"), ("other", "other"))
        )
        sides = {each.peer.name: each for each in (raw, ours, peer)}
        monkeypatch.setattr(section, "PEERS", tuple(each.peer for each in sides.values()))
        for each in sides.values():
            each.round(0)
            each.round(1)
        rows = {row.name: row for row in rows_of(sides, {})}
        assert rows["pyqueue: push 64"].median == pytest.approx(1)
        assert rows["pyqueue: lost"].wrong is bool(lost)
        assert not rows["other: strays"].wrong
        assert rows["other: strays"].median == 4 * lost


def test_report_names_what_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(section, "PEERS", (Peer("other", "other"), Peer("pyqueue", "ours")))
    rows = rows_of({}, {"other": "b is not installed", "pyqueue": "ended: no output"})
    assert [row.note for row in rows if row.unit == "not run"] == [
        "skipped: b is not installed",
        "skipped: ended: no output",
    ]
    assert [row.name for row in rows if row.wrong] == ["pyqueue: failed"]
