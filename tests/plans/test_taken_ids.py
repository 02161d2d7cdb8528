"""Handover where the id of each message is taken before its message leaves the pack.

Another document has the id, in another queue: a program pushed the result of a message under its
id. Or a former holder, which died, left a copy of the message hidden in another queue, from which
the pack has moved on. Consumers and movers are disturbed at each command. Whatever happens, nothing
is lost, nothing is there twice, and the other documents stay as they are.
"""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from itertools import islice, product
from typing import Any

import pytest

from pyqueue import DuplicateKey
from pyqueue.backends import recovering
from pyqueue.backends.bucket import packs
from pyqueue.backends.hidden import ENDED, HANDED, MARK
from pyqueue.backends.options import Options
from pyqueue.backends.queue_plans import plans_of
from pyqueue.backends.scan import FIRST
from pyqueue.clock import BAND
from pyqueue.messages import PackedReservation
from pyqueue.requests import Document, UpdateEach
from tests.plans import test_pack_moves as moves
from tests.plans import test_packs as ends
from tests.plans.faults import DISTURBANCES, Faults, each_command, some_or_all
from tests.plans.runner import NOW
from tests.plans.steps import Steps

#: Documents that have the ids. An ended source lies in a hidden queue, too, under its own id.
TAKERS: dict[str, Document] = {
    "message": {"q": "results", "when": NOW, "payload": "result"},
    "finished": {"q": "results", "when": BAND, "processed": NOW, "payload": "result"},
    "ended": {
        "q": "~handover:results",
        "when": FIRST,
        HANDED: [{"h": "t", "ids": ["x"]}],
        ENDED: {"at": BAND, "token": "t"},  # no recovery finishes it
    },
    "zombie": {"q": "~handover:former", "when": NOW, "payload": "zombie"},
}
WORKS: dict[str, Faults[Any]] = {"ends": ends.FAULTS, "moves": moves.FAULTS}
#: ``test_faults`` tries these, without a taken id.
UNTRIED = {"loses a request", "sleeps while another works"}

each_case = pytest.mark.parametrize(
    ("work", "taker"),
    [
        *(("ends", "message"), ("ends", "zombie"), ("moves", "zombie")),
        *(pytest.param("ends", each, marks=pytest.mark.slow) for each in ("finished", "ended")),
        pytest.param("moves", "message", marks=pytest.mark.slow),
    ],
)


def taken(faults: Faults[Any], taker: str) -> Faults[Any]:
    """Return the same faults in a store where each id of a message in a pack is taken."""
    takers = [
        {"_id": packs.message_id(pack, place), **TAKERS[taker]}
        | ({MARK: {"to": "a", "source": pack["_id"], "token": "t"}} if taker == "zombie" else {})
        for pack in faults.stored()
        if packs.is_pack(pack)
        for place in range(len(pack["b"]))
    ]

    def audit(steps: Steps, *processes: Any) -> None:
        steps.run(recovering.recover("former", grace=timedelta(-1)))
        faults.audit(steps, *processes)
        if taker != "zombie":
            stored = {each["_id"]: each for each in steps.all()}
            assert all(stored.get(each["_id"]) == each for each in takers)

    return Faults(
        lambda: [*faults.stored(), *takers],
        faults.consumer,
        audit,
        faults.most_commands + 150,
        faults.check,
    )


@each_case
@pytest.mark.parametrize("disturbance", sorted(DISTURBANCES.keys() - UNTRIED))
@each_command(97)
def test_process_meets_a_taken_id_and_dies(
    work: str, taker: str, disturbance: str, every: int
) -> None:
    """It dies, loses a reply, or sleeps."""
    DISTURBANCES[disturbance](taken(WORKS[work], taker), every)


def test_message_keeps_its_id_in_its_bucket_and_in_trails() -> None:
    """Its results were pushed under its id, so its consumer must see the same id again."""
    steps, consumer = Steps(ends.stored()), ends.Consumer()
    one = steps.run(consumer.receive(4))[3]
    steps.run(plans_of("results", Options(dead_letter="dead")).push(["r"], ids=[one.id]))
    steps.run(consumer.plans.rollback([one], delay=0, error="again"))
    assert one.hold.state == "held", "the process continues with the rest of the pack"
    (again,) = [each for each in steps.run(consumer.receive(20)) if each.payload == one.payload]
    assert (again.id, again.tries, again.error["message"]) == (one.id, 2, "again")
    steps.run(consumer.plans.bury([again]))
    (dead,) = steps.collection.find({"dead": {"$exists": True}})
    assert (dead["payload"], dead["trail"][-1]["id"]) == (one.payload, one.id)
    assert dead["_id"] != one.id
    assert steps.collection.count_documents({"_id": one.id, "payload": "r"}) == 1


def test_recovery_of_a_former_queue_shows_the_last_decision() -> None:
    """A copy in the former queue leads it to the pack, which hands over from another queue."""
    steps, consumer = taken(ends.FAULTS, "zombie").made()
    held = steps.run(consumer.receive(4))
    burying = steps.steps(consumer.plans.bury(held[3:]))
    next(each for each in burying if isinstance(each, UpdateEach) and each.many)
    burying.close()
    steps.seconds += 10
    steps.run(recovering.recover("former"))
    assert ends.numbers_in(steps, "a.dead") == [held[3].payload]


@some_or_all
@pytest.mark.parametrize("to", ["a", "results"])
@pytest.mark.parametrize("taken_over", [False, True])
def test_push_under_the_id_of_a_copy_is_stored_or_refused(
    to: str, taken_over: bool, some: bool
) -> None:
    """A consumer that hands a message over is slow. A program pushes under the id of the message.

    Once another consumer has the message, the copy is of no use. So that consumer may push its
    result, and after the message has finished, so may anyone.
    """
    queue = ends.plans() if to == "a" else plans_of(to, Options(dead_letter="dead"))
    stops = ((2, 4), (0, 8)) if some else ((2, 3, 4, 5), (0, 4, 8, 12))
    for at, then in product(*stops):
        steps, former, heir = Steps(ends.stored()), ends.Consumer(), ends.Consumer()
        held = steps.run(former.receive(5))
        leaving = steps.steps(former.settle(former.plans.rollback(held[3:4], delay=0), held))
        assert sum(1 for _ in islice(leaving, at)) == at
        has: list[Any] = []
        steps.listeners.append(heir.waiting)
        steps.seconds += 61 * taken_over
        while taken_over and (has := steps.run(heir.receive(20 if to == "a" else 1))):
            if to != "a" and has[0].payload == held[3].payload:
                break
            steps.run(heir.settle(heir.plans.commit(has), has, heir.committed))
        pushing = steps.steps(queue.push(["new"], ids=[held[3].id]))
        refused = False
        try:
            more = sum(1 for _ in islice(pushing, then)) == then
            deque(leaving)
            deque(pushing)
        except DuplicateKey:
            refused, more = True, True
            deque(leaving)
        known = to == "a" and held[3].payload not in heir.committed
        assert refused + known + steps.collection.count_documents({"payload": "new"}) == 1
        assert not (refused and has and isinstance(has[0], PackedReservation))
        ends.audit(steps, former, heir)
        assert more or then > 2
