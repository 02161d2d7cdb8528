"""The faults that the suite injects.

A fault is a function that makes an ``Injection``: a generator that breaks something, yields for
how many seconds it stays broken, repairs it, and returns a description. ``yield None`` means "not
yet: resume me soon". All random choices come from ``dice``, so the same seed gives the same
faults.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial

from pymongo.errors import PyMongoError

from tests.chaos.cluster import Cluster
from tests.chaos.members import Member
from tests.chaos.names import CRATES, DELETED_QUEUE, PACKED_QUEUE, PURGED_QUEUE, document_of
from tests.chaos.processes import Process
from tests.chaos.queues import KEYS, POLL_S, QUEUES
from tests.chaos.windows import KEYS_LOCKED, Lock, Scope

Injection = Generator[float | None, None, str]
Fault = Callable[[Cluster, random.Random], Injection]

LONGEST_LEASE_S: float = max(options["lease"] for options in QUEUES.values())
WRITES = ["insert", "update", "delete", "findAndModify"]
CLOCK_SKEW_S = 600.0
#: The largest step of the servers' clocks. A message that they date ahead is late by this step.
SERVER_CLOCK_STEP_S = 4.0
#: A client notices within this time that the clock of the servers has stepped.
NOTICES_CLOCK_S = 32.0
RENEWED, RENEWED_FOR_S = 2000, 12.0
#: After this time, everything that cancelled pops took has been given back.
GIVE_BACK_S = 5.0

Search = Generator[float | None, None, Member]


# ---- servers


def _primary(cluster: Cluster) -> Search:
    """Wait for a primary."""
    while (member := cluster.servers.primary()) is None:
        yield None
    return member


def _new_primary(cluster: Cluster, old: Member) -> Search:
    """Wait for a primary other than the old one."""
    while (member := cluster.servers.primary()) in (None, old):
        yield None
    assert member is not None
    return member


def _replace_primary(
    cluster: Cluster, old: Member, seconds: float, repair: Callable[[], None]
) -> Injection:
    """Wait for a new primary, and for some seconds. Then repair the old one."""
    try:
        new = yield from _new_primary(cluster, old)
        yield seconds
    finally:
        repair()
    return f"member {old.place}; {new.place} took over"


def kill_primary(cluster: Cluster, dice: random.Random) -> Injection:
    """Kill the primary and start it again. Writes that it had not stored are lost."""
    member = yield from _primary(cluster)
    member.kill()
    yield dice.uniform(0.5, 3)
    member.start()
    return f"member {member.place}"


def suspend_primary(cluster: Cluster, dice: random.Random) -> Injection:
    """Suspend the primary until another one is elected. It resumes in the belief to be primary."""
    member = yield from _primary(cluster)
    member.suspend()
    return (yield from _replace_primary(cluster, member, dice.uniform(0.5, 3), member.resume))


def step_down(cluster: Cluster, dice: random.Random) -> Injection:
    """Make the primary step down, as for maintenance."""
    member = yield from _primary(cluster)
    try:
        member.command("replSetStepDown", 5, secondaryCatchUpPeriodSecs=2)
    except PyMongoError:  # no secondary has caught up
        return f"member {member.place} refused"
    new = yield from _new_primary(cluster, member)
    return f"member {member.place}; {new.place} took over"


def undo_claims(cluster: Cluster, dice: random.Random) -> Injection:
    """Stop replication, then force an election: writes that only the old primary had roll back."""
    member = yield from _primary(cluster)
    secondaries = [each for each in cluster.servers.members if each is not member]
    try:
        for each in secondaries:
            each.fail_point("stopReplProducer", "alwaysOn")
        yield dice.uniform(0.5, 1.5)
        member.suspend()
    finally:
        for each in secondaries:
            each.fail_point("stopReplProducer", "off")
    return (yield from _replace_primary(cluster, member, dice.uniform(0.5, 2), member.resume))


def cut_power(cluster: Cluster, dice: random.Random) -> Injection:
    """Kill all members at once and start them again. Writes that no disk has are lost."""
    members = cluster.servers.members
    yield from _primary(cluster)
    for member in members:
        member.kill(wait=False)
    for member in members:
        member.wait()
    yield dice.uniform(0.2, 1)
    for member in members:
        member.start()
    return "3 members"


def part_primary(cluster: Cluster, dice: random.Random) -> Injection:
    """Keep the primary apart from the secondaries. Clients still reach all members."""
    member = yield from _primary(cluster)
    others = [each for each in cluster.servers.members if each is not member]
    cluster.servers.keep_apart(member, others)
    repair = partial(cluster.servers.keep_apart, member, [])
    return (yield from _replace_primary(cluster, member, dice.uniform(0.5, 3), repair))


def part_secondary(cluster: Cluster, dice: random.Random) -> Injection:
    """Keep a secondary apart from one or both of the other members."""
    primary = yield from _primary(cluster)
    member = dice.choice([each for each in cluster.servers.members if each is not primary])
    others = [each for each in cluster.servers.members if each is not member]
    others = dice.choice([others, [primary]])
    cluster.servers.keep_apart(member, others)
    try:
        yield dice.uniform(3, 6)
    finally:
        cluster.servers.keep_apart(member, [])
    return f"member {member.place} from {', '.join(str(each.place) for each in others)}"


def step_clocks(cluster: Cluster, dice: random.Random) -> Injection:
    """Let the clocks of all servers step forward or back, and some time later back again."""
    offset = dice.choice([-1, 1]) * dice.uniform(1, SERVER_CLOCK_STEP_S)
    places = [each.place for each in cluster.servers.members]
    before = sum(cluster.proxies.change(place, clock=offset)["misdated"] for place in places)
    times = 0
    try:
        yield from _wait(dice.uniform(5, 10))
        while not times:
            yield None
            times = sum(cluster.proxies.change(place)["misdated"] for place in places) - before
    finally:
        for place in places:
            cluster.proxies.change(place, clock=0)
    return f"{offset:+.1f} s, read {times} times"


def fill_disk(cluster: Cluster, dice: random.Random) -> Injection:
    """Make all writes of a secondary fail, which ends it."""
    primary = yield from _primary(cluster)
    member = dice.choice([each for each in cluster.servers.members if each is not primary])
    member.limit_files(0)
    while member.running:
        yield None
    yield dice.uniform(0.5, 2)
    member.start()
    return f"member {member.place}"


def _fail_point(
    cluster: Cluster, seconds: float, name: str, mode: object, data: Mapping[str, object]
) -> Injection:
    """Set a fail point until it has struck at least once."""
    member = yield from _primary(cluster)
    times = 0
    while not times:
        member.fail_point(name, mode, data)
        try:
            yield seconds
        finally:
            times = member.fail_point(name, "off")
    return f"struck {times} times"


def _fail_writes(cluster: Cluster, dice: random.Random, **failure: object) -> Injection:
    data = {"failCommands": WRITES, "appName": "pyqueue", **failure}
    mode = {"activationProbability": 0.3}
    return _fail_point(cluster, dice.uniform(1, 2), "failCommand", mode, data)


def close_connections(cluster: Cluster, dice: random.Random) -> Injection:
    """Close connections before writes run."""
    return _fail_writes(cluster, dice, closeConnection=True)


def write_conflicts(cluster: Cluster, dice: random.Random) -> Injection:
    """Make the storage engine report write conflicts, which the server retries."""
    mode = {"activationProbability": 0.2}
    return _fail_point(cluster, dice.uniform(1, 2), "WTWriteConflictException", mode, {})


def write_concern_timeouts(cluster: Cluster, dice: random.Random) -> Injection:
    """Make writes report that no majority has them in time. They may stay or roll back."""
    error = {
        "code": 64,
        "errmsg": "waiting for replication timed out",
        "errInfo": {"wtimeout": True},
    }
    return _fail_writes(cluster, dice, writeConcernError=error)


def not_primary(cluster: Cluster, dice: random.Random) -> Injection:
    """Make the primary answer writes as a secondary does."""
    return _fail_writes(cluster, dice, errorCode=10107)


# ---- the network between clients and the primary


def _network_fault(
    cluster: Cluster, seconds: float, counter: str, begin: dict[str, object], end: dict[str, object]
) -> Injection:
    """Change the primary's proxy until the fault has struck at least once."""
    member = yield from _primary(cluster)
    before = cluster.proxies.change(member.place)
    cluster.proxies.change(member.place, **begin)
    try:
        yield seconds
        while cluster.proxies.change(member.place)[counter] == before[counter]:
            yield None
    finally:
        after = cluster.proxies.change(member.place, **end)
    return f"{counter} {after[counter] - before[counter]} times"


