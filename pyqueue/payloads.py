"""Payloads: from the caller's values to BSON and back, through a model where the queue has one.

Values go into BSON as they are; what BSON lacks takes its pydantic JSON form (Decimal becomes Decimal128, UUID stays one), and
loading through the model reverses that. It does no I/O.
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

#: How documents are read and written: aware UTC datetimes, UUIDs as themselves, and no date that cannot be read.
OPTIONS: Final[CodecOptions[dict[str, Any]]] = CodecOptions(
    tz_aware=True,
    tzinfo=dt.UTC,
    uuid_representation=UuidRepresentation.STANDARD,
    datetime_conversion=DatetimeConversion.DATETIME_AUTO,
)

#: The largest document, in bytes: the server's 16 MB less room for what pyqueue adds to a message on its way.
LIMIT: Final = 16 * 1024 * 1024 - 64 * 1024

_DECIMAL: Final[Context] = create_decimal128_context()

#: What BSON stores as it is (bool is an int, ObjectId and the like are bson's own).
_PLAIN: Final = (str, int, float, bytes, type(None), dt.datetime, UUID, re.Pattern)


def encode(document: Mapping[str, Any]) -> RawBSONDocument:
    """The document in BSON, encoded once: what is checked here is what is sent.

    Raises:
        InvalidMessage: it holds something that BSON lacks, or is larger than LIMIT.
    """
    try:
        data = bson.encode(document, codec_options=OPTIONS)
    except (BSONError, OverflowError, ValueError, TypeError, RecursionError) as error:
        raise InvalidMessage(
            f"payload: not storable as BSON: {str(error)[:500] or type(error).__name__}"
        ) from error
    if len(data) > LIMIT:
        raise InvalidMessage(
            f"payload: the message takes {len(data)} bytes; at most {LIMIT} are allowed (store large data elsewhere and push a reference)"
        )
    return RawBSONDocument(data, _RAW)


_RAW: Final = OPTIONS.with_options(document_class=RawBSONDocument)


def _storable(value: Any) -> Any:
    """What pydantic dumped in Python mode, with what BSON lacks replaced."""
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
    """How the payloads of a queue are written and read.

    Args:
        model: anything pydantic's TypeAdapter takes, or None: payloads are BSON values as they are.

    Raises:
        ConfigurationError: pydantic can make no schema of the model.
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
                    f"model: {model!r} is nothing that pydantic can validate: {error}"
                ) from error

    def __reduce__(self) -> tuple[Any, ...]:
        return Codec, (self.model,)  # adapters do not pickle, models do

    @property
    def name(self) -> str | None:
        """What a message's ``type`` says; None without a model."""
        return (
            None if self.model is None else getattr(self.model, "__name__", None) or str(self.model)
        )

    def dump(self, payload: Any) -> Any:
        """The BSON value of a payload.

        Raises:
            InvalidMessage: it is not what the model takes.
        """
        adapter = self._adapter
        if adapter is None:
            return payload
        try:
            return _storable(adapter.dump_python(adapter.validate_python(payload), mode="python"))
        except ValidationError as error:
            raise InvalidMessage(f"payload: not a valid {self.name}: {error}") from error
        except Exception as error:  # a model's validators are anybody's code
            raise InvalidMessage(
                f"payload: not a valid {self.name}: {type(error).__name__}: {error}"
            ) from error

    def load(self, value: Any) -> T:
        """The payload of a BSON value.

        Raises:
            InvalidMessage: it does not fit the model.
        """
        if self._adapter is None:
            return value  # type: ignore[no-any-return]  # without a model T is Any
        try:
            return self._adapter.validate_python(_loadable(value))  # type: ignore[no-any-return]  # the adapter is T's
        except ValidationError as error:
            raise InvalidMessage(f"payload: does not fit {self.name}: {error}") from error
