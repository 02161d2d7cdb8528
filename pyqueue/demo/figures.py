"""The figures of the demo, counted twice: from the file, and from the collection and the queues."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from pymongo.collection import Collection

from pyqueue import Client
from pyqueue.demo.flights import LATE, QUEUES
from pyqueue.demo.rows import BROKEN, Line

Figures = dict[str, Any]

DEAD = "dead letters with the error that was made"
BACK = "flights held by the killed consumer, and stored again after it"


def expected(lines: Iterable[Line], held: int) -> Figures:
    """Compute the figures from the file, without using the code of the pipeline.

    Args:
        lines: The lines of the file.
        held: How many flights the killed consumer had stored and not committed.
    """
    flights, late, cancelled, arrived, minutes = (Counter[str]() for _ in range(5))
    for line in lines:
        carrier, delay = line["carrier"], line["arr_delay"]
        flights[carrier] += 1
        cancelled[carrier] += line["dep_time"] == "NA"
        late[carrier] += line["dep_time"] != "NA" and (delay == "NA" or int(delay) >= LATE)
        if delay != "NA":
            arrived[carrier] += 1
            minutes[carrier] += int(delay)
    total = flights.total()
    out = {"raw": total, "parsed": total, "late": late.total(), "cancelled": cancelled.total()}
    out["on-time"] = total - out["late"] - out["cancelled"]
    queues = {name: {"in": count, "out": count, "dead": 0} for name, count in out.items()}
    queues["raw"] |= {"in": total + BROKEN, "dead": BROKEN}
    carriers = {
        name: {
            "flights": flights[name],
            "late": late[name],
            "cancelled": cancelled[name],
            "mean_delay": minutes[name] / arrived[name] if arrived[name] else None,
        }
        for name in flights
    }
    return {"queues": queues, "carriers": carriers, DEAD: BROKEN, BACK: held}


def measured(client: Client, results: Collection[Figures], pushed: int, held: list[int]) -> Figures:
    """Count the same figures as ``expected``, from the collection and the queues.

    Args:
        client: A client on the namespace of the queues.
        results: The collection of the stored flights.
        pushed: How many rows were pushed.
        held: The ids of the flights that the killed consumer had stored and not committed.
    """
    out: Counter[str] = Counter()
    flights: dict[str, list[Figures]] = defaultdict(list)
    for each in results.find():
        out.update(each["passed"])
        flights[each["carrier"]].append(each)
    queues, carriers = {}, {}
    for name in QUEUES:
        queue = client.queue(name)
        dead = client.queue(f"{name}.dead").counts().total
        entered = pushed if name == "raw" else out[name] + queue.counts().total + dead
        queues[name] = {"in": entered, "out": out[name], "dead": dead}
    for name, own in flights.items():
        delays = [each["delay"] for each in own if each["delay"] is not None]
        carriers[name] = {
            "flights": len(own),
            "late": sum(each["passed"][-1] == "late" for each in own),
            "cancelled": sum(each["passed"][-1] == "cancelled" for each in own),
            "mean_delay": sum(delays) / len(delays) if delays else None,
        }
    dead_letters = client.queue("raw.dead").peek(1000)
    dead = sum(
        "broken_on_purpose" in each.payload
        and f"{each.payload['broken_on_purpose']}: " in (each.error.message if each.error else "")
        for each in dead_letters
    )
    stored_again = results.count_documents({"_id": {"$in": held}, "writes": {"$gt": 1}})
    return {"queues": queues, "carriers": carriers, DEAD: dead, BACK: stored_again}


def compare(file: Any, here: Any, name: str = "") -> tuple[int, list[Figures]]:
    """Compare two sets of figures. Return their number, and the figures that are not equal."""
    if isinstance(file, dict) and isinstance(here, dict):
        parts = [
            compare(file.get(each), here.get(each), f"{name}, {each}".strip(", "))
            for each in file | here
        ]
        return sum(count for count, _ in parts), [wrong for _, some in parts for wrong in some]
    return 1, [] if file == here else [{"figure": name, "file": file, "here": here}]
