"""The moved clock of a test client, for commands in which a server reads its own clock.

The server counts a rate by its own clock. Once a test client has moved its clock forward, its
commands add the difference to the server's time. In memory, only clients have clocks.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from pyqueue import arguments
from pyqueue.clock import Clock
from pyqueue.memory import replaced
from pyqueue.messages import Duration
from pyqueue.runtime.base_driver import BaseDriver, wake_all, wrap_collections
from pyqueue.runtime.connecting import BaseConnection

#: The methods of collections whose arguments may refer to the time.
_METHODS: Final = frozenset(
    {"delete_many", "find_one_and_update", "find_one_and_delete", "update_many", "update_one"}
)


def sharing(connection: BaseConnection[Any]) -> list[BaseDriver[Any]]:
    """Return the driver of a connection, followed by the other drivers of its ``memory:NAME``."""
    driver = connection.open()
    others = [] if connection.shared is None else connection.shared.drivers()
    return [driver, *(each for each in others if each is not driver)]


def move_clock(connection: BaseConnection[Any], length: Duration) -> None:
    """Move the clock of a connection forward, and wake the consumers that wait for an instant.

    Raises:
        ConfigurationError: The duration is not allowed.
    """
    seconds = arguments.duration("seconds", length)
    driver = connection.open()
    if seconds and not driver.memory and not driver.clock.ahead:
        wrap_collections(driver, partial(_Collection, clock=driver.clock))
    if connection.shared is None:
        driver.clock.advance(seconds)
    else:
        connection.shared.advance(seconds)
    wake_all(sharing(connection))


def _moved(value: Any, clock: Clock) -> Any:
    """Return a filter or an update pipeline that uses the moved time as the server's time."""
    now = {"$add": ["$$NOW", round(clock.ahead * 1000)]}
    if isinstance(value, list):
        return replaced(value, "$$NOW", now)
    if not isinstance(value, dict):
        return value
    found = {**value}
    if "$and" in found:
        found["$and"] = [_moved(each, clock) for each in found["$and"]]
    if "$expr" in found:
        found["$expr"] = replaced(found["$expr"], "$$NOW", now)
    return found


class _Collection:
    """A collection whose server seems to have the clock of the test client."""

    def __init__(self, collection: Any, clock: Clock) -> None:
        self._collection, self._clock = collection, clock

    @property
    def database(self) -> Any:
        return _Database(self._collection.database, self._clock)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._collection, name)
        if name not in _METHODS:
            return found
        return lambda *args, **options: found(
            *[_moved(each, self._clock) for each in args], **options
        )


class _Database:
    """A database whose server seems to have the clock of the test client."""

    def __init__(self, database: Any, clock: Clock) -> None:
        self._database, self._clock = database, clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._database, name)

    def command(self, command: Any, **options: Any) -> Any:
        """Send a command, changed in place: a copy would lose the type with its time limit."""
        if "query" in command:
            command["query"] = _moved(command["query"], self._clock)
        if "updates" in command:
            command["updates"] = [
                each | {"q": _moved(each["q"], self._clock)} for each in command["updates"]
            ]
        return self._database.command(command, **options)
