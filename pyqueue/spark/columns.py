"""The columns of reads."""

from __future__ import annotations

from pyspark.sql.types import (
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)


def columns(payload: DataType | None) -> StructType:
    """Return the columns of a read. A payload type of None means JSON."""
    return StructType(
        [
            StructField("id", StringType(), nullable=False),
            StructField("queue", StringType(), nullable=False),
            StructField("payload", payload or StringType()),
            StructField("headers", MapType(StringType(), StringType())),
            StructField("key", StringType()),
            StructField("when", TimestampType(), nullable=False),
            StructField("pushed", TimestampType()),
            StructField("tries", IntegerType(), nullable=False),
            StructField("priority", IntegerType()),
            StructField("group", StringType()),
        ]
    )


def log_columns(payload: DataType | None) -> StructType:
    """Return the columns of a read of a stream. A payload type of None means JSON."""
    of_messages = columns(payload)
    return StructType(
        [
            of_messages["id"],
            StructField("stream", StringType(), nullable=False),
            StructField("position", LongType(), nullable=False),
            *(of_messages[name] for name in ("payload", "headers", "pushed")),
        ]
    )
