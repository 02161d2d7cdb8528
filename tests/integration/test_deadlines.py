"""``pymongo.timeout`` around one call: it limits this call, and nothing that other calls share."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pymongo
import pytest
from pymongo import _csot

from pyqueue import AsyncClient, Client, Unavailable
from tests.support.eventually import LONG

CALLERS = 8

#: The calls, and whether their answers are messages.
CALLS: dict[str, tuple[Callable[[Any, Any], Any], bool]] = {
    "push": (lambda queue, held: queue.push("new"), False),
    "reserve": (lambda queue, held: queue.reserve(0), True),
    "pop": (lambda queue, held: queue.pop(0), True),
    "commit": (lambda queue, held: queue.commit(held), False),
    "extend": (lambda queue, held: queue.extend(held), False),
}


def prepare(queue: Any, call: str) -> list[Any]:
    """Push a message for each caller. Return the reservations that they settle."""
    queue.push_many(range(CALLERS))
    if call in ("commit", "extend"):
        held: list[Any] = queue.reserve_many(CALLERS, timeout=0)
        return held
    return [None] * CALLERS


def deadline(number: int) -> Any:
    """Return what limits a call: the second one has no time at all."""
    return pymongo.timeout(1e-6) if number == 1 else nullcontext()


def check(call: str, answers: list[Any]) -> int:
    """Check the answers. Return how many messages are left."""
    late = answers.pop(1)
    assert [each for each in answers if isinstance(each, BaseException)] == []
    if isinstance(late, BaseException):
        assert isinstance(late, Unavailable)
    else:
        answers.append(late)
    if not CALLS[call][1]:
        return 0
    received = {each.payload for each in answers}
    assert len(received) == len(answers), "a message was received twice"
    return CALLERS - len(received)


@pytest.mark.parametrize("kind", ["standard", "bucket"])
@pytest.mark.parametrize("call", CALLS)
def test_deadline_of_one_task_ends_no_other_call(
    url: str, client: Client, call: str, kind: str
) -> None:
    queue = client.queue("jobs", kind=kind)
    held = prepare(queue, call)

    async def one(shared: Any, number: int) -> Any:
        with deadline(number):
            return await CALLS[call][0](shared, held[number])

    async def main() -> None:
        async with AsyncClient(url) as other:
            shared = other.queue("jobs", kind=kind)
            await shared.counts()
            calls = [one(shared, number) for number in range(CALLERS)]
            left = check(call, await asyncio.gather(*calls, return_exceptions=True))
            # What was received for the late caller was given back, or was never taken.
            assert not left or await shared.reserve(timeout=LONG)

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["standard", "bucket"])
@pytest.mark.parametrize("call", CALLS)
def test_deadline_of_one_thread_ends_no_other_call(client: Client, call: str, kind: str) -> None:
    queue = client.queue("jobs", kind=kind)
    held = prepare(queue, call)

    def one(number: int) -> Any:
        try:
            with deadline(number):
                return CALLS[call][0](queue, held[number])
        except Exception as error:
            return error

    with ThreadPoolExecutor(CALLERS) as pool:
        left = check(call, list(pool.map(one, range(CALLERS), timeout=LONG)))
    assert not left or queue.reserve(timeout=LONG)


@pytest.mark.parametrize("call", ["push", "counts"])
def test_ctrl_c_leaves_no_deadline(
    client: Client, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may come where PyMongo's limit of a command is set, and not yet to be reset."""
    queue = client.queue("jobs")
    queue.push(1)
    timeout = pymongo.timeout

    class Interrupted:
        def __init__(self, seconds: float) -> None:
            self.real = timeout(seconds)

        def __enter__(self) -> None:
            self.real.__enter__()
            raise KeyboardInterrupt

        def __exit__(self, *_: object) -> None:
            raise AssertionError("it was not entered")

    with monkeypatch.context() as patched:
        patched.setattr(pymongo, "timeout", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            queue.push(2) if call == "push" else queue.counts()
    assert _csot.get_deadline() == math.inf
