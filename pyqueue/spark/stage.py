"""SparkStage: a transform between two queues, driven batch by batch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Literal

from pyqueue import arguments
from pyqueue.client import Client
from pyqueue.connecting import runner_of
from pyqueue.queues import Duration, backend_of
from pyqueue.spark.addresses import NamespaceAddress, client_of
from pyqueue.spark.batches import Batches, Report, Transform

__all__ = ["SparkStage"]

#: Seconds between looks at an empty queue.
LOOK = 1.0


class SparkStage:
    """A transform between two queues. The driver claims a batch, Spark transforms it, the driver settles it; the queue is the checkpoint.

    It pickles, its transform permitting, and connects at first use.

    Args:
        uri: the server's URI; or
        uri_env: the name of an environment variable that holds it.
        namespace: the collection that holds the queues.
        source: the queue it reads.
        to: the queue it writes.
        group: the durable name of this consumer; one process at a time uses it.
        transform: takes a DataFrame with the columns of a read, and answers one. None: what comes in goes out.
        output: "move": the answer has the columns id and payload (headers and key may be there), at most one row for each id; each message
            is moved by one atomic update, and ids that are absent are finished. "transaction": any rows with a payload, each a new
            message; the whole batch is one transaction, which needs a replica set.
        model: a pydantic model: the payload comes as a struct of its fields. None: as a JSON string.
        max_messages: how many messages one batch takes at most; with "transaction" 10 000 at most.
        lease: seconds for which a batch is held if this process dies; it is renewed while the batch runs.
        max_tries: how often a message on which the transform fails is tried before it is buried; None: never.

    Raises:
        ConfigurationError: an argument is not allowed.
    """

    def __init__(
        self,
        *,
        source: str,
        to: str,
        group: str,
        uri: str | None = None,
        uri_env: str | None = None,
        namespace: str = "pyqueue",
        transform: Transform | None = None,
        output: Literal["move", "transaction"] = "move",
        model: Any = None,
        max_messages: int = 5000,
        lease: Duration = 600,
        max_tries: int | None = 5,
    ) -> None:
        self._place = NamespaceAddress.of(uri, uri_env, namespace)
        self._source = source
        self._options: dict[str, Any] = {"model": model, "lease": lease, "max_tries": max_tries}
        self._to = arguments.queue_name(to)
        self._rest = (group, transform, output, max_messages)
        self._made: Batches | None = None
        self._of(
            Client("memory:")
        )  # which asks nothing of anybody: what is not allowed is refused here, and not at the first batch

    def _of(self, client: Client) -> Batches:
        source = client.queue(self._source, **self._options)
        target = client.queue(self._to)
        return Batches(runner_of(client), backend_of(source), backend_of(target), *self._rest)

    @property
    def _batches(self) -> Batches:
        if self._made is None:
            self._made = self._of(client_of(self._place, waking=True))
        return self._made

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_made": None}

    def __repr__(self) -> str:
        return f"SparkStage({self._source!r} -> {self._to!r}, group={self._rest[0]!r})"

    def run_once(self, spark: Any) -> Report:
        """Work on one batch: on what an earlier process left behind, or else on what is ready.

        If the transform fails, the batch is halved until the messages that make it fail are found: they are rolled back with backoff, or
        buried when they had their last try, and the others go on. If it fails on all, all are rolled back, and the error is raised.

        Args:
            spark: a session, classic or Connect.

        Returns:
            A Report: claimed (0: nothing was ready), written, dropped, failed, lost, seconds.

        Raises:
            Fenced: another process took the group over; it goes on with the batch, of which this one settles nothing more.
            ConfigurationError: the transform's answer lacks a column, or has an id twice or one that is not in the batch; nothing was
                written, and the batch is given back.
        """
        return self._batches.run_once(lambda: spark)

    def run(self, spark: Any, *, until_empty: bool = False) -> Iterator[Report]:
        """Work on one batch after the other.

        Args:
            spark: a session.
            until_empty: end when nothing is ready; else wait for more, and go on for ever.

        Returns:
            An iterator of the Reports of all batches that had messages.
        """
        while True:
            report = self.run_once(spark)
            if report.claimed:
                yield report
            elif until_empty:
                return
            else:
                time.sleep(LOOK)

    def foreach_batch(self, df: Any, batch_id: int) -> None:
        """For ``writeStream.foreachBatch(stage.foreach_batch)``: transform and settle the batches of a stream.

        The stream reads the stage's source by the data source "pyqueue", with the stage's group. What it was given is settled here, so a
        batch that is repeated after a crash has only the messages that were not.

        Args:
            df: the batch, with at least its column id.
            batch_id: Spark's number of it; not used.
        """
        self._batches.foreach_batch(df, batch_id)
