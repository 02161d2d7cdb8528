"""Retry rules: after which exceptions of its handler a message is tried again."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from pyqueue import (
    Backoff,
    BatchFailed,
    Client,
    ConfigurationError,
    LeaseLost,
    RetryLater,
    Unavailable,
    Worker,
)
from pyqueue.pipeline.failures import failure_rules
from tests.pipeline.place import Place

NOW = Backoff(base=0)
DEAD, RETRIED = {"in": 1, "dead": 1}, {"in": 2, "out": 1, "retried": 1}


@pytest.mark.parametrize(
    ("error", "rules", "counters"),
    [
        (ValueError(), {"reject_on": ValueError}, DEAD),
        (UnicodeError(), {"reject_on": (KeyError, ValueError)}, DEAD),
        (OSError(), {"reject_on": (KeyError, ValueError)}, RETRIED),
        (OSError(), {"retry_on": OSError}, RETRIED),
        (ConnectionError(), {"retry_on": [OSError]}, RETRIED),
        (ValueError(), {"retry_on": OSError}, DEAD),
        (FileNotFoundError(), {"retry_on": OSError, "reject_on": FileNotFoundError}, DEAD),
        (ConnectionError(), {"retry_on": OSError, "reject_on": FileNotFoundError}, RETRIED),
        (ConnectionError(), {"retry_on": ConnectionError, "reject_on": OSError}, RETRIED),
        (RetryLater(0), {"reject_on": Exception}, RETRIED),
        (Unavailable("away"), {"retry_on": OSError}, RETRIED),
    ],
    ids=lambda value: repr(value) if isinstance(value, Exception) else None,
)
@pytest.mark.parametrize("returned", [False, True])
def test_class_of_an_exception_decides(
    memory: Place,
    error: Exception,
    rules: dict[str, Any],
    counters: dict[str, int],
    returned: bool,
) -> None:
    def fail_once(payload: Any, delivery: Any) -> Any:
        if delivery.message.tries == 1 and not returned:
            raise error
        return error if delivery.message.tries == 1 else None

    memory.queue("in").push("x")
    handler = memory.handler(fail_once)
    assert memory.run_worker(handler, backoff=NOW, **rules) == counters
    dead = memory.queue("in.dead").pop(0)
    assert (dead is not None) == (counters is DEAD)
    if dead is not None:
        assert dead.error is not None
        assert dead.error.type == type(error).__name__


@pytest.mark.parametrize(
    ("error", "rejected"),
    [
        (Unavailable("away"), True),
        (LeaseLost("lost"), False),
        (KeyboardInterrupt(), False),
        (ValueError(), True),
    ],
)
def test_error_of_the_server_may_be_named(error: BaseException, rejected: bool) -> None:
    rules = failure_rules("stop", OSError, Unavailable)
    assert rules.rejects(error) is rejected


def test_rules_hold_for_each_message_of_a_batch(memory: Place) -> None:
    def work(payloads: list[int]) -> None:
        failed: dict[int, Any] = {0: ValueError(), 1: OSError()}
        raise BatchFailed(failed if len(payloads) == 3 else {0: OSError()})

    memory.queue("in").push_many([1, 2, 3])
    counters = memory.run_worker(work, batch=3, reject_on=ValueError, max_tries=2, backoff=NOW)
    assert counters == {"in": 4, "out": 1, "dead": 2, "retried": 1}


def test_rejected_batch_is_tried_in_smaller_batches(memory: Place) -> None:
    """The exception does not say which message it means."""

    def work(payloads: list[int]) -> None:
        if 1 in payloads:
            raise ValueError

    memory.queue("in").push_many([1, 2])
    counters = memory.run_worker(work, batch=2, reject_on=ValueError, backoff=NOW)
    assert counters == {"in": 4, "out": 1, "dead": 1, "retried": 2}


def test_time_limit_is_tried_again_in_any_case(memory: Place) -> None:
    async def work(payload: Any, delivery: Any) -> None:
        if delivery.message.tries == 1:
            await anyio.sleep_forever()

    memory.queue("in").push("x")
    counters = memory.run_worker(work, time_limit=0.05, reject_on=Exception, backoff=NOW)
    assert counters == RETRIED


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"retry_on": "OSError"}, "retry_on: expected subclasses of Exception, found str"),
        ({"reject_on": ValueError()}, "reject_on: expected subclasses .*, found ValueError"),
        ({"reject_on": KeyboardInterrupt}, "found KeyboardInterrupt"),
        ({"retry_on": OSError, "reject_on": (OSError,)}, "retry_on, reject_on: OSError is in both"),
    ],
)
def test_rules_that_make_no_sense_are_refused(
    offline: Client, rules: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Worker(offline).on("in", print, **rules)
