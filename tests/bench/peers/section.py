"""pyqueue beside queues of other projects, in the same rounds, all durable as far as they can be.

Each peer is a program that ``program`` describes, and runs for the whole section. Its server is
started here. If a peer cannot run, its row gives the reason. The raw side is pymongo's async
client: one command at a time, or 64 at a time. Its "wake-up" is an insert and a claim by one task.

BENCH_PEERS_PYTHON names the Python of the peers if they are not installed next to pyqueue, and
NODE_PATH the packages of node.
"""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pymongo

from tests.bench.figures import Cpu, Dots, quantile, ratios
from tests.bench.harness import RAW_INDEX, RAW_POP, WRITE, Bench, raw_claim, raw_document
from tests.bench.peers.servers import SERVERS, Missing, Started, cpu_seconds

ROOT = Path(__file__).parents[3]
ANSWER_S = 90
PAUSE_S = (0.02, 0.08)
#: No round begins after this time, in a quick or a full run.
LIMIT_S = (80, 330)
#: Until a consumer waits.
SETTLE_S = 0.25
#: A cell should take about this long in a quick or a full run.
CELL_S = (0.15, 0.25)
#: The most messages of a cell, and the least for each caller.
MOST, LEAST, LEAST_OF_ONE = 10_000, 4, 40
RAW = "raw pymongo"
MONGO = "on disk (majority, journal)"
#: The callers and the batch of each cell.
CELLS = {"1": (1, 1), "64": (64, 1), "batches of 100": (1, 100)}


@dataclass(frozen=True, slots=True)
class Peer:
    """A queue to compare with.

    Attributes:
        name: Its name in the report.
        program: The module of its program, or the file of node.
        server: The name of its server.
        more: A further argument of its program; "redis" is replaced by the address.
        note: A remark for the comparison.
        cells: The measured cells.
        wakes: How many messages wake a consumer in a round, if fewer than usual.
    """

    name: str
    program: str
    server: str = "mongo"
    more: str = ""
    note: str = ""
    cells: tuple[str, ...] = ("1", "64", "batches of 100", "waking")
    wakes: int = 100

    @property
    def own(self) -> bool:
        """Whether it is of this repository, so that it must run and lose nothing."""
        return self.program in ("ours", "raw_loop")


NO_BATCH = ("1", "64", "waking")
PEERS = (
    Peer(
        RAW,
        "raw_loop",
        note="find_one_and_update + delete_one",
        cells=("1", "64", "batches of 100"),
    ),
    Peer(
        "bound (sketch)", "raw_loop", more="sketch", cells=("64",), note="the same commands by hand"
    ),
    Peer("pyqueue", "ours", note="capped bus; a claim is acknowledged by the primary alone"),
    Peer(
        "pyqueue, bucket",
        "ours",
        more="bucket",
        cells=("1", "64", "batches of 100"),
        note="many messages in one document",
    ),
    Peer("pyqueue, Redis bus", "ours", more="redis", cells=("waking",)),
    Peer("Redis streams", "redis_streams", "redis", note="acknowledged entries stay until trimmed"),
    Peer("RabbitMQ quorum queue", "rabbitmq", "rabbitmq", note="acks are not confirmed"),
    Peer("NATS JetStream", "nats_jetstream", "nats", note="acks are not confirmed"),
    Peer("PgQueuer", "pgqueuer_pg", "postgres", note="its worker takes at least 10 at a time"),
    Peer("procrastinate", "procrastinate_pg", "postgres", cells=NO_BATCH),
    Peer("SAQ", "saq_redis", "redis", cells=NO_BATCH),
    Peer(
        "Keuss", "keuss.js", more="redis", cells=NO_BATCH, note="reserve and ok; signals by Redis"
    ),
    Peer(
        "kombu on MongoDB",
        "kombu_mongodb",
        cells=("1", "waking"),
        note="at most once: a get deletes",
        wakes=2,
    ),
)


class Failed(Exception):
    """The program of a peer cannot run; the message says why."""


