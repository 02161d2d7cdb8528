"""The commands that each operation sends: the durability of writes, the level of reads, the limit.

A crash or a failover shows a wrong write concern only by chance. The commands show it always.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import pymongo
import pytest
from anyio.from_thread import start_blocking_portal
from bson import ObjectId
from motor.motor_asyncio import AsyncIOMotorClient
from pymongo import monitoring

from pyqueue import AsyncClient, Client, Limit, Queue
from pyqueue.backends.outputs import Output
from pyqueue.backends.settling import fan_out
from pyqueue.queue_base import backend_of
from pyqueue.runtime.connecting import runner_of
from tests.contract.portal import PortalClient
from tests.plans.runner import NOW

COMMAND_TIMEOUT_S: Final = 100.0
WRITES: Final = {"insert", "update", "delete", "findAndModify"}
READS: Final = {"find", "aggregate", "count", "distinct"}
#: Neither reads nor writes messages. The first three prepare a client.
AROUND: Final = {"hello", "createIndexes", "listIndexes", "commitTransaction", "endSessions"}

SAFE, FAST = "majority and journal", "primary"
CONCERNS: Final = {
    frozenset({("w", "majority"), ("j", True)}): SAFE,
    frozenset({("w", 1)}): FAST,
}


class Recorder(monitoring.CommandListener):
    """Keeps the commands of a client while it is on."""

    def __init__(self) -> None:
        self.commands: list[dict[str, Any]] = []
        self.on = False

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        """Keep a command."""
        if self.on and event.command_name not in AROUND:
            self.commands.append({**event.command, "name": event.command_name})

    def succeeded(self, event: monitoring.CommandSucceededEvent) -> None:
        """Do nothing."""

    def failed(self, event: monitoring.CommandFailedEvent) -> None:
        """Do nothing."""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the commands of a block."""
        self.on = True
        try:
            yield
        finally:
            self.on = False


BUCKET: Final = MappingProxyType({"kind": "bucket"})
LATER: Final = datetime(7000, 1, 1, tzinfo=UTC)


class Case(NamedTuple):
    """One call of a public method."""

    method: str
    #: Gets the queue and its reserved messages.
    call: Callable[[Any, list[Any]], Any]
    #: The write concern of each write, in order, repeats left out; at durability="majority".
    writes: tuple[str, ...] = ()
    #: The level of the reads: "local" by the server's default, or one instant.
    reads: str = "local"
    #: How many messages are ready, and how many of those are reserved.
    ready: int = 2
    held: int = 0
    options: Mapping[str, Any] = MappingProxyType({})
    #: Whether the writes are the same at any durability.
    fixed: bool = False


def later(queue: Any) -> Any:
    return queue.push(1, delay=60)


def within(manager: Any) -> None:
    with manager:
        pass


def loop_twice(queue: Any) -> None:
    """Loop over two messages. The first is committed while the second is claimed."""
    for number, held in enumerate(queue.each(0)):
        if number == 1:
            queue.commit(held)
            break


def packed(method: str, call: Callable[[Any, list[Any]], Any], *writes: str, **more: Any) -> Case:
    """Return a case of a bucket with a pack of five messages."""
    return Case(method, call, writes, ready=5, options=BUCKET, **more)


