"""``pyqueue worker``: factories, lifespans, logs and health checks, as its page says."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from pyqueue import Client, Delivery, QueueClosed, Unavailable, Worker
from pyqueue.cli import apps, logs
from pyqueue.cli.logs import JsonLines
from pyqueue.pipeline import pulse
from pyqueue.pipeline.around import current_deliveries
from pyqueue.pipeline.pulse import Pulse
from tests.cli.shell import Shell
from tests.support.eventually import LONG, eventually
from tests.support.servers import free_port

#: A module with a function that makes a worker.
SHOP = """
import asyncio, logging, os, signal, time
from pyqueue import Worker
from pyqueue.pipeline import pulse

log = logging.getLogger("shop")

async def lifespan():
    print("opened", flush=True)
    {start}
    yield "state"
    print("closed", flush=True)

def make_worker():
    {make}
    worker = Worker(name="shop", lifespan=lifespan)

    @worker.on("jobs")
    async def work(job, delivery):
        log.info("begun", extra={{"job": job}})
        print("working", delivery.state, flush=True)
        {work}

    return worker
"""


def write(start: str = "pass", make: str = "pass", work: str = "pass") -> None:
    Path("shop.py").write_text(SHOP.format(start=start, make=make, work=work))


STOP = "os.kill(os.getpid(), signal.SIGTERM)"

# ---- factories, and the server


def test_function_makes_the_worker(shell: Shell, client: Client) -> None:
    client.queue("jobs").push(1)
    write(work=STOP)
    status, out, errors = shell.run("worker", "shop:make_worker", "--json")
    assert status == 0, errors
    *printed, report = out.splitlines()
    assert printed == ["opened", "working state", "closed"]
    assert json.loads(report)["stages"]["jobs"]["out"] == 1


def test_command_line_names_the_server(
    shell: Shell, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = os.environ["PYQUEUE_URL"]
    monkeypatch.setenv("PYQUEUE_URL", "mongodb://127.0.0.1:1/wrong")
    monkeypatch.setenv("PYQUEUE_NAMESPACE", "wrong")
    client.queue("jobs").push(1)
    write(work=f"print(os.environ['PYQUEUE_URL']); {STOP}")
    options = ["--url", url, "--namespace", "pyqueue", "--json"]
    status, out, errors = shell.run("worker", "shop:make_worker", *options)
    assert status == 0, errors
    assert url in out.splitlines()


def test_worker_without_a_server_is_refused(bare_shell: Shell) -> None:
    write()
    assert "missing server: pass --url" in bare_shell.refused("worker", "shop:make_worker")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def app(): return 3", "the result of 'shop:app' is neither a Worker nor a Pipeline"),
        ("def app(x): ...", "expected a function without arguments that returns a Worker"),
        ("async def app(): ...", "the result of 'shop:app' is neither"),
        ("app = 3", "'shop:app' is neither a Worker nor a Pipeline, but int"),
        ("def app(): raise KeyError('till')", "KeyError: 'till'"),
    ],
)
def test_other_objects_are_refused(bare_shell: Shell, code: str, said: str) -> None:
    Path("shop.py").write_text(code)
    assert said in bare_shell.refused("worker", "shop:app")


def test_server_of_a_worker_with_a_client_is_refused(
    bare_shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYQUEUE_SIGNALS", "set by the command")
    Path("shop.py").write_text(
        "from pyqueue import Client, Worker\napp = Worker(Client('memory:')).on('a', print)"
    )
    errors = bare_shell.refused("worker", "shop:app", "--signals", "none:")
    assert "--signals: 'shop:app' was created with a client" in errors


def test_pool_passes_on_the_options_of_its_processes(
    bare_shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    class Pool:
        def __init__(self, command: list[str], size: int) -> None:
            commands.append(command)

        def run(self) -> int:
            return 0

    monkeypatch.setattr("pyqueue.cli.work.WorkerPool", Pool)
    monkeypatch.setenv("PYQUEUE_URL", "set by the command")
    url = "mongodb://user:hunter2@db/shop"
    options = ["--processes", "2", "--log-level", "debug", "--log-format", "json", "--url", url]
    assert bare_shell.run("worker", "shop:app", *options)[0] == 0
    command = [sys.executable, "-m", "pyqueue.cli", "worker", "shop:app", "--grace=30.0"]
    assert commands == [[*command, "--log-level=debug", "--log-format=json"]]
    assert os.environ["PYQUEUE_URL"] == url  # not in the list of processes
    errors = bare_shell.refused("worker", "shop:app", "--processes", "2", "--health", "0")
    assert "--health: several processes cannot share a port" in errors


def test_bound_worker_keeps_its_client(offline: Client) -> None:
    worker = Worker().on("jobs", print).bind(offline)
    assert apps.client_for(worker, None, "pyqueue", None) is offline


@pytest.fixture
def offline() -> Client:
    return Client("memory:")


def answer(url: str) -> tuple[int, str]:
    """Ask for a check. Return the status and the text."""
    try:
        with urllib.request.urlopen(url, timeout=LONG) as found:
            return found.status, found.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


#: A statement of a lifespan, after which signals are handled.
OPENED = "open('opened', 'w').close()"


def serve(shell: Shell, ask: Callable[[str], object], *options: str) -> tuple[int, str, str]:
    """Run the worker in this process, with health checks. Return as ``Shell.run``.

    Once the worker has opened, a thread asks for checks at this address, and then sends SIGTERM.
    """
    port = free_port()

    def stop() -> None:
        eventually(Path("opened").exists, "a lifespan that is open")
        try:
            ask(f"http://127.0.0.1:{port}")
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    with ThreadPoolExecutor(1) as pool:
        stopped = pool.submit(stop)
        found = shell.run("worker", "shop:make_worker", "--health", str(port), *options)
        stopped.result()
    return found


# ---- as a program


class Program:
    """A worker as a program, with health checks."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stderr is not None
        line = next(line for line in process.stderr if "health checks" in line)
        (self.url,) = re.findall(r"on (http://127\.0\.0\.1:\d+)/live and /ready", line)

    def printed(self, text: str) -> None:
        """Wait until the program prints a line."""
        assert self.process.stdout is not None
        assert next(self.process.stdout).strip() == text

    def check(self, path: str) -> tuple[int, str]:
        """Ask for a check. Return the status and the text."""
        return answer(f"{self.url}{path}")

    def ends(self) -> tuple[int, str, str]:
        """Wait for the end. Return the exit status, and what else it has printed."""
        out, errors = self.process.communicate(timeout=LONG)
        return self.process.returncode, out, errors


