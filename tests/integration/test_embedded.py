"""The embedded server, with a real mongod: it starts, keeps its data, and never outlives its owner.

Each test uses its own directory and ports, so several runs can share a machine.
"""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from pymongo import MongoClient
from pymongo.database import Database
from pymongo.errors import OperationFailure

from pyqueue import _watchdog, embedded
from pyqueue.embedded import EmbeddedServer, find_mongod, run_foreground
from pyqueue.errors import ConfigurationError, Unavailable
from tests.support.eventually import LONG, eventually
from tests.support.processes import ROOT, gone
from tests.support.servers import MEMORY, require_mongod

pytestmark = pytest.mark.xdist_group("embedded")  # tests share a server


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A directory in memory if there is room: servers start faster there."""
    with TemporaryDirectory(dir=MEMORY) as path:
        yield Path(path)


@pytest.fixture(scope="module")
def mongod() -> str:
    return require_mongod()


@pytest.fixture(scope="module")
def server(mongod: str) -> Iterator[EmbeddedServer]:
    """One server for the tests that leave it running."""
    with (
        TemporaryDirectory(dir=MEMORY) as path,
        EmbeddedServer(path, parameters={"ttlMonitorSleepSecs": 7}) as server,
    ):
        yield server


def client(url: str, *, selection_ms: int = 20_000) -> MongoClient[dict[str, Any]]:
    return MongoClient(url, serverSelectionTimeoutMS=selection_ms)


def write(url: str) -> None:
    with client(url) as mongo:
        mongo.test.things.insert_one({})


def count(url: str) -> int:
    with client(url) as mongo:
        return mongo.test.things.count_documents({})


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def no_child_since(before: set[int]) -> bool:
    """Return whether there is no new child. Children of earlier tests may end at any time."""
    return children() <= before


START = """
import json, os, signal, sys, time
from pathlib import Path
from pyqueue.embedded import EmbeddedServer
from pymongo import MongoClient
path = Path(sys.argv[1])
def report(server, child=0):
    part = path.parent / "report.part"
    pids = {"pid": server.pid, "watchdog": server._watchdog.pid, "child": child}
    part.write_text(json.dumps(pids))
    part.rename(path.parent / "report")
"""


def owner(path: Path, code: str, *, wrapper: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """Run ``code`` in another process and session; there, ``report(server)`` names processes."""
    return subprocess.Popen(
        [*wrapper, sys.executable, "-c", START + code, str(path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def reported(path: Path, process: subprocess.Popen[str]) -> dict[str, Any]:
    report = path.parent / "report"
    eventually(report.exists, "the report of the owner", alive=lambda: process.poll() is None)
    found: dict[str, Any] = json.loads(report.read_text())
    return found


# ---- a running server


def test_server_takes_writes_and_transactions(server: EmbeddedServer) -> None:
    with client(server.url) as mongo:
        things = mongo.test.transactions
        things.insert_one({"_id": 1})
        with mongo.start_session() as session, session.start_transaction():
            things.insert_one({"_id": 2}, session=session)
            things.delete_one({"_id": 1}, session=session)
        assert [thing["_id"] for thing in things.find()] == [2]
        assert mongo.admin.command("hello")["setName"] == "pyqueue"
        assert (
            mongo.admin.command("getParameter", ttlMonitorSleepSecs=1)["ttlMonitorSleepSecs"] == 7
        )
        assert not mongo.admin.command("getParameter", enableTestCommands=1)["enableTestCommands"]


def test_server_listens_on_loopback_in_its_own_session(
    server: EmbeddedServer,
) -> None:
    process = psutil.Process(server.pid)
    listening = [c.laddr for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert [(address.ip, address.port) for address in listening] == [("127.0.0.1", server.port)]
    assert not process.net_connections("unix")
    assert os.getsid(server.pid) != os.getsid(0)


def test_directory_stays_small(server: EmbeddedServer) -> None:
    used = sum(file.stat().st_blocks * 512 for file in server.path.rglob("*"))
    assert used < 40 * 2**20


def test_server_of_a_thread_in_any_path_leaves_no_process(
    mongod: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path is relative, deep, and has spaces. The thread that started the server is gone."""
    name = "with a space/" + "x/" * 40 + "deep"
    monkeypatch.chdir(tmp_path)
    before = children()
    servers: list[EmbeddedServer] = []

    def start() -> None:
        # The watchdog inherits the mask, and still stops on SIGTERM.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        servers.append(EmbeddedServer(name))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    (server,) = servers
    with server:
        monkeypatch.chdir("/")
        assert server.path == tmp_path / name
        watchdog, server_process = psutil.Process(server._watchdog.pid), psutil.Process(server.pid)
        ended, _ = psutil.wait_procs([watchdog, server_process], timeout=0.3)
        assert not ended
        write(server.url)
    server.close()
    assert server._watchdog.returncode == 0
    assert no_child_since(before)
    assert gone(server_process)


