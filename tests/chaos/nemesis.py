"""The kinds of faults. Each is a generator: it breaks something, yields how many seconds that is to last, mends it, and returns what it did.

``yield None`` means: not yet, go on with me a little later. What is random is drawn from ``dice``, so that a seed gives the same faults again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator
from typing import Any

from pymongo.errors import PyMongoError

from tests.chaos.cluster import World
from tests.chaos.members import Member
from tests.chaos.workload import QUEUES

__all__ = ["OF_CLIENTS", "OF_SERVERS", "Fault", "Kind", "rounds"]

Fault = Generator[float | None, None, str]
Kind = Callable[[World, random.Random], Fault]

LONGEST_LEASE = max(options["lease"] for options in QUEUES.values())
WRITES = ["insert", "update", "delete", "findAndModify"]
SKEW = 600.0  # seconds
GIVEN_BACK = 5.0  # seconds until all that was popped for cancelled callers is surely given back


Search = Generator[float | None, None, Member]


# ---- servers


def _primary(world: World) -> Search:
    while (member := world.servers.primary()) is None:
        yield None
    return member


def _another(world: World, old: Member) -> Search:
    """Wait for another primary than the old one."""
    while (member := world.servers.primary()) in (None, old):
        yield None
    assert member is not None
    return member


def kill_primary(world: World, dice: random.Random) -> Fault:
    """What it has not written is gone."""
    member = yield from _primary(world)
    member.kill()
    yield dice.uniform(0.5, 3)
    member.start()
    return f"member {member.place}"


def suspend_primary(world: World, dice: random.Random) -> Fault:
    """It wakes up as the primary that it no longer is."""
    member = yield from _primary(world)
    member.suspend()
    try:
        new = yield from _another(world, member)
        yield dice.uniform(0.5, 3)
    finally:
        member.resume()
    return f"member {member.place}; {new.place} took over"


def step_down(world: World, dice: random.Random) -> Fault:
    """An election, as at a maintenance."""
    member = yield from _primary(world)
    try:
        member.command("replSetStepDown", 5, secondaryCatchUpPeriodSecs=2)
    except PyMongoError:  # no other has caught up
        return f"member {member.place} refused"
    new = yield from _another(world, member)
    return f"member {member.place}; {new.place} took over"


def undo_claims(world: World, dice: random.Random) -> Fault:
    """The others get no writes for a while, and then one of them becomes the primary: what only the old one had is rolled back."""
    member = yield from _primary(world)
    others = [each for each in world.servers.members if each is not member]
    try:
        for each in others:
            each.fail_point("stopReplProducer", "alwaysOn")
        yield dice.uniform(0.5, 1.5)
        member.suspend()
    finally:
        for each in others:
            each.fail_point("stopReplProducer", "off")
    try:
        new = yield from _another(world, member)
        yield dice.uniform(0.5, 2)
    finally:
        member.resume()
    return f"member {member.place}; {new.place} took over"


def fill_disk(world: World, dice: random.Random) -> Fault:
    """A secondary cannot write any more, and ends."""
    primary = yield from _primary(world)
    member = dice.choice([each for each in world.servers.members if each is not primary])
    member.limit_files(0)
    while member.running:
        yield None
    yield dice.uniform(0.5, 2)
    member.start()
    return f"member {member.place}"


def _fail_point(
    world: World, seconds: float, name: str, mode: object, data: dict[str, object]
) -> Fault:
    member = yield from _primary(world)
    met = 0
    while not met:
        member.fail_point(name, mode, data)
        try:
            yield seconds
        finally:
            met = member.fail_point(name, "off")
    return f"met {met} times"


def _commands_fail(world: World, dice: random.Random, **how: object) -> Fault:
    data = {"failCommands": WRITES, "appName": "pyqueue", **how}
    return _fail_point(
        world, dice.uniform(1, 2), "failCommand", {"activationProbability": 0.3}, data
    )


def close_connection(world: World, dice: random.Random) -> Fault:
    """Before the command was carried out."""
    return _commands_fail(world, dice, closeConnection=True)


def write_conflict(world: World, dice: random.Random) -> Fault:
    """In the storage; the server tries again by itself."""
    return _fail_point(
        world, dice.uniform(1, 2), "WTWriteConflictException", {"activationProbability": 0.2}, {}
    )


def write_concern(world: World, dice: random.Random) -> Fault:
    """The write is there, and nobody knows whether it stays."""
    error = {
        "code": 64,
        "errmsg": "waiting for replication timed out",
        "errInfo": {"wtimeout": True},
    }
    return _commands_fail(world, dice, writeConcernError=error)


def not_primary(world: World, dice: random.Random) -> Fault:
    """As if another were the primary."""
    return _commands_fail(world, dice, errorCode=10107)


# ---- the network between clients and the primary


def _way(
    world: World, seconds: float, did: str, begin: dict[str, object], end: dict[str, object]
) -> Fault:
    member = yield from _primary(world)
    before = world.proxies.change(member.place)
    world.proxies.change(member.place, **begin)
    try:
        yield seconds
        while world.proxies.change(member.place)[did] == before[did]:
            yield None
    finally:
        after = world.proxies.change(member.place, **end)
    return f"{did} {after[did] - before[did]} times"


def cut(world: World, dice: random.Random) -> Fault:
    """Connections are reset, and refused."""
    return _way(world, dice.uniform(1, 5), "cut", {"cut": True}, {"cut": False})


def stall(world: World, dice: random.Random) -> Fault:
    """Nothing arrives; in the end all does, however late."""
    return _way(world, dice.uniform(2, 6), "held", {"hold": True}, {"hold": False})


def delay(world: World, dice: random.Random) -> Fault:
    """Everything arrives late."""
    return _way(world, dice.uniform(1, 4), "late", {"delay": dice.uniform(0.02, 0.2)}, {"delay": 0})


def swallow(world: World, dice: random.Random) -> Fault:
    """Commands are carried out, and their replies are lost."""
    replies = {name: dice.randint(1, 5) for name in WRITES}
    return _way(world, dice.uniform(1, 2), "swallowed", {"swallow": replies}, {"swallow": {}})


def tear(world: World, dice: random.Random) -> Fault:
    """Connections are reset in the middle of a reply."""
    return _way(
        world, dice.uniform(1, 2), "torn", {"tear": [20, dice.randint(1, 60)]}, {"tear": [0, 0]}
    )


# ---- clients


def _killed(world: World, dice: random.Random, kind: str) -> Fault:
    name = world.crew.one(kind, dice)
    world.crew.kill(name)
    yield dice.uniform(0, 1)
    world.crew.start(name)
    return name


def kill_producer(world: World, dice: random.Random) -> Fault:
    """Nobody knows what became of its last pushes."""
    return _killed(world, dice, "producer")


def kill_mover(world: World, dice: random.Random) -> Fault:
    """What it held comes back."""
    return _killed(world, dice, "mover")


def kill_consumer(world: World, dice: random.Random) -> Fault:
    """What it held comes back; what it popped and had not noted is gone."""
    return _killed(world, dice, "consumer")


def suspend_consumer(world: World, dice: random.Random) -> Fault:
    """Others take what it holds; then it goes on to settle that."""
    name = world.crew.one(dice.choice(["mover", "consumer"]), dice)
    while not world.crew.at_work(name):
        yield None
    process = world.crew.processes[name]
    process.suspend()
    try:
        yield from _lasting(LONGEST_LEASE + 0.5)
    finally:
        process.resume()
    return process.name


def set_clock(world: World, dice: random.Random) -> Fault:
    """The wall clock of a process is set wrong by ten minutes, and later right again."""
    process = world.crew.processes[
        world.crew.one(dice.choice(["producer", "mover", "consumer"]), dice)
    ]
    ahead = dice.choice([-SKEW, SKEW])
    process.tell(["skew", ahead])
    yield dice.uniform(2, 5)
    process.tell(["skew", 0])
    return f"{process.name}, {ahead:+g} s"


def storm(world: World, dice: random.Random) -> Fault:
    """Callers that receive are cancelled at any point of it. Half of the storms keep the servers whole: then there is no excuse for a loss."""
    name = world.crew.one("consumer", dice, asynchronous=True)
    world.calm = dice.random() < 0.5
    try:
        while not world.crew.at_work(name) or (world.calm and world.broken):
            yield None
        process = world.crew.processes[name]
        seconds = dice.uniform(2, 4)
        process.tell(["storm", seconds])
        yield from _lasting(seconds + (GIVEN_BACK if world.calm else 0))
        return f"{process.name}, {'servers whole' if world.calm else 'whatever the servers do'}"
    finally:
        world.calm = False


def _lasting(seconds: float) -> Generator[None, None, None]:
    """However hasty the run is: so long it takes to have an effect."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield None


