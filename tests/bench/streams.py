"""Streams: appends and consumers in packs of 1000, ten groups, and several appenders at once."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from pyqueue import Client
from tests.bench.figures import at_least, at_most
from tests.bench.harness import Bench, interleave, payload, timed
from tests.support.processes import spawn_pool

PACK = 1000


def run(bench: Bench) -> None:
    """Measure all figures at majority."""
    packs, rounds = bench.either(10, 40), bench.either(5, 9)
    with bench.blocking("majority") as (client, raw):
        log = client.stream("log")
        values = [payload(number) for number in range(PACK)]
        log.append_many(values * packs)

        def consume(name: str) -> float:
            group = log.consumer(name, start=0)
            group.reserve_many(1, timeout=0)
            group.seek("first")
            start = time.perf_counter()
            for _ in range(packs):
                held = group.reserve_many(PACK, timeout=0)
                assert len(held) == PACK
                group.commit(*held)
            return (time.perf_counter() - start) / packs / PACK

        def append() -> None:
            for _ in range(packs):
                log.append_many(values)

        loop = bench.either(100, 300)

        def raw_inserts() -> None:
            for number in range(loop):
                raw.insert_one({"payload": payload(number)})

        names = map("g{}".format, itertools.count())
        before, appended, consumed = interleave(
            rounds,
            partial(timed, raw_inserts, loop),
            partial(timed, append, packs * PACK),
            lambda: consume(next(names)),
        )
        shown = f"packs of {PACK}"
        bench.speed(f"append_many, {shown}", before, appended, rounds * packs * PACK)
        rate(bench, f"append_many, {shown}", appended, rounds * packs * PACK)
        rate(bench, f"reserve_many and commit, {shown}", consumed, rounds * packs * PACK)
    ten_groups(bench)
    appenders(bench)


def rate(bench: Bench, name: str, seconds: list[float], n: int) -> None:
    """Add a row of messages per second."""
    bench.row(name, "messages/s", [1 / each for each in seconds], n, at_least(100_000))


def ten_groups(bench: Bench) -> None:
    """Compare appends to a stream without groups with those to one with ten idle groups."""
    calls, rounds = bench.either(50, 200), bench.either(5, 9)
    with bench.blocking("majority") as (client, _):
        plain, read = client.stream("plain"), client.stream("read")
        for number in range(10):
            read.consumer(f"g{number}", start="last").pause()

        def side(append: Callable[[int], Any]) -> float:
            return timed(lambda: [append(number) for number in range(calls)], calls)

        alone, together = interleave(
            rounds, partial(side, plain.append), partial(side, read.append)
        )
        name = "append with ten groups, compared with none"
        bench.cost(name, alone, together, rounds * calls, at_most(1.15))


def append_for(url: str, name: str, seconds: float) -> int:
    """Append single messages for some time, in a separate process. Return how many."""
    with Client(url, telemetry=False) as client:
        log = client.stream(name)
        log.append(0)
        count, end = 0, time.perf_counter() + seconds
        while time.perf_counter() < end:
            log.append(payload(count))
            count += 1
        return count


def appenders(bench: Bench) -> None:
    """Compare four processes that append single messages with one."""
    seconds, rounds = bench.either(2, 5), bench.either(3, 5)
    shares: list[float] = []
    with bench.database() as url, spawn_pool(4) as pool:

        def total(number: int) -> float:
            name = f"log{number}"
            counts = list(pool.map(append_for, [url] * number, [name] * number, [seconds] * number))
            if number > 1:
                shares.append(min(counts) / max(counts))
            return sum(counts) / seconds

        total(4)  # the processes start
        shares.clear()
        one, four = interleave(rounds, partial(total, 1), partial(total, 4))
    ratio = [some / alone for alone, some in zip(one, four, strict=True)]
    note = f"{sum(one) / rounds:.0f}/s and {sum(four) / rounds:.0f}/s"
    name = "single appends by four processes, compared with one"
    bench.row(name, "x", ratio, rounds, at_least(0.4), note)
    bench.row("smallest share of a process, compared with the largest", "x", shares, rounds)
