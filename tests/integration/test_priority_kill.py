"""Processes that use a queue with priorities are killed in the middle of their work.

The ledger must be exact, and what is left is handed out by priority.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from pyqueue import Client
from tests.support.eventually import eventually
from tests.support.kills import few_or_many_kills, ledger_of


@few_or_many_kills
def test_killed_users_of_priorities_leave_an_exact_ledger(
    kills: int, url: str, tmp_path: Path
) -> None:
    ledger = ledger_of("tests.integration.priority_kills", url, kills, tmp_path / "ledger")
    with Client(url) as client:
        queue = client.queue("jobs", kind="priority", max_tries=None)
        eventually(lambda: queue.counts().reserved == 0, "the leases of the killed lapse")
        left = queue.counts().total
        rest = []
        while held := queue.reserve_many(10_000, timeout=0):
            rest += held
            queue.commit(*held)
        dead = client.queue("jobs.dead").pop_many(100_000, timeout=0)
        assert queue.counts().total == 0, "everything is drained"
        assert queue.next_when() is None
    assert len(rest) == left, "a consumer gets all that is stored"
    levels = [each.priority for each in rest]
    assert None not in levels
    assert levels == sorted(levels, reverse=True), "by priority"  # type: ignore[type-var]
    changed = set(ledger["begin-reprioritize"])
    for each in (*rest, *dead):
        assert each.payload in changed or str(each.priority) == each.payload[-1]
    ends = Counter(each.payload for each in (*rest, *dead)) + ledger["commit"]
    assert max(ends.values()) == 1, "finished twice"
    assert set(ledger["bury"]) <= {each.payload for each in dead}
    assert set(ledger["pushed"]) - set(ends) <= set(ledger["begin-commit"]), "lost"
    assert ledger["commit"].total() > kills, "it did no work"
