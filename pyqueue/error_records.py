"""What a message stores of an error. This module does no I/O."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from pyqueue.errors import ConfigurationError
from pyqueue.payloads import error_text

#: The longest error text that a message keeps, in bytes.
MAX_ERROR_BYTES: Final = 2048


def error_record(error: BaseException | str, now: datetime) -> dict[str, object]:
    """Return how a message stores an error: its type, its text and the instant.

    Raises:
        ConfigurationError: the error is neither an exception nor a str.
    """
    if not isinstance(error, (BaseException, str)):
        raise ConfigurationError(f"error: give an exception or a str, not {type(error).__name__}")
    name = type(error).__name__ if isinstance(error, BaseException) else "error"
    text = error_text(error) if isinstance(error, BaseException) else error
    text = text.encode("utf-8", "replace")[:MAX_ERROR_BYTES].decode("utf-8", "ignore")
    return {"type": name, "message": text, "at": now}
