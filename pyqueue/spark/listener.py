"""Acknowledge the last batch of a stream.

Spark tells a source that a batch is committed only when it asks for the next batch. After the last
batch of a query there is no next one, so a listener has to acknowledge it.
"""

from __future__ import annotations

import json
import logging

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from pyqueue.errors import QueueError
from pyqueue.spark.offsets import Offset

__all__ = ["QueueProgressListener"]

log = logging.getLogger("pyqueue")


class QueueProgressListener(StreamingQueryListener):
    """Finish the messages of each batch of a stream from a queue once Spark has committed it.

    ``register`` and ``spark_session`` add this listener. Without it nothing is lost or delivered
    twice. But the last batch of a query that is stopped then stays reserved until the query starts
    again.

    The listener needs the server's address. It cannot act for a source whose ``uri`` contains a
    password: use ``uriEnv`` there.
    """

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802
        """Do nothing."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802
        """Finish the messages of the batch that was committed."""
        for source in event.progress.sources:
            try:
                Offset.parse(json.loads(source.endOffset)).acknowledge()
            except QueueError as error:
                log.info("the last batch stays reserved until the next batch starts: %s", error)
            except (TypeError, ValueError, KeyError):
                continue  # another kind of source

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802
        """Do nothing."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802
        """Do nothing."""
