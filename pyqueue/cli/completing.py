"""Shell completion of the names of queues.

A shell waits for the names while the user types, so a completion takes at most a second. If the
server does not answer, there are no names and no error. Nothing is written, not even a missing
index.
"""

from __future__ import annotations

import os
import threading
from contextlib import closing, suppress
from typing import Final

import pymongo
import typer

from pyqueue import Client

#: How long a completion may take, in seconds.
LIMIT_S: Final = 1.0


def queue_names(context: typer.Context, incomplete: str) -> list[str]:
    """Return the names of queues and streams that begin with the text typed so far."""
    url = context.params.get("url") or os.environ.get("PYQUEUE_URL") or ""
    namespace = context.params.get("namespace") or os.environ.get("PYQUEUE_NAMESPACE") or "pyqueue"
    found: list[str] = []
    if url.startswith("mongodb"):  # another URL would start a server
        # Some delays have no time limit: a host name may take long to resolve.
        reading = threading.Thread(target=_read, args=(url, namespace, found), daemon=True)
        reading.start()
        reading.join(LIMIT_S)
    return sorted(name for name in found if name.startswith(incomplete))


def _read(url: str, namespace: str, found: list[str]) -> None:
    """Add the names of all queues to a list, or none if they cannot be read."""
    with suppress(Exception), pymongo.timeout(LIMIT_S):
        client = Client(url, namespace=namespace, signals="none:", command_timeout=LIMIT_S)
        with closing(client):
            # Any method of a client would first create missing indexes.
            names = client.database[client.namespace].distinct("q")
        found += [each for each in names if isinstance(each, str) and not each.startswith("~")]
