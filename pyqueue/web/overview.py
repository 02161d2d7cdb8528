"""The overview: all queues and streams with their numbers, and the sums."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from starlette.exceptions import HTTPException

from pyqueue.backends.namespace import STREAM
from pyqueue.messages import NEVER, ConsumerInfo, Counts, QueueInfo
from pyqueue.telemetry.watching import RunSummary
from pyqueue.web import shapes, troubles
from pyqueue.web.access import Viewer
from pyqueue.web.charts import per_minute
from pyqueue.web.sampling import Row, Sample, rate_of
from pyqueue.web.site import Site, View, path_to

#: The maximum number of rows on a page. If there are more, queues are grouped by prefix.
MAX_ROWS: Final = 100
_SEPARATORS: Final = re.compile("[.:>_-]")
#: The values by which rows can be sorted.
_SORTS: Final = ("name", "ready", "reserved", "scheduled", "dead", "oldest")
_IN: Final = ("pushed",)
_DONE: Final = ("finished", "moved")
_FINISHED: Final = ("finished",)


def _described(row: Row, cap: int) -> dict[str, Any]:
    """Return the values of a row. Numbers that have reached ``cap`` mean "or more"."""
    info, stats = row.info, row.stats
    stream = info.kind == STREAM
    return {
        "name": info.name,
        "kind": info.kind,
        "path": path_to("s" if stream else "q", info.name),
        "badges": row.badges,
        "holds_dead": row.holds_dead,
        "ready": info.counts.ready,
        "reserved": None if stream else info.counts.reserved,
        "scheduled": None if stream else info.counts.scheduled,
        "dead": info.dead,
        "dead_path": None if info.dead is None else path_to("q", row.dead_letter),
        "oldest": info.oldest,
        "cap": None if stream else cap,
        "pushed": rate_of(stats, _IN),
        "finished": None if stream else rate_of(stats, _FINISHED),
        "in": None if stats is None and not row.came else (rate_of(stats, _IN) or 0.0) + row.came,
        "done": None if stream else rate_of(stats, _DONE),
        "failed": rate_of(stats, ("retried", "dead")),
        "dying": rate_of(stats, ("dead",)),
        "p95": None if stats is None or stream else stats.end_to_end.p95,
        "points": per_minute(stats, _IN if stream else _DONE),
        "workers": row.workers,
        "groups": [_grouped(row, each) for each in row.groups],
    }


def _grouped(row: Row, group: ConsumerInfo) -> dict[str, Any]:
    """Return the values of a consumer group of a stream."""
    done = rate_of(row.group_stats.get(group.name), _DONE)
    return {
        "name": group.name,
        "position": group.position,
        "behind": group.counts.total,
        "reserved": group.counts.reserved,
        "scheduled": group.counts.scheduled,
        "skipped": group.counts.skipped,
        "paused": group.paused,
        "done": done,
        "caught_up_s": troubles.caught_up_s(row, group),
        "dead_path": path_to("q", f"{row.info.name}.{group.name}.dead"),
    }


async def visible(sample: Sample, viewer: Viewer) -> list[Row]:
    """Return the rows that the viewer may see.

    A dead-letter queue gets no row if the row of another queue already includes its count.
    """
    rows = [each for each in sample.rows.values() if await viewer.sees(each.info.name)]
    owned = {each.dead_letter for each in rows if each.info.dead is not None}
    return [each for each in rows if each.info.name not in owned]


async def visible_runs(sample: Sample, viewer: Viewer) -> list[RunSummary]:
    """Return the workers and pipelines, with the queues and messages that the viewer may see."""
    found = []
    for run in sample.runs:
        stages = [each for each in run.stages if await viewer.sees(str(each.get("q")))]
        busy = [each for each in run.in_progress if await viewer.sees(str(each.get("q")))]
        if stages:
            found.append(replace(run, stages=stages, in_progress=busy))
    return found


async def board(sample: Sample, viewer: Viewer) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the rows that the viewer may see, and the sums over these rows."""
    rows = await visible(sample, viewer)
    every = [await shown_row(viewer, each, sample.cap) for each in rows]
    runs = await visible_runs(sample, viewer)
    tiles = _tiles(rows, every, sample.cap)
    tiles["workers"] = sum(not each.silent for each in runs)
    more = "+" if tiles["ready_more"] else ""
    tiles["texts"] = {
        "in": shapes.rate(tiles["in"]),
        "done": shapes.rate(tiles["done"]),
        "ready": shapes.number(tiles["ready"]) + more,
        "oldest": shapes.since(tiles["oldest"]),
        "reserved": shapes.number(tiles["reserved"]),
        "workers": shapes.number(tiles["workers"]),
        "dead": shapes.number(tiles["dead"]),
    }
    return every, tiles


