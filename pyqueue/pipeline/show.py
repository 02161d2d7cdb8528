"""Draw a graph as text, Mermaid or SVG."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Final

from pyqueue import arguments
from pyqueue.messages import Counts
from pyqueue.pipeline.graph import Graph, Stage

#: The places of queues in an SVG drawing: the upper left corner of each box, in pixels.
_Places = Mapping[str, tuple[int, int]]

#: The size of a box in an SVG drawing, in pixels.
_WIDTH: Final = 150
_HEIGHT: Final = 44
#: The distance between the left edges of two columns, and the upper edges of two rows.
_ACROSS: Final = 270
_DOWN: Final = 84
#: The margin around the drawing, and the height of its title.
_MARGIN: Final = 20
_TITLE: Final = 24


def draw(graph: Graph, name: str, format: str, counts: Mapping[str, Counts]) -> str:
    """Return the drawing of a graph, with the counts of the queues that ``counts`` lists."""
    arguments.one_of("format", format, ("text", "mermaid", "svg"))
    return {"text": _text, "mermaid": _mermaid, "svg": _svg}[format](graph, name, counts)


def _status(counts: Mapping[str, Counts], queue: str) -> str:
    """Return the nonzero counts of a queue in words, or "empty" if there are none."""
    if queue not in counts:
        return ""
    states = ("ready", "reserved", "scheduled")
    numbers = [(getattr(counts[queue], state), state) for state in states]
    return ", ".join(f"{number} {state}" for number, state in numbers if number) or "empty"


def _text(graph: Graph, name: str, counts: Mapping[str, Counts]) -> str:
    lines = [name]
    for queue in graph.depths():
        stage = graph.stages.get(queue)
        status = _status(counts, queue)
        head = f"  {queue}" + (f" [{status}]" if status else "")
        if stage is None:
            lines.append(f"{head} (output)")
            continue
        arrow = f"{head} ── {stage.label} "
        if stage.is_sink:
            lines.append(f"{arrow}──■")
        for index, target in enumerate(stage.to):
            corner = "└─>" if index + 1 == len(stage.to) else "├─>"
            if index > 0 or stage.is_sink:
                lines.append(f"{' ' * len(arrow)}{corner} {target}")
            else:
                lines.append(f"{arrow}{'──>' if len(stage.to) == 1 else '┬─>'} {target}")
    return "\n".join(lines) + "\n"


def _mermaid(graph: Graph, name: str, counts: Mapping[str, Counts]) -> str:
    def safe(text: str) -> str:
        for character, entity in (("&", "amp"), ('"', "quot"), ("<", "lt"), (">", "gt")):
            text = text.replace(character, f"#{entity};")
        return text

    ids = {queue: f"q{index}" for index, queue in enumerate(graph.depths())}
    lines = ["---", f"title: {safe(name)}", "---", "flowchart LR"]
    for queue, id in ids.items():
        status = _status(counts, queue)
        lines.append(f'  {id}["{safe(queue)}{f"<br/>{status}" if status else ""}"]')
    for stage in graph.stages.values():
        id = ids[stage.name]
        lines += [f'  {id} -->|"{safe(stage.label)}"| {ids[target]}' for target in stage.to]
        if stage.is_sink:
            lines.append(f'  {id} -->|"{safe(stage.label)}"| {id}end(( ))')
    return "\n".join(lines) + "\n"


def _svg(graph: Graph, name: str, counts: Mapping[str, Counts]) -> str:
    columns: dict[int, list[str]] = {}
    for queue, depth in graph.depths().items():
        columns.setdefault(depth, []).append(queue)
    places = {
        queue: (_MARGIN + depth * _ACROSS, _MARGIN + _TITLE + row * _DOWN)
        for depth, queues in columns.items()
        for row, queue in enumerate(queues)
    }
    shapes = [shape for stage in graph.stages.values() for shape in _svg_stage(stage, places)]
    for queue, place in places.items():
        shapes += _svg_box(queue, place, _status(counts, queue), queue in graph.stages)
    rows = max(map(len, columns.values()))
    width = 2 * _MARGIN + max(columns) * _ACROSS + _WIDTH + 60
    height = 2 * _MARGIN + _TITLE + (rows - 1) * _DOWN + _HEIGHT
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}">',
            f"<title>{escape(name)}</title>",
            "<style>text {font: 13px sans-serif} .small {font-size: 10px; fill: #555}</style>",
            '<defs><marker id="to" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" '
            'markerHeight="8" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="#666"/></marker>'
            "</defs>",
            '<rect width="100%" height="100%" fill="#fafafa"/>',
            f'<text x="{_MARGIN}" y="{_TITLE}">{escape(name)}</text>',
            *shapes,
            "</svg>\n",
        ]
    )


def _svg_stage(stage: Stage, places: _Places) -> list[str]:
    """Return the arrows of a stage, and its label."""
    x, y = places[stage.name]
    start, middle = x + _WIDTH, y + _HEIGHT // 2
    shapes = []
    for target in stage.to:
        end, level = places[target][0], places[target][1] + _HEIGHT // 2
        bend = max(40, abs(end - start) // 2)
        curve = f"{start + bend},{middle} {end - bend},{level} {end},{level}"
        shapes.append(
            f'<path d="M{start},{middle} C{curve}" fill="none" stroke="#666" '
            'marker-end="url(#to)"/>'
        )
    if stage.is_sink:
        shapes.append(f'<path d="M{start},{middle} h30" fill="none" stroke="#666"/>')
        shapes.append(f'<circle cx="{start + 36}" cy="{middle}" r="6" fill="#666"/>')
    label = escape(stage.label)
    shapes.append(f'<text x="{start + 6}" y="{middle - 8}" class="small">{label}</text>')
    return shapes


def _svg_box(queue: str, place: tuple[int, int], status: str, read: bool) -> list[str]:
    """Return the box of a queue. The box of an output, which no stage reads, is dashed."""
    x, y = place
    center = f'x="{x + _WIDTH // 2}"'
    dashes = "" if read else ' stroke-dasharray="4"'
    shapes = [
        f'<rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="6" fill="#fff" '
        f'stroke="#333"{dashes}/>',
        f'<text {center} y="{y + (19 if status else 27)}" text-anchor="middle">'
        f"{escape(queue)}</text>",
    ]
    if status:
        shapes.append(
            f'<text {center} y="{y + 35}" text-anchor="middle" class="small">'
            f"{escape(status)}</text>"
        )
    return shapes