#: Permits are stored by a majority, whatever the durability is.
RATE: Final = {"limit": Limit(rate=1, burst=9)}
HISTORY: Final = {"history": 60}
CASES: Final = [
    Case("push", lambda queue, held: queue.push(1), (SAFE,), ready=0),
    Case("push", lambda queue, held: queue.push(1, key="k"), (SAFE,)),
    Case("push", lambda queue, held: queue.push(1, id="m"), (SAFE,)),
    Case("push", lambda queue, held: queue.push(1, key="k", on_duplicate="replace"), (SAFE,)),
    Case("push_many", lambda queue, held: queue.push_many([1, 2], keys=["a", "b"]), (SAFE,)),
    Case("pop", lambda queue, held: queue.pop(0), (SAFE,)),
    Case("pop", lambda queue, held: queue.pop(0), (FAST, SAFE), options={"model": int}),
    Case("pop", lambda queue, held: queue.pop(0), (FAST, SAFE), options=HISTORY),
    Case("pop_many", lambda queue, held: queue.pop_many(2, timeout=0), (FAST, SAFE)),
    Case("reserve", lambda queue, held: queue.reserve(0), (FAST,)),
    Case("reserve_many", lambda queue, held: queue.reserve_many(2, timeout=0), (FAST,)),
    Case("reserve_id", lambda queue, held: queue.reserve_id("first"), (FAST,)),
    Case("reserved", lambda queue, held: within(queue.reserved(0)), (FAST, SAFE)),
    Case("each", lambda queue, held: loop_twice(queue), (FAST, SAFE)),
    *(
        Case(
            "reserve", lambda queue, held: queue.reserve(0), (SAFE, FAST), options=rate, fixed=True
        )
        for rate in (RATE, {**RATE, "kind": "bucket"}, {**RATE, "kind": "ordered"})
    ),
    Case("commit", lambda queue, held: queue.commit(*held), (SAFE,), held=1),
    Case("commit", lambda queue, held: queue.commit(*held), (SAFE,), held=2),
    Case("commit", lambda queue, held: queue.commit(*held), (SAFE,), held=1, options=HISTORY),
    Case("rollback", lambda queue, held: queue.rollback(*held), (SAFE,), held=1),
    Case("rollback", lambda queue, held: queue.rollback(*held, error="x"), (SAFE,), held=2),
    Case("extend", lambda queue, held: queue.extend(*held), (SAFE,), held=2),
    Case("renew", lambda queue, held: within(queue.renew(*held)), held=2),
    Case("release", lambda queue, held: queue.release(*held), (SAFE,), held=1),
    Case("move", lambda queue, held: queue.move(*held, to="other"), (SAFE,), held=2),
    Case(
        "move_many",
        lambda queue, held: queue.move_many([(each, 5) for each in held], to="other"),
        (SAFE,),
        held=2,
    ),
    Case("bury", lambda queue, held: queue.bury(*held), (SAFE,), held=2),
    Case("progress", lambda queue, held: queue.progress(*held, 0.5), (SAFE,), held=1),
    Case("checkpoint", lambda queue, held: queue.checkpoint(*held, {"at": 1}), (SAFE,), held=1),
    Case("claim", lambda queue, held: within(queue.claim("group", limit=2)), (SAFE,)),
    Case("redrive", lambda queue, held: queue.redrive(), (SAFE,), options={"name": "jobs.dead"}),
    Case("remove", lambda queue, held: queue.remove("first"), (SAFE,)),
    Case("cancel", lambda queue, held: queue.cancel("first"), (SAFE,)),
    Case("cancel", lambda queue, held: queue.cancel(held[0].id), (SAFE,), held=1),
    Case("requeue", lambda queue, held: queue.requeue(later(queue)), (SAFE,)),
    Case(
        "reprioritize",
        lambda queue, held: queue.reprioritize("first", 9),
        (SAFE,),
        options={"kind": "priority"},
    ),
    Case("select", lambda queue, held: queue.select({"payload": 1}).remove(), (SAFE,)),
    Case("select", lambda queue, held: queue.select().requeue(LATER), (SAFE,)),
    Case("select", lambda queue, held: queue.select().count()),
    Case("purge", lambda queue, held: queue.purge(), (SAFE,)),
    Case("replay", lambda queue, held: queue.replay("popped"), (SAFE,), options=HISTORY),
    Case("pause", lambda queue, held: queue.pause(), (SAFE,)),
    Case("resume", lambda queue, held: queue.resume(), (SAFE,)),
    Case("push", lambda queue, held: queue.push(1), (SAFE,), options=BUCKET),
    Case("push_many", lambda queue, held: queue.push_many([1, 2, 3]), (SAFE,), options=BUCKET),
    Case("purge", lambda queue, held: queue.purge(), (SAFE,), options=BUCKET),
    packed("pop_many", lambda queue, held: queue.pop_many(2, timeout=0), FAST, SAFE),
    packed("reserve_many", lambda queue, held: queue.reserve_many(2, timeout=0), FAST),
    packed("commit", lambda queue, held: queue.commit(*held), SAFE, held=5),
    packed("commit", lambda queue, held: queue.commit(*held[:2]), SAFE, held=5),
    packed("rollback", lambda queue, held: queue.rollback(*held), SAFE, held=5),
    packed("extend", lambda queue, held: queue.extend(*held), SAFE, held=5),
    packed("select", lambda queue, held: queue.select({"payload": 1}).remove(), SAFE),
    # A message that leaves its pack alone is handed over. The last command can be repeated.
    packed("rollback", lambda queue, held: queue.rollback(held[0]), SAFE, FAST, held=5, fixed=True),
    packed(
        "move",
        lambda queue, held: queue.move(*held[:2], to="other"),
        SAFE,
        FAST,
        held=5,
        fixed=True,
    ),
    Case("get", lambda queue, held: queue.get("first")),
    Case("peek", lambda queue, held: queue.peek()),
    Case("browse", lambda queue, held: queue.browse(where={"payload": 1})),
    Case("counts", lambda queue, held: queue.counts(), reads="one instant"),
    Case("next_when", lambda queue, held: queue.next_when()),
    Case("stats", lambda queue, held: queue.stats()),
    Case("paused", lambda queue, held: queue.paused()),
    Case("history", lambda queue, held: queue.history()),
    Case("notify", lambda queue, held: queue.notify()),
]
#: The operations that send nothing.
SILENT: Final = {"notify", "renew"}


