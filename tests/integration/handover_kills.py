"""A program that kills processes which make several messages of each, again and again.

``python -m tests.integration.handover_kills URL KILLS SEED LEDGER``
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any, NoReturn

from pyqueue import AsyncClient, Client, Many, To
from tests.support.kills import LEASE_S, Note, kill_again_and_again

#: How many messages become of each.
OUTPUTS = 3


def split(number: int) -> Many:
    """Make parts of a message, in two queues."""
    return Many([To(f"parts-{part % 2}", [number, part]) for part in range(OUTPUTS)])


def stage(client: Any) -> Any:
    """Return the pipeline: one stage."""
    options = {"lease": LEASE_S, "max_tries": None}
    return client.pipeline().choice("in", split, to=["parts-0", "parts-1"], **options)


def blocking(url: str, name: str, note: Note) -> NoReturn:
    """Split messages on a blocking client, for ever."""
    with Client(url) as client:
        client.queue("in").counts()
        note("started", name)
        stage(client).run(concurrency=4, handle_signals=False)
    raise AssertionError("it ended")


def awaited(url: str, name: str, note: Note) -> NoReturn:
    """Split messages on an async client, for ever."""

    async def work() -> None:
        async with AsyncClient(url) as client:
            await client.queue("in").counts()
            note("started", name)
            await stage(client).run(concurrency=4, handle_signals=False)

    asyncio.run(work())
    raise AssertionError("it ended")


if __name__ == "__main__":
    kill_again_and_again([blocking, awaited], sys.argv[1:])
