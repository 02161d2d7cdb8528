"""A line of Python and Spark programs on a replica set, with all of them killed again and again.

No flight may be lost, and none may arrive twice.
"""

from __future__ import annotations

import random
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pymongo
import pytest

from pyqueue import Client
from pyqueue.demo.rows import find_lines
from tests.chaos.members import ReplicaSet
from tests.spark.line import PROGRAMS, QUEUES, RESULTS
from tests.spark.processes import spark_eventually
from tests.support.processes import kill_tree, program

KILLS = 12
#: A part of a Spark program: the daemon that forks Python workers.
DAEMON = "pyspark.daemon"


class Line:
    """The programs, which are started again when they end."""

    def __init__(self, url: str, folder: Path) -> None:
        self._arguments = (url, str(folder))
        self._stack = ExitStack()
        self.running: dict[str, subprocess.Popen[str]] = {}
        #: How often each was started.
        self.started: Counter[str] = Counter()

    def __enter__(self) -> Line:
        self.keep_up()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def keep_up(self) -> None:
        """Start every program that does not run."""
        for name in PROGRAMS:
            if name not in self.running or self.running[name].poll() is not None:
                self.started[name] += 1
                self.running[name] = self._stack.enter_context(
                    program(
                        "-m",
                        "tests.spark.line",
                        name,
                        *self._arguments,
                        stderr=subprocess.DEVNULL,
                    )
                )

    def kill(self, name: str) -> None:
        """Kill a program with everything that it started."""
        kill_tree(self.running[name])

    def kill_workers(self, name: str) -> None:
        """Kill the Python workers of a Spark program."""
        driver = psutil.Process(self.running[name].pid)
        for each in driver.children(recursive=True):
            try:
                if DAEMON in " ".join(each.cmdline()):
                    each.kill()
            except psutil.NoSuchProcess:
                continue


@pytest.fixture
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplicaSet]:
    with ReplicaSet(tmp_path_factory.mktemp("members")) as servers:
        yield servers


@pytest.mark.slow
@pytest.mark.xdist_group("spark")  # not beside the session of other tests
def test_line_of_killed_programs_loses_and_doubles_nothing(
    servers: ReplicaSet, tmp_path: Path
) -> None:
    dice = random.Random(11)
    url = servers.url.replace("/?", "/line?") + "&heartbeatFrequencyMS=1000"
    _, count, lines = find_lines(None)
    rows = list(lines())
    with Client(url, signals="none:") as client, pymongo.MongoClient[dict[str, Any]](url) as mongo:
        raw = client.queue("raw")
        for start in range(0, count, 1000):
            some = rows[start : start + 1000]
            raw.push_many(some, ids=[f"f{each['id']}" for each in some])
        seen = mongo["line"][RESULTS]

        def arrived() -> int:
            try:
                return seen.estimated_document_count()
            except pymongo.errors.PyMongoError:
                return 0

        with Line(url, tmp_path) as line:

            def wait_for(target: int) -> None:
                def reached() -> bool:
                    line.keep_up()
                    return arrived() >= target

                spark_eventually(reached, f"{target} flights at the end of the line")

            for number in range(KILLS):
                wait_for((number + 1) * count // (KILLS + 2) - dice.randrange(200))
                victim = ["stream", "stage", "primary", "workers", "link", "sink"][number % 6]
                if victim == "primary":
                    primary = servers.primary()
                    assert primary is not None
                    primary.kill()
                    primary.start()
                    spark_eventually(servers.healthy, "a healthy replica set")
                elif victim == "workers":
                    line.kill_workers(dice.choice(["stream", "stage"]))
                else:
                    line.kill(victim)
            wait_for(count)

            def left() -> int:
                line.keep_up()
                return sum(client.queue(name).counts().total for name in QUEUES)

            spark_eventually(lambda: left() == 0, "empty queues")
        flights = Counter(each["flight"] for each in seen.find())
        assert flights == Counter(int(each["id"]) for each in rows)
