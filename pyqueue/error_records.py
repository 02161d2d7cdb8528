"""The records of errors and failed tries in messages. This module does no I/O.

An error is identified by its type and by the place in the handler's code where it arose. Errors
with equal fingerprints have the same cause, even if their texts differ. Of a traceback, a message
stores the names of functions and the line numbers, but no values of variables, which may be secret.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from hashlib import sha256
from typing import Any, Final, NamedTuple

from pyqueue.errors import ConfigurationError
from pyqueue.messages import Reservation
from pyqueue.payloads import error_text

#: The longest error text that a message keeps, in bytes.
MAX_ERROR_BYTES: Final = 2048
#: How many calls of a traceback a message keeps, and their maximum size in bytes.
TRACE_CALLS: Final = 8
MAX_TRACE_BYTES: Final = 4096
#: The longest error text of an attempt, in characters.
_MAX_ATTEMPT_TEXT: Final = 200
#: The longest place in the code, in characters.
_MAX_PLACE: Final = 200
#: The packages that call users' code. The first call in any other package is the handler.
_CALLERS: Final = frozenset({"pyqueue", "anyio", "pydantic", *sys.stdlib_module_names})
#: The parts of a text that differ from message to message: numbers and hexadecimal ids.
_VARYING: Final = re.compile("0x[0-9a-f]+|[0-9a-f]{4,}|[0-9][0-9a-f]*", re.IGNORECASE)


class _Call(NamedTuple):
    """One call of a traceback."""

    #: The top package of the code, or its module if it is in no package.
    package: str
    #: Whether the code is in an installed package, so that it is probably not the user's own.
    installed: bool
    place: str


def error_record(error: BaseException | str, now: datetime) -> dict[str, object]:
    """Return the record of an error in a message: its type, its text, its place and the instant.

    Raises:
        ConfigurationError: The error is neither an exception nor a str.
    """
    if not isinstance(error, (BaseException, str)):
        raise ConfigurationError(f"error: pass an exception or a str, not {type(error).__name__}")
    if isinstance(error, str):
        return _described("error", error, now)
    record = _described(type(error).__name__, error_text(error), now)
    if calls := _calls(error):
        handler = _in_handler(calls)
        where = _known_by(handler, calls)
        record |= {"where": where, "trace": _trace(calls)}
        if handler:
            record["fp"] = _fingerprint(type(error).__name__, where)
    return record


def _described(name: str, text: str, now: datetime) -> dict[str, object]:
    """Return the record of an error whose place in the code is not known."""
    text = text.encode("utf-8", "replace")[:MAX_ERROR_BYTES].decode("utf-8", "ignore")
    fp = _fingerprint(name, _VARYING.sub("", text))
    return {"type": name, "message": text, "at": now, "fp": fp}


def _calls(error: BaseException) -> list[_Call]:
    """Return the calls of a traceback, outermost first."""
    found: list[_Call] = []
    step = error.__traceback__
    while step is not None:
        code, names = step.tb_frame.f_code, step.tb_frame.f_globals
        module = str(names.get("__name__"))
        package = str(names.get("__package__") or module)  # `python -m` runs "__main__"
        installed = "site-packages" in code.co_filename or "dist-packages" in code.co_filename
        place = f"{module}:{code.co_qualname}:{step.tb_lineno}"[-_MAX_PLACE:]
        found.append(_Call(package.partition(".")[0], installed, place))
        step = step.tb_next
    return found


def _in_handler(calls: Sequence[_Call]) -> list[_Call]:
    """Return the calls whose functions are defined in the handler's package."""
    package = next((each.package for each in calls if each.package not in _CALLERS), None)
    return [each for each in calls if each.package == package]


def _known_by(handler: Sequence[_Call], calls: Sequence[_Call]) -> str:
    """Return the innermost place in the handler's package or, if none, in code not installed."""
    outside = [each for each in calls if not each.installed]
    return (handler or outside or calls)[-1].place


def _trace(calls: Sequence[_Call]) -> str:
    """Return the innermost calls, one per line."""
    lines = "\n".join(each.place for each in calls[-TRACE_CALLS:])
    return lines.encode("utf-8", "replace")[-MAX_TRACE_BYTES:].decode("utf-8", "ignore")


def _fingerprint(*parts: str) -> str:
    """Return a short hash of these texts."""
    return sha256("\n".join(parts).encode("utf-8", "replace")).hexdigest()[:12]


def failed_try(held: Reservation[Any], error: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the record of a try that failed, or None if its holder gave no error.

    Args:
        held: The reservation of the try.
        error: The record of the error, as ``error_record`` returned it.
    """
    if error is None:
        return None
    return {
        "number": held.tries,
        "at": error["at"],
        "owner": held.owner,
        "seconds": max(0.0, (error["at"] - held.reserved).total_seconds()),
        "type": error["type"],
        "fp": error["fp"],
        "message": error["message"][:_MAX_ATTEMPT_TEXT],
    }
