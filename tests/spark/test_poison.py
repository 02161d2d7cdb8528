"""Messages that make a batch fail or its process die, and the other messages of the batch.

No test here needs Spark: a function stands in for it.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from typing import Any

import pytest

from pyqueue import Backoff, ConfigurationError
from pyqueue.spark import batches as module
from pyqueue.spark.outputs import Report
from tests.spark.fakes import (
    OUTPUTS,
    Crash,
    Flow,
    Frame,
    counts,
    meddled,
    no_session,
    numbers,
    outputs,
    passed,
)
from tests.support.samples import sampled

pytestmark = pytest.mark.usefixtures("faked")


def failing(*poison: int) -> Callable[[Frame], Frame]:
    """Return a transform that fails on these numbers."""

    def transform(frame: Frame) -> Frame:
        found = {*poison} & {*numbers(frame)}
        if found:
            raise ArithmeticError(f"cannot work on {sorted(found)}")
        return passed(frame)

    return transform


def total(reports: list[Report], name: str) -> int:
    return sum(getattr(each, name) for each in reports)


# ---- failing


@pytest.mark.parametrize(
    ("poison", "output"), sampled(product([(0,), (19,), (7, 8), (0, 5, 19)], OUTPUTS), few=4)
)
def test_failing_message_is_buried_and_the_rest_is_written(
    flow: Flow, output: str, poison: tuple[int, ...]
) -> None:
    flow.raw.push_many(range(20))
    reports = flow.work(failing(*poison), output=output, max_tries=3)
    others = sorted({*range(20)} - {*poison})
    assert flow.written() == others
    assert (reports[0].written, reports[0].failed) == (len(others), len(poison))
    assert total(reports, "written") == len(others)
    assert total(reports, "failed") == 3 * len(poison)
    assert total(reports, "lost") == total(reports, "dropped") == 0
    graves = flow.buried()
    assert sorted(graves) == sorted(poison)
    for number, grave in graves.items():
        assert grave.dead is not None
        dead = grave.dead["reason"], grave.dead["tries"], grave.dead["from"]
        assert dead == ("tries", 3, flow.source)
        assert grave.error is not None
        assert grave.error["type"] == "ArithmeticError"
        assert str(number) in grave.error["message"]
    assert flow.left() == []


def test_failing_message_backs_off(flow: Flow) -> None:
    flow.raw.push_many(range(4))
    report = flow.stage(failing(2), backoff=Backoff(base=600, jitter=0)).run_once(no_session)
    assert (report.claimed, report.written, report.failed) == (4, 3, 1)
    counts = flow.raw.counts()
    assert (counts.scheduled, counts.total) == (1, 1)


@outputs
def test_transform_that_always_fails_raises(flow: Flow, output: str) -> None:
    flow.raw.push_many(range(20))
    with pytest.raises(ArithmeticError, match="cannot work on"):
        flow.stage(failing(*range(20)), output=output).run_once(no_session)
    assert flow.written() == []
    messages = flow.raw.peek(100)
    assert len(messages) == 20
    for each in messages:
        assert each.state == "ready"
        assert each.tries == 1
        assert each.error is not None
        assert each.error["type"] == "ArithmeticError"


def test_failing_message_of_another_holder_is_left_alone(flow: Flow) -> None:
    flow.raw.push_many(range(4))

    def transform(frame: Frame) -> Frame:
        if numbers(frame) == [2]:
            flow.steal(2)
        return failing(2)(frame)

    report = flow.stage(transform, max_tries=1).run_once(no_session)
    assert (report.claimed, report.written) == (4, 3)
    (thiefs,) = flow.stored(flow.source)
    assert (thiefs["payload"], thiefs["token"], thiefs["tries"]) == (2, "thief", 1)
    assert "error" not in thiefs
    assert flow.buried() == {}


def test_single_failing_message_raises_nothing(flow: Flow) -> None:
    flow.raw.push_many([1])
    report = flow.stage(failing(1), max_tries=1).run_once(no_session)
    assert (report.claimed, report.failed) == (1, 1)
    assert [*flow.buried()] == [1]


@outputs
def test_more_failures_than_allowed_are_found_in_turns(
    flow: Flow, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    """A message that was not tried alone has not failed: its try does not count."""
    monkeypatch.setattr(module, "MAX_FAILURES", 5)
    poison = [*range(0, 44, 4)]
    flow.raw.push_many(range(44))
    stage_ = flow.stage(failing(*poison), output=output, max_tries=2)
    claimed = 1
    while claimed:
        with suppress(ArithmeticError):  # when only failing messages are left
            claimed = stage_.run_once(no_session).claimed
    assert sorted(flow.buried()) == poison
    assert flow.written() == sorted({*range(44)} - {*poison})
    assert all(
        grave.error and "cannot work on" in grave.error["message"]
        for grave in flow.buried().values()
    )


@pytest.mark.parametrize("error", [KeyboardInterrupt, ConfigurationError("a mistake")])
def test_interrupts_and_misuse_count_no_try(flow: Flow, error: Any) -> None:
    flow.raw.push_many(range(3))

    def transform(frame: Frame) -> Frame:
        raise error

    with pytest.raises((KeyboardInterrupt, ConfigurationError)):
        flow.stage(transform).run_once(no_session)
    flow.check_released(3)


# ---- keys and headers


def keyed(key: Callable[[Any], str | None]) -> Callable[[Frame], Frame]:
    """Return a transform that sets keys."""

    def transform(frame: Frame) -> Frame:
        rows = frame.rows()
        for row in rows:
            row["key"] = key(json.loads(row["payload"]))
        return frame.made_of(rows, "id", "payload", "key")

    return transform


def test_move_sets_keys(flow: Flow) -> None:
    flow.raw.push_many(range(3), keys=["a", None, "c"])
    flow.stage(keyed(lambda number: f"k{number}" if number else None)).run_once(no_session)
    assert {each.payload: each.key for each in flow.clean.peek()} == {0: None, 1: "k1", 2: "k2"}


def shown(flow: Flow) -> list[str]:
    """Return the payloads of the target as text, sorted."""
    return sorted(str(each.payload) for each in flow.clean.peek(100))


def test_move_to_a_taken_key_fails_that_message_only(flow: Flow) -> None:
    flow.clean.push("there", key="k3")
    flow.raw.push_many(range(8))
    reports = flow.work(keyed(lambda number: f"k{number}"), max_tries=2)
    assert counts(reports[0]) == (8, 7, 0, 1, 0)
    assert shown(flow) == [*"0124567", "there"]
    grave = flow.buried()[3]
    assert grave.error is not None
    assert "key" in grave.error["message"]


def test_transaction_leaves_out_rows_with_a_taken_key(flow: Flow) -> None:
    """As in a push, the message with the key stands for the new one."""
    flow.clean.push("there", key="k3")
    flow.raw.push_many(range(8))
    flow.stage(keyed(lambda number: f"k{number}"), output="transaction").run_once(no_session)
    assert shown(flow) == [*"0124567", "there"]
    assert flow.left() == []


def test_move_keeps_types_of_headers_and_payloads(flow: Flow) -> None:
    headers = {"text": "a", "whole": 5, "part": 0.5, "true": True, "quoted": '"a"'}
    payload: dict[str, object] = {"whole": 1, "part": 1.0, "none": None, "list": [1, [2, "3"]]}
    payload["text"] = '{"$oid": "no"}'
    flow.raw.push(payload, headers=headers, key="k")
    flow.stage(None).run_once(no_session)
    (message,) = flow.clean.peek()
    assert message.headers == headers
    assert {name: type(each) for name, each in message.headers.items()} == {
        n: type(v) for n, v in headers.items()
    }
    assert message.payload == payload
    assert type(message.payload["part"]) is float
    assert message.key == "k"


# ---- killing


def killing(meddler: Any, *killers: int) -> Callable[[Frame], Frame]:
    """Return a transform that ends the process on these numbers."""

    def transform(frame: Frame) -> Frame:
        if {*killers} & {*numbers(frame)}:
            meddler.die()
        return passed(frame)

    return transform


def restarted(flow: Flow, killers: tuple[int, ...], most: int = 60, **options: Any) -> int:
    """Run a stage in new processes until one survives; return how many died."""
    for deaths in range(most):
        with meddled(flow.client) as meddler, suppress(Crash):
            flow.work(killing(meddler, *killers), **options)
            return deaths
    raise AssertionError("every process died")


@pytest.mark.parametrize(
    ("place", "output"),
    sampled(
        product(
            [(0, 1), (0, 2), (1, 2), (0, 7), (3, 7), (6, 7), (0, 100), (37, 100), (99, 100)],
            OUTPUTS,
        ),
        few=6,
    ),
)
def test_killing_message_is_isolated_and_buried(
    flow: Flow, output: str, place: tuple[int, int]
) -> None:
    """No other message is buried, wherever the message is in its batch."""
    killer, count = place
    flow.raw.push_many(range(count))
    deaths = restarted(flow, (killer,), output=output, max_tries=3)
    assert sorted(flow.buried()) == [killer]
    assert flow.written() == sorted({*range(count)} - {killer})
    assert flow.left() == []
    assert 3 <= deaths <= 8
    grave = flow.buried()[killer]
    assert grave.dead is not None
    assert grave.dead["reason"] == "tries"
    assert grave.error is not None
    assert "process" in grave.error["message"]


def test_several_killing_messages_are_buried(flow: Flow) -> None:
    flow.raw.push_many(range(50))
    deaths = restarted(flow, (0, 20, 21, 49), max_tries=2)
    assert sorted(flow.buried()) == [0, 20, 21, 49]
    assert len(flow.written()) == 46
    assert deaths <= 40


def test_killing_message_without_max_tries_blocks_nothing(flow: Flow) -> None:
    flow.raw.push_many(range(20))
    for _ in range(8):
        with meddled(flow.client) as meddler, suppress(Crash):
            flow.work(killing(meddler, 5), max_tries=None)
    assert flow.written() == sorted({*range(20)} - {5})
    assert flow.left() == [5]
    assert flow.buried() == {}


@pytest.mark.parametrize("seed", sampled(range(1, 6), few=2))
def test_random_deaths_bury_nothing(flow: Flow, seed: int) -> None:
    """Machines may be taken away, more often than a message may be tried."""
    rng = random.Random(seed)
    flow.raw.push_many(range(30))
    for _ in range(6):
        # A message that is alone when the last of many deaths meets it is buried, and rightly so.
        with meddled(flow.client, rng.randint(3, 18)) as meddler, suppress(Crash):
            flow.work(killing(meddler), max_tries=5)
    flow.work(None, max_tries=5)
    assert Counter(flow.written()) == Counter(range(30))
    assert flow.buried() == {}


def test_failing_and_killing_messages_are_both_buried(flow: Flow) -> None:
    flow.raw.push_many(range(20))
    for _ in range(60):
        with meddled(flow.client) as meddler, suppress(Crash):
            kill, fail = killing(meddler, 12), failing(3)
            flow.work(lambda frame, kill=kill, fail=fail: fail(kill(frame)), max_tries=3)
            break
    assert sorted(flow.buried()) == [3, 12]
    assert flow.written() == sorted({*range(20)} - {3, 12})
