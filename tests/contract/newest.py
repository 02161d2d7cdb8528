"""A second backend, to prove that the seam is one: queues that give the newest message first and keep no history.

It says how it differs and nothing else; what it does not say is ``Standard``'s. The contract suite runs over it as well.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pyqueue import AsyncClient, Client
from pyqueue.backends.standard import Standard
from pyqueue.client import runner_of
from pyqueue.requests import Sort

__all__ = ["AsyncNewestClient", "Newest", "NewestClient"]


class Newest(Standard):
    """Last in, first out; without history."""

    kind: ClassVar[str] = "newest"
    capabilities: ClassVar[frozenset[str]] = Standard.capabilities - {"history"}
    order: ClassVar[Sort] = (("when", -1), ("_id", -1))
    floored: ClassVar[bool] = False  # it claims from the top down

    __slots__ = ()


class NewestClient(Client):
    """A blocking client whose queues give the newest first."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        runner_of(self).backend = Newest


class AsyncNewestClient(AsyncClient):
    """Its twin."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        runner_of(self).backend = Newest
