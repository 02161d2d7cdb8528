"""The indexes of a namespace: the common indexes, and indexes that only some queues need.

Each index is created when the first queue that needs it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pyqueue.backends import kind as kinds
from pyqueue.backends.kind import IndexTerms
from pyqueue.backends.namespace import CLAIMS, HOT
from pyqueue.errors import ConfigurationError, DuplicateKey, NotPermitted
from pyqueue.requests import CreateIndex, Indexes, Plan

#: The common indexes.
INDEXES: Final[Mapping[str, IndexTerms]] = {
    HOT: ([("q", 1), ("when", 1), ("_id", 1)], {}),
    "key": (
        [("q", 1), ("key", 1)],
        {"unique": True, "partialFilterExpression": {"key": {"$exists": True}}},
    ),
    # Each queue has its own history length, so each document says when it expires.
    "expires": (
        [("expires", 1)],
        {"expireAfterSeconds": 0, "partialFilterExpression": {"processed": {"$exists": True}}},
    ),
    CLAIMS: (
        [("claim.g", 1), ("claim.n", 1), ("_id", 1)],
        {"partialFilterExpression": {"claim.g": {"$exists": True}}},
    ),
}
#: The index that finds the messages of a gather. The first gather creates it; see ``gathering``.
GATHER_INDEXES: Final[Mapping[str, IndexTerms]] = {
    "gathers": (
        [("gather.id", 1), ("_id", 1)],
        {"partialFilterExpression": {"gather.id": {"$exists": True}}},
    ),
}
#: The indexes that release 0.1 uses, and this release does not.
FORMER_INDEXES: Final = frozenset({"group"})


def all_indexes() -> Mapping[str, IndexTerms]:
    """Return the common indexes, and the indexes that only some queues need."""
    found = {**INDEXES, **GATHER_INDEXES}
    for kind in kinds.known().values():
        found |= kind.needs(None)
    return found


def indexes_of(kind: object, shape: object) -> Mapping[str, IndexTerms]:
    """Return the indexes that a queue needs besides the common indexes."""
    known = kinds.known().get(kind) if isinstance(kind, str) else None
    return {} if known is None else known.needs(shape if isinstance(shape, Mapping) else {})


def make_indexes(namespace: str, indexes: Mapping[str, IndexTerms] = INDEXES) -> Plan[None]:
    """Create the indexes that are missing.

    Args:
        namespace: The name of the collection.
        indexes: The keys and options of each index, keyed by index name.

    Raises:
        ConfigurationError: An index is missing and the database user may not create it. The error
            text has the commands for an administrator.
    """
    try:
        for name, (keys, options) in indexes.items():
            yield from CreateIndex(name, keys, options)
    except DuplicateKey as error:
        raise ConfigurationError(
            f"the unique index on message keys of namespace {namespace!r} cannot be created, "
            "because messages with equal keys arrived while it was missing (was the collection "
            "dropped?); remove or finish one message of each pair, for example with Queue.remove"
        ) from error
    except NotPermitted as error:
        try:
            present = yield from Indexes()
        except NotPermitted:
            present = {}
        missing = [name for name in indexes if name not in present]
        if missing:
            commands = "\n".join(shell_command(namespace, name) for name in missing)
            raise ConfigurationError(
                f"this database user may not create the indexes of namespace {namespace!r}, and "
                f"{', '.join(missing)} could not be found; grant the user createIndex and "
                f"listIndexes on the collection, or have an administrator run:\n{commands}"
            ) from error


def shell_command(namespace: str, name: str) -> str:
    """Return the mongosh command with which an administrator creates an index."""
    keys, options = all_indexes()[name]
    described = {"name": name, **options}
    return (
        f"  db.getCollection({namespace!r})"
        f".createIndex({_shell_value(dict(keys))}, {_shell_value(described)})"
    )


def _shell_value(value: object) -> str:
    if isinstance(value, Mapping):
        fields = (
            f"{_shell_value(key) if '.' in key else key}: {_shell_value(item)}"
            for key, item in value.items()
        )
        return "{" + ", ".join(fields) + "}"
    return str(value).lower() if isinstance(value, bool) else repr(value)
