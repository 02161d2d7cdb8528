"""A program that stops itself by SIGSTOP between its permits and its claim.

``python -m tests.integration.stopped_consumer URL``
"""

from __future__ import annotations

import os
import signal
import sys
import time

import pymongo
from pymongo import monitoring

from pyqueue import Client


class Stopper(monitoring.CommandListener):
    """Stops this process once, when the server has granted permits."""

    stopped = False

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        """Do nothing."""

    def succeeded(self, event: monitoring.CommandSucceededEvent) -> None:
        """Stop at the reply of a bucket."""
        value = event.reply.get("value")
        if value and value.get("granted") and not self.stopped:
            self.stopped = True
            os.kill(os.getpid(), signal.SIGSTOP)

    def failed(self, event: monitoring.CommandFailedEvent) -> None:
        """Do nothing."""


def consume(url: str) -> None:
    """Receive once. Print how many messages started, and when that was known."""
    mongo = pymongo.MongoClient[dict[str, object]](url, event_listeners=[Stopper()])
    with mongo, Client(mongo.get_default_database()) as client:
        held = client.queue("a").reserve_many(10, timeout=0)
        print(len(held), time.monotonic())


if __name__ == "__main__":
    consume(sys.argv[1])
