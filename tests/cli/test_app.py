"""The command line as a whole: help, versions, wrong arguments, errors, and the commands around."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pymongo
import pytest
from typer.testing import CliRunner

from pyqueue import Client, Unavailable, demo, embedded
from pyqueue.cli import app
from pyqueue.demo import report
from tests.cli.shell import Shell
from tests.support.eventually import LONG, eventually
from tests.support.processes import ROOT, gone
from tests.support.samples import sampled
from tests.support.servers import missing
from tests.support.shared import Mongod

# ---- help and arguments


def test_help_names_every_command(bare_shell: Shell) -> None:
    status, out, errors = bare_shell.run("--help")
    assert (status, errors) == (0, "")
    queues = ("ls", "push", "pop", "peek", "move", "redrive", "purge", "pause", "resume", "rm")
    programs = ("demo", "embedded", "doctor", "worker", "pipeline", "bench", "faults")
    for name in ("--version", "trace", *programs, *queues):
        assert name in out


def test_help_of_a_command_names_its_options(bare_shell: Shell) -> None:
    status, out, _ = bare_shell.run("demo", "--help")
    assert status == 0
    for name in ("--rows", "--url", "--json"):
        assert name in out


def test_version_is_one_line(bare_shell: Shell) -> None:
    status, out, _ = bare_shell.run("--version")
    assert status == 0
    assert out.startswith("pyqueue-mongo")
    assert out.count("\n") == 1


def test_version_of_an_uninstalled_checkout(
    bare_shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", unknown)
    expected = "pyqueue-mongo, run from a checkout that is not installed\n"
    assert bare_shell.run("--version") == (0, expected, "")


def test_wrong_arguments_are_named_and_exit_2(bare_shell: Shell) -> None:
    for arguments, complaint in (
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
    ):
        errors = bare_shell.refused(*arguments)
        assert complaint in errors
        assert "Traceback" not in errors


# ---- errors


def test_a_pyqueue_error_is_one_line_and_exits_2(
    bare_shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: str) -> None:
        raise Unavailable(f"path={path} broke:\nin two lines")

    monkeypatch.setattr(embedded, "run_foreground", fail)
    expected = "pyqueue: path=here broke: in two lines\n"
    assert bare_shell.run("embedded", "here") == (2, "", expected)


def test_any_other_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(embedded, "run_foreground", fail)
    result = CliRunner().invoke(app, ["embedded", "here"])
    assert isinstance(result.exception, RuntimeError)


# ---- visible only in a real process


def test_the_installed_script_prints_nothing_but_its_output(url: str, client: Client) -> None:
    client.queue("a").push({"n": 1})
    script = Path(sys.executable).with_name("pyqueue")
    if not script.exists():
        missing("the script pyqueue of the installed package")
    done = subprocess.run(
        [script, "pop", "a"],
        env=os.environ | {"PYQUEUE_URL": url, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LONG,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, '{"n": 1}\n', "")


def test_ctrl_c_exits_130(shell: Shell, client: Client) -> None:
    client.queue("a").resume()  # makes the record, and leaves its kind open
    with shell.program("pop", "a", "--timeout", "600") as process:
        collection = client.database[client.namespace]
        named = {"record": True, "open": {"$exists": False}}
        eventually(
            lambda: collection.count_documents(named) == 1,
            "a first scan of the queue",
            alive=lambda: process.poll() is None,
        )
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=LONG) == ("", "")
        assert process.returncode == 130


def test_ctrl_c_during_an_import_exits_130(bare_shell: Shell) -> None:
    """Python kills itself by SIGINT at its end if a KeyboardInterrupt left ``exec`` of a text.

    Dataclasses and named tuples use it, so most imports do.
    """
    code = (
        "from pyqueue import embedded\n"
        "from pyqueue.cli import app\n"
        "embedded.run_foreground = lambda path: exec('raise KeyboardInterrupt')\n"
        "app(['embedded', 'here'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=LONG
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_closed_pipe_exits_141_quietly(shell: Shell, client: Client) -> None:
    client.queue("a").push_many("x" * 2000 for _ in range(300))
    with shell.program("peek", "a", "--limit", "300", "--json") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("{")
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(LONG) == 141


def test_clients_do_not_import_what_programs_need() -> None:
    names = {"pyqueue.cli", "pyqueue.demo", "pyqueue.telemetry.prometheus"}
    names |= {"typer", "rich", "click", "textual"}
    code = f"import sys, pyqueue; pyqueue.Client; print({names} & sys.modules.keys())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=LONG
    )
    assert done.stdout == "set()\n", done.stderr


# ---- embedded


@pytest.mark.parametrize("number", sampled([signal.SIGTERM, signal.SIGINT], few=1))
def test_embedded_runs_a_server_until_a_signal(
    number: signal.Signals,
    bare_shell: Shell,
    mongod: Mongod,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = signal.getsignal(number)
    read, write = os.pipe()

    def use_and_stop() -> tuple[psutil.Process, str]:
        with open(read) as output:
            url = output.readline().strip()
            assert url.startswith("mongodb://")  # it runs, so it handles signals
            try:
                with pymongo.MongoClient[dict[str, Any]](url) as client:
                    client.test.things.insert_one({"_id": 1})
                    server = psutil.Process(client.admin.command("serverStatus")["pid"])
            finally:
                os.kill(os.getpid(), number)
            return server, output.read()

    with ThreadPoolExecutor(1) as pool:
        used = pool.submit(use_and_stop)
        with open(write, "w") as stdout:
            status = bare_shell.stream("embedded", str(tmp_path / "data"), stdout=stdout)
        server, rest = used.result()
    assert (status, rest) == (0, "")  # the URL is the only line on standard output
    assert "Ctrl-C" in capsys.readouterr().err
    assert server.pid != mongod.pid
    assert gone(server)
    assert signal.getsignal(number) is before
    with (
        embedded.EmbeddedServer(tmp_path / "data") as again,
        pymongo.MongoClient[dict[str, Any]](again.url) as client,
    ):
        assert client.test.things.count_documents({}) == 1


def test_embedded_names_a_directory_in_use(bare_shell: Shell, mongod: Mongod) -> None:
    errors = bare_shell.refused("embedded", str(mongod.path))
    assert errors.startswith("pyqueue: ")
    assert "in use" in errors
    assert errors.count("\n") == 1


# ---- demo


@pytest.mark.parametrize("equal", [True, False])
def test_demo_with_spark_exits_by_the_check(
    equal: bool, bare_shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark itself does not run here: the tests of the demo cover that."""
    calls: list[Any] = []
    found = {"check": {"equal": equal}, "claims": []}

    def run_spark(*arguments: Any) -> dict[str, Any]:
        calls.append(arguments)
        return found

    monkeypatch.setattr(demo, "run_spark", run_spark)
    monkeypatch.setattr(
        report, "print_spark_result", lambda result: print("shown", result == found)
    )
    status, out, _ = bare_shell.run("demo", "--spark", "--rows", "7")
    assert (status, out) == (0 if equal else 1, "shown True\n")
    assert calls == [(7, None)]


