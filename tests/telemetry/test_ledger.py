"""Without faults the stored figures equal a ledger exactly: each kind, many threads, each verb."""

from __future__ import annotations

import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pyqueue import Backoff, Client, Limit, Many, QueueStats, To
from pyqueue.telemetry.figures import COUNTS

#: The options of each kind of queue.
KINDS: dict[str, dict[str, Any]] = {
    "standard": {},
    "priority": {"kind": "priority"},
    "ordered": {"kind": "ordered", "on_failure": "skip"},
    "bucket": {"kind": "bucket"},
    "limit": {"limit": Limit(concurrency=20)},
    "rate": {"limit": Limit(rate=5000, burst=500)},
    "stream": {},
}
TRIES = 3
ROUNDS = 15
#: They have the calls and the hooks of standard queues.
LIKE_STANDARD = ("priority", "limit", "rate")


class Ledger:
    """What threads did, as they know it from the results of their calls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()

    def add(self, name: str, number: int) -> None:
        with self._lock:
            self.counts[name] += number

    def equals(self, stats: QueueStats) -> bool:
        assert dict(stats.counts) == {name: self.counts[name] for name in COUNTS}
        return True


def options_of(kind: str, number: int, rng: random.Random) -> dict[str, Any]:
    """Return the options with which messages are pushed to a kind."""
    if kind == "priority":
        return {"priorities": [rng.randrange(10) for _ in range(number)]}
    if kind == "ordered":
        return {"groups": [rng.choice("abcdefgh") for _ in range(number)]}
    return {}


def push(client: Client, kind: str, ledger: Ledger, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(ROUNDS):
        number = rng.choice((1, 2, 7, 30))
        if kind == "stream":
            client.stream("s").append_many(range(number))
        else:
            queue = client.queue("q", **KINDS[kind])
            queue.push_many(range(number), **options_of(kind, number, rng))
        ledger.add("pushed", number)


def work(client: Client, kind: str, ledger: Ledger, seed: int) -> None:
    """Receive and settle messages in every way."""
    rng = random.Random(seed)
    queue: Any
    options: dict[str, Any] = {"max_tries": TRIES, "backoff": Backoff(base=0)}
    if kind == "stream":
        queue = client.stream("s").consumer("g", **options)
        verbs = ["commit", "rollback", "release", "bury"]
    else:
        queue = client.queue("q", **KINDS[kind], **options)
        verbs = ["commit", "rollback", "release", "bury", "move"]
        if kind not in ("ordered", "limit", "rate"):
            verbs.append("pop")
    for _ in range(ROUNDS):
        verb = rng.choice(verbs)
        if verb == "pop":
            popped = queue.pop_many(rng.choice((1, 5)), timeout=0.05)
            ledger.add("received", len(popped))
            ledger.add("finished", len(popped))
            continue
        held = queue.reserve_many(rng.choice((1, 3, 40)), timeout=0.05)
        if not held:
            continue
        ledger.add("received", len(held))
        how: dict[str, Any] = {"move": {"to": rng.choice(("x", "y.z"))}}.get(verb, {})
        if verb == "rollback":
            how = {"delay": 0, "error": ValueError("no")}
        getattr(queue, verb)(*held, **how)
        settle(ledger, verb, held)


def settle(ledger: Ledger, verb: str, held: list[Any]) -> None:
    names = {"commit": "finished", "move": "moved", "release": "released", "bury": "dead"}
    for each in held:
        last = each.tries >= TRIES
        ledger.add(names.get(verb, "dead" if last else "retried"), 1)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(each, marks=[pytest.mark.slow] * (each in LIKE_STANDARD)) for each in KINDS],
)
def test_figures_of_threads_equal_the_ledger(url: str, client: Client, kind: str) -> None:
    pushed, worked = Ledger(), Ledger()
    counting = [Client(url, telemetry=True) for _ in range(2)]
    with ThreadPoolExecutor(5) as threads:
        jobs = [threads.submit(push, counting[0], kind, pushed, 0)]
        jobs += [threads.submit(work, counting[n % 2], kind, worked, n) for n in range(1, 5)]
        for each in jobs:
            each.result()
    for one in counting:
        one.close()
    stats = client.queue("q").stats()
    if kind == "stream":
        assert pushed.equals(client.stream("s").stats())
        stats = client.stream("s").consumer("g").stats()
    else:
        worked.counts += pushed.counts
        assert sum(stats.moved.values()) == worked.counts["moved"]
        for name, number in stats.moved.items():
            assert client.queue(name).counts().total == number
    assert worked.equals(stats)
    counts = worked.counts
    assert counts["received"] > 50
    assert stats.waiting.count == counts["received"]
    assert stats.end_to_end.count == counts["finished"]
    ends = ("finished", "moved", "retried", "released", "dead")
    assert counts["received"] == sum(counts[name] for name in ends)
    errors = client.database["pyqueue.errors"].find_one({"type": "ValueError"})
    assert errors is not None
    assert errors["tries"] == counts["retried"] + dead_of_tries(client, kind)


def dead_of_tries(client: Client, kind: str) -> int:
    """Return how many messages were buried by a rollback of their last try."""
    name = "s.g.dead" if kind == "stream" else "q.dead"
    found = client.queue(name).browse(limit=1000, budget=100_000)
    assert found.complete
    return sum(each.dead is not None and each.dead.reason == "tries" for each in found.messages)


def test_many_counts_one_finished_and_its_outputs(url: str, client: Client) -> None:
    with Client(url, telemetry=True) as counting:
        counting.queue("in").push_many(range(20))
        pipeline = counting.pipeline("p")

        @pipeline.choice("in", to=["a", "b"])
        def split(number: int) -> Any:
            if number == 0:
                return To("a")
            return Many([To("a", number), To("b", number), To("b", -number)])

        pipeline.run(until_empty=True, handle_signals=False)
    found = {name: client.queue(name).stats() for name in ("in", "a", "b")}
    assert (found["in"].counts["finished"], found["in"].moved) == (19, {"a": 1})
    assert found["in"].counts["pushed"] == 20
    assert (found["a"].counts["pushed"], found["b"].counts["pushed"]) == (19, 38)
    assert client.queue("a").counts().total == 20
