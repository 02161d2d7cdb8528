"""Pushes into several queues on a server: many threads push the same messages at once."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from pyqueue import Client

QUEUES = ("a", "b", "c")
IDS = 40
THREADS = 8


def test_threads_push_each_id_once(url: str) -> None:
    """One of several pushes with an id decides. Most of them meet another that has not decided."""
    clients = [Client(url) for _ in range(2)]

    def push(number: int) -> list[str]:
        queue, ids = clients[number % 2].queue("a"), [f"m{n}" for n in range(IDS)]
        # Neighbours push the same id at the same time.
        random.Random(number // 4).shuffle(ids)
        return [str(queue.push(id, id=id, also=QUEUES[1:])) for id in ids]

    with ThreadPoolExecutor(THREADS) as threads:
        found = list(threads.map(push, range(THREADS)))
    assert [sorted(each) for each in found] == [sorted(f"m{n}" for n in range(IDS))] * THREADS
    stored = clients[0].database["pyqueue"]
    for queue in QUEUES:
        payloads = Counter(each["payload"] for each in stored.find({"q": queue, "tries": 0}))
        assert payloads == dict.fromkeys((f"m{n}" for n in range(IDS)), 1)
    assert stored.count_documents({"q": "~handover:a"}) == 0
    for each in clients:
        each.close()
