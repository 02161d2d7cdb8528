"""Translate the errors of a database driver into errors of pyqueue."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from bson.errors import InvalidBSON, InvalidDocument
from pymongo import errors

from pyqueue.errors import (
    ConfigurationError,
    Disconnected,
    DuplicateKey,
    InvalidMessage,
    MissingIndex,
    NotPermitted,
    QueueClosed,
    QueueError,
    TimedOut,
    TimeLimitReached,
    Unavailable,
)
from pyqueue.payloads import error_text
from pyqueue.requests import RefusedWrite, WriteFailure

#: Server error codes for "not primary" and shutdown. They also appear inside writeErrors.
_NOT_PRIMARY: Final = {91, 189, 10058, 10107, 11600, 11602, 13435, 13436}
_TOO_LARGE: Final = {10334, 17280, 17419, 17420}
#: The error codes of a server that cannot apply an update to a document.
_DOES_NOT_FIT: Final = {2, 9, 14, 15, 28, 40, 52, 54, 56, 57, 111}
_DUPLICATE_KEY: Final = 11000
_TIME_LIMIT: Final = 50
#: Codes that stand for many causes: no code, internal error, unknown error.
_VAGUE: Final = {None, 1, 8}
#: A part of the error text with which a server refuses to use an index that does not exist.
_NO_SUCH_HINT: Final = "hint provided does not correspond to an existing index"


#: The error text of PyMongo if it opened a connection while the member was not readable.
_NO_SESSIONS: Final = "Sessions are not supported"


def lacks_sessions(error: Exception) -> bool:
    """Return whether a connection has no sessions because its member was not readable yet."""
    return isinstance(error, errors.ConfigurationError) and _NO_SESSIONS in str(error)


def transient(error: Exception) -> errors.AutoReconnect:
    """Turn an error in a transaction into an error on which retry loops repeat the transaction."""
    return errors.AutoReconnect(str(error), {"errorLabels": ["TransientTransactionError"]})


def translated(error: Exception) -> Exception:
    """Return the pyqueue error for an error of a database driver; return other errors as is."""
    if isinstance(error, QueueError):
        return error
    if isinstance(error, errors.BulkWriteError):
        details = error.details or {}
        late = any(each.get("code") == _TIME_LIMIT for each in details.get("writeErrors", ()))
        return (TimedOut if late else Unavailable)(
            f"the write may not be durable: {details.get('writeConcernErrors')}"
        )
    if isinstance(error, errors.DuplicateKeyError):
        return DuplicateKey("the key or the id is taken")
    if isinstance(error, InvalidBSON):
        return InvalidMessage(f"payload: a stored message cannot be read: {error}")
    if isinstance(
        error, (errors.DocumentTooLarge, InvalidDocument, UnicodeEncodeError, OverflowError)
    ):
        return InvalidMessage(f"payload: {error_text(error)}")
    if isinstance(error, errors.InvalidOperation) and "close" in str(error):
        return QueueClosed("the database client was closed")
    if isinstance(error, RefusedWrite):
        if error.code == _DUPLICATE_KEY:
            return DuplicateKey("the lock of a group is taken")
        return _refusal(errors.WriteError(str(error), error.code))
    if _is_time_limit(error):
        # Errors of the driver about the deadline of the client have no codeName.
        details = getattr(error, "details", None) or {}
        ended = TimeLimitReached if "codeName" in details else TimedOut
        return ended(f"the server did not answer: {_brief(error)}")
    if isinstance(error, errors.ConnectionFailure) or lacks_sessions(error):
        return Disconnected(f"the server did not answer: {_brief(error)}")
    if isinstance(error, errors.PyMongoError) and (
        isinstance(error, errors.WriteConcernError) or error.timeout
    ):
        return Unavailable(f"the server did not answer: {_brief(error)}")
    if isinstance(error, errors.OperationFailure):
        return _refusal(error)
    if isinstance(error, errors.ConfigurationError):
        return ConfigurationError(f"target: {_brief(error)}")
    if isinstance(error, errors.PyMongoError):
        return QueueError(_brief(error))
    return error


def shown_cause(error: Exception, meant: Exception) -> Exception | None:
    """Return the cause to show with a translated error; None if its text may contain a payload."""
    secret = isinstance(meant, InvalidMessage) or isinstance(error, errors.BulkWriteError)
    return None if secret else error


def _is_time_limit(error: Exception) -> bool:
    """Return whether the command itself took too long, rather than its replication."""
    if isinstance(error, errors.OperationFailure) and not isinstance(
        error, errors.WriteConcernError
    ):
        return error.code == _TIME_LIMIT
    return isinstance(error, errors.NetworkTimeout)


def write_failures(error: Exception) -> list[WriteFailure] | None:
    """Return the operations of a batch that the server refused.

    None means that the error does not tell which operations succeeded.
    """
    if isinstance(error, errors.BulkWriteError):
        details = error.details or {}
        if details.get("writeConcernErrors"):
            return None
        return [
            _failure(each["index"], each.get("code"), each)
            for each in details.get("writeErrors", [])
        ]
    if isinstance(error, errors.WriteError):
        return [_failure(0, error.code, error.details or {"errmsg": str(error)})]
    return None


def matched_count(error: Exception) -> int:
    """Return how many operations of a failed batch matched a document."""
    details = getattr(error, "details", None) or {}
    return int(details.get("nMatched", 0)) + int(details.get("nRemoved", 0))


def _failure(place: int, code: int | None, details: Mapping[str, Any]) -> WriteFailure:
    text = str(details.get("errmsg", ""))
    if code != _DUPLICATE_KEY:
        return WriteFailure(place, None, _refusal(errors.WriteError(text, code)))
    pattern = details.get("keyPattern")
    if pattern is None:  # mongomock names only the values
        pattern = {"key": 1} if "'key'" in text or "key:" in text else {"_id": 1}
    field = "_id" if "_id" in pattern else "key"
    return WriteFailure(place, field, DuplicateKey("the key or the id is taken"))


def _refusal(error: errors.OperationFailure) -> QueueError:
    """Return the pyqueue error for an operation that the server refused.

    The error code decides. The text may quote a payload, so it decides only if the code is too
    general.
    """
    text, code = _brief(error), error.code
    vague = code in _VAGUE
    if code == 13 and "requires authentication" in text:
        return ConfigurationError(
            "target: the server asks for a user name and a password, but the URL has none; use "
            "mongodb://USER:PASSWORD@host/db"
        )
    if code in (13, 8000) or (vague and "not authorized" in text):
        return NotPermitted(
            "the database user is not permitted to do this; grant it find, insert, update and "
            f"remove on the collection ({text})"
        )
    if code == 18:
        return ConfigurationError(
            "target: the server rejected the user name or the password; check both, and authSource"
        )
    if code in (85, 86):
        return ConfigurationError(
            f"an index has the name of a pyqueue index, but different options ({text}); drop it"
        )
    if code == 20 or (code == 263 and "Transaction numbers" in text):
        return ConfigurationError(
            "session: transactions need a replica set, but this is a standalone server"
        )
    if code == 2 and not isinstance(error, errors.WriteError) and _NO_SUCH_HINT in text:
        return MissingIndex(text)
    if code in _TOO_LARGE or (vague and ("too large" in text or "larger than" in text)):
        return InvalidMessage(
            f"payload: the message would be larger than the server allows ({text})"
        )
    if code == _TIME_LIMIT:  # for one operation of a batch
        return TimedOut(f"the server did not answer: {text}")
    if code in _NOT_PRIMARY:
        return Disconnected(f"the server did not answer: {text}")
    if isinstance(error, errors.WriteError) or code in _DOES_NOT_FIT:
        return InvalidMessage(f"payload: the server rejected it ({text})")
    return QueueError(text)


def _brief(error: Exception) -> str:
    """Return the text of an error without the settings and the topology that the driver adds."""
    text = str(error)
    for addition in (", Timeout:", ", full error:", " (configured timeouts:"):
        text = text.split(addition)[0]
    return text[:1000]
