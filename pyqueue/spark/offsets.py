"""The offset of a stream: the number of a claim, and whose claim it is, for the listener to finish the last one. No credentials are in it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from pyqueue.backends.named_claims import NamedClaims
from pyqueue.backends.options import Options
from pyqueue.backends.queue_plans import QueuePlans
from pyqueue.connecting import runner_of
from pyqueue.spark.addresses import NamespaceAddress, client_of

__all__ = ["Offset"]


#: What a URI has in it that is not for everybody to see: credentials, or an option that is one.
_SECRET: Final = re.compile("@|password|token", re.IGNORECASE)


@dataclass(frozen=True)
class Offset:
    """Up to which claim of a group, as the runner with this token made them."""

    n: int
    token: str
    queue: str
    group: str
    place: NamespaceAddress

    def told(self) -> dict[str, Any]:
        """As Spark keeps it. Only ``n`` matters for what is read."""
        told = {
            "n": self.n,
            "token": self.token,
            "queue": self.queue,
            "group": self.group,
            "namespace": self.place.namespace,
        }
        if self.place.uri_env is not None:
            told["uriEnv"] = self.place.uri_env
        elif not _SECRET.search(str(self.place.uri)):
            told["uri"] = self.place.uri
        return told

    @classmethod
    def parse(cls, told: Mapping[str, Any]) -> Self:
        """What ``told`` told.

        Raises:
            KeyError, TypeError: it is no such offset.
            ConfigurationError: it does not say where the server is.
        """
        n, token, queue, group = (told[name] for name in ("n", "token", "queue", "group"))
        return cls(
            n,
            token,
            queue,
            group,
            NamespaceAddress.of(told.get("uri"), told.get("uriEnv"), told["namespace"]),
        )

    def acknowledge(self) -> None:
        """Finish these claims.

        Raises:
            Fenced: another runs the group by now.
        """
        claims = NamedClaims(QueuePlans(self.queue, Options()), self.group)
        runner_of(client_of(self.place)).run(claims.acknowledge(self.token, self.n))
