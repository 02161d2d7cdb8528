"""``pyqueue worker``: one process, and a pool of processes."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from pyqueue import AsyncClient, Client, QueueClosed, Worker
from pyqueue.cli import starting, work
from pyqueue.cli.common import note
from tests.cli.shell import Shell
from tests.hostile.conftest import ABANDONED
from tests.support.eventually import LONG, eventually
from tests.support.processes import gone
from tests.support.proxy import Proxy
from tests.support.servers import free_port
from tests.support.shared import Mongod

# ---- one process

SHOP = """
import os, signal
from pyqueue import {client}, Worker

client = {client}(os.environ["PYQUEUE_URL"])
worker = Worker(client)
other = 1
done = []

@worker.on("jobs")
{define} work(job, delivery):
    if job == "die" and delivery.message.tries == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    done.append(job)
    if len(done) == {stop_after}:
        os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize(("kind", "define"), [("Client", "def"), ("AsyncClient", "async def")])
def test_a_worker_works_until_sigterm(kind: str, define: str, shell: Shell, client: Client) -> None:
    Path("shop.py").write_text(SHOP.format(client=kind, define=define, stop_after=10))
    jobs = client.queue("jobs")
    jobs.push_many(range(10))
    status, out, errors = shell.run("worker", "shop:worker", "--concurrency", "2", "--json")
    assert status == 0, errors
    assert json.loads(out)["stages"]["jobs"]["out"] == 10
    assert jobs.counts().total == 0


