"""Which messages ``where=`` selects: a matcher, and a filter for the server.

``Where.matches`` decides. ``Where.filter`` only keeps the server from sending messages that surely
do not match. It may let further messages through, but it never drops a match: the server and
mongomock compare arrays, nulls, decimals and paths with numbers in ways that differ from each other
and from this module. Where results could differ, the filter weakens or omits the condition.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from difflib import get_close_matches
from operator import ge, gt, le, lt
from types import MappingProxyType, NoneType
from typing import Any, Final, NamedTuple
from uuid import UUID

import bson
from bson import Decimal128, Int64, ObjectId

from pyqueue.arguments import is_unicode
from pyqueue.documents import STORED_GROUP, eligible_since, group_of, key_of
from pyqueue.errors import ConfigurationError
from pyqueue.limits import shown
from pyqueue.payloads import OPTIONS, storable
from pyqueue.requests import Filter
from pyqueue.where import Condition

#: The fields below which any name may follow.
_OPEN: Final = ("payload", "headers", "checkpoint")
#: All other paths that a condition may name.
_KNOWN: Final = (
    *("key", "when", "pushed", "tries", "priority", "group", "owner", "outcome", "processed"),
    *("error", "error.type", "error.message", "error.at", "error.where", "error.fp"),
    *("progress", "progress.fraction", "progress.note", "progress.at"),
    *("dead", "dead.from", "dead.at", "dead.reason", "dead.tries", "dead.group", "dead.position"),
    *("dead.error", "dead.error.type", "dead.error.message", "dead.error.at"),
    *("dead.error.where", "dead.error.fp"),
)
#: How to read the fields that a message does not show as they are stored.
_SHOWN: Final[Mapping[str, Callable[[Mapping[str, Any]], object]]] = MappingProxyType(
    {
        "key": key_of,
        "group": group_of,
        "when": eligible_since,
        "tries": lambda document: document.get("tries", 0),
    }
)
#: The stored fields by which the server can tell that these paths do not match; "when" and "tries"
#: have no such field, because either may be computed.
_STORED: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"key": ("key", "last_key"), "group": STORED_GROUP, "when": (), "tries": ()}
)
#: A name in a path that stands for an item of a list.
_INDEX: Final = re.compile(r"0|[1-9][0-9]{0,8}")
#: The types whose equality the server, mongomock and this module agree on.
_SIMPLE: Final = frozenset({str, bool, int, Int64, float, NoneType, datetime, ObjectId, UUID})
_ORDERS: Final[Mapping[str, Callable[[Any, Any], bool]]] = MappingProxyType(
    {"gt": gt, "ge": ge, "lt": lt, "le": le}
)
_OPERATORS: Final = MappingProxyType({"gt": "$gt", "ge": "$gte", "lt": "$lt", "le": "$lte"})
_MISSING: Final = object()


class Where(NamedTuple):
    """The conditions of a call. All of them must hold."""

    clauses: tuple[Clause, ...]

    def matches(self, document: Mapping[str, Any]) -> bool:
        """Return whether the conditions select a message, given in its stored form."""
        return all(each.matches(document) for each in self.clauses)

    def filter(self) -> list[Filter]:
        """Return filters for the server that match every selected message, and perhaps more."""
        return [found for each in self.clauses if (found := each.filter())]


@dataclass(frozen=True, slots=True)
class Clause:
    """A condition on the value at a path. The value to compare with is in its stored form."""

    path: str
    condition: Condition

    def matches(self, document: Mapping[str, Any]) -> bool:
        """Return whether the condition holds."""
        name, wanted = self.condition.name, self.condition.value
        value = self._value(document)
        if name == "exists":
            return (value is not _MISSING) == wanted
        if value is _MISSING:
            if "." in self.path:
                return False
            value = None  # as ``Message`` shows a field that a message lacks
        return _CHECKS[name](value, wanted)

    def _value(self, document: Mapping[str, Any]) -> object:
        """Return the value at the path."""
        if (read := _SHOWN.get(self.path)) is not None:
            value = read(document)
            return _MISSING if value is None else value
        found: object = document
        for name in self.path.split("."):
            if isinstance(found, Mapping):
                found = found.get(name, _MISSING)
            elif isinstance(found, list) and _INDEX.fullmatch(name) and int(name) < len(found):
                found = found[int(name)]
            else:
                return _MISSING
        return found

    def filter(self) -> Filter:
        """Return a filter that matches all messages for which this clause holds; {} matches all."""
        names = self.path.split(".")
        # The server may take a number for the name of a field, too, in each document of a list.
        if any(_INDEX.fullmatch(name) or name.startswith("$") for name in names):
            return {}
        fields = _STORED.get(self.path, (self.path,))
        return _either([self._filter_on(field) for field in fields])

    def _filter_on(self, field: str) -> Filter:
        name, wanted = self.condition.name, self.condition.value
        if name == "exists":
            # A path through a list exists for the server, but not here.
            return {field: {"$exists": True}} if wanted else {}
        if field in STORED_GROUP:  # it is stored with a prefix
            return {} if _may_be_none(name, wanted) else {field: {"$exists": True}}
        if name in _ORDERS:
            return _ordered(field, _OPERATORS[name], wanted)
        found = _equal_to(field, wanted if isinstance(wanted, tuple) else (wanted,))
        if name == "contains" and isinstance(wanted, str):
            return _either([found, {field: {"$type": "string"}}])
        return found


def _may_be_none(name: str, wanted: object) -> bool:
    return name in ("equal", "one_of") and (
        wanted is None or (isinstance(wanted, tuple) and None in wanted)
    )


# ---- the filter


def _either(filters: Sequence[Filter]) -> Filter:
    if len(filters) == 1:
        return filters[0]
    return {"$or": filters} if all(filters) and filters else {}


def _equal_to(field: str, values: Sequence[object]) -> Filter:
    if not all(type(each) in _SIMPLE for each in values):
        return {} if None in values else {field: {"$exists": True}}
    found: list[Filter] = [{field: {"$in": list(values)}}]
    if any(_family(each) is float for each in values):
        found.append({field: {"$type": "decimal"}})  # mongomock does not compare decimals
    return _either(found)


def _ordered(field: str, operator: str, wanted: object) -> Filter:
    if isinstance(wanted, Decimal128):
        return {field: {"$type": "number"}}
    kind = {float: "number", str: "string", datetime: "date"}[_family(wanted)]
    # mongomock compares these one after the other, and fails on a decimal. Lists do not match.
    plain: list[Filter] = [
        {field: {"$not": {"$type": "array"}}},
        {field: {"$not": {"$type": "decimal"}}},
        {field: {"$type": kind, operator: wanted}},
    ]
    return _either([{field: {"$type": "decimal"}}, {"$and": plain}])


# ---- the matcher


def _family(value: object) -> type:
    """Return a type that is the same for all values that can be compared with each other."""
    if isinstance(value, (int, float, Decimal128)) and not isinstance(value, bool):
        return float
    return type(value)


def _plain(value: Any) -> Any:
    """Return a value that can be compared with other values of the same ``_family``."""
    if not isinstance(value, Decimal128):
        return value
    number = value.to_decimal()
    return float("nan") if number.is_nan() else number  # a Decimal that is NaN cannot be compared


def _equal(value: Any, wanted: Any) -> bool:
    """Return whether two stored values are equal. The order of fields in a document is ignored."""
    if _family(value) is not _family(wanted):
        return False
    if isinstance(wanted, dict):
        return value.keys() == wanted.keys() and all(
            _equal(value[name], wanted[name]) for name in wanted
        )
    if isinstance(wanted, list):
        return len(value) == len(wanted) and all(map(_equal, value, wanted))
    return bool(_plain(value) == _plain(wanted))


def _one_of(value: Any, wanted: Any) -> bool:
    return any(_equal(value, each) for each in wanted)


def _contains(value: Any, wanted: Any) -> bool:
    if isinstance(value, list):
        return any(_equal(each, wanted) for each in value)
    return type(value) is str and isinstance(wanted, str) and wanted in value


def _order(name: str) -> Callable[[Any, Any], bool]:
    def check(value: Any, wanted: Any) -> bool:
        if _family(value) is not _family(wanted):
            return False
        return _ORDERS[name](_plain(value), _plain(wanted))

    return check


_CHECKS: Final[Mapping[str, Callable[[Any, Any], bool]]] = MappingProxyType(
    {
        **{name: _order(name) for name in _ORDERS},
        "equal": _equal,
        "one_of": _one_of,
        "contains": _contains,
    }
)


# ---- from the argument


def conditions(where: object, also: Collection[str] = ()) -> Where:
    """Return the conditions of ``where``: a mapping of paths to values or conditions, or None.

    Args:
        where: The argument of the call.
        also: Further paths that ``where`` may name, for documents that have these fields.

    Raises:
        ConfigurationError: ``where`` is not a mapping, a path is unknown, or a value is invalid.
    """
    if where is None:
        return Where(())
    if not isinstance(where, Mapping):
        raise ConfigurationError(
            "where: expected a mapping of paths to values, such as {'payload.n': 3}, found "
            f"{type(where).__name__}"
        )
    return Where(tuple(_clause(_checked(path, also), value) for path, value in where.items()))


def _clause(name: str, value: object) -> Clause:
    """Return a clause whose value is in its stored form."""
    given = value if isinstance(value, Condition) else Condition("equal", value)
    wanted: object
    if given.name == "exists":
        if not isinstance(given.value, bool):
            raise ConfigurationError(
                f"where: exists() for {name}: expected True or False, found "
                f"{type(given.value).__name__}"
            )
        wanted = given.value
    elif given.name == "one_of":
        if not isinstance(given.value, tuple) or not given.value:
            raise ConfigurationError(f"where: one_of for {name} needs at least one value")
        wanted = tuple(_in_stored_form(name, each) for each in given.value)
    else:
        wanted = _in_stored_form(name, given.value)
    if given.name in _ORDERS and _family(wanted) not in (float, str, datetime):
        raise ConfigurationError(
            f"where: {given.name} for {name} compares numbers, strs and instants, not "
            f"{type(given.value).__name__}"
        )
    return Clause(name, Condition(given.name, wanted))


def _checked(path: object, also: Collection[str]) -> str:
    """Check a path, and return it.

    Raises:
        ConfigurationError: The path is not a str, or is unknown.
    """
    if not isinstance(path, str):
        raise ConfigurationError(f"where: expected each path as a str, found {type(path).__name__}")
    root, *names = path.split(".")
    if root in _OPEN:
        if not all(names) or "\0" in path or not is_unicode(path):
            raise ConfigurationError(
                f"where: invalid path {shown(path)}; use Unicode names without NUL, separated "
                "by single dots"
            )
        return path
    if path in _KNOWN or path in also:
        return path
    raise _unknown(path, also)


def _unknown(path: str, also: Collection[str]) -> ConfigurationError:
    """Return the error for an unknown path, with the nearest paths."""
    every = (*_OPEN, *_KNOWN, *also)
    root, dot, rest = path.partition(".")
    if dot and (roots := get_close_matches(root, _OPEN, 1)):
        near = [f"{roots[0]}.{rest}"]
    elif dot or not path.isidentifier():
        near = get_close_matches(path, every, 3) or get_close_matches(root, every, 3)
    else:
        near = get_close_matches(path, every, 3, 0.7) or [f"headers.{path}", f"payload.{path}"]
    meant = f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""
    single = ", ".join(each for each in (*_KNOWN, *also) if "." not in each)
    return ConfigurationError(
        f"where: unknown path {shown(path)}{meant}; use payload.NAME, headers.NAME, "
        f"checkpoint.NAME, error.type, dead.reason, or one of {single}"
    )


def _in_stored_form(path: str, value: object) -> object:
    """Return a value as BSON stores it.

    Raises:
        ConfigurationError: BSON cannot store the value, or an instant in it has no time zone.
    """
    data: bytes | None = None
    naive = False
    with suppress(Exception):  # a value from the user may raise anything
        plain = storable(value)
        naive = _has_naive(plain)
        data = bson.encode({"": plain}, codec_options=OPTIONS)
    if data is None:
        raise ConfigurationError(
            f"where: BSON cannot store the {type(value).__name__} for {path}, so no message can "
            "have this value; pass the value in its stored form"
        )
    if naive:
        raise ConfigurationError(
            f"where: the instant for {path} has no time zone; use an aware datetime, such as "
            "datetime.now(timezone.utc)"
        )
    found: object = bson.decode(data, OPTIONS)[""]
    return found


def _has_naive(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_has_naive, value.values()))
    if isinstance(value, list):
        return any(map(_has_naive, value))
    return isinstance(value, datetime) and value.utcoffset() is None