def test_restart_keeps_data_and_free_port(
    mongod: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a clean end, and after the watchdog was killed: it takes the server with it."""
    with EmbeddedServer(tmp_path) as first, client(first.url, selection_ms=500) as mongo:
        mongo.test.things.insert_one({})  # and stays connected: the server closes first
        first.close()
    with EmbeddedServer(tmp_path) as second:
        assert second.url == first.url
        assert count(second.url) == 1
        write(second.url)
        another = embedded._free_port(second.port)
        assert another != second.port
        # As if another program took the port before the next start.
        monkeypatch.setattr(embedded, "_free_port", lambda wanted: another)
        left = psutil.Process(second.pid)
        os.kill(second._watchdog.pid, signal.SIGKILL)
        with EmbeddedServer(tmp_path) as third:  # at once: it waits until the old one is gone
            assert gone(left)
            assert (third.port, count(third.url)) == (another, 2)
            with (
                client(third.url) as mongo,
                mongo.start_session() as session,
                session.start_transaction(),
            ):
                mongo.test.things.insert_one({}, session=session)
            assert count(third.url) == 3


def test_start_survives_a_taken_port_and_a_refusal(
    mongod: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The port is taken at the last moment. Then the server refuses a command at first."""
    whole, refusals = Database.command, [OperationFailure("not yet", 11600)]

    def command(self: Database[Any], name: Any, *arguments: Any, **options: Any) -> Any:
        if name == "replSetGetConfig" and refusals:
            raise refusals.pop()
        return whole(self, name, *arguments, **options)

    monkeypatch.setattr(Database, "command", command)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ports = [silent.getsockname()[1]]
        free_port = embedded._free_port  # another process may take the next one, too
        monkeypatch.setattr(
            embedded, "_free_port", lambda wanted: ports.pop() if ports else free_port(wanted)
        )
        with EmbeddedServer(tmp_path) as server:
            assert not ports
            assert not refusals
            write(server.url)


def test_foreign_server_on_the_port_is_refused(
    server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "_free_port", lambda _: server.port)
    before = children()
    with pytest.raises(ConfigurationError, match="in use"):
        EmbeddedServer(tmp_path)
    assert no_child_since(before)


# ---- its owner


def test_killed_owner_with_a_forked_child_stops_the_server(mongod: str, tmp_path: Path) -> None:
    """Another child has ended before, and its end stopped nothing."""
    path = tmp_path / "data"
    code = """
with EmbeddedServer(path) as server:
    child = os.fork()
    if child == 0:
        server.close()
        sys.exit(0)  # through __exit__ and the interpreter's own end
    assert os.waitpid(child, 0)[1] == 0
    with MongoClient(server.url) as mongo:
        mongo.test.get_collection("things").insert_one({})
    assert server._watchdog.poll() is None
    child = os.fork()
    if child == 0:
        signal.pause()
    report(server, child)
    signal.pause()
"""
    with owner(path, code) as process:
        started = reported(path, process)
        child = psutil.Process(started["child"])
        left = [psutil.Process(started[name]) for name in ("pid", "watchdog")]
        try:
            process.kill()
            with EmbeddedServer(path) as again:  # at once: it waits until the old one is gone
                assert all(map(gone, left))
                assert not gone(child)
                assert count(again.url) == 1
                write(again.url)
        finally:
            child.kill()


def test_owner_without_standard_streams_stops_the_server(mongod: str, tmp_path: Path) -> None:
    path = tmp_path / "data"
    closed = ("/bin/sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh")
    code = """
server = EmbeddedServer(path)
report(server)
while not (path.parent / "seen").exists():
    time.sleep(0.01)
os._exit(3 if sys.stdin is None else 4)
"""
    with owner(path, code, wrapper=closed) as process:
        started = reported(path, process)
        left = [psutil.Process(started[name]) for name in ("pid", "watchdog")]
        (tmp_path / "seen").touch()
        assert process.wait(LONG) == 3
    eventually(lambda: all(map(gone, left)), "the end of the server")


def test_second_server_on_a_directory_is_refused(server: EmbeddedServer) -> None:
    before = children()
    with pytest.raises(ConfigurationError) as refusal:
        EmbeddedServer(server.path)
    for word in (str(server.path), str(os.getpid()), str(server.port)):
        assert word in str(refusal.value)
    assert no_child_since(before)
    write(server.url)


# ---- failures


def test_path_that_cannot_hold_data_is_refused(mongod: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for path in (file, file / "below", Path("/proc/nothing/here")):
        with pytest.raises(ConfigurationError, match=f"path: {path} cannot hold"):
            EmbeddedServer(path)


def test_failed_start_shows_the_end_of_the_log(mongod: str, tmp_path: Path) -> None:
    before = children()
    with pytest.raises(ConfigurationError, match="noSuchThing"):
        EmbeddedServer(tmp_path, parameters={"noSuchThing": True})
    for name in ("WiredTiger", "WiredTiger.turtle", "WiredTiger.wt", "storage.bson"):
        (tmp_path / "db" / name).write_text("rubbish")
    with pytest.raises(
        ConfigurationError, match=r"status 14; the end of its mongod\.log:\n.*metadata file"
    ):
        EmbeddedServer(tmp_path)
    assert no_child_since(before)


def test_failed_start_leaves_no_process(
    mongod: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = children()

    def interrupted(self: EmbeddedServer, client: MongoClient[dict[str, Any]]) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(EmbeddedServer, "_is_primary", interrupted)
    with pytest.raises(KeyboardInterrupt):
        EmbeddedServer(tmp_path)
    assert no_child_since(before)
    monkeypatch.setattr(EmbeddedServer, "_is_primary", lambda self, client: False)
    monkeypatch.setattr(embedded, "_START_TIMEOUT_S", 0.0)
    with pytest.raises(ConfigurationError, match=r"was not ready within 0 s \("):
        EmbeddedServer(tmp_path)
    assert no_child_since(before)


def test_close_ends_a_server_with_a_stopped_watchdog(
    mongod: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_watchdog, "GRACE_S", 0.1)
    with EmbeddedServer(tmp_path) as server:
        left = psutil.Process(server.pid)
        os.kill(server._watchdog.pid, signal.SIGSTOP)
        server.close()
        assert server._watchdog.returncode == -signal.SIGKILL
        eventually(lambda: gone(left), "the end of mongod")


def test_unsupported_machine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(pid: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(_watchdog, "pidfd", unknown)
    with pytest.raises(ConfigurationError, match=r"Linux 5\.3 or later, .*not implemented"):
        EmbeddedServer(tmp_path)
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigurationError, match="on Linux only"):
        EmbeddedServer(tmp_path)
    assert not (tmp_path / "db").exists()


def fake(directory: Path, words: str = "", status: int = 0) -> Path:
    directory.mkdir(exist_ok=True)
    path = directory / "mongod"
    path.write_text(f"#!/bin/sh\necho '{words}' >&2\nexit {status}\n")
    path.chmod(0o755)
    return path


def test_find_mongod_prefers_variable_then_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named, on_path, packaged = (fake(tmp_path / name) for name in ("named", "path", "packaged"))
    monkeypatch.setattr(embedded, "_packaged_mongod", lambda: str(packaged))
    monkeypatch.setenv("PYQUEUE_MONGOD", str(named))
    monkeypatch.setenv("PATH", f"{on_path.parent}:/usr/bin:/bin")
    assert find_mongod() == str(named)
    monkeypatch.delenv("PYQUEUE_MONGOD")
    assert find_mongod() == str(on_path)
    on_path.unlink()
    monkeypatch.setenv("PATH", str(on_path.parent))
    assert find_mongod() == str(packaged)


def test_find_mongod_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_EXTRA", "no-such-distribution")
    monkeypatch.delenv("PYQUEUE_MONGOD", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        ConfigurationError,
        match=r"pip install \"pyqueue-mongo\[embedded\]\".*PATH.*PYQUEUE_MONGOD=",
    ):
        EmbeddedServer(tmp_path)
    plain = tmp_path / "plain"
    plain.touch()
    for wrong in (plain, tmp_path, tmp_path / "missing"):
        monkeypatch.setenv("PYQUEUE_MONGOD", str(wrong))
        with pytest.raises(
            ConfigurationError, match=f"PYQUEUE_MONGOD: {wrong} is not an executable file"
        ):
            find_mongod()
    broken = fake(tmp_path / "broken", "libcrypto.so.3: cannot open shared object file", 127)
    monkeypatch.setenv("PYQUEUE_MONGOD", str(broken))
    with pytest.raises(ConfigurationError, match=r"cannot run here \(libcrypto\.so\.3: "):
        find_mongod()


def test_find_mongod_restores_the_execute_permission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packaged = fake(tmp_path / "packaged")
    packaged.chmod(0o644)
    found = SimpleNamespace(locate_file=lambda name: packaged)
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: found)
    monkeypatch.delenv("PYQUEUE_MONGOD", raising=False)
    monkeypatch.setenv("PATH", "")
    assert find_mongod() == str(packaged)
    assert os.access(packaged, os.X_OK)
    packaged.write_bytes(b"\x7fELF of another machine")
    with pytest.raises(ConfigurationError, match=r"cannot run here \(.*Exec format error"):
        find_mongod()


# ---- the watchdog, with a program of the test in the place of mongod

#: It loads the one module, as an owner does, and not the package.
WATCH = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("watchdog", sys.argv[1])
watchdog = importlib.util.module_from_spec(spec)
spec.loader.exec_module(watchdog)
watchdog.GRACE_S = float(sys.argv[2])
sys.exit(watchdog.watch(int(sys.argv[3]), sys.argv[4], "1234", ["/bin/sh", "-c", sys.argv[5]]))
"""


def watch(
    path: Path, program: str, *, owner: int | None = None, grace: float = 5.0
) -> subprocess.Popen[bytes]:
    """Watch a shell program; the owner is this process unless one is given."""
    arguments = [str(grace), str(os.getpid() if owner is None else owner), str(path), program]
    command = [sys.executable, "-I", "-S", "-c", WATCH, _watchdog.__file__]
    return subprocess.Popen([*command, *arguments])


def test_watchdog_ends_with_the_status_of_its_program(tmp_path: Path) -> None:
    assert watch(tmp_path, "echo output; exit 7").wait(LONG) == 7
    assert (tmp_path / "mongod.log").read_text() == "output\n"
    assert _watchdog.read_lock(str(tmp_path)) == (1234, [])


def test_watchdog_terminates_then_kills(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    deaf = f"trap '' TERM; touch {ready}; while :; do sleep 0.05; done"
    with watch(tmp_path, deaf, grace=0.2) as process:
        eventually(ready.exists, "the start of the program")
        assert _watchdog.read_lock(str(tmp_path)) == (1234, [os.getpid(), process.pid])
        process.terminate()
        assert process.wait(LONG) == 256 - signal.SIGKILL


def test_watchdog_of_a_foreign_owner_starts_nothing(tmp_path: Path) -> None:
    assert watch(tmp_path, "exit 7", owner=os.getppid()).wait(LONG) == 0
    assert not (tmp_path / "mongod.log").exists()


def test_directory_is_locked_while_its_holders_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen(["/bin/true"]) as dead:
        os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)
        assert not _watchdog._alive(dead.pid)  # a zombie: its process id is still taken
    with pytest.raises(OSError, match="pidfd_open"):
        _watchdog.pidfd(dead.pid)
    assert not _watchdog._alive(dead.pid)
    lock = _watchdog._take(str(tmp_path))
    assert lock is not None
    try:
        _watchdog._write_lock(lock, f"1234 {os.getpid()} {os.getpid()}")
        assert _watchdog._take(str(tmp_path)) is None
        assert watch(tmp_path, "exit 7").wait(LONG) == _watchdog.IN_USE
        monkeypatch.setattr(_watchdog, "LOCK_TIMEOUT_S", 0.1)
        # A server on its way out, for longer than the next one waits.
        _watchdog._write_lock(lock, f"1234 {os.getpid()} {dead.pid}")
        assert _watchdog._take(str(tmp_path)) is None
    finally:
        os.close(lock)
    again = _watchdog._take(str(tmp_path))
    assert again is not None
    os.close(again)


# ---- in the foreground


def test_server_repr_names_path_and_port(server: EmbeddedServer) -> None:
    assert repr(server) == f"EmbeddedServer({str(server.path)!r}, port={server.port})"


def test_run_foreground_reports_a_dead_mongod(mongod: str, tmp_path: Path) -> None:
    output = io.StringIO()

    def kill() -> None:
        try:
            eventually(lambda: "\n" in output.getvalue(), "the URL on standard output")
            with client(output.getvalue().strip()) as mongo:
                psutil.Process(mongo.admin.command("serverStatus")["pid"]).kill()
        except BaseException:
            os.kill(os.getpid(), signal.SIGTERM)  # else the foreground would wait for ever
            raise

    with ThreadPoolExecutor(1) as pool:
        killed = pool.submit(kill)
        with redirect_stdout(output), pytest.raises(Unavailable, match="ended with status"):
            run_foreground(tmp_path / "data")
        killed.result(LONG)


def test_directory_is_closed_to_other_users(tmp_path: Path) -> None:
    """So is one that an earlier release made. A directory with other files keeps its mode."""
    made, earlier, shared = tmp_path / "new" / "made", tmp_path / "earlier", tmp_path / "shared"
    (earlier / "db").mkdir(parents=True)
    (earlier / "lock").touch()
    shared.mkdir()
    (shared / "mine.txt").touch()
    for path in (earlier, earlier / "db", shared):
        path.chmod(0o755)
    for path in (made, earlier, shared):
        server = EmbeddedServer.__new__(EmbeddedServer)
        server.path = path
        server._prepare_directory()
        assert (path / "db").stat().st_mode & 0o777 == 0o700
    assert made.stat().st_mode & 0o777 == 0o700
    assert earlier.stat().st_mode & 0o777 == 0o700
    assert shared.stat().st_mode & 0o777 == 0o755
