"""``pyqueue doctor``: check that the server, the indexes, the clocks and the bus suit the queues.

Each line says OK or names a remedy. The doctor creates no index and pushes no message, and it tries
the bus on a separate topic. As consumers do, it completes pushes and handovers that a crash left
half done, ends expired messages and gathers that are due, and deletes unused queues with
``auto_delete``. It never prints credentials: it shows the addresses that the server gives.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl, urlencode

import pymongo
import typer
from pymongo import ReadPreference, WriteConcern
from pymongo.database import Database
from pymongo.errors import OperationFailure, PyMongoError

import signals as buses
from pyqueue import Client, QueueError
from pyqueue.backends.bulk import stages
from pyqueue.backends.claims.groups import all_groups
from pyqueue.backends.indexes import (
    FORMER_INDEXES,
    GATHER_INDEXES,
    INDEXES,
    indexes_of,
    shell_command,
)
from pyqueue.backends.namespace import HOT, RECORD_IDS
from pyqueue.backends.recovering import recover_all
from pyqueue.cli.common import (
    CONNECT_TIMEOUT_S,
    Commands,
    Json,
    Namespace,
    Signals,
    Url,
    emit,
    unconnected,
)
from pyqueue.cli.documents_check import hidden_documents
from pyqueue.cli.gathers_check import are_used, gathers
from pyqueue.cli.limits import wrong_limits
from pyqueue.cli.spark_check import described
from pyqueue.cli.streams_check import check_stream, streams
from pyqueue.cli.unused_check import unused_queues
from pyqueue.errors import NotPermitted
from pyqueue.runtime.connecting import runner_of
from pyqueue.runtime.server_errors import translated

app = typer.Typer(cls=Commands)

#: "advice": it works but could be better, or it could not be checked. Only "wrong" makes the exit
#: status 1.
Level = Literal["ok", "advice", "wrong"]
Document = Mapping[str, Any]

OLDEST_VERSION = (6, 0)
CLOCK_SAMPLES = 5
#: The maximum number of faults of streams that are listed.
MAX_SHOWN = 5
#: The maximum number of hidden rows that are counted.
MAX_ROWS = 10_000
#: How long to wait for the answer of a member, to compare the clocks.
MEMBER_TIMEOUT_S = 2.0
#: A larger difference between two clocks is reported.
MAX_CLOCK_DIFFERENCE_S = 1.0
NOT_AUTHORIZED = {13, 8000}
#: No document has this id.
UNUSED_ID = "~doctor"


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    check: str
    level: Level
    text: str


@app.command()
def doctor(
    quiet: bool = typer.Option(
        False, "--quiet", "-q", help="Print nothing; the exit status gives the result."
    ),
    url: Url = None,
    namespace: Namespace = "pyqueue",
    signals: Signals = None,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Delete hidden rows of Spark writes, if older than a day."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Check the server, the indexes, the clocks and the bus.

    Without --repair it only does what consumers do, too: it ends expired messages and gathers that
    are due, deletes unused queues with auto_delete, and completes pushes of processes that died.
    The exit status is 1 if something is wrong.
    """
    wrong = False
    try:
        with unconnected(url, namespace, signals) as client:
            for finding in findings(client, signals, repair=repair):
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


def findings(client: Client, signals: str | None, *, repair: bool = False) -> Iterator[Finding]:
    """Yield a finding for each check, or only the first if the server cannot be reached.

    Args:
        client: A client, which may not have connected to the server yet.
        signals: The URL of the bus, or None for the default.
        repair: Whether to delete hidden rows of Spark writes that are older than a day.
    """
    database = client.database
    with pymongo.timeout(CONNECT_TIMEOUT_S):
        try:
            begun = time.monotonic()
            hello = database.command("hello")
            elapsed = time.monotonic() - begun
        except PyMongoError as error:
            text = f"{translated(error)}; is it running, and is the URL right?"
            yield Finding("reach", "wrong", text)
            return
    address = hello.get("me") or ":".join(map(str, database.client.address or ()))
    text = f"{address} answers in {elapsed * 1000:.0f} ms, including the connection"
    yield Finding("reach", "ok", text)
    checks: dict[str, Callable[[], Finding]] = {
        "permission": lambda: _check_permission(client),
        "version": lambda: check_version(database.client.server_info()["version"]),
        "kind": lambda: check_topology(hello),
        "write concern": lambda: _check_write_concern(client),
        "retryable writes": lambda: check_retryable_writes(hello),
        "indexes": lambda: check_indexes(client),
        "documents": lambda: check_documents(client),
        "limits": lambda: check_limits(client),
        "streams": lambda: check_streams(client),
        "unused queues": lambda: check_described("unused queues", unused_queues, client),
        "handovers": lambda: check_handovers(client),
        "gathers": lambda: check_described("gathers", gathers, client),
        "spark": lambda: check_spark(client, repair=repair),
        "clock": lambda: check_clock(lambda: database.command("hello")),
        "member clocks": lambda: check_member_clocks(client.url, hello),
        "bus": lambda: check_bus(client, signals),
        "parameters": lambda: check_parameters(database),
    }
    for name, check in checks.items():
        try:
            with pymongo.timeout(2 * CONNECT_TIMEOUT_S):
                yield check()
        except OperationFailure as error:
            yield _refused(name, error)
        except PyMongoError as error:
            yield Finding(name, "wrong", str(translated(error)))


