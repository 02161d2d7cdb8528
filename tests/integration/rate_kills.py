"""A program that kills processes which consume a queue with a rate, again and again.

``python -m tests.integration.rate_kills URL KILLS SEED LEDGER``
"""

from __future__ import annotations

import random
import sys
from functools import partial
from typing import NoReturn

from pyqueue import Client
from tests.integration.group_kills import named
from tests.support import kills
from tests.support.kills import LEASE_S, Note, kill_again_and_again


def consume(url: str, name: str, note: Note) -> NoReturn:
    """Receive, and end each message in one of three ways, for ever."""
    with Client(url) as client:
        queue = client.queue("limited", lease=LEASE_S, max_tries=None)
        queue.paused()
        note("started", name)
        kills.consume(
            queue,
            note,
            random.Random(name),
            [1, 3, 20],
            named,
            rollback=partial(queue.rollback, delay=0),
            release=queue.release,
        )


if __name__ == "__main__":
    kill_again_and_again([consume, consume, consume], sys.argv[1:])