def cut(cluster: Cluster, dice: random.Random) -> Injection:
    """Reset and refuse connections."""
    return _network_fault(cluster, dice.uniform(1, 5), "cut", {"cut": True}, {"cut": False})


def stall(cluster: Cluster, dice: random.Random) -> Injection:
    """Hold all messages back, then deliver them late."""
    return _network_fault(cluster, dice.uniform(2, 6), "held", {"hold": True}, {"hold": False})


def slow_down(cluster: Cluster, dice: random.Random) -> Injection:
    """Delay each message."""
    seconds, delay = dice.uniform(1, 4), dice.uniform(0.02, 0.2)
    return _network_fault(cluster, seconds, "late", {"delay": delay}, {"delay": 0})


def swallow(cluster: Cluster, dice: random.Random) -> Injection:
    """Lose replies to writes that ran."""
    replies = {name: dice.randint(1, 5) for name in WRITES}
    seconds = dice.uniform(1, 2)
    return _network_fault(cluster, seconds, "swallowed", {"swallow": replies}, {"swallow": {}})


def tear(cluster: Cluster, dice: random.Random) -> Injection:
    """Reset connections in the middle of a reply."""
    seconds, size = dice.uniform(1, 2), dice.randint(1, 60)
    return _network_fault(cluster, seconds, "torn", {"tear": [20, size]}, {"tear": [0, 0]})


