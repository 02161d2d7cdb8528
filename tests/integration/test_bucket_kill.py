"""Processes that use a bucket are killed in the middle of their work. The ledger must be exact."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from pyqueue import Client
from tests.support.eventually import eventually
from tests.support.kills import few_or_many_kills, ledger_of


@few_or_many_kills
def test_killed_users_of_a_bucket_leave_an_exact_ledger(
    kills: int, url: str, tmp_path: Path
) -> None:
    ledger = ledger_of("tests.integration.bucket_kills", url, kills, tmp_path / "ledger")
    with Client(url) as client:
        queues = [client.queue(each, kind="bucket", max_tries=None) for each in ("jobs", "further")]
        for queue in queues:
            eventually(lambda: queue.counts().reserved == 0, "the leases of the killed lapse")  # noqa: B023
        rest: Counter[str] = Counter()

        def drained() -> bool:
            """Consume what is there: windows of packs come one after the other."""
            for queue in queues:
                while held := queue.reserve_many(10_000, timeout=0):
                    rest.update(each.payload for each in held)
                    queue.commit(*held)
            handed = client.database["pyqueue"].count_documents({"handed.0": {"$exists": True}})
            return sum(queue.counts().total for queue in queues) == 0 and not handed

        eventually(drained, "everything is drained")
        assert [queue.next_when() for queue in queues] == [None, None]
        dead = [
            each
            for name in ("jobs.dead", "further.dead")
            for each in client.queue(name).pop_many(100_000, timeout=0)
        ]
        moved = client.queue("moved").pop_many(100_000, timeout=0)
        results = {each.id: each.payload for each in client.queue("results").peek(100_000)}
        assert results
        assert all(id == payload for id, payload in results.items())
    ends = rest + Counter(each.payload for each in (*dead, *moved)) + ledger["commit"]
    assert max(ends.values()) == 1, "finished twice"
    assert set(ledger["bury"]) <= {each.payload for each in dead}
    assert set(ledger["pushed"]) - set(ends) <= set(ledger["begin-commit"]), "lost"
    assert ledger["commit"].total() > kills, "it did no work"
