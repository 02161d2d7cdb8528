"""Tools for testing programs that use queues; see docs/how-to/testing.md.

The fixtures of ``plugin`` provide clients, in memory or on a server. ``assert_enqueued`` and
``refute_enqueued`` search for messages, ``perform`` runs a handler once, and ``drain`` runs a
worker until its queues are empty.

With an async client, or a worker that uses one, await the result of each function.
"""

from typing import TYPE_CHECKING

from pyqueue.lazy import importer

if TYPE_CHECKING:
    from pyqueue.testing.clients import AsyncTestClient, TestClient
    from pyqueue.testing.enqueued import assert_enqueued, refute_enqueued
    from pyqueue.testing.running import Performed, drain, perform

__all__ = [
    "AsyncTestClient",
    "Performed",
    "TestClient",
    "assert_enqueued",
    "drain",
    "perform",
    "refute_enqueued",
]

if not TYPE_CHECKING:
    # pytest imports the plugin in each run, also in runs that use no queue.
    __getattr__ = importer(
        __name__,
        {
            "clients": ["AsyncTestClient", "TestClient"],
            "enqueued": ["assert_enqueued", "refute_enqueued"],
            "running": ["Performed", "drain", "perform"],
        },
    )
