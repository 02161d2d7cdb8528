"""What the screens of ``pyqueue top`` share: a table that keeps its cursor, and dialogs."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.coordinate import Coordinate
from textual.screen import ModalScreen, Screen
from textual.timer import Timer
from textual.widgets import DataTable, Footer, Input, Static

from pyqueue import QueueError
from pyqueue.cli.columns import Cell, printable
from pyqueue.cli.watching import pause_after


class Head(NamedTuple):
    """The head of a column."""

    text: str
    width: int
    right: bool = True


class Row(NamedTuple):
    """A row, and the object that it shows."""

    key: str
    cells: Sequence[Cell]
    item: Any


class Table(DataTable[Text]):
    """A table of rows with keys. New values never move the cursor to another row."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select_cursor", "open")]

    def __init__(self) -> None:
        super().__init__(cursor_type="row", zebra_stripes=True)
        self.heads: Sequence[Head] = ()
        self.shown: dict[str, Sequence[Cell]] = {}
        self._items: Mapping[str, Any] = {}

    @property
    def item(self) -> Any:
        """The object in the row under the cursor, or None if there is no row."""
        return self._items.get(self.current or "")

    @property
    def current(self) -> str | None:
        """The key of the row under the cursor, or None if there is no row."""
        keys = [*self.shown]
        return keys[self.cursor_row] if self.cursor_row < len(keys) else None

    def put(self, heads: Sequence[Head], rows: Sequence[Row]) -> None:
        """Replace the rows of the table."""
        self._items = {each.key: each.item for each in rows}
        if heads != self.heads or [each.key for each in rows] != [*self.shown]:
            self._rebuild(heads, rows)
            return
        for key, cells, _ in rows:
            for place, (cell, before) in enumerate(zip(cells, self.shown[key], strict=True)):
                if cell != before:
                    self.update_cell_at(
                        Coordinate(self.get_row_index(key), place), _text(cell, heads[place])
                    )
            self.shown[key] = cells

    def _rebuild(self, heads: Sequence[Head], rows: Sequence[Row]) -> None:
        """Rebuild all rows. The cursor stays on its row or, if the row is gone, at its position."""
        current, place, top = self.current, self.cursor_row, self.scroll_offset.y
        self.clear(columns=True)
        self.heads, self.shown = heads, {each.key: each.cells for each in rows}
        for each in heads:
            label = Text(each.text, justify="right" if each.right else "left")
            self.add_column(label, width=each.width)
        for key, cells, _ in rows:
            texts = (_text(cell, head) for cell, head in zip(cells, heads, strict=True))
            self.add_row(*texts, key=key)
        keys = [*self.shown]
        if keys:
            here = keys.index(current) if current in keys else min(place, len(keys) - 1)
            self.move_cursor(row=here)
            self.call_after_refresh(self.scroll_to, y=top, animate=False)


def _text(cell: Cell, head: Head) -> Text:
    return Text(printable(cell.text), style=cell.style, justify="right" if head.right else "left")


class Question(ModalScreen[bool]):
    """A question that must be answered before an action.

    Args:
        text: The question to ask.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "yes"),
        Binding("n,escape", "answer(False)", "no", key_display="n"),
    ]

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def compose(self) -> ComposeResult:
        """Yield the widgets."""
        yield Static(Text(self.text), id="question")
        yield Footer()

    def action_answer(self, yes: bool) -> None:
        """Close the question with this answer."""
        self.dismiss(yes)


class Details(ModalScreen[None]):
    """Shows a text of many lines.

    Args:
        text: The text to show.
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,enter,q", "close", "back")]

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def compose(self) -> ComposeResult:
        """Yield the widgets."""
        with VerticalScroll(id="details"):
            yield Static(Text("\n".join(map(printable, self.text.split("\n")))))
        yield Footer()

    def action_close(self) -> None:
        """Go back."""
        self.dismiss()


class ListScreen(Screen[None]):
    """A screen with a head, a table that is read at intervals, a filter, and a row of keys.

    Args:
        every_s: How many seconds pass between two updates of the table.
        hint: An example for the filter.
    """

    def __init__(self, every_s: float, hint: str) -> None:
        super().__init__()
        self._every_s = every_s
        self._next_read: Timer | None = None
        self.head, self.table = Static(id="head"), Table()
        self.filter = Input(id="filter", placeholder=hint)
        self.filter_text = ""
        #: Whether Escape goes back to another screen.
        self.leaves = True

    def compose(self) -> ComposeResult:
        """Yield the widgets."""
        yield from (self.head, self.table, self.filter, Footer())

    # ---- the part of each screen

    async def read(self) -> None:
        """Read the values that the screen shows, and keep them."""
        raise NotImplementedError

    def draw(self) -> None:
        """Show the values that were read last."""
        raise NotImplementedError

    def set_filter(self, text: str) -> None:
        """Apply a filter from now on."""
        raise NotImplementedError

    # ---- refresh

    def on_screen_resume(self) -> None:
        """Read now, and then at intervals while this screen is in front."""
        self.table.focus()
        self.read_soon()

    def on_screen_suspend(self) -> None:
        """Cancel the next read."""
        if self._next_read is not None:
            self._next_read.stop()
            self._next_read = None

    def on_resize(self) -> None:
        """Fit the table to the terminal."""
        self.draw()

    def read_soon(self) -> None:
        """Read now, in the background."""
        self.on_screen_suspend()
        self.run_worker(self._read, group="read", exclusive=True)  # type: ignore[arg-type]  # mypy infers no result

    async def _read(self) -> None:
        began = time.monotonic()
        try:
            await self.read()
        except QueueError as error:
            self.head.update(Text(" ".join(str(error).split()), style="bold red"))
        else:
            self.draw()
        if self.is_current:
            wait_s = pause_after(time.monotonic() - began, self._every_s)
            self._next_read = self.set_timer(wait_s, self.read_soon)

    # ---- the filter

    def action_filter(self) -> None:
        """Open the filter."""
        self.filter.display = True
        self.filter.focus()

    def on_input_submitted(self) -> None:
        """Use the filter, and go back to the table."""
        self.filter.display = bool(self.filter.value)
        self.set_filter(self.filter.value)
        self.table.focus()

    def action_back(self) -> None:
        """Remove the filter. If there is none, go back to the previous screen."""
        if self.filter.display:
            self.filter.value = ""
            self.filter.display = False
            self.set_filter("")
            self.table.focus()
        elif self.leaves:
            self.app.pop_screen()


# ---- actions on messages and queues

Work = Callable[[], Awaitable[Any]]


def refuse(screen: ListScreen, why: str) -> None:
    """Show why a key has no effect."""
    screen.app.notify(why, severity="warning", markup=False)


def act(screen: ListScreen, work: Work, done: str) -> None:
    """Change something on the server in the background, report the result, and read again.

    Args:
        screen: The screen whose key was pressed.
        work: Makes the change.
        done: The text that reports success, in which the result replaces "{}".
    """

    async def run() -> None:
        try:
            result = await work()
        except QueueError as error:
            screen.app.notify(str(error), severity="error", markup=False)
            return
        screen.app.notify(done.replace("{}", str(result)), markup=False)
        screen.read_soon()

    screen.run_worker(run, group="act")  # type: ignore[arg-type]  # mypy infers no result


def ask(screen: ListScreen, question: str, work: Work, done: str) -> None:
    """Ask a question, and change something on the server if the answer is yes; see ``act``."""

    def answered(yes: bool | None) -> None:
        if yes:
            act(screen, work, done)

    screen.app.push_screen(Question(question), answered)
