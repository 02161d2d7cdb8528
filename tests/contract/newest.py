"""A second kind of queue, to prove the seam: the newest message comes first.

The class says how the kind differs from the standard one: the order of claims, no bare pop, and a
field that a message gets when it enters and loses when it leaves. It declares that it offers no
history. The contract suite runs over it as well.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pyqueue.backends import transitions
from pyqueue.backends.kind import register
from pyqueue.backends.standard import Standard

__all__ = ["Newest"]


@register
class Newest(Standard):
    """Last in, first out; without history. ``height`` shows when a message was put on the stack."""

    name = "newest"
    capabilities = Standard.capabilities - {"history"}
    order = (("when", -1), ("_id", -1))
    scans_forward = False  # it claims from the top down
    stay_fields = (*Standard.stay_fields, "height")
    bare_pop = False

    def entering(self, queue: str, when: datetime) -> dict[str, Any]:
        """Return the fields of a message that enters the queue."""
        return transitions.entering(queue, when) | {"height": when}
