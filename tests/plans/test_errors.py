"""The mapping of driver errors: each becomes a pyqueue error that names the remedy. No database."""

from __future__ import annotations

import pytest
from bson.errors import InvalidBSON, InvalidDocument
from pymongo import errors

from pyqueue import (
    Client,
    ConfigurationError,
    DuplicateKey,
    InvalidMessage,
    QueueClosed,
    QueueError,
    Unavailable,
)
from pyqueue.backends.scan import Scanned
from pyqueue.errors import Disconnected, MissingIndex, NotPermitted, TimedOut, first_ten
from pyqueue.requests import Find, Insert
from pyqueue.runtime.blocking_adapter import BlockingAdapter
from pyqueue.runtime.connecting import runner_of
from pyqueue.runtime.server_errors import translated, write_failures
from pyqueue.runtime.thread_pool import DaemonThreadPool
from tests.plans.runner import NOW


def failure(code: int, text: str = "it said so") -> errors.OperationFailure:
    """Return an error as a server raises it."""
    return errors.OperationFailure(text, code)


@pytest.mark.parametrize(
    ("error", "meant", "says"),
    [
        (errors.AutoReconnect("gone"), Disconnected, "did not answer: gone"),
        (
            errors.ServerSelectionTimeoutError("none, Timeout: 5s, Topology: all of it"),
            Disconnected,
            "none$",
        ),
        (errors.ConfigurationError("Sessions are not supported by it"), Disconnected, "Sessions"),
        (errors.NetworkTimeout("late"), TimedOut, "late"),
        (errors.ExecutionTimeout("late", 50), TimedOut, "late"),
        (errors.WriteError("late", 50), TimedOut, "late"),
        (
            errors.BulkWriteError({"writeConcernErrors": ["w"], "writeErrors": [{"code": 50}]}),
            TimedOut,
            "may not be durable",
        ),
        (errors.WriteConcernError("lag", 50), Unavailable, "lag"),
        (errors.WTimeoutError("no majority", 64), Unavailable, "no majority"),
        (errors.WriteConcernError("stepped down", 189), Unavailable, "stepped down"),
        (failure(11600, "interrupted at shutdown"), Disconnected, "interrupted"),
        (errors.BulkWriteError({"writeConcernErrors": ["w"]}), Unavailable, "may not be durable"),
        (errors.DuplicateKeyError("E11000", 11000), DuplicateKey, "taken"),
        (InvalidBSON("bad"), InvalidMessage, "cannot be read: bad"),
        (errors.DocumentTooLarge("16 MB"), InvalidMessage, "payload: 16 MB"),
        (InvalidDocument("cannot encode"), InvalidMessage, "cannot encode"),
        (OverflowError("8 bytes"), InvalidMessage, "8 bytes"),
        (failure(10334, "BSONObj size"), InvalidMessage, "larger than the server allows"),
        (
            failure(1, "Resulting document after update is larger than 16777216"),
            InvalidMessage,
            "larger than",
        ),
        (
            errors.WriteError("cannot increment", 14),
            InvalidMessage,
            r"the server rejected it \(cannot increment",
        ),
        (errors.InvalidOperation("Cannot use MongoClient after close"), QueueClosed, "was closed"),
        (errors.InvalidOperation("no such thing"), QueueError, "^no such thing$"),
        (errors.ConfigurationError("a bad option"), ConfigurationError, "target: a bad option"),
        (failure(13, "no"), NotPermitted, "not permitted"),
        (failure(8000, "no"), NotPermitted, "not permitted"),
        (failure(1, "not authorized on db"), NotPermitted, "not permitted"),
        (failure(18), ConfigurationError, "user name or the password"),
        (failure(85), ConfigurationError, "different options .*drop it"),
        (failure(86), ConfigurationError, "different options .*drop it"),
        (failure(20), ConfigurationError, "transactions need a replica set"),
        (
            failure(263, "Transaction numbers are only allowed on"),
            ConfigurationError,
            "transactions need a replica set",
        ),
        (
            failure(
                2, "planner returned error: hint provided does not correspond to an existing index"
            ),
            MissingIndex,
            "hint",
        ),
        # The text may quote a payload: the code decides.
        (
            errors.WriteError("The field 'payload.hint' must be an array", 2),
            InvalidMessage,
            "the server rejected it",
        ),
        (failure(14, "the field 'hint' of non-numeric type"), InvalidMessage, "rejected it"),
        (errors.WriteError("the field 'too large' of type", 14), InvalidMessage, "rejected it"),
        (errors.WriteError("the field 'not authorized' of", 14), InvalidMessage, "rejected it"),
        (errors.WriteError("'Transaction numbers' of type", 14), InvalidMessage, "rejected it"),
        (failure(59, "something else"), QueueError, "^something else"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_driver_error_becomes_a_pyqueue_error(
    error: Exception, meant: type[QueueError], says: str
) -> None:
    answer = translated(error)
    assert type(answer) is meant
    with pytest.raises(QueueError, match=says):
        raise answer


@pytest.mark.parametrize("error", [ValueError("mine"), QueueError("as it is")])
def test_error_outside_the_driver_is_unchanged(error: Exception) -> None:
    assert translated(error) is error


def test_write_without_majority_says_nothing_of_documents() -> None:
    error = errors.BulkWriteError(
        {"writeConcernErrors": ["late"], "writeErrors": [{"index": 0, "code": 11000}]}
    )
    assert write_failures(error) is None


def test_not_primary_errors_are_unknown_and_refresh_the_clock() -> None:
    with Client("memory:") as client:
        driver = runner_of(client).open()
        before = driver.clock._taken
        error = errors.BulkWriteError(
            {"writeErrors": [{"index": 1, "code": 11602, "errmsg": "interrupted"}]}
        )
        (failure,) = driver._failed(Insert([]), error)
        assert (failure.place, failure.field) == (1, None)
        assert isinstance(failure.error, Unavailable)
        assert driver.clock._taken < before


def test_unavailable_server_makes_every_queue_rescan() -> None:
    """Claims may be undone, and delayed pushes arrive where scans have been."""
    with Client("memory:") as client:
        driver = runner_of(client).open()
        threads = DaemonThreadPool()
        adapted = BlockingAdapter(driver, threads)
        scans = [each.waiters(name).scan for each in (driver, adapted) for name in ("a", "b")]
        assert len({id(scan) for scan in scans}) == 4

        def rescans() -> list[bool]:
            return [scan.rescan_at is None for scan in scans]

        def scanned() -> None:
            for scan in scans:
                scan.scanned(Scanned(None, NOW, NOW, None, True), 15)
            assert not any(rescans())

        scanned()
        with pytest.raises(InvalidMessage):
            driver._failed(Find({}), InvalidDocument("no"))
        assert not any(rescans())
        with pytest.raises(Unavailable):
            driver._failed(Find({}), errors.AutoReconnect("gone"))
        assert all(rescans())
        adapted.close_waiters()
        scanned()
        with pytest.raises(Unavailable):
            driver._failed(Find({}), errors.AutoReconnect("gone"))
        assert rescans() == [True, True, False, False]


def test_long_list_of_ids_is_cut_visibly() -> None:
    assert first_ten(["a", 2]) == "['a', 2]"
    assert first_ten(range(10)) == "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]"
    assert first_ten(range(12)) == "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ...]"
