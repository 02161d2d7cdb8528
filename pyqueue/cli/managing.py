"""The commands that manage queues and messages: pause, resume, reshape, cancel and rm."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from pyqueue import Client, ConfigurationError, Selection
from pyqueue.cli.common import (
    Commands,
    Json,
    Namespace,
    QueueName,
    Signals,
    Url,
    connect,
    duration,
    emit,
    note,
    parse_id,
    queue_with_stored_options,
    refuse_unknown,
    report_pause,
)
from pyqueue.cli.limits import limit_of, limit_text
from pyqueue.cli.option_groups import Server, grouped
from pyqueue.cli.selecting import Chosen, Selected, WaitingState

app = typer.Typer(cls=Commands)


# ---- pause, resume


@app.command()
def pause(
    name: QueueName,
    url: Url = None,
    namespace: Namespace = "pyqueue",
    signals: Signals = None,
    as_json: Json = False,
) -> None:
    """Stop the delivery of messages, in every process. Pushes still work."""
    with connect(url, namespace, signals) as client:
        _set_paused(client, name, as_json, pause=True)


@app.command()
def resume(
    name: QueueName,
    url: Url = None,
    namespace: Namespace = "pyqueue",
    signals: Signals = None,
    as_json: Json = False,
) -> None:
    """Resume the delivery of messages."""
    with connect(url, namespace, signals) as client:
        _set_paused(client, name, as_json, pause=False)


def _set_paused(client: Client, name: str, as_json: bool, *, pause: bool) -> None:
    refuse_unknown(client, name)
    target = queue_with_stored_options(client, name)
    (target.pause if pause else target.resume)()
    report_pause("queue", target.name, as_json, paused=pause)


# ---- reshape


def _time_or_none(value: object) -> float:
    return False if value == "none" else duration("--auto-delete")(value)


Retention = Annotated[
    float | None,
    typer.Option(
        metavar="DURATION",
        parser=duration("--retention"),
        help="For a stream: how long messages are kept.",
    ),
]
AutoDelete = Annotated[
    float | None,
    typer.Option(
        metavar="DURATION",
        parser=_time_or_none,
        help="After how long the queue is deleted if it is unused and empty; none: never.",
    ),
]


@app.command()
def reshape(
    name: QueueName,
    strict: Annotated[
        bool | None,
        typer.Option(
            "--strict/--no-strict",
            help="For a queue with priorities: whether high priorities may starve low ones.",
        ),
    ] = None,
    on_failure: Annotated[
        Literal["block", "skip"] | None,
        typer.Option(help="For an ordered queue: whether a group waits for a failed message."),
    ] = None,
    retention: Retention = None,
    pack: Annotated[
        int | None,
        typer.Option(metavar="N", help="For a bucket: the maximum number of messages in a pack."),
    ] = None,
    limit: Annotated[
        str | None,
        typer.Option(
            metavar="LIMIT",
            help="The limit of all consumers together: concurrency=10,per=headers.tenant, or "
            "rate=100,period=60,burst=20, or both; none removes it.",
        ),
    ] = None,
    auto_delete: AutoDelete = None,
    url: Url = None,
    namespace: Namespace = "pyqueue",
    signals: Signals = None,
    as_json: Json = False,
) -> None:
    """Change the options that all programs of a queue share. Programs adopt them within 5 s."""
    new = None if limit is None else limit_of(limit)
    with connect(url, namespace, signals) as client:
        refuse_unknown(client, name)
        client.reshape(
            name,
            strict=strict,
            on_failure=on_failure,
            retention=retention,
            pack=pack,
            limit=new,
            auto_delete=auto_delete,
        )
    given = {
        "strict": strict,
        "on_failure": on_failure,
        "retention": retention,
        "pack": pack,
        "limit": limit_text(new) if new else limit,
        "auto_delete": "none" if auto_delete == 0 else auto_delete,
    }
    changed = {option: value for option, value in given.items() if value is not None}
    if as_json:
        emit({"queue": name, **changed})
    else:
        print(f"{name}: {', '.join(f'{option}={value}' for option, value in changed.items())}")


# ---- cancel


@app.command()
def cancel(
    id: Annotated[str, typer.Argument(metavar="ID", help="The message's id.")],
    force: Annotated[
        bool, typer.Option("--force", help="End the message at once, even if a consumer holds it.")
    ] = False,
    url: Url = None,
    namespace: Namespace = "pyqueue",
    signals: Signals = None,
    as_json: Json = False,
) -> None:
    """Cancel a message in any queue.

    Print "cancelled", or "requested" if a consumer holds the message and was asked to end it. The
    exit status is 1 if there is no such message, or if it is finished.
    """
    with connect(url, namespace, signals) as client:
        result = client.cancel(id, force)
    if as_json:
        emit({"id": parse_id(id), "result": result})
    elif result is not None:
        print(result)
    if result is None:
        note(f"no message with id {id} in namespace {namespace!r}, or it is finished")
        raise typer.Exit(1)


# ---- rm


@app.command()
@grouped
def rm(
    name: QueueName,
    chosen: Chosen,
    server: Server,
    force: Annotated[
        bool, typer.Option("--force", help="Also delete its messages, reserved messages included.")
    ] = False,
    state: WaitingState = None,
) -> None:
    """Delete a queue with its history. Print how many messages were deleted.

    A queue with messages needs --force. Programs that still use the queue create it again. With a
    condition, such as --where, only the messages that match are removed, and the queue stays.
    """
    selected = Selected(chosen, state)
    selects = selected.needs_filter()
    if selects and force:
        raise ConfigurationError(
            "--force: has no use here, because messages that a consumer holds cannot be selected; "
            "leave out --force"
        )
    if chosen.limit is not None and not selects:
        raise ConfigurationError(
            "--limit: needs a condition; add --where, --state, --older or --error"
        )
    with connect(server.url, server.namespace, server.signals) as client:
        refuse_unknown(client, name)
        if selects:
            queue = queue_with_stored_options(client, name)
            selected.change(queue, "removed", Selection.remove, server.as_json)
            return
        deleted = client.delete_queue(name, force)
    emit({"deleted": deleted}) if server.as_json else print(deleted)
