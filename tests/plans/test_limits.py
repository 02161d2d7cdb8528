"""Limits of queues: their values, their stored form, and how the record of a queue keeps them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from pyqueue import Client, ConfigurationError, Limit
from pyqueue.limits import FollowedLimit, limit_or_none, stored_limit
from tests.plans.runner import record_of

# ---- values

NAN, INFINITY = float("nan"), float("inf")
WRONG_NAMES = ("", "a.b", "$a", "a\0", "\ud800")


@pytest.mark.parametrize(
    ("given", "argument"),
    [
        *(({}, "limit"), ({"period": 60}, "limit")),
        *(({"concurrency": each}, "concurrency") for each in (0, 1.5, True, 10_001)),
        *(({"rate": each}, "rate") for each in (0, -1, NAN, INFINITY, 10**400, "5", True, 1e-12)),
        *(
            ({"rate": 1, "period": each}, "period")
            for each in (0, timedelta(0), -1, "1", 10**400, NAN)
        ),
        *(({"rate": 1, "burst": each}, "burst") for each in (0, 2.0)),
        *(({"concurrency": 1, each: 2}, each) for each in ("burst", "period")),
        *(
            ({"concurrency": 1, "per": each}, "per")
            for each in ("tenant", 5, *(f"headers.{name}" for name in WRONG_NAMES))
        ),
    ],
)
def test_wrong_limit_is_refused(given: dict[str, Any], argument: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^{argument}: .*(set|use|expected)"):
        Limit(**given)


@pytest.mark.parametrize(
    "limit",
    [
        Limit(concurrency=10),
        Limit(rate=0.5, period=timedelta(minutes=1), burst=3),
        Limit(concurrency=1, per="headers.tenant"),
        Limit(rate=1, per="headers.tenant"),
        Limit(concurrency=1, rate=1e9),
    ],
)
def test_stored_limit_is_read_back(limit: Limit) -> None:
    assert stored_limit(limit.stored()).stored() == limit.stored()
    assert eval(repr(limit), {"Limit": Limit}).stored() == limit.stored()


def test_limit_has_derived_values() -> None:
    limit = Limit(rate=5, period=timedelta(minutes=1))
    assert (limit.period_s, limit.token_s, limit.capacity, limit.header) == (60, 12, 1, None)
    assert limit.stored() == {"rate": 5, "period": 60}
    assert Limit(concurrency=3, per="headers.tenant").header == "tenant"
    assert Limit(concurrency=3).stored() == {"concurrency": 3}


@pytest.mark.parametrize(
    "stored",
    [
        *(5, [], "10", {}, {"concurrency": "10"}, {"rate": 1, "period": None}),
        *({"concurrency": 1, "weight": 2}, {"concurrency": 1, "per": "payload.tenant"}),
    ],
)
def test_unreadable_limit_says_so(stored: object) -> None:
    """A newer release, or a person, wrote it."""
    with pytest.raises(ConfigurationError, match=r"^limit: .*queue 'a'.*reshape"):
        limit_or_none("a", {"limit": stored})


@pytest.mark.parametrize("shape", [None, {}, 5, {"limit": None}, {"strict": True}])
def test_shape_without_a_limit_has_none(shape: object) -> None:
    assert limit_or_none("a", shape) is None


# ---- followed by consumers


def seen(followed: FollowedLimit) -> tuple[Limit | None, bool]:
    """Return the limit, and whether it can be read."""
    return followed.limit, followed.unreadable is None


def test_unreadable_limit_is_raised_at_first_and_logged_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wrong = {"limit": {"weight": 1}}
    followed = FollowedLimit()
    for _ in range(2):
        with pytest.raises(ConfigurationError):
            followed.follow("a", wrong)
    followed.follow("a", {"limit": {"concurrency": 2}})
    assert seen(followed) == (Limit(concurrency=2), True)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            followed.follow("a", wrong)
    assert seen(followed) == (Limit(concurrency=2), False)
    assert len(caplog.records) == 1
    followed.follow("a", {})
    assert seen(followed) == (None, True)


def test_consumer_receives_nothing_while_the_limit_is_unreadable(client: Client) -> None:
    queue = client.queue("a")
    queue.push_many([1, 2])
    assert queue.pop(0) is not None
    stored = client.database["pyqueue"]
    stored.update_one({"_id": "~queue:a"}, {"$set": {"shape": {"limit": {"weight": 1}}}})
    queue.notify()
    assert queue.pop(0) is None
    with Client(stored.database) as other, pytest.raises(ConfigurationError, match="weight"):
        other.queue("a").pop(0)
    client.reshape("a", limit=False)
    assert queue.pop(0) is not None


def test_limit_holds_after_its_record_is_gone() -> None:
    """A fail-over may undo the creation of a record that this process has read."""
    with Client("memory:") as client:
        queue = client.queue("a", limit=Limit(concurrency=1))
        queue.push_many([1, 2])
        assert queue.reserve(0) is not None
        assert client.database["pyqueue"].delete_one({"_id": "~queue:a"}).deleted_count == 1
        scan = client._connection.open().waiters("a").scan
        scan.flag_read = scan.limit.blocked_until = None
        assert queue.reserve(0) is None
        assert record_of(client)["shape"] == {"limit": {"concurrency": 1}}


# ---- the record


def test_limit_is_stored_in_the_record(client: Client) -> None:
    limit = Limit(rate=10, period=60)
    client.queue("a", limit=limit).push(1)
    assert record_of(client)["shape"] == {"limit": {"rate": 10, "period": 60}}
    assert record_of(client)["v"] == 2
    client.queue("a", limit=Limit(rate=10.0, period=timedelta(minutes=1))).push(2)
    client.queue("a").push(3)
    with pytest.raises(ConfigurationError, match=r"limit=Limit\(rate=10, .*limit=Limit\(rate=11"):
        client.queue("a", limit=Limit(rate=11, period=60)).push(4)


def test_reshape_sets_and_removes_a_limit(client: Client) -> None:
    client.queue("a").push(1)
    client.reshape("a", limit=Limit(concurrency=2))
    assert (record_of(client)["shape"], record_of(client)["v"]) == (
        {"limit": {"concurrency": 2}},
        2,
    )
    client.reshape("a", limit=False)
    assert record_of(client)["shape"] == {}
    assert client.queue("a").pop(0) is not None


@pytest.mark.parametrize("wrong", [5, True, {"rate": 1}, "rate=1"])
def test_limit_of_another_type_is_refused(client: Client, wrong: Any) -> None:
    client.queue("a").push(1)
    calls: list[Callable[[], object]] = [
        lambda: client.queue("a", limit=wrong),
        lambda: client.reshape("a", limit=wrong),
    ]
    for call in calls:
        with pytest.raises(ConfigurationError, match="limit: expected a Limit"):
            call()


def test_queue_cannot_be_made_with_a_removed_limit(client: Client) -> None:
    wrong: Any = False
    with pytest.raises(ConfigurationError, match="limit: "):
        client.queue("a", limit=wrong)


def test_limit_that_a_kind_does_not_offer_is_refused(client: Client) -> None:
    with pytest.raises(ConfigurationError, match=r"limit\.concurrency: .*'bucket'.*rate"):
        client.queue("a", kind="bucket", limit=Limit(concurrency=2))
    with pytest.raises(ConfigurationError, match=r"limit\.per: .*'ordered'.*leave it out"):
        client.queue("o", kind="ordered", limit=Limit(concurrency=2, per="headers.x"))
    client.queue("a", kind="bucket").push(1)
    for kind in ("bucket", "ordered"):
        with pytest.raises(ConfigurationError, match=rf"limit\.per: .*'{kind}'.*'standard'"):
            client.queue(kind, kind=kind, limit=Limit(rate=1, per="headers.x"))
    for wrong in (Limit(concurrency=2), Limit(rate=1, per="headers.x")):
        with pytest.raises(ConfigurationError, match=r"limit\..*'bucket'"):
            client.reshape("a", limit=wrong)
    client.stream("s").append(1)
    for wrong in (Limit(concurrency=2), Limit(rate=1, per="headers.x")):
        calls: list[Callable[[], object]] = [
            lambda wrong=wrong: client.reshape("s", limit=wrong),  # type: ignore[misc]
            lambda wrong=wrong: client.stream("t", limit=wrong),  # type: ignore[misc]
        ]
        for call in calls:
            with pytest.raises(ConfigurationError, match=r"limit\..*stream.* only rate"):
                call()


def test_call_that_cannot_obey_a_limit_is_refused(client: Client) -> None:
    queue = client.queue("a", limit=Limit(concurrency=2))
    queue.push(1)
    calls: list[Callable[[], object]] = [
        lambda: queue.pop(0),
        lambda: queue.pop_many(5, timeout=0),
        lambda: queue.claim("g", limit=5).__enter__(),
    ]
    for call in calls:
        with pytest.raises(ConfigurationError, match="limit on concurrency"):
            call()
