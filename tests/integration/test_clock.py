"""Consumers that wait follow the primary's clock, whatever happens to it or to their machine."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from pyqueue import AsyncClient, Client
from pyqueue.clock import Clock
from pyqueue.concurrently import Sleep
from pyqueue.requests import Hello, Plan
from pyqueue.runtime.connecting import runner_of
from tests.integration.conftest import Connect
from tests.support.eventually import LONG, eventually, waiters
from tests.support.processes import ROOT

#: An hour, in seconds.
STEP_S = 3600.0


@pytest.mark.parametrize("bus", [None, "none:"], ids=["bus", "no-bus"])
@pytest.mark.parametrize("step", [STEP_S, -STEP_S], ids=["ahead", "back"])
def test_idle_consumer_receives_after_the_server_clock_is_set(
    connect: Connect, client: Client, monkeypatch: pytest.MonkeyPatch, step: float, bus: str | None
) -> None:
    """Clients know the server's clock only by its ``hello``."""
    monkeypatch.setattr("pyqueue.clock.REFRESH_INTERVAL_S", (0.1, 0.2))
    consumer = connect(signals=bus)
    queue, producer = consumer.queue("jobs", poll=0.2), client.queue("jobs")
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(queue.reserve)
        eventually(lambda: waiters(consumer, "jobs") == 1)

        clocks = [runner_of(each).open().clock for each in (consumer, client)]
        changes = [clock.changes for clock in clocks]

        def read(self: Hello, raw: dict[str, Any]) -> dict[str, Any]:
            return raw | {"localTime": raw["localTime"] + timedelta(seconds=step)}

        monkeypatch.setattr(Hello, "read", read)
        clocks[1].expire()
        producer.counts()  # nothing waits in this client: it asks with its next command
        eventually(lambda: all(c.changes > n for c, n in zip(clocks, changes, strict=True)))
        producer.push("after the step")
        held = future.result(LONG)  # if the consumer had kept its clock: an hour later, or never
    assert held is not None
    queue.commit(held)


_IDLE = """
import sys
from pyqueue import AsyncClient, Client
from pyqueue.clock import Clock
from pyqueue.concurrently import Sleep
with Client(sys.argv[1]) as client:
    queue = client.queue("jobs", poll=1)
    for _ in range(2):
        print("waits", flush=True)
        held = queue.reserve()
        queue.commit(held)
        print(held.payload, flush=True)
"""


@pytest.mark.slow
def test_idle_process_receives_after_it_was_stopped(url: str, client: Client) -> None:
    queue = client.queue("jobs")
    with subprocess.Popen(
        [sys.executable, "-c", _IDLE, url], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            for payload in ("first", "second"):
                assert process.stdout.readline() == "waits\n"
                time.sleep(2)  # until it waits
                os.kill(process.pid, signal.SIGSTOP)
                time.sleep(25)
                os.kill(process.pid, signal.SIGCONT)
                began = time.monotonic()
                queue.push(payload)
                assert process.stdout.readline() == f"{payload}\n"
                assert time.monotonic() - began < 20  # ten times the poll and a second
        finally:
            process.kill()


def pausing(clock: Clock) -> Plan[bool]:
    """Return a plan that pauses while the estimate is old, and then tells whether it still is."""
    clock.expire()
    yield from Sleep(0.01)
    return clock.stale


def test_long_call_follows_the_clock_when_it_pauses(url: str) -> None:
    with Client(url) as client:
        runner = runner_of(client)
        assert not runner.run(pausing(runner.open().clock))

    async def pause() -> bool:
        async with AsyncClient(url) as client:
            runner = runner_of(client)
            await client.queues()
            return await runner.run(pausing(runner.open().clock))

    assert not asyncio.run(pause())
