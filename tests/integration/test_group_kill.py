"""Processes that push into an ordered queue and consume it are killed in the middle of their work.

The ledger must be exact: nothing that was acknowledged is missing, nothing is finished twice, and
each group is finished in its order.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from pyqueue import Client
from tests.support.kills import LEASE_S, few_or_many_kills, ledger_of


@few_or_many_kills
def test_killed_processes_leave_each_group_in_order(kills: int, url: str, tmp_path: Path) -> None:
    early = [f"test.{number % 20}:{number}" for number in range(100)]
    with Client(url) as client:
        queue = client.queue("ordered", kind="ordered")
        queue.push_many(early, groups=[each.partition(":")[0] for each in early])
    ledger = ledger_of("tests.integration.group_kills", url, kills, tmp_path / "ledger")
    rest: list[str] = []
    with Client(url) as client:
        queue = client.queue("ordered", kind="ordered", max_tries=None)
        while queue.counts().total > 0:
            held = queue.reserve_many(100, timeout=30 * LEASE_S)
            assert held, "forgotten"
            groups = [each.group for each in held]
            assert len(groups) == len(set(groups)), "two messages of a group are held"
            rest += [each.payload for each in held]
            queue.commit(*held)
    acknowledged = ledger["commit"]
    # The beginnings of commits are in order. The acknowledgements of two processes need not be.
    begun = [each for line in ledger.lines("begin-commit") for each in line]
    finished = [each.partition("|")[0] for each in begun if each in acknowledged] + rest
    assert max(Counter(finished).values()) == 1, "finished twice"
    # A commit that was under way when its process was killed may be done.
    unknown = {each.partition("|")[0] for each in begun if each not in acknowledged}
    assert {*early, *ledger["pushed"]} - set(finished) <= unknown, "lost"
    last: dict[str, int] = {}
    for payload in finished:
        group, _, number = payload.partition(":")
        assert int(number) > last.get(group, -1), f"{payload} comes after {last}"
        last[group] = int(number)
    if kills > 5:  # a slow machine may do little between a few kills
        assert acknowledged.total() > kills, "it did no work"
