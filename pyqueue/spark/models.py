"""Convert pydantic models to Spark types, and stored messages to DataFrames.

Only drivers import this module. Executors receive the Spark type, so they do not need pydantic.
"""

from __future__ import annotations

import datetime as dt
import types
import typing
from collections.abc import Mapping, Sequence
from decimal import Decimal
from enum import Enum
from importlib import import_module
from typing import Any, Final
from uuid import UUID

import pyarrow as pa
from bson import ObjectId
from pydantic import BaseModel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DecimalType,
    DoubleType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from pyqueue.errors import ConfigurationError
from pyqueue.payloads import error_text
from pyqueue.spark.columns import columns
from pyqueue.spark.frames import batch


def struct_of(model: type[BaseModel]) -> StructType:
    """Return the Spark type of a pydantic model.

    Args:
        model: The model. Its fields may be str, int, float, bool, bytes, Decimal, datetime, date,
            UUID, ObjectId, Literal, Enum, lists, sets and tuples of one type, dicts with str keys,
            and nested models, each also with ``| None``.

    Returns:
        A struct with the same fields, all nullable.

    Raises:
        ConfigurationError: A field has a type for which Spark has no type.
    """
    return StructType(
        [
            StructField(name, _type_of(f"{model.__name__}.{name}", field.annotation))
            for name, field in model.model_fields.items()
        ]
    )


_SIMPLE: Final[Mapping[Any, DataType]] = {
    str: StringType(),
    int: LongType(),
    float: DoubleType(),
    bool: BooleanType(),
    bytes: BinaryType(),
    Decimal: DecimalType(38, 18),
    dt.datetime: TimestampType(),
    dt.date: StringType(),  # as it is stored: BSON has no date without a time
    UUID: StringType(),
    ObjectId: StringType(),
}


def _type_of(name: str, annotation: Any) -> DataType:
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type_of(name, inner[0])
    if origin in (typing.Union, types.UnionType):
        kinds = [each for each in inner if each is not type(None)]
        if len(kinds) == 1:
            return _type_of(name, kinds[0])
    elif origin is typing.Literal:
        kinds = list({type(each) for each in inner})
        if len(kinds) == 1:
            return _type_of(name, kinds[0])
    elif origin in (list, set, frozenset, Sequence) or (origin is tuple and inner[1:] == (...,)):
        return ArrayType(_type_of(name, inner[0]))
    elif origin in (dict, Mapping) and inner[0] is str:
        return MapType(StringType(), _type_of(name, inner[1]))
    elif annotation in _SIMPLE:
        return _SIMPLE[annotation]
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return struct_of(annotation)
    elif isinstance(annotation, type) and issubclass(annotation, Enum):
        return _type_of(name, typing.Literal[tuple(each.value for each in annotation)])
    raise ConfigurationError(
        f"model: Spark has no type for {name} ({annotation!r}); use another type for this field, "
        "or a queue without a model, whose payloads are read as JSON"
    )


def model_of(path: str) -> object:
    """Return the model that an import path names.

    Args:
        path: The import path, such as "module:Model".

    Raises:
        ConfigurationError: The path is invalid, or the module cannot be imported.
    """
    module, _, name = path.partition(":")
    try:
        return getattr(import_module(module), name)
    except Exception as error:  # a module may raise anything
        raise ConfigurationError(
            f"payloadModel: {path!r} cannot be imported ({error_text(error)}); "
            'use "module:Model", and install the module or ship it with --py-files'
        ) from error


def payload_type(model: object) -> DataType | None:
    """Return the Spark type of the payloads of a queue with this model.

    Args:
        model: A pydantic model, or None.

    Returns:
        The type, or None for JSON in a string.

    Raises:
        ConfigurationError: The model is not a pydantic model, or Spark lacks the type of a field.
    """
    if model is None:
        return None
    if isinstance(model, type) and issubclass(model, BaseModel):
        return struct_of(model)
    raise ConfigurationError(
        f"model: {model!r} is not a pydantic model; use a pydantic model, or no model"
    )


def frame(spark: SparkSession, documents: Sequence[Mapping[str, Any]], model: object) -> DataFrame:
    """Return a DataFrame of stored messages. Spark does not read the queue for it again."""
    payload = payload_type(model)
    table = pa.Table.from_batches([batch(documents, payload)])
    return spark.createDataFrame(table, schema=columns(payload))
