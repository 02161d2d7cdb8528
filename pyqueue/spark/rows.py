"""Rows of stored messages, and the treatment of payloads that do not fit their type."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
from pyspark.sql.types import DataType

from pyqueue.errors import InvalidMessage
from pyqueue.messages import Id
from pyqueue.requests import Document
from pyqueue.spark.encoded import decoded, encoded_batch
from pyqueue.spark.frames import batch, misfits, to_json
from pyqueue.spark.options import Options, read_columns


def rows_of(
    options: Options, found: Sequence[bytes], payload: DataType | None, default: str
) -> tuple[pa.RecordBatch, dict[Id, str]]:
    """Convert messages as ``onBadRecord`` says.

    Args:
        options: The options of the read.
        found: The stored messages in BSON.
        payload: The type of the payloads. None means JSON, which every payload fits.
        default: How to treat bad records if the options do not say it.

    Returns:
        The rows, and the reasons of the messages that are to be buried, by id.

    Raises:
        InvalidMessage: A payload does not fit, and this must fail.
    """
    rows, bad = encoded_batch(found, payload), dict[Id, str]()
    corrupt: Sequence[str | None] = [None] * len(found)
    if rows is None:
        documents = decoded(found)
        rows, corrupt, bad = _decoded_rows(options, documents, payload, default)
    return _with_corrupt(options, rows, corrupt).select(read_columns(options, None).names), bad


def log_rows_of(
    options: Options, documents: Sequence[Document], payload: DataType | None
) -> pa.RecordBatch:
    """Convert messages of a stream as ``onBadRecord`` says. No message is left out.

    Args:
        options: The options of the read.
        documents: The messages, as messages of a queue, and their positions.
        payload: The type of the payloads. None means JSON, which every payload fits.

    Raises:
        InvalidMessage: A payload does not fit, and this must fail.
    """
    rows, corrupt, _ = _decoded_rows(options, documents, payload, "fail")
    positions = pa.array([each["position"] for each in documents], pa.int64())
    # Spark compares the schemas, nullability included.
    position = pa.field("position", pa.int64(), nullable=False)
    stream = pa.field("stream", pa.string(), nullable=False)
    rows = rows.append_column(position, positions).append_column(stream, rows.column("queue"))
    return _with_corrupt(options, rows, corrupt).select(read_columns(options, None).names)


def _with_corrupt(
    options: Options, rows: pa.RecordBatch, corrupt: Sequence[str | None]
) -> pa.RecordBatch:
    """Add the column for payloads that do not fit, if there is one. Then no message is buried."""
    if options.corrupt_column is None:
        return rows
    field = pa.field(options.corrupt_column, pa.string())
    return rows.append_column(field, pa.array(corrupt, pa.string()))


def _decoded_rows(
    options: Options, documents: Sequence[Document], payload: DataType | None, default: str
) -> tuple[pa.RecordBatch, list[str | None], dict[Id, str]]:
    """Return the rows, the JSON of misfit payloads, and the reasons of the messages to bury."""
    action = options.on_bad_record or default
    reasons: dict[int, str] = {}
    bad: dict[Id, str] = {}
    kept = list(documents)
    try:
        rows = batch(documents, payload)
    except InvalidMessage as error:
        if action == "fail":
            raise InvalidMessage(
                f'{error}; .option("onBadRecord", "null") reads such payloads as null'
            ) from None
        if payload is not None:
            reasons = dict(misfits(documents, payload))
        kept = []
        for place, each in enumerate(documents):
            if place in reasons and action == "bury" and "dead" not in each:
                bad[each["_id"]] = reasons[place]
            else:
                kept.append(each | {"payload": None} if place in reasons else each)
        rows = batch(kept, payload)
    corrupt = [
        to_json(each.get("payload")) if place in reasons else None
        for place, each in enumerate(documents)
    ]
    return rows, corrupt, bad
