"""The page of pipelines: the graph of each, with live numbers, and the same as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from starlette.exceptions import HTTPException

from pyqueue.telemetry.watching import GraphSummary
from pyqueue.web import shapes
from pyqueue.web.access import Viewer
from pyqueue.web.overview import shown_row, visible_runs
from pyqueue.web.sampling import Sample
from pyqueue.web.site import Site, View, path_to, query

#: The maximum number of queues of all graphs on a page, and of targets of one stage.
MOST_NODES: Final = 60
_MOST_TARGETS: Final = 20


async def pipelines_page(site: Site, viewer: Viewer) -> View:
    """Show the pipelines that run, or ran in the last few days; with ``name``, one of them."""
    sample = await site.sampler.sample()
    wanted = viewer.argument("name")[:200]
    found = [await _pipeline(sample, viewer, each) for each in sample.graphs]
    shown = [each for each in found if each["nodes"]]
    if wanted:
        shown = [each for each in shown if each["name"] == wanted]
        if not shown:
            raise HTTPException(404, f"There is no pipeline {wanted[:120]!r}.")
    drawn: list[dict[str, Any]] = []
    rest: list[dict[str, Any]] = []
    for each in shown:
        nodes = sum(len(other["nodes"]) for other in drawn) + len(each["nodes"])
        (rest if drawn and nodes > MOST_NODES else drawn).append(each)
    names = [{"name": each["name"], "path": each["path"]} for each in rest]
    return View("pipelines.html", {"pipelines": drawn, "rest": names, "wanted": wanted})


async def _pipeline(sample: Sample, viewer: Viewer, graph: GraphSummary) -> dict[str, Any]:
    """Return the queues of a pipeline that the viewer may see, and the arrows between them."""
    nodes: dict[str, dict[str, Any]] = {}
    targets: dict[str, list[str]] = {}
    for stage in graph.stages:
        name = str(stage.get("q"))
        if len(nodes) < MOST_NODES and await viewer.sees(name):
            nodes[name] = await _node(sample, viewer, name, stage)
            targets[name] = [str(each) for each in stage.get("to") or ()][:_MOST_TARGETS]
    for name in [each for some in targets.values() for each in some]:
        if name not in nodes and len(nodes) < MOST_NODES and await viewer.sees(name):
            nodes[name] = await _node(sample, viewer, name, {})
    edges = [
        _edge(nodes[source], target)
        for source, some in targets.items()
        for target in dict.fromkeys(some)
        if target in nodes
    ]
    runs = [
        each
        for each in await visible_runs(sample, viewer)
        if (each.kind, each.name) == ("pipeline", graph.name)
    ]
    return {
        "name": graph.name,
        "path": "/pipelines" + query({"name": graph.name}),
        "nodes": list(nodes.values()),
        "edges": edges,
        "running": sum(not each.silent for each in runs),
        "silent": sum(each.silent for each in runs),
        "cut": len(nodes) >= MOST_NODES,
    }


async def _node(
    sample: Sample, viewer: Viewer, name: str, stage: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the values of a queue. ``stage`` is empty if the pipeline does not receive from it."""
    row = sample.rows.get(name)
    if row is None:  # no program has used it yet
        unknown = ("ready", "reserved", "scheduled", "done", "dead", "dying", "p95")
        values: dict[str, Any] = {"texts": dict.fromkeys(unknown, shapes.number(None))}
        values |= {"dead": None, "dead_path": None, "badges": (), "workers": 0, "moves": {}}
    else:
        values = await shown_row(viewer, row, sample.cap)
        working = None if row.stats is None else row.stats.working.p95
        values["texts"] = {**values["texts"], "p95": shapes.length(working)}
    workers = f"{values['workers']} {'worker' if values['workers'] == 1 else 'workers'}"
    handler = str(stage.get("handler") or "")[:20]
    looks = {look for look, _ in values["badges"]}
    return {
        "name": name,
        "path": path_to("q", name),
        "handler": handler,
        "about": f"{handler} · {workers}" if handler else workers,
        "look": next((each for each in ("bad", "warn") if each in looks), ""),
        "known": row is not None,
        **{each: values[each] for each in ("texts", "dead", "dead_path", "badges", "moves")},
    }


def _edge(source: Mapping[str, Any], target: str) -> dict[str, Any]:
    rate = source["moves"].get(target, 0.0)
    return {"source": source["name"], "target": target, "rate": rate, "text": shapes.rate(rate)}
