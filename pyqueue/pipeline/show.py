"""Drawings of a graph: text, Mermaid, SVG. Pure: it is given the counts it shows."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from pyqueue import arguments
from pyqueue.pipeline.graph import Graph

__all__ = ["draw"]


def draw(graph: Graph, name: str, format: str, counts: Mapping[str, Any]) -> str:
    """The graph in a format, with the counts of its queues where they are given."""
    arguments.one_of("format", format, ("text", "mermaid", "svg"))
    return {"text": _text, "mermaid": _mermaid, "svg": _svg}[format](graph, name, counts)


def _status(counts: Mapping[str, Any], queue: str) -> str:
    """What is in a queue, in words; what there is none of is left out."""
    if queue not in counts:
        return ""
    parts = [
        f"{getattr(counts[queue], state)} {state}" for state in ("ready", "reserved", "scheduled")
    ]
    return ", ".join(part for part in parts if not part.startswith("0 ")) or "empty"


def _text(graph: Graph, name: str, counts: Mapping[str, Any]) -> str:
    lines = [name]
    for queue in graph.depths():
        stage = graph.stages.get(queue)
        status = _status(counts, queue)
        head = f"  {queue}" + (f" [{status}]" if status else "")
        if stage is None:
            lines.append(f"{head} (output)")
            continue
        arrow = f"{head} ── {stage.label} "
        if not stage.to or stage.kind == "sink":
            lines.append(f"{arrow}──■")
        for index, target in enumerate(stage.to):
            first = index == 0 and stage.kind != "sink"
            corner = (
                "──>"
                if first and len(stage.to) == 1
                else "┬─>"
                if first
                else "└─>"
                if index + 1 == len(stage.to)
                else "├─>"
            )
            lines.append((arrow if first else " " * len(arrow)) + f"{corner} {target}")
    return "\n".join(lines) + "\n"


def _mermaid(graph: Graph, name: str, counts: Mapping[str, Any]) -> str:
    def safe(text: str) -> str:
        return (
            text.replace("&", "#amp;")
            .replace('"', "#quot;")
            .replace("<", "#lt;")
            .replace(">", "#gt;")
        )

    ids = {queue: f"q{index}" for index, queue in enumerate(graph.depths())}
    lines = ["---", f"title: {safe(name)}", "---", "flowchart LR"]
    for queue, id in ids.items():
        status = _status(counts, queue)
        lines.append(f'  {id}["{safe(queue)}{f"<br/>{status}" if status else ""}"]')
    for stage in graph.stages.values():
        id = ids[stage.name]
        lines += [f'  {id} -->|"{safe(stage.label)}"| {ids[target]}' for target in stage.to]
        if stage.kind == "sink":
            lines.append(f'  {id} -->|"{safe(stage.label)}"| {id}end(( ))')
    return "\n".join(lines) + "\n"


#: Of the SVG, in pixels: a box, and from one box to the next.
WIDTH, HEIGHT, ACROSS, DOWN, EDGE = 150, 44, 270, 84, 20


def _svg(graph: Graph, name: str, counts: Mapping[str, Any]) -> str:
    depths = graph.depths()
    columns: dict[int, list[str]] = {}
    for queue, depth in depths.items():
        columns.setdefault(depth, []).append(queue)
    places = {
        queue: (EDGE + depth * ACROSS, EDGE + 24 + row * DOWN)
        for depth, queues in columns.items()
        for row, queue in enumerate(queues)
    }
    shapes = []
    for stage in graph.stages.values():
        x, y = places[stage.name]
        start, middle = x + WIDTH, y + HEIGHT // 2
        for target in stage.to:
            end, level = places[target][0], places[target][1] + HEIGHT // 2
            bend = max(40, abs(end - start) // 2)
            shapes.append(
                f'<path d="M{start},{middle} C{start + bend},{middle} {end - bend},{level} {end},{level}" '
                'fill="none" stroke="#666" marker-end="url(#to)"/>'
            )
        if stage.kind == "sink":
            shapes.append(f'<path d="M{start},{middle} h30" fill="none" stroke="#666"/>')
            shapes.append(f'<circle cx="{start + 36}" cy="{middle}" r="6" fill="#666"/>')
        shapes.append(
            f'<text x="{start + 6}" y="{middle - 8}" class="small">{escape(stage.label)}</text>'
        )
    for queue, (x, y) in places.items():
        status = _status(counts, queue)
        style = "" if queue in graph.stages else ' stroke-dasharray="4"'
        shapes.append(
            f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#fff" stroke="#333"{style}/>'
        )
        center = x + WIDTH // 2
        shapes.append(
            f'<text x="{center}" y="{y + (19 if status else 27)}" text-anchor="middle">{escape(queue)}</text>'
        )
        if status:
            shapes.append(
                f'<text x="{center}" y="{y + 35}" text-anchor="middle" class="small">{escape(status)}</text>'
            )
    width = EDGE * 2 + max(columns) * ACROSS + WIDTH + 60
    height = EDGE * 2 + 24 + (max(map(len, columns.values())) - 1) * DOWN + HEIGHT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">\n'
        f"<title>{escape(name)}</title>\n"
        "<style>text {font: 13px sans-serif} .small {font-size: 10px; fill: #555}</style>\n"
        '<defs><marker id="to" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#666"/></marker></defs>\n'
        f'<rect width="100%" height="100%" fill="#fafafa"/>\n<text x="{EDGE}" y="24">{escape(name)}</text>\n'
        + "\n".join(shapes)
        + "\n</svg>\n"
    )
