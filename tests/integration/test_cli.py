"""The command line, as a process: what it prints, where, and with which exit status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pymongo
import pytest
from typer.testing import CliRunner

from pyqueue import Unavailable, demo, embedded
from pyqueue.cli import app
from pyqueue.embedded import EmbeddedServer

ROOT = Path(__file__).parents[2]
SECONDS = 30  # far more than anything here takes


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pyqueue.cli", *arguments]


def pyqueue(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), cwd=ROOT, capture_output=True, text=True, timeout=SECONDS
    )


def test_help_names_every_command() -> None:
    done = pyqueue("--help")
    assert done.returncode == 0
    assert done.stderr == ""
    queues = ("ls", "push", "pop", "peek", "move", "redrive", "purge", "pause", "resume", "trace")
    for name in ("demo", "embedded", "--version", "doctor", "worker", "pipeline", "bench", *queues):
        assert name in done.stdout


def test_help_of_a_command_names_its_options() -> None:
    done = pyqueue("demo", "--help")
    assert done.returncode == 0
    for name in ("--rows", "--url", "--json"):
        assert name in done.stdout


def test_version_is_one_line() -> None:
    done = pyqueue("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("pyqueue-mongo")
    assert done.stdout.count("\n") == 1


def test_version_of_a_checkout_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", unknown)
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (
        0,
        "pyqueue-mongo, run from a checkout that is not installed\n",
    )


@pytest.mark.parametrize("equal", [True, False])
def test_demo_with_spark_shows_what_spark_found_and_exits_by_the_check(
    equal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without Spark itself: that is the demo's own test."""
    asked: list[Any] = []
    found = {"check": {"equal": equal}}

    def run_spark(*given: Any) -> dict[str, Any]:
        asked.append(given)
        return found

    monkeypatch.setattr(demo, "run_spark", run_spark)
    monkeypatch.setattr(demo, "show_spark", lambda result: print("shown", result == found))
    result = CliRunner().invoke(app, ["demo", "--spark", "--rows", "7"])
    assert (result.exit_code, result.stdout) == (0 if equal else 1, "shown True\n")
    assert asked == [(7, None)]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nonsense"], "nonsense"),
        (["embedded"], "PATH"),
        (["demo", "--rows", "0"], "--rows"),
        (["demo", "--rows", "many"], "--rows"),
        (["demo", "--nonsense"], "--nonsense"),
        (["embedded", "a", "b"], "b"),
        (["demo", "--by", "magic"], "--by"),
        (["pop", "a", "--limit", "0"], "--limit"),
        (["push", "a", "1", "--on-duplicate", "maybe"], "--on-duplicate"),
        (["pipeline", "draw"], "draw"),
        (["worker", "a:b", "--processes", "0"], "--processes"),
    ],
)
def test_wrong_arguments_are_named_and_exit_2(arguments: list[str], complaint: str) -> None:
    done = pyqueue(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr


def test_an_error_of_pyqueue_is_one_line_on_stderr_and_exit_2(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(path: str) -> None:
        raise Unavailable(f"path={path} broke:\nin two lines")

    monkeypatch.setattr(embedded, "run_foreground", fail)
    result = CliRunner().invoke(app, ["embedded", "here"])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == "pyqueue: path=here broke: in two lines\n"


def test_any_other_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(embedded, "run_foreground", fail)
    result = CliRunner().invoke(app, ["embedded", "here"])
    assert isinstance(result.exception, RuntimeError)


def test_importing_pyqueue_imports_neither_the_command_line_nor_what_it_needs() -> None:
    code = "import sys, pyqueue; print({'pyqueue.cli', 'pyqueue.demo', 'typer', 'rich', 'click'} & sys.modules.keys())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.stdout == "set()\n", done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_embedded_runs_a_server_until_it_is_stopped(
    number: signal.Signals, mongod: EmbeddedServer, tmp_path: Path
) -> None:
    with subprocess.Popen(
        command("embedded", str(tmp_path / "data")),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            url = process.stdout.readline().strip()
            with pymongo.MongoClient[dict[str, Any]](url, serverSelectionTimeoutMS=5000) as client:
                client.test.things.insert_one({"_id": 1})
                server = psutil.Process(client.admin.command("serverStatus")["pid"])
            assert server.pid != mongod.pid
            os.killpg(process.pid, number)  # as the terminal does
            rest, errors = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
    assert process.returncode == 0
    assert rest == ""  # the URL is the only line on standard output
    assert "Ctrl-C" in errors
    assert "Traceback" not in errors
    assert not server.is_running()


def test_embedded_on_a_directory_in_use_says_so(mongod: EmbeddedServer) -> None:
    done = pyqueue("embedded", str(mongod.path))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("pyqueue: ")
    assert "in use" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "option", "printed"),
    [("bench", "--list", "wakeups"), ("faults", "--help", "--seed")],
)
def test_checkout_commands_run_the_checkout(command: str, option: str, printed: str) -> None:
    done = pyqueue(command, option)
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout.split()


@pytest.mark.parametrize("command", ["bench", "faults"])
def test_checkout_commands_need_a_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    monkeypatch.setattr("pyqueue.__file__", str(tmp_path / "pyqueue" / "__init__.py"))
    result = CliRunner().invoke(app, [command])
    assert result.exit_code == 2
    assert result.stderr == (
        f"pyqueue: {command}: not part of the installed package; "
        f"clone the repository and run `make {command}` there\n"
    )
