"""``pyqueue doctor``: is everything as the queues need it? Each line says OK, or what to do.

It changes nothing: no index is made, no message written (the bus is tried on a topic of its own). It never prints a credential: what it
shows of a server are the addresses that the server itself gives.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal
from urllib.parse import parse_qsl, urlencode
from uuid import uuid4

import pymongo
import typer
from bson import MaxKey, MinKey
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.datetime_ms import DatetimeMS
from pymongo import ReadPreference, WriteConcern
from pymongo.errors import OperationFailure, PyMongoError

import signals as buses
from pyqueue import Client, QueueError
from pyqueue.backends.namespace import HOT, INDEXES
from pyqueue.cli.common import REACH, Commands, Json, Namespace, Signals, Url, emit, target
from pyqueue.drivers import translated

__all__ = ["app"]

app = typer.Typer(cls=Commands)

#: "advice": it works, and could be better or could not be asked; only "wrong" makes the exit status 1.
Level = Literal["ok", "advice", "wrong"]

OLDEST = (6, 0)
SAMPLES = 5
SHOWN = 10  # documents looked at
APART = 1.0  # seconds between clocks that deserve a word
NOT_AUTHORIZED = {13, 8000}


@dataclass(frozen=True)
class Finding:
    """A line of the answer."""

    check: str
    level: Level
    text: str


@app.command()
def doctor(
    quiet: bool = typer.Option(
        False, "--quiet", "-q", help="Print nothing: the exit status is the answer."
    ),
    url: Url = None,
    namespace: Namespace = "pyqueue",
    signals: Signals = None,
    as_json: Json = False,
) -> None:
    """Look whether server, indexes, clocks and bus are as they should be. Changes nothing; exit status 1 if something is wrong."""
    wrong = False
    try:
        with target(url, namespace, signals) as client:
            for finding in findings(client, signals):
                wrong |= finding.level == "wrong"
                if not quiet:
                    _show(finding, as_json)
    except QueueError:
        if quiet:
            raise typer.Exit(2) from None
        raise
    raise typer.Exit(1 if wrong else 0)


def _show(finding: Finding, as_json: bool) -> None:
    if as_json:
        emit(asdict(finding))
    else:
        mark = {"ok": "OK", "advice": "NOTE", "wrong": "WRONG"}[finding.level]
        print(f"{finding.check:<17}{mark:<7}{finding.text}", flush=True)


def findings(client: Client, signals: str | None) -> Iterator[Finding]:
    """All lines; only the first if the server cannot be reached."""
    database = client.database
    with pymongo.timeout(REACH):
        try:
            begun = time.monotonic()
            hello = database.command("hello")
            elapsed = time.monotonic() - begun
        except PyMongoError as error:
            yield Finding(
                "reach", "wrong", f"{translated(error)}; is it running, and is the URL right?"
            )
            return
    where = hello.get("me") or ":".join(map(str, database.client.address or ()))
    yield Finding("reach", "ok", f"{where} answers, in {elapsed * 1000:.0f} ms with the connection")
    checks: dict[str, Callable[[], Finding]] = {
        "permission": lambda: _permission(client),
        "version": lambda: _version(database),
        "kind": lambda: _kind(hello),
        "write concern": lambda: _write_concern(client),
        "retryable writes": lambda: _retryable(hello),
        "indexes": lambda: _indexes(client),
        "documents": lambda: _documents(client),
        "clock": lambda: _clock(database),
        "member clocks": lambda: _members(client, hello),
        "bus": lambda: _bus(client, signals),
        "parameters": lambda: _parameters(database),
    }
    for name, check in checks.items():
        try:
            with pymongo.timeout(2 * REACH):
                yield check()
        except OperationFailure as error:
            if error.code not in NOT_AUTHORIZED:
                yield Finding(name, "wrong", str(translated(error)))
            elif name in ("permission", "write concern"):
                yield Finding(
                    name, "wrong", "this user may not; see docs/how-to/least-privileges.md"
                )
            else:
                yield Finding(name, "advice", "this user may not ask; nothing to do if it works")
        except PyMongoError as error:
            yield Finding(name, "wrong", str(translated(error)))


def _permission(client: Client) -> Finding:
    # Not found; but a user who may not look is told so.
    client.database[client.namespace].find_one({"_id": "~doctor"})
    return Finding("permission", "ok", f"may read {client.database.name}.{client.namespace}")


def _version(database: Any) -> Finding:
    version = database.client.server_info()["version"]
    if tuple(map(int, version.split(".")[:2])) < OLDEST:
        return Finding(
            "version",
            "wrong",
            f"MongoDB {version}: {OLDEST[0]}.{OLDEST[1]} or later is needed: upgrade it",
        )
    return Finding("version", "ok", f"MongoDB {version}")


def _kind(hello: Any) -> Finding:
    if hello.get("msg") == "isdbgrid":
        return Finding(
            "kind", "ok", "a sharded cluster, through mongos: keep the namespace unsharded"
        )
    if "setName" not in hello:
        return Finding(
            "kind",
            "advice",
            "a standalone: no transactions, and more outcomes unknown after a fault; one node as a replica set has both "
            "(mongod --replSet, then rs.initiate())",
        )
    arbiters = len(hello.get("arbiters", ()))
    size = len(hello.get("hosts", ())) + len(hello.get("passives", ())) + arbiters
    text = f"replica set {hello['setName']!r}, {size} member{'s' if size > 1 else ''}"
    if arbiters:
        return Finding(
            "kind",
            "advice",
            f"{text}, {arbiters} of them without data: writes stop when one with data is down",
        )
    return Finding("kind", "ok", text)


def _write_concern(client: Client) -> Finding:
    """A delete that matches nothing waits for the majority like any other write."""
    sure = WriteConcern("majority", wtimeout=int(REACH * 1000), j=True)
    begun = time.monotonic()
    client.database[client.namespace].with_options(write_concern=sure).delete_one(
        {"_id": "~doctor"}
    )
    return Finding(
        "write concern",
        "ok",
        f"majority and journal answer, in {(time.monotonic() - begun) * 1000:.0f} ms",
    )


def _retryable(hello: Any) -> Finding:
    if "setName" in hello or hello.get("msg") == "isdbgrid":
        return Finding("retryable writes", "ok", "the server has them, and pyqueue uses them")
    return Finding(
        "retryable writes",
        "advice",
        "a standalone has none: a push that failed is repeated with its id",
    )


def _indexes(client: Client) -> Finding:
    there = client.database[
        client.namespace
    ].index_information()  # of a collection that is not there: none
    if not there:
        return Finding("indexes", "ok", "the namespace is empty: its first client makes them")
    missing = [name for name in INDEXES if name not in there]
    if missing:
        return Finding(
            "indexes",
            "wrong",
            f"missing: {', '.join(missing)}; any client that may create indexes makes them when it starts (pyqueue ls, say); "
            "for an administrator's commands see docs/how-to/least-privileges.md",
        )
    other = [
        name
        for name, (keys, options) in INDEXES.items()
        if list(there[name]["key"]) != keys
        or any(there[name].get(each) != value for each, value in options.items())
    ]
    if other:
        return Finding(
            "indexes",
            "wrong",
            f"not as they should be: {', '.join(other)}; drop them, then start a client",
        )
    return Finding("indexes", "ok", ", ".join(INDEXES))


LEAST, MOST = MinKey(), MaxKey()
#: Where in a queue's part of the index no message stands: what is no instant, and instants that are neither a message's nor a finished one's,
#: which are those of 7000 years ago.
NOWHERE: list[tuple[Any, Any]] = [
    (LEAST, DatetimeMS(-(1 << 63))),
    (datetime(8000, 1, 1, tzinfo=UTC), datetime(9020, 1, 1, tzinfo=UTC)),
    (datetime(9500, 1, 1, tzinfo=UTC), MOST),
]


def _documents(client: Client) -> Finding:
    """Look for what no look of a queue finds. The index tells, so it costs little however many messages there are."""
    options = CodecOptions[dict[str, Any]](datetime_conversion=DatetimeConversion.DATETIME_AUTO)
    collection = client.database[client.namespace].with_options(codec_options=options)
    if HOT not in collection.index_information():
        return Finding("documents", "ok", "nothing to look at without the indexes")

    def between(*ends: tuple[Any, Any]) -> list[Any]:
        least, most = (
            [("q", q), ("when", when), ("_id", MOST if when == MOST else LEAST)] for q, when in ends
        )
        found = collection.find(
            {"_id": {"$not": {"$regex": "^~"}}}, {"_id": 1}, limit=SHOWN, hint=HOT
        )
        return [each["_id"] for each in found.min(least).max(most)]

    names = [name for name in collection.distinct("q") if isinstance(name, str)]
    hidden = {
        f"queue {name!r}": [
            id for first, last in NOWHERE for id in between((name, first), (name, last))
        ]
        for name in names
    }
    hidden["no queue"] = between((LEAST, LEAST), ("", LEAST)) + between(({}, LEAST), (MOST, MOST))
    told = [f"of {where}: {_some(ids)}" for where, ids in hidden.items() if ids]
    if told:
        text = "no receive will ever find these, since their `when` is no instant for it, or their `q` no name: "
        return Finding(
            "documents",
            "advice",
            f"{text}{'; '.join(told)}; others wrote them: mend or delete them by hand",
        )
    return Finding("documents", "ok", "all of them are where receives look")


def _some(ids: list[Any]) -> str:
    return ", ".join(map(str, ids[:3])) + (" and more" if len(ids) > 3 else "")


# ---- clocks


def _offset(command: Callable[[], Any]) -> float:
    """Seconds by which the clock of who answers is ahead of this machine's; by the quickest of some answers."""
    samples = []
    for _ in range(SAMPLES):
        sent, begun = time.time(), time.monotonic()
        told = command()["localTime"]
        elapsed = time.monotonic() - begun
        aware = told if told.tzinfo else told.replace(tzinfo=UTC)
        samples.append((elapsed, aware - datetime.fromtimestamp(sent + elapsed / 2, UTC)))
    offset: timedelta = min(samples, key=lambda each: each[0])[1]
    return offset.total_seconds()


