"""The conditions and the projection for reading rows, which the database applies.

The filters of Spark become conditions on stored documents. A condition may match more messages
than its filter, but never fewer, because Spark applies its filters, too. So a column that is
missing in a document, or that another program wrote, is never a reason to leave the message out.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from bson import ObjectId
from pyspark.sql import datasource

from pyqueue.errors import ConfigurationError, InvalidMessage
from pyqueue.spark.columns import COLUMNS, NEEDED
from pyqueue.spark.row_reader import from_json

#: The operators that the ``match`` option allows.
_OPERATORS: Final = ("$eq", "$ne", "$gt", "$gte", "$lt", "$lte", "$in", "$nin", "$exists")

Condition = dict[str, Any]


def fields_of(columns: Iterable[str]) -> dict[str, int]:
    """Return the projection to the stored fields that these columns need."""
    more = (field for name in columns for field in COLUMNS[name].fields)
    return dict.fromkeys((*NEEDED, *more), 1)


def matching(text: str) -> Condition:
    """Return the database filter that a value of the ``match`` option describes.

    Raises:
        ConfigurationError: The text is not a JSON object of conditions on fields of the payload.
    """
    try:
        given = from_json(text)
    except InvalidMessage:
        given = None
    if not isinstance(given, dict) or not given:
        raise ConfigurationError(
            f"match: {text[:100]!r} is not allowed; use a JSON object of fields of the payload "
            'and their values or conditions, for example {"carrier": "UA", "delay": {"$gt": 0}}'
        )
    for name, wanted in given.items():
        wrong = [each for each in name.split(".") if each[:1] in ("", "$")]
        if isinstance(wanted, dict) and any(each.startswith("$") for each in wanted):
            wrong += [each for each in wanted if each not in _OPERATORS]
        if wrong:
            raise ConfigurationError(
                f"match: {wrong[0]!r} is not allowed; name fields of the payload, and use only the "
                f"operators {', '.join(_OPERATORS)}"
            )
    return {f"payload.{name}": wanted for name, wanted in given.items()}


# ---- the filters of Spark


def condition(filter: datasource.Filter) -> Condition | None:
    """Return a database condition that matches every message that the filter matches.

    Return None if no such condition is known.
    """
    column = getattr(filter, "attribute", ())
    value = getattr(filter, "value", None)
    if column == ("id",):
        ids = ids_of(filter)
        return None if ids is None else {"_id": {"$in": ids}}
    if column == ("key",):
        return _key(filter, value)
    if column == ("tries",) and type(value) is int:
        return _bounds("tries", filter, value, value)
    if column == ("when",) and isinstance(value, datetime) and value.tzinfo is not None:
        # Stored instants are whole milliseconds.
        floor = value.astimezone(UTC)
        floor -= timedelta(microseconds=floor.microsecond % 1000)
        ceiling = floor if floor == value else floor + timedelta(milliseconds=1)
        return _bounds("due", filter, floor, ceiling)
    return None


def ids_of(filter: datasource.Filter) -> list[str | ObjectId] | None:
    """Return the ids that a filter allows, in every form in which they may be stored.

    The column ``id`` shows an ObjectId as its hex digits. Return None if the filter is about
    another column, or allows a range of ids.
    """
    values: Iterable[Any]
    match filter:
        case datasource.EqualTo(("id",), value):
            values = [value]
        case datasource.In(("id",), values):
            pass
        case _:
            return None
    given = [each for each in values if isinstance(each, str)]
    return [*given, *(ObjectId(each) for each in given if ObjectId.is_valid(each))]


def _key(filter: datasource.Filter, value: Any) -> Condition | None:
    match filter:
        case datasource.EqualTo() if isinstance(value, str):
            return {"key": value}
        case datasource.In():
            return {"key": {"$in": [each for each in value if isinstance(each, str)]}}
        case datasource.IsNull():
            return {"key": {"$not": {"$type": "string"}}}
        case datasource.IsNotNull():
            return {"key": {"$type": "string"}}
    return None


def _bounds(field: str, filter: datasource.Filter, floor: Any, ceiling: Any) -> Condition | None:
    """Return a condition that excludes values beyond a bound, but no value of another type."""
    below, above = {"$not": {"$gt": floor}}, {"$not": {"$lt": ceiling}}
    match filter:
        case datasource.EqualTo():
            return {"$and": [{field: below}, {field: above}]}
        case datasource.LessThan() | datasource.LessThanOrEqual():
            return {field: below}
        case datasource.GreaterThan() | datasource.GreaterThanOrEqual():
            return {field: above}
    return None
