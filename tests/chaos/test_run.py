"""The fault suite as a whole: a run with faults, its end, its report and its command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import psutil
import pytest
from typer.testing import CliRunner

from tests.chaos import ledger, report, runner
from tests.chaos.__main__ import app
from tests.chaos.checker import ChangeLog, Ledgers, Times, check
from tests.chaos.pop_checker import Disturbances
from tests.chaos.scenario import Scenario, expect_only
from tests.chaos.workload import ROLES
from tests.support.eventually import eventually
from tests.support.processes import ROOT
from tests.support.servers import require_mongod

#: One fault of each sort: a fail-over with a rollback, of the network, of commands and of clients.
#: Shorter tests have the rest: ``test_server`` kills a server, and ``test_tools`` runs a storm.
FEW_FAULTS = (
    "claims undone by a fail-over",
    "clients cut off",
    "replies swallowed",
    "fail point: write concern time-out",
    "producer killed",
    "consumer killed",
    "consumer suspended",
)


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(FEW_FAULTS, id="few"),
        pytest.param(runner.ALL_FAULTS, id="all", marks=pytest.mark.slow),
    ],
)
def test_run_with_faults_loses_nothing(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    """Each kind of fault strikes at least once, and the checker finds nothing wrong."""
    require_mongod()
    plot, kept = tmp_path / "plot.svg", tmp_path / "kept"
    result = runner.run(
        0,
        seed=1,
        kinds=kinds,
        at_least=1,
        haste=0.25,
        pause=(0.1, 0.3),
        rate=50,
        plot=plot,
        keep=kept,
    )
    assert set(result["kinds"]) == set(kinds)
    expect_only(result)
    # Times depend on the machine: `make faults` judges them, and not this test.
    assert {*report.VERDICT, "longest_starvation", "excuses"} <= set(result)
    assert result["messages"] > 500
    # Each fault whose effects can be counted had an effect.
    counted = [
        int(times)
        for event in result["events"]
        for times in re.findall(r"(\d+) times", event["what"])
    ]
    assert len(counted) >= (9 if kinds is runner.ALL_FAULTS else 3)
    assert all(counted)
    if kinds is runner.ALL_FAULTS:  # in a short run, all holders may be in time
        assert result["refused"] > 0
    drawing = plot.read_text()
    ElementTree.fromstring(drawing)
    assert all(kind in drawing for kind in result["kinds"])
    # The records that it kept give the same figures again.
    ledgers = Ledgers({path.stem: ledger.read(path) for path in kept.glob("*.ledger")})
    known = Disturbances(**json.loads((kept / "known.json").read_text()))
    assert len(known.killed) >= (3 if kinds is runner.ALL_FAULTS else 2)
    again = check(ledgers, ChangeLog(ledger.read(kept / "change_log")), [], known)
    assert {name: again[name] for name in ("messages", "pushed", "settled")} == {
        name: result[name] for name in ("messages", "pushed", "settled")
    }


# ---- the end of a program that is killed

#: A server and a suspended process, and then the program does nothing.
SMALL_PROGRAM = """
import sys, time
from pathlib import Path
from pyqueue.embedded import find_mongod
from tests.chaos.members import Member
from tests.chaos.processes import Process
folder = Path(sys.argv[1])
member = Member(0, folder / "member", find_mongod())
member.start()
process = Process("proxies", folder, {"ports": []})
process.receive()
while not member.hello():
    time.sleep(0.01)