def _clock(database: Any) -> Finding:
    offset = _offset(lambda: database.command("hello"))
    text = f"the primary's is {abs(offset):.3f} s {'ahead of' if offset > 0 else 'behind'} this machine's"
    if abs(offset) < APART:
        return Finding("clock", "ok", text)
    return Finding(
        "clock",
        "advice",
        f"{text}; pyqueue goes by the primary's, so only logs differ: run NTP on both",
    )


def _members(client: Client, hello: Any) -> Finding:
    """Asks each member itself; ``hello`` needs no credentials, so none are sent."""
    hosts = [*hello.get("hosts", ()), *hello.get("passives", ())]
    if len(hosts) < 2:
        return Finding("member clocks", "ok", "one member has one clock")
    url = client.url or ""
    if not url.startswith("mongodb://"):
        return Finding(
            "member clocks", "advice", f"not measured for {url.partition(':')[0] or 'this target'}"
        )
    refused = ("replicaset", "auth", "readpreference", "directconnection")
    options = [
        pair for pair in parse_qsl(url.partition("?")[2]) if not pair[0].lower().startswith(refused)
    ]
    query = urlencode(
        [*options, ("directConnection", "true"), ("serverSelectionTimeoutMS", "2000")]
    )
    offsets, silent = {}, []
    for host in hosts:
        try:
            with pymongo.MongoClient[dict[str, Any]](f"mongodb://{host}/?{query}") as member:
                offsets[host] = _offset(
                    lambda member=member: member.admin.command(
                        "hello", read_preference=ReadPreference.NEAREST
                    )  # type: ignore[misc]
                )
        except PyMongoError:
            silent.append(host)
    if silent:
        return Finding(
            "member clocks",
            "wrong",
            f"no answer from {', '.join(silent)}: is it running, and reachable from here?",
        )
    spread = max(offsets.values()) - min(offsets.values())
    text = f"{spread:.3f} s between the {len(hosts)} members"
    if spread < APART:
        return Finding("member clocks", "ok", text)
    return Finding(
        "member clocks",
        "wrong",
        f"{text}: a fail-over shifts leases and delays by that; run NTP on them",
    )


