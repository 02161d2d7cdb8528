"""Hooks without a client: which objects are hooks, and when they get their events."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from pyqueue import Client, ConfigurationError, Hooks, Unavailable
from pyqueue.backends.streams.plans import StreamPlans
from pyqueue.delivery import Delivery
from pyqueue.hooks import HookCalls, Tell, Uncommitted, calls_of
from pyqueue.payloads import Codec
from pyqueue.requests import Plan, ServerTime
from pyqueue.telling import append, push, settling, tells_of
from tests.plans.runner import Runner, reservation, standard
from tests.support.recorder import Recorder


async def pushed(queue: str, ids: Any, error: Any) -> None: ...


@asynccontextmanager
async def handling(deliveries: Any) -> AsyncIterator[None]:
    yield


def test_wrong_hooks_are_refused() -> None:
    wrong: list[tuple[Any, str]] = [
        (Recorder(), "expected a list"),
        ("pushed", "expected a list"),
        (None, "expected a list"),
        ({"pushed": print}, "expected a list"),
        ([Recorder], "Recorder is a class"),
        ([Recorder(), object()], "object has none of the methods pushing, pushed"),
        ([Hooks()], "Hooks has none"),
        ([SimpleNamespace(pushed=1)], "SimpleNamespace has none"),
        ([SimpleNamespace(pushed=pushed)], "pushed of SimpleNamespace is async"),
        ([SimpleNamespace(handling=handling)], "handling of SimpleNamespace is async"),
    ]
    for hooks, text in wrong:
        with pytest.raises(ConfigurationError, match=f"^hooks: .*{text}"):
            Client("memory:", hooks=hooks)


def test_hooks_need_only_some_methods() -> None:
    told: list[Any] = []
    partial = SimpleNamespace(pushed=lambda *values: told.append(values))
    calls = calls_of([Recorder(), partial])
    assert calls is not None
    calls.tell(Tell("pushed", "a", ["id"]))
    calls.tell(Tell("received", "a", []))
    assert told == [("a", ["id"], None)]
    assert not HookCalls([partial]).takes("pushing")
    assert calls_of(()) is None


def test_event_in_a_transaction_waits_or_is_marked() -> None:
    recorder, waiting = Recorder(), list[Any]()
    calls, event = HookCalls([recorder]), Tell("settled", "a", [], verb="commit", session=object())
    calls.tell(event, waiting)
    assert (waiting, recorder.take()) == ([event], [])
    calls.tell(event)
    assert recorder.take() == [("settled", "a", "commit", [], Uncommitted, None)]
    event.error = Unavailable("gone")
    calls.tell(event)
    assert recorder.take() == [("settled", "a", "commit", [], Unavailable, None)]


# ---- around handlers


def delivery() -> list[Delivery[Any]]:
    notes: Any = None
    return [Delivery(reservation("m"), notes, None)]


def test_handlers_run_within_the_managers_of_all_hooks(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Any] = []

    def hooks(name: str) -> Any:
        @contextmanager
        def around(deliveries: Any) -> Iterator[None]:
            seen.append((name, len(deliveries)))
            try:
                yield
            except ValueError as error:
                seen.append((name, str(error)))
                if name == "b":
                    raise KeyError(name) from error

        return SimpleNamespace(handling=around)

    broken = SimpleNamespace(handling=lambda deliveries: None)
    calls = HookCalls([hooks("a"), broken, hooks("b")])
    with (
        caplog.at_level(logging.WARNING, "pyqueue"),
        pytest.raises(ValueError, match="of the handler"),
        calls.handling(delivery()),
    ):
        raise ValueError("of the handler")
    assert seen == [("a", 1), ("b", 1), ("b", "of the handler"), ("a", "of the handler")]
    assert [each.getMessage() for each in caplog.records] == [
        "queue 'a': the hook 'handling' failed"
    ] * 2


def test_handlers_without_hooks_around_them_run() -> None:
    for hooks in (HookCalls([Recorder()]).handling(delivery()), Hooks().handling(delivery())):
        with hooks:
            pass


# ---- plans


def pausing(error: BaseException | None = None) -> Plan[None]:
    yield from ServerTime()
    if error is not None:
        raise error


def test_settlement_is_told_after_its_plan() -> None:
    runner, backend = Runner(), standard(max_tries=1)
    held = [reservation("m"), reservation("m"), object()]
    runner.run(settling(pausing(), tells_of(backend, "commit", held, None)))
    assert [(each.verb, len(each.items), each.error) for each in runner.told] == [
        ("commit", 1, None)
    ]
    error = Unavailable("gone")
    with pytest.raises(Unavailable):
        runner.run(settling(pausing(error), tells_of(backend, "rollback", held)))
    told = runner.told[-1]
    assert (told.verb, told.to, told.error) == ("bury", "a.dead", error)
    with pytest.raises(ConfigurationError):
        runner.run(settling(pausing(ConfigurationError("no")), tells_of(backend, "commit", held)))
    assert len(runner.told) == 2


def test_plan_that_is_dropped_tells_nothing() -> None:
    backend, calls = standard(), HookCalls([Recorder()])
    plans: list[Plan[Any]] = [
        settling(pausing(), tells_of(backend, "commit", [reservation("m")])),
        push(calls, backend, [1], {}),
    ]
    plans.append(append(calls, StreamPlans("log", Codec(), {}), [1], None))
    for plan in plans:
        next(plan)
        plan.close()
