"""The commands for messages that have ended: get, history and replay."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from pyqueue import Finished, JobFailed, Message
from pyqueue.cli.common import (
    Commands,
    Json,
    Namespace,
    QueueName,
    Signals,
    Url,
    age,
    as_json_text,
    connect,
    duration,
    emit,
    note,
    parse_id,
    parse_instant,
    queue_with_stored_options,
    refuse_unknown,
    table,
)
from pyqueue.cli.queues import to_json

app = typer.Typer(cls=Commands)


def ended_to_json(message: Message[Any]) -> dict[str, Any]:
    """Return the fields of a message, including how and when it ended."""
    if not isinstance(message, Finished):
        return to_json(message)
    return to_json(message) | {
        name: getattr(message, name) for name in ("outcome", "processed", "result")
    }


@app.command()
def get(
    id: Annotated[str, typer.Argument(metavar="ID", help="The message's id.")],
    wait: Annotated[
        float | None,
        typer.Option(
            parser=duration("--wait"),
            metavar="DURATION",
            help="Wait until the message has finished, and print its result.",
        ),
    ] = None,
    url: Url = None,
    namespace: Namespace = "pyqueue",
    signals: Signals = None,
    as_json: Json = False,
) -> None:
    """Print the payload of a message in any queue as JSON or, with --json, the whole message.

    With --wait, print the result in place of the payload. The exit status is 1 if there is no such
    message, or if it has failed or not finished.
    """
    with connect(url, namespace, signals) as client:
        try:
            wanted = parse_id(id)
            found = client.find(wanted) if wait is None else client.wait(wanted, wait)
        except (JobFailed, TimeoutError) as error:
            note(str(error))
            raise typer.Exit(1) from None
    if found is None:
        note(f"no queue of namespace {namespace!r} has a message with id {id}")
        raise typer.Exit(1)
    if as_json:
        emit(ended_to_json(found))
    else:
        emit(found.payload if wait is None else getattr(found, "result", None))


@app.command()
def history(
    name: QueueName,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Show at most N messages.")] = 10,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="INSTANT", help="Only messages that finished since INSTANT: 2030-01-31T08:00Z."
        ),
    ] = None,
    url: Url = None,
    namespace: Namespace = "pyqueue",
    as_json: Json = False,
) -> None:
    """Show the finished messages that a queue keeps, newest first."""
    start = None if since is None else parse_instant("--since", since)
    with connect(url, namespace) as client:
        refuse_unknown(client, name)
        found = queue_with_stored_options(client, name).history(limit, since=start)
    if as_json:
        for each in found:
            emit(ended_to_json(each))
        return
    terminal = sys.stdout.isatty()
    rows = [
        {"id": each.id, "outcome": each.outcome, "tries": each.tries}
        | {"finished": age(each.processed) if terminal else each.processed}
        | {"took": _seconds(each)}
        | {"payload": as_json_text(each.payload)[: 200 if terminal else None]}
        for each in found
    ]
    table(("id", "finished", "outcome", "tries", "took", "payload"), rows, right=("tries", "took"))


def _seconds(message: Finished[Any]) -> str:
    """Return how long a message took from its push to its end, or "" if no consumer had it."""
    if message.outcome not in ("popped", "committed") and not message.deliveries:
        return ""
    return f"{(message.processed - message.pushed).total_seconds():.3f} s"


@app.command()
def replay(
    name: QueueName,
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="The ids of the messages.")],
    url: Url = None,
    namespace: Namespace = "pyqueue",
    signals: Signals = None,
    as_json: Json = False,
) -> None:
    """Make finished messages ready again. Print how many of them the history contained.

    The exit status is 1 if the history contained none of them.
    """
    with connect(url, namespace, signals) as client:
        refuse_unknown(client, name)
        number = queue_with_stored_options(client, name).replay(*map(parse_id, ids))
    emit({"replayed": number}) if as_json else print(number)
    if not number:
        raise typer.Exit(1)
