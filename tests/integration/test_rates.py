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
#: By how much the server's clock may run faster than the clock of the processes.
DRIFT = 1.01


def ask(url: str, worker: int, times: int) -> list[tuple[float, float, int]]:
    """Ask again and again. Return when each call began and ended, and its permits."""
    with Client(url) as client:
        runner = runner_of(client)
        found: list[tuple[float, float, int]] = []
        for number in range(times):
            wanted = 1 + (number + worker) % 4
            asked = time.monotonic()
            granted = runner.run(rates.take("a", LIMIT, {"": wanted}))[""]
            found.append((asked, time.monotonic(), granted.permits))
            if granted.permits and number % 5 == 0:
                one = granted._replace(permits=1)
                runner.run(rates.give_back("a", LIMIT, [("", one)]))
                found.append((asked, time.monotonic(), -1))
        return found


def test_permits_of_several_processes_fit_every_window(
    url: str, processes: ProcessPoolExecutor
) -> None:
    """A grant lies surely within a window if its call began and ended within it."""
    each = processes.map(ask, repeat(url, PROCESSES), range(PROCESSES), repeat(30))
    calls = [call for some in each for call in some]
    first = min(began for began, _, _ in calls)
    last = max(ended for _, ended, _ in calls)
    total = sum(permits for _, _, permits in calls)
    assert 10 <= total <= 10 + 40 * (last - first) * DRIFT
    given_back = sum(1 for _, _, permits in calls if permits < 0)
    for begin, _, _ in calls:
        for _, end, _ in calls:
            some = [max(each[2], 0) for each in calls if each[0] >= begin and each[1] <= end]
            within = sum(some)
            assert within <= 10 + given_back + 40 * max(0.0, end - begin) * DRIFT
    with Client(url) as client:
        (found,) = client.database["pyqueue"].find({"_id": "~limit:a~"})
        assert {"tokens", "at", "expires", "processed"} <= found.keys()
        assert [each.name for each in client.queues()] == []