def _refused(name: str, error: OperationFailure) -> Finding:
    """Return the finding for a check that the server refused."""
    if error.code not in NOT_AUTHORIZED:
        return Finding(name, "wrong", str(translated(error)))
    if name in ("permission", "write concern"):
        text = "this user may not do that; see docs/how-to/least-privileges.md"
        return Finding(name, "wrong", text)
    return Finding(name, "advice", "this user may not check it; ignore this if the queues work")


# ---- the server


def _check_permission(client: Client) -> Finding:
    # The document does not exist. The server refuses a user without permission all the same.
    client.database[client.namespace].find_one({"_id": UNUSED_ID})
    return Finding("permission", "ok", f"may read {client.database.name}.{client.namespace}")


def check_version(version: str) -> Finding:
    """Check the version of the server."""
    if tuple(map(int, version.split(".")[:2])) < OLDEST_VERSION:
        oldest = ".".join(map(str, OLDEST_VERSION))
        text = f"MongoDB {version} is too old: upgrade to {oldest} or later"
        return Finding("version", "wrong", text)
    return Finding("version", "ok", f"MongoDB {version}")


def check_topology(hello: Document) -> Finding:
    """Report whether the server is a replica set, a sharded cluster or a standalone server."""
    if hello.get("msg") == "isdbgrid":
        text = "a sharded cluster, through mongos: keep the namespace unsharded"
        return Finding("kind", "ok", text)
    if "setName" not in hello:
        text = (
            "a standalone: it has no transactions, and more outcomes are unknown after a fault; "
            "run it as a replica set of one node (mongod --replSet, then rs.initiate())"
        )
        return Finding("kind", "advice", text)
    arbiters = len(hello.get("arbiters", ()))
    size = len(hello.get("hosts", ())) + len(hello.get("passives", ())) + arbiters
    text = f"replica set {hello['setName']!r}, {size} member{'s' if size > 1 else ''}"
    if arbiters:
        text += f", {arbiters} of them without data: writes stop when a member with data is down"
        return Finding("kind", "advice", text)
    return Finding("kind", "ok", text)


def _check_write_concern(client: Client) -> Finding:
    """Send a delete that matches nothing. The server still waits for the majority."""
    majority = WriteConcern("majority", wtimeout=int(CONNECT_TIMEOUT_S * 1000), j=True)
    collection = client.database[client.namespace].with_options(write_concern=majority)
    begun = time.monotonic()
    collection.delete_one({"_id": UNUSED_ID})
    elapsed = time.monotonic() - begun
    text = f"writes reach the majority and the journal in {elapsed * 1000:.0f} ms"
    return Finding("write concern", "ok", text)


def check_retryable_writes(hello: Document) -> Finding:
    """Check whether the server supports retryable writes."""
    if "setName" in hello or hello.get("msg") == "isdbgrid":
        text = "the server supports them, and pyqueue uses them"
        return Finding("retryable writes", "ok", text)
    text = "a standalone has none: repeat a failed push with the same id"
    return Finding("retryable writes", "advice", text)


def check_indexes(client: Client) -> Finding:
    """Check that all indexes exist and have the right options."""
    # A collection that does not exist has no indexes.
    collection = client.database[client.namespace]
    found = collection.index_information()
    if not found:
        text = "the namespace is empty: its first client creates them"
        return Finding("indexes", "ok", text)
    indexes = {**INDEXES, **(GATHER_INDEXES if are_used(client) else {})}
    for record in collection.find({"_id": RECORD_IDS}, {"kind": 1, "shape": 1}):
        indexes |= indexes_of(record.get("kind"), record.get("shape"))
    missing = [name for name in indexes if name not in found]
    if missing:
        commands = "; ".join(shell_command(client.namespace, name).strip() for name in missing)
        text = (
            f"missing: {', '.join(missing)}; a client that may create indexes does so when it "
            f"starts: run `pyqueue ls`; or have an administrator run {commands}"
        )
        return Finding("indexes", "wrong", text)
    different = [
        name
        for name, (keys, options) in indexes.items()
        if list(found[name]["key"]) != keys
        or any(found[name].get(each) != value for each, value in options.items())
    ]
    if different:
        text = f"wrong keys or options: {', '.join(different)}; drop them, then start a client"
        return Finding("indexes", "wrong", text)
    if former := ", ".join(FORMER_INDEXES.intersection(found)):
        text = f"unused: {former}; drop it once no process of pyqueue-mongo 0.1 is left"
        return Finding("indexes", "advice", text)
    return Finding("indexes", "ok", ", ".join(indexes))


