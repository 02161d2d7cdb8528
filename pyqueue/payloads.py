"""Payloads: convert Python values to BSON and back, with the model of the queue if it has one.

A model dumps a value in Python mode. A value of a type that BSON does not have is stored in its
pydantic JSON form; a Decimal becomes a Decimal128. Loading with the model reverses this. This
module does no I/O. pydantic is imported only for the first model, because Spark's executors have no
model and may lack pydantic.

A payload may contain secrets, and the texts of errors are stored, logged and shown. So no error
text of this module, or of the cause of an error, contains a value of a payload.
"""

from __future__ import annotations

import datetime as dt
import logging
import re
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence, Set
from decimal import Context, Decimal
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Generic, TypeGuard, TypeVar
from uuid import UUID

import bson
from bson.binary import UuidRepresentation
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.decimal128 import Decimal128, create_decimal128_context
from bson.errors import BSONError, InvalidDocument
from bson.raw_bson import RawBSONDocument

from pyqueue.errors import ConfigurationError, InvalidMessage

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError
    from pydantic_core import ErrorDetails

log = logging.getLogger("pyqueue")

T = TypeVar("T")
V = TypeVar("V")

#: How documents are read and written: aware UTC datetimes, UUIDs, and DatetimeMS
#: for a date that datetime cannot hold.
OPTIONS: Final[CodecOptions[dict[str, Any]]] = CodecOptions(
    tz_aware=True,
    tzinfo=dt.UTC,
    uuid_representation=UuidRepresentation.STANDARD,
    datetime_conversion=DatetimeConversion.DATETIME_AUTO,
)

#: The same options, for documents whose values are decoded only when they are accessed.
RAW: Final = OPTIONS.with_options(document_class=RawBSONDocument)

#: The largest document in bytes: the server's limit of 16 MB, minus space for the fields that
#: pyqueue adds.
LIMIT: Final = 16 * 1024 * 1024 - 64 * 1024

_DECIMAL: Final[Context] = create_decimal128_context()

#: The types that BSON stores directly, besides the types of the package bson. A bool is an int.
_PLAIN: Final = (str, int, float, bytes, type(None), dt.datetime, UUID, re.Pattern)


def encode(document: Mapping[str, Any]) -> RawBSONDocument:
    """Return a document as BSON. The bytes that are checked here are the bytes that are sent.

    Raises:
        InvalidMessage: BSON cannot represent a value, or the document is larger than LIMIT.
    """
    fault = None
    try:
        data = bson.encode(document, codec_options=OPTIONS)
    except (BSONError, OverflowError, ValueError, TypeError, RecursionError) as error:
        fault = error
    if fault is not None:
        raise InvalidMessage(_unstorable(document, fault))
    if len(data) > LIMIT:
        raise InvalidMessage(
            f"payload: the message takes {len(data)} bytes, and the limit is {LIMIT}; store "
            "large data elsewhere, and push a reference"
        )
    return RawBSONDocument(data, RAW)


def each_of(function: Callable[[T], V], values: Sequence[T]) -> list[V]:
    """Call a function with each of several payloads, and return the results.

    Raises:
        InvalidMessage: The function refused a payload. If there are several payloads, the text
            names the index of the payload.
    """
    if len(values) == 1:
        return [function(values[0])]
    try:
        return list(map(function, values))
    except InvalidMessage as error:
        fault = error
    index = next(index for index, value in enumerate(values) if _refuses(function, value))
    raise InvalidMessage(str(fault).replace("payload", f"payloads[{index}]", 1))


def _refuses(function: Callable[[T], object], value: T) -> bool:
    try:
        function(value)
    except InvalidMessage:
        return True
    return False


# ---- the texts of errors


#: The remedies that errors suggest for values that BSON cannot store.
_INSTEAD: Final[Mapping[type, str]] = {
    Decimal: "use a bson.Decimal128 or a str",
    dt.datetime: "use a datetime from the year 1 to 9999",
    dt.date: "use a datetime with a time zone, or its isoformat()",
    dt.time: "use its isoformat()",
    dt.timedelta: "use its total_seconds()",
    Enum: "use its value",
    Set: "use a list",
    Awaitable: "await it first",
    Iterator: "use a list",
    int: "use an int of at most 64 bits, or a str",
    str: "use a Unicode str, without lone surrogates",
}


