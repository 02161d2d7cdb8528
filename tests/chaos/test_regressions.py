"""Bugs that the fault suite found, each as a small test."""

from __future__ import annotations

from typing import Any

import pytest
from pymongo.errors import BulkWriteError, WriteError

from pyqueue import Client, LeaseLost, Unavailable
from pyqueue.requests import Delete, Find
from pyqueue.runtime.connecting import runner_of
from pyqueue.runtime.server_errors import translated, write_failures
from tests.chaos.conftest import Server


def test_batch_pop_returns_nothing_if_its_claim_was_undone(
    client: Client, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim waits only for the primary, so a fail-over can undo it; then another client pops."""
    queue = client.queue("jobs")
    ids = queue.push_many(range(4))
    elsewhere: list[Any] = []
    driver = runner_of(client).open()
    send = type(driver)._send

    def undone_before(self: Any, request: Any) -> Any:
        if isinstance(request, Delete) and self is driver and not elsewhere:
            undo = {
                "$set": {"when": driver.clock.now()},
                "$unset": {"token": "", "owner": "", "reserved": ""},
            }
            client.database[client.namespace].update_many({"token": {"$exists": True}}, undo)
            with Client(url) as other:
                elsewhere.extend(other.queue("jobs").pop_many(4, timeout=5))
        return send(self, request)

    monkeypatch.setattr(type(driver), "_send", undone_before)
    here = queue.pop_many(4, timeout=0)
    assert [each.id for each in elsewhere] == ids
    assert [each.id for each in here] == []


@pytest.mark.parametrize(("command", "settle"), [("delete", "commit"), ("update", "release")])
def test_settle_interrupted_by_a_step_down_is_unavailable(
    server: Server, database: str, command: str, settle: str
) -> None:
    """The write ran on a primary that stepped down. It is unknown whether the write stays."""
    failure = {
        "code": 189,
        "codeName": "PrimarySteppedDown",
        "errmsg": "stepped down while waiting for replication",
    }
    # The driver waits for the next heartbeat before it finds the primary again.
    with Client(server.url(database) + "&heartbeatFrequencyMS=500") as client:
        queue = client.queue("jobs")
        queue.push_many(range(4))
        held = queue.reserve_many(4, timeout=0)
        server.fail(1, command, writeConcernError=failure)
        with pytest.raises(Unavailable) as unknown:
            getattr(queue, settle)(*held)
        assert server.has_failed()
        assert unknown.value.ids == [each.id for each in held]
        with pytest.raises(LeaseLost):
            getattr(queue, settle)(*held)


def test_moved_message_is_not_lost_if_claimed_elsewhere(
    client: Client, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of three was lost. While the batch searches for it, a moved one is claimed."""
    source, target = client.queue("source"), client.queue("target")
    source.push_many(range(3))
    held = source.reserve_many(3, timeout=0)
    client.database[client.namespace].update_one({"_id": held[0].id}, {"$set": {"token": "other"}})
    driver = runner_of(client).open()
    send = type(driver)._send

    def taken_on_before(self: Any, request: Any) -> Any:
        if (
            self is driver
            and isinstance(request, Find)
            and request.filter == {"_id": {"$in": [each.id for each in held]}}
        ):
            with Client(url) as other:
                assert other.queue("target").reserve(5) is not None
        return send(self, request)

    monkeypatch.setattr(type(driver), "_send", taken_on_before)
    with pytest.raises(LeaseLost) as refused:
        source.move(*held, to=target)
    assert [each.id for each in refused.value.lost] == [held[0].id]
    assert target.counts().total == 2


@pytest.mark.parametrize("code", [10107, 189, 11600, 11602, 91])
def test_election_write_errors_are_unavailable(code: int) -> None:
    """A step-down during a write of several documents appears as the error of one of them."""
    assert isinstance(translated(WriteError("Not primary while writing", code)), Unavailable)
    (fault,) = (
        write_failures(
            BulkWriteError({"writeErrors": [{"index": 0, "code": code, "errmsg": "Not primary"}]})
        )
        or []
    )
    assert isinstance(fault.error, Unavailable)
