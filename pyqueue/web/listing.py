"""The pages of streams, errors, workers, schedules and the audit, and the search."""

from __future__ import annotations

from typing import Any, Final

from pyqueue.backends.namespace import STREAM
from pyqueue.web import charts, shapes
from pyqueue.web.access import Viewer
from pyqueue.web.overview import row_of, shown_row, visible_runs
from pyqueue.web.queue_page import PAGE, failure, line_of, ran
from pyqueue.web.site import Site, View, path_to, query

#: The options of a schedule that its messages contain.
_CONTENTS: Final = ("payload", "headers")


async def stream_page(site: Site, viewer: Viewer) -> View:
    """Show a stream: its groups, and messages by position."""
    sample, row = await row_of(site, str(viewer.request.path_params["name"]), stream=True)
    name = row.info.name
    after = viewer.count("after", -1)
    messages = await site.client.stream(name).read(after=None if after < 0 else after, limit=PAGE)
    allowed = [
        each
        for each in ("pause", "resume", "seek", "delete_consumer")
        if await viewer.may(each, name)
    ]
    values = {
        **await shown_row(viewer, row, sample.cap),
        "rows_of_messages": [
            {**line_of(site, each), "position": each.position} for each in messages
        ],
        "next": query({"after": messages[-1].position}) if len(messages) == PAGE else "",
        "actions": allowed,
        "charts": charts.groups(row.group_stats),
        "errors": [
            failure(site, sample, each)
            for each in sample.errors
            if each.queue.partition("~")[0] == name
        ],
    }
    return View("stream.html", values)


async def errors_page(site: Site, viewer: Viewer) -> View:
    """Show the groups of errors, or only those of the queue that the URL names."""
    sample, wanted = await site.sampler.sample(), viewer.argument("queue")
    found = []
    for each in sample.errors:
        if wanted in ("", each.queue) and await viewer.sees(each.queue):
            values = failure(site, sample, each)
            verbs = () if values["of_stream"] or not each.dead else ("redrive", "remove")
            allowed = [verb for verb in verbs if await viewer.may(verb, values["dead_queue"])]
            found.append({**values, "actions": allowed})
    return View("errors.html", {"errors": found})


async def workers_page(site: Site, viewer: Viewer) -> View:
    """Show the workers and pipelines that run, and those that are silent."""
    sample = await site.sampler.sample()
    runs = [ran(each) for each in await visible_runs(sample, viewer)]
    versions = sorted({each["version"] for each in runs if each["version"]})
    return View("workers.html", {"runs": runs, "versions": versions})


async def schedules_page(site: Site, viewer: Viewer) -> View:
    """Show the schedules."""
    found: list[dict[str, Any]] = []
    for each in await site.client.schedules():
        if not await viewer.sees(each.queue):
            continue
        verbs = ("run", "resume" if each.paused else "pause")
        options = {
            # A program knows the payload and the headers under the same paths as on other pages.
            name: shapes.redacted(site.redactor, name, value) if name in _CONTENTS else value
            for name, value in each.options.items()
            if value is not None
        }
        found.append(
            {
                "name": each.name,
                "queue": each.queue,
                "path": path_to("q", each.queue),
                "next": each.next,
                "paused": each.paused,
                "skipped": each.skipped,
                "error": site.redactor.text("error.message", each.error) or "",
                "last": None if each.last is None else str(each.last),
                "last_path": None if each.last is None else path_to("m", each.last),
                "options": shapes.summary(site.redactor, "schedule", options),
                "actions": [verb for verb in verbs if await viewer.may(verb, each.queue)],
            }
        )
    return View("schedules.html", {"schedules": found})


async def audit_page(site: Site, viewer: Viewer) -> View:
    """Show who did what."""
    entries = [
        {
            "at": each.get("at"),
            "who": str(each.get("who", "")),
            "action": str(each.get("action", "")),
            "queue": str(each.get("queue", "")),
            "details": shapes.summary(site.redactor, "details", each.get("details") or {}),
            "result": str(each.get("result", "")),
        }
        for each in await site.audit.last()
        if await viewer.sees(str(each.get("queue", "")))
    ]
    return View("audit.html", {"entries": entries})


async def search(site: Site, viewer: Viewer) -> str:
    """Return the path of the page that shows the result of a search."""
    text = viewer.argument("q").strip()[:512]
    sample = await site.sampler.sample()
    row = sample.rows.get(text)
    if row is not None and await viewer.sees(text):
        return path_to("s" if row.info.kind == STREAM else "q", text)
    names = [name for name in sample.rows if text.casefold() in name.casefold()]
    if not text or any([await viewer.sees(name) for name in names]):
        return "/" + query({"find": text})
    return path_to("m", text)
