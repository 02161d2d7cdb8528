"""A receive stays within its byte limit, and gives back messages that do not fit.

There is no database: the time is virtual.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any
from unittest.mock import Mock

import pytest

from pyqueue.backends.byte_limit import Limits, find_fitting
from pyqueue.errors import ConfigurationError, QueueError, Unavailable
from pyqueue.messages import MAX_RECEIVED_BYTES
from pyqueue.requests import Coalesce, Command, Delete, Find, Plan, UpdateEach
from pyqueue.runtime.waiters import Waiters
from tests.plans.runner import Runner, standard
from tests.plans.store import Pause, Process, World

KB = 1000
#: For the largest message that was seen, before messages became larger.
SMALL = 300
verbs = pytest.mark.parametrize("pop", [False, True], ids=["reserve", "pop"])


class Killed(QueueError):
    """The process was killed. No plan catches it."""


class FailingProcess(Process):
    """A client that fails at one of its commands, and makes calls of several callers at once."""

    def __init__(self, world: World) -> None:
        super().__init__(world, "a")
        #: The number of the command that fails; whether it is carried out; and how it fails.
        self.fails_at = -1
        self.carried_out = False
        self.error: type[QueueError] = Unavailable
        self.failed: Any = None
        #: The limits of the callers of a batch, and their results.
        self.callers: list[Limits] = []
        self.shares: list[list[str]] = []

    def _answer(self, request: Any, slow: float) -> Generator[Pause, None, Any]:
        if isinstance(request, Coalesce) and self.callers:
            results = yield from self.run(request.batch(self.callers), slow=slow)
            self.shares = [[document["_id"] for document, _ in share] for share in results]
            return results[0]
        if not isinstance(request, Command):
            return (yield from super()._answer(request, slow))
        self.fails_at -= 1
        if self.fails_at != 0:
            return (yield from super()._answer(request, slow))
        self.failed = request
        if self.carried_out:
            yield from super()._answer(request, slow)
        raise self.error("cut off")


class Bench:
    """A queue of messages m000, m001, ... of these sizes, and one client."""

    def __init__(self, sizes: Sequence[int], *, seen: int | None = None, **options: Any) -> None:
        self.world = World(0)
        self.process = FailingProcess(self.world)
        self.queue = standard("a", **{"lease": 60, **options})
        self.names = [f"m{number:03}" for number in range(len(sizes))]
        text = "x" * max(sizes)
        self.run(self.queue.push([text[:size] for size in sizes], ids=self.names))
        self.world.run(self.world.time + 1000)
        if seen is not None:
            self.process.waiters.scan.largest_seen = seen
        self.process.commands.clear()

    def run(self, plan: Plan[Any]) -> Any:
        """Run a plan to its end. Return its result, or raise its error."""
        return self.world.finish(self.process.run(plan))

    def receive(self, limit: int, max_bytes: int | None = None, *, pop: bool = False) -> list[str]:
        most = MAX_RECEIVED_BYTES if max_bytes is None else max_bytes
        plan = self.queue.receive(self.process.waiters, limit, timeout=0, pop=pop, max_bytes=most)
        return [each.id for each in self.run(plan)]

    def drain(self, limit: int, max_bytes: int, *, pop: bool = False) -> list[str]:
        """Receive all that is ready."""
        received: list[str] = []
        while got := self.receive(limit, max_bytes, pop=pop):
            received += got
        return received

    def untouched(self, names: Sequence[str]) -> bool:
        """Return whether these messages bear no trace of a claim."""
        stored = [self.world.store.documents[name] for name in names]
        return all(
            "token" not in each and each["when"] == each["due"] and not each.get("tries")
            for each in stored
        )


@verbs
@pytest.mark.parametrize("seen", [None, SMALL])
def test_receive_takes_the_messages_that_fit(pop: bool, seen: int | None) -> None:
    bench = Bench([100 * KB] * 10, seen=seen)
    assert bench.receive(10, 350 * KB, pop=pop) == bench.names[:3]
    assert bench.untouched(bench.names[3:])
    assert bench.receive(10, 350 * KB, pop=pop) == bench.names[3:6]
    assert bench.receive(10, pop=pop) == bench.names[6:]


@verbs
def test_receive_has_a_limit_by_default(pop: bool) -> None:
    """More than one batch of the server: the claim finds out after it claimed all of them."""
    bench = Bench([1000 * KB] * 60, seen=SMALL)
    assert bench.receive(60, pop=pop) == bench.names[:50]
    assert bench.untouched(bench.names[50:])
    bench.process.commands.clear()
    assert bench.receive(60, pop=pop) == bench.names[50:]
    assert not any(isinstance(each, UpdateEach) for each in bench.process.commands)


@verbs
@pytest.mark.parametrize("seen", [None, SMALL])
def test_first_message_is_received_whatever_its_size(pop: bool, seen: int | None) -> None:
    bench = Bench([50 * KB, 20 * KB, 1, 1], seen=seen)
    assert bench.receive(4, 10 * KB, pop=pop) == ["m000"]
    assert bench.receive(4, 10 * KB, pop=pop) == ["m001"]
    assert bench.receive(4, 10 * KB, pop=pop) == ["m002", "m003"]


@verbs
@pytest.mark.parametrize("seen", [None, SMALL])
def test_all_claims_of_a_call_share_one_limit(pop: bool, seen: int | None) -> None:
    bench = Bench([KB] * 300, seen=seen)
    received = bench.receive(300, 200 * KB, pop=pop)
    assert received == bench.names[: len(received)]
    assert 150 < len(received) < 200
    assert bench.untouched(bench.names[len(received) :])
    assert bench.receive(300, 400 * KB, pop=pop) == bench.names[len(received) :]


@verbs
def test_last_message_of_a_call_must_fit_too(pop: bool) -> None:
    bench = Bench([KB] * 100 + [500 * KB])
    assert bench.receive(101, 300 * KB, pop=pop) == bench.names[:100]
    assert bench.untouched(bench.names[100:])


def test_small_messages_cost_no_further_command() -> None:
    bench = Bench([KB] * 203)
    bench.receive(100)  # the first claim of many reads the sizes
    bench.process.commands.clear()
    assert len(bench.receive(100)) == 100
    scan, _, _ = bench.process.commands
    assert isinstance(scan, Find)
    assert scan.projection == {"_id": 1, "when": 1}
    bench.process.waiters.scan = type(bench.process.waiters.scan)()
    bench.process.commands.clear()
    bench.receive(3)  # they fit, whatever their sizes
    assert bench.process.commands[1].projection == {"_id": 1, "when": 1}


def test_claimed_messages_are_read_as_one_batch() -> None:
    """A negative limit asks for a single batch, so that memory is bounded too."""
    bench = Bench([KB] * 20)
    bench.receive(20)
    collection = Mock()
    bench.process.commands[-1].send(collection)
    assert collection.find.call_args.kwargs["limit"] == -20


def test_rest_is_found_at_once_if_giving_it_back_is_unsure() -> None:
    """The rest was given back, but the reply was lost, so there is no signal."""
    bench = Bench([100 * KB] * 6, seen=SMALL)
    bench.receive(2, 350 * KB)
    bench.process.waiters.scan.largest_seen = SMALL
    bench.process.fails_at, bench.process.carried_out = 4, True
    assert bench.receive(4, 250 * KB) == bench.names[2:4]
    assert isinstance(bench.process.failed, UpdateEach)
    assert bench.receive(4) == bench.names[4:]


def test_large_messages_are_not_claimed_again_and_again() -> None:
    """Once a claim has met large messages, later claims read the sizes first."""
    bench = Bench([100 * KB] * 40, seen=SMALL)
    assert bench.drain(40, 350 * KB) == bench.names
    assert sum(isinstance(each, UpdateEach) for each in bench.process.commands) == 1


@verbs
@pytest.mark.parametrize("history", [None, 60])
def test_callers_of_one_batch_keep_their_byte_limits(pop: bool, history: int | None) -> None:
    bench = Bench([100 * KB] * 12, history=history)
    bench.process.callers = [
        Limits(10, 250 * KB),
        Limits(1, 10 * KB),
        Limits(10, 50 * KB),
        Limits(2, 900 * KB),
    ]
    bench.receive(10, pop=pop)
    shares = bench.process.shares
    assert [len(share) for share in shares] == [2, 1, 1, 2]
    received = [each for share in shares for each in share]
    assert received == bench.names[:6]
    assert bench.untouched(bench.names[6:])


def test_each_caller_gets_one_before_one_gets_all() -> None:
    bench = Bench([60 * KB] * 4)
    bench.process.callers = [Limits(10, 130 * KB), Limits(10, 10 * KB)]
    bench.receive(10)
    assert bench.process.shares == [["m000"], ["m001"]]
    assert bench.untouched(bench.names[2:])


@verbs
@pytest.mark.parametrize("carried_out", [False, True])
@pytest.mark.parametrize("error", [Unavailable, Killed])
def test_call_that_fails_loses_nothing(
    pop: bool, carried_out: bool, error: type[QueueError]
) -> None:
    """A call is cut at each of its commands. Whatever it held comes back with the lease."""
    sizes = [100 * KB] * 6 + [KB] * 3
    for command in range(1, 30):
        bench = Bench(sizes, seen=SMALL)
        process = bench.process
        process.fails_at, process.carried_out, process.error = command, carried_out, error
        try:
            first = bench.receive(9, 350 * KB, pop=pop)
        except QueueError:
            first = []
        if process.failed is None:
            break
        bench.world.run(bench.world.time + 120_000)
        bench.process.waiters.on_signal(None, process.now())
        rest = bench.drain(9, 350 * KB, pop=pop)
        lost = isinstance(process.failed, Delete) and carried_out
        if pop:
            assert len(first + rest) == len({*first, *rest})
        assert lost or {*first, *rest} == {*bench.names}
        if isinstance(process.failed, UpdateEach) and error is Unavailable:
            assert first == bench.names[:3]  # it is no error of the call
    else:
        pytest.fail("the call has no end")
    assert command > 5


@pytest.mark.parametrize("value", [0, -1, 1.5, "48 MB", True, None])
def test_max_bytes_is_a_whole_number(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"max_bytes: .*use a whole number from 1"):
        Runner().run(standard().receive(Waiters("t"), 5, timeout=0, max_bytes=value))


# ---- named claims

MB = 2**20


def fitting(sizes: Sequence[int], max_bytes: int) -> tuple[int, list[int]]:
    """Return how many of the first messages fit, and how many sizes each scan has read."""
    stored = [{"_id": number, "bytes": size} for number, size in enumerate(sizes)]
    plan, looks = find_fitting(Find({"q": "a"}, limit=10_000), max_bytes), []
    answer: Any = None
    while True:
        try:
            request = plan.send(answer)
        except StopIteration as stop:
            fit: list[Any] = stop.value
            break
        assert isinstance(request, Find)
        answer = stored[: request.limit]
        looks.append(len(answer))
    assert fit == stored[: len(fit)]
    return len(fit), looks


@pytest.mark.parametrize(
    ("sizes", "fit", "looks"),
    [
        ([300] * 20_000, 10_000, [10, 100, 1000, 10_000]),
        ([300] * 500, 500, [10, 100, 500]),
        ([MB] * 10_000, 64, [10, 65]),
        ([MB] * 64 + [1], 64, [10, 65]),
        ([65 * MB, 1, 1, 1, 1], 1, [5]),
        ([1, 65 * MB, 1, 1, 1], 1, [5]),
        ([1] * 10 + [MB] * 10_000, 73, [10, 100]),
        ([16 * MB] * 4, 4, [4]),
        ([1], 1, [1]),
        ([], 0, [0]),
    ],
    ids=[
        *("small", "all", "large", "exactly", "one", "second", "unlike", "few", "single", "none"),
    ],
)
def test_named_claim_reads_few_more_sizes_than_fit(
    sizes: list[int], fit: int, looks: list[int]
) -> None:
    assert fitting(sizes, 64 * MB) == (fit, looks)
    assert fit <= 1 or sum(sizes[:fit]) <= 64 * MB
    assert fit in (len(sizes), 10_000) or sum(sizes[: fit + 1]) > 64 * MB
