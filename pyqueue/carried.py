"""What a reservation carries so that a client can settle it.

In the process that received it, this is an object that builds the commands for its queue or
consumer group (the plans). Plans cannot be pickled, so a pickled reservation carries only options.
"""

from __future__ import annotations

import pickle
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

from pyqueue.messages import Backoff
from pyqueue.requests import Plan


class CarriedOptions(NamedTuple):
    """The options of a queue or a consumer group that are needed to settle its reservations."""

    #: The kind of the queue; "stream" for a consumer group.
    kind: str
    max_tries: int | None
    dead_letter: str
    #: How long finished messages are kept, in seconds.
    history: float | None
    backoff: Backoff
    #: The pickled model of the payloads. None if there is no model, or if it cannot be pickled.
    model: bytes | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Carried:
    """What a client needs to settle a reservation: the plans of its queue, or the options."""

    plans: Any = None
    options: CarriedOptions | None = None

    @property
    def key(self) -> Hashable:
        """A value that is equal for reservations that are settled in the same way."""
        return self.options or id(self.plans)

    def __reduce__(self) -> tuple[Any, ...]:
        return Carried, (None, self.options or _options_of(self.plans))


def carrying(plans: Any, receiving: Plan[list[Any]]) -> Plan[list[Any]]:
    """Run a plan that receives messages, and store ``plans`` in each reservation."""
    received = yield from receiving
    carried = Carried(plans)
    for each in received:
        each.carried = carried
    return received


def _options_of(plans: Any) -> CarriedOptions:
    options, model = plans.options, plans.codec.model
    return CarriedOptions(
        plans.kind_name,
        options.max_tries,
        options.dead_letter,
        options.history,
        options.backoff,
        model=None if model is None else _pickled(model),
    )


def _pickled(model: object) -> bytes | None:
    """Return a model as bytes, so that a process without its module can still load the rest."""
    try:
        return pickle.dumps(model)
    except Exception:  # for example, the class is local to a function
        return None
