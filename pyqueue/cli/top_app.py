"""The app of ``pyqueue top``: a screen of queues, and a screen of the messages of a queue."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Final

from rich.text import Text
from textual.app import App
from textual.binding import Binding, BindingType
from textual.widgets import DataTable, Input

from pyqueue import AsyncClient, AsyncQueue, ConfigurationError, Message, Page, QueueInfo
from pyqueue.cli.board import Board, Line, Picture, group_of, queue_of
from pyqueue.cli.columns import (
    ORDERS,
    PADDING,
    Cell,
    fitted,
    layout,
    number,
    order,
    rate_in_unit,
    span,
)
from pyqueue.cli.common import DEFERRED, age, as_json_text
from pyqueue.cli.queues import to_json
from pyqueue.cli.screens import Details, Head, ListScreen, Row, act, ask, refuse
from pyqueue.cli.selecting import conditions
from pyqueue.messages import Id, State

#: The cells that the scrollbar of a table needs.
_SCROLLBAR: Final = 2
#: The messages on one page.
PAGE_SIZE: Final = 100
#: The width of payloads from which the reasons get a separate column.
_WIDE: Final = 60
_STATES: Final[Sequence[State]] = ("scheduled", "ready", "reserved", "dead", "finished")

_BACK: Final = Binding("escape", "back", "back")
_FILTER: Final = Binding("slash", "filter", "filter", key_display="/")
_QUIT: Final = Binding("q", "app.quit", "quit")


class QueuesScreen(ListScreen):
    """All queues and streams.

    Args:
        board: Reads the queues and streams.
        every_s: How many seconds pass between two updates of the screen.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("p", "pause", "pause"),
        Binding("r", "redrive", "redrive"),
        Binding("d", "dead", "dead"),
        _FILTER,
        Binding("s", "sort", "sort"),
        _BACK,
        _QUIT,
    ]

    def __init__(self, board: Board, every_s: float) -> None:
        super().__init__(every_s, hint="a part of the name")
        self.leaves = False
        self._board = board
        self._picture: Picture | None = None
        self._unfolded: set[str] = set()
        self._sorted_by = ORDERS[0]
        #: The names of the queues in the order in which they are shown. A refresh keeps it.
        self._names: list[str] = []

    async def read(self) -> None:
        """Read the queues."""
        wide = layout(self.app.size.width - _SCROLLBAR).history
        self._picture = await self._board.read(self._unfolded, wide)

    def draw(self) -> None:
        """Show the queues. New queues come last until the next sort."""
        if self._picture is None:
            return
        lines = self._picture.lines
        there = {each.info.name for each in lines}
        known = [each for each in self._names if each in there]
        new = [name for name in order(lines, self._sorted_by) if name not in {*known}]
        self._names = known + new
        places = {name: place for place, name in enumerate(self._names)}
        shown = [each for each in lines if self.filter_text in each.key]
        shown.sort(key=lambda line: places[line.info.name])  # groups stay behind their stream
        fitting = layout(self.app.size.width - _SCROLLBAR)
        heads = [Head("QUEUE", fitting.name, right=False)]
        heads += [Head(each.head, each.width, each.name != "history") for each in fitting.columns]
        self.table.put(heads, [Row(each.key, fitting.cells(each), each) for each in shown])
        self.head.update(_sums(self._picture, self._board.client.namespace, self._sorted_by))

    def set_filter(self, text: str) -> None:
        """Show the queues whose names contain a text."""
        self.filter_text = text
        self.draw()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter while the user types."""
        self.set_filter(event.value)

    # ---- keys

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Open the selected queue, or fold or unfold the selected stream."""
        line: Line | None = self.table.item
        if line is None:
            return
        if line.is_stream:
            self._unfolded ^= {line.info.name}
            self.read_soon()
        elif line.group is not None:
            refuse(
                self,
                f"group {line.group.name!r} shares the messages of its stream; "
                f"`pyqueue stream read {line.info.name}` shows them",
            )
        else:
            _open(self, self._board.client, line.info, self._every_s)

    def action_dead(self) -> None:
        """Open the dead-letter queue of the selected queue."""
        line: Line | None = self.table.item
        if line is None or line.group is not None or line.is_stream:
            return
        info = self._board.infos.get(line.dead_letter)
        if info is None:
            refuse(self, f"{line.key} has no dead messages")
        else:
            _open(self, self._board.client, info, self._every_s)

    def action_sort(self) -> None:
        """Sort by the next column."""
        self._sorted_by = ORDERS[(ORDERS.index(self._sorted_by) + 1) % len(ORDERS)]
        self._names = []
        self.draw()

    def action_pause(self) -> None:
        """Pause or resume the selected queue or group."""
        line: Line | None = self.table.item
        if line is None:
            return
        if line.is_stream:
            refuse(self, f"{line.key} is a stream; open it with Enter, and pause a group")
            return
        client = self._board.client
        target = queue_of(client, line.info) if line.group is None else group_of(client, line)
        done = f"{line.key}: {'not paused' if line.paused else 'paused'}"
        act(self, target.resume if line.paused else target.pause, done)

    def action_redrive(self) -> None:
        """Send the dead messages of the selected queue back, after asking."""
        line: Line | None = self.table.item
        if line is None or line.group is not None or line.is_stream:
            return
        own = line.info.dead is not None
        info = self._board.infos.get(line.dead_letter) if own else line.info
        if not own and not line.key.endswith(".dead"):
            refuse(self, f"{line.key} shares its dead-letter queue; redrive that queue")
        elif info is None or not info.counts.total:
            refuse(self, f"{line.key} has no dead messages")
        else:
            question = f"Send {number(info.counts.total)} messages of {info.name} back?"
            ask(self, question, queue_of(self._board.client, info).redrive, "{} messages sent back")


