"""Pages: where the next page of a queue begins, for plans that read a queue page by page."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from bson import ObjectId

from pyqueue.backends.kind import ScanStart
from pyqueue.requests import Document


def page_end(page: Sequence[Document]) -> ScanStart | None:
    """Return where the scan continues after a page, or None if the page has no pyqueue message."""
    for document in reversed(page):
        when, id = document["when"], document["_id"]
        if isinstance(when, datetime) and isinstance(id, (ObjectId, str)):
            return when, id
    return None
