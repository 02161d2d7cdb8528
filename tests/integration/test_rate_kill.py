"""Processes that consume a queue with a rate are killed in the middle of their work.

No more messages start than the limit allows, nothing is lost, and nothing stays behind.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from pyqueue import Client, Limit
from tests.integration.test_rates import DRIFT
from tests.support.kills import LEASE_S, few_or_many_kills, ledger_of

RATE, BURST = 100, 10
MESSAGES = 1500


@few_or_many_kills
@pytest.mark.parametrize("per", [pytest.param(None, marks=pytest.mark.slow), "headers.customer"])
def test_killed_processes_start_no_more(
    per: str | None, kills: int, url: str, tmp_path: Path
) -> None:
    with Client(url) as client:
        queue = client.queue("limited", limit=Limit(rate=RATE, burst=BURST, per=per))
        queue.push_many([str(number) for number in range(MESSAGES)], headers={"customer": "large"})
        queue.push_many([f"small{number}" for number in range(20)], headers={"customer": "small"})
    began = time.monotonic()
    ledger = ledger_of("tests.integration.rate_kills", url, kills, tmp_path / "ledger")
    took_s = time.monotonic() - began
    with Client(url) as client:
        client.reshape("limited", limit=False)
        queue = client.queue("limited", max_tries=None)
        rest: list[str] = []
        while queue.counts().total > 0:
            held = queue.reserve_many(100, timeout=30 * LEASE_S)
            assert held, "forgotten"
            rest += [each.payload for each in held]
            queue.commit(*held)
    begun = {
        each
        for what in ("commit", "rollback", "release")
        for line in ledger.lines(f"begin-{what}")
        for each in line
    }
    large = {each for each in begun if per is None or not each.startswith("small")}
    assert len(large) <= BURST + RATE * took_s * DRIFT, "too many started"
    finished = [each.partition("|")[0] for each in ledger["commit"]] + rest
    assert len(finished) == len(set(finished)), "finished twice"
    unknown = {each.partition("|")[0] for each in begun}
    pushed = {*map(str, range(MESSAGES)), *(f"small{number}" for number in range(20))}
    assert pushed - set(finished) <= unknown, "lost"
