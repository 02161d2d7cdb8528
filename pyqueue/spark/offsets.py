"""The offset of a streaming query: the number of a claim, and how to find the claim.

Spark stores offsets in its checkpoint and shows them in progress reports, so they contain no
credentials.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from pyqueue import arguments
from pyqueue.backends.claims.claims import NamedClaims
from pyqueue.backends.claims.groups import ClaimProgress
from pyqueue.backends.namespace import target
from pyqueue.backends.options import Options
from pyqueue.backends.reading import options_of
from pyqueue.runtime.connecting import runner_of
from pyqueue.spark.addresses import NamespaceAddress, client_of, plans_at


@dataclass(frozen=True)
class Offset:
    """The end of a batch: the claims of a group up to ``n``, made by the runner with ``token``."""

    n: int
    token: str
    queue: str
    group: str
    address: NamespaceAddress
    #: The number of the group's member that made the claims, or None without members.
    member: int | None = None
    #: The batch that ends here contains the claims above this number.
    after: int = 0
    #: The first token of a chain of runners that continue each other's work.
    lineage: str = ""
    #: How many messages the batch that ends here has, or None in offsets of an earlier release.
    count: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the form that Spark stores.

        A reader needs ``n``, ``after``, ``member`` and ``lineage``. The listener needs the
        other fields to acknowledge the last batch.
        """
        fields = vars(self) | {"namespace": self.address.namespace}
        del fields["address"]
        if self.count is None:
            del fields["count"]
        if self.address.uri_env is not None:
            fields["uriEnv"] = self.address.uri_env
        elif not self.address.has_secret:
            fields["uri"] = self.address.uri
        return fields

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Self:
        """Return the offset from the fields that ``to_json`` returned.

        Raises:
            KeyError, TypeError: The offset belongs to another kind of source.
            ConfigurationError: The offset does not contain the address of the server.
        """
        given = {name: fields[name] for name in ("n", "token", "queue", "group")}
        given |= {name: fields[name] for name in ("member", "after", "count") if name in fields}
        address = NamespaceAddress.of(fields.get("uri"), fields.get("uriEnv"), fields["namespace"])
        return cls(address=address, lineage=lineage_of(fields), **given)

    def claims(self) -> NamedClaims:
        """Return the plans (command sequences) of the group or the member.

        They use the options in the queue's record that decide how messages leave the queue.

        Raises:
            ConfigurationError: The record contains an invalid option.
        """
        connection, queue = runner_of(client_of(self.address)), self.queue
        stored = {**Options().listed(), **connection.run(options_of(queue))}
        tries, history = stored["max_tries"], stored["history"]
        if history is not None:
            history = arguments.duration("history", history, positive=True)
        options = Options(
            max_tries=None if tries is None else arguments.count("max_tries", tries),
            dead_letter=arguments.dead_letter(queue, stored["dead_letter"] or None),
            history=history,
        )
        kind = connection.run(target(queue)).kind.name
        return NamedClaims(plans_at(self.address, queue, options, kind), self.group, self.member)

    def acknowledge(self) -> ClaimProgress:
        """Finish the messages of these claims, and return the progress of the group.

        If these claims were acknowledged before, this writes nothing.

        Raises:
            Fenced: Another runner took the group over.
        """
        run, claims = runner_of(client_of(self.address)).run, self.claims()
        if not self.token:  # the query stands by
            return run(claims.progress())
        run(claims.acknowledge(self.token, self.n, self.count))
        return run(claims.progress(self.token))


def lineage_of(fields: Mapping[str, Any]) -> str:
    """Return the lineage in an offset: the first token of the chain of runners that made it.

    An offset of version 0.1 has no lineage, so its token is returned instead.
    """
    return str(fields.get("lineage", fields["token"]))


def after_of(start: Mapping[str, Any], end: Mapping[str, Any]) -> int:
    """Return the number of the last claim before the batch that lies between two offsets."""
    return int(end.get("after", start["n"]))
