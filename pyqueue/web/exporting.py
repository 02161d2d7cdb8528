"""Download the messages of a queue's page, as JSON lines or as CSV.

A file has the messages that the filter of the page finds, up to ``MOST``, in the same order.
Secrets are hidden as on the page.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from starlette.responses import Response

from pyqueue.messages import Finished, Message, Page
from pyqueue.web import shapes
from pyqueue.web.access import Viewer
from pyqueue.web.filters import MAX_TEXT, conditions
from pyqueue.web.overview import row_of
from pyqueue.web.queue_page import chosen_state, newest_first
from pyqueue.web.site import Site

#: The maximum number of messages in a file, of messages examined for it, and of characters.
MOST: Final = 5000
_BUDGET: Final = 50_000
_MOST_CHARACTERS: Final = 16 * 2**20
#: How many messages are read by one command, and how many are examined.
_PAGE: Final = 50
_PAGE_BUDGET: Final = 5000
#: The columns, in order. Values of the second kind are JSON.
_PLAIN: Final = ("id", "state", "when", "pushed", "tries", "key", "group", "priority")
_JSON: Final = ("headers", "payload")
COLUMNS: Final = (*_PLAIN, *_JSON, "error")
#: A spreadsheet takes a text that begins with one of these for a formula.
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")

Line = Mapping[str, Any]


class _Found(NamedTuple):
    """The messages to write to a file."""

    lines: Sequence[Line]
    #: Whether there may be more messages.
    more: bool


async def export(site: Site, viewer: Viewer, ending: str) -> Response:
    """Return the messages of a queue that match a filter, as a file.

    Args:
        site: The dashboard that sends the file.
        viewer: The person, who may view the queue.
        ending: "ndjson" or "csv".

    Raises:
        ConfigurationError: The text in the URL is not a filter.
        HTTPException: There is no such queue.
    """
    _, row = await row_of(site, str(viewer.request.path_params["name"]))
    state = chosen_state(viewer, row)
    where = conditions(viewer.argument("where")[: MAX_TEXT + 1], site.redactor)
    queue, newest = site.queue(row.info), newest_first(viewer, state)

    async def page(after: str | None) -> Page[Any]:
        return await queue.browse(state, where, after, _PAGE, newest=newest, budget=_PAGE_BUDGET)

    found = await _gathered(site, page)
    cut = f"-first-{len(found.lines)}" if found.more else ""
    name = quote(f"{row.info.name}-{state}{cut}.{ending}", safe="")
    made, kind = FORMATS[ending]
    headers = {"content-disposition": f"attachment; filename*=UTF-8''{name}"}
    return Response(made(found.lines), headers=headers, media_type=kind)


async def _gathered(site: Site, page: Callable[[str | None], Awaitable[Page[Any]]]) -> _Found:
    """Read pages until there are no more messages, or the file is large enough.

    Args:
        site: The dashboard that sends the file.
        page: Returns the page after a cursor.
    """
    lines: list[Line] = []
    after: str | None = None
    looked = characters = 0
    while True:
        some = await page(after)
        looked += some.looked
        for each in some.messages:
            lines.append(_line(site, each))
            characters += len(json.dumps(lines[-1], ensure_ascii=False))
            if len(lines) >= MOST or characters >= _MOST_CHARACTERS:
                last = some.after is None and each is some.messages[-1]
                return _Found(lines, more=not last)
        if some.after is None or looked >= _BUDGET:
            return _Found(lines, more=some.after is not None)
        after = some.after


def _line(site: Site, message: Message[Any]) -> Line:
    """Return the values of a message by column."""
    shown = site.redactor.text
    error = None
    if message.error is not None:
        error = f"{message.error.type}: {shown('error.message', message.error.message)}"
    instant = message.processed if isinstance(message, Finished) else message.when
    return {
        "id": str(message.id),
        "state": message.state,
        "when": instant.isoformat(),
        "pushed": message.pushed.isoformat(),
        "tries": message.tries,
        "key": shown("key", message.key),
        "group": shown("group", message.group),
        "priority": message.priority,
        "headers": shapes.redacted(site.redactor, "headers", message.headers),
        "payload": shapes.redacted(site.redactor, "payload", message.payload),
        "error": error,
    }


def _json_lines(lines: Sequence[Line]) -> str:
    return "".join(f"{json.dumps(each, ensure_ascii=False)}\n" for each in lines)


def _csv(lines: Sequence[Line]) -> str:
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(COLUMNS)
    for each in lines:
        writer.writerow([_cell(name, each[name]) for name in COLUMNS])
    return file.getvalue()


def _cell(name: str, value: Any) -> object:
    """Return the value of a cell, in a form that no spreadsheet takes for a formula."""
    if name in _JSON:
        value = json.dumps(value, ensure_ascii=False)
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


#: The formats by the ending of the file: the function that makes the text, and the type.
FORMATS: Final[Mapping[str, tuple[Callable[[Sequence[Line]], str], str]]] = {
    "ndjson": (_json_lines, "application/x-ndjson"),
    "csv": (_csv, "text/csv"),
}
