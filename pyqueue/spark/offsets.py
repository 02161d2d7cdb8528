"""The offset of a stream: the number of a claim, and how to find the claim.

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
from pyqueue.backends.queue_plans import plans_of
from pyqueue.backends.reading import options_of
from pyqueue.runtime.connecting import runner_of
from pyqueue.spark.addresses import NamespaceAddress, client_of


def recorded_claims(
    address: NamespaceAddress, queue: str, group: str, member: int | None = None
) -> NamedClaims:
    """Return the plans of a group or a member, with the options that the queue's programs use.

    They decide how messages leave the queue. The queue's record has them.

    Raises:
        ConfigurationError: The record holds an option that is not valid.
    """
    connection = runner_of(client_of(address))
    stored = {**Options().listed(), **connection.run(options_of(queue))}
    tries, history = stored["max_tries"], stored["history"]
    options = Options(
        max_tries=None if tries is None else arguments.count("max_tries", tries),
        dead_letter=arguments.dead_letter(queue, stored["dead_letter"] or None),
        history=None if history is None else arguments.duration("history", history, positive=True),
    )
    plans = plans_of(
        queue,
        options,
        kind=connection.run(target(queue)).kind.name,
        owner=connection.owner,
        command_timeout=connection.command_timeout,
    )
    return NamedClaims(plans, group, member)


@dataclass(frozen=True)
class Offset:
    """All claims of a group up to number ``n``, as the runner with this token made them."""

    n: int
    token: str
    queue: str
    group: str
    address: NamespaceAddress
    #: The member of the group.
    member: int | None = None
    #: The batch that ends here contains the claims above this number.
    after: int = 0
    #: The first token of the query's runner. A restart of the query, and only that, keeps it.
    lineage: str = ""
    #: How many messages the batch that ends here held; None: an earlier release made the offset.
    count: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the form that Spark stores.

        Reading needs ``n``, ``after``, ``member`` and ``lineage``. The listener needs the rest, to
        acknowledge the last batch.
        """
        fields = {
            "n": self.n,
            "token": self.token,
            "queue": self.queue,
            "group": self.group,
            "namespace": self.address.namespace,
            "member": self.member,
            "after": self.after,
            "lineage": self.lineage,
        }
        if self.count is not None:
            fields["count"] = self.count
        if self.address.uri_env is not None:
            fields["uriEnv"] = self.address.uri_env
        elif not self.address.has_secret:
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
        after, lineage = fields.get("after", 0), lineage_of(fields)
        member, count = fields.get("member"), fields.get("count")
        return cls(
            n=n,
            token=token,
            queue=queue,
            group=group,
            address=address,
            member=member,
            after=after,
            lineage=lineage,
            count=count,
        )

    def acknowledge(self) -> ClaimProgress:
        """Finish the messages of these claims, unless that is done. Return how far the group is.

        Raises:
            Fenced: Another runner took the group over.
        """
        run = runner_of(client_of(self.address)).run
        claims = recorded_claims(self.address, self.queue, self.group, self.member)
        if not self.token:  # the query stands by
            return run(claims.progress())
        run(claims.acknowledge(self.token, self.n, self.count))
        return run(claims.progress(self.token))


def lineage_of(fields: Mapping[str, Any]) -> str:
    """Return the first token of the runner that made this offset.

    The first release stored only the last token.
    """
    return str(fields.get("lineage", fields["token"]))


def after_of(start: Mapping[str, Any], end: Mapping[str, Any]) -> int:
    """Return the number above which the claims of the batch between two offsets are."""
    return int(end.get("after", start["n"]))
