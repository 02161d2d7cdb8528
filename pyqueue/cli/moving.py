"""The commands that move messages between queues: move and redrive."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer

from pyqueue import ConfigurationError, LeaseLost, Queue, Selection
from pyqueue.cli.common import (
    Commands,
    connect,
    emit,
    note,
    queue_with_stored_options,
    refuse_unknown,
)
from pyqueue.cli.completing import queue_names
from pyqueue.cli.option_groups import Server, grouped
from pyqueue.cli.queues import BATCH_SIZE, note_if_paused
from pyqueue.cli.selecting import Chosen, Selected, WaitingState
from pyqueue.queue_base import backend_of

app = typer.Typer(cls=Commands)


@app.command()
@grouped
def move(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FROM",
            help="The queue that contains the messages.",
            autocompletion=queue_names,
        ),
    ],
    to: Annotated[
        str,
        typer.Argument(
            metavar="TO", help="The queue to which the messages move.", autocompletion=queue_names
        ),
    ],
    chosen: Chosen,
    server: Server,
    state: WaitingState = None,
) -> None:
    """Move messages to another queue, each in one atomic update. Print how many were moved.

    Without a condition, only ready messages move. With one, scheduled messages move, too.
    """
    if source == to:
        raise ConfigurationError(f"TO: the messages are already in {to!r}; name another queue")
    selected = Selected(chosen, state)
    selects = selected.needs_filter()
    with connect(server.url, server.namespace, server.signals) as client:
        refuse_unknown(client, source, "FROM")
        from_queue = queue_with_stored_options(client, source)
        to_queue = queue_with_stored_options(client, to)
        if selects:
            change = partial(Selection.move, to=to_queue)
            selected.change(from_queue, "moved", change, server.as_json)
            return
        moved = _move_ready(from_queue, to_queue, chosen.limit)
        if not moved:
            note_if_paused(from_queue)
    emit({"moved": moved}) if server.as_json else print(moved)


def _move_ready(from_queue: Queue[Any], to_queue: Queue[Any], limit: int | None) -> int:
    """Move the ready messages, as a consumer would. Return how many were moved."""
    # Move no more messages than are ready now. So this ends even if producers keep pushing.
    ready = from_queue.counts().ready
    wanted = ready if limit is None else min(limit, ready)
    moved = 0
    while moved < wanted:
        batch = from_queue.reserve_many(min(BATCH_SIZE, wanted - moved), timeout=0)
        if not batch:
            break
        try:
            from_queue.move(*batch, to=to_queue)
            moved += len(batch)
        except LeaseLost as error:
            moved += len(batch) - len(error.lost) - len(error.unknown)
        except BaseException:
            from_queue.release(*batch)
            raise
    return moved


@app.command()
@grouped
def redrive(
    name: Annotated[
        str,
        typer.Argument(
            metavar="QUEUE",
            help="The dead-letter queue, such as orders.dead.",
            autocompletion=queue_names,
        ),
    ],
    chosen: Chosen,
    server: Server,
) -> None:
    """Send dead messages back to the queues that they came from. Print how many were sent."""
    with connect(server.url, server.namespace, server.signals) as client:
        refuse_unknown(client, name)
        source = queue_with_stored_options(client, name)
        if Selected(chosen, None).filters or chosen.dry_run or chosen.rate is not None:
            dead = Selected(chosen, "dead")
            dead.change(source, "moved", Selection.redrive, server.as_json)
            return
        moved = source.redrive(chosen.limit)
        dead_letter = backend_of(source).options.dead_letter
        if not moved and client.queue(dead_letter).counts().total:
            note(f"{name!r} has no dead messages; its dead-letter queue is {dead_letter!r}")
    emit({"moved": moved}) if server.as_json else print(moved)
