"""A kind of queue with records and claims that only its module knows: the core needs no change.

A queue of the kind ``credited`` hands out messages as long as its credit lasts. The credit is a
document of the queue. A claim takes one credit for each message, and its end puts it back.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import pytest

from pyqueue import Client, Queue
from pyqueue.backends import kind as kinds
from pyqueue.backends.claim_terms import Scan
from pyqueue.backends.claiming import Taken, claim, take_first
from pyqueue.backends.standard import Standard
from pyqueue.requests import Document, Find, FindAndModify, Insert, Plan, ServerTime, Signal, Update

CREDIT = 2


def credit_id(queue: str) -> str:
    return f"~credit:{queue}"


class Credited(Standard):
    """Hands out one message for each unit of credit."""

    name = "credited"
    capabilities = Standard.capabilities - {"pop", "claim", "concurrency", "rate", "per"}
    bare_pop = False

    def claim(self, scan: Scan) -> Plan[tuple[list[Document], bool]]:
        """Claim the first messages, up to the credit."""
        return claim(scan, _take)

    def ended(
        self, queue: str, ended: Sequence[Mapping[str, Any]], session: object = None
    ) -> Plan[None]:
        """Put back the credit of messages that are no longer held."""
        yield from Update(
            {"_id": credit_id(queue)}, {"$inc": {"left": len(ended)}}, session=session
        )
        yield from Signal(queue, (yield from ServerTime()), session)


def _take(scan: Scan) -> Plan[Taken | None]:
    """Claim messages up to the credit."""
    account = {"_id": credit_id(scan.terms.queue)}
    if not (yield from Find(account, limit=1)):
        yield from Insert([{**account, "left": CREDIT}])
    granted = 0
    while granted < scan.wanted:
        one = {**account, "left": {"$gt": 0}}
        if (yield from FindAndModify(one, {"$inc": {"left": -1}})) is None:
            break
        granted += 1
    scan.state.limit.blocked_until = None if granted else scan.now  # until a claim ends
    scan.wanted, scan.room.closed = granted, True
    taken = (yield from take_first(scan)) if granted else Taken([])
    used = len(taken.documents) if taken is not None else 0
    yield from Update(account, {"$inc": {"left": granted - used}})
    return taken


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Iterator[Queue[Any]]:
    monkeypatch.setitem(kinds._kinds, "credited", Credited())
    with Client("memory:") as client:
        kind: Any = "credited"
        yield client.queue("a", kind=kind, max_tries=1)


def test_claims_keep_to_records_of_their_kind(queue: Queue[Any]) -> None:
    queue.push_many(range(5))
    first, second = queue.reserve_many(10, timeout=0)
    assert [first.payload, second.payload] == [0, 1]
    assert queue.reserve(timeout=0) is None
    queue.commit(first)
    third = queue.reserve(timeout=0)
    assert third is not None
    assert third.payload == 2
    queue.rollback(third)  # its only try
    queue.bury(second)
    rest = [each for _ in range(3) for each in queue.reserve_many(1, timeout=0)]
    assert [each.payload for each in rest] == [3, 4]
    queue.commit(*rest)
    assert queue.counts().total == 0


# ---- a standard queue enters no module of a kind or feature

APART = ("priority", "ordered", "bucket", "streams", "claims", "bulk", "limits")


def entered(call: Any) -> list[str]:
    """Return the functions of kinds and features that a call enters."""
    found: list[str] = []

    def watch(frame: FrameType, event: str, _: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and any(f"/backends/{each}/" in path for each in APART):
            found.append(f"{path}:{frame.f_code.co_qualname}")

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def test_standard_queue_enters_no_module_of_a_kind() -> None:
    with Client("memory:") as client:
        queue = client.queue("a", kind="standard")
        queue.push(0)
        queue.commit(next(iter(queue.reserve_many(1, timeout=0))))  # it has read the record now
        assert entered(lambda: queue.push_many([1, 2, 3])) == []
        held: list[Any] = []
        assert entered(lambda: held.extend(queue.reserve_many(2, timeout=0))) == []
        assert entered(lambda: held.append(queue.reserve(timeout=0))) == []
        for end in (queue.commit, queue.rollback, queue.release):
            assert entered(lambda end=end: end(held.pop())) == []
        ordered = client.queue("b", kind="ordered")
        assert entered(lambda: ordered.push(1, group="g")) != []
