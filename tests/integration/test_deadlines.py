"""One caller has a ``pymongo.timeout`` or a transaction, or forks: other callers notice nothing."""

from __future__ import annotations

import asyncio
import math
import signal
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, nullcontext, suppress
from threading import Event
from typing import Any

import pymongo
import pytest
from pymongo import _csot

from pyqueue import AsyncClient, Client, ConfigurationError, Unavailable
from pyqueue.runtime.drivers import AsyncDriver, Driver
from tests.integration.test_misuse import in_fork
from tests.integration.test_transactions import Undo
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
    """Return a limit for a call. The second call has no time at all."""
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


#: ``make test`` tries three calls of a bucket: a push, a receive and a settle.
each_call = pytest.mark.parametrize(
    ("call", "kind"),
    [
        *((call, "standard") for call in CALLS),
        *((call, "bucket") for call in ("push", "reserve", "commit")),
        *(pytest.param(call, "bucket", marks=pytest.mark.slow) for call in ("pop", "extend")),
    ],
)


@each_call
def test_deadline_of_one_task_ends_no_other_call(
    url: str, client: Client, call: str, kind: Any
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
            # The message of the late caller was given back, or was never taken.
            assert not left or await shared.reserve(timeout=LONG)

    asyncio.run(main())


@each_call
def test_deadline_of_one_thread_ends_no_other_call(client: Client, call: str, kind: Any) -> None:
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


# ---- a transaction, a fork


#: The call in a transaction, and the kind of queue. It locks no other message there.
in_a_transaction = pytest.mark.parametrize(
    ("call", "kind"), [("push", "standard"), ("push", "bucket"), ("commit", "standard")]
)


def act(queue: Any, call: str, held: Any, session: Any) -> Any:
    given = "new" if call == "push" else held
    return getattr(queue, call)(given, session=session)


def check_the_rest(queue: Any, call: str, held: list[Any], answers: list[Any]) -> None:
    """Check that all calls were done, except for the first."""
    assert len(answers) == CALLERS - 1
    if call == "push":
        assert queue.counts().ready == CALLERS + CALLERS - 1
    elif call == "commit":
        queue.commit(held[0])
        assert queue.counts().total == 0
    else:
        numbers = [each.payload for each in (*answers, queue.reserve(0))]
        assert sorted(numbers) == list(range(CALLERS))


@in_a_transaction
def test_transaction_of_one_task_holds_up_no_other_call(
    url: str, client: Client, call: str, kind: Any
) -> None:
    queue = client.queue("jobs", kind=kind)
    held = prepare(queue, call)

    async def main() -> list[Any]:
        answers: list[Any] = []
        async with AsyncClient(url) as other, asyncio.timeout(LONG):
            shared = other.queue("jobs", kind=kind)
            await shared.counts()
            calls = [CALLS[call][0](shared, each) for each in held[1:]]
            with suppress(Undo):
                async with other.transaction() as session:
                    mine = act(shared, call, held[0], session)
                    _, *answers = await asyncio.gather(mine, *calls)
                    raise Undo
        return answers

    check_the_rest(queue, call, held, asyncio.run(main()))


@in_a_transaction
def test_transaction_of_one_thread_holds_up_no_other_call(
    client: Client, call: str, kind: Any
) -> None:
    queue = client.queue("jobs", kind=kind)
    held = prepare(queue, call)
    answers: list[Any] = []

    def one(others: list[Future[Any]]) -> None:
        with suppress(Undo), client.transaction() as session:
            act(queue, call, held[0], session)
            answers.extend(each.result(LONG) for each in others)
            raise Undo

    with ThreadPoolExecutor(CALLERS) as pool:
        others = [pool.submit(CALLS[call][0], queue, each) for each in held[1:]]
        pool.submit(one, others).result(LONG)
    check_the_rest(queue, call, held, answers)


def check_child(call: Callable[[], object]) -> None:
    """Check that a call in a forked child is refused, and waits for no thread of its parent."""

    def use() -> object:
        signal.alarm(10)
        return call()

    outcome = in_fork(use)
    assert outcome.startswith(ConfigurationError.__name__)
    assert "fork" in outcome


forks_meanwhile = pytest.mark.filterwarnings("ignore:.*opened before fork:UserWarning")


@forks_meanwhile
@pytest.mark.parametrize("call", ["push", "reserve", "commit"])
def test_fork_of_one_task_ends_no_other_call(
    url: str, client: Client, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = client.queue("jobs")
    held = prepare(queue, call)

    async def main() -> list[Any]:
        sent, forked, ask = asyncio.Event(), asyncio.Event(), AsyncDriver.ask

        async def slow(self: AsyncDriver, request: Any) -> Any:
            sent.set()
            await forked.wait()
            return await ask(self, request)

        async with AsyncClient(url) as other, asyncio.timeout(LONG):
            shared = other.queue("jobs")
            await shared.counts()
            monkeypatch.setattr(AsyncDriver, "ask", slow)
            calls = [asyncio.ensure_future(CALLS[call][0](shared, each)) for each in held[1:]]
            await sent.wait()
            check_child(lambda: CALLS[call][0](shared, held[0]).send(None))
            forked.set()
            return await asyncio.gather(*calls)

    check_the_rest(queue, call, held, asyncio.run(main()))


@forks_meanwhile
@pytest.mark.parametrize(
    ("call", "kind"),
    [("push", "standard"), ("push", "bucket"), ("reserve", "bucket"), ("commit", "bucket")],
)
def test_fork_of_one_thread_ends_no_other_call(
    client: Client, call: str, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads share the commands of these calls."""
    queue = client.queue("jobs", kind=kind)
    held = prepare(queue, call)
    sent, forked, ask = Event(), Event(), Driver.ask

    def slow(self: Driver, request: Any) -> Any:
        sent.set()
        assert forked.wait(LONG)
        return ask(self, request)

    with monkeypatch.context() as patched, ThreadPoolExecutor(CALLERS) as pool:
        patched.setattr(Driver, "ask", slow)
        calls = [pool.submit(CALLS[call][0], queue, each) for each in held[1:]]
        try:
            assert sent.wait(LONG)
            pool.submit(check_child, lambda: CALLS[call][0](queue, held[0])).result(LONG)
        finally:
            forked.set()
        answers = [each.result(LONG) for each in calls]
    check_the_rest(queue, call, held, answers)


@pytest.mark.parametrize("given", ["serverSelectionTimeoutMS=70", "SERVERSELECTIONTIMEOUTMS=70"])
def test_url_may_say_how_long_to_look_for_a_server(given: str) -> None:
    for query, limit_s in ((f"?{given}", 0.07), ("?tls=false", 30)):
        with closing(Client(f"mongodb://127.0.0.1:1/{query}")) as client:
            assert client.database.client.options.server_selection_timeout == limit_s
