"""Permits of a rate, which several processes ask a server for at the same time."""

from __future__ import annotations

import time
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat

from pyqueue import Client, Limit
from pyqueue.backends.limits import rates
from pyqueue.runtime.connecting import runner_of
from tests.integration.conftest import PROCESSES

LIMIT = Limit(rate=40, period=1, burst=10)
#: By how much the clock of the server may run faster than that of the processes.
DRIFT = 1.01


def ask(url: str, worker: int, times: int) -> list[tuple[float, float, int]]:
    """Ask again and again. Return when each look asked, when it had its answer, and the permits."""
    with Client(url) as client:
        runner = runner_of(client)
        found: list[tuple[float, float, int]] = []
        for number in range(times):
            wanted = 1 + (number + worker) % 4
            asked = time.monotonic()
            granted = runner.run(rates.take("a", LIMIT, {"": wanted}))[""]
            found.append((asked, time.monotonic(), granted.permits))
            if granted.permits and number % 5 == 0:
                runner.run(rates.give_back("a", LIMIT, "", granted._replace(permits=1)))
                found.append((asked, time.monotonic(), -1))
        return found


def test_permits_of_several_processes_fit_every_window(
    url: str, processes: ProcessPoolExecutor
) -> None:
    """A grant lies surely within a window if its look asked and was answered within it."""
    each = processes.map(ask, repeat(url, PROCESSES), range(PROCESSES), repeat(30))
    looks = [look for some in each for look in some]
    first = min(asked for asked, _, _ in looks)
    last = max(answered for _, answered, _ in looks)
    total = sum(permits for _, _, permits in looks)
    assert 10 <= total <= 10 + 40 * (last - first) * DRIFT
    for begin, _, _ in looks:
        for _, end, _ in looks:
            within = sum(
                max(permits, 0)
                for asked, answered, permits in looks
                if asked >= begin and answered <= end
            )
            given_back = sum(1 for _, _, permits in looks if permits < 0)
            assert within <= 10 + given_back + 40 * max(0.0, end - begin) * DRIFT
    with Client(url) as client:
        (found,) = client.database["pyqueue"].find({"_id": "~limit:a~"})
        assert {"tokens", "at", "expires", "processed"} <= found.keys()
        assert [each.name for each in client.queues()] == []
