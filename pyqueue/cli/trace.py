"""``pyqueue trace ID``: where a message is, how it came there, who holds it, and what failed."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any

import typer

from pyqueue.arguments import identity as checked
from pyqueue.backends.namespace import find_anywhere, options_of
from pyqueue.cli.common import (
    Commands,
    Json,
    Namespace,
    Url,
    as_json_text,
    connect,
    emit,
    identity,
    note,
    shown,
)
from pyqueue.connecting import runner_of
from pyqueue.messages import invalid_fields, message_of, without_fields

__all__ = ["app"]

app = typer.Typer(cls=Commands)


@app.command()
def trace(
    id: Annotated[str, typer.Argument(metavar="ID", help="The message's id.")],
    url: Url = None,
    namespace: Namespace = "pyqueue",
    as_json: Json = False,
) -> None:
    """Find a message in whatever queue it is, and tell its story. Exit status 1 if there is none.

    A finished message is found as long as its queue's history keeps it.
    """
    ids = dict.fromkeys((checked(identity(id)), id))  # what looks like an ObjectId may be a text
    with connect(url, namespace) as client:
        now, documents = runner_of(client).run(find_anywhere(list(ids)))
        told = [
            _told(
                document,
                now,
                runner_of(client).run(options_of(str(document.get("q")))).get("max_tries"),
            )
            for document in documents
        ]
    if not told:
        note(
            f"no message has the id {id}: it is finished, and its queue keeps no history; or it never was in {namespace!r}"
        )
        raise typer.Exit(1)
    for each in told:
        emit(each) if as_json else _show(each)


def _told(document: Mapping[str, Any], now: datetime, max_tries: int | None) -> dict[str, Any]:
    """All there is to say of a stored message; what there is none of is left out."""
    wrong = invalid_fields(document)
    told = {name: document[name] for name in wrong}
    document = without_fields(document, wrong)
    message = message_of(document, document.get("payload"), now)
    lease = None
    if "token" in document:
        lease = {
            "owner": document.get("owner"),
            "since": document.get("reserved"),
            "until": document.get("when"),
            "lapsed": message.state != "reserved",
        }
    facts = {
        "id": message.id,
        "queue": message.queue,
        "state": message.state,
        "type": document.get("type"),
        "key": message.key,
        "headers": message.headers,
        "pushed": message.pushed,
        "when": message.when,
        "tries": message.tries,
        "max_tries": max_tries,
        "lease": lease,
        "progress": message.progress,
        "checkpoint": message.checkpoint,
        "error": message.error,
        "dead": message.dead,
        "outcome": document.get("outcome"),
        "processed": document.get("processed"),
        "expires": document.get("expires"),
        "trail": message.trail,
        "wrong": told,
        "payload": message.payload,
    }
    return {
        name: value
        for name, value in facts.items()
        if value not in (None, {}, []) or name == "payload"
    }


def _show(told: Mapping[str, Any]) -> None:
    """A line for each fact, in words."""

    def line(name: str, text: object) -> None:
        print(f"{name:<11}{text}")

    line("message", told["id"])
    line("queue", told["queue"])
    line("state", _state(told))
    line("pushed", shown(told["pushed"]))
    for stop in told.get("trail", ()):
        line("passed", f"{stop['q']} until {shown(stop['at'])}")
    tries = f"{told['tries']}" + (f" of {told['max_tries']}" if "max_tries" in told else "")
    line("tries", tries)
    if lease := told.get("lease"):
        line(
            "held by",
            f"{lease['owner']} since {shown(lease['since'])}, until {shown(lease['until'])}{_lapsed(lease)}",
        )
    if progress := told.get("progress"):
        fraction = progress.get("fraction")
        percent = f"{fraction:.0%}" if isinstance(fraction, (int, float)) else shown(fraction)
        line("progress", f"{percent} {progress.get('note') or ''} at {shown(progress.get('at'))}")
    if error := told.get("error"):
        line("failed", f"{error.get('type')}: {error.get('message')} at {shown(error.get('at'))}")
    if dead := told.get("dead"):
        line(
            "dead",
            f"{dead.get('reason')}: from {dead['from']} at {shown(dead['at'])} after {dead.get('tries')} tries",
        )
        line("", f"to send it back: pyqueue redrive {told['queue']}")
    for name in ("type", "key", "headers", "checkpoint"):
        if name in told:
            line(name, shown(told[name]))
    for name, value in told.get("wrong", {}).items():
        line("wrong", f"{name} is {as_json_text(value)}: pyqueue does not write that")
    line("payload", as_json_text(told["payload"]))


def _lapsed(lease: Mapping[str, Any]) -> str:
    return " (that is over: whoever comes next receives it)" if lease["lapsed"] else ""


def _state(told: Mapping[str, Any]) -> str:
    match told["state"]:
        case "finished":
            return f"finished: {told.get('outcome')} at {shown(told['processed'])}, kept until {shown(told.get('expires'))}"
        case "reserved":
            return "reserved"
        case state:
            return f"{state} from {shown(told['when'])}"