# ---- the commands of a checkout


class Replaced(Exception):
    """Stands for the end of this program: another one took its place."""


@pytest.mark.parametrize(("command", "package"), [("bench", "bench"), ("faults", "chaos")])
def test_checkout_commands_run_the_checkout(
    command: str, package: str, bare_shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def execve(*arguments: Any) -> None:
        calls.append(arguments)
        raise Replaced

    monkeypatch.setattr(os, "execve", execve)
    with pytest.raises(Replaced):
        bare_shell.run(command, "--seed", "1", "--help")
    [(path, arguments, environment)] = calls
    assert path == sys.executable
    assert arguments == [path, "-P", "-m", f"tests.{package}", "--seed", "1", "--help"]
    assert environment == os.environ | {"PYTHONPATH": str(ROOT)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "option", "printed"),
    [("bench", "--list", "wakeups"), ("faults", "--help", "--seed")],
)
def test_checkout_commands_print_as_programs(
    command: str, option: str, printed: str, bare_shell: Shell
) -> None:
    with bare_shell.program(command, option) as process:
        out, errors = process.communicate(timeout=LONG)
        assert process.returncode == 0, errors
    assert printed in out.split()


@pytest.mark.parametrize("command", ["bench", "faults"])
def test_checkout_commands_need_a_checkout(
    command: str, bare_shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyqueue.__file__", str(tmp_path / "pyqueue" / "__init__.py"))
    assert bare_shell.run(command) == (
        2,
        "",
        f"pyqueue: {command}: not part of the installed package; "
        f"clone the repository and run `make {command}` there\n",
    )
