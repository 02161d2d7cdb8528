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

        Delays, backoffs, leases and rates follow the moved clock, which all clients of the same
        ``memory:NAME`` share. On a server, the clocks of other clients do not move. The expiry of
        histories never follows the moved clock.

        Args:
            seconds: Seconds or a timedelta.

        Raises:
            ConfigurationError: The duration is negative.
        """
        move_clock(self._connection, seconds)

    def clear(self) -> None:
        """Delete every queue and stream of the namespace, with all messages.

        Afterwards, create new objects for the streams and their consumer groups.
        """
        self._connection.run(_clear(self._connection))


class AsyncTestClient(AsyncClient):
    """An AsyncClient for tests. It takes the arguments of ``AsyncClient``."""

    __test__ = False

    def advance(self, seconds: Duration) -> None:
        """Move the clock forward; see ``TestClient.advance``. This does no I/O: do not await it."""
        move_clock(self._connection, seconds)

    def clear(self) -> Coroutine[Any, Any, None]:
        """Delete every queue and stream of the namespace. See ``TestClient.clear``."""
        return self._connection.run(_clear(self._connection))
