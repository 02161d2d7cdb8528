"""The page of a message: its state, why it waits, the queues it passed, its tries and payload."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

from starlette.exceptions import HTTPException

from pyqueue.errors import ConfigurationError
from pyqueue.messages import Finished, Message, StreamMessage
from pyqueue.telemetry.watching import RunSummary
from pyqueue.web import charts, shapes
from pyqueue.web.access import Viewer
from pyqueue.web.charts import Lane
from pyqueue.web.overview import visible_runs
from pyqueue.web.sampling import Row, why_waiting
from pyqueue.web.site import Site, View, path_to

#: The maximum number of held messages that are examined to find the holder of a group.
_BUDGET: Final = 1000
#: The end of the id of a message in a pack: its index.
_PACKED: Final = re.compile(r":\d+$")
#: The actions that each state allows.
_ACTIONS: Final[dict[str, tuple[str, ...]]] = {
    "ready": ("cancel",),
    "scheduled": ("requeue", "cancel"),
    "reserved": ("cancel", "force_release"),
    "dead": ("requeue", "remove"),
    "finished": ("replay",),
}


async def find(site: Site, viewer: Viewer, id: str) -> Message[Any]:
    """Return a message, if the viewer may see it.

    Raises:
        HTTPException: There is no such message, or the viewer may not see it.
    """
    try:
        message = await site.client.find(id)
    except ConfigurationError as error:
        raise HTTPException(404, str(error)) from error
    if message is None or not await viewer.sees(message.queue):
        raise HTTPException(404, f"There is no message {id[:120]!r}.")
    return message


async def message_page(site: Site, viewer: Viewer) -> View:
    """Show a message."""
    message = await find(site, viewer, str(viewer.request.path_params["id"]))
    sample = await site.sampler.sample()
    row = sample.rows.get(message.queue)
    now = datetime.now(UTC)
    at, skip = viewer.request.query_params.getlist("at")[:100], viewer.count("skip")
    actions, reason = _actions(message, row)
    stream = isinstance(message, StreamMessage)
    values = {
        "id": str(message.id),
        "path": path_to("m", message.id),
        "queue": message.queue,
        "queue_path": path_to("s" if stream else "q", message.queue),
        "state": message.state,
        "why": why_waiting(message, row, site.redactor.text("group", message.group), now),
        "holder": await _holder(site, message, row),
        "workers": _workers(await visible_runs(sample, viewer), str(message.id)),
        "facts": _facts(site, message),
        "lanes": charts.lanes(lanes := await _lanes(viewer, message, now)),
        "way": [each._asdict() for each in lanes],
        "error": _error(site, message),
        "attempts": [
            {
                "number": each.number,
                "at": each.at,
                "owner": each.owner,
                "seconds": each.seconds,
                "error": f"{each.type}: {site.redactor.text('error.message', each.message)}",
            }
            for each in message.attempts
        ],
        "payload": shapes.tree(site.redactor, "payload", message.payload, at, skip),
        "at": at,
        "headers": shapes.tree(site.redactor, "headers", message.headers),
        "checkpoint": shapes.tree(site.redactor, "checkpoint", message.checkpoint),
        "result": shapes.tree(site.redactor, "result", getattr(message, "result", None)),
        "actions": [each for each in actions if await viewer.may(each, message.queue)],
        "reason": reason,
    }
    return View("message.html", values)


def _actions(message: Message[Any], row: Row | None) -> tuple[tuple[str, ...], str]:
    """Return the actions that a message allows, and why no other action is possible."""
    if isinstance(message, StreamMessage):
        return (), "A stream keeps its messages. To read them again, let a group seek."
    packed = row is not None and row.info.kind == "bucket" and _PACKED.search(str(message.id))
    if message.state == "reserved" and packed:
        return (), "It is in a pack, whose messages are held together."
    if message.dead is not None and message.dead.group is not None:
        return ("remove",), "It came from a stream; the bulk bar can move it to a queue."
    return _ACTIONS.get(message.state, ()), ""


def _workers(runs: Sequence[RunSummary], id: str) -> list[dict[str, Any]]:
    """Return the workers that report work on a message, and when they began."""
    return [
        {"owner": str(run.process.get("owner") or run.name), "since": each.get("since")}
        for run in runs
        for each in run.in_progress
        if str(each.get("id")) == id
    ]


async def _holder(site: Site, message: Message[Any], row: Row | None) -> dict[str, Any] | None:
    """Return the held message that keeps another message of its group waiting, or None."""
    if message.deferred != "group" or row is None:
        return None
    where = {"group": message.group}
    page = await site.queue(row.info).browse("reserved", where, None, 1, budget=_BUDGET)
    for each in page.messages:
        return {"id": str(each.id), "path": path_to("m", each.id), "tries": each.tries}
    return None


def _facts(site: Site, message: Message[Any]) -> list[tuple[str, str]]:
    """Return further facts about a message, each with a name and a text."""
    shown = site.redactor.text
    found: list[tuple[str, object]] = [
        ("pushed", f"{shapes.clock(message.pushed)}, {shapes.ago(message.pushed)}"),
        ("tries", message.tries),
        ("deliveries", message.deliveries if message.deliveries != message.tries else None),
        ("key", shown("key", message.key)),
        ("group", shown("group", message.group)),
        ("priority", message.priority),
    ]
    if message.progress is not None:
        note = shown("progress.note", message.progress.note) or ""
        found.append(("progress", f"{message.progress.fraction:.0%} {note}".strip()))
    if isinstance(message, StreamMessage):
        found.append(("position", message.position))
    if isinstance(message, Finished):
        found += [("outcome", message.outcome), ("finished", shapes.ago(message.processed))]
    if message.dead is not None:
        found.append(("buried", f"{shapes.ago(message.dead.at)}: {message.dead.reason}"))
    return [(name, str(value)) for name, value in found if value not in (None, "")]


def _error(site: Site, message: Message[Any]) -> dict[str, Any] | None:
    error = message.error
    if error is None:
        return None
    shown = site.redactor.text
    return {
        "type": error.type,
        "message": shown("error.message", error.message),
        "at": error.at,
        "where": error.where or "",
        "trace": error.trace or "",
        "fp": error.fp or "",
    }


async def _lanes(viewer: Viewer, message: Message[Any], now: datetime) -> list[Lane]:
    """Return the queues that a message passed through and that the viewer may see, in order."""
    found: list[Lane] = []
    came = message.pushed
    for stop in message.trail:
        start, end = stop.get("in") or came, stop.get("out") or stop.get("at") or came
        if await viewer.sees(str(stop.get("q"))):
            found.append(Lane(str(stop.get("q")), start, max(start, end), "past"))
        came = end
    ended = message.processed if isinstance(message, Finished) else now
    look = {"finished": "past", "dead": "dead"}.get(message.state, "now")
    return [*found, Lane(message.queue, came, max(came, ended), look)]
