"""Processes that append to a stream and consume it are killed in the middle of their work.

The ledger must be exact: positions are contiguous, nothing that was acknowledged is missing, and
nothing is finished twice.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from pyqueue import Client
from tests.integration import stream_kills
from tests.support.processes import program


class Ledger:
    """What the killed processes noted."""

    def __init__(self, path: Path) -> None:
        self.appended: dict[int, str] = {}
        self.ended: dict[str, Counter[int]] = {}
        for line in path.read_text().splitlines():
            what, *words = line.split()
            if what == "appended":
                self.appended[int(words[1])] = words[0]
            elif what != "started":
                self.ended.setdefault(what, Counter()).update(map(int, words))

    def __getitem__(self, what: str) -> Counter[int]:
        return self.ended.get(what, Counter())


@pytest.mark.parametrize(
    "kills", [pytest.param(5, id="some"), pytest.param(100, id="all", marks=pytest.mark.slow)]
)
def test_killed_processes_leave_an_exact_ledger(kills: int, url: str, tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    arguments = (url, str(kills), "7", str(path))
    with program("-m", "tests.integration.stream_kills", *arguments) as killing:
        output, _ = killing.communicate(timeout=280)
        assert killing.returncode == 0, output
    ledger = Ledger(path)
    with Client(url) as client:
        log = client.stream("log")
        contents: dict[int, str] = {}
        while page := log.read(after=len(contents) - 1 if contents else None, limit=50_000):
            contents |= {each.position: each.payload for each in page}
        assert list(contents) == list(range(len(contents))), "contiguous"
        assert max(Counter(contents.values()).values()) == 1, "stored twice"
        for position, payload in ledger.appended.items():
            assert contents[position] == payload, "acknowledged, and missing"

        group = log.consumer("g", max_tries=None)
        delivered: list[int] = []
        while held := group.reserve_many(5000, timeout=2 * stream_kills.LEASE_S):
            delivered += [each.position for each in held]
            group.commit(*held)
        dead = [
            each.dead["position"] for each in client.queue("log.g.dead").peek(100_000) if each.dead
        ]
        hidden = client.database["pyqueue"].count_documents({"q": {"$regex": "^~handover"}})
    assert hidden <= kills * 3, "only copies that no burial decided on"
    ends = Counter(delivered) + Counter(dead) + ledger["commit"]
    assert max(ends.values()) == 1, "finished twice"
    assert set(ledger["bury"]) <= set(dead)
    unknown = set(ledger["begin-commit"])
    assert set(contents) - set(ends) <= unknown, "lost"
    assert len(ledger["commit"]) > kills, "it did no work"
