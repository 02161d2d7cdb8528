"""The log of failed handlers: a traceback once a minute for each kind of failure."""

from __future__ import annotations

import pytest

from pyqueue import Backoff
from pyqueue.pipeline import failure_log
from pyqueue.pipeline.failure_log import MAX_FINGERPRINTS, FailureLog
from tests.pipeline.place import Place


def raised(text: str, kind: type[Exception] = ValueError) -> Exception:
    try:
        raise kind(text)
    except Exception as error:
        return error


def traced(caplog: pytest.LogCaptureFixture) -> list[bool]:
    return [each.exc_info is not None for each in caplog.records]


def test_failing_batch_stage_logs_one_traceback(
    memory: Place, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(batch: list[int]) -> None:
        raise ValueError(f"no table\nfor {batch}")

    memory.queue("in").push_many(range(12))
    options = {"batch": 4, "max_tries": 2, "backoff": Backoff(base=0, jitter=0)}
    memory.run_stage(fail, stage="sink", to=(), **options)
    assert traced(caplog).count(True) == 1
    lines = [each.getMessage() for each in caplog.records if not each.exc_info]
    assert len(lines) >= 2
    assert all(": ValueError: no table for [" in line and "\n" not in line for line in lines)


def test_each_kind_of_failure_shows_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    failures = FailureLog()
    for error in (raised("a"), raised("b"), raised("c", KeyError)):
        failures.log(error, "message %d failed", 1)
    assert traced(caplog) == [True, False, True]
    assert caplog.records[1].getMessage() == "message 1 failed: ValueError: b"


def test_traceback_is_shown_again_after_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = FailureLog()
    for now in (0.0, 59.0, 60.0, 61.0):
        monkeypatch.setattr(failure_log, "monotonic", lambda now=now: now)
        failures.log(raised("a"), "failed")
    assert traced(caplog) == [True, False, True, False]


def test_failure_log_remembers_few_fingerprints() -> None:
    failures = FailureLog()
    for number in range(2 * MAX_FINGERPRINTS):
        failures.log(raised("a", type(f"Error{number}", (Exception,), {})), "failed")
    assert len(failures._silent_until) == MAX_FINGERPRINTS
