"""The filter of a queue's page: text that a person types, as conditions of ``pyqueue.where``.

``payload.n>3 headers.tenant:acme error.type:Timeout error.message~refused payload.vip?`` has five
conditions, which must all hold.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import Final

from pyqueue.errors import ConfigurationError
from pyqueue.web.redacting import Redactor
from pyqueue.where import Condition, contains, exists, ge, gt, le, lt

#: The maximum length of a filter, in characters, and the maximum number of conditions.
MAX_TEXT: Final = 500
_MAX_CONDITIONS: Final = 10
#: Numbers of at least this size are treated as texts.
_MAX_NUMBER: Final = 1 << 63
_TERM: Final = re.compile(
    r"""([\w-]+(?:\.[\w-]+)*)      # the path
    (?: (>=|<=|[:=<>~]) ("(?:[^"\\]|\\.)*"|\S+) | (\?) )(?=\s|$)""",
    re.VERBOSE,
)
#: The ends of the paths of fields that are instants.
_INSTANTS: Final = ("when", "pushed", "processed", ".at")
_ORDERS: Final = {">": gt, ">=": ge, "<": lt, "<=": le, "~": contains}


def conditions(text: str, redactor: Redactor) -> dict[str, object]:
    """Return the conditions of a filter, keyed by path.

    Raises:
        ConfigurationError: The text is not a filter, or it is about a hidden field.
    """
    if len(text) > MAX_TEXT:
        raise ConfigurationError(
            f"filter: expected at most {MAX_TEXT} characters, found {len(text)}; shorten it"
        )
    found: dict[str, object] = {}
    rest = text.strip()
    while rest:
        match = _TERM.match(rest)
        if match is None:
            raise ConfigurationError(
                f"filter: expected PATH:VALUE, found {rest[:60]!r}; use payload.n:3, payload.n>3, "
                "error.message~refused or payload.vip?"
            )
        path, operator, value, _ = match.groups()
        if path in found:
            raise ConfigurationError(f"filter: {path} is set twice; set it once")
        found[path] = _condition(path, operator, value, redactor)
        rest = rest[match.end() :].lstrip()
    if len(found) > _MAX_CONDITIONS:
        raise ConfigurationError(
            f"filter: expected at most {_MAX_CONDITIONS} conditions, found {len(found)}; use fewer"
        )
    return found


def _condition(path: str, operator: str | None, text: str | None, redactor: Redactor) -> object:
    if redactor.hides(path) or redactor.replaces(path):
        raise _hidden(path)
    if operator is None or text is None:
        return exists()
    value = _value(path, text)
    # A filter on a value that is never shown would reveal it, one guess at a time.
    if redactor.value(path, value) != value:
        raise _hidden(path)
    if operator == "~" and not isinstance(value, str):
        value = text.strip('"')
    made: Condition | object = _ORDERS[operator](value) if operator in _ORDERS else value
    return made


def _hidden(path: str) -> ConfigurationError:
    return ConfigurationError(f"filter: {path} is hidden here; use another field")


def _value(path: str, text: str) -> str | int | float | bool | datetime | None:
    """Return the value that a text stands for: never a list or a document."""
    if path.endswith(_INSTANTS) and not path.startswith(("payload", "headers", "checkpoint")):
        try:
            instant = datetime.fromisoformat(text.strip('"'))
        except ValueError:
            raise ConfigurationError(
                f"filter: expected a time for {path}, found {text[:40]!r}; use a time such as "
                "2030-01-31T08:00Z"
            ) from None
        return instant if instant.tzinfo else instant.replace(tzinfo=UTC)
    try:
        value = json.loads(text)
    except ValueError:
        return text
    if isinstance(value, (int, float)) and not abs(value) < _MAX_NUMBER:
        return text  # the database has no such number
    return value if value is None or isinstance(value, (str, int, float, bool)) else text
