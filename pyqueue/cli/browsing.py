"""``pyqueue browse QUEUE``: the messages of a queue in any state."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal

import typer

from pyqueue import Message
from pyqueue.cli.common import (
    DEFERRED,
    Commands,
    Json,
    Namespace,
    QueueName,
    Url,
    age,
    as_json_text,
    connect,
    emit,
    queue_with_stored_options,
    refuse_unknown,
    table,
)
from pyqueue.cli.queues import to_json
from pyqueue.cli.selecting import Where, conditions

app = typer.Typer(cls=Commands)


@app.command()
def browse(
    name: QueueName,
    state: Annotated[
        Literal["scheduled", "ready", "reserved", "finished", "dead"] | None,
        typer.Option(help="Only messages in this state."),
    ] = None,
    where: Where = None,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Show at most N messages.")] = 10,
    newest: Annotated[
        bool, typer.Option("--newest", help="Begin at the end of the queue.")
    ] = False,
    url: Url = None,
    namespace: Namespace = "pyqueue",
    as_json: Json = False,
) -> None:
    """Show the messages of a queue in any state, and leave them in the queue."""
    wanted = conditions(where or [])
    found: list[Message[Any]] = []
    with connect(url, namespace) as client:
        refuse_unknown(client, name)
        queue = queue_with_stored_options(client, name)
        after = None
        while len(found) < limit:
            page = queue.browse(state, wanted, after, limit - len(found), newest)
            found += page.messages
            if page.complete:
                break
            after = page.after
    if as_json:
        for each in found:
            emit(to_json(each))
        return
    terminal = sys.stdout.isatty()
    rows = [
        {"id": each.id, "state": each.state, "tries": each.tries, "why": _why(each)}
        | {"when": age(each.when) if terminal else each.when}
        | {"payload": as_json_text(each.payload)[: 200 if terminal else None]}
        for each in found
    ]
    table(("id", "state", "when", "tries", "payload", "why"), rows, right=("tries",))


def _why(message: Message[Any]) -> str | None:
    """Return why a message waits, or why its last try failed."""
    if message.deferred is not None:
        return f"waits for {DEFERRED[message.deferred]}"
    return None if message.error is None else str(message.error.get("message"))
