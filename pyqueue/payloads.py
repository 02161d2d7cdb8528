"""Payloads: from Python values to BSON and back, through the model of the queue if it has one.

A model dumps a value in Python mode. A type that BSON lacks takes its pydantic JSON form; a Decimal
becomes a Decimal128. Loading through the model reverses this. This module does no I/O.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping
from decimal import Context, Decimal
from enum import Enum
from typing import Any, Final, Generic, TypeVar
from uuid import UUID

import bson
from bson.binary import UuidRepresentation
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.decimal128 import Decimal128, create_decimal128_context
from bson.errors import BSONError
from bson.raw_bson import RawBSONDocument
from pydantic import PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from pyqueue.errors import ConfigurationError, InvalidMessage

__all__ = ["LIMIT", "OPTIONS", "Codec", "encode"]

T = TypeVar("T")

#: How documents are read and written: aware UTC datetimes, UUIDs, and DatetimeMS
#: for a date that datetime cannot hold.
OPTIONS: Final[CodecOptions[dict[str, Any]]] = CodecOptions(
    tz_aware=True,
    tzinfo=dt.UTC,
    uuid_representation=UuidRepresentation.STANDARD,
    datetime_conversion=DatetimeConversion.DATETIME_AUTO,
)

#: The largest document in bytes: the 16 MB of the server, less room for the fields that pyqueue
#: adds.
LIMIT: Final = 16 * 1024 * 1024 - 64 * 1024

_DECIMAL: Final[Context] = create_decimal128_context()

#: The types that BSON stores directly. A bool is an int; ObjectId and the like are types of bson.
_PLAIN: Final = (str, int, float, bytes, type(None), dt.datetime, UUID, re.Pattern)


def encode(document: Mapping[str, Any]) -> RawBSONDocument:
    """Return the document in BSON. It is encoded once: the bytes that are checked here are sent.

    Raises:
        InvalidMessage: A value has no form in BSON, or the document is larger than LIMIT.
    """
    try:
        data = bson.encode(document, codec_options=OPTIONS)
    except (BSONError, OverflowError, ValueError, TypeError, RecursionError) as error:
        raise InvalidMessage(
            f"payload: not storable as BSON: {str(error)[:500] or type(error).__name__}"
        ) from error
    if len(data) > LIMIT:
        raise InvalidMessage(
            f"payload: the message takes {len(data)} bytes; at most {LIMIT} are allowed "
            "(store large data elsewhere and push a reference)"
        )
    return RawBSONDocument(data, _RAW)


_RAW: Final = OPTIONS.with_options(document_class=RawBSONDocument)


def _storable(value: Any) -> Any:
    """Return a dump of pydantic in Python mode, with types that BSON lacks replaced."""
    if isinstance(value, dict):
        return {_key(key): _storable(item) for key, item in value.items()}
    if isinstance(value, Enum):
        return _storable(value.value)
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_storable(item) for item in value]
    if isinstance(value, Decimal):
        return Decimal128(_DECIMAL.create_decimal(value))
    if type(value).__module__.startswith("bson."):
        return value
    return to_jsonable_python(value)


def _key(key: Any) -> str:
    return (
        key
        if type(key) is str
        else str(to_jsonable_python(key.value if isinstance(key, Enum) else key))
    )


def _loadable(value: Any) -> Any:
    if isinstance(value, Decimal128):
        return value.to_decimal()
    if isinstance(value, dict):
        return {key: _loadable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_loadable(item) for item in value]
    return value


class Codec(Generic[T]):
    """Converts the payloads of a queue to BSON values and back.

    Args:
        model: anything that pydantic's TypeAdapter accepts. None means that payloads are BSON
            values.

    Raises:
        ConfigurationError: pydantic cannot make a schema of the model.
    """

    __slots__ = ("_adapter", "model")

    def __init__(self, model: Any = None) -> None:
        self.model = model
        self._adapter: TypeAdapter[Any] | None = None
        if model is not None:
            try:
                self._adapter = TypeAdapter(model)
                if not self._adapter.pydantic_complete:
                    self._adapter.rebuild(raise_errors=True)
            except (PydanticUserError, NameError) as error:
                raise ConfigurationError(
                    f"model: pydantic cannot validate {model!r}; give a type that it knows: {error}"
                ) from error

    def __reduce__(self) -> tuple[Any, ...]:
        return Codec, (self.model,)  # adapters do not pickle, models do

    @property
    def name(self) -> str | None:
        """The value of the field ``type`` of a message; None without a model."""
        return (
            None if self.model is None else getattr(self.model, "__name__", None) or str(self.model)
        )

    def dump(self, payload: Any) -> Any:
        """Return the BSON value of a payload.

        Raises:
            InvalidMessage: The payload does not fit the model.
        """
        adapter = self._adapter
        if adapter is None:
            return payload
        try:
            return _storable(adapter.dump_python(adapter.validate_python(payload), mode="python"))
        except ValidationError as error:
            raise InvalidMessage(f"payload: not a valid {self.name}: {error}") from error
        except Exception as error:  # the validators of a model may raise anything
            raise InvalidMessage(
                f"payload: not a valid {self.name}: {type(error).__name__}: {error}"
            ) from error

    def load(self, value: Any) -> T:
        """Return the payload of a BSON value.

        Raises:
            InvalidMessage: The value does not fit the model.
        """
        if self._adapter is None:
            return value  # type: ignore[no-any-return]  # without a model T is Any
        try:
            loaded: T = self._adapter.validate_python(_loadable(value))
        except ValidationError as error:
            raise InvalidMessage(f"payload: does not fit {self.name}: {error}") from error
        return loaded
