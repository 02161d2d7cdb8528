"""The address of a namespace, which Spark's processes exchange, and the clients for it."""

from __future__ import annotations

import atexit
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, Self, TypeVar, cast

from pyqueue import arguments
from pyqueue.backends.options import Options as QueueOptions
from pyqueue.backends.queue_plans import QueuePlans, plans_of
from pyqueue.errors import ConfigurationError
from pyqueue.runtime.connecting import Connected, Connection, runner_of

C = TypeVar("C", bound=Connected[Any])

#: Matches a URI that contains credentials, or an option whose value may be secret.
_SECRET: Final = re.compile("@|password|token", re.IGNORECASE)


@dataclass(frozen=True)
class NamespaceAddress:
    """The name of a namespace, and the URI of its server or the variable that holds the URI."""

    uri: str | None
    uri_env: str | None
    namespace: str

    @classmethod
    def of(cls, uri: str | None, uri_env: str | None, namespace: str) -> Self:
        """Check the arguments and return the address.

        Raises:
            ConfigurationError: Neither or both of ``uri`` and ``uri_env`` are given, or ``uri`` is
                not the URI of a server.
        """
        if (uri is None) == (uri_env is None):
            raise ConfigurationError(
                "uri, uriEnv: set either uri to the server's URI, or uriEnv to the name of the "
                "environment variable that holds the URI"
            )
        if uri is not None and not uri.startswith(("mongodb://", "mongodb+srv://")):
            raise ConfigurationError(
                "uri: expected a URI that begins with mongodb:// or mongodb+srv://; use the URI "
                "of a server that the driver and all executors can reach"
            )
        return cls(uri, uri_env, arguments.namespace_name(namespace))

    def __repr__(self) -> str:
        # The URI may hold a password.
        return f"NamespaceAddress(namespace={self.namespace!r})"

    @property
    def has_secret(self) -> bool:
        """Whether the URI is given directly and contains credentials."""
        return self.uri is not None and _SECRET.search(self.uri) is not None

    @property
    def target(self) -> str:
        """The URI of the server, read from the environment variable if the address names one.

        Raises:
            ConfigurationError: The environment variable is not set in this process.
        """
        if self.uri_env is None:
            return str(self.uri)
        found = os.environ.get(self.uri_env)
        if not found:
            raise ConfigurationError(
                f"uriEnv: the environment variable {self.uri_env} is not set in this process; set "
                "it for the driver and for all executors"
            )
        return found

    @contextmanager
    def open(self) -> Iterator[Connection]:
        """Open a connection whose writes wake consumers. It is closed at the end of the block."""
        connection = Connection(self.target, namespace=self.namespace)
        connection.enter()
        try:
            yield connection
        finally:
            connection.close()


class TaskClient(Connected[Connection]):
    """The client with which the data source runs plans (command sequences); see ``runner_of``.

    Unlike ``Client``, it needs neither pydantic nor anyio, which executors may lack.
    """


_clients: dict[tuple[int, NamespaceAddress, object], Connected[Any]] = {}
_opening = threading.Lock()


def _forked() -> None:
    """Replace the lock in a forked child: a thread that exists only in the parent may hold it."""
    global _opening
    _opening = threading.Lock()


os.register_at_fork(after_in_child=_forked)


def client_of(address: NamespaceAddress) -> TaskClient:
    """Return the client of this process for an address. Its writes wake no consumers."""
    return shared_client(address, _quiet)


def _quiet(address: NamespaceAddress) -> TaskClient:
    # Tasks leave the waking to the end of their job.
    return TaskClient(Connection(address.target, namespace=address.namespace, signals="none:"))


def shared_client(address: NamespaceAddress, make: Callable[[NamespaceAddress], C]) -> C:
    """Return this process's client for an address. If there is none, create it with ``make``.

    Clients cannot be pickled, and each one opens connections, so the tasks of a process share it.
    """
    key = os.getpid(), address, make
    with _opening:
        if key not in _clients:
            _clients[key] = make(address)
        return cast(C, _clients[key])


def plans_at(address: NamespaceAddress, queue: str, options: QueueOptions, kind: str) -> QueuePlans:
    """Return the plans (command sequences) of a queue, to run with this process's client."""
    connection = runner_of(client_of(address))
    return plans_of(
        queue,
        options,
        kind=kind,
        owner=connection.owner,
        command_timeout=connection.command_timeout,
    )


def _close_clients() -> None:
    """Close the clients that this process opened, but not those of a parent that forked it."""
    for (pid, _, _), client in list(_clients.items()):
        if pid == os.getpid():
            with suppress(Exception):  # closing waits a second for a server that is gone
                # Closing a Client also stores its last telemetry.
                getattr(client, "close", runner_of(client).close)()


atexit.register(_close_clients)