def drop_bus(world: World, dice: random.Random) -> Fault:
    """The capped collection through which processes wake one another."""
    member = yield from _primary(world)
    try:
        world.drop_bus(member)
    except PyMongoError:  # there is an election
        return "not dropped"
    return "dropped"


def _until_whole(kind: Kind) -> Kind:
    """The same, and it lasts until there is a primary with two secondaries again."""

    def fault(world: World, dice: random.Random) -> Fault:
        what = yield from kind(world, dice)
        while not world.servers.healthy():
            yield None
        return what

    return fault


_OF_SERVERS: dict[str, Kind] = {
    "primary killed": kill_primary,
    "primary suspended": suspend_primary,
    "primary stepped down": step_down,
    "claims undone by a fail-over": undo_claims,
    "disk of a secondary full": fill_disk,
    "clients cut off": cut,
    "network stalled": stall,
    "network slow": delay,
    "replies swallowed": swallow,
    "replies torn": tear,
    "fail point: connection closed": close_connection,
    "fail point: WriteConflict": write_conflict,
    "fail point: write concern time-out": write_concern,
    "fail point: NotWritablePrimary": not_primary,
}
OF_SERVERS = {name: _until_whole(kind) for name, kind in _OF_SERVERS.items()}
OF_CLIENTS: dict[str, Kind] = {
    "producer killed": kill_producer,
    "mover killed": kill_mover,
    "consumer killed": kill_consumer,
    "consumer suspended": suspend_consumer,
    "clock set wrong": set_clock,
    "cancellation storm": storm,
    "bus dropped": drop_bus,
}


def rounds(kinds: dict[str, Kind], dice: random.Random) -> Generator[tuple[str, Kind], Any, None]:
    """The kinds, each once in every round, each round in another order."""
    while True:
        yield from dice.sample(sorted(kinds.items()), len(kinds))