# ---- stored data


def check_documents(client: Client) -> Finding:
    """Look for messages that no consumer can receive."""
    if HOT not in client.database[client.namespace].index_information():
        return Finding("documents", "ok", "not checked without the indexes")
    if lists := hidden_documents(client):
        text = (
            "no consumer finds these messages, because `when` is not a date in the usual range, or "
            f"`q` is not a queue name: {'; '.join(lists)}; repair or delete them by hand"
        )
        return Finding("documents", "advice", text)
    return Finding("documents", "ok", "consumers can find all of them")


def check_limits(client: Client) -> Finding:
    """Look for limits of queues that this release cannot read."""
    wrong = list(wrong_limits(client))
    return Finding("limits", "wrong" if wrong else "ok", "; ".join(wrong) or "all can be read")


def check_streams(client: Client) -> Finding:
    """Look for gaps in streams, groups beyond the end, and documents of another kind."""
    if HOT not in client.database[client.namespace].index_information():
        return Finding("streams", "ok", "not checked without the indexes")
    names = streams(client)
    wrong = [f"stream {name!r}: {text}" for name in names for text in check_stream(client, name)]
    if wrong:
        more = f"; and {len(wrong) - MAX_SHOWN} more" if len(wrong) > MAX_SHOWN else ""
        return Finding("streams", "wrong", "; ".join(wrong[:MAX_SHOWN]) + more)
    text = f"{len(names)} checked, the newest packs of each" if names else "there are none"
    return Finding("streams", "ok", text)


def check_handovers(client: Client) -> Finding:
    """Finish handovers that processes left half done when they died; see ``recovering``."""
    name = "handovers"
    found = client.database[client.namespace].index_information()
    if not INDEXES.keys() <= found.keys():  # a client would create them
        return Finding(name, "ok", "not checked without the indexes")
    try:
        number = runner_of(client).run(recover_all())
    except NotPermitted:
        return Finding(name, "advice", "this user may not check it; ignore this if the queues work")
    except QueueError as error:
        return Finding(name, "wrong", str(error))
    if number:
        text = f"finished or cleaned up after processes that died: {number} documents"
        return Finding(name, "ok", text)
    return Finding(name, "ok", "none is left over from a process that died")


def check_described(name: str, describe: Callable[[Client], str], client: Client) -> Finding:
    """Run a check that also does the upkeep of consumers, and return its text as a finding."""
    try:
        return Finding(name, "ok", describe(client))
    except QueueError as error:
        level: Level = "advice" if isinstance(error, NotPermitted) else "wrong"
        return Finding(name, level, str(error))


def check_spark(client: Client, *, repair: bool) -> Finding:
    """Describe the groups and the stages of Spark, and look for rows that nothing will publish."""
    found = client.database[client.namespace].index_information()
    if not INDEXES.keys() <= found.keys():
        return Finding("spark", "ok", "not checked without the indexes")
    run = runner_of(client).run
    swept = run(stages.sweep()) if repair else 0
    text = described(run(all_groups()), run(stages.stages()), datetime.now(UTC))
    if swept:
        text += f"; removed {swept} hidden rows older than a day"
    elif left := run(stages.abandoned(MAX_ROWS)):
        most = " or more" if left == MAX_ROWS else ""
        text += (
            f"; {left}{most} hidden rows are older than a day, left by interrupted writes: once no "
            "batch write runs for longer than a day, remove them with `pyqueue doctor --repair`"
        )
        return Finding("spark", "advice", text)
    return Finding("spark", "ok", text)


# ---- clocks


def _offset(hello: Callable[[], Document]) -> float:
    """Return how many seconds a server's clock is ahead of ours, judged by its fastest reply."""
    samples = []
    for _ in range(CLOCK_SAMPLES):
        sent, begun = time.time(), time.monotonic()
        local_time = hello()["localTime"]
        elapsed = time.monotonic() - begun
        aware = local_time if local_time.tzinfo else local_time.replace(tzinfo=UTC)
        samples.append((elapsed, aware - datetime.fromtimestamp(sent + elapsed / 2, UTC)))
    offset: timedelta = min(samples, key=lambda each: each[0])[1]
    return offset.total_seconds()


