"""The options on which all users of a queue agree: the values in force, and who named them.

In the record of a queue, ``shape`` has the values in force, and ``named`` has an entry for each
option that a program named. In the entry, ``code`` lists the values that the code of programs
gives; ``by`` and ``at`` say who last named or changed the option, and when. An option that was
never named has the default of the kind, and the first program that gives a value names it.

After ``reshape``, the code of running programs still gives the old value. ``code`` keeps it, so
that a restart of unchanged code is not refused.

This module is pure.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, Final

from pyqueue.errors import ConfigurationError
from pyqueue.limits import limit_or_none, stored_limit
from pyqueue.requests import Filter

log = logging.getLogger("pyqueue")

#: A record keeps this many values that the code of programs may still give for an option.
_MAX_CODE: Final = 8
_MISSING: Final = object()


class SharedOptions:
    """The options in a record on which all users of a queue agree.

    Args:
        queue: The name of the queue.
        record: The record of the queue, as read.
        default: The options of the queue's kind, with their defaults.
    """

    def __init__(
        self, queue: str, record: Mapping[str, Any], default: Mapping[str, object]
    ) -> None:
        self._queue = queue
        self._default = default
        shape, named = record.get("shape"), record.get("named")
        #: The values in force.
        self.shape: Mapping[str, object] = shape if isinstance(shape, Mapping) else {}
        self._named: Mapping[str, object] = named if isinstance(named, Mapping) else {}

    def unnamed(self, given: Mapping[str, object]) -> dict[str, object]:
        """Return the options that a program gives and that were never named.

        Raises:
            ConfigurationError: A program has named another value for an option.
        """
        found: dict[str, object] = {}
        for name, value in given.items():
            if not self._is_named(name):
                found[name] = value
                continue
            stored, wanted = self._stored(name), _comparable(name, value)
            if stored == wanted:
                continue
            shown = None if stored is _MISSING else stored
            # The value from before a reshape is allowed, with a warning.
            if wanted not in [_readable(name, each) for each in self._code(name)]:
                raise ConfigurationError(
                    f"{name}: queue {self._queue!r} has {name}={shown!r}{self._origin(name)}, but "
                    f"this program has {name}={wanted!r}; leave the option out to use the stored "
                    "value, or change the stored value with client.reshape()"
                )
            log.warning(
                "%s: queue %r keeps %s=%r%s, but this program has %s=%r, the value before a "
                "reshape; update the option, or leave it out",
                *(name, self._queue, name, shown, self._origin(name), name, wanted),
            )
        return found

    def as_read(self, names: Mapping[str, object]) -> Filter:
        """Return the filter that matches the record as long as these options do not change."""
        read = [("shape", self.shape), ("named", self._named)]
        return {
            f"{field}.{name}": {"$eq": values[name]} if name in values else {"$exists": False}
            for name in names
            for field, values in read
        }

    def naming(self, given: Mapping[str, object], by: str, at: datetime) -> dict[str, object]:
        """Return the fields to set when a program names options."""
        put: dict[str, object] = {f"shape.{name}": value for name, value in given.items()}
        for name, entry in named_options(given, by, at).items():
            put[f"named.{name}"] = entry
        return put

    def reshaping(self, given: Mapping[str, object], by: str, at: datetime) -> dict[str, object]:
        """Return the fields to set when options change, without the value of a removed limit."""
        put: dict[str, object] = {}
        for name, value in given.items():
            code = list(self._code(name))
            old = self.shape.get(name)
            if old is not None and self._is_named(name):
                code = [*(each for each in code if each != old), old]
            put[f"named.{name}"] = _entry(code[-_MAX_CODE:], by, at)
            if value is not False or name != "limit":
                put[f"shape.{name}"] = value
        return put

    def _is_named(self, name: str) -> bool:
        """Return whether a program named an option.

        Releases that do not know ``named`` store only the value. If that value is not the default,
        a program must have set it.
        """
        value = self.shape.get(name, _MISSING)
        return name in self._named or value not in (_MISSING, self._default.get(name, _MISSING))

    def _stored(self, name: str) -> object:
        if name == "limit" and self.shape.get(name) is not None:
            return limit_or_none(self._queue, self.shape)
        return self.shape.get(name, _MISSING)

    def _code(self, name: str) -> Sequence[object]:
        entry = self._named.get(name)
        code = entry.get("code") if isinstance(entry, Mapping) else None
        return code if isinstance(code, list) else []

    def _origin(self, name: str) -> str:
        """Return who named or changed an option, and when, for an error or a log."""
        entry = self._named.get(name)
        by, at = (entry.get("by"), entry.get("at")) if isinstance(entry, Mapping) else (None, None)
        if not isinstance(at, datetime):
            return ""
        return f" (set by {by or '?'} at {at:%Y-%m-%d %H:%M:%S} UTC)"


def named_options(given: Mapping[str, object], by: str, at: datetime) -> dict[str, object]:
    """Return what the record notes about each option that a program sets: who, and when."""
    return {name: _entry([value], by, at) for name, value in given.items()}


def _entry(code: Sequence[object], by: str, at: datetime) -> dict[str, object]:
    return {"code": list(code), "by": by, "at": at}


def _comparable(name: str, value: object) -> object:
    """Return a value for comparison: equal limits may be stored in different ways."""
    return stored_limit(value) if name == "limit" and value is not None else value


def _readable(name: str, value: object) -> object:
    """Return a value of ``code`` for comparison, or ``_MISSING`` if this release cannot read it."""
    with suppress(ConfigurationError):
        return _comparable(name, value)
    return _MISSING
