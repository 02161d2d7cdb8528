"""The check of ``pyqueue doctor`` on gathers. It checks the gathers that are due."""

from __future__ import annotations

from typing import Final

from pyqueue import Client
from pyqueue.backends.gathering import GATHERED, look_at_due
from pyqueue.backends.hidden import GATHERS
from pyqueue.runtime.connecting import runner_of

#: The maximum number of gathers that a call checks and counts.
MAX_GATHERS: Final = 1000


def are_used(client: Client) -> bool:
    """Return whether the namespace has gathers."""
    return client.database[client.namespace].find_one({"q": GATHERS}, {"_id": 1}) is not None


def gathers(client: Client) -> str:
    """Check the gathers that are due, and describe all gathers in a text."""
    if GATHERED not in client.database[client.namespace].index_information():
        return "there are none"  # the first gather creates the index
    number, ended = runner_of(client).run(look_at_due(MAX_GATHERS))
    text = f"{number}{' or more' if number == MAX_GATHERS else ''} open"
    return f"{text}; {ended} ended just now" if ended else text
