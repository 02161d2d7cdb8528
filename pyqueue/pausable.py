"""Ways to run a plan differently: in two parts, or without some of its requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from pyqueue.requests import Plan, Request

T = TypeVar("T")


class Pausable(Generic[T]):
    """A plan that pauses before its first request of certain types.

    Args:
        plan: The plan to run.
        types: The types of requests before which the plan pauses.
    """

    __slots__ = ("_plan", "_request", "_types", "result")

    def __init__(self, plan: Plan[T], types: tuple[type[Request[Any]], ...]) -> None:
        self._plan = plan
        self._types = types
        #: The request before which the plan has paused; None before it begins and after it ends.
        self._request: Request[Any] | None = None
        #: The result, or None before the end of the plan.
        self.result: T | None = None

    def begin(self) -> Plan[None]:
        """Run the plan until it pauses or ends."""
        yield from self._run(self._types)

    def finish(self) -> Plan[T | None]:
        """Run the rest of the plan, and return its result."""
        if self._request is not None:
            yield from self._run(())
        return self.result

    def close(self) -> None:
        """Close the plan without running the rest of it."""
        self._plan.close()

    def _run(self, types: tuple[type[Request[Any]], ...]) -> Plan[None]:
        plan = self._plan
        try:
            request = next(plan) if self._request is None else self._request
            self._request = None
            while not isinstance(request, types):
                try:
                    answer = yield request
                except BaseException as error:
                    request = plan.throw(error)
                else:
                    request = plan.send(answer)
            self._request = request
        except StopIteration as stop:
            self.result = stop.value


def leaving_out(plan: Plan[T], takes: Callable[[Request[Any]], bool]) -> Plan[T]:
    """Run a plan, but answer certain requests with None instead of passing them to the driver.

    Args:
        plan: The plan to run.
        takes: A function that returns True for a request that the driver must not get.
    """
    try:
        request = next(plan)
        while True:
            answer: Any = None
            try:
                if not takes(request):
                    answer = yield request
            except BaseException as error:
                request = plan.throw(error)
            else:
                request = plan.send(answer)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]  # a plan's result is its T
