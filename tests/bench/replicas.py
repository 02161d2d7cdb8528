"""Replicas of a pipeline with a Spark stage, compared with one process that runs it alone.

Each process is ``tests.spark.replica``. A stand-in for Spark takes 50 ms for a batch of 20
messages, so the figures show the cost of the runner's lease and not of a JVM. One long run of each
side replaces rounds, because the processes start slowly.
"""

from __future__ import annotations

import subprocess
import time
from contextlib import ExitStack
from typing import Any

import psutil

from pyqueue import Client
from tests.bench.figures import at_least
from tests.bench.harness import Bench, fill
from tests.support.processes import program

#: How long the processes may start before the measurement begins, in seconds.
WARM_UP_S = 5.0


def run(bench: Bench) -> None:
    seconds = bench.either(10, 60)
    dead: list[int] = []

    def side(replicas: int, members: int, kills: int = 0) -> float:
        """Return the seconds per message. One of ``kills + 1`` replicas survives its kill."""
        with (
            bench.database() as url,
            ExitStack() as stack,
            Client(url, signals="none:", telemetry=False) as client,
        ):
            fill(client.database[client.namespace], "b", 1000 * seconds)
            processes = [
                stack.enter_context(program("-m", "tests.spark.replica", url, str(members)))
                for _ in range(replicas)
            ]
            out = client.database[client.namespace]
            while not out.find_one({"q": "c"}):
                time.sleep(0.05)
            time.sleep(WARM_UP_S)
            before, began = out.count_documents({"q": "c"}), time.perf_counter()
            killed = 0
            for part in range(1, kills + 2):
                time.sleep(max(0.0, began + part * seconds / (kills + 1) - time.perf_counter()))
                if part <= kills:
                    killed += kill_runner(out, processes)
            took = time.perf_counter() - began
            moved: int = out.count_documents({"q": "c"}) - before
            dead.append(sum(each.poll() is not None for each in processes) - killed)
            return took / moved

    sides = ((1, 1, 0), (3, 1, 0), (3, 1, 2), (2, 2, 0))
    alone, several, killed, shared = ([side(*each)] for each in sides)
    bench.speed(
        "3 replicas of a Spark stage, against one process", alone, several, seconds, at_least(0.95)
    )
    bench.speed("the same, the runner killed twice", alone, killed, seconds)
    bench.speed(
        "2 replicas with members=2, against one process", alone, shared, seconds, at_least(1.6)
    )
    bench.zero("replicas that ended and were not killed", sum(dead), len(dead))


def kill_runner(states: Any, processes: list[subprocess.Popen[str]]) -> int:
    """Kill the process that runs the group. Return 1, or 0 if none runs it at the moment."""
    state = states.find_one({"_id": {"$regex": "^~claim:b~"}, "token": {"$exists": True}})
    pid = int(state["owner"].rpartition(":")[2]) if state else 0
    for each in processes:
        if each.pid == pid and each.poll() is None:
            psutil.Process(pid).kill()
            each.wait()
            return 1
    return 0
