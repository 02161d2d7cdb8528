"""A queue with a rate on a server: several processes start no more than the limit allows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat

import pytest

from pyqueue import Client, ConfigurationError, Limit
from pyqueue.messages import KindName
from tests.integration.conftest import PROCESSES, Connect
from tests.integration.test_rates import DRIFT
from tests.support.eventually import eventually
from tests.support.processes import ROOT

LIMIT = Limit(rate=40, period=1, burst=10)
MESSAGES = 30

#: When a call began and ended, and how many messages it started.
Call = tuple[float, float, int]


def consume(url: str, worker: int, kind: KindName) -> list[Call]:
    """Receive until the queue is empty."""
    calls: list[Call] = []
    with Client(url) as client:
        queue = client.queue("a", kind=kind)
        while True:
            began = time.monotonic()
            held = queue.reserve_many(1 + worker * 3, timeout=0)
            calls.append((began, time.monotonic(), len(held)))
            if held:
                queue.commit(*held)
            elif not queue.counts().total:
                return calls
            else:
                time.sleep(0.005)


@pytest.mark.parametrize("kind", ["standard", "priority", "ordered", "bucket"])
def test_starts_of_several_processes_fit_every_window(
    url: str, processes: ProcessPoolExecutor, kind: KindName
) -> None:
    """A message surely started within a window if its call began and ended within it."""
    with Client(url) as client:
        queue = client.queue("a", kind=kind, limit=LIMIT)
        groups = [str(number) for number in range(MESSAGES)] if kind == "ordered" else None
        queue.push_many(range(MESSAGES), groups=groups)
    each = processes.map(consume, repeat(url, PROCESSES), range(PROCESSES), repeat(kind))
    calls = [call for some in each for call in some if call[2]]
    assert sum(number for _, _, number in calls) == MESSAGES
    for begin, _, _ in calls:
        for _, end, _ in calls:
            within = sum(
                number for began, ended, number in calls if began >= begin and ended <= end
            )
            assert within <= 10 + 40 * max(0.0, end - begin) * DRIFT


@pytest.mark.parametrize("per", [pytest.param(None, marks=pytest.mark.slow), "headers.customer"])
def test_stopped_consumer_starts_no_more(url: str, per: str | None) -> None:
    """While it is stopped between its permits and its claim, the bucket fills again."""
    with Client(url) as client:
        queue = client.queue("a", limit=Limit(rate=10, burst=10, per=per))
        queue.push_many(range(40), headers={"customer": "x"})
        program = [sys.executable, "-m", "tests.integration.stopped_consumer", url]
        with subprocess.Popen(program, cwd=ROOT, stdout=subprocess.PIPE, text=True) as stopped:
            assert os.WIFSTOPPED(os.waitpid(stopped.pid, os.WUNTRACED)[1])
            bucket = client.database["pyqueue"].find_one({"granted": {"$exists": True}})
            full_at = time.monotonic() + 1.2
            assert bucket["tokens"] < 1
            eventually(lambda: time.monotonic() > full_at)
            began = time.monotonic()
            held = queue.reserve_many(10, timeout=0)
            stopped.send_signal(signal.SIGCONT)
            number, ended = stopped.communicate(timeout=60)[0].split()
    assert len(held) == 10
    assert len(held) + int(number) <= 10 + 10 * (float(ended) - began) * DRIFT


def test_waiting_consumers_share_the_rate(connect: Connect) -> None:
    """Tasks and threads of one client, which share claims, start no more together."""
    client = connect()
    queue = client.queue("a", limit=Limit(rate=1, period=3600, burst=3))
    queue.push_many(range(10))
    assert len(queue.reserve_many(2, timeout=0)) == 2
    assert queue.pop(0) is not None
    assert queue.pop(0) is None
    assert queue.reserve(0.05) is None
    client.reshape("a", limit=Limit(rate=1000, burst=10))
    assert queue.reserve(60) is not None


def test_named_claims_count_as_starts(url: str) -> None:
    with Client(url) as client:
        queue = client.queue("a", limit=Limit(rate=1, period=3600, burst=3))
        queue.push_many(range(10))
        with queue.claim("g", limit=10) as claim:
            assert len(claim) == 3
            claim.commit()
        with queue.claim("g", limit=10) as claim:
            assert len(claim) == 0
        client.reshape("a", limit=Limit(concurrency=1))
        with pytest.raises(ConfigurationError, match="claim: "), queue.claim("g", limit=10):
            pass