HEALTH = ("worker", "shop:make_worker", "--health", "0")
#: Patience that suits a test.
IMPATIENT = "pulse.BLOCKED_AFTER_S = 0.5; pulse._TURN_S = 0.02"


def test_healthy_worker_stops_at_sigterm(shell: Shell, client: Client) -> None:
    """It closes its lifespan, and its exit status is 0."""
    write()
    with shell.program(*HEALTH) as process:
        program = Program(process)
        program.printed("opened")
        eventually(lambda: program.check("/ready")[0] == 200, "a ready worker")
        assert program.check("/live?verbose") == (200, "ok\n")
        assert program.check("/")[0] == 404
        client.queue("jobs").push(1)
        program.printed("working state")
        process.send_signal(signal.SIGTERM)
        program.printed("closed")
        status, out, _ = program.ends()
    assert status == 0
    assert "jobs" in out


def test_worker_is_alive_and_not_ready_while_it_starts(shell: Shell, client: Client) -> None:
    write(start=f"{OPENED}; await asyncio.Event().wait()")
    client.queue("jobs").push(1)
    answers = list[tuple[int, str]]()

    def ask(url: str) -> None:
        answers.extend(answer(f"{url}/{path}") for path in ("live", "ready"))

    status, out, _ = serve(shell, ask)
    why = "no messages are received, because the worker is starting or stopping\n"
    assert answers == [(200, "ok\n"), (503, why)]
    assert status == 0
    assert "closed" not in out
    assert client.queue("jobs").counts().ready == 1


def test_failing_lifespan_ends_the_worker(shell: Shell, client: Client) -> None:
    write(start="raise ConnectionError('no carrier')")
    client.queue("jobs").push(1)
    with shell.program("worker", "shop:make_worker") as process:
        out, errors = process.communicate(timeout=LONG)
    assert (process.returncode, out) == (1, "opened\n")
    assert "shop.py" in errors
    assert "ConnectionError: no carrier\nlifespan: lifespan failed to start" in errors
    assert errors.splitlines()[-1] == "pyqueue: shop: the lifespan failed, see above"
    assert "engine.py" not in errors
    (message,) = client.queue("jobs").peek()
    assert message.deliveries == 0


def test_blocked_loop_is_not_alive(shell: Shell, client: Client) -> None:
    write(make=IMPATIENT, work="time.sleep(600)")
    client.queue("jobs").push(1)
    with shell.program(*HEALTH) as process:
        program = Program(process)
        program.printed("opened")
        program.printed("working state")
        eventually(lambda: program.check("/live")[0] == 503, "a worker that is not alive")
        assert re.fullmatch(
            r"the event loop has been blocked for \d+ s\n", program.check("/live")[1]
        )


