"""The distribution of tests to the workers of xdist, for many thousands of tests.

xdist's own scheduler keeps all work that a worker has finished and counts through it after each
test, and it looks for each next test in a list of all tests. So the time of the controlling process
grows with the square of the number of tests, and the workers get less of the processor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xdist.scheduler import LoadGroupScheduling
from xdist.workermanage import WorkerController


class Collected(list[str]):
    """The node ids that a worker has collected. An index is found without a search."""

    def __init__(self, ids: Sequence[str]) -> None:
        super().__init__(ids)
        self._places = {id: place for place, id in enumerate(ids)}

    def index(self, value: str, *bounds: Any) -> int:
        """Return the index of a node id."""
        return self._places[value]


class GroupScheduling(LoadGroupScheduling):  # type: ignore[misc]  # xdist has no types
    """Distribute tests as ``--dist loadgroup`` does, and forget a test once it is complete."""

    def add_node_collection(self, node: WorkerController, collection: Sequence[str]) -> None:
        """Store the tests that a worker has collected."""
        super().add_node_collection(node, collection)
        if node in self.registered_collections:
            self.registered_collections[node] = Collected(collection)

    def mark_test_complete(
        self, node: WorkerController, item_index: int, duration: float = 0
    ) -> None:
        """Remove a test from the work of a worker, and give it more."""
        id = self.registered_collections[node][item_index]
        scope = self._split_scope(id)
        work = self.assigned_work[node]
        del work[scope][id]
        if not work[scope]:
            del work[scope]
        self._reschedule(node)
