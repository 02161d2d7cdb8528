"""The check of ``pyqueue doctor`` on queues with ``auto_delete``: it deletes the unused queues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pyqueue import Client
from pyqueue.backends.indexes import INDEXES
from pyqueue.backends.unused import delete_unused, listed
from pyqueue.runtime.connecting import runner_of

#: How many queues are named.
_MAX_NAMED: Final = 5


def unused_queues(client: Client) -> str:
    """Delete the unused queues that have ``auto_delete``.

    Returns:
        A text that names the deleted queues, and the remaining queues that have ``auto_delete``.
    """
    found = client.database[client.namespace].index_information()
    if not INDEXES.keys() <= found.keys():  # a client would create them
        return "not checked without the indexes"
    run = runner_of(client).run
    deleted, left = run(delete_unused()), run(listed(_MAX_NAMED + 1))
    texts = [f"deleted just now: {_named(deleted)}"] if deleted else []
    if left:
        texts.append(f"deleted once they are unused and empty: {_named(left)}")
    return "; ".join(texts) or "no queue has auto_delete"


def _named(names: Sequence[str]) -> str:
    text = ", ".join(map(repr, names[:_MAX_NAMED]))
    return f"{text} and more" if len(names) > _MAX_NAMED else text