def test_handler_that_never_ends_is_alive(
    shell: Shell, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM gives it the grace, then its message can be received at once."""
    monkeypatch.setattr(pulse, "BLOCKED_AFTER_S", 0.5)
    monkeypatch.setattr(pulse, "_TURN_S", 0.02)
    write(start=OPENED, work="open('working', 'w').close(); await asyncio.Event().wait()")
    id = client.queue("jobs").push(1)
    alive = list[int]()

    def ask(url: str) -> None:
        eventually(Path("working").exists, "a handler that works")
        eventually(lambda: answer(f"{url}/ready")[0] == 200, "a ready worker")
        alive.append(answer(f"{url}/live")[0])

    status, out, _ = serve(shell, ask, "--grace", "0.1")
    assert (status, alive) == (0, [200])
    assert "closed" in out
    message = client.queue("jobs").reserve(LONG)
    assert message is not None
    assert (message.id, message.tries) == (id, 2)


def test_address_of_health_checks_is_checked(shell: Shell, client: Client) -> None:
    write()
    for address in ("here", "127.0.0.1:", "1.2.3.4:70000"):
        errors = shell.refused("worker", "shop:make_worker", "--health", address)
        assert f"--health: expected PORT or HOST:PORT, found {address!r}" in errors
    errors = shell.refused("worker", "shop:make_worker", "--health", "192.0.2.1:8081")
    assert "--health: 192.0.2.1:8081 cannot be used" in errors


# ---- the pulse


def test_pulse_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(pulse, "time", SimpleNamespace(monotonic=lambda: now))
    signs = Pulse()
    assert signs.why_not_alive() is None
    assert signs.why_not_ready() is not None
    signs.receiving = lambda: True
    assert signs.why_not_ready() == "the server has not answered yet"
    signs.reached = now
    assert signs.why_not_ready() is None
    now += 10
    assert signs.why_not_alive() is None
    now += 51
    assert signs.why_not_alive() == "the event loop has been blocked for 61 s"
    assert signs.why_not_ready() == "the server has not answered for 61 s"


def test_pulse_asks_the_server_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "_ASK_S", 0)
    answers: list[Exception | None] = [None, Unavailable("away"), None, QueueClosed("closed")]
    signs, reached = Pulse(), list[float | None]()

    class Server:
        async def run(self, plan: Any) -> None:
            reached.append(signs.reached)
            answer = answers.pop(0)
            if answer is not None:
                raise answer

    anyio.run(signs.reach, cast("Any", Server()))
    assert answers == []
    assert reached[0] is None
    assert reached[1] == reached[2] is not None  # not reached while it was away


# ---- the log


def test_lines_of_a_handler_name_its_message(shell: Shell, client: Client) -> None:
    id = client.queue("jobs").push(7)
    write(work="raise ValueError('no')")
    options = ("--log-format", "json", "--grace", "0")
    with shell.program("worker", "shop:make_worker", *options) as process:
        assert process.stderr is not None
        lines: list[dict[str, Any]] = []
        for line in process.stderr:
            if line.startswith("{"):
                lines.append(json.loads(line))
            if "exception" in line:
                break
    begun = next(line for line in lines if line["message"] == "begun")
    about = {"queue": "jobs", "id": str(id), "try": 1}
    assert begun.items() >= {"level": "info", "logger": "shop", "job": 7, **about}.items()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", begun["time"])
    assert lines[-1].items() >= {"level": "warning", "logger": "pyqueue", **about}.items()
    assert "ValueError: no" in lines[-1]["exception"]


def test_line_of_json_has_what_was_logged() -> None:
    record = logging.makeLogRecord(
        {"name": "shop", "levelno": 40, "levelname": "ERROR", "msg": "%s", "args": ("é\n",)}
    )
    record.stack_info = "stack"
    record.price = {1}  # JSON has no sets
    record.level = "of the program"  # which does not replace ours
    line = json.loads(JsonLines().format(record))
    assert line.pop("time")
    assert line == {
        "level": "error",
        "logger": "shop",
        "message": "é\n",
        "price": "{1}",
        "stack": "stack",
    }


def test_line_of_a_batch_names_its_first_message(offline: Client) -> None:
    queue = offline.queue("jobs")
    queue.push_many([1, 2])
    messages = queue.reserve_many(2)
    token = current_deliveries.set([Delivery(each, queue, None) for each in messages])
    line = json.loads(JsonLines().format(logging.makeLogRecord({"msg": "x"})))
    current_deliveries.reset(token)
    assert (line["id"], line["try"], line["batch"]) == (str(messages[0].id), 1, 2)


def test_log_of_the_program_stays_unless_options_are_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(logging, "basicConfig", lambda **options: given.append(options))
    logs.configure(None, None)
    logs.configure("debug", None)
    logs.configure(None, "json")
    assert [(each["level"], each["force"]) for each in given] == [
        ("INFO", False),
        ("DEBUG", True),
        ("INFO", True),
    ]
    assert isinstance(given[2]["handlers"][0].formatter, JsonLines)
