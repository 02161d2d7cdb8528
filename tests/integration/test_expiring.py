"""Expiring messages on a server: the index, and the pass that ends messages without a claim."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from pyqueue import Client
from pyqueue.backends.recovering import recover_all
from pyqueue.runtime.connecting import runner_of


def test_pass_ends_messages_by_their_index(client: Client) -> None:
    queue = client.queue("codes", history=60)
    ids = [queue.push(n, expires=60) for n in range(3)]
    queue.push("for good")
    collection = client.database["pyqueue"]
    index = collection.index_information()["dies"]
    assert index["expireAfterSeconds"] == 86400, "a day"
    assert index["partialFilterExpression"] == {"dies": {"$exists": True}, "tries": 0}
    now = datetime.now(UTC)
    past = {"$set": {"dies": now - timedelta(seconds=1)}}
    collection.update_many({"_id": {"$in": ids[:2]}}, past)
    found = collection.find({"dies": {"$lte": now}, "tries": 0}).hint("dies").explain()
    assert found["executionStats"]["totalDocsExamined"] == 2
    queue.pause()
    runner_of(client).run(recover_all())
    assert [each.outcome for each in queue.history()] == ["expired"] * 2
    queue.resume()
    assert {each.payload for each in queue.reserve_many(9, timeout=0)} == {2, "for good"}
    assert "dies" not in (collection.find_one({"_id": ids[2]}) or {})