def test_every_operation_of_a_queue_has_a_case() -> None:
    public = {name for name in dir(Queue) if not name.startswith("_")}
    assert {case.method for case in CASES} == public


class Place(NamedTuple):
    """A client whose commands are recorded."""

    client: Any
    recorder: Recorder


@contextmanager
def opened(
    driver: str, url: str, durability: str, recorder: Recorder | None = None, **more: Any
) -> Iterator[Place]:
    """Open a client of one kind, with more options."""
    recorder = recorder or Recorder()
    options: dict[str, Any] = {
        "durability": durability,
        "command_timeout": COMMAND_TIMEOUT_S,
        "signals": "none:",
        **more,
    }
    with ExitStack() as stack:
        if driver == "blocking":
            blocking = pymongo.MongoClient[dict[str, Any]](url, event_listeners=[recorder])
            database = stack.enter_context(blocking).get_default_database()
            yield Place(stack.enter_context(Client(database, **options)), recorder)
            return
        portal = stack.enter_context(start_blocking_portal())

        async def connect() -> tuple[Any, AsyncClient]:
            kind: Any = AsyncIOMotorClient if driver == "motor" else pymongo.AsyncMongoClient
            mongo: Any = kind(url, event_listeners=[recorder])
            return mongo, AsyncClient(mongo.get_default_database(), **options)

        async def close() -> None:
            await client.close()
            closing = mongo.close()
            if closing is not None:
                await closing

        mongo, client = portal.call(connect)
        stack.callback(portal.call, close)
        yield Place(PortalClient(portal, client), recorder)


def sent(place: Place, case: Case, name: str) -> list[dict[str, Any]]:
    """Prepare a queue, make the call and return its commands."""
    options = dict(case.options)
    name = options.pop("name", name)
    queue = place.client.queue(name, options.pop("model", None), **options)
    feeder = queue
    # An object without a kind sends nothing more, once the kind is named.
    place.client.queue(name, kind=options.get("kind", "standard")).resume()
    if case.method == "redrive":
        feeder = place.client.queue(name.removesuffix(".dead"))
    if case.ready:
        ids = None if options.get("kind") == "bucket" else ["first", "second"]
        feeder.push_many(range(case.ready), ids=ids)
    held = []
    if case.held:
        held = queue.reserve_many(case.held, timeout=0)
        assert len(held) == case.held
    if case.method == "redrive":
        feeder.bury(*feeder.reserve_many(2, timeout=0))
    if case.method == "replay":
        feeder.push(1, id="popped", at=None)
        feeder.commit(*feeder.reserve_many(3, timeout=0))
    place.recorder.commands.clear()
    with place.recorder.recording():
        case.call(queue, held)
    return list(place.recorder.commands)


