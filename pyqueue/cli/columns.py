"""The columns of ``pyqueue top``: their texts, their order, and which of them fit a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from pyqueue.cli.board import CAP, MINUTES, Line
from pyqueue.durations import readable_rate

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.table import Table

#: The style of a cell. Colors are for trouble only.
Style = Literal["", "bold", "dim", "yellow", "bold red"]

#: The padding on both sides of a column together, in cells.
PADDING: Final = 2
#: The minimum width of names, in cells: always, and if an optional column is shown.
_LEAST_NAME, _NICE_NAME = 10, 20
_BARS: Final = " ▁▂▃▄▅▆▇█"


class Cell(NamedTuple):
    """A text and its style."""

    text: str
    style: Style = ""


class Column(NamedTuple):
    """A column of the table."""

    name: str
    head: str
    width: int
    #: Returns the cell of a line.
    cell: Callable[[Line], Cell]
    #: Returns the value by which lines are sorted, greatest first. Lines with None come last.
    rank: Callable[[Line], float | None]
    #: Whether a narrow terminal leaves the column out.
    optional: bool = False


# ---- texts


def number(value: float | None) -> str:
    """Return a number in up to five characters. A capped number becomes "10k+"."""
    if value is None:
        return ""
    return f"{CAP // 1000}k+" if value >= CAP else f"{value:,.0f}"


def rate(value: float | None, unit: str = "s") -> str:
    """Return a rate in up to five characters, such as "18.5", or "4.2/m" if it is small.

    Args:
        value: How often something happens per ``unit``, or None if this is unknown.
        unit: "s" or "min", the unit of rates that are not small.
    """
    if value is None:
        return ""
    if value >= 9999.5:
        return f"{value / 1000:,.0f}k"
    if value >= 99.95:
        return f"{value:,.0f}"
    scaled, readable = readable_rate(value, unit)
    return f"{scaled:.1f}" if readable == unit else f"{scaled:.1f}/{readable[0]}"


def rate_in_unit(value: float) -> str:
    """Return a rate per second with its unit, such as "18.5/s" or "4.2/m"."""
    text = rate(value)
    return text if "/" in text else f"{text}/s"


def span(seconds: float | None) -> str:
    """Return a length of time in up to five characters, such as "765ms", "2.4s" or "16m"."""
    if seconds is None:
        return ""
    if seconds < 1:
        return f"{max(0, round(seconds * 1000))}ms"
    if seconds < 10:
        return f"{seconds:.1f}s"
    length, unit = seconds, "s"
    for size, name in ((60, "m"), (60, "h"), (24, "d")):
        if length < 2 * size:
            break
        length, unit = length / size, name
    return f"{length:.0f}{unit}"


def bars(numbers: Sequence[int]) -> str:
    """Return numbers as a small chart, one character for each."""
    highest = max(numbers, default=0) or 1
    steps = len(_BARS) - 1
    return "".join(_BARS[-(-each * steps // highest)] for each in numbers)


def printable(text: str) -> str:
    """Return a text without characters that would control a terminal."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)


def fitted(text: str, width: int) -> str:
    """Return a text that fits a width. The middle of a long text is left out."""
    if len(text) <= width:
        return text
    front = width // 2
    return f"{text[:front]}…{text[front + 1 + len(text) - width :]}"


def since_s(line: Line) -> float | None:
    """Return how long the oldest message of a line has waited, in seconds."""
    if line.oldest is None:
        return None
    return max(0.0, (datetime.now(UTC) - line.oldest).total_seconds())


# ---- cells


def _quiet(text: str) -> Cell:
    """Return a cell that is dim if its text is 0."""
    return Cell(text, "dim" if text in ("0", "0.0") else "")


def name_cell(line: Line, width: int) -> Cell:
    """Return the cell with the name of a line. A paused line says "paused"."""
    mark = ("▾ " if line.unfolded else "▸ ") if line.is_stream else ""
    if line.group is not None:
        mark = "  "
    tail = " paused" if line.paused else ""
    name = line.info.name if line.group is None else line.group.name
    text = mark + fitted(name, max(3, width - len(mark) - len(tail))) + tail
    return Cell(text, "yellow" if line.paused else "bold")


def _of_flow(name: Literal["into", "done", "failed", "p95"]) -> Callable[[Line], float | None]:
    """Return a function that reads the figure ``name`` from the flow of a line."""

    def of(line: Line) -> float | None:
        value: float | None = getattr(line.flow, name, None)
        return value

    return of


