"""The databases of ``memory:NAME``. The clients of one process that use the same name share one.

The clocks of these clients show the same time: a test that moves one clock moves all of them. A
database lasts until no open client uses it.
"""

from __future__ import annotations

import os
import threading
from typing import Any
from weakref import WeakSet, WeakValueDictionary

from pyqueue.clock import Clock
from pyqueue.memory import memory_database
from pyqueue.runtime.base_driver import BaseDriver
from pyqueue.targets import MEMORY

#: The databases, keyed by name. Only the clients that use a database keep it alive.
_databases: WeakValueDictionary[str, SharedMemory] = WeakValueDictionary()
_guard = threading.Lock()


def _forked() -> None:
    """Forget the databases in a forked child: its copies would only seem to be shared."""
    global _databases, _guard
    _databases, _guard = WeakValueDictionary(), threading.Lock()


os.register_at_fork(after_in_child=_forked)


class SharedMemory:
    """A database in memory, and the drivers that use it.

    Args:
        name: The name of the database.

    Raises:
        ConfigurationError: mongomock is not installed.
    """

    def __init__(self, name: str) -> None:
        self.database: Any = memory_database(name)
        self._clock = Clock()
        self._drivers: WeakSet[BaseDriver[Any]] = WeakSet()

    def join(self, driver: BaseDriver[Any]) -> None:
        """Add a driver that uses the database, and make its clock follow the shared clock."""
        with _guard:
            driver.clock.follow(self._clock)
            self._drivers.add(driver)

    def drivers(self) -> list[BaseDriver[Any]]:
        """Return the drivers of the open clients."""
        with _guard:
            return [each for each in self._drivers if not each.closed]

    def advance(self, seconds: float) -> None:
        """Move the clock of every driver forward."""
        with _guard:
            for clock in (self._clock, *(each.clock for each in self._drivers)):
                clock.advance(seconds)


def open_memory(url: str) -> tuple[Any, SharedMemory | None]:
    """Return the database of ``memory:`` or ``memory:NAME``, and its ``SharedMemory`` if named.

    Raises:
        ConfigurationError: mongomock is not installed.
    """
    name = url.removeprefix(MEMORY)
    if not name:
        return memory_database("pyqueue"), None
    shared = shared_memory(name)
    return shared.database, shared


def shared_memory(name: str) -> SharedMemory:
    """Return the database of this name, which is new and empty if no open client uses it.

    Raises:
        ConfigurationError: mongomock is not installed.
    """
    with _guard:
        found = _databases.get(name)
        if found is None:
            found = _databases[name] = SharedMemory(name)
        return found
