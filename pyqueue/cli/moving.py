"""The commands that move messages between queues: move and redrive."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer

from pyqueue import ConfigurationError, LeaseLost, Queue, Selection
from pyqueue.cli.common import (
    Commands,
    Json,
    Namespace,
    Signals,
    Url,
    connect,
    emit,
    note,
    queue_with_stored_options,
    refuse_unknown,
)
from pyqueue.cli.queues import BATCH_SIZE, note_if_paused
from pyqueue.cli.selecting import Chosen, DryRun, ErrorType, Older, Rate, WaitingState, Where
from pyqueue.queue_base import backend_of

app = typer.Typer(cls=Commands)


@app.command()
def move(
    source: Annotated[
        str, typer.Argument(metavar="FROM", help="The queue that contains the messages.")
    ],
    to: Annotated[str, typer.Argument(metavar="TO", help="The queue to which they move.")],
    where: Where = None,
    state: WaitingState = None,
    older: Older = None,
    error: ErrorType = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="How many messages. Default: all that are ready."),
    ] = None,
    rate: Rate = None,
    dry_run: DryRun = False,
    url: Url = None,
    namespace: Namespace = "pyqueue",
    signals: Signals = None,
    as_json: Json = False,
) -> None:
    """Move messages to another queue, each in one atomic update. Print how many were moved.

    With a condition, scheduled messages move, too.
    """
    if source == to:
        raise ConfigurationError(f"TO: the messages are already in {to!r}; name another queue")
    chosen = Chosen(where, state, older, error, limit=limit, rate=rate, dry_run=dry_run)
    selects = chosen.needs_filter()
    with connect(url, namespace, signals) as client:
        refuse_unknown(client, source, "FROM")
        from_queue = queue_with_stored_options(client, source)
        to_queue = queue_with_stored_options(client, to)
        if selects:
            chosen.change(from_queue, "moved", partial(Selection.move, to=to_queue), as_json)
            return
        moved = _move_ready(from_queue, to_queue, limit)
        if not moved:
            note_if_paused(from_queue)
    emit({"moved": moved}) if as_json else print(moved)


def _move_ready(from_queue: Queue[Any], to_queue: Queue[Any], limit: int | None) -> int:
    """Move the ready messages, as a consumer. Return how many."""
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
def redrive(
    name: Annotated[
        str, typer.Argument(metavar="QUEUE", help="The dead-letter queue, such as orders.dead.")
    ],
    where: Where = None,
    older: Older = None,
    error: ErrorType = None,
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="How many messages. Default: all.")
    ] = None,
    rate: Rate = None,
    dry_run: DryRun = False,
    url: Url = None,
    namespace: Namespace = "pyqueue",
    signals: Signals = None,
    as_json: Json = False,
) -> None:
    """Send dead messages back to the queues that they came from. Print how many were sent."""
    chosen = Chosen(where, None, older, error, limit=limit, rate=rate, dry_run=dry_run)
    with connect(url, namespace, signals) as client:
        refuse_unknown(client, name)
        source = queue_with_stored_options(client, name)
        if chosen.filters or dry_run or rate is not None:
            dead = chosen._replace(state="dead")
            dead.change(source, "moved", Selection.redrive, as_json)
            return
        moved = source.redrive(limit)
        dead_letter = backend_of(source).options.dead_letter
        if not moved and client.queue(dead_letter).counts().total:
            note(f"{name!r} has no dead messages; its dead-letter queue is {dead_letter!r}")
    emit({"moved": moved}) if as_json else print(moved)
