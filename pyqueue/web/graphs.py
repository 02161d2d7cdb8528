"""The graph of a pipeline as SVG, drawn on the server: queues as boxes, and arrows between them.

A page has the graph twice: with the boxes in columns for a wide screen, and with one box below the
other for a narrow screen. The style sheet shows one of the two graphs, and sets the colors. The
script of the page changes the numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import mean
from typing import Any, Final, NamedTuple

from markupsafe import Markup

#: The size of a box, in pixels, and the height at which arrows begin and end.
_WIDTH: Final = 192
_HEIGHT: Final = 80
_MIDDLE: Final = 40
#: The room between columns, between the boxes of a column, and around all.
_ACROSS: Final = 104
_DOWN: Final = 52
_AROUND: Final = 8
#: The width of the narrow form, its maximum indentation, and the room on its right.
_NARROW: Final = 340
_MOST_INDENT: Final = 80
_STEP: Final = 20
_RIGHT: Final = 14
#: The room above a box for the rates of its arrows, and below a box.
_ABOVE: Final = 16
_BELOW: Final = 14
#: The number of dead messages: its distance from the box, its height, and the width of a character.
_TO_DEAD: Final = 12
_PILL: Final = 20
_CHARACTER: Final = 6.6
#: The longest name in a box, in characters.
_MOST_NAME: Final = 24
#: The width of an arrow without messages, and how much wider the busiest one is.
_THIN: Final = 1.5
_WIDER: Final = 2.5

Node = Mapping[str, Any]
Edge = Mapping[str, Any]


class Box(NamedTuple):
    """Where the box of a queue is drawn."""

    x: float
    y: float
    width: float

    @property
    def right(self) -> float:
        """The x coordinate of the right edge."""
        return self.x + self.width


class Picture(NamedTuple):
    """The graph in one of its two forms, wide or narrow."""

    boxes: Mapping[str, Box]
    arrows: Sequence[Markup]
    width: float
    height: float


def drawing(pipeline: Mapping[str, Any], root: str) -> Markup:
    """Return both forms of the graph of a pipeline.

    Args:
        pipeline: ``name``, ``nodes`` and ``edges``. Each edge is between two of the nodes.
        root: The path under which the dashboard is mounted.
    """
    nodes = {each["name"]: each for each in pipeline["nodes"]}
    edges: Sequence[Edge] = pipeline["edges"]
    forms = {"wide": _wide(nodes, edges), "narrow": _narrow(nodes, edges)}
    return Markup("").join(
        _svg(look, f"The graph of {pipeline['name']}", form, _boxes(nodes, form, root))
        for look, form in forms.items()
    )


def levels(names: Sequence[str], edges: Sequence[Edge]) -> dict[str, int]:
    """Return the column of each queue, in an order in which arrows lead forward.

    Arrows that lead back, and so close a cycle, do not count.
    """
    targets = _targets(edges)
    order: list[str] = []
    seen = set[str]()

    def visit(name: str) -> None:
        seen.add(name)
        for each in reversed(targets.get(name, ())):
            if each not in seen:
                visit(each)
        order.append(name)

    for name in names:
        if name not in seen:
            visit(name)
    found = dict.fromkeys(reversed(order), 0)
    places = {name: place for place, name in enumerate(found)}
    for name in places:
        for each in targets.get(name, ()):
            if places[each] > places[name]:
                found[each] = max(found[each], found[name] + 1)
    return found


def _targets(edges: Sequence[Edge]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for each in edges:
        found.setdefault(each["source"], []).append(each["target"])
    return found


def _sources(edges: Sequence[Edge]) -> dict[str, list[Edge]]:
    found: dict[str, list[Edge]] = {}
    for each in edges:
        found.setdefault(each["target"], []).append(each)
    return found


# ---- in columns


def _wide(nodes: Mapping[str, Node], edges: Sequence[Edge]) -> Picture:
    columns: dict[int, list[str]] = {}
    found = levels([*nodes], edges)
    for name in nodes:
        columns.setdefault(found[name], []).append(name)
    most = max(map(len, columns.values()))
    sources = _sources(edges)
    # The distance of each queue from the middle of its column, in boxes.
    rows: dict[str, float] = {}
    boxes = {}
    for level in sorted(columns):
        column = sorted(columns[level], key=lambda name: _row_before(name, sources, rows))
        for place, name in enumerate(column):
            rows[name] = place - (len(column) - 1) / 2
            y = _AROUND + (rows[name] + (most - 1) / 2) * (_HEIGHT + _DOWN)
            boxes[name] = Box(_AROUND + level * (_WIDTH + _ACROSS), y, _WIDTH)
    return Picture(
        boxes=boxes,
        arrows=[_across(each, boxes, _stroke(each, edges)) for each in edges],
        width=max(each.right for each in boxes.values()) + _AROUND,
        height=_AROUND + most * (_HEIGHT + _DOWN) - _DOWN + _TO_DEAD + _PILL + _AROUND,
    )


def _row_before(
    name: str, sources: Mapping[str, Sequence[Edge]], rows: Mapping[str, float]
) -> float:
    """Return the mean row of the queues from which arrows lead to a queue; 0 without any."""
    found = [rows[each["source"]] for each in sources.get(name, ()) if each["source"] in rows]
    return mean(found) if found else 0.0


def _across(edge: Edge, boxes: Mapping[str, Box], stroke: float) -> Markup:
    """Return an arrow between boxes. To an earlier column, the arrow leads around below them."""
    source, target = boxes[edge["source"]], boxes[edge["target"]]
    x1, y1, x2, y2 = source.right, source.y + _MIDDLE, target.x, target.y + _MIDDLE
    bend = _ACROSS / 2
    y = y2 if x2 - x1 > _ACROSS else (y1 + y2) / 2
    path = f"M{x1} {y1}C{x1 + bend} {y1} {x2 - bend} {y2} {x2 - 6} {y2}"
    if x2 <= x1:
        low = max(source.y, target.y) + _HEIGHT + _DOWN
        path = f"M{x1} {y1}C{x1 + bend} {low} {x2 - bend} {low} {x2 - 6} {y2}"
        y = y2 + 24
    label = '<text class="rate" x="{x}" y="{y}" text-anchor="middle">{text}</text>'
    text = Markup(label).format(x=x2 - bend, y=y - 7, text=_rate(edge))
    return _arrow(edge, path, (x2, y2), stroke) + text


# ---- below each other


def _narrow(nodes: Mapping[str, Node], edges: Sequence[Edge]) -> Picture:
    found, sources = levels([*nodes], edges), _sources(edges)
    step = min(_STEP, _MOST_INDENT / max(1, *found.values()))
    boxes: dict[str, Box] = {}
    y: float = _AROUND
    for name, level in found.items():
        y += _ABOVE if name in sources else 0
        boxes[name] = Box(1 + level * step, y, _NARROW - _RIGHT - level * step)
        y += _HEIGHT + _BELOW + (_TO_DEAD + _PILL if _has_dead(nodes[name]) else 0)
    arrows = [_down(each, boxes, step, _stroke(each, edges)) for each in edges]
    for name, some in sources.items():
        texts = Markup(", ").join(
            Markup("{}{}").format(_rate(each), f" from {each['source']}" if len(some) > 1 else "")
            for each in some
        )
        place = {"x": boxes[name].x + 4, "y": boxes[name].y - 5}
        arrows.append(Markup('<text class="rate" x="{x}" y="{y}">{}</text>').format(texts, **place))
    return Picture(boxes, arrows, _NARROW, y + _AROUND)


def _down(edge: Edge, boxes: Mapping[str, Box], step: float, stroke: float) -> Markup:
    """Return an arrow: to a box below, it runs on the left; to a box above, on the right."""
    source, target = boxes[edge["source"]], boxes[edge["target"]]
    end = target.y + _MIDDLE
    if target.y > source.y:
        path = f"M{source.x + step / 2:.1f} {source.y + _HEIGHT}V{end}H{target.x - 5:.1f}"
        return _arrow(edge, path, (target.x, end), stroke)
    path = f"M{source.right} {source.y + _MIDDLE}h8V{end}h-3"
    return _arrow(edge, path, (target.right, end), stroke, -1)


# ---- parts


def _stroke(edge: Edge, edges: Sequence[Edge]) -> float:
    """Return the width of an arrow: the busiest one is the widest."""
    busiest = max(each["rate"] or 0.0 for each in edges)
    return _THIN + (_WIDER * (edge["rate"] or 0.0) / busiest if busiest else 0.0)


def _arrow(edge: Edge, path: str, end: tuple[float, float], stroke: float, way: int = 1) -> Markup:
    """Return the line of an arrow and its head.

    Args:
        edge: The arrow to draw.
        path: The line, as the data of an SVG path.
        end: The point of the head.
        stroke: The width of the line.
        way: 1 if the arrow points to the right, -1 if it points to the left.
    """
    (x, y), idle = end, "" if edge["rate"] else " idle"
    return Markup(
        '<path class="arrow{}" d="{}" stroke-width="{:.1f}"/><path class="tip{}" d="{}"/>'
    ).format(idle, path, stroke, idle, f"M{x:.1f} {y}l{-8 * way} -5v10z")


def _rate(edge: Edge) -> Markup:
    return Markup('<tspan data-live="{}:to:{}">{}</tspan>').format(
        edge["source"], edge["target"], edge["text"]
    )


def _has_dead(node: Node) -> bool:
    return node["dead"] is not None


def _boxes(nodes: Mapping[str, Node], form: Picture, root: str) -> Iterator[Markup]:
    for name, box in form.boxes.items():
        yield _box(nodes[name], box, root)
        if _has_dead(nodes[name]):
            yield _pill(nodes[name], box, root)


def _box(node: Node, box: Box, root: str) -> Markup:
    """Return the box of a queue, with its name, its handler and its numbers."""
    name = node["name"]
    text = (
        '<rect class="box {look}" x="{x}" y="{y}" width="{width}" '
        'height="{height}" rx="8"/>'
        '<text class="queue" x="{left}" y="{y1}">{shown}</text>'
        '<text class="small" x="{left}" y="{y2}">{about}</text>'
        '<text x="{left}" y="{y3}"><tspan class="number" data-live="{name}:ready">{ready}</tspan> '
        'ready <tspan class="number" dx="6" data-live="{name}:reserved">{reserved}</tspan> in work'
        '</text><text x="{left}" y="{y4}"><tspan class="number" data-live="{name}:done">{done}'
        '</tspan> done</text><text class="small" x="{end}" y="{y4}" text-anchor="end">{p95}</text>'
    )
    texts = node["texts"]
    values: dict[str, Any] = {name: texts[name] for name in ("ready", "reserved", "done")}
    values |= {"x": box.x, "y": box.y, "width": box.width, "height": _HEIGHT, "look": node["look"]}
    values |= {f"y{place}": box.y + y for place, y in enumerate((20, 36, 54, 71), 1)}
    shown = Markup(text).format(
        left=box.x + 12,
        end=box.right - 12,
        name=name,
        shown=name if len(name) <= _MOST_NAME else f"{name[: _MOST_NAME - 1]}…",
        about=node["about"],
        p95="" if texts["p95"] == "–" else f"p95 {texts['p95']}",
        **values,
    )
    if not node["known"]:  # it has no page
        return shown
    return Markup('<a href="{}{}">{}</a>').format(root, node["path"], shown)


def _pill(node: Node, box: Box, root: str) -> Markup:
    """Return the number of dead messages below a box, and an arrow to it."""
    texts, y = node["texts"], box.y + _HEIGHT + _TO_DEAD
    rate = "" if texts["dying"] in ("0", "–") else f" · {texts['dying']}"
    width = 24 + _CHARACTER * len(f"{texts['dead']} dead{rate}")
    x = box.right - width - 12
    text = (
        '<a href="{href}"><path class="dying {look}" d="M{middle:.1f} {top}v{to}"/>'
        '<rect class="pill {look}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" '
        'rx="10"/><text class="dead {look}" x="{middle:.1f}" y="{base}" text-anchor="middle">'
        '<tspan data-live="{name}:dead">{dead}</tspan> dead{rate}</text></a>'
    )
    return Markup(text).format(
        href=f"{root}{node['dead_path']}",
        look="" if node["dead"] else "none",
        name=node["name"],
        dead=texts["dead"],
        rate=rate,
        x=x,
        y=y,
        top=box.y + _HEIGHT,
        to=_TO_DEAD,
        middle=x + width / 2,
        base=y + 14,
        width=width,
        height=_PILL,
    )


def _svg(look: str, label: str, form: Picture, boxes: Iterator[Markup]) -> Markup:
    head = (
        '<svg class="graph {}" width="{width:.0f}" height="{height:.0f}" '
        'viewBox="0 0 {width:.0f} {height:.0f}" role="group" aria-label="{}">'
    )
    start = Markup(head).format(look, label, width=form.width, height=form.height)
    return start + Markup("").join([*form.arrows, *boxes]) + Markup("</svg>")