process.suspend()
print("started", flush=True)
time.sleep(600)
"""


@contextmanager
def killed_at_the_end(*arguments: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a program, and kill it without its children."""
    with (folder / "errors").open("w") as errors:
        program = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=os.environ | {"TMPDIR": str(folder), "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        yield program
    finally:
        program.kill()
        program.communicate()


def expect_all_to_end(children: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(children, timeout=60)
    for each in alive:
        each.kill()
    assert alive == []


def test_killed_program_leaves_no_process(tmp_path: Path) -> None:
    """Even a suspended process ends with the program, although it cannot react."""
    require_mongod()
    with killed_at_the_end("-c", SMALL_PROGRAM, str(tmp_path), folder=tmp_path) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "started\n", (tmp_path / "errors").read_text()
        children = psutil.Process(program.pid).children(recursive=True)
        assert "mongod" in [each.name() for each in children]
        eventually(
            lambda: psutil.STATUS_STOPPED in [each.status() for each in children],
            "one of them is suspended",
        )
    expect_all_to_end(children)


def is_workload(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.cmdline()[-1:] == ["workload"]
    return False


@pytest.mark.slow
def test_killed_suite_leaves_no_process(tmp_path: Path) -> None:
    """The long form: the whole suite is killed, with all processes of the workload suspended."""
    require_mongod()
    command = ("-m", "tests.chaos", "--minutes", "1", "--seed", "1")
    with killed_at_the_end(*command, folder=tmp_path) as program:
        eventually(
            lambda: (
                sum(bool(path.stat().st_size) for path in tmp_path.glob("*/*.ledger")) == len(ROLES)
            ),
            "a line in each ledger",
        )
        children = psutil.Process(program.pid).children(recursive=True)
        assert [each.name() for each in children].count("mongod") == 3
        workload = [each for each in children if is_workload(each)]
        assert len(workload) == len(ROLES)
        for each in workload:
            each.suspend()
    expect_all_to_end(children)


# ---- the report and the command


def result_with(**found: Any) -> dict[str, Any]:
    """Return the result of an invented run."""
    scenario = Scenario()
    scenario.stored("a")
    return {
        "seed": 7,
        "minutes": 0.5,
        "seconds": 30.0,
        "faults": 1,
        "kinds": {"primary killed": 1},
        **scenario.check("a"),
        **scenario.check_times(),
        "wrong": {},
        "unfinished": 0,
        "miscounted": 0,
        "longest_outage": {"producer": 1.0, "consumer": 2.0},
        "recovery": {"primary killed": {"push": {"median": 1.5, "longest": 1.5}}},
        "events": [],
        **found,
    }


@pytest.mark.parametrize("name", [None, *report.VERDICT])
def test_command_exit_status_is_1_after_a_loss(
    monkeypatch: pytest.MonkeyPatch, name: str | None
) -> None:
    given: list[Any] = []

    def run(minutes: float, seed: int, *, plot: Path | None, keep: Path | None) -> dict[str, Any]:
        given.extend([minutes, seed, plot, keep])
        return result_with(**({} if name is None else {name: 1, "wrong": {name: ["a: something"]}}))

    monkeypatch.setattr(runner, "run", run)
    options = ["--minutes", "0.5", "--seed", "7", "--plot", "a.svg", "--keep", "kept", "--json"]
    as_json = CliRunner().invoke(app, options)
    assert as_json.exit_code == (name is not None)
    line = json.loads(as_json.stdout.splitlines()[-1])
    figures = {"lost", "settled_twice", "fenced_effects", "faults", "messages", "kinds"}
    assert {*figures, "seed", "minutes"} <= set(line)
    assert given == [0.5, 7, Path("a.svg"), Path("kept")]
    shown = CliRunner().invoke(app, ["--seed", "7"])
    assert shown.exit_code == (name is not None)
    assert ("WRONG" in shown.stdout) == (name is not None)
    assert "primary killed" in shown.stdout


def test_report_fault_without_later_calls_has_no_recovery() -> None:
    events = [{"kind": "clients cut off", "at": 11.0, "seconds": 1.0, "what": ""}]
    found = report.timings(Times(pushes=[(1.0, 2.0, 1)]), events, 10.0)
    assert found["recovery"] == {"clients cut off": {}}
    assert found["events"][0]["recovered"] == {"push": None, "settle": None}
    assert found["events"][0]["at"] == 1.0


@pytest.mark.slow
def test_command_for_two_minutes() -> None:
    require_mongod()
    command = [sys.executable, "-m", "tests.chaos", "--minutes", "2", "--seed", "1", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.stderr == ""
    result = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == bool(report.failed_checks(result)), done.stdout
    expect_only(result)
    assert result["faults"] >= 15
    assert len(result["kinds"]) >= 8
