"""The messages that share a call of a handler of batches, and its answers. No I/O."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, Literal

import pytest

from pyqueue import BatchFailed, Client, ConfigurationError, Delivery, Drop, To, Worker
from pyqueue.pipeline.calls import answers_of, grouped
from pyqueue.pipeline.graph import Stage
from tests.plans.runner import reservation


def rows(payloads: list[Any]) -> Any:
    return payloads


def stage(offline: Client, kind: str = "sink", **options: Any) -> Stage:
    pipeline = offline.pipeline()
    targets: dict[str, Any] = {"sink": [], "link": "next", "choice": ["next", "end"]}
    getattr(pipeline, kind)("q", rows, to=targets[kind], **options)
    [added] = pipeline.graph.stages.values()
    return added


@pytest.mark.parametrize(
    ("batch", "max_tries", "tries", "size"),
    [
        (500, 3, 1, 500),
        (500, 3, 2, 62),
        (500, 3, 3, 1),
        (500, 20, 3, 7),
        (500, 20, 4, 1),
        (500, None, 2, 62),
        (500, None, 9_999, 1),
        (500, 1, 1, 1),
        (4, 20, 2, 1),
        (100_000, None, 4, 195),
    ],
)
def test_tries_say_how_many_share_a_call(
    offline: Client, batch: int, max_tries: int | None, tries: int, size: int
) -> None:
    """So a message that fails each of its calls buries no other message."""
    messages = [reservation(str(number), tries=tries) for number in range(2 * size + 1)]
    calls = grouped(stage(offline, batch=batch), max_tries, messages)
    assert [len(each) for each in calls] == [size, size, 1]
    assert [each for call in calls for each in call] == messages


def test_messages_tried_before_do_not_split_new_ones(offline: Client) -> None:
    new = [reservation(f"new {number}", tries=1) for number in range(20)]
    again = [reservation(f"again {number}", tries=2) for number in range(4)]
    mixed = [*new[:5], *again, *new[5:]]
    calls = grouped(stage(offline, batch=20), 20, mixed)
    assert calls == [new, again[:2], again[2:]]


def test_calls_are_in_the_order_of_their_first_messages(offline: Client) -> None:
    tries = [1, 1, 2, 1, 2, 1]
    messages = [reservation(str(place), tries=each) for place, each in enumerate(tries)]
    calls = grouped(stage(offline, batch=3), 20, messages)
    assert [[each.id for each in call] for call in calls] == [["0", "1", "3"], ["2"], ["4"], ["5"]]


def test_stage_without_batch_has_calls_of_one(offline: Client) -> None:
    messages = [reservation(str(number), tries=1) for number in range(3)]
    assert grouped(stage(offline), 20, messages) == [[each] for each in messages]


A, B = ValueError("a"), KeyError("b")


@pytest.mark.parametrize(
    ("kind", "answer", "failed", "answers"),
    [
        ("link", [1, 2, 3], None, [1, 2, 3]),
        ("link", [1, A, 3], None, [1, A, 3]),
        ("link", None, BatchFailed({1: A}, [1, None, 3]), [1, A, 3]),
        ("link", None, BatchFailed({0: A, 1: B, 2: A}), [A, B, A]),
        ("link", None, BatchFailed({}, [1, 2, 3]), [1, 2, 3]),
        ("sink", None, None, [None, None, None]),
        ("sink", "3 rows", None, [None, None, None]),
        ("sink", [None, A, None], None, [None, A, None]),
        ("sink", None, BatchFailed({2: B}), [None, None, B]),
    ],
)
def test_answer_of_a_batch_is_one_for_each_message(
    offline: Client, kind: str, answer: object, failed: BatchFailed | None, answers: list[object]
) -> None:
    assert answers_of(stage(offline, kind, batch=5), 3, answer, failed) == answers


@pytest.mark.parametrize(
    ("kind", "answer", "failed", "reason"),
    [
        ("link", [1, 2], None, "rows returned a list of 2 for a batch of 3 messages"),
        ("choice", [1] * 4, None, "rows returned a list of 4 for a batch of 3 messages"),
        ("sink", [1] * 4, None, "rows returned a list of 4 for a batch of 3 messages"),
        ("link", None, None, "rows returned None for a batch of 3 messages; return a list"),
        ("link", (1, 2, 3), None, "rows returned a value of type tuple for a batch of 3"),
        ("link", None, BatchFailed({0: A}), "BatchFailed with results=None for a batch of 3"),
        ("sink", To("next"), None, "returned a value of type To for a batch of 3 messages"),
        ("sink", None, BatchFailed({0: A}, [1]), "results=a list of 1 for a batch of 3"),
        ("sink", None, BatchFailed({3: A}), "index 3 of a batch of 3 .* from 0 to 2"),
        ("sink", None, BatchFailed({-1: A}), "index -1 of a batch of 3 .* from 0 to 2"),
    ],
)
def test_answer_of_another_length_is_refused(
    offline: Client, kind: str, answer: object, failed: BatchFailed | None, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        answers_of(stage(offline, kind, batch=5), 3, answer, failed)


def test_batch_failed_takes_exceptions_by_index() -> None:
    copy = pickle.loads(pickle.dumps(BatchFailed({4: A}, [1])))
    assert str(copy) == "1 messages of a batch failed"
    assert (list(copy.errors), copy.results) == ([4], [1])
    for wrong in ([A], {"3": A}, {3: "bad"}, None):
        with pytest.raises(ConfigurationError, match=r"errors: expected a dict of exceptions"):
            BatchFailed(wrong)  # type: ignore[arg-type]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no message": ({"batch": 0}, "batch: 0 is not allowed"),
    "a truth value": ({"batch": True}, "batch: True is not allowed"),
    "a text": ({"batch": "500"}, "batch: '500' is not allowed"),
    "a window alone": ({"window": 1}, "window: .* queue 'q' .* set batch=, too"),
    "a negative window": ({"batch": 5, "window": -1}, "window: -1 is not allowed"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_batch_option_is_refused_when_added(offline: Client, case: str) -> None:
    options, reason = WRONG[case]
    with pytest.raises(ConfigurationError, match=reason):
        Worker(offline).on("q", rows, **options)
    with pytest.raises(ConfigurationError, match=reason):
        stage(offline, "link", **options)


def test_handler_of_batches_takes_two_lists(offline: Client) -> None:
    def optional(payloads: list[Any], deliveries: list[Delivery[Any]] | None = None) -> None:
        pass

    def three(payloads: list[Any], deliveries: Any, more: Any) -> None:
        pass

    worker = Worker(offline).on("a", rows, batch=2).on("b", optional, batch=2)
    assert [each.delivery for each in worker.graph.stages.values()] == [False, True]
    with pytest.raises(ConfigurationError, match=r"takes \(payloads\) or \(payloads, deliveries\)"):
        worker.on("c", three, batch=2)  # type: ignore[arg-type]


def test_annotation_of_a_list_is_checked_against_to(offline: Client) -> None:
    def route(rows: list[int]) -> list[To[Literal["a", "b"]] | Drop]:
        return []

    pipeline: Callable[..., Any] = offline.pipeline().choice
    pipeline("q", route, to=["a", "b"], batch=5)
    with pytest.raises(ConfigurationError, match=r"return To\('b'\), which is not in to="):
        pipeline("r", route, to=["a"], batch=5)
