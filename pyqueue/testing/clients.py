"""Clients that can move their clock and delete all queues. Only tests may do so."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from pyqueue.async_client import AsyncClient
from pyqueue.client import Client
from pyqueue.messages import Duration
from pyqueue.requests import Delete, Plan
from pyqueue.runtime.base_driver import forget_queues
from pyqueue.runtime.connecting import BaseConnection
from pyqueue.testing.ahead import move_clock, sharing


def _clear(connection: BaseConnection[Any]) -> Plan[None]:
    """Delete the queues of a namespace, for all clients that share its database in memory."""
    yield from Delete({}, many=True)
    drivers = sharing(connection)
    for driver in drivers:
        if driver.topic == drivers[0].topic:
            forget_queues(driver)


class TestClient(Client):
    """A Client for tests. It takes the arguments of ``Client``."""

    __test__ = False  # pytest does not collect it

    def advance(self, seconds: Duration) -> None:
        """Move the clock of this client forward, as if time had passed.

        Delays, backoffs, leases and rates end accordingly, also for the other clients of a
        ``memory:NAME``. The clocks of other clients of a server, and the expiry of histories, do
        not move.

        Args:
            seconds: Seconds or a timedelta.

        Raises:
            ConfigurationError: The duration is negative.
        """
        move_clock(self._connection, seconds)

    def clear(self) -> None:
        """Delete every queue and stream of the namespace, with all messages.

        Afterwards, create the objects of streams and their consumer groups again.
        """
        self._connection.run(_clear(self._connection))


class AsyncTestClient(AsyncClient):
    """An AsyncClient for tests. It takes the arguments of ``AsyncClient``."""

    __test__ = False

    def advance(self, seconds: Duration) -> None:
        """Move the clock forward, without I/O: do not await it. See ``TestClient.advance``."""
        move_clock(self._connection, seconds)

    def clear(self) -> Coroutine[Any, Any, None]:
        """Delete every queue and stream of the namespace. See ``TestClient.clear``."""
        return self._connection.run(_clear(self._connection))