async def attention(site: Site, sample: Sample, viewer: Viewer) -> list[dict[str, Any]]:
    """Return the troubles that the viewer may see, grouped by kind."""
    found: list[troubles.Trouble] = list(troubles.of_runs(await visible_runs(sample, viewer)))
    for row in await visible(sample, viewer):
        found += troubles.of_row(sample, row, site.redactor)
        dead = row.info.counts.ready if row.holds_dead else row.info.dead
        if dead and (row.holds_dead or await viewer.sees(row.dead_letter)):
            found.append(troubles.of_dead(sample, row, dead))
    for each in sample.schedules:
        if await viewer.sees(each.queue):
            found += troubles.of_schedule(sample, each, site.redactor)
    return troubles.shown(found)


async def overview(site: Site, viewer: Viewer) -> View:
    """Show all queues and streams."""
    sample = await site.sampler.sample()
    every, tiles = await board(sample, viewer)
    wanted, sort = viewer.argument("find")[:120], viewer.argument("sort")
    chosen = [each for each in every if wanted.casefold() in each["name"].casefold()]
    _sort(chosen, sort)
    groups = _prefixes(chosen) if len(chosen) > MAX_ROWS else []
    values = {
        "rows": [] if groups else chosen,
        "groups": groups,
        "tiles": tiles,
        "troubles": await attention(site, sample, viewer),
        "find": wanted,
        "sort": sort,
        "at": sample.at,
        "took_s": sample.took_s,
    }
    return View("overview.html", values)


async def shown_row(viewer: Viewer, row: Row, cap: int) -> dict[str, Any]:
    """Return the values of a row, and their texts, without queues that the viewer may not see."""
    values = _described(row, cap)
    if row.info.dead is not None and not await viewer.sees(row.dead_letter):
        values["dead"] = values["dead_path"] = None
    values["moves"] = {to: each for to, each in row.moves.items() if await viewer.sees(to)}
    values["limit"] = None if row.info.limit is None else repr(row.info.limit)
    values["options"] = {
        name: str(each)
        for name, each in row.info.options.items()
        if each is not None and (name != "dead_letter" or await viewer.sees(str(each)))
    }
    values["texts"] = {
        **{
            name: shapes.number(values[name], values["cap"])
            for name in ("ready", "reserved", "scheduled", "dead")
        },
        **{name: shapes.rate(values[name]) for name in ("in", "done", "failed", "dying")},
        "oldest": shapes.since(values["oldest"]),
        "p95": shapes.length(values["p95"]),
    }
    return values


def _sort(rows: list[dict[str, Any]], by: str) -> None:
    rows.sort(key=lambda each: str(each["name"]))
    if by == "oldest":
        rows.sort(key=lambda each: each["oldest"] or NEVER)
    elif by in _SORTS[1:]:
        rows.sort(key=lambda each: -(each[by] or 0))


def _tiles(rows: Sequence[Row], every: Sequence[dict[str, Any]], cap: int) -> dict[str, Any]:
    """Return the sums over the rows. The messages of streams are not counted as ready."""
    queues = [each for each in every if each["kind"] != STREAM]
    oldest = [each["oldest"] for each in queues if each["oldest"] is not None]
    apart = [each["ready"] for each in queues if each["holds_dead"]]
    ready = sum(min(each["ready"], cap - 1) for each in queues) - sum(apart)
    works = [each.stats for each in rows if each.info.kind != STREAM]
    return {
        "in": sum(each["pushed"] or 0.0 for each in every),  # moves are not from outside
        "done": sum(each["finished"] or 0.0 for each in every),
        "ready": ready,
        "ready_more": any(each["ready"] >= cap for each in queues),
        "oldest": min(oldest, default=None),
        "reserved": sum(each["reserved"] for each in queues),
        "dead": sum(each["dead"] or 0 for each in every) + sum(apart),
        "in_points": _added([per_minute(each.stats, _IN) for each in rows]),
        "done_points": _added([per_minute(each, _FINISHED) for each in works]),
    }


def _added(some: Sequence[Sequence[int]]) -> list[int]:
    return [sum(each) for each in zip(*some, strict=True)] or [0]


def _prefixes(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the sums of rows, grouped by the beginning of their names."""
    sums: dict[str, Counter[str]] = {}
    for each in rows:
        numbers = sums.setdefault(_SEPARATORS.split(each["name"], 1)[0], Counter())
        numbers["queues"] += 1
        for name in ("ready", "reserved", "scheduled", "dead"):
            numbers[name] += each[name] or 0
    return [{"name": name, **numbers} for name, numbers in sorted(sums.items())]


async def row_of(site: Site, name: str, *, stream: bool = False) -> tuple[Sample, Row]:
    """Return the sample, and the row of a queue or a stream.

    Raises:
        HTTPException: There is no such queue or stream.
    """
    sample = await site.sampler.sample()
    row = sample.rows.get(name)
    if row is None and any(each.dead_letter == name for each in sample.rows.values()):
        info = QueueInfo(name, Counts(), paused=False)  # no message has died yet
        row = Row(info, None, (), {}, workers=0, badges=(), holds_dead=True)
    if row is None or (row.info.kind == STREAM) != stream:
        what = "stream" if stream else "queue"
        raise HTTPException(404, f"There is no {what} {name[:120]!r}.")
    return sample, row
