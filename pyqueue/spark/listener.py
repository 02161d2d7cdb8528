"""Acknowledging the last batch of a stream: Spark tells its source that a batch is committed only when it asks for the next one."""

from __future__ import annotations

import json
import logging
from typing import Any

from pyspark.sql.streaming.listener import StreamingQueryListener

from pyqueue.errors import QueueError
from pyqueue.spark.offsets import Offset

__all__ = ["QueueProgressListener"]

log = logging.getLogger("pyqueue")


class QueueProgressListener(StreamingQueryListener):
    """Finishes the messages of each batch of a stream that reads a queue, once Spark has committed the batch.

    ``register`` and ``spark_session`` add it. Without it nothing is lost or doubled: the last batch of a query that is stopped then stays
    reserved until the query is started again, which finishes it. It needs to know the server: a source whose ``uri`` has a password in it
    is left to the next start; use ``uriEnv``.
    """

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802
        """Nothing is to be done."""

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802
        """A batch is committed: finish its messages."""
        for source in event.progress.sources:
            try:
                Offset.parse(json.loads(source.endOffset)).acknowledge()
            except QueueError as error:
                log.info("the last batch stays reserved until the next one is asked for: %s", error)
            except (TypeError, ValueError, KeyError):
                continue  # it is no queue

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802
        """Nothing is to be done."""

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802
        """Nothing is to be done."""