def _unstorable(document: Mapping[str, Any], error: Exception) -> str:
    """Return the error text for a document that BSON cannot store: place, reason and remedy."""
    try:
        found = _fault([], document)
    except RecursionError:
        found = None
    if found is None:  # for example a document that is nested too deeply
        return f"payload: not storable as BSON ({error_text(error)[:500] or type(error).__name__})"
    path, fault, remedy = found
    if path[:1] == ["p"]:  # in a pack
        path[0] = "payload"
    return f"{'.'.join(path)}: not storable as BSON ({fault}); {remedy}"


def _fault(path: list[str], value: Any) -> tuple[list[str], str, str] | None:
    """Return the place of the first value that BSON cannot store, the fault, and the remedy."""
    if len(path) > _DEEPEST:
        raise RecursionError
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str) or "\0" in key or not _encodes({key: 0}):
                return path, f"a key of type {type(key).__name__}", "use str keys without NUL"
            if found := _fault([*path, key], item):
                return found
        return None
    if isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            if found := _fault([*path, str(index)], item):
                return found
        return None
    if _encodes({"": value}):
        return None
    model = "convert the value, or give the queue a model that does so"
    other = "use its str()" if hasattr(value, "__fspath__") else model
    remedy = next((text for kind, text in _INSTEAD.items() if isinstance(value, kind)), other)
    return path, f"type {type(value).__name__}", remedy


def _encodes(document: Mapping[str, Any]) -> bool:
    try:
        bson.encode(document, codec_options=OPTIONS)
    except Exception:  # a value of the user's may raise anything
        return False
    return True


#: How deep to search for a value that BSON cannot store, because a payload may contain itself.
_DEEPEST: Final = 150
#: The maximum number of mistakes in a payload that an error lists.
_MAX_MISTAKES: Final = 20
#: The error text of bson for a value that it cannot store: it shows the value itself and its type.
_UNSTORABLE: Final = re.compile(
    r"cannot encode object: .*, of type: <(?:class|enum) '([^']*)'>", re.DOTALL
)


def _is_validation_error(error: BaseException) -> TypeGuard[ValidationError]:
    pydantic = sys.modules.get("pydantic_core")  # there is no such error before it is imported
    return pydantic is not None and isinstance(error, pydantic.ValidationError)


def error_text(error: BaseException) -> str:
    """Return the text of an error, without the values that errors of pydantic and bson contain."""
    if _is_validation_error(error):
        mistakes = error.errors(include_url=False, include_input=False)
        lines = [_mistake(each) for each in mistakes[:_MAX_MISTAKES]]
        if len(mistakes) > _MAX_MISTAKES:
            lines.append(f"and {len(mistakes) - _MAX_MISTAKES} more")
        return "\n".join(lines)
    text = str(error)
    if isinstance(error, InvalidDocument):
        return _UNSTORABLE.sub(r"cannot encode an object of type \1", text)
    return text


def _mistakes(error: ValidationError) -> str:
    """Return the mistakes as text that follows a colon. Several mistakes are on separate lines."""
    text = error_text(error)
    return f"\n{text}" if "\n" in text else f" {text}"


def _mistake(mistake: ErrorDetails) -> str:
    """Return a line that names a field and the mistake in its value."""
    place, text = list(mistake["loc"]), mistake["msg"]
    if place[-1:] == ["[key]"]:
        del place[-2:-1]  # the key itself is the invalid value
    if mistake["type"] == "union_tag_invalid":
        text = f"Input tag is none of {mistake['ctx']['expected_tags']}"
    text = " ".join(text.split())
    return f"{'.'.join(map(str, place))}: {text}" if place else text


def traceback_text(error: BaseException) -> str | None:
    """Return an error's traceback without its invalid values, or None if it shows no such value."""
    chain: list[BaseException] = []
    rest: list[BaseException | None] = [error]
    while rest:
        each = rest.pop()
        if each is not None and each not in chain:
            chain.append(each)
            rest += (each.__cause__, each.__context__)
            rest += each.exceptions if isinstance(each, BaseExceptionGroup) else ()
    secret = [
        each for each in chain if _is_validation_error(each) or isinstance(each, InvalidDocument)
    ]
    if not secret:
        return None
    lines = traceback.TracebackException.from_exception(error).format()
    text = "".join(lines)
    for each in secret:
        # Inside a group of exceptions, the lines are indented.
        found = re.compile(r"\n[ |]*".join(map(re.escape, str(each).split("\n"))))
        text = found.sub(error_text(each).replace("\\", r"\\"), text)
    return text