def check_clock(hello: Callable[[], Document]) -> Finding:
    """Compare the primary's clock with the clock of this machine."""
    offset = _offset(hello)
    direction = "ahead of" if offset > 0 else "behind"
    text = f"the primary's is {abs(offset):.3f} s {direction} this machine's"
    if abs(offset) < MAX_CLOCK_DIFFERENCE_S:
        return Finding("clock", "ok", text)
    text += "; pyqueue uses the primary's, so only logs differ: run NTP on both"
    return Finding("clock", "advice", text)


def check_member_clocks(
    url: str | None, hello: Document, offset: Callable[[Callable[[], Document]], float] = _offset
) -> Finding:
    """Compare the clocks of the members, which are read without credentials.

    Args:
        url: The URL of the client, for its options such as TLS.
        hello: The server's answer to "hello", with the addresses of the members.
        offset: Measures the offset of a member's clock.
    """
    hosts = [*hello.get("hosts", ()), *hello.get("passives", ())]
    if len(hosts) < 2:
        return Finding("member clocks", "ok", "there is only one member")
    url = url or ""
    if not url.startswith("mongodb://"):
        text = f"not measured for {url.partition(':')[0] or 'this target'}"
        return Finding("member clocks", "advice", text)
    excluded = ("replicaset", "auth", "readpreference", "directconnection")
    options = [
        pair
        for pair in parse_qsl(url.partition("?")[2])
        if not pair[0].lower().startswith(excluded)
    ]
    options.append(("directConnection", "true"))
    options.append(("serverSelectionTimeoutMS", f"{MEMBER_TIMEOUT_S * 1000:.0f}"))
    offsets, silent = {}, []
    for host in hosts:
        try:
            with pymongo.MongoClient[dict[str, Any]](
                f"mongodb://{host}/?{urlencode(options)}"
            ) as member:
                offsets[host] = offset(partial(_hello_of_any_member, member))
        except PyMongoError:
            silent.append(host)
    if silent:
        text = f"no answer from {', '.join(silent)}: is it running, and reachable from here?"
        return Finding("member clocks", "wrong", text)
    spread = max(offsets.values()) - min(offsets.values())
    text = f"{spread:.3f} s between the {len(hosts)} members"
    if spread < MAX_CLOCK_DIFFERENCE_S:
        return Finding("member clocks", "ok", text)
    text += ": a fail-over shifts leases and delays by that; run NTP on all of them"
    return Finding("member clocks", "wrong", text)


def _hello_of_any_member(member: pymongo.MongoClient[dict[str, Any]]) -> Document:
    return member.admin.command("hello", read_preference=ReadPreference.NEAREST)


# ---- the bus, the parameters


def check_bus(client: Client, signals: str | None) -> Finding:
    """Send a signal through the server of the bus, and check that it arrives."""
    name = (signals or "capped:").partition(":")[0]
    if name == "none":
        return Finding("bus", "ok", "none: consumers check every `poll` seconds")
    try:
        bus = buses.open(signals or "capped:", client.database)
    except buses.BusError as error:
        return Finding("bus", "wrong", str(error))
    try:
        begun = time.monotonic()
        bus.check() if hasattr(bus, "check") else None  # an event in this process proves nothing
        elapsed = time.monotonic() - begun
        return Finding("bus", "ok", f"{name}: a signal arrived in {elapsed * 1000:.0f} ms")
    except buses.BusError as error:
        return Finding("bus", "wrong", f"{name}: {error}")
    finally:
        bus.close()


#: The server parameters that are checked: the test of a value, and what a bad value means.
PARAMETERS: dict[str, tuple[Callable[[int], bool], str]] = {
    "minSnapshotHistoryWindowInSeconds": (
        lambda value: value <= 300,
        "the indexes keep deleted messages for that many seconds; "
        "300 is the default, and less frees space sooner",
    ),
    "transactionLifetimeLimitSeconds": (
        lambda value: value >= 30,
        "the server aborts your transactions after that many seconds; 60 is the default",
    ),
}


def check_parameters(
    database: Database[dict[str, Any]],
    parameters: Mapping[str, tuple[Callable[[int], bool], str]] = PARAMETERS,
) -> Finding:
    """Check the server parameters. Skip parameters that the server does not know."""
    found = {}
    for name in parameters:
        try:
            answer = database.client.admin.command({"getParameter": 1, name: 1})
            found[name] = int(answer[name])
        except OperationFailure as error:
            if error.code in NOT_AUTHORIZED:
                raise
    advice = [
        f"{name}={found[name]}: {meaning}"
        for name, (is_good, meaning) in parameters.items()
        if name in found and not is_good(found[name])
    ]
    if advice:
        return Finding("parameters", "advice", "; ".join(advice))
    text = ", ".join(f"{name}={value}" for name, value in found.items()) or "none to check"
    return Finding("parameters", "ok", text)
