"""The cost of limits: queues with a limit that is not reached next to one without.

The rounds alternate between them. The last rows show the cost of a key with many messages for the
rest.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from pyqueue import Client, Limit, Queue
from tests.bench.figures import at_least, at_most, ratios
from tests.bench.harness import BATCH, Bench, interleave, micros, payload, singles, take, timed

#: Limits that are not reached, and the least part of the speed without one that is left: of
#: batches, and of messages one by one.
LIMITS = {
    "a limit": (Limit(concurrency=200), 0.4, 0.4),
    "a limit per customer": (Limit(concurrency=200, per="headers.customer"), 0.4, 0.4),
    "a rate": (Limit(rate=1_000_000, burst=100_000), 0.4, 0.2),
    "a rate per customer": (
        Limit(rate=1_000_000, burst=100_000, per="headers.customer"),
        0.4,
        0.2,
    ),
}
KEYS = 1000
#: How many scans the messages of a large key may hold up the rest.
FIRST_SCANS = 64


def run(bench: Bench) -> None:
    with bench.blocking("majority") as (client, _):
        beside_standard(bench, client)
    with bench.blocking("majority") as (client, _):
        beside_a_large_key(bench, client)


def fill(queue: Queue[Any], count: int) -> None:
    """Push ``count`` messages of a thousand customers."""
    for number in range(0, count, BATCH):
        queue.push_many([payload(number)] * BATCH, headers={"customer": number // BATCH % KEYS})


def beside_standard(bench: Bench, client: Client) -> None:
    """Measure claims with a limit and without one in turn."""
    rounds, calls, count = bench.either(5, 9), bench.either(50, 200), bench.either(2000, 5000)
    queues = [client.queue("plain")]
    queues += [client.queue(f"limit{n}", limit=each[0]) for n, each in enumerate(LIMITS.values())]

    def batches(queue: Queue[Any]) -> float:
        fill(queue, count)
        return timed(partial(take, queue, count), count)

    sides = interleave(rounds, *(partial(batches, each) for each in queues))
    for queue in queues:
        fill(queue, (rounds + 2) * calls)
    single = interleave(rounds, *(partial(singles, each, calls) for each in queues))
    for place, (name, (_, *least)) in enumerate(LIMITS.items(), start=1):
        for what, measured, target in (
            (f"reserve + commit of {BATCH}", sides, least[0]),
            ("reserve + commit", single, least[1]),
        ):
            pair = measured[0], measured[place]
            label, found = f"{what}, {name}", ratios(*pair)
            bench.row(label, "x standard", found, rounds, at_least(target), micros(*pair))


def beside_a_large_key(bench: Bench, client: Client) -> None:
    """Time from a push of a small customer to its receipt, behind a large one that waits."""
    depth, calls = bench.either(10_000, 100_000), bench.either(20, 50)
    limit = Limit(concurrency=1, per="headers.customer")
    queue = client.queue("large", limit=limit)
    for _ in range(depth // 1000):
        queue.push_many([payload(0)] * 1000, headers={"customer": "large"})
    for _ in range(FIRST_SCANS):
        queue.reserve_many(2, timeout=0)
    delays = []
    for number in range(calls):
        began = time.perf_counter()
        queue.push(number, headers={"customer": f"small{number}"})
        while not any(each.payload == number for each in queue.reserve_many(2, timeout=0)):
            pass
        delays.append(time.perf_counter() - began)
    name = f"longest wait of a customer behind {depth} messages of another one"
    bench.row(name, "s", [max(delays)], calls, at_most(0.2))