def _column(
    name: str,
    head: str,
    width: int,
    text: Callable[[float | None], str],
    value: Callable[[Line], float | None],
) -> Column:
    """Return a column of numbers."""
    return Column(name, head, width, lambda line: _quiet(text(value(line))), value)


def _alarming(
    name: str,
    head: str,
    width: int,
    text: Callable[[float | None], str],
    value: Callable[[Line], float | None],
) -> Column:
    """Return a column of numbers, which are shown in red unless they are 0."""

    def cell(line: Line) -> Cell:
        of = value(line)
        return Cell(text(of), "bold red") if of else _quiet(text(of))

    return Column(name, head, width, cell, value)


def _history(line: Line) -> Cell:
    return Cell(bars(line.flow.minutes if line.flow else ()))


#: The columns after the name, in order.
COLUMNS: Final = (
    _column("ready", "READY", 5, number, lambda line: line.ready),
    _column("work", "WORK", 5, number, lambda line: line.work),
    _column("scheduled", "SCHED", 5, number, lambda line: line.scheduled),
    _column("oldest", "OLDEST", 6, span, since_s),
    _column("in", "IN/S", 5, rate, _of_flow("into")),
    _column("done", "DONE/S", 6, rate, _of_flow("done")),
    Column("history", f"LAST {MINUTES} MIN", MINUTES, _history, lambda line: None, optional=True),
    _column("p95", "P95", 5, span, _of_flow("p95"))._replace(optional=True),
    _alarming("failed", "FAIL/M", 6, partial(rate, unit="min"), _of_flow("failed")),
    _alarming("dead", "DEAD", 5, number, lambda line: line.dead),
)
#: The columns by which lines can be sorted, in the order in which a key press selects them.
ORDERS: Final = ("queue", "ready", "work", "oldest", "in", "done", "failed", "dead")


class Layout(NamedTuple):
    """The columns that fit a terminal."""

    #: The width of the names.
    name: int
    columns: tuple[Column, ...]

    @property
    def history(self) -> bool:
        """Whether the last 30 minutes or the latency are among the columns."""
        return any(each.optional for each in self.columns)

    def cells(self, line: Line) -> list[Cell]:
        """Return the cells of a line."""
        return [name_cell(line, self.name), *(each.cell(line) for each in self.columns)]


def layout(width: int, columns: Sequence[Column] = COLUMNS) -> Layout:
    """Return the columns that fit a terminal of this width, in cells."""
    chosen = [each for each in columns if not each.optional]
    room = width - PADDING - sum(each.width + PADDING for each in chosen)
    for each in sorted((each for each in columns if each.optional), key=lambda it: it.width):
        if room - each.width - PADDING >= _NICE_NAME:
            chosen.append(each)
            room -= each.width + PADDING
    names = {each.name for each in chosen}
    return Layout(max(_LEAST_NAME, room), tuple(each for each in columns if each.name in names))


def order(lines: Iterable[Line], by: str) -> list[str]:
    """Return the names of queues and streams sorted by a column of ``ORDERS``."""
    tops = sorted((each for each in lines if each.group is None), key=lambda line: line.info.name)
    for column in COLUMNS:
        if column.name == by:
            ranks = {line.key: column.rank(line) for line in tops}
            tops.sort(key=lambda line: (ranks[line.key] is None, -(ranks[line.key] or 0)))
    return [each.info.name for each in tops]


class Grid(NamedTuple):
    """The table for a terminal without Textual. It is rendered by rich."""

    lines: Sequence[Line]
    columns: Sequence[Column] = COLUMNS

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        from rich.table import Table
        from rich.text import Text

        shown = layout(options.max_width, self.columns)
        longest = max((len(name_cell(each, shown.name).text) for each in self.lines), default=5)
        table = Table(box=None, padding=(0, 1), header_style="bold")
        table.add_column("QUEUE", width=max(5, longest), no_wrap=True)
        for each in shown.columns:
            side: Literal["left", "right"] = "left" if each.name == "history" else "right"
            table.add_column(each.head, width=each.width, justify=side, no_wrap=True)
        for line in self.lines:
            table.add_row(*(Text(printable(text), style) for text, style in shown.cells(line)))
        yield table
