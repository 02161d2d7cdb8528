"""The reader of tables: it returns the ready messages and consumes none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import DataType

from pyqueue.backends.bulk.partitions import Choice, Slice, encoded_page, slices
from pyqueue.backends.contents import contents_of, refuse_packs
from pyqueue.spark.filters import condition, fields_of, ids_of
from pyqueue.spark.options import CHUNK, Options
from pyqueue.spark.rows import decoded, rows_of

if TYPE_CHECKING:
    from pyspark.sql.datasource import Filter


@dataclass
class _SlicePartition(InputPartition):
    slice: Slice


class BatchReader(DataSourceReader):
    """Reads ready messages and consumes none."""

    def __init__(self, options: Options, payload: DataType | None) -> None:
        self._options = options
        self._payload = payload
        self._choice = Choice(
            () if options.match is None else (options.match,), fields=fields_of(options.columns)
        )

    def partitions(self) -> Sequence[InputPartition]:
        """Divide the queue among tasks."""
        options = self._options
        backend = options.source()
        if options.match is not None:
            refuse_packs(backend.kind, backend.queue, "match", "filter the DataFrame by where()")
        chosen = self._choice.by_id and contents_of(backend.kind).conditions(self._choice.only)
        parts = 1 if chosen else options.partitions
        found = options.run(slices(backend.queue, backend.kind, parts))
        return [_SlicePartition(each) for each in found]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read a part of the queue."""
        assert isinstance(partition, _SlicePartition)
        rest, choice = partition.slice, self._choice
        backend = self._options.source()
        contents = contents_of(backend.kind)
        while found := self._options.run(
            encoded_page(backend.queue, backend.kind, rest, CHUNK, choice)
        ):
            messages = contents.encoded(found)
            for start in range(0, len(messages), CHUNK):
                some = messages[start : start + CHUNK]
                yield rows_of(self._options, some, self._payload, "fail")[0]
            (last,) = decoded(found[-1:])
            rest = replace(rest, above=(last["when"], last["_id"]))


class FilteringReader(BatchReader):
    """Passes Spark's filters on to the database.

    Unless a setting allows it, Spark refuses a reader with a ``pushFilters`` method, so this class
    is separate.
    """

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Keep the filters that the database can apply.

        Return all filters, so that Spark applies all of them, too.
        """
        known = [each for each in map(condition, filters) if each is not None]
        self._choice = replace(
            self._choice,
            only=(*self._choice.only, *known),
            by_id=any(ids_of(each) is not None for each in filters),
        )
        return filters
