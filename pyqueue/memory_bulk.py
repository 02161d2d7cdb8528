"""``bulk_write`` in memory: mongomock refuses the operation objects of a current PyMongo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from pymongo import DeleteMany, DeleteOne, InsertOne, ReplaceOne, UpdateMany, UpdateOne
from pymongo.errors import BulkWriteError, InvalidOperation, WriteError
from pymongo.results import BulkWriteResult

from pyqueue.errors import ConfigurationError

#: The method of a collection that does an operation.
_METHODS: Final[dict[type, str]] = {
    InsertOne: "insert_one",
    ReplaceOne: "replace_one",
    UpdateOne: "update_one",
    UpdateMany: "update_many",
    DeleteOne: "delete_one",
    DeleteMany: "delete_many",
}
#: The options of operations that a collection in memory cannot apply.
_UNSUPPORTED: Final = ("_collation", "_array_filters", "_sort", "_let")
#: The counts of a result.
_COUNTS: Final = ("nInserted", "nMatched", "nModified", "nUpserted", "nRemoved")


def bulk_write(
    collection: Any,
    operations: Sequence[Any],
    ordered: bool = True,
    by_pipeline: Callable[[Any, Any], Any] | None = None,
    **options: Any,
) -> BulkWriteResult:
    """Run writes one by one. Return their counts, as a server does.

    Args:
        collection: The collection.
        operations: The operations of PyMongo.
        ordered: Whether to stop at the first write that fails.
        by_pipeline: Updates one document with a pipeline, or None if the collection does so.
        options: Arguments for each method, such as the session.

    Raises:
        BulkWriteError: Writes failed. The details name them.
        ConfigurationError: An operation, or an option of one, needs a server.
    """
    if not operations:
        raise InvalidOperation("No operations to execute")
    calls = [_call(operation) for operation in operations]
    result: dict[str, Any] = dict.fromkeys(_COUNTS, 0)
    result |= {"upserted": [], "writeErrors": [], "writeConcernErrors": []}
    for place, (method, args, more) in enumerate(calls):
        if by_pipeline is not None and method == "update_one" and isinstance(args[1], list):
            result["nMatched"] += by_pipeline(*args) is not None
            continue
        try:
            _count(result, place, getattr(collection, method)(*args, **more, **options))
        except WriteError as error:
            fault = {"index": place, "code": error.code, "errmsg": str(error)}
            details = error.details if isinstance(error.details, dict) else {}
            result["writeErrors"].append(fault | details)
            if ordered:
                break
    if result["writeErrors"]:
        raise BulkWriteError(result)
    return BulkWriteResult(result, acknowledged=True)


def _call(operation: Any) -> tuple[str, list[Any], dict[str, Any]]:
    """Return the method of a collection that does an operation, and its arguments."""
    method = _METHODS.get(type(operation))
    if method is None:
        raise _refusal(f"{type(operation).__name__} in bulk_write")
    for name in _UNSUPPORTED:
        if getattr(operation, name, None) is not None:
            raise _refusal(f"{name[1:]} of {type(operation).__name__}")
    given = (getattr(operation, name, None) for name in ("_filter", "_doc"))
    args = [each for each in given if each is not None]
    return method, args, {"upsert": True} if getattr(operation, "_upsert", False) else {}


def _refusal(reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"memory: mongomock does not support this ({reason}); run the test on a MongoDB server"
    )


def _count(result: dict[str, Any], place: int, done: Any) -> None:
    """Add the outcome of one write to the counts."""
    if hasattr(done, "inserted_id"):
        result["nInserted"] += 1
    elif hasattr(done, "deleted_count"):
        result["nRemoved"] += done.deleted_count
    elif done.upserted_id is not None:
        result["nUpserted"] += 1
        result["upserted"].append({"index": place, "_id": done.upserted_id})
    else:
        result["nMatched"] += done.matched_count
        result["nModified"] += done.modified_count
