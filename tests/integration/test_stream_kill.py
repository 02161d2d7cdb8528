"""Processes that append to a stream and consume it are killed in the middle of their work.

The ledger must be exact: positions are contiguous, nothing that was acknowledged is missing, and
nothing is finished twice.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from pyqueue import Client
from tests.support.kills import LEASE_S, few_or_many_kills, ledger_of


@few_or_many_kills
def test_killed_processes_leave_an_exact_ledger(kills: int, url: str, tmp_path: Path) -> None:
    ledger = ledger_of("tests.integration.stream_kills", url, kills, tmp_path / "ledger")
    with Client(url) as client:
        log = client.stream("log")
        contents: dict[int, str] = {}
        while page := log.read(after=len(contents) - 1 if contents else None, limit=50_000):
            contents |= {each.position: each.payload for each in page}
        assert list(contents) == list(range(len(contents))), "contiguous"
        assert max(Counter(contents.values()).values()) == 1, "stored twice"
        for payload, position in ledger.lines("appended"):
            assert contents[int(position)] == payload, "acknowledged, and missing"

        group = log.consumer("g", max_tries=None)
        delivered: list[int] = []
        while held := group.reserve_many(5000, timeout=2 * LEASE_S):
            delivered += [each.position for each in held]
            group.commit(*held)
        dead = [
            each.dead["position"] for each in client.queue("log.g.dead").peek(100_000) if each.dead
        ]
        hidden = client.database["pyqueue"].count_documents({"q": {"$regex": "^~handover"}})
    assert hidden <= kills * 3, "only copies that no burial decided on"
    committed, begun = ({*map(int, ledger[what])} for what in ("commit", "begin-commit"))
    assert max(ledger["commit"].values()) == 1, "finished twice"
    ends = Counter(delivered) + Counter(dead) + Counter(committed)
    assert max(ends.values()) == 1, "finished twice"
    assert {*map(int, ledger["bury"])} <= set(dead)
    assert set(contents) - set(ends) <= begun, "lost"
    assert len(committed) > kills, "it did no work"
