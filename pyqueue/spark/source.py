"""The data source "pyqueue": queues as Spark's tables and streams."""

from __future__ import annotations

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from pyqueue.errors import ConfigurationError
from pyqueue.spark.frames import columns
from pyqueue.spark.options import checked, payload_column
from pyqueue.spark.readers import BatchReader, StreamReader
from pyqueue.spark.writers import BatchWriter, StreamWriter

__all__ = ["QueueDataSource"]


class QueueDataSource(DataSource):
    """The data source "pyqueue": read and write the messages of a queue.

    A batch read shows the ready messages and consumes none. A batch write, in mode append, shows
    all its messages at its end, or none. A streaming read claims messages for a group and finishes
    each batch once Spark has committed it. A streaming write makes its ids from those of the
    source, so a repeated batch writes nothing twice.

    Options of all:
        uri or uriEnv: The server's URI, or the name of an environment variable that holds it.
            With ``uriEnv`` the URI appears in no plan and no log.
        namespace: The collection that holds the queues; "pyqueue" by default.
        queue: The name of the queue.

    Options of a read:
        payloadType: "json" (default), "variant" or a Spark type.
        numPartitions: How many tasks read; 4 by default.

    Options of a streaming read:
        group: The durable name of this consumer.
        maxMessagesPerBatch: The largest size of a batch; 10 000 by default.
        leaseSeconds: How long a batch stays held if the query dies; 600 by default.

    Options of a write:
        stage: For streams only: the ids are "STAGE~ID", made from the column id.
        idColumn: The column whose values are the ids.

    Columns of a read: id, queue, payload, headers, key, when, pushed, tries. Columns of a write:
    payload, and optionally headers and key.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format("pyqueue")``."""
        return "pyqueue"

    def schema(self) -> StructType | str:
        """Return the columns of a read."""
        payload, fields = checked(self.options).payload_type, columns(None).fields
        if payload == "json":
            return columns(None)
        types = [
            payload if field.name == "payload" else field.dataType.simpleString()
            for field in fields
        ]
        return ", ".join(
            f"`{field.name}` {type}{'' if field.nullable else ' NOT NULL'}"
            for field, type in zip(fields, types, strict=True)
        )

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a batch read."""
        options = checked(self.options)
        return BatchReader(options, payload_column(options, schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """Return the reader of a streaming read."""
        options = checked(self.options)
        return StreamReader(options, payload_column(options, schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return the writer of a batch write."""
        options = checked(self.options)
        if overwrite:
            raise ConfigurationError(
                'mode: a queue cannot be overwritten: use .mode("append"), and Queue.purge() to '
                "empty it first"
            )
        if options.stage is not None:
            raise ConfigurationError(
                "stage: this option is for streams; a batch write takes its ids from idColumn, or "
                "makes new ones"
            )
        return BatchWriter(options, schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802
        """Return the writer of a streaming write."""
        options = checked(self.options)
        if overwrite:
            raise ConfigurationError(
                'outputMode: a queue cannot be overwritten: use .outputMode("append")'
            )
        if (options.stage is None) == (options.id_column is None):
            raise ConfigurationError(
                "stage, idColumn: give one of the two. Spark may repeat a batch, which must then "
                'write the same ids. .option("stage", "...") makes them from the column id; '
                "idColumn names a column whose values are the ids"
            )
        return StreamWriter(options, schema)