# ---- clients


def _kill(cluster: Cluster, dice: random.Random, kind: str) -> Injection:
    name = cluster.workload.choose(kind, dice)
    killed = cluster.workload.kill(name)
    yield dice.uniform(0, 1)
    cluster.workload.start(name)
    return killed


def kill_producer(cluster: Cluster, dice: random.Random) -> Injection:
    """Kill a producer. The outcome of its last pushes is unknown."""
    return _kill(cluster, dice, "producer")


def kill_mover(cluster: Cluster, dice: random.Random) -> Injection:
    """Kill a mover. Its reservations lapse."""
    return _kill(cluster, dice, "mover")


def kill_consumer(cluster: Cluster, dice: random.Random) -> Injection:
    """Kill a consumer. Its reservations lapse; popped messages that it did not note are gone."""
    return _kill(cluster, dice, "consumer")


def _running(cluster: Cluster, name: str) -> Generator[None, None, Process]:
    """Wait until the process of a role runs."""
    while not cluster.workload.is_running(name):
        yield None
    return cluster.workload.processes[name]


def suspend_consumer(cluster: Cluster, dice: random.Random) -> Injection:
    """Suspend a process until its leases lapse. It resumes and settles messages it has lost."""
    name = cluster.workload.choose(dice.choice(["mover", "consumer"]), dice)
    process = yield from _running(cluster, name)
    process.suspend()
    try:
        yield from _wait(LONGEST_LEASE_S + 0.5)
    finally:
        process.resume()
    return process.name


def sleep_machine(cluster: Cluster, dice: random.Random) -> Injection:
    """Suspend a process for longer than its leases, as if its machine slept.

    Its monotonic clock stands still, unlike the clock of a process that only got SIGSTOP.
    """
    kind = dice.choice(["producer", "mover", "consumer"])
    process = yield from _running(cluster, cluster.workload.choose(kind, dice))
    process.send(["sleep"])
    while not process.is_stopped:
        yield None
    try:
        yield from _wait(LONGEST_LEASE_S + 0.5)
    finally:
        process.resume()
    return process.name


def _hold_messages(cluster: Cluster, dice: random.Random, *, killed: bool) -> Injection:
    """Hold messages and keys in a transaction, until it is aborted or its client was killed."""
    queues = ["orders", "parsed", "billed", "packed", "states", "many-00", "turns", PACKED_QUEUE]
    queues += [CRATES, DELETED_QUEUE, PURGED_QUEUE]
    queue = dice.choice(queues)
    keys = [f"key-{number}" for number in dice.sample(range(KEYS), 3)]
    spec = {"queue": queue, "messages": dice.randint(1, 5), "keys": keys}
    began = time.monotonic()
    process = cluster.open_transaction(spec)
    try:
        while not process.has_printed:
            yield None
        ids = process.receive()
        if not killed:
            yield from _wait(dice.uniform(3, 7))
            process.send([])
    finally:
        process.kill()
    while (member := cluster.servers.primary()) is None or _open_transactions(member):
        yield None
    locked = [*map(document_of, ids), KEYS_LOCKED, queue]
    cluster.locks.append(Lock(began, time.monotonic(), locked))
    return f"{len(ids)} messages of {queue}"


def _open_transactions(member: Member) -> int:
    """Return how many transactions are open. The workload's last for a second."""
    return int(member.command("serverStatus")["transactions"]["currentOpen"])


def hold_messages(cluster: Cluster, dice: random.Random) -> Injection:
    """Hold messages and keys in a transaction of another program for some seconds."""
    return _hold_messages(cluster, dice, killed=False)


def kill_in_transaction(cluster: Cluster, dice: random.Random) -> Injection:
    """Kill a program in its transaction, which the server aborts seconds later."""
    return _hold_messages(cluster, dice, killed=True)


def kill_redis(cluster: Cluster, dice: random.Random) -> Injection:
    """Kill the Redis that is the bus of some clients, and start it again."""
    cluster.redis.kill()
    try:
        yield dice.uniform(1, 6)
    finally:
        cluster.redis.start()
    return "killed"


