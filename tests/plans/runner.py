"""A runner for plans, without a database, a clock or real waiting.

A test supplies the answers and inspects the requests.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from pyqueue.backends.kind import Kind
from pyqueue.backends.options import Options, QueueShape
from pyqueue.backends.queue_plans import QueuePlans, plans_of
from pyqueue.concurrently import Concurrently
from pyqueue.hooks import Tell
from pyqueue.messages import Reservation
from pyqueue.requests import (
    AtOneInstant,
    Coalesce,
    Command,
    EnsureQueue,
    ForgetQueue,
    Latecomers,
    Listen,
    MonotonicTime,
    Plan,
    ServerTime,
    Signal,
    Wait,
)
from pyqueue.waiting_any import WaitForAny

T = TypeVar("T")

#: An arbitrary instant. Plans know only the time that they receive.
NOW = datetime(2013, 1, 1, 12, tzinfo=UTC)


def after(seconds: float) -> datetime:
    """Return an instant after NOW."""
    return NOW + timedelta(seconds=seconds)


def standard(queue: str = "a", **options: Any) -> QueuePlans:
    """Return the backend under test."""
    return plans_of(queue, Options(dead_letter=f"{queue}.dead", **options), owner="me")


def record(kind: str = "standard", **fields: Any) -> dict[str, Any]:
    """Return the record of queue "a"."""
    given: dict[str, Any] = {
        "_id": "~queue:a",
        "q": "a",
        "when": NOW,
        "record": True,
        "kind": kind,
        "v": 1,
    }
    return given | fields


def record_of(store: Any) -> dict[str, Any]:
    """Return the record of queue "a" in the database of a client or of steps, or nothing."""
    return dict(store.database["pyqueue"].find_one({"_id": "~queue:a"}) or {})


def message(id: Any, **fields: Any) -> dict[str, Any]:
    """Return a stored message of queue "a" that is ready and was never received."""
    given: dict[str, Any] = {
        "_id": id,
        "q": "a",
        "when": NOW,
        "due": NOW,
        "pushed": NOW,
        "tries": 0,
        "payload": id,
    }
    return given | fields


def giving(backend: QueuePlans) -> tuple[str, Kind, float | None]:
    """Return the queue state needed by the plans that give messages back."""
    return backend.queue, backend.kind, backend.options.history


def reservation(
    id: str, token: str = "t1", *, until: datetime | None = None, queue: str = "a", **fields: Any
) -> Reservation[Any]:
    """Return a reservation that is held until a minute after NOW."""
    given: dict[str, Any] = {
        "payload": 1,
        "headers": {},
        "key": None,
        "when": NOW,
        "pushed": NOW,
        "tries": 1,
        "error": None,
        "progress": None,
        "checkpoint": None,
        "trail": [],
        "state": "reserved",
        "dead": None,
        "owner": "me",
        "lease": 60.0,
        "reserved": NOW,
    } | fields
    return Reservation(
        id=id, queue=queue, token=token, until=after(60) if until is None else until, **given
    )


Answer = Any | Callable[[Any], Any]


class Runner:
    """Run plans step by step.

    The answers to database commands are used in order. Each is a value, an exception to raise, or a
    function of the request.
    """

    def __init__(self, *answers: Answer, now: datetime = NOW) -> None:
        self.now = now
        self.answers = list(answers)
        #: The database commands that plans requested.
        self.commands: list[Any] = []
        self.signals: list[tuple[str, datetime | None]] = []
        self.told: list[Tell] = []
        self.entered: list[str] = []
        self.waits: list[Wait] = []
        #: Called when a plan waits; it may advance ``now``.
        self.on_wait: Callable[[Wait], bool] | None = None
        self.listening = True
        #: The items of calls that come while a batch runs, and their results.
        self.latecomers: list[Any] = []
        self.results: list[Any] = []

    def run(self, plan: Plan[T]) -> T:
        """Run a plan to its end."""
        return self._drive(plan)

    def pass_time(self, request: Wait) -> bool:
        """Let the time of a wait pass. For ``on_wait``."""
        self.now = request.until
        return True

    def _drive(self, plan: Generator[Any, Any, T]) -> T:
        try:
            request = next(plan)
            while True:
                try:
                    answer = self._answer(request)
                except Exception as error:
                    request = plan.throw(error)
                else:
                    request = plan.send(answer)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]

    def _answer(self, request: Any) -> Any:
        match request:
            case ServerTime():
                return self.now
            case MonotonicTime():
                return (self.now - NOW).total_seconds()
            case EnsureQueue():
                self.entered.append(request.queue)
                return request.kind
            case Signal():
                return self.signals.append((request.queue, request.when))
            case QueueShape():
                return {}
            case ForgetQueue():
                return None
            case Tell():
                return self.told.append(request)
            case Latecomers():
                request.items += self.latecomers
                self.latecomers = []
                return None
            case AtOneInstant():
                return self._drive(request.plan(None))
            case Concurrently():
                return [self._drive(plan) for plan in request.plans]
            case Coalesce():
                results = self._drive(request.batch([request.item]))
                self.results += results[1:]
                return results[0]
            case Listen():
                began, self.listening = not self.listening, True
                return began
            case Wait():
                self.waits.append(request)
                assert self.on_wait is not None, "it waits"
                return self.on_wait(request)
            case WaitForAny():
                return self._answer(min(request.waits, key=lambda each: each.until))
        assert isinstance(request, Command), request
        self.commands.append(request)
        assert self.answers, f"there is no answer left for {request}"
        answer = self.answers.pop(0)
        if callable(answer):
            answer = answer(request)
        if isinstance(answer, Exception):
            raise answer
        return answer
