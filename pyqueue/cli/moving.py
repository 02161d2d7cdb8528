"""The commands that move messages between queues: move and redrive."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer

from pyqueue import Client, ConfigurationError, LeaseLost, Queue, Selection
from pyqueue.cli.common import (
    Commands,
    connect,
    emit,
    note,
    parse_id,
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
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ID]...", help="Send only the messages with these ids."),
    ] = None,
) -> None:
    """Send dead messages back to the queues that they came from. Print how many were sent.

    If ids are given, the exit status is 1 if the queue has no dead message with one of them.
    """
    if ids and any(each not in (None, [], False) for each in chosen):
        raise ConfigurationError(
            "ID: ids select the messages, so no option can; leave out the ids, or --where, "
            "--older, --error, --limit, --rate and --dry-run"
        )
    with connect(server.url, server.namespace, server.signals) as client:
        refuse_unknown(client, name)
        source = queue_with_stored_options(client, name)
        if ids:
            _redrive_ids(client, source, ids, server.as_json)
            return
        if Selected(chosen, None).filters or chosen.dry_run or chosen.rate is not None:
            dead = Selected(chosen, "dead")
            dead.change(source, "moved", Selection.redrive, server.as_json)
            return
        moved = source.redrive(chosen.limit)
        dead_letter = backend_of(source).options.dead_letter
        if not moved and client.queue(dead_letter).counts().total:
            note(f"{name!r} has no dead messages; its dead-letter queue is {dead_letter!r}")
    emit({"moved": moved}) if server.as_json else print(moved)


def _redrive_ids(client: Client, source: Queue[Any], ids: list[str], as_json: bool) -> None:
    """Send the dead messages with these ids back. Print how many, and name the ids left out."""
    moved = 0
    for id in map(parse_id, dict.fromkeys(ids)):
        found = client.find(id)
        if found is not None and found.queue == source.name and found.state == "dead":
            moved += source.requeue(id)
        elif found is None:
            note(f"no queue of namespace {client.namespace!r} has a message with id {id}")
        else:
            note(f"{id} is not dead in {source.name!r}: it is in {found.queue!r} ({found.state})")
    emit({"moved": moved}) if as_json else print(moved)
    if moved < len(set(ids)):
        raise typer.Exit(1)
