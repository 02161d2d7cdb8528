"""The base of the classes for streams and consumer groups, blocking and async."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Generic, TypeVar, cast

from pyqueue import arguments, telling
from pyqueue.backends.options import Options
from pyqueue.backends.queue_plans import QueuePlans
from pyqueue.backends.streams.consumers import GroupPlans
from pyqueue.backends.streams.log import check_start
from pyqueue.backends.streams.plans import StreamPlans
from pyqueue.errors import ConfigurationError, InvalidName
from pyqueue.messages import Backoff, Duration, Headers
from pyqueue.queue_base import QueueBase
from pyqueue.requests import Plan
from pyqueue.runtime.plan_runner import RunnerBase

T = TypeVar("T")
Runs = TypeVar("Runs", bound=RunnerBase)

#: Where a consumer group begins: "first", "last", an instant or a position.
Start = str | datetime | int


class StreamBase(Generic[T, Runs]):
    """The base of ``Stream`` and ``AsyncStream``."""

    def __init__(self, runner: Runs, backend: StreamPlans) -> None:
        self._runner = runner
        self._backend = backend
        #: The name of the stream.
        self.name = backend.stream

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, namespace={self._runner.namespace!r})"

    def _append(self, payloads: Iterable[Any], headers: Headers | None) -> Plan[list[int]]:
        hooks = self._runner.hooks
        if hooks is None:
            return self._backend.append(payloads, headers)
        return telling.append(hooks, self._backend, payloads, headers)

    def _group(
        self,
        name: str,
        start: Start,
        lease: Duration,
        max_tries: int | None,
        dead_letter: str | None,
        backoff: Backoff,
        poll: Duration,
    ) -> GroupPlans:
        """Check the options of a consumer group, and return the plans of its operations."""
        arguments.group(name, "name")
        arguments.backoff(backoff)
        check_start(start)
        try:
            buried = arguments.queue_name(dead_letter or f"{self.name}.{name}.dead")
        except InvalidName as error:
            if dead_letter is not None:
                raise
            text = "the default name, <stream>.<group>.dead, is too long; give a shorter name"
            raise ConfigurationError(f"dead_letter: {text}") from error
        options = Options(
            lease=arguments.duration("lease", lease, positive=True),
            max_tries=None if max_tries is None else arguments.count("max_tries", max_tries),
            dead_letter=buried,
            backoff=backoff,
            poll=arguments.duration("poll", poll, positive=True),
        )
        return self._backend.group(name, options, start)


class ConsumerBase(QueueBase[T, Runs]):
    """The base of ``Consumer`` and ``AsyncConsumer``."""

    def __init__(self, runner: Runs, plans: GroupPlans) -> None:
        # The plans have the same names as the plans of a queue. A group offers no other plans.
        super().__init__(runner, cast("QueuePlans", plans))
        self._plans = plans

    def _commits_first(self, held: object) -> bool:
        """Return False, because the messages of a stream do not wait for each other."""
        return False
