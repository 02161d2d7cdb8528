"""Processes are killed in the middle of their work, and their ledger must be exact.

Nothing that was acknowledged is missing, and nothing is finished twice. ``kill_programs`` has the
work of the processes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pyqueue import Client, Limit
from tests.integration.kill_programs import ALSO, GROUPS, OUTPUTS, stage
from tests.integration.test_rates import DRIFT
from tests.support.eventually import eventually
from tests.support.kills import LEASE_S, Ledger, recover_all
from tests.support.processes import program

#: How many processes ``make test`` kills. ``make test-slow`` kills many.
FEW = 2
LIMIT = 3
RATE, BURST = 100, 10
MESSAGES = 1500

few_or_many_kills = pytest.mark.parametrize(
    "kills", [pytest.param(FEW, id="some"), pytest.param(100, id="all", marks=pytest.mark.slow)]
)


@pytest.fixture
def ledger_of(url: str, tmp_path: Path, kills: int) -> Callable[[str], Ledger]:
    """Run a program that kills its children this many times. Return its ledger."""

    def run(name: str) -> Ledger:
        arguments = [name, url, str(kills), "7", str(tmp_path / "ledger")]
        with program("-m", "tests.integration.kill_programs", *arguments) as killing:
            output, _ = killing.communicate(timeout=280)
            assert killing.returncode == 0, output
        return Ledger(tmp_path / "ledger")

    return run


def batches_left(queue: Any, limit: int = 100) -> Iterator[list[Any]]:
    """Receive and commit until nothing is left. Leases of killed processes lapse in that time."""
    while queue.counts().total > 0:
        held = queue.reserve_many(limit, timeout=60 * LEASE_S)
        assert held, "forgotten"
        yield held
        queue.commit(*held)


def check_claims(ledger: Ledger, pushed: list[str], rest: list[str]) -> list[str]:
    """Check that each message was finished once, or is in the rest. Return the payloads in order.

    The beginnings of commits are in order. The acknowledgements of two processes need not be.
    """
    acknowledged = ledger["commit"]
    begun = [each for line in ledger.lines("begin-commit") for each in line]
    finished = [each.partition("|")[0] for each in begun if each in acknowledged] + rest
    assert max(Counter(finished).values()) == 1, "finished twice"
    # A commit that was under way when its process was killed may be done.
    unknown = {each.partition("|")[0] for each in begun if each not in acknowledged}
    assert {*pushed, *ledger["pushed"]} - set(finished) <= unknown, "lost"
    return finished


def check_ends(ledger: Ledger, left: Counter[str], dead: set[str]) -> None:
    """Check that each message was finished once, or is left once."""
    ends = left + ledger["commit"]
    assert max(ends.values()) == 1, "finished twice"
    assert set(ledger["bury"]) <= dead
    assert set(ledger["pushed"]) - set(ends) <= set(ledger["begin-commit"]), "lost"


def check_order(finished: list[str]) -> None:
    """Check that the numbers of each group grow."""
    last: dict[str, int] = {}
    for payload in finished:
        group, _, number = payload.partition(":")
        assert int(number) > last.get(group, -1), f"{payload} comes after {last}"
        last[group] = int(number)


def check_work(ledger: Ledger, kills: int) -> None:
    """Check that processes did some work. On a slow machine, a few may have done little."""
    assert ledger["commit"].total() > (kills if kills > FEW else 0), "it did no work"


@few_or_many_kills
def test_killed_processes_leave_each_group_in_order(
    kills: int, url: str, ledger_of: Callable[[str], Ledger]
) -> None:
    early = [f"test.{number % 20}:{number}" for number in range(100)]
    with Client(url) as client:
        queue = client.queue("ordered", kind="ordered")
        queue.push_many(early, groups=[each.partition(":")[0] for each in early])
    ledger = ledger_of("ordered")
    rest: list[str] = []
    with Client(url) as client:
        for held in batches_left(client.queue("ordered", kind="ordered", max_tries=None)):
            groups = [each.group for each in held]
            assert len(groups) == len(set(groups)), "two messages of a group are held"
            rest += [each.payload for each in held]
    check_order(check_claims(ledger, early, rest))
    check_work(ledger, kills)


@few_or_many_kills
@pytest.mark.parametrize(
    ("kind", "per"),
    [
        pytest.param("standard", None, marks=pytest.mark.slow),
        ("standard", "headers.customer"),
        pytest.param("ordered", None, marks=pytest.mark.slow),
    ],
)
def test_killed_processes_keep_the_limit(
    kind: Any, per: str | None, kills: int, url: str, ledger_of: Callable[[str], Ledger]
) -> None:
    """No more messages are held at any time, and no slot stays taken. Groups are in order."""
    early = [f"test.{number % GROUPS}:{number}" for number in range(40)]
    with Client(url) as client:
        queue = client.queue("limited", kind=kind, limit=Limit(concurrency=LIMIT, per=per))
        groups = [each.partition(":")[0] for each in early] if kind == "ordered" else None
        queue.push_many(early, groups=groups)
    ledger = ledger_of(f"slots of {kind}")
    rest: list[str] = []
    with Client(url) as client:
        for held in batches_left(client.queue("limited", kind=kind, max_tries=None)):
            counted = Counter(per and each.headers.get("customer") for each in held)
            assert max(counted.values()) <= LIMIT
            rest += [each.payload for each in held]
        assert not client.database["pyqueue"].count_documents({"slot": {"$exists": True}})
    finished = check_claims(ledger, early, rest)
    check_overlaps(ledger["held"])
    if kind == "ordered":
        check_order(finished)
    check_work(ledger, kills)


def check_overlaps(held: Counter[str]) -> None:
    """Check that at no instant two messages with one slot were held, and how many slots exist."""
    spans: list[tuple[float, float, str]] = []
    for each in held:
        slot, *times = each.split("|")
        began, until = map(float, times)
        if began < until:
            spans.append((began, until, slot))
    spans.sort()
    open_until: dict[str, float] = {}
    for began, until, slot in spans:
        assert open_until.get(slot, 0) <= began, f"two messages have slot {slot}"
        open_until[slot] = until
    keys = Counter(slot.partition(":")[2].rpartition("#")[0] for slot in open_until)
    assert max(keys.values()) <= LIMIT


@few_or_many_kills
@pytest.mark.parametrize("per", [pytest.param(None, marks=pytest.mark.slow), "headers.customer"])
def test_killed_processes_start_no_more(
    per: str | None, kills: int, url: str, ledger_of: Callable[[str], Ledger]
) -> None:
    """No more messages start than the rate allows, and nothing stays behind."""
    large = [str(number) for number in range(MESSAGES)]
    small = [f"small{number}" for number in range(20)]
    with Client(url) as client:
        queue = client.queue("limited", limit=Limit(rate=RATE, burst=BURST, per=per))
        queue.push_many(large, headers={"customer": "large"})
        queue.push_many(small, headers={"customer": "small"})
    began = time.monotonic()
    ledger = ledger_of("rate")
    took_s = time.monotonic() - began
    with Client(url) as client:
        client.reshape("limited", limit=False)
        left = batches_left(client.queue("limited", max_tries=None))
        rest = [each.payload for held in left for each in held]
    started = {each for end in ("commit", "rollback", "release") for each in ledger[f"begin-{end}"]}
    limited = [each for each in started if per is None or not each.startswith("small")]
    assert len(limited) <= BURST + RATE * took_s * DRIFT, "too many started"
    check_claims(ledger, large + small, rest)
    check_work(ledger, kills)


@pytest.mark.slow
@few_or_many_kills
def test_killed_users_of_priorities_leave_an_exact_ledger(
    kills: int, url: str, ledger_of: Callable[[str], Ledger]
) -> None:
    """The messages that are left are handed out by priority."""
    ledger = ledger_of("priority")
    with Client(url) as client:
        queue = client.queue("jobs", kind="priority", max_tries=None)
        eventually(lambda: queue.counts().reserved == 0, "the leases of the killed lapse")
        left = queue.counts().total
        rest = []
        while held := queue.reserve_many(10_000, timeout=0):
            rest += held
            queue.commit(*held)
        dead = client.queue("jobs.dead").pop_many(100_000, timeout=0)
        assert queue.counts().total == 0, "everything is drained"
        assert queue.next_when() is None
    assert len(rest) == left, "a consumer gets all that is stored"
    levels = [each.priority for each in rest]
    assert None not in levels
    assert levels == sorted(levels, reverse=True), "by priority"  # type: ignore[type-var]  # none is None
    changed = set(ledger["begin-reprioritize"])
    for each in (*rest, *dead):
        assert each.payload in changed or f".{each.priority}:" in each.payload
    ends = Counter(each.payload for each in (*rest, *dead))
    check_ends(ledger, ends, {each.payload for each in dead})
    check_work(ledger, kills)


@few_or_many_kills
def test_killed_users_of_a_bucket_leave_an_exact_ledger(
    kills: int, url: str, ledger_of: Callable[[str], Ledger]
) -> None:
    ledger = ledger_of("bucket")
    with Client(url) as client:
        queues = [client.queue(each, kind="bucket", max_tries=None) for each in ("jobs", "further")]
        for queue in queues:
            eventually(lambda: queue.counts().reserved == 0, "the leases of the killed lapse")  # noqa: B023  # it is called at once
        ends: Counter[str] = Counter()

        def drained() -> bool:
            """Consume the rest: windows of packs come one after the other."""
            for queue in queues:
                while held := queue.reserve_many(10_000, timeout=0):
                    ends.update(each.payload for each in held)
                    queue.commit(*held)
            handed = client.database["pyqueue"].count_documents({"handed.0": {"$exists": True}})
            return sum(queue.counts().total for queue in queues) == 0 and not handed

        eventually(drained, "everything is drained")
        assert [queue.next_when() for queue in queues] == [None, None]
        gone = {
            name: [each.payload for each in client.queue(name).pop_many(100_000, timeout=0)]
            for name in ("jobs.dead", "further.dead", "moved")
        }
        results = {each.id: each.payload for each in client.queue("results").peek(100_000)}
    assert results
    assert all(id == payload for id, payload in results.items())
    for payloads in gone.values():
        ends.update(payloads)
    check_ends(ledger, ends, {*gone["jobs.dead"], *gone["further.dead"]})
    check_work(ledger, kills)


@few_or_many_kills
def test_killed_processes_leave_an_exact_ledger(
    kills: int, url: str, ledger_of: Callable[[str], Ledger]
) -> None:
    """The positions of a stream are contiguous, too."""
    ledger = ledger_of("stream")
    with Client(url) as client:
        log = client.stream("log")
        contents: dict[int, str] = {}
        while page := log.read(after=len(contents) - 1 if contents else None, limit=50_000):
            contents |= {each.position: each.payload for each in page}
        assert list(contents) == list(range(len(contents))), "contiguous"
        assert max(Counter(contents.values()).values()) == 1, "stored twice"
        for payload, position in ledger.lines("appended"):
            assert contents[int(position)] == payload, "acknowledged, and missing"

        group = log.consumer("g", max_tries=None)
        delivered = [each.position for held in batches_left(group, 5000) for each in held]
        dead = [
            each.dead["position"] for each in client.queue("log.g.dead").peek(100_000) if each.dead
        ]
        hidden = client.database["pyqueue"].count_documents({"q": {"$regex": "^~handover"}})
    assert hidden <= kills * 3, "only copies that no burial decided on"
    committed, begun = ({*map(int, ledger[word])} for word in ("commit", "begin-commit"))
    assert max(ledger["commit"].values()) == 1, "finished twice"
    ends = Counter(delivered) + Counter(dead) + Counter(committed)
    assert max(ends.values()) == 1, "finished twice"
    assert {*map(int, ledger["bury"])} <= set(dead)
    assert set(contents) - set(ends) <= begun, "lost"
    check_work(ledger, kills)


@few_or_many_kills
def test_killed_processes_make_each_part_once(
    kills: int, url: str, ledger_of: Callable[[str], Ledger]
) -> None:
    """Each message became its parts, each part once, or it is still there."""
    messages = 40 * kills
    with Client(url) as client:
        queue = client.queue("in", max_tries=None)
        queue.push_many(range(messages))
        ledger_of("handover")
        collection = client.database["pyqueue"]
        ended = collection.count_documents({"ended": {"$exists": True}})
        left = queue.counts().total
        recover_all(client, "in")  # otherwise the stage waits for its next pass
        stage(client).run(until_empty=True, handle_signals=False)
        stored = collection.find({"q": {"$in": ["parts-0", "parts-1"]}, "payload": {"$type": 4}})
        parts = Counter(tuple(each["payload"]) for each in stored)
        hidden = collection.count_documents({"q": "~handover:in"})
    print(f"{kills} kills: {messages - left} of {messages} messages were done, {ended} half done")
    assert parts == Counter((number, part) for number in range(messages) for part in range(OUTPUTS))
    # On a slow machine, a few processes may be killed before they do any work.
    assert left < messages or kills < 100, "no process did any work"
    assert hidden <= kills * 4 * OUTPUTS, "only copies that no process decided on"


@few_or_many_kills
def test_killed_pushers_reach_all_queues_or_none(
    kills: int, url: str, ledger_of: Callable[[str], Ledger]
) -> None:
    ledger = ledger_of("also")
    with Client(url) as client:
        collection = client.database["pyqueue"]
        half_done = collection.count_documents({"ended": {"$exists": True}})
        recover_all(client, "first")
        found = {
            queue: Counter(each["payload"] for each in collection.find({"q": queue, "tries": 0}))
            for queue in ("first", *ALSO)
        }
        hidden = collection.count_documents({"q": "~handover:first"})
    payloads = found["first"]
    print(f"{kills} kills: {payloads.total()} messages, {half_done} half done, {hidden} hidden")
    assert found == dict.fromkeys(found, payloads)
    assert max(payloads.values()) == 1, "pushed twice"
    assert set(ledger["pushed"]) <= set(payloads), "lost"
    assert hidden <= (kills + 3) * (2 + len(ALSO)), "only messages that no process decided on"