def renew_thousands(cluster: Cluster, dice: random.Random) -> Injection:
    """Hold thousands of messages for some lengths of their leases. No server fault begins."""
    process = cluster.workload.processes["holder-1"]
    cluster.calm = True
    try:
        while cluster.broken:
            yield None
        process.send(["hold", RENEWED, RENEWED_FOR_S])
        yield from _wait(RENEWED_FOR_S + LONGEST_LEASE_S)
    finally:
        cluster.calm = False
    return f"{RENEWED} leases"


def set_clock(cluster: Cluster, dice: random.Random) -> Injection:
    """Set the wall clock of a process wrong by ten minutes for a while."""
    kind = dice.choice(["producer", "mover", "consumer"])
    process = cluster.workload.processes[cluster.workload.choose(kind, dice)]
    offset = dice.choice([-CLOCK_SKEW_S, CLOCK_SKEW_S])
    process.send(["clock", offset])
    yield dice.uniform(2, 5)
    process.send(["clock", 0])
    return f"{process.name}, {offset:+g} s"


def cancellation_storm(cluster: Cluster, dice: random.Random) -> Injection:
    """Cancel receiving callers at random points.

    During half of the storms no fault of the servers begins. Then no cancelled pop may lose a
    message.
    """
    name = cluster.workload.choose("consumer", dice, asynchronous=True)
    cluster.calm = dice.random() < 0.5
    try:
        while not cluster.workload.is_running(name) or (cluster.calm and cluster.broken):
            yield None
        process = cluster.workload.processes[name]
        seconds = dice.uniform(2, 4)
        process.send(["storm", seconds])
        yield from _wait(seconds + (GIVE_BACK_S if cluster.calm else 0))
        return (
            f"{process.name}, {'healthy servers' if cluster.calm else 'any state of the servers'}"
        )
    finally:
        cluster.calm = False


def _wait(seconds: float) -> Generator[None, None, None]:
    """Wait for that long, whatever ``haste`` the run has: a shorter fault would have no effect."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield None


def drop_bus(cluster: Cluster, dice: random.Random) -> Injection:
    """Drop the capped collection through which processes wake each other."""
    member = yield from _primary(cluster)
    try:
        cluster.drop_bus(member)
    except PyMongoError:  # an election is in progress
        return "not dropped"
    return "dropped"


def _until_healthy(fault: Fault) -> Fault:
    """Return the same fault, which ends when there are a primary and two secondaries again."""

    def inject(cluster: Cluster, dice: random.Random) -> Injection:
        description = yield from fault(cluster, dice)
        while not cluster.servers.healthy():
            yield None
        return description

    return inject


#: The faults by the names in the report.
SERVER_FAULTS: dict[str, Fault] = {
    name: _until_healthy(fault)
    for name, fault in {
        "primary killed": kill_primary,
        "primary suspended": suspend_primary,
        "primary stepped down": step_down,
        "claims undone by a fail-over": undo_claims,
        "power cut of all members": cut_power,
        "primary cut off from the members": part_primary,
        "secondary cut off from members": part_secondary,
        "server clocks stepped": step_clocks,
        "disk of a secondary full": fill_disk,
        "clients cut off": cut,
        "network stalled": stall,
        "network slow": slow_down,
        "replies swallowed": swallow,
        "replies torn": tear,
        "fail point: connection closed": close_connections,
        "fail point: WriteConflict": write_conflicts,
        "fail point: write concern time-out": write_concern_timeouts,
        "fail point: NotWritablePrimary": not_primary,
    }.items()
}
CLIENT_FAULTS: dict[str, Fault] = {
    "producer killed": kill_producer,
    "mover killed": kill_mover,
    "consumer killed": kill_consumer,
    "consumer suspended": suspend_consumer,
    "clock set wrong": set_clock,
    "cancellation storm": cancellation_storm,
    "bus dropped": drop_bus,
    "Redis killed": kill_redis,
    "machine of a process asleep": sleep_machine,
    "messages held by a transaction": hold_messages,
    "program killed in a transaction": kill_in_transaction,
    "thousands of leases renewed": renew_thousands,
}
#: The calls that each kind of fault excuses.
SCOPES: dict[str, Scope] = {
    **dict.fromkeys(SERVER_FAULTS, Scope("all")),
    **dict.fromkeys(CLIENT_FAULTS, Scope("process")),
    **dict.fromkeys(("bus dropped", "Redis killed"), Scope("none", POLL_S)),
    **dict.fromkeys(
        (
            "messages held by a transaction",
            "program killed in a transaction",
            "thousands of leases renewed",
        ),
        Scope("none"),
    ),
    "server clocks stepped": Scope("all", NOTICES_CLOCK_S + SERVER_CLOCK_STEP_S),
}


def in_rounds(faults: dict[str, Fault], dice: random.Random) -> Iterator[tuple[str, Fault]]:
    """Yield the faults forever: each once in every round, each round in a random order."""
    while True:
        yield from dice.sample(sorted(faults.items()), len(faults))