class Program:
    """A running program of a peer."""

    def __init__(self, peer: Peer, address: str, more: str, log: Path) -> None:
        self._log = log
        self._process = subprocess.Popen(
            [*command_of(peer), address, *([more] if more else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("ab"),
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            start_new_session=True,  # Ctrl-C must reach only the benchmark
            bufsize=0,
        )
        self._rest = b""
        if "skipped" in (found := self.answer()):
            raise Failed(str(found["skipped"]))

    def ask(self, do: str, queue: str, **more: Any) -> None:
        assert self._process.stdin is not None
        line = json.dumps({"do": do, "queue": queue, **more})
        with suppress(BrokenPipeError):  # it ended; the answer says so
            self._process.stdin.write(line.encode() + b"\n")

    def answer(self) -> dict[str, Any]:
        """Return its next line; raise Failed if none comes."""
        assert self._process.stdout is not None
        output = self._process.stdout.fileno()
        while b"\n" not in self._rest:
            ready, _, _ = select.select([output], [], [], ANSWER_S)
            found = os.read(output, 65_536) if ready else b""
            if not found:
                last = self._log.read_text(errors="replace").strip()[-200:] or "no output"
                raise Failed(f"ended: {last}" if ready else f"no answer within {ANSWER_S} s")
            self._rest += found
        line, self._rest = self._rest.split(b"\n", 1)
        result: dict[str, Any] = json.loads(line)
        return result

    def call(self, do: str, queue: str, **more: Any) -> dict[str, Any]:
        self.ask(do, queue, **more)
        return self.answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def command_of(peer: Peer) -> list[str]:
    """Return the command of a peer's program; raise Failed if its interpreter is missing."""
    if peer.program.endswith(".js"):
        node = shutil.which("node")
        if node is None:
            raise Failed("node is not installed (Debian: nodejs)")
        return [node, str(Path(__file__).parent / peer.program)]
    python = sys.executable if peer.own else os.environ.get("BENCH_PEERS_PYTHON", sys.executable)
    return [python, "-m", f"tests.bench.peers.{peer.program}"]


@dataclass(slots=True)
class Cell:
    """The measurements of one cell: rounds of seconds for each message, and processor time."""

    seconds: list[float] = field(default_factory=list)
    cpu: list[Cpu] = field(default_factory=list)
    messages: int = 0


class Side:
    """One peer in a run: its programs and its measurements.

    Args:
        peer: The peer.
        server: Its server.
        programs: The program that pushes and drains, and for waking the one that listens.
        cell_s: How long a cell should take.
        wakes: How many messages wake a consumer in one round.
    """

    def __init__(
        self, peer: Peer, server: Started, programs: list[Program], cell_s: float, wakes: int
    ) -> None:
        self.peer = peer
        self.server = server
        self.cells: defaultdict[str, Cell] = defaultdict(Cell)
        self.times: dict[str, list[float]] = {"spaced": [], "back to back": []}
        self.faults = {"lost": 0, "twice": 0}
        self.messages = 0
        self._programs = programs
        self._cell_s = cell_s
        self._wakes = min(wakes, peer.wakes)
        self._rates: dict[str, float] = {}

    def round(self, number: int) -> None:
        """Measure every cell once. Round 0 finds how many messages a cell should have."""
        for name in (name for name in CELLS if name in self.peer.cells):
            self._throughput(number, name)
        if "waking" in self.peer.cells:
            self._waking(number)

    def _throughput(self, number: int, cell: str) -> None:
        callers, batch = CELLS[cell]
        least = max(LEAST * callers * batch, LEAST_OF_ONE)
        receives = self._count(f"receive {cell}", least)
        pushes = min(self._count(f"push {cell}", least), 2 * receives)
        queue = f"bench-{cell.split()[0]}-{number}"
        how = {"callers": callers, "batch": batch}
        self._timed(number, f"push {cell}", "fill", queue, pushes, **how)
        total = max(pushes, receives)
        if total > pushes:  # the pushes are slower, so more messages are stored first
            size = 100 if "batches of 100" in self.peer.cells else 1
            extra = {"count": total, "first": pushes, "callers": 64, "batch": size}
            self._programs[0].call("fill", queue, **extra)
        result = self._timed(number, f"receive {cell}", "drain", queue, total, **how)
        self._count_faults(result, total)

    def _count(self, cell: str, least: int) -> int:
        wanted = int(self._rates.get(cell, 0) * self._cell_s)
        batch = 100 if "batches" in cell else 1
        return max(least, min(wanted, MOST)) // batch * batch

    def _timed(
        self, number: int, cell: str, do: str, queue: str, count: int, **more: Any
    ) -> dict[str, Any]:
        before = cpu_seconds(self.server.pid)
        result = self._programs[0].call(do, queue, count=count, **more)
        spent = Cpu(result["cpu"], cpu_seconds(self.server.pid) - before)
        self._rates[cell] = count / max(result["seconds"], 1e-6)
        if number:
            kept = self.cells[cell]
            kept.seconds.append(result["seconds"] / count)
            kept.cpu.append(spent)
            kept.messages += count
        return result

    def _waking(self, number: int) -> None:
        here, there = self._programs
        queue, count = f"wake-{number}", self._wakes
        there.ask("listen", queue, count=count)
        there.answer()
        time.sleep(SETTLE_S)  # the first wait of a consumer is not measured
        here.call("send", queue, count=count)
        spaced = there.answer()
        ping, pong = f"ping-{number}", f"pong-{number}"
        there.ask("echo", ping, reply=pong, count=count)
        there.answer()
        close = here.call("exchange", ping, reply=pong, count=count, settle=SETTLE_S)
        for result in (spaced, close, there.answer()):
            self._count_faults(result, count)
        if number:
            self.times["spaced"] += spaced["times"]
            self.times["back to back"] += close["times"]

    def _count_faults(self, result: dict[str, Any], count: int) -> None:
        self.messages += count
        for fault in self.faults:
            self.faults[fault] += result[fault]


class Servers:
    """The servers of a run: each is started when the first peer needs it."""

    def __init__(self, mongo: Started) -> None:
        self._started: dict[str, Started | Missing] = {"mongo": mongo}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def get(self, name: str) -> Started:
        """Return a running server, or raise Missing."""
        if name not in self._started:
            try:
                self._started[name] = self._stack.enter_context(SERVERS[name]())
            except Missing as missing:
                self._started[name] = missing
        found = self._started[name]
        if isinstance(found, Missing):
            raise found
        return found


@contextmanager
def started(peer: Peer, servers: Servers, folder: Path) -> Iterator[tuple[Started, list[Program]]]:
    """Start a server and the programs of a peer one after the other."""
    server = servers.get(peer.server)
    more = servers.get("redis").address if peer.more == "redis" else peer.more
    with ExitStack() as stack:
        programs = []
        for _ in range(2 if "waking" in peer.cells else 1):
            program = Program(peer, server.address, more, folder / f"{peer.program}.log")
            stack.callback(program.close)
            programs.append(program)
        yield server, programs


def run(bench: Bench) -> None:
    rounds, wakes = bench.either(2, 7), bench.either(8, 12)
    skipped: dict[str, str] = {}
    sides: list[Side] = []
    baseline: list[float] = []
    with bench.database() as url, ExitStack() as stack:
        mongo = Started(url, bench.server.pid, MONGO)
        servers = stack.enter_context(Servers(mongo))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pyqueue-peers-")))
        for peer in PEERS:
            try:
                server, programs = stack.enter_context(started(peer, servers, folder))
            except (Missing, Failed) as reason:
                skipped[peer.name] = str(reason)
            else:
                sides.append(Side(peer, server, programs, CELL_S[not bench.quick], wakes))
        end = time.monotonic() + bench.either(*LIMIT_S)
        for number in range(rounds + 1):
            if number > 1 and time.monotonic() > end:
                break  # a busy machine gets fewer rounds
            for side in sides if number % 2 else reversed(sides):
                if side.peer.name not in skipped:
                    try:
                        side.round(number)
                    except Failed as reason:
                        skipped[side.peer.name] = str(reason)
            baseline += direct(url, wakes) if number else []
    done = {side.peer.name: side for side in sides if side.peer.name not in skipped}
    report(bench, done, skipped, baseline)


def direct(url: str, count: int) -> list[float]:
    """Return the seconds of an insert and a claim by raw pymongo, with pauses between them."""
    times = []
    with pymongo.MongoClient[dict[str, Any]](url) as mongo:
        raw = mongo.get_default_database().get_collection("direct", write_concern=WRITE["majority"])
        raw.create_index(RAW_INDEX)
        for _ in range(count):
            time.sleep(random.uniform(*PAUSE_S))
            start = time.perf_counter()
            raw.insert_one(raw_document("wake"))
            raw.find_one_and_delete(raw_claim("wake"), **RAW_POP)
            times.append(time.perf_counter() - start)
    return times


# ---- the report


def report(
    bench: Bench, done: dict[str, Side], skipped: dict[str, str], baseline: list[float]
) -> None:
    speed = Dots(
        "peers", "Speed, on disk before the acknowledgement", "times raw pymongo (right is better)"
    )
    waking = Dots(
        "peers-waking",
        "From a push to its receipt by an idle consumer",
        "ms, median (left is better)",
    )
    bench.dots += [speed, waking]
    for peer in PEERS:
        if peer.name in skipped:
            bench.row(peer.name, "not run", [0], 0, None, f"skipped: {skipped[peer.name]}")
            if peer.own:
                bench.zero(f"{peer.name}: failed", 1, 1)
            continue
        side = done[peer.name]
        speeds(bench, side, done.get(RAW), speed)
        wakes(bench, side, baseline, waking)
        if peer.own:
            for fault, count in side.faults.items():
                bench.zero(f"{peer.name}: {fault}", count, side.messages)
        else:
            note = ", ".join(f"{count} {fault}" for fault, count in side.faults.items() if count)
            bench.row(
                f"{peer.name}: strays",
                "messages",
                [sum(side.faults.values())],
                side.messages,
                None,
                note,
            )
    waking.add("20 to 80 ms apart", "raw insert + claim", 1000 * quantile(baseline, 0.5))


def speeds(bench: Bench, side: Side, raw: Side | None, dots: Dots) -> None:
    """Add a row for each cell of throughput: its ratio to the same cell of the raw side."""
    for name, cell in side.cells.items():
        if raw is None:
            continue
        ratio = ratios(raw.cells[name].seconds, cell.seconds)
        rate = 1 / quantile(cell.seconds, 0.5)
        each = sum(cell.cpu, Cpu()).each(cell.messages)
        note = "; ".join(
            part for part in (f"{rate:.0f}/s", side.server.durability, side.peer.note) if part
        )
        row = bench.row(
            f"{side.peer.name}: {name}", f"x {RAW}", ratio, cell.messages, None, note, cpu=each
        )
        if "batch" not in name and side.peer.name != RAW:
            action, callers = name.split()
            dots.add(
                f"{action}, {callers} task{'s' * (callers != '1')}", side.peer.name, row.median
            )


def wakes(bench: Bench, side: Side, baseline: list[float], dots: Dots) -> None:
    """Add rows for the time from a push to its receipt."""
    for name, times in side.times.items():
        if not times:
            continue
        for title, share in (("p50", 0.5), ("p99", 0.99)):
            value, raw = quantile(times, share), quantile(baseline, share)
            note = f"{1000 * value:.2f} ms; {1000 * raw:.2f} ms raw insert + claim, with pauses"
            # Every fifth sample makes a part, and the medians of the parts give a spread.
            parts = [
                times[place::5] for place in range(5 if share == 0.5 and len(times) >= 5 else 1)
            ]
            bench.row(
                f"{side.peer.name}: waking {title}, {name}",
                f"x raw {title}",
                [quantile(part, share) / raw for part in parts],
                len(times),
                None,
                note,
            )
        label = {"spaced": "20 to 80 ms apart"}.get(name, name)
        dots.add(label, side.peer.name, 1000 * quantile(times, 0.5))
