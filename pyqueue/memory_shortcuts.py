"""Quick forms of two searches of mongomock, for the collections of ``memory``.

mongomock looks at every document for each search, and searches each unique index after each write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import bson
from pymongo.errors import DuplicateKeyError

Document = dict[str, Any]


def take_shortcuts(collection: Any) -> None:
    """Give a mongomock collection its quick searches. They find the same documents."""
    collection._iter_documents = _search(collection)
    collection._ensure_uniques = _check(collection)


def _search(collection: Any) -> Callable[[Any], Iterable[Document]]:
    """Return a search that takes a document by its id, if the filter names one."""
    from mongomock import filtering

    filter_applies: Any = filtering.filter_applies

    def search(match: Any) -> Iterable[Document]:
        id = match.get("_id") if isinstance(match, dict) else None
        try:
            if isinstance(id, (str, bson.ObjectId)):
                one = collection._store[id]
                return iter([one] if filter_applies(match, one) else [])
        except KeyError:
            pass
        every = list(collection._store.documents)
        if not every:
            filter_applies(match, {})  # it refuses unknown operators
        return (each for each in every if filter_applies(match, each))

    return search


def _check(collection: Any) -> Callable[[Document], None]:
    """Return the check after a write, limited to the unique indexes that have the document.

    Most messages have no key, no lock and no slot.
    """
    from mongomock import filtering, helpers

    filter_applies: Any = filtering.filter_applies
    get_value_by_dot: Any = helpers.get_value_by_dot

    def value(document: Document, path: str) -> Any:
        try:
            return get_value_by_dot(document, path)
        except KeyError:
            return None

    def check(document: Document) -> None:
        for index in collection._store.indexes.values():
            partial = index.get("partialFilterExpression") or {}
            if not index.get("unique") or not filter_applies(partial, document):
                continue
            # The last field of an index is the one that differs most, so it is compared first.
            equal = {path: value(document, path) for path, _ in reversed(index["key"])}
            if index.get("sparse") and all(each is None for each in equal.values()):
                continue
            rule = {"$and": [equal, partial]} if partial else equal
            if len(list(collection._iter_documents(rule))) > 1:
                raise DuplicateKeyError("E11000 Duplicate Key Error", 11000)

    return check
