"""The page of a queue: its figures, its messages by state and filter, and who works on them."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from pyqueue.errors import ConfigurationError, NotPermitted
from pyqueue.messages import Finished, Message, State
from pyqueue.runtime.connecting import runner_of
from pyqueue.telemetry.reading import stats_of, stats_over_time, with_moves
from pyqueue.telemetry.values import Latency, QueueStats
from pyqueue.telemetry.watching import ErrorSummary, RunSummary
from pyqueue.web import charts, shapes
from pyqueue.web.access import Viewer
from pyqueue.web.filters import MAX_TEXT, conditions
from pyqueue.web.overview import row_of, shown_row, visible_runs
from pyqueue.web.sampling import Row, Sample
from pyqueue.web.site import Site, View, path_to, query

#: The maximum number of messages on a page, and of messages that are examined for it.
PAGE: Final = 50
_BUDGET: Final = 5000
#: The maximum number of messages that one bulk action changes.
BULK: Final = 10_000
#: How long counting before a bulk action may take, in seconds.
_COUNT_S: Final = 5.0
#: The ranges of the charts, in seconds, and the range of a page whose URL names none.
RANGES: Final = ((900, "15 min"), (7200, "2 h"), (86_400, "24 h"), (2_592_000, "30 d"))
_RANGE_S: Final = 7200
#: The formats in which the messages can be downloaded: the ending of the file, and the name.
EXPORTS: Final = (("ndjson", "JSON lines"), ("csv", "CSV"))
#: The state of each tab, and the name of the tab.
_STATES: Final[dict[str, str]] = {
    "ready": "ready",
    "reserved": "in work",
    "scheduled": "scheduled",
    "dead": "dead",
    "finished": "history",
}
#: The bulk actions of each state.
_BULK: Final[dict[str, tuple[str, ...]]] = {
    "ready": ("move", "remove"),
    "scheduled": ("requeue", "move", "remove"),
    "dead": ("redrive", "move", "remove"),
}


def states_of(row: Row) -> list[tuple[str, str, int]]:
    """Return the tabs of a queue: for each tab, the state, the name and the number of messages."""
    counts = row.info.counts
    numbers = {"ready": counts.ready, "reserved": counts.reserved, "scheduled": counts.scheduled}
    if row.holds_dead:
        numbers = {"dead": counts.ready + counts.scheduled, "reserved": counts.reserved}
    numbers["finished"] = counts.history
    return [(state, _STATES[state], number) for state, number in numbers.items()]


def line_of(site: Site, message: Message[Any]) -> dict[str, Any]:
    """Return the values of a message for its row in a table."""
    error = message.error
    shown = site.redactor.text
    return {
        "id": str(message.id),
        "path": path_to("m", message.id),
        "when": message.processed if isinstance(message, Finished) else message.when,
        "tries": message.tries,
        "deferred": message.deferred,
        "key": shown("key", message.key),
        "group": shown("group", message.group),
        "priority": message.priority,
        "payload": shapes.summary(site.redactor, "payload", message.payload),
        "error": "" if error is None else f"{error.type}: {_text(site, error.message)}"[:200],
    }


def _text(site: Site, text: str) -> str:
    return site.redactor.text("error.message", text) or ""


def chosen_state(viewer: Viewer, row: Row) -> Any:
    """Return the state of the messages that a page shows: the one in the URL, or the first tab."""
    state, known = viewer.argument("state"), [each for each, _, _ in states_of(row)]
    return state if state in known else known[0]


def newest_first(viewer: Viewer, state: State) -> bool:
    """Return whether a page shows the newest messages first, as it does for history by default."""
    return viewer.argument("newest", "1" if state == "finished" else "") == "1"


async def queue_page(site: Site, viewer: Viewer) -> View:
    """Show a queue."""
    sample, row = await row_of(site, str(viewer.request.path_params["name"]))
    name = row.info.name
    chosen = chosen_state(viewer, row)
    seconds = viewer.count("since", _RANGE_S)
    since = seconds if seconds in [each for each, _ in RANGES] else _RANGE_S
    stats, took = await _figures(site, name, since)
    failed = [each for each in sample.errors if each.queue == name]
    runs = [each for each in await visible_runs(sample, viewer) if each.works_on(name)]
    values = {
        **await shown_row(viewer, row, sample.cap),
        **await _messages(site, viewer, row, chosen),
        "tabs": states_of(row),
        "state": chosen,
        "since": since,
        "ranges": RANGES,
        "chart": charts.throughput(stats),
        "legend": charts.legend(stats),
        "times": charts.times(stats, took),
        "time_lines": charts.TIME_LINES,
        "latency": _latency(stats),
        "errors": [failure(site, sample, each) for each in failed[:10]],
        "runs": [ran(each) for each in runs],
        "bulk": [each for each in _BULK.get(chosen, ()) if await viewer.may(each, name)],
        "actions": [each for each in ("pause", "resume", "purge") if await viewer.may(each, name)],
        "exports": EXPORTS,
        "paused": row.info.paused,
    }
    return View("queue.html", values)


async def _figures(
    site: Site, name: str, since: float
) -> tuple[QueueStats, dict[datetime, dict[str, Latency]]]:
    """Return the figures of a queue, or none if the database user may not read them."""
    run = runner_of(site.client).run
    try:
        stats, took = await run(stats_over_time(name, since))
        return await run(with_moves(stats, since)), took
    except NotPermitted:
        now = datetime.now(UTC)
        return stats_of(name, now - timedelta(seconds=since), now, ()), {}


async def _messages(site: Site, viewer: Viewer, row: Row, state: State) -> dict[str, Any]:
    """Return a page of messages that match the filter."""
    text, after = viewer.argument("where")[: MAX_TEXT + 1], viewer.argument("after")
    newest = newest_first(viewer, state)
    values: dict[str, Any] = {"where": text, "newest": newest, "rows_of_messages": [], "wrong": ""}
    values |= {"looked": 0, "next": ""}
    try:
        where = conditions(text, site.redactor)
        page = await site.queue(row.info).browse(
            state, where, after or None, PAGE, newest=newest, budget=_BUDGET
        )
    except ConfigurationError as error:
        return {**values, "wrong": str(error)}
    more = {"state": state, "where": text, "newest": "1" if newest else "", "after": page.after}
    return {
        **values,
        "rows_of_messages": [line_of(site, each) for each in page.messages],
        "looked": page.looked,
        "next": "" if page.after is None else query(more),
    }


def _latency(stats: QueueStats) -> list[dict[str, Any]]:
    """Return the times of messages: waiting, being worked on, and in total from push to end."""
    named = {"waiting": stats.waiting, "working": stats.working, "whole": stats.end_to_end}
    return [
        {"name": name, "p50": each.p50, "p95": each.p95, "p99": each.p99}
        for name, each in named.items()
    ]


def failure(site: Site, sample: Sample, group: ErrorSummary) -> dict[str, Any]:
    """Return the values of a group of errors for its row in a table."""
    row = sample.rows.get(group.queue)
    stream, _, consumer = group.queue.partition("~")
    dead = f"{stream}.{consumer}.dead" if consumer else f"{group.queue}.dead"
    if row is not None:
        dead = row.dead_letter
    return {
        "queue": group.queue,
        "path": path_to("s", stream) if consumer else path_to("q", group.queue),
        "fp": group.fp,
        "type": group.type,
        "where": group.where or "",
        "message": _text(site, group.message),
        "first": group.first,
        "last": group.last,
        "tries": group.tries,
        "dead": group.dead,
        "dead_queue": dead,
        "dead_path": path_to("q", dead) + query({"where": f'error.fp:"{group.fp}"'}),
        "of_stream": bool(consumer),
        "ids": [str(each) for each in group.ids],
    }


def ran(run: RunSummary) -> dict[str, Any]:
    """Return the values of a running worker or pipeline for its row in a table."""
    process = run.process
    return {
        "name": run.name,
        "kind": run.kind,
        "owner": str(process.get("owner") or ""),
        "place": f"{process.get('host')}:{process.get('pid')}",
        "version": str(process.get("version") or ""),
        "memory": process.get("memory"),
        "queues": [str(each.get("q")) for each in run.stages],
        "messages": run.messages,
        "in_progress": [
            {"queue": str(each.get("q")), "id": str(each.get("id")), "since": each.get("since")}
            for each in run.in_progress
        ],
        "started": run.started,
        "beat": run.beat,
        "silent": run.silent,
    }


async def bulk_page(site: Site, viewer: Viewer) -> View:
    """Ask before many messages are changed: show how many match."""
    _, row = await row_of(site, str(viewer.request.path_params["name"]))
    verb, state = viewer.argument("verb"), viewer.argument("state")
    values: dict[str, Any] = {
        "name": row.info.name,
        "path": path_to("q", row.info.name),
        "verb": verb,
        "state": state,
        "where": viewer.argument("where")[: MAX_TEXT + 1],
        "number": 0,
        "most": BULK,
        "wrong": "",
    }
    try:
        if verb not in _BULK.get(state, ()):
            raise ConfigurationError(
                f"verb: {verb[:40]!r} is not possible for messages that are {state[:40]!r}; choose "
                "an action on the page of the queue"
            )
        where = conditions(values["where"], site.redactor)
        chosen: Any = state
        async with asyncio.timeout(_COUNT_S):
            values["number"] = await site.queue(row.info).select(where, chosen).count(BULK)
    except ConfigurationError as error:
        values["wrong"] = str(error)
    except TimeoutError:
        values["wrong"] = (
            f"filter: the messages that match were not counted within {_COUNT_S:g} s; use a filter "
            "that matches more messages, or `pyqueue redrive --where`"
        )
    return View("bulk.html", values)
