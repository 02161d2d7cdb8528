"""Unused queues on a server: a pass finds them by an index."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from pyqueue import Client
from pyqueue.backends.recovering import recover_all
from pyqueue.runtime.connecting import runner_of


def test_pass_finds_unused_queues_by_an_index(client: Client) -> None:
    for name in ("one", "two", "used"):
        client.queue(name, auto_delete=60).push(1)
        client.queue(name).purge()
    collection = client.database["pyqueue"]
    now = datetime.now(UTC)
    past = now - timedelta(hours=1)
    unused = {"_id": {"$in": ["~used:one", "~used:two"]}}
    collection.update_many(unused, {"$set": {"used": past, "when": past}})
    due = {"q": "~used", "when": {"$lte": now}}
    found = collection.find(due).sort([("when", 1), ("_id", 1)]).hint("hot").explain()
    assert found["executionStats"]["totalDocsExamined"] == 2
    runner_of(client).run(recover_all())
    assert [each.name for each in client.queues()] == ["used"]
    assert collection.count_documents({"q": "~used"}) == 1
