"""Processes that make several messages of each are killed in the middle of it.

Each message has become its parts, each of them once, or it is still there.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from pyqueue import Client
from tests.integration.handover_kills import OUTPUTS, stage
from tests.support.kills import few_or_many_kills, ledger_of, recover_all


@few_or_many_kills
def test_killed_processes_make_each_part_once(kills: int, url: str, tmp_path: Path) -> None:
    messages = 40 * kills
    with Client(url) as client:
        queue = client.queue("in", max_tries=None)
        queue.push_many(range(messages))
        ledger_of("tests.integration.handover_kills", url, kills, tmp_path / "ledger")
        collection = client.database["pyqueue"]
        ended = collection.count_documents({"ended": {"$exists": True}})
        left = queue.counts().total
        recover_all(client, "in")  # otherwise the stage waits for its next pass
        stage(client).run(until_empty=True, handle_signals=False)
        parts = Counter(
            tuple(each["payload"])
            for each in collection.find(
                {"q": {"$in": ["parts-0", "parts-1"]}, "payload": {"$type": 4}}
            )
        )
        hidden = collection.count_documents({"q": "~handover:in"})
    print(f"{kills} kills: {messages - left} of {messages} messages were done, {ended} half done")
    assert parts == Counter((number, part) for number in range(messages) for part in range(OUTPUTS))
    # On a slow machine, a few processes may be killed before they do any work.
    assert left < messages or kills < 100, "no process did any work"
    assert hidden <= kills * 4 * OUTPUTS, "only copies that no process decided on"