def log_failure(failure: BaseException, text: str, *values: object) -> None:
    """Log a text and a traceback, without the payloads that errors of pydantic and bson show."""
    trace = traceback_text(failure)
    if trace is None:
        log.warning(text, *values, exc_info=failure)
    else:
        log.warning(f"{text}\n%s", *values, trace)


def storable(value: Any) -> Any:
    """Replace values of types that BSON lacks in a value that pydantic dumped in Python mode."""
    if isinstance(value, dict):
        return {_key(key): storable(item) for key, item in value.items()}
    if isinstance(value, Enum):
        return storable(value.value)
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (list, tuple, set, frozenset)):
        return [storable(item) for item in value]
    if isinstance(value, Decimal):
        return Decimal128(_DECIMAL.create_decimal(value))
    if type(value).__module__.startswith("bson."):
        return value
    return _jsonable(value)


def _key(key: Any) -> str:
    return key if type(key) is str else str(_jsonable(key.value if isinstance(key, Enum) else key))


def _jsonable(value: Any) -> Any:
    from pydantic_core import to_jsonable_python

    return to_jsonable_python(value)


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
        model: A type of payloads that pydantic can validate, or None for any BSON value.

    Raises:
        ConfigurationError: Pydantic cannot create a schema for the model.
    """

    __slots__ = ("_adapter", "model")

    def __init__(self, model: Any = None) -> None:
        self.model = model
        self._adapter: TypeAdapter[Any] | None = None
        if model is not None:
            if isinstance(model, Mapping):
                raise ConfigurationError(
                    f"model: expected a type, such as list[int], found {type(model).__name__}"
                )
            from pydantic import TypeAdapter

            try:
                self._adapter = TypeAdapter(model)
                if not self._adapter.pydantic_complete:
                    self._adapter.rebuild(raise_errors=True)
            except Exception as error:  # pydantic raises many types of error for a non-type
                form = type(model)
                if hasattr(form, "__pydantic_validator__") or hasattr(form, "__dataclass_fields__"):
                    text = f"expected the type {form.__name__}, found an instance of it"
                else:
                    text = f"pydantic cannot validate {model!r} ({error}); use a supported type"
                raise ConfigurationError(f"model: {text}") from error

    def __reduce__(self) -> tuple[Any, ...]:
        return Codec, (self.model,)  # adapters do not pickle, models do

    @property
    def name(self) -> str | None:
        """The name of the model, stored in the ``type`` field of messages, or None without one."""
        return (
            None if self.model is None else getattr(self.model, "__name__", None) or str(self.model)
        )

    def dump(self, payload: Any) -> Any:
        """Return the BSON value of a payload.

        Raises:
            InvalidMessage: The payload does not match the model.
        """
        adapter = self._adapter
        if adapter is None:
            return payload
        try:
            value = adapter.validate_python(payload)
            # A warning of pydantic would show the value.
            return storable(adapter.dump_python(value, mode="python", warnings=False))
        except Exception as error:  # the validators of a model may raise anything
            if not _is_validation_error(error):
                raise InvalidMessage(
                    f"payload: not a valid {self.name}: {type(error).__name__}: {error_text(error)}"
                ) from error
            mistakes = _mistakes(error)
        raise InvalidMessage(f"payload: not a valid {self.name}:{mistakes}")

    def load(self, value: Any) -> T:
        """Return the payload that a BSON value represents.

        Raises:
            InvalidMessage: The value does not match the model.
        """
        if self._adapter is None:
            return value  # type: ignore[no-any-return]  # without a model T is Any
        try:
            loaded: T = self._adapter.validate_python(_loadable(value))
            return loaded
        except Exception as error:
            if not _is_validation_error(error):
                raise
            mistakes = _mistakes(error)
        raise InvalidMessage(f"payload: does not match {self.name}:{mistakes}")
