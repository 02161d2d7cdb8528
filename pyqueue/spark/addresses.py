"""The address of a namespace, which travels between Spark's processes, and the clients of each."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import Self

from pyqueue import arguments
from pyqueue.client import Client
from pyqueue.errors import ConfigurationError

__all__ = ["NamespaceAddress", "client_of"]


@dataclass(frozen=True)
class NamespaceAddress:
    """A namespace on a server: the URI, or the name of the environment variable that holds it."""

    uri: str | None
    uri_env: str | None
    namespace: str

    @classmethod
    def of(cls, uri: str | None, uri_env: str | None, namespace: str) -> Self:
        """Check the arguments and return the address.

        Raises:
            ConfigurationError: Not exactly one of ``uri`` and ``uri_env`` is given, or ``uri`` is
                not the URI of a server.
        """
        if (uri is None) == (uri_env is None):
            raise ConfigurationError(
                "uri, uriEnv: give one of the two: the server's URI, or the name of the "
                "environment variable that holds it"
            )
        if uri is not None and not uri.startswith(("mongodb://", "mongodb+srv://")):
            raise ConfigurationError(
                "uri: give one that starts with mongodb:// or mongodb+srv://, which the driver "
                "and all executors can reach"
            )
        return cls(uri, uri_env, arguments.namespace_name(namespace))

    def __repr__(self) -> str:
        # The URI may hold a password.
        return f"NamespaceAddress(namespace={self.namespace!r})"

    @property
    def target(self) -> str:
        """The URI.

        Raises:
            ConfigurationError: The environment variable is not set in this process.
        """
        if self.uri_env is None:
            return str(self.uri)
        found = os.environ.get(self.uri_env)
        if not found:
            raise ConfigurationError(
                f"uriEnv: the environment variable {self.uri_env} is not set in this process"
            )
        return found

    def open(self) -> Client:
        """Return a new client whose writes wake consumers.

        Closing the client waits until its signals are sent.
        """
        return Client(self.target, namespace=self.namespace)


_clients: dict[tuple[int, NamespaceAddress, bool], Client] = {}
_opening = threading.Lock()


def client_of(address: NamespaceAddress, *, waking: bool = False) -> Client:
    """Return the client of this process for an address.

    Clients do not pickle, and each costs connections, so a process shares one.

    Args:
        address: The namespace.
        waking: Whether its writes wake consumers. Tasks leave this to the end of their job.
    """
    with _opening:
        known = _clients.get((os.getpid(), address, waking))
        if known is None:
            known = (
                address.open()
                if waking
                else Client(address.target, namespace=address.namespace, signals="none:")
            )
            _clients[os.getpid(), address, waking] = known
        return known
