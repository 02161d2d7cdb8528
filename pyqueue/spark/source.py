"""The data source "pyqueue": queues as Spark's tables and streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

import pyspark
from pyspark.sql.datasource import DataSource, DataSourceReader
from pyspark.sql.types import StructField, StructType

from pyqueue.errors import ConfigurationError
from pyqueue.spark.defaults import with_defaults
from pyqueue.spark.option_table import Way, WriteOptions
from pyqueue.spark.options import Options, checked, payload_column, read_columns
from pyqueue.spark.positions import LogReader
from pyqueue.spark.tables import BatchReader, FilteringReader

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceStreamArrowWriter,
        DataSourceStreamReader,
        DataSourceWriter,
    )


class QueueDataSource(DataSource):
    """The data source "pyqueue": read and write the messages of a queue.

    A batch read shows the ready messages and consumes none. A batch write, in mode append, shows
    all its messages at its end, or none. A streaming read claims messages for a group and finishes
    each batch once Spark has committed it. A streaming write shows each batch once, even if Spark
    repeats it after its messages were consumed.

    Options of all uses:
        uri, url, uriEnv: The server's URI, or the name of an environment variable that holds it;
            the variable PYQUEUE_URL by default. With a variable the URI appears in no plan and no
            log. ``url`` means the same as ``uri``, and Spark hides its value in tables.
        namespace: The collection that holds the queues; "pyqueue" by default.

    A setting of the session such as spark.pyqueue.uriEnv is the default of uriEnv, namespace,
    numPartitions, maxMessagesPerBatch or maxWaitMs, if it was set before ``register``.

    Options of queues:
        queue: The name of the queue. A write may have several; see ``queues``.

    Options of reads:
        payloadType: "json" (default), "variant" or a Spark type.
        payloadModel: In place of a type, a pydantic model as "module:Model". The driver imports it.
        columns: The columns of the read, separated by commas; all by default.
        numPartitions: How many tasks read. By default the number of tasks that the cluster could
            run at once when ``register`` was called, or 4 if Spark found the data source by itself.
        onBadRecord: How to treat a payload that does not fit ``payloadType``. "fail" ends the
            query with an error that names the message; the default of batch reads, and of reads of
            a stream. "null" reads it as null. "bury", the default of streaming reads of a queue and
            only for these, moves the message to the dead-letter queue with the end of the batch.
            A message that was dead before is read as null.
        columnNameOfCorruptRecord: With ``onBadRecord`` "null", the name of one more column of type
            string, which holds such a payload as JSON.

    Options of batch reads of a queue:
        match: A JSON object of fields of the payload and their values or conditions: only messages
            that match are read. Conditions use $eq, $ne, $gt, $gte, $lt, $lte, $in, $nin, $exists.
        mustExist: "true" (default): a queue that is not there is an error; with "false" the
            read has no rows.
        pushFilters: "true" lets the database apply filters on id, key, when and tries. Spark needs
            the setting spark.sql.python.filterPushdown.enabled; "false" by default.

    Options of streaming reads:
        maxMessagesPerBatch: The largest size of a batch; 10000 by default.
        maxWaitMs: How long an idle query waits for the signal of a push each time that Spark asks
            for new data, in milliseconds; 100 by default, 0 to 60000. All sources of a query share
            this time. With the trigger ``availableNow`` a query never waits.

    Options of streaming reads of a queue:
        group: The durable name of this consumer. One query at a time runs it, the rest stand by.
        members: How many queries share the work of the group; 1 by default. Each needs its own
            checkpoint. Give all of them the same number.
        minMessagesPerBatch: A batch waits until this number of messages is ready; 1 by default.
        maxTriggerDelay: But it waits no longer than this after the last batch: "15m" by default,
            or another number of ms, s, m or h. The first batch and ``availableNow`` do not wait.
        maxBytesPerBatch: The largest size of a batch, in bytes of stored messages; 67108864 by
            default, which is 64 MB. A batch has at least one message.
        leaseSeconds: How long a batch stays held if the query dies, in seconds; 600 by default.

    Options of reads of a stream:
        stream: In place of ``queue``, the name of a stream, which is read by position.
        startingPosition: Where a query without a checkpoint begins, or a batch read: "first"
            (default), "last", a position, or an instant with its time zone in ISO form, such as
            2026-01-31T12:00:00Z. An instant means the first pack that was appended then or later.

    Options of batch reads of a stream:
        endingPosition: The position before which the read ends, in the same forms; "last" by
            default.

    Options of streaming reads of a stream:
        failOnDataLoss: "true" (default): a query fails if the retention has deleted messages that
            it has not read; with "false" it leaves them out with a warning, as a batch read does.

    Options of writes:
        queues: In place of ``queue``, the names of several queues, separated by commas. The column
            ``queue`` of each row names one of them; a null or another name fails the write. The
            record of a stage belongs to the first one: add further queues behind it.
        onDuplicate: How to treat a row whose ``key`` belongs to a live message of its queue, or
            with ``idColumn`` its id. "ignore" (default) leaves the row out. "replace" overwrites
            that message, unless it has finished or moved on. "error" fails the write. A write that
            appears once, of a stream or with ``epoch``, takes "ignore" only, and "replace" with
            ``idColumn`` needs ``staged`` "false". In other streams, "error" ignores ids.
        onBadRow: How to treat a row whose payload, headers, key, instant, priority or group
            cannot be stored. "fail" (default) fails the write. "bury" writes all other rows, and
            the row becomes a message of the dead-letter queue, with the reason in ``error``.
        idColumn: The column whose values are the ids.
        idPrefix: The prefix of the ids, before these values; nothing by default. The queues of a
            namespace share their ids, so the same orders in two queues need different prefixes.
        stage: The name of the writer; without ``idColumn`` the ids are "STAGE~ID", made from the
            column id. A stream needs ``stage``, ``idColumn`` or both.

    Options of batch writes:
        epoch: In ``foreachBatch``, with ``stage``: the number of the batch. A number that the query
            has written is not written again; one below it, or the same with other rows, fails.
        query: With ``epoch``, the name of the query, if Spark does not tell it, as on Connect: one
            for each checkpoint.
        staged: With ``idColumn``, "true" (default), or "false": messages appear as they are
            written, which takes a third of the time. A job that fails leaves some behind, and a job
            that is run again writes the missing rows.

    Options of streaming writes:
        delivery: "exactly-once" (default), or "at-least-once": the messages appear as they are
            written, which is faster, and a repeated batch writes consumed messages again.

    Columns of a read: id, queue, payload, headers, key, when, pushed, tries, priority, group.

    Columns of a read of a stream: id, stream, position, payload, headers, pushed.

    Columns of a write:
        payload: JSON in a string, a struct, a variant or any value. The other columns are optional.
        headers: A map of strings.
        key: The key of the message, a string.
        when: When the message becomes ready, a timestamp. One in the past means at once.
        delay: In place of ``when``, the seconds until then, a number or an interval. They count
            from the write of the row. A row that has both is a bad row.
        queue: With the option ``queues``, the queue of the row. Otherwise it is ignored.
        priority: In a queue with priorities, a whole number from 0 to 9; null means the default.
        group: In a queue with ordered groups, the group of the message; null means none.
            In a queue of another kind the column is ignored.

    Batch reads work with Spark 4.0, writes need 4.1, and streaming reads need 4.2.
    """

    #: How many tasks read, unless an option says so. ``register`` knows the cluster and sets it.
    parallelism: ClassVar[int] = 4
    #: The values of options that are not given. ``register`` takes them from the session.
    defaults: ClassVar[Mapping[str, str]] = {}

    def __init__(self, options: dict[str, str]) -> None:
        tasks = {"numPartitions": str(self.parallelism)}
        super().__init__(with_defaults(options, {**tasks, **self.defaults}))

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format("pyqueue")``."""
        return "pyqueue"

    def schema(self) -> StructType | str:
        """Return the columns of a read."""
        options = checked(self.options)
        if options.payload_type == "json":
            return self._typed(options)

        def written(field: StructField) -> str:
            name, type = field.name.replace("`", "``"), field.dataType.simpleString()
            type = options.payload_type if field.name == "payload" else type
            return f"`{name}` {type}{'' if field.nullable else ' NOT NULL'}"

        return ", ".join(map(written, read_columns(options, None).fields))

    @staticmethod
    def _typed(options: Options) -> StructType:
        payload = None
        if options.payload_model is not None:
            from pyqueue.spark.models import model_of, payload_type

            payload = payload_type(model_of(options.payload_model))
        return read_columns(options, payload)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a batch read."""
        options = checked(self.options, Way.BATCH_READS)
        if options.by_position:
            return LogReader(options, payload_column(options, schema))
        if options.on_bad_record == "bury":
            raise ConfigurationError(
                'onBadRecord: a batch read writes nothing, so it cannot bury: give "fail" (the '
                'default) or "null"'
            )
        reader = FilteringReader if options.push_filters else BatchReader
        return reader(options, payload_column(options, schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return the reader of a streaming read."""
        options = checked(self.options, Way.STREAM_READS)
        with _needs("4.2", "a streaming read"):
            from pyqueue.spark.position_streams import PositionStreamReader
            from pyqueue.spark.readers import StreamReader
        if options.by_position:
            return PositionStreamReader(options, payload_column(options, schema))
        return StreamReader(options, payload_column(options, schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return the writer of a batch write."""
        options = checked(self.options, Way.WRITE)
        writes = options.of_write
        if overwrite:
            raise ConfigurationError(
                'mode: a queue cannot be overwritten: use .mode("append"), and Queue.purge() to '
                "empty it first"
            )
        if (writes.stage is None) != (writes.epoch is None):
            raise ConfigurationError(
                "stage, epoch: a batch write takes both or neither. In foreachBatch, epoch is the "
                "number of the batch: the same number of the same stage writes nothing twice"
            )
        if writes.query and writes.epoch is None:
            raise ConfigurationError("query: give stage and epoch as well, or leave query out")
        if not writes.staged and (writes.id_column is None or writes.epoch is not None):
            raise ConfigurationError(
                "staged: false needs idColumn, without stage and epoch: only the ids tell what was "
                "written if Spark repeats a task"
            )
        if writes.epoch is not None:
            _refuse_on_duplicate(writes, "leave out stage and epoch, and give idColumn")
        elif writes.on_duplicate == "replace" and writes.staged and writes.id_column is not None:
            raise ConfigurationError(
                'onDuplicate: "replace" with idColumn needs .option("staged", "false"): a message '
                "whose id the queue has cannot be staged again"
            )
        with _needs("4.1", "a write"):
            from pyqueue.spark.writers import BatchWriter, DirectBatchWriter, EpochBatchWriter
        if writes.epoch is not None:
            return EpochBatchWriter(options, schema)
        if not writes.staged:
            return DirectBatchWriter(options, schema)
        return BatchWriter(options, schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        """Return the writer of a streaming write."""
        options = checked(self.options, Way.WRITE_STREAM)
        writes = options.of_write
        if overwrite:
            raise ConfigurationError(
                'outputMode: a queue cannot be overwritten: use .outputMode("append")'
            )
        if writes.stage is None and writes.id_column is None:
            raise ConfigurationError(
                "stage, idColumn: give one of the two. Spark may repeat a batch, which must then "
                'write the same ids. With .option("stage", "..."), they are made from the column '
                '"id"; idColumn names a column that has the ids'
            )
        if not writes.at_least_once:
            _refuse_on_duplicate(writes, 'use .option("delivery", "at-least-once")')
        with _needs("4.1", "a write"):
            from pyqueue.spark.writers import StreamWriter
        return StreamWriter(options, schema)


def _refuse_on_duplicate(writes: WriteOptions, remedy: str) -> None:
    """Refuse "replace" and "error": the messages are published after the epoch is decided."""
    if writes.on_duplicate != "ignore":
        raise ConfigurationError(
            f'onDuplicate: a batch that is written once takes "ignore" only, because a key may be '
            f"taken once the batch is decided; for {writes.on_duplicate!r}, {remedy}"
        )


@contextmanager
def _needs(version: str, use: str) -> Iterator[None]:
    """Explain a failing import: older releases of Spark lack a class."""
    try:
        yield
    except ImportError as error:
        raise ConfigurationError(
            f"{use} of the data source pyqueue needs Spark {version} or later and pyarrow, and "
            f"this is Spark {pyspark.__version__} ({error}); SparkStage and Queue.claim work with "
            "Spark 4.0"
        ) from error