def _sums(picture: Picture, namespace: str, sorted_by: str) -> Text:
    """Return the head of the screen, with the sums over all queues."""
    lines = picture.lines
    flows = [each.flow for each in lines if each.flow is not None]
    dead = sum(each.dead or 0 for each in lines)
    head = Text.assemble(("pyqueue ", "bold"), namespace)
    if flows:
        head.append(f"  in {rate_in_unit(sum(each.into or 0 for each in flows))}")
        head.append(f"  done {rate_in_unit(sum(each.done for each in flows))}")
    head.append(f"  work {number(sum(each.work for each in lines))}")
    head.append(f"  dead {number(dead)}", style="bold red" if dead else "")
    head.append(f"  by {sorted_by}  read in {span(picture.took_s)}")
    return head


def _open(screen: ListScreen, client: AsyncClient, info: QueueInfo, every_s: float) -> None:
    screen.app.push_screen(MessagesScreen(client, info, every_s))


class MessagesScreen(ListScreen):
    """The messages of a queue.

    Args:
        client: The client of the namespace.
        info: What is known about the queue.
        every_s: How many seconds pass between two updates of the screen.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("c", "cancel", "cancel"),
        Binding("u", "requeue", "ready now"),
        Binding("n", "next", "next page"),
        _FILTER,
        _BACK,
        _QUIT,
    ]

    def __init__(self, client: AsyncClient, info: QueueInfo, every_s: float) -> None:
        super().__init__(every_s, hint="state=dead payload.n=3 error.type=TimeoutError")
        self._queue: AsyncQueue[Any] = queue_of(client, info)
        self._after: str | None = None
        self._page: Page[Any] | None = None
        self._took_s = 0.0

    async def read(self) -> None:
        """Read a page."""
        began = time.monotonic()
        words = self.filter_text.split()
        states = [word.removeprefix("state=") for word in words if word.startswith("state=")]
        where = conditions([word for word in words if not word.startswith("state=")])
        state = next((each for each in _STATES if states and each == states[-1]), None)
        if states and state is None:
            raise ConfigurationError(
                f"state: expected one of {', '.join(_STATES)}, found {states[-1]!r}"
            )
        self._page = await self._queue.browse(state, where, self._after, PAGE_SIZE)
        self._took_s = time.monotonic() - began

    def draw(self) -> None:
        """Show the page."""
        if self._page is None:
            return
        longest = max((len(str(each.id)) for each in self._page.messages), default=24)
        heads = [
            *(Head("ID", min(longest, 40), right=False), Head("STATE", 9, right=False)),
            *(Head("WHEN", 8), Head("TRIES", 5)),
        ]
        used = _SCROLLBAR + sum(each.width + PADDING for each in heads)
        room = max(10, self.app.size.width - used - PADDING)
        wide = room >= _WIDE
        heads.append(Head("PAYLOAD", (room - PADDING) // 2 if wide else room, right=False))
        if wide:
            heads.append(Head("WHY", room - PADDING - heads[-1].width, right=False))
        else:
            heads[-1] = heads[-1]._replace(text="PAYLOAD, OR WHY IT WAITS")
        rows = [Row(repr(each.id), _cells(each, heads), each) for each in self._page.messages]
        self.table.put(heads, rows)
        more = "" if self._page.complete else "  more: n"
        self.head.update(
            Text.assemble(
                (self._queue.name, "bold"),
                f"  {len(rows)} messages{more}  read in {span(self._took_s)}",
            )
        )

    def set_filter(self, text: str) -> None:
        """Show the first page of the messages that match a filter."""
        if text != self.filter_text:
            self.filter_text = text
            self._after = None
            self.read_soon()

    # ---- keys

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Show the selected message with all its fields."""
        message: Message[Any] | None = self.table.item
        if message is not None:
            fields = json.loads(as_json_text(to_json(message)))
            self.app.push_screen(Details(json.dumps(fields, indent=2, ensure_ascii=False)))

    def action_next(self) -> None:
        """Show the next page. After the last page, show the first one."""
        if self._page is not None and (self._after is not None or not self._page.complete):
            self._after = self._page.after
            self.read_soon()

    def action_cancel(self) -> None:
        """Cancel the selected message, after asking."""
        if (message := self.table.item) is not None:
            question = f"Cancel message {message.id} of {self._queue.name}?"
            ask(self, question, partial(_cancel, self._queue, message.id), "{}")

    def action_requeue(self) -> None:
        """Make the selected message ready now, if it is scheduled or dead."""
        if (message := self.table.item) is not None:
            act(self, partial(_requeue, self._queue, message.id), "{}")


