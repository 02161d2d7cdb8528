"""Let an idle query wait between checks of its queue. This module needs Spark 4.2."""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Final

from pyspark.sql.datasource import DataSourceStreamReader
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

import signals as buses
from pyqueue.runtime.connecting import runner_of
from pyqueue.spark.addresses import client_of
from pyqueue.spark.options import Options

#: The longest time between two checks of an idle query, in seconds, if no signal arrives.
IDLE_LOOK_S: Final = 2.0


class IdleWait:
    """Decides when an idle query checks its queue, and waits for a signal until then.

    Spark asks for new data a hundred times a second, and a wait delays all sources of the query. So
    a wait ends at the latest ``max_wait_s`` after the previous answer to Spark. This time includes
    the waits of the other sources.

    Args:
        max_wait_s: The longest wait, in seconds. If 0, this neither waits nor listens for signals.
        listen: Starts listening for signals of the queue. It is called before the first wait.
    """

    def __init__(self, max_wait_s: float, listen: Callable[[], buses.Listener]) -> None:
        self._max_wait_s = max_wait_s
        self._listen = listen
        self._listener: buses.Listener | None = None
        self._look_at = self._answered_at = -math.inf

    def look(self) -> bool:
        """Return whether to check the queue now. This may wait."""
        now = time.monotonic()
        if now >= self._look_at:
            return True
        if self._max_wait_s == 0:
            return False
        if self._listener is None:
            self._listener = self._listen()
            return True  # a signal may have been missed
        end = min(self._look_at, self._answered_at + self._max_wait_s)
        return self._listener.wait(max(0.0, end - now)) or time.monotonic() >= self._look_at

    def rest(self, due_s: float) -> None:
        """Plan the next check in ``due_s`` seconds, or in ``IDLE_LOOK_S`` if that is sooner."""
        self._look_at = time.monotonic() + min(due_s, IDLE_LOOK_S)

    def answered(self) -> None:
        """Record that Spark is getting its answer now."""
        self._answered_at = time.monotonic()


class IdleReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A reader for streaming queries that waits for signals of its queue while it is idle."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._idle = IdleWait(options.max_wait_ms / 1000, self._listen)
        self._bus: buses.Bus | None = None

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the maximum number of messages in a batch."""
        return ReadMaxRows(self._options.batch.max_messages)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return the end of the next batch, or ``start`` if there is none. This may wait."""
        looks = self._hurries(start) or self._idle.look()
        end = self._next(start, limit) if looks else start
        self._idle.answered()
        return end

    @abstractmethod
    def _hurries(self, start: dict[str, Any]) -> bool:
        """Return whether to check the queue without a wait."""

    @abstractmethod
    def _next(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Check the queue. Return the end of the next batch, or ``start`` if no batch is due."""

    def _listen(self) -> buses.Listener:
        client = client_of(self._options.address)
        self._bus = buses.open("capped:", client.database)
        topic = runner_of(client).waiters(self._options.queue).topic
        return self._bus.listen(topic).__enter__()

    def stop(self) -> None:
        """Stop listening for signals."""
        if self._bus is not None:
            self._bus.close()