def test_handlers_use_the_embedded_server_of_the_worker(shell: Shell) -> None:
    Path("shop.py").write_text(
        "import os, signal\n"
        "from pyqueue import Client, Worker\n"
        "worker = Worker()\n"
        "def client(): return Client(os.environ['PYQUEUE_URL'])\n"
        "with client() as first: first.queue('jobs').push(1)\n"
        "@worker.on('jobs')\n"
        "def work(job):\n"
        "    with client() as another: assert another.queue('jobs').counts().reserved == 1\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    status, out, errors = shell.run("worker", "shop:worker", "--url", "embedded:./data", "--json")
    assert status == 0, errors
    assert json.loads(out)["stages"]["jobs"]["out"] == 1


def test_a_worker_stops_when_its_parent_is_gone(shell: Shell, client: Client) -> None:
    """The parent holds the write end of the lifeline. Its death closes that end."""
    Path("shop.py").write_text(SHOP.format(client="Client", define="def", stop_after=-1))
    jobs = client.queue("jobs")
    jobs.push(1)
    lifeline, parents_end = os.pipe()

    def die() -> None:
        try:
            eventually(lambda: jobs.counts().total == 0, "a job done")  # so signals are handled
        finally:
            os.close(parents_end)

    with ThreadPoolExecutor(1) as pool:
        died = pool.submit(die)
        status, out, _ = shell.run("worker", "shop:worker", "--json", f"--lifeline={lifeline}")
        died.result()
    os.close(lifeline)
    assert status == 0
    assert json.loads(out)["stages"]["jobs"]["out"] == 1


def test_a_run_closes_the_client_of_its_worker() -> None:
    blocking, awaited = Client("memory:"), AsyncClient("memory:")
    for client in (blocking, awaited):
        worker = Worker(client).on("jobs", print)
        report = work.run_and_close(worker, client, until_empty=True)
        assert report.stages["jobs"]["in"] == 0
    with pytest.raises(QueueClosed):
        blocking.queue("jobs").push(1)


@pytest.mark.parametrize(
    ("code", "said"),
    [("import no_such_till", "install"), ("{}['till']", "correct"), ("def till(:", "correct")],
)
def test_a_failing_import_shows_the_line_of_the_app(shell: Shell, code: str, said: str) -> None:
    Path("half_a_shop.py").write_text(code)
    errors = shell.refused("worker", "half_a_shop:worker")
    assert "half_a_shop.py" in errors
    assert said in errors
    assert "importlib" not in errors
    assert len(errors.splitlines()) <= 6


def test_a_failing_import_of_a_recipe_shows_its_line(shell: Shell) -> None:
    Path("half_a_shop.py").write_text("{}['till']")
    Path("shop.toml").write_text('[[stages]]\nqueue = "in"\nhandler = "half_a_shop:work"\n')
    status, _, errors = shell.run("pipeline", "run", "shop.toml")
    assert status == 2
    assert "half_a_shop.py" in errors
    assert len(errors.splitlines()) <= 6


def when_waiting(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Act once a program has said that it waits for its server."""

    def say(text: str) -> None:
        note(text)
        assert "waiting for the server" in text
        act()

    monkeypatch.setattr(starting, "_SAY_AFTER_S", 0.05)
    monkeypatch.setattr(starting, "note", say)


@pytest.mark.filterwarnings(ABANDONED)
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("arguments", "kind", "define"),
    [
        (["worker", "shop:worker"], "AsyncClient", "async def"),
        (["pipeline", "run", "shop.toml"], "Client", "def"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_a_program_waits_for_its_server(
    arguments: list[str],
    kind: str,
    define: str,
    bare_shell: Shell,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It can be stopped in that time."""
    url = f"mongodb://user:hunter2@127.0.0.1:{free_port()}/shop"
    monkeypatch.setenv("PYQUEUE_URL", url)
    monkeypatch.setenv("PYQUEUE_NAMESPACE", "pyqueue")  # `run` sets it, so take that back
    Path("shop.py").write_text(SHOP.format(client=kind, define=define, stop_after=-1))
    Path("shop.toml").write_text('[[stages]]\nqueue = "jobs"\nhandler = "shop:work"\n')
    when_waiting(monkeypatch, lambda: os.kill(os.getpid(), signal.SIGTERM))
    status, _, errors = bare_shell.run(*arguments)
    first, second = errors.splitlines()
    assert "queues jobs, concurrency " in first
    assert f"pid {os.getpid()}" in first
    assert "waiting for the server" in second
    assert status == 0
    assert "hunter2" not in errors
    gc.collect()  # PyMongo may leave sockets open, and the warning is expected here


def test_a_worker_receives_once_its_server_is_up(
    bare_shell: Shell, mongod: Mongod, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.queue("jobs").push("job")
    Path("shop.py").write_text(SHOP.format(client="Client", define="def", stop_after=1))
    with Proxy(mongod.port) as proxy:
        proxy.cut()
        url = f"mongodb://127.0.0.1:{proxy.port}/{client.database.name}?directConnection=true"
        monkeypatch.setenv("PYQUEUE_URL", url)
        when_waiting(monkeypatch, proxy.restore)
        status, out, _ = bare_shell.run("worker", "shop:worker", "--json")
    assert status == 0
    assert json.loads(out)["stages"]["jobs"]["out"] == 1


# ---- a pool


def test_worker_processes_restart_and_end_with_the_parent(shell: Shell, client: Client) -> None:
    """The whole as a program: one process dies, is started again, and then the parent is killed."""
    Path("shop.py").write_text(SHOP.format(client="Client", define="def", stop_after=-1))
    jobs = client.queue("jobs")
    jobs.push("die")
    with shell.program("worker", "shop:worker", "--processes", "2", new_session=True) as process:
        assert process.stderr is not None
        line = next(each for each in process.stderr if "ended" in each)
        assert "ended by signal 9; starting it again in 1 s" in line
        parent = psutil.Process(process.pid)
        eventually(lambda: len(parent.children()) == 2, "two processes")
        workers = parent.children()
        jobs.push_many(range(10))
        eventually(lambda: jobs.counts().ready == 0, "all jobs taken")
        process.kill()
        process.wait()
        eventually(lambda: all(gone(each) for each in workers), "the end of both workers")


def test_worker_passes_its_options_to_the_pool(
    bare_shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[tuple[list[str], int]] = []

    class Pool:
        def __init__(self, command: list[str], size: int) -> None:
            pools.append((command, size))

        def run(self) -> int:
            return 7

    monkeypatch.setattr(work, "WorkerPool", Pool)
    options = ["--processes", "3", "--grace", "5", "--concurrency", "4", "--json"]
    status, _, _ = bare_shell.run("worker", "shop:worker", *options)
    assert status == 7
    worker = [sys.executable, "-m", "pyqueue.cli", "worker", "shop:worker"]
    assert pools == [([*worker, "--grace=5.0", "--concurrency=4", "--json"], 3)]


@contextmanager
def signals_restored() -> Iterator[None]:
    """A pool handles signals until its process ends. Here the process continues."""
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def run_pool(code: str, when: Callable[[], object] | None = None) -> int:
    """Run a pool of two small programs; send SIGINT once the condition holds."""
    command = [sys.executable, "-I", "-S", "-c", code]

    def interrupt() -> None:
        if when is not None:
            eventually(when, "the condition for Ctrl-C")
            os.kill(os.getpid(), signal.SIGINT)

    with signals_restored(), ThreadPoolExecutor(1) as pool:
        interrupted = pool.submit(interrupt)
        status = work.WorkerPool(command, 2).run()
        interrupted.result()
    return status


def number_of(pattern: str, wanted: int) -> Callable[[], bool]:
    return lambda: len(list(Path.cwd().glob(pattern))) == wanted


def test_a_pool_passes_ctrl_c_on_as_sigterm(bare_shell: Shell) -> None:
    """A module that is being imported may swallow a KeyboardInterrupt; it does not see SIGTERM."""
    code = (
        "import os, time\n"
        "open(f'{os.getpid()}.here', 'x').close()\n"
        "while True:\n"
        "    try: time.sleep(600)\n"
        "    except KeyboardInterrupt: pass\n"
    )
    assert run_pool(code, number_of("*.here", 2)) == 0


@pytest.mark.parametrize(("ends_with", "status"), [(0, 0), (3, 1)])
def test_a_pool_stops_all_processes_together(
    bare_shell: Shell, ends_with: int, status: int
) -> None:
    """It reports a failure while it stops."""
    code = (
        "import os, signal, sys, time\n"
        f"signal.signal(signal.SIGTERM, lambda *_: sys.exit({ends_with}))\n"
        "open(f'{os.getpid()}.here', 'x').close()\n"
        "time.sleep(600)\n"
    )
    assert run_pool(code, number_of("*.here", 2)) == status
    processes = [int(path.stem) for path in Path.cwd().glob("*.here")]
    assert not any(psutil.pid_exists(each) for each in processes)


def test_a_pool_ends_if_its_processes_cannot_run(
    bare_shell: Shell, capfd: pytest.CaptureFixture[str]
) -> None:
    code = "import sys; print('cannot run', file=sys.stderr); sys.exit(2)"
    assert run_pool(code) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "cannot run" in captured.err
    assert "starting it again" not in captured.err


@pytest.mark.slow
def test_worker_processes_without_a_module_end(bare_shell: Shell) -> None:
    with bare_shell.program("worker", "nowhere:worker", "--processes", "2") as process:
        out, errors = process.communicate(timeout=LONG)
        assert (process.returncode, out) == (2, "")
    assert "module 'nowhere'" in errors


# ---- a process of a pool


@pytest.fixture
def lifeline() -> Iterator[int]:
    ours, theirs = os.pipe()
    yield ours
    os.close(ours)
    os.close(theirs)


@contextmanager
def failing_process(lifeline: int) -> Iterator[work.WorkerProcess]:
    """A process that ends with status 3 at once."""
    command = [sys.executable, "-I", "-S", "-c", "raise SystemExit(3)"]
    process = work.WorkerProcess(1, command, lifeline)
    try:
        yield process
    finally:
        process.kill()


def test_a_failing_process_restarts_after_growing_delays(
    lifeline: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with failing_process(lifeline) as process:
        for delay in (1, 2, 4):
            process.process.wait(LONG)
            before = time.monotonic()
            assert process.poll(False) is None
            assert process.restart_at is not None
            assert process.restart_at >= before + delay
            process.restart_at = 0.0  # now it is due
            assert process.poll(False) is None
            assert process.restart_at is None
    assert work.RESTART_BACKOFF.delay(9) == 60
    errors = capsys.readouterr().err
    assert errors.count("ended with status 3") == 3
    for delay in (1, 2, 4):
        assert f"starting it again in {delay} s\n" in errors


def test_a_healthy_process_restarts_after_a_short_delay(
    lifeline: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with failing_process(lifeline) as process:
        for _ in range(2):
            process.process.wait(LONG)
            process.started_at -= work.HEALTHY_AFTER_S
            assert process.poll(False) is None
            process.restart_at = 0.0  # now it is due
            assert process.poll(False) is None
    assert capsys.readouterr().err.count("starting it again in 1 s") == 2


def test_a_stopping_pool_does_not_restart_a_process(lifeline: int) -> None:
    with failing_process(lifeline) as process:
        process.process.wait(LONG)
        assert process.poll(False) is None
        process.restart_at = time.monotonic() + 600
        assert process.poll(False) is None  # the restart is not due yet
        process.stop()  # there is no process to stop
        assert process.poll(True) == 0
        assert process.process.returncode == 3


def test_a_worker_ends_at_a_record_of_a_newer_release(shell: Shell, client: Client) -> None:
    """The messages stay for a newer worker."""
    Path("shop.py").write_text(SHOP.format(client="Client", define="def", stop_after=1))
    jobs = client.queue("jobs")
    jobs.push(1)
    record = client.database["pyqueue"]
    assert record.update_one({"_id": "~queue:jobs"}, {"$set": {"v": 99}}).matched_count == 1
    status, _, errors = shell.run("worker", "shop:worker")
    assert status == 2
    assert "queue 'jobs' is of kind 'standard', version 99" in errors
    record.update_one({"_id": "~queue:jobs"}, {"$set": {"v": 1}})
    assert jobs.counts().ready == 1
