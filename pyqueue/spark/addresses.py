"""Where queues are, as it travels between the processes of Spark, and each process's clients."""

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
    """A namespace on a server. It holds the URI only if that was given openly."""

    uri: str | None
    uri_env: str | None
    namespace: str

    @classmethod
    def of(cls, uri: str | None, uri_env: str | None, namespace: str) -> Self:
        """The place, checked.

        Raises:
            ConfigurationError: not one of the two is given, or it is no URI.
        """
        if (uri is None) == (uri_env is None):
            raise ConfigurationError(
                "uri, uriEnv: give one of the two: the server's URI, or the name of the environment variable that holds it"
            )
        if uri is not None and not uri.startswith(("mongodb://", "mongodb+srv://")):
            raise ConfigurationError(
                "uri: give one that starts with mongodb:// or mongodb+srv://, which the driver and all executors can reach"
            )
        return cls(uri, uri_env, arguments.namespace_name(namespace))

    def __repr__(self) -> str:
        return f"Place(namespace={self.namespace!r})"

    @property
    def target(self) -> str:
        """The URI.

        Raises:
            ConfigurationError: the environment variable that holds it is not set here.
        """
        if self.uri_env is None:
            return str(self.uri)
        found = os.environ.get(self.uri_env)
        if not found:
            raise ConfigurationError(
                f"uriEnv: the environment variable {self.uri_env} is not set in this process"
            )
        return found

    def opened(self) -> Client:
        """A client that wakes consumers; closing it sees that they have been told."""
        return Client(self.target, namespace=self.namespace)


_clients: dict[tuple[int, NamespaceAddress, bool], Client] = {}
_opening = threading.Lock()


def client_of(place: NamespaceAddress, *, waking: bool = False) -> Client:
    """This process's client for a place: clients do not pickle, and each costs connections.

    Args:
        place: where.
        waking: whether what it writes wakes consumers; else whoever ends the job does.
    """
    with _opening:
        known = _clients.get((os.getpid(), place, waking))
        if known is None:
            known = (
                place.opened()
                if waking
                else Client(place.target, namespace=place.namespace, signals="none:")
            )
            _clients[os.getpid(), place, waking] = known
        return known
