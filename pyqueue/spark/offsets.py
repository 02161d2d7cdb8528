"""The offset of a stream: the number of a claim, and how to find the claim.

Spark stores offsets in its checkpoint and shows them in progress reports, so they contain no
credentials.
"""

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

#: A URI that matches contains credentials, or an option that may be one.
_SECRET: Final = re.compile("@|password|token", re.IGNORECASE)


@dataclass(frozen=True)
class Offset:
    """All claims of a group up to number ``n``, as the runner with this token made them."""

    n: int
    token: str
    queue: str
    group: str
    address: NamespaceAddress

    def to_json(self) -> dict[str, Any]:
        """Return the form that Spark stores.

        Reading needs only ``n``. The listener needs the rest, to acknowledge the last batch.
        """
        fields = {
            "n": self.n,
            "token": self.token,
            "queue": self.queue,
            "group": self.group,
            "namespace": self.address.namespace,
        }
        if self.address.uri_env is not None:
            fields["uriEnv"] = self.address.uri_env
        elif not _SECRET.search(str(self.address.uri)):
            fields["uri"] = self.address.uri
        return fields

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Self:
        """Return the offset of a form that ``to_json`` made.

        Raises:
            KeyError, TypeError: This is the offset of another source.
            ConfigurationError: The offset does not contain the address of the server.
        """
        n, token, queue, group = (fields[name] for name in ("n", "token", "queue", "group"))
        address = NamespaceAddress.of(fields.get("uri"), fields.get("uriEnv"), fields["namespace"])
        return cls(n, token, queue, group, address)

    def acknowledge(self) -> None:
        """Finish the messages of these claims.

        Raises:
            Fenced: Another runner took the group over.
        """
        claims = NamedClaims(QueuePlans(self.queue, Options()), self.group)
        runner_of(client_of(self.address)).run(claims.acknowledge(self.token, self.n))
