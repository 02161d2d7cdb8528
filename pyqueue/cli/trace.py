"""``pyqueue trace ID``: where a message is, how it got there, who holds it, and its failures."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any

import typer

from pyqueue.arguments import identity
from pyqueue.backends import finding
from pyqueue.backends.reading import options_of
from pyqueue.cli.common import (
    DEFERRED,
    Commands,
    Json,
    Namespace,
    Url,
    as_json_text,
    cell,
    connect,
    emit,
    note,
    parse_id,
)
from pyqueue.documents import invalid_fields, mark_dead, message_of, without_fields
from pyqueue.messages import StreamMessage
from pyqueue.runtime.connecting import runner_of

app = typer.Typer(cls=Commands)


@app.command()
def trace(
    id: Annotated[str, typer.Argument(metavar="ID", help="The message's id.")],
    url: Url = None,
    namespace: Namespace = "pyqueue",
    as_json: Json = False,
) -> None:
    """Find a message in any queue or stream, and show its history.

    A finished message is found as long as the history of its queue keeps it. The exit status is 1
    if there is no such message.
    """
    ids = dict.fromkeys((identity(parse_id(id)), id))  # an id like an ObjectId may be a string
    with connect(url, namespace) as client:
        run = runner_of(client).run
        now, documents = run(finding.documents(list(ids)))
        options = [run(options_of(str(document.get("q")))) for document in documents]
        found = [
            to_json(document, now, each.get("max_tries"))
            for document, each in zip(documents, options, strict=True)
        ]
        if not found and (message := run(finding.in_stream(id))) is not None:
            found = [of_stream(message)]
    if not found:
        note(
            f"no message with id {id} in namespace {namespace!r}: it never existed, "
            "or it is finished and its queue keeps no history"
        )
        raise typer.Exit(1)
    for each in found:
        emit(each) if as_json else show(each)


def to_json(document: Mapping[str, Any], now: datetime, max_tries: int | None) -> dict[str, Any]:
    """Return the facts about a stored message. Facts without a value are left out.

    Args:
        document: The stored message.
        now: The time of the server.
        max_tries: The maximum number of tries in the queue, or None if it is unknown.
    """
    invalid = invalid_fields(document)
    invalid_values = {name: document[name] for name in invalid}
    document = without_fields(document, invalid)
    message = mark_dead(message_of(document, document.get("payload"), now))
    lease = None
    if "token" in document and "processed" not in document:  # a finished message may keep it
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
        "deferred": message.deferred,
        "type": document.get("type"),
        "key": message.key,
        "headers": message.headers,
        "pushed": message.pushed,
        "when": message.when,
        "tries": message.tries,
        "max_tries": max_tries,
        "deliveries": message.deliveries,
        "lease": lease,
        "cancel": None if "processed" in document else document.get("cancel"),
        "progress": message.progress,
        "checkpoint": message.checkpoint,
        "error": message.error,
        "attempts": [asdict(each) for each in message.attempts],
        "dead": message.dead,
        "outcome": document.get("outcome"),
        "processed": document.get("processed"),
        "expires": document.get("expires"),
        "trail": message.trail,
        "wrong": invalid_values,
        "payload": message.payload,
    }
    return {
        name: value
        for name, value in facts.items()
        if value not in (None, {}, []) or name == "payload"
    }


def of_stream(message: StreamMessage[Any]) -> dict[str, Any]:
    """Return the facts about a message of a stream. Its consumer groups keep no facts about it."""
    names = ("id", "queue", "state", "position", "headers", "pushed", "when", "tries", "payload")
    facts = {name: getattr(message, name) for name in names}
    return {name: value for name, value in facts.items() if name != "headers" or value}


def show(facts: Mapping[str, Any]) -> None:
    """Print one line for each fact."""
    _line("message", facts["id"])
    _line("queue", facts["queue"])
    _line("state", _state(facts))
    if why := facts.get("deferred"):
        _line("waits", f"for {DEFERRED[why]}")
    _line("pushed", cell(facts["pushed"]))
    for stop in facts.get("trail", ()):
        _line("passed", _stop(stop))
    most = f" of {facts['max_tries']}" if "max_tries" in facts else ""
    _line("tries", f"{facts['tries']}{most}")
    if "deliveries" in facts:  # a stream counts none
        _line("deliveries", facts["deliveries"])
    if lease := facts.get("lease"):
        _line("held by", _holder(lease))
    if asked := facts.get("cancel"):
        _line("cancelled", f"at {cell(asked)}: it ends unless its holder commits it")
    if progress := facts.get("progress"):
        fraction = progress.get("fraction")
        percent = f"{fraction:.0%}" if isinstance(fraction, (int, float)) else cell(fraction)
        _line("progress", f"{percent} {progress.get('note') or ''} at {cell(progress.get('at'))}")
    for attempt in facts.get("attempts", ()):
        _line(f"try {attempt['number']}", _attempt(attempt))
    if error := facts.get("error"):
        _line("failed", f"{error.get('type')}: {error.get('message')} at {cell(error.get('at'))}")
        for line in str(error.get("trace", "")).splitlines():
            _line("", line)
        if "fp" in error:
            _line("", f"fingerprint {error['fp']}")
    if dead := facts.get("dead"):
        where = f"from {dead['from']} at {cell(dead['at'])} after {dead.get('tries')} tries"
        _line("dead", f"{dead.get('reason')}: {where}")
        command = shlex.join(["pyqueue", "redrive", str(facts["queue"]), str(facts["id"])])
        _line("", f"to send it back: {command}")
    for name in ("position", "type", "key", "headers", "checkpoint"):
        if name in facts:
            _line(name, cell(facts[name]))
    for name, value in facts.get("wrong", {}).items():
        _line("wrong", f"{name} is {as_json_text(value)}: pyqueue does not write that")
    _line("payload", as_json_text(facts["payload"]))


def _line(name: str, text: object) -> None:
    print(f"{name:<11}{text}")


def _holder(lease: Mapping[str, Any]) -> str:
    text = f"{lease['owner']} since {cell(lease['since'])}, until {cell(lease['until'])}"
    return f"{text} (expired: the next consumer can claim it)" if lease["lapsed"] else text


def _stop(stop: Mapping[str, Any]) -> str:
    came = "" if stop["in"] is None else f" from {cell(stop['in'])}"
    text = f"{stop['q']}{came} until {cell(stop['out'])}"
    tries = "" if stop["tries"] is None else f", tries: {stop['tries']}"
    waited = "" if stop["waited"] is None else f", waited {stop['waited']} s for the last"
    return text + tries + waited


def _attempt(attempt: Mapping[str, Any]) -> str:
    text = f"{attempt['type']}: {attempt['message']} at {cell(attempt['at'])}"
    return f"{text}, held for {attempt['seconds']} s by {attempt['owner']}"


def _state(facts: Mapping[str, Any]) -> str:
    match facts["state"]:
        case "finished":
            done = f"{facts.get('outcome')} at {cell(facts['processed'])}"
            return f"finished: {done}, kept until {cell(facts.get('expires'))}"
        case "reserved":
            return "reserved"
        case state:
            return f"{state} from {cell(facts['when'])}"