# ---- the bus, the parameters


def _bus(client: Client, signals: str | None) -> Finding:
    name = (signals or "capped:").partition(":")[0]
    if name == "none":
        return Finding("bus", "ok", "none: consumers look every `poll` seconds")
    try:
        bus = buses.open(signals or "capped:", client.database)
    except buses.BusError as error:
        return Finding("bus", "wrong", str(error))
    try:
        bus.check() if hasattr(bus, "check") else None
        topic = f"{client.database.name}/{client.namespace}/~doctor-{uuid4().hex[:12]}"
        with bus.listen(topic) as listener:
            begun = time.monotonic()
            bus.emit(topic, datetime.now(UTC))
            if listener.wait(REACH):
                return Finding(
                    "bus", "ok", f"{name}: heard in {(time.monotonic() - begun) * 1000:.0f} ms"
                )
        return Finding(
            "bus",
            "wrong",
            f"{name}: nothing heard in {REACH:g} s; consumers find messages at their `poll` only",
        )
    except buses.BusError as error:
        return Finding("bus", "wrong", f"{name}: {error}")
    finally:
        bus.close()


#: Server parameters that matter, what one wants of them, and why.
PARAMETERS: dict[str, tuple[Callable[[int], bool], str]] = {
    "minSnapshotHistoryWindowInSeconds": (
        lambda value: value <= 300,
        "keeps that many seconds of deleted messages in the indexes; 300 is the default, and less makes room sooner",
    ),
    "transactionLifetimeLimitSeconds": (
        lambda value: value >= 30,
        "ends your transactions that early; 60 is the default",
    ),
}


def _parameters(database: Any) -> Finding:
    there = {}
    for name in PARAMETERS:
        try:
            there[name] = int(database.client.admin.command("getParameter", 1, **{name: 1})[name])
        except OperationFailure as error:
            if error.code in NOT_AUTHORIZED:
                raise
    advice = [
        f"{name}={there[name]}: {why}"
        for name, (good, why) in PARAMETERS.items()
        if name in there and not good(there[name])
    ]
    if advice:
        return Finding("parameters", "advice", "; ".join(advice))
    return Finding(
        "parameters",
        "ok",
        ", ".join(f"{name}={value}" for name, value in there.items()) or "none to look at",
    )
