"""SparkStage: transform messages between queues, batch by batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Literal

from pydantic import BaseModel
from pyspark.sql import DataFrame

from pyqueue import arguments
from pyqueue.backends.queue_plans import QueuePlans, found, in_kind
from pyqueue.client import Client
from pyqueue.errors import Occupied
from pyqueue.messages import BatchOptions, Duration, QueueOptions
from pyqueue.queue_base import backend_of
from pyqueue.runtime.connecting import runner_of
from pyqueue.spark.addresses import NamespaceAddress, shared_client
from pyqueue.spark.batches import Batches
from pyqueue.spark.outputs import Report, Route, Transform

#: The time between two scans of an empty queue, in seconds.
IDLE_DELAY_S: Final = 1.0


def _waking(address: NamespaceAddress) -> Client:
    return Client(address.target, namespace=address.namespace, telemetry=False)


def _counting(address: NamespaceAddress) -> Client:
    return Client(address.target, namespace=address.namespace, telemetry=True)


class SparkStage:
    """A stage that transforms the messages of one queue with Spark and passes them on.

    The driver claims a batch, Spark transforms it, and the driver settles it. The queue is the
    checkpoint. A stage can be pickled if its transform can, and connects when it is first used.

    Args:
        uri: The server's URI.
        uri_env: Instead of ``uri``, the name of an environment variable that holds the URI.
        namespace: The collection that holds the queues.
        source: The queue that the stage reads.
        to: The queue that the stage writes. With a list of queues, the column ``queue`` of the
            transform's result chooses one of them for each row. If None, the transform itself
            writes the messages to a table.
        group: The durable name of this consumer. One process at a time runs each member of a
            group; further processes stand by, and one takes over within seconds if the first dies.
        members: How many processes share the work of the group. Each of them runs one member. If a
            member has no process, the messages that it has claimed wait for the end of their lease.
        transform: A function that takes a DataFrame of messages, as the data source reads them,
            and returns a DataFrame. None passes all rows on unchanged. Without ``to``, the function
            returns nothing, and may take the number of the claim as a second argument. A claim
            that is repeated keeps its number and its messages. So a function that overwrites, or
            skips, the rows of a number that it has already written writes each message once.
        output: With "move", the transform returns the columns ``id`` and ``payload``, and
            optionally ``headers`` and ``key``, with at most one row for each id. One atomic update
            moves each message; messages whose ids are missing are finished. With "transaction", the
            transform returns any rows with a ``payload``, and each becomes a new message; the whole
            batch is one transaction, which needs a replica set. With either output, a column
            ``when`` or ``delay`` sets the time at which a message becomes ready, as in a write.
        model: A pydantic model. The payload becomes a struct with the fields of the model. If None,
            the payload is a JSON string.
        max_messages: The maximum number of messages in a batch; up to 10 000 with "transaction". A
            batch also ends at 64 MB of stored messages.
        lease: How many seconds a batch stays reserved if this process dies. The lease is renewed
            while the batch runs.
        max_tries: How often a message on which the transform fails is tried before it is buried.
            None sets no limit.
        telemetry: Whether to count the messages of the batches; see docs/how-to/metrics.md.

    Raises:
        ConfigurationError: An argument is invalid.
    """

    def __init__(
        self,
        *,
        source: str,
        to: str | Iterable[str] | None = None,
        group: str,
        uri: str | None = None,
        uri_env: str | None = None,
        namespace: str = "pyqueue",
        transform: Transform | None = None,
        output: Literal["move", "transaction"] = "move",
        model: type[BaseModel] | None = None,
        max_messages: int = 5000,
        lease: Duration = 600,
        max_tries: int | None = 5,
        members: int = 1,
        telemetry: bool = True,
    ) -> None:
        self._address = NamespaceAddress.of(uri, uri_env, namespace)
        self._source = source
        self._by_column, self._to = arguments.choices(source, to)
        self._group = group
        self._transform = transform
        self._model = model
        self._terms: QueueOptions = {"lease": lease, "max_tries": max_tries}
        self._make = _counting if arguments.flag("telemetry", telemetry) else _waking
        self._options: BatchOptions = {
            "output": output,
            "max_messages": max_messages,
            "members": members,
        }
        self._batches: Batches | None = None
        # This refuses invalid arguments now, not with the first batch. It connects to no server.
        self._make_batches(Client("memory:"), lambda plans: in_kind(plans, "standard"))

    def _make_batches(self, client: Client, kind_of: Callable[[QueuePlans], QueuePlans]) -> Batches:
        queue = client.queue(self._source, self._model, **self._terms)
        targets = [kind_of(backend_of(client.queue(name))) for name in self._to]
        route = Route(kind_of(backend_of(queue)), targets, self._by_column)
        return Batches(runner_of(client), route, self._group, self._transform, **self._options)

    def _connected(self) -> Batches:
        if self._batches is None:
            client = shared_client(self._address, self._make)
            run = runner_of(client).run
            self._batches = self._make_batches(client, lambda each: run(found(each, names=True)))
        return self._batches

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_batches": None}

    def __repr__(self) -> str:
        to = f" -> {', '.join(map(repr, self._to))}" if self._to else ""
        return f"SparkStage({self._source!r}{to}, group={self._group!r})"

    def run_once(self, spark: Any) -> Report:
        """Work on one batch: the messages that an earlier process left, if any, or ready messages.

        If the transform fails, the batch is halved until the messages that make it fail are found.
        These are rolled back with backoff, or buried after their last try; all other messages move
        on. If the transform fails on every message, all are rolled back, and its error is raised.

        If the process that ran the group was killed, this waits until that process's lease on the
        group ends: a quarter of ``lease``, but no more than 5 s. A process with the same owner does
        not wait.

        Args:
            spark: A Spark session, classic or Connect.

        Returns:
            The outcome of the batch. ``claimed`` is 0 if nothing was ready, or if the rate of the
            queue let nothing start.

        Raises:
            Fenced: Another process runs the group, and nothing was claimed; or it has taken the
                group over and continues the batch, so this process settles no more of it.
            ConfigurationError: The transform's result lacks a column, contains an id twice, or
                contains an id that is not in the batch. Nothing was written, and the batch was
                released.
        """
        batches = self._connected()
        try:
            try:
                return batches.run_once(lambda: spark)
            except Occupied as other:
                time.sleep(other.wait_s)
            return batches.run_once(lambda: spark)
        finally:
            batches.release()

    def run(self, spark: Any, *, until_empty: bool = False) -> Iterator[Report]:
        """Work on one batch after another. While Spark works on a full batch, claim the next one.

        While another process runs the group, this process stands by. It takes over when the other
        process ends, or within seconds after it is killed.

        Args:
            spark: A Spark session, classic or Connect.
            until_empty: Whether to end when no message is ready. Otherwise the stage waits for
                more messages.

        Returns:
            An iterator of the reports of all batches that had messages. Close the iterator, or let
            the loop end, so that messages claimed in advance return to the queue.
        """
        batches = self._connected()
        try:
            while True:
                stood_by = batches.stands_by
                report, delay_s = batches.step(lambda: spark)
                if report is None:
                    # At the second attempt, the other process has renewed its lease: it lives.
                    if delay_s and stood_by and until_empty and not batches.has_ready():
                        return
                elif report.claimed:
                    yield report
                elif until_empty and not batches.has_work():
                    return
                else:  # nothing is ready, or the rate of the queue lets nothing start yet
                    delay_s = IDLE_DELAY_S
                if delay_s:
                    time.sleep(delay_s)
        finally:
            batches.release()

    def foreach_batch(self, df: DataFrame, batch_id: int) -> None:
        """Transform and settle a batch of a streaming query, for ``writeStream.foreachBatch``.

        The query must read the stage's source with the data source "pyqueue", for the stage's
        group. This method settles the messages itself. So a batch that Spark repeats after a crash
        contains only the messages that were not settled.

        Args:
            df: The batch, with at least the column ``id``.
            batch_id: Spark's number for the batch. It is not used.
        """
        self._connected().foreach_batch(df)
