"""Live numbers: server-sent events with the texts that have changed since the previous event."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Final

from pyqueue.errors import QueueError
from pyqueue.web.access import Viewer
from pyqueue.web.charts import line
from pyqueue.web.overview import board
from pyqueue.web.sampling import INTERVAL_S, Sample
from pyqueue.web.shapes import rate
from pyqueue.web.site import Site

#: After an error, the browser connects again after this time, in milliseconds.
_RETRY_MS: Final = 2000


async def events(site: Site, viewer: Viewer, every_s: float = INTERVAL_S) -> AsyncIterator[str]:
    """Yield the changes of the overview until the viewer leaves.

    Args:
        site: The dashboard that shows the overview.
        viewer: The person. The permission to view is checked again before each event.
        every_s: The seconds between two events.
    """
    yield f"retry: {_RETRY_MS}\n\n"
    sent: Mapping[str, str] = {}
    number = 0
    while await (asked := viewer.again()).may("view"):
        try:
            sample = await site.sampler.sample()
        except QueueError:
            sent, number = {}, 0
            yield _event("down", {})
        else:
            if sample.number == number:
                yield ": no change\n\n"
            else:
                texts = await _texts(sample, asked)
                yield _event(
                    "cells", {key: text for key, text in texts.items() if sent.get(key) != text}
                )
                sent, number = texts, sample.number
        await asyncio.sleep(every_s)


def _event(name: str, data: Mapping[str, str]) -> str:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"


async def _texts(sample: Sample, viewer: Viewer) -> dict[str, str]:
    """Return the texts of the live elements, keyed by element. A sparkline's text is its points."""
    rows, tiles = await board(sample, viewer)
    found = {f"tiles:{name}": text for name, text in tiles["texts"].items()}
    for name in ("in", "done"):
        found[f"tiles:{name}:line"] = line(tiles[f"{name}_points"])
    for each in rows:
        found |= {f"{each['name']}:{name}": text for name, text in each["texts"].items()}
        found |= {f"{each['name']}:to:{to}": rate(moved) for to, moved in each["moves"].items()}
        found[f"{each['name']}:line"] = line(each["points"])
    return found
