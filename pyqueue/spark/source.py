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

    A batch read returns the ready messages and consumes none. A batch write, in mode append,
    publishes all its messages at its end, or none. A streaming read claims messages for a group and
    finishes each batch once Spark has committed it. A streaming write publishes each batch once,
    even if Spark repeats the batch after its messages were consumed.

    In this text, a "stream" is a stream of pyqueue, as ``Client.stream`` returns it.

    Options for all uses:
        uri, url, uriEnv: ``uri`` and ``url`` both give the server's URI; Spark hides the value of
            ``url`` when it prints a table. ``uriEnv`` gives the name of an environment variable
            that holds the URI, so that the URI appears in no plan and no log. By default the
            variable is PYQUEUE_URL.
        namespace: The collection that holds the queues; "pyqueue" by default.

    Settings of the session, such as spark.pyqueue.uriEnv, are the defaults of the options uriEnv,
    namespace, numPartitions, maxMessagesPerBatch and maxWaitMs. Set them before ``register``.

    Options for queues:
        queue: The name of the queue. A write may have several; see ``queues``.

    Options for reads:
        payloadType: The type of the column payload: "json" (default), "variant" or a Spark type.
        payloadModel: Instead of ``payloadType``, a pydantic model as "module:Model". The driver
            imports it.
        columns: The columns to read, separated by commas; all by default.
        numPartitions: The maximum number of tasks. By default it is the number of tasks that the
            cluster could run at once when ``register`` was called, or 4 if Spark found the data
            source by itself.
        onBadRecord: The handling of a payload that does not fit ``payloadType``. "fail" ends the
            query with an error that names the message; it is the default for batch reads and for
            reads of a stream. "null" reads the payload as null. "bury" moves the message to the
            dead-letter queue when the batch is committed; only streaming reads of a queue
            support it, and it is their default. A message that is already dead, because it was
            read from a dead-letter queue, is not buried again: its payload is read as null.
        columnNameOfCorruptRecord: With ``onBadRecord`` "null", the name of a further column of type
            string. It holds each payload that does not fit, as JSON.

    Options for batch reads of a queue:
        match: A filter: a JSON object of payload fields and their values or conditions. Conditions
            use $eq, $ne, $gt, $gte, $lt, $lte, $in, $nin and $exists.
        mustExist: With "true" (default), reading a queue that does not exist is an error; with
            "false", such a read returns no rows.
        pushFilters: With "true", the database applies filters on id, key, when and tries; "false"
            by default. "true" needs the Spark setting spark.sql.python.filterPushdown.enabled.

    Options for streaming reads:
        maxMessagesPerBatch: The maximum number of messages in a batch; 10000 by default.
        maxWaitMs: How long an idle query waits for the signal of a push each time that Spark asks
            for new data, in milliseconds: 0 to 60000, 100 by default. All sources of a query share
            this time. With the trigger ``availableNow`` a query never waits.

    Options for streaming reads of a queue:
        group: The durable name of this consumer. One query at a time runs a group; further queries
            stand by.
        members: How many queries share the work of the group; 1 by default. Each query needs a
            separate checkpoint, and all need the same number of members.
        minMessagesPerBatch: A batch waits until this number of messages is ready; 1 by default. See
            ``maxTriggerDelay``.
        maxTriggerDelay: The longest time for which ``minMessagesPerBatch`` makes a batch wait after
            the previous batch: "15m" by default, or another number of ms, s, m or h. The first
            batch does not wait, nor does a query with ``availableNow``.
        maxBytesPerBatch: The maximum size of a batch, in bytes of stored messages: 67108864 by
            default, which is 64 MB. A batch has at least one message, whatever its size.
        leaseSeconds: How many seconds a batch stays reserved if the query dies; 600 by default.

    Options for reads of a stream:
        stream: Instead of ``queue``, the name of a stream, which is read by position.
        startingPosition: Where a batch read begins, or a query without a checkpoint: "first"
            (default), "last", a position, or a time in ISO form with its time zone, such as
            2026-01-31T12:00:00Z. Messages are stored in packs, documents of up to 1000 messages; a
            time selects the first pack that was appended at that time or later.

    Options for batch reads of a stream:
        endingPosition: The position before which reading ends; "last" by default. It takes the
            same values as ``startingPosition``.

    Options for streaming reads of a stream:
        failOnDataLoss: With "true" (default), the query fails if the retention has deleted messages
            that it has not read. With "false", it skips them with a warning, as a batch read does.

    Options for writes:
        queues: Instead of ``queue``, the names of several queues, separated by commas. The column
            ``queue`` of each row names one of them; a null or another name fails the write. The
            record of a stage is stored with the first of these queues: keep it first, and add
            further queues after it.
        onDuplicate: The handling of a row whose ``key`` belongs to a live message of its queue or,
            with ``idColumn``, whose id is taken. "ignore" (default) leaves the row out. "replace"
            overwrites that message, unless it has finished or moved on. "error" fails the write.
            Streaming writes with ``delivery`` "exactly-once", and batch writes with ``epoch``, take
            only "ignore". In a batch write, "replace" with ``idColumn`` needs ``staged`` "false".
            With ``delivery`` "at-least-once", "error" applies only to keys.
        onBadRow: The handling of a row whose payload, headers, key, time, priority or group cannot
            be stored. "fail" (default) fails the write. "bury" writes all other rows, and stores
            the row as a message of the dead-letter queue, with the reason in ``error``.
        idColumn: The column whose values are the ids of the messages.
        idPrefix: A prefix for the ids in ``idColumn``; none by default. An id is unique in its
            namespace, so to write the same rows into two queues, use two prefixes.
        stage: The name of the writer. Without ``idColumn``, the ids are "STAGE~ID", where ID is the
            value of the column id. A streaming write needs ``stage``, ``idColumn`` or both.

    Options for batch writes:
        epoch: In ``foreachBatch``, together with ``stage``: the number of the batch. A batch that
            the query has already written is not written again. A number below the last one fails
            the write, and so does a repetition of the last number with different rows.
        query: With ``epoch``, a name for the query, if Spark does not pass its id to the data
            source, as on Connect. Use a different name for each checkpoint.
        staged: With "true" (default), all messages appear at the end of the write. "false", which
            needs ``idColumn``, takes about a third of the time, but messages appear while the job
            runs. If such a job fails, some of its messages stay; run it again to write the rest.

    Options for streaming writes:
        delivery: "exactly-once" (default) publishes each batch once. "at-least-once" is faster:
            the messages appear as they are written, but if Spark repeats a batch, messages that
            were already consumed are written again.

    Columns read from a queue: id, queue, payload, headers, key, when, pushed, tries, priority,
        group.

    Columns read from a stream: id, stream, position, payload, headers, pushed.

    Columns of a write, of which only payload is required:
        payload: JSON in a string, a struct, a variant or any other value.
        headers: A map of strings.
        key: The key of the message, a string.
        when: The time at which the message becomes ready, a timestamp. A time in the past means at
            once.
        delay: Instead of ``when``, the seconds until the message becomes ready, counted from the
            write of the row: a number or an interval. A row with both is a bad row.
        queue: With the ``queues`` option, the queue of the row. Otherwise it has no effect.
        priority: In a queue with priorities, a whole number from 0 to 9; null means the default.
        group: In a queue with ordered groups, the group of the message; null means none. In a queue
            of another kind it has no effect.

    Batch reads need Spark 4.0, writes need 4.1, and streaming reads need 4.2.
    """

    #: How many tasks read if no option says so. ``register`` sets it to suit the cluster.
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
        """Return the columns of the rows that Spark reads from this source."""
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
                'onBadRecord: a batch read writes nothing, so it cannot bury messages; use "fail" '
                '(the default) or "null"'
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
                'mode: a queue cannot be overwritten; use .mode("append"). To empty the queue '
                "first, call Queue.purge()"
            )
        if (writes.stage is None) != (writes.epoch is None):
            raise ConfigurationError(
                "stage, epoch: set both or neither. In foreachBatch, epoch is the number of the "
                "batch; a batch of a stage is written once, even if it is repeated"
            )
        if writes.query and writes.epoch is None:
            raise ConfigurationError(
                "query: has no effect without stage and epoch; set both, or leave out query"
            )
        if not writes.staged and (writes.id_column is None or writes.epoch is not None):
            raise ConfigurationError(
                'staged: "false" needs idColumn, and excludes stage and epoch, because only the '
                "ids show which rows have been written if Spark repeats a task; set idColumn, and "
                "leave out stage and epoch"
            )
        if writes.epoch is not None:
            _refuse_on_duplicate(writes, "leave out stage and epoch, and set idColumn")
        elif writes.on_duplicate == "replace" and writes.staged and writes.id_column is not None:
            raise ConfigurationError(
                'onDuplicate: "replace" with idColumn needs .option("staged", "false"), because a '
                "message whose id is already in the queue cannot be staged"
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
                'outputMode: a queue cannot be overwritten; use .outputMode("append")'
            )
        if writes.stage is None and writes.id_column is None:
            raise ConfigurationError(
                "stage, idColumn: set at least one. Spark may repeat a batch, which must then "
                'write the same ids. With .option("stage", "..."), the ids are made from the '
                'column "id"; idColumn names a column that has the ids'
            )
        if not writes.at_least_once:
            _refuse_on_duplicate(writes, 'use .option("delivery", "at-least-once")')
        with _needs("4.1", "a write"):
            from pyqueue.spark.writers import StreamWriter
        return StreamWriter(options, schema)


def _refuse_on_duplicate(writes: WriteOptions, remedy: str) -> None:
    """Refuse "replace" and "error", because messages are published after the commit."""
    if writes.on_duplicate != "ignore":
        raise ConfigurationError(
            'onDuplicate: only "ignore" is allowed for exactly-once writes, because a key may be '
            f"taken after the batch is committed; for {writes.on_duplicate!r}, {remedy}"
        )


@contextmanager
def _needs(version: str, use: str) -> Iterator[None]:
    """If an import fails, explain that older releases of Spark lack the imported class."""
    try:
        yield
    except ImportError as error:
        raise ConfigurationError(
            f"{use} of the data source pyqueue needs Spark {version} or later and pyarrow, but "
            f"this is Spark {pyspark.__version__} ({error}); with Spark 4.0, use SparkStage or "
            "Queue.claim"
        ) from error