@pytest.mark.parametrize("durability", ["majority", "acknowledged"])
@pytest.mark.parametrize("taken", ["", "message", "copy"])
def test_handover_is_at_majority_whatever_the_durability(
    durability: str, taken: str, url: str
) -> None:
    """A copy that a fail-over undoes after the decision is lost. Only the last write can wait."""
    with opened("blocking", url, durability) as place:
        bucket = place.client.queue("packs", kind="bucket")
        results = place.client.queue("results", kind="standard")
        dead = place.client.queue("packs.dead")
        dead.paused()
        assert results.reserve(timeout=0) is None
        outputs = [Output(ObjectId(), backend_of(results).target, 1, None)]
        split = partial(fan_out, backend_of(bucket).terms, outputs=outputs)
        ways = [
            lambda each: bucket.rollback(each, delay=0),
            bucket.bury,
            lambda each: bucket.move(each, to="results"),
            lambda each: runner_of(place.client).run(split(each)),
        ]
        bucket.push_many(range(5))
        held = bucket.reserve_many(5, timeout=0)
        takers: list[Any] = [{"_id": each.id, "q": "results", "payload": 1} for each in held]
        if taken == "copy":
            mark = {"to": "packs", "token": "dead"}
            takers = [each | {"q": "~handover:x", "when": NOW, "handover": mark} for each in takers]
        if taken:
            place.client.database["pyqueue"].insert_many(takers)
        for way, each in zip(ways, held, strict=False):
            place.recorder.commands.clear()
            with place.recorder.recording():
                way(each)
            # Records are made by other commands.
            writes = [each for each in place.recorder.commands if each["name"][0] in "iu"]
            assert [concern(each) for each in writes] == [SAFE] * (len(writes) - 1) + [FAST]
            assert len(writes) == 4 or taken


@pytest.mark.parametrize("durability", ["majority", "acknowledged"])
def test_push_into_several_queues_is_at_majority(durability: str, url: str) -> None:
    with opened("blocking", url, durability) as place:
        queues = [place.client.queue(name, kind="standard") for name in ("a", "b", "c")]
        queues[0].push(0, also=queues[1:])  # makes the records
        with place.recorder.recording():
            queues[0].push(1, also=queues[1:])
        found = [(each["name"], concern(each)) for each in place.recorder.commands]
        assert found == [
            *(("insert", SAFE), ("update", SAFE), ("update", SAFE)),
            ("delete", FAST),
        ]


def concern(command: dict[str, Any]) -> str:
    """Return the durability that a write asks for."""
    asked = command.get("writeConcern", {})
    return CONCERNS.get(frozenset(asked.items()), f"{command['name']} with {asked}")


def seen(command: dict[str, Any]) -> str:
    """Return the level of a read."""
    if command.get("autocommit") is False:  # in a transaction
        return "one instant"
    return str(command.get("readConcern", {}).get("level", "local"))


def without_repeats(values: list[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values))


#: The part that all drivers share chooses the write concern.
PLACES: Final = [
    *(("blocking", "majority"), ("async", "acknowledged")),
    pytest.param("blocking", "acknowledged", marks=pytest.mark.slow),
    pytest.param("async", "majority", marks=pytest.mark.slow),
    pytest.param("motor", "majority", marks=pytest.mark.slow),
    pytest.param("motor", "acknowledged", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("driver", "durability"), PLACES)
def test_each_operation_sends_what_it_promises(driver: str, durability: str, url: str) -> None:
    wrong = []
    with (
        pymongo.MongoClient[dict[str, Any]](url) as mongo,
        opened(driver, url, durability) as place,
    ):
        raw = mongo.get_default_database()["pyqueue"]
        for number, case in enumerate(CASES):
            commands = sent(place, case, f"jobs{number}")
            label = f"{number} {case.method}"
            expected = case.writes
            if durability == "acknowledged" and not case.fixed:
                expected = without_repeats([FAST] * len(case.writes))
            writes = [concern(each) for each in commands if each["name"] in WRITES]
            if without_repeats(writes) != expected or writes[-1:] != [*expected][-1:]:
                wrong.append(f"{label}: {writes}")
            for each in commands:
                if each["name"] not in WRITES | READS:
                    wrong.append(f"{label}: sends {each['name']}")
                elif each["name"] in READS and seen(each) != case.reads:
                    wrong.append(f"{label}: reads {seen(each)}")
                if each.get("$readPreference", {"mode": "primary"}) != {"mode": "primary"}:
                    wrong.append(f"{label}: reads from {each['$readPreference']}")
                if not 0 < each.get("maxTimeMS", 0) <= COMMAND_TIMEOUT_S * 1000:
                    wrong.append(f"{label}: {each['name']} may take {each.get('maxTimeMS')} ms")
            if not commands and case.method not in SILENT:
                wrong.append(f"{label}: nothing was sent")
            raw.delete_many({"record": {"$exists": False}})
    assert not wrong, "\n".join(wrong)
