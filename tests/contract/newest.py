"""A second kind of queue, which proves that kinds can be added: the newest message comes first.

The class states how the kind differs from the standard one: the order of claims, no bare pop, and a
field that a message has only while it is in the queue. It does not offer a history. The contract
suite runs over this kind too.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pyqueue.backends import transitions
from pyqueue.backends.kind import register
from pyqueue.backends.standard import Standard


@register
class Newest(Standard):
    """Last in, first out, without history. ``height`` is the time at which a message entered."""

    name = "newest"
    capabilities = Standard.capabilities - {"history"}
    order = (("when", -1), ("_id", -1))
    scans_forward = False  # it claims in descending order
    stay_fields = (*Standard.stay_fields, "height")
    bare_pop = False

    def entering(
        self, queue: str, when: datetime, priority: int | None = None, group: str | None = None
    ) -> dict[str, Any]:
        """Return the fields of a message that enters the queue."""
        return transitions.entering(queue, when) | {"height": when}
