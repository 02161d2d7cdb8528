"""The base of ``Selection`` and ``AsyncSelection``: it chooses the plan of each method."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, Generic, TypeVar

from pyqueue import arguments
from pyqueue.backends import selecting
from pyqueue.backends.changing import Change, MoveTo, Redrive, Remove, Reprioritize, Requeue
from pyqueue.backends.queue_plans import QueuePlans, in_recorded_kind
from pyqueue.backends.selecting import Pace, Selected
from pyqueue.messages import BulkResult
from pyqueue.queue_base import QueueBase, backend_of, target_of
from pyqueue.requests import Plan
from pyqueue.runtime.plan_runner import RunnerBase

T = TypeVar("T")
Runs = TypeVar("Runs", bound=RunnerBase)


class SelectionBase(Generic[Runs]):
    """The part of a selection that is the same for blocking and for async code."""

    def __init__(self, queue: QueueBase[Any, Runs], runner: Runs, chosen: Selected) -> None:
        self._queue = queue
        self._runner = runner
        self._chosen = chosen

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._queue.name!r})"

    def _count(self, limit: int | None) -> Plan[int]:
        if limit is not None:
            arguments.count("limit", limit)
        return self._in_kind(lambda found: selecting.count(found.terms, self._chosen, limit))

    def _remove(self, pace: Pace) -> Plan[BulkResult]:
        return self._change(Remove(), pace)

    def _redrive(self, pace: Pace) -> Plan[BulkResult]:
        return self._change(Redrive(), pace)

    def _move(self, to: object, pace: Pace) -> Plan[BulkResult]:
        target = target_of(to, self._runner)
        if isinstance(target, str):
            arguments.queue_name(target, "to")
        return self._change(MoveTo(target), pace)

    def _requeue(self, at: datetime | None, pace: Pace) -> Plan[BulkResult]:
        return self._change(Requeue(None if at is None else arguments.instant("at", at)), pace)

    def _reprioritize(self, priority: int, pace: Pace) -> Plan[BulkResult]:
        return self._change(Reprioritize(arguments.priority(priority)), pace)

    def _change(self, how: Change, pace: Pace) -> Plan[BulkResult]:
        return self._in_kind(lambda found: selecting.change(found.terms, self._chosen, how, pace))

    def _in_kind(self, operation: Callable[[QueuePlans], Plan[T]]) -> Plan[T]:
        yield from selecting.refuse_stream(self._queue.name)
        return (yield from in_recorded_kind(backend_of(self._queue), operation))