def _cells(message: Message[Any], heads: Sequence[Head]) -> list[Cell]:
    why = _why(message)
    payload = as_json_text(message.payload)
    cells = [
        Cell(fitted(str(message.id), heads[0].width)),
        Cell(message.state),
        Cell(age(message.when).removesuffix(" ago")),
        Cell(str(message.tries)),
    ]
    if len(heads) > len(cells) + 1:
        cells += [Cell(payload[: heads[4].width]), why]
    else:
        cells.append(why if why.text else Cell(payload))
    pairs = zip(cells, heads, strict=True)
    return [Cell(text[: head.width], style) for (text, style), head in pairs]


async def _cancel(queue: AsyncQueue[Any], id: Id) -> str:
    result = await queue.cancel(id)
    return result or "nothing to cancel: it has ended"


async def _requeue(queue: AsyncQueue[Any], id: Id) -> str:
    done = await queue.requeue(id)
    return "ready now" if done else "not changed: it has ended, or a consumer holds it"


def _why(message: Message[Any]) -> Cell:
    """Return why a message waits, or why its last try failed."""
    if message.deferred is not None:
        return Cell(f"waits for {DEFERRED[message.deferred]}", "yellow")
    if message.error is None:
        return Cell("")
    return Cell(" ".join(str(message.error.get("message")).split()), "bold red")


class Top(App[None]):
    """The app of ``pyqueue top``.

    Args:
        client: The client of the namespace.
        every_s: How many seconds pass between two updates of the screen.
    """

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #head { height: 1; padding: 0 1; background: $panel; }
    Table { height: 1fr; }
    #filter { display: none; height: 1; border: none; padding: 0 1; }
    Question { align: center middle; }
    #question { width: auto; height: auto; padding: 1 2; background: $panel; }
    #details { margin: 1 4; padding: 1 2; background: $panel; }
    """

    def __init__(self, client: AsyncClient, every_s: float) -> None:
        super().__init__()
        self._board = Board(client)
        self._every_s = every_s

    def on_mount(self) -> None:
        """Open the screen of queues."""
        self.push_screen(QueuesScreen(self._board, self._every_s))
