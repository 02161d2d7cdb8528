"""Schedules under faults: at each command a scheduler dies, sleeps, or meets another process.

Whatever happens, each tick pushes exactly one message.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from pyqueue import Client, ConfigurationError, InvalidMessage, InvalidName, Unavailable
from pyqueue.backends import recovering
from pyqueue.backends.hidden import HANDED
from pyqueue.backends.options import Options
from pyqueue.backends.queue_plans import plans_of
from pyqueue.backends.recovering import SCHEDULES
from pyqueue.backends.schedules import managing
from pyqueue.backends.schedules.definitions import Definition, definition, read
from pyqueue.backends.schedules.ticking import IDLE, await_tick, due, find_due, tick_each
from pyqueue.backends.schedules.timing import timing_of
from pyqueue.messages import ScheduleInfo
from pyqueue.requests import Delete, Document, Plan, Update
from pyqueue.runtime.connecting import runner_of
from pyqueue.runtime.waiters import Waiters
from tests.plans.faults import each_command
from tests.plans.runner import NOW, Runner, after
from tests.plans.steps import FAULT_AT, Cut, Fault, Steps, lasting, lost_reply, resume

some_or_every = each_command(2)
DAY = 86400
#: The time between two ticks under test.
MONTH = 30 * DAY
#: The instant of the tick under test.
TICK = after(MONTH)
BERLIN = ZoneInfo("Europe/Berlin")


def given(name: str = "n", queue: str = "reports", **options: Any) -> Definition:
    """Return the definition of a schedule that ticks each month, if it names no other times."""
    cron = options.pop("cron", None)
    if cron is None:
        options.setdefault("every", MONTH)
    if "missed" not in options:
        options.setdefault("overlap", True)  # otherwise a second message might be left out
    return definition(name, queue, cron, options)  # type: ignore[arg-type]  # wrong ones, too


def scheduler(waiting: Waiters | None = None) -> Plan[None]:
    """Tick once, as a process that has just started."""
    waiting = waiting or Waiters(SCHEDULES)
    ids, _ = yield from find_due(waiting, set())
    yield from tick_each(waiting, ids)


@cache
def stored() -> list[Document]:
    steps = Steps()
    steps.run(managing.schedule(given()))
    return steps.all()


def at_the_tick() -> Steps:
    """Return a store in which a tick is due."""
    steps = Steps(stored())
    steps.seconds = MONTH
    return steps


def pushed(steps: Steps, queue: str = "reports") -> list[Document]:
    """Return the messages that a queue got by ticks."""
    found = [each for each in steps.all() if each["q"] == queue and "record" not in each]
    assert not any({"handover", HANDED} & set(each) for each in found)
    return found


def info(steps: Steps) -> ScheduleInfo:
    (only,) = steps.run(managing.schedules())
    return only


def find_all(steps: Steps) -> list[Document]:
    return [each for each in steps.all() if each["q"] == SCHEDULES]


def audit(steps: Steps, least: int = 1, most: int = 1) -> None:
    """Let another process recover and tick. Check how many messages there are."""
    steps.seconds += 100
    steps.run(recovering.recover_all())
    steps.run(scheduler())
    assert least <= len(pushed(steps)) <= most
    number = len(pushed(steps))
    steps.seconds += 2 * DAY
    steps.run(recovering.recover_all())
    assert len(pushed(steps)) == number, "pushed late"
    assert [each for each in steps.all() if str(each["q"]).startswith("~handover")] == []


def number_of_commands() -> int:
    steps = at_the_tick()
    steps.run(scheduler())
    assert len(pushed(steps)) == 1
    return len(steps.commands)


# ---- faults


@pytest.mark.parametrize("fault", FAULT_AT.values(), ids=FAULT_AT)
def test_fault_anywhere_pushes_one_message(fault: Callable[[int], Fault]) -> None:
    for at in range(number_of_commands()):
        for heir in (False, True):
            steps = at_the_tick()
            with suppress(Cut, Unavailable):
                steps.run(scheduler(), fault(at))
            if heir:  # at once, before anything is recovered
                steps.run(scheduler())
            audit(steps)


def test_message_that_was_consumed_is_not_pushed_again() -> None:
    """A command has an unknown outcome, and a consumer is quick."""
    most = 0
    for at in range(number_of_commands()):
        steps, consumed = at_the_tick(), 0
        running = steps.steps(scheduler(), lost_reply(at))
        with suppress(Unavailable, StopIteration):
            while True:
                next(running)
                for each in pushed(steps):
                    consumed += steps.run(iter(Delete({"_id": each["_id"]})))
        steps.seconds += 100
        steps.run(recovering.recover_all())
        steps.run(scheduler())
        most = max(most, consumed)
        assert consumed + len(pushed(steps)) == 1, at
    assert most == 1


@some_or_every
def test_two_schedulers_push_one_message(every: int) -> None:
    """Each sleeps before each of its commands; either resumes first."""
    places = range(0, number_of_commands() + 1, every)
    for first, second in itertools.product(places, places):
        for order in ((0, 1), (1, 0)):
            steps = at_the_tick()
            running = [steps.stalled(scheduler(), at) for at in (first, second)]
            for place in order:
                sleeper = running[place]
                if sleeper is not None:
                    resume(sleeper)
            audit(steps)


@some_or_every
def test_two_schedulers_and_a_death_push_one_message(every: int) -> None:
    """One dies before each of its commands, while the other one sleeps before each command."""
    places = range(0, number_of_commands() + 1, every)
    for first, second in itertools.product(places, places):
        steps = at_the_tick()
        dead, sleeper = [steps.stalled(scheduler(), at) for at in (first, second)]
        if dead is not None:
            dead.close()
        if sleeper is not None:
            resume(sleeper)
        audit(steps)


def fails_over(steps: Steps) -> None:
    steps.fail_over()
    steps.run(scheduler())


def recovers(seconds: int) -> Callable[[Steps], None]:
    def act(steps: Steps) -> None:
        steps.seconds += seconds
        steps.run(recovering.recover(SCHEDULES, grace=timedelta()))

    return act


@pytest.mark.parametrize("act", [fails_over, recovers(1), recovers(3 * DAY)])
def test_scheduler_sleeps_anywhere(act: Callable[[Steps], None]) -> None:
    for at in range(number_of_commands()):
        steps = at_the_tick()
        steps.safe = steps.all() if act is fails_over else None
        running = steps.stalled(scheduler(), at)
        act(steps)
        assert running is not None
        resume(running)
        audit(steps)


def stays(steps: Steps) -> bool:
    return info(steps).name == "n"


#: Plans that race a tick; how many messages there are at least and at most; what holds in the end.
RACES: dict[str, tuple[Callable[[], Plan[Any]], int, int, Callable[[Steps], object]]] = {
    "tick": (scheduler, 1, 1, stays),
    "run": (lambda: managing.run("n"), 2, 2, stays),
    "new payload": (
        lambda: managing.schedule(given(payload=2)),
        *(1, 1, lambda steps: info(steps).options["payload"] == 2),
    ),
    "new times": (
        lambda: managing.schedule(given(every=2 * MONTH)),
        *(0, 1, lambda steps: info(steps).next == after(3 * MONTH)),
    ),
    "pause": (lambda: managing.pause("n", True), 0, 1, lambda steps: info(steps).paused),
    "end": (lambda: managing.unschedule("n"), 0, 1, lambda steps: not find_all(steps)),
}


@pytest.mark.parametrize("race", RACES)
@pytest.mark.parametrize("tick_sleeps", [True, False], ids=["tick sleeps", "other sleeps"])
def test_tick_races_another_plan_anywhere(race: str, tick_sleeps: bool) -> None:
    """One of them sleeps before each of its commands, until the other has ended."""
    other, least, most, holds = RACES[race]
    for at in itertools.count():
        steps = at_the_tick()
        sleeper, quick = (scheduler, other) if tick_sleeps else (other, scheduler)
        running = steps.stalled(sleeper(), at)
        steps.run(quick())
        if running is not None:
            resume(running)
        assert holds(steps), at
        audit(steps, least, most)
        if running is None:
            assert at >= 2
            return


def test_tick_pushes_nothing_of_a_former_definition() -> None:
    """It has read the schedule, and sleeps until the decision at the latest."""
    for at in range(6):
        steps = at_the_tick()
        running = steps.stalled(scheduler(), at)
        steps.run(managing.schedule(given(payload=2)))
        assert running is not None
        resume(running)
        audit(steps)
        assert [each["payload"] for each in pushed(steps)] == [2]


@pytest.mark.parametrize("fault", FAULT_AT.values(), ids=FAULT_AT)
@pytest.mark.parametrize("race", [each for each in RACES if each not in ("tick", "run")])
def test_change_is_repeated_after_a_fault(race: str, fault: Callable[[int], Fault]) -> None:
    other, least, most, holds = RACES[race]
    for at in range(6):
        steps = at_the_tick()
        steps.stalled(scheduler(), 6)  # it has decided, and dies before it publishes
        assert HANDED in find_all(steps)[0]
        with suppress(Cut, Unavailable):
            steps.run(other(), fault(at))
        steps.run(other())
        assert holds(steps)
        audit(steps, least, most)


# ---- times


@pytest.mark.parametrize(
    ("missed", "late_s", "ticks", "following"),
    [
        ("once", 0, [0], 1),
        ("once", 60, [0], 1),
        ("once", 61, [0], 7),
        ("once", 3600, [0], 361),
        ("skip", 60, [0], 1),
        ("skip", 61, [], 1),
        ("skip", 3600, [], 354),
        ("all", 60, [0], 1),
        ("all", 75, [0, 1], 2),
        ("all", 3600, [*range(254, 354)], 354),
    ],
)
def test_missed_ticks_follow_the_policy(
    missed: Any, late_s: float, ticks: list[int], following: int
) -> None:
    """A schedule that ticks every 10 s, with a grace of a minute."""
    steps = Steps()
    steps.run(managing.schedule(given(every=10, missed=missed, overlap=True)))
    schedule = read(find_all(steps)[0])
    found = due(schedule._replace(when=TICK), TICK + timedelta(seconds=late_s))
    assert [(each - TICK).total_seconds() / 10 for each in found.ticks] == ticks
    assert (found.following - TICK).total_seconds() / 10 == following


def local_times(cron: str, day: datetime, number: int) -> list[str]:
    """Return the first ticks of a day in Berlin."""
    timing = timing_of(cron, None, "Europe/Berlin")
    found = [timing.after(day, day)]
    while len(found) < number:
        last = found[-1]
        assert last is not None
        found.append(timing.after(last, last))
    assert timing.last(day, found[-1], number) == found  # type: ignore[arg-type]
    return [f"{each.astimezone(BERLIN):%d %H:%M%z}" for each in found if each]


SPRING = datetime(2026, 3, 28, 23, tzinfo=UTC)
AUTUMN = datetime(2026, 10, 24, 22, tzinfo=UTC)


@pytest.mark.parametrize(
    ("cron", "day", "times"),
    [
        # Two o'clock does not exist: fixed times come at three.
        ("30 2 * * *", SPRING, ["29 03:00+0200", "30 02:30+0200"]),
        ("0 2,3 * * *", SPRING, ["29 03:00+0200", "30 02:00+0200"]),
        ("*/30 2 * * *", SPRING, ["30 02:00+0200", "30 02:30+0200"]),
        ("15 */2 * * *", SPRING, ["29 00:15+0100", "29 04:15+0200"]),
        # Two o'clock occurs twice: fixed times come once.
        ("30 2 * * *", AUTUMN, ["25 02:30+0200", "26 02:30+0100"]),
        (
            "*/30 2 * * *",
            AUTUMN,
            ["25 02:00+0200", "25 02:30+0200", "25 02:00+0100", "25 02:30+0100", "26 02:00+0100"],
        ),
    ],
)
def test_time_changes_follow_debian_cron(cron: str, day: datetime, times: list[str]) -> None:
    assert local_times(cron, day, len(times)) == times


def test_schedule_begun_in_a_doubled_hour_ticks_later() -> None:
    """At 02:10 for the second time, 02:30 of that day is past."""
    now = datetime(2026, 10, 25, 1, 10, tzinfo=UTC)
    assert timing_of("30 2 * * *", None, "Europe/Berlin").first(now) == datetime(
        2026, 10, 26, 1, 30, tzinfo=UTC
    )


# ---- definitions


def test_zone_is_stored_by_its_name() -> None:
    assert given(timezone=BERLIN) == given(timezone="Europe/Berlin")
    with pytest.raises(ConfigurationError, match=r"timezone: .*use a name such as"):
        given(timezone=UTC)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"cron": "0 3 * * *", "every": 60}, "cron, every: pass one of the two"),
        ({"cron": "@daily"}, "use five fields"),
        ({"cron": "0 3 * * 9"}, "Bad day-of-week"),
        ({"cron": "0 0 30 2 *"}, "Bad day-of-month"),
        ({"cron": 5}, "cron: 5 is not allowed"),
        ({"every": 0.5}, "at least 1 second"),
        ({"every": "1m"}, "every: expected seconds"),
        ({"timezone": "Mars"}, "timezone: 'Mars' is not allowed"),
        ({"timezone": "America"}, "timezone: 'America' is not allowed"),
        ({"missed": "some"}, "missed: 'some' is not allowed"),
        ({"missed": "all"}, "set overlap=True"),
        ({"overlap": 1}, "overlap: expected True or False"),
        ({"grace": 0}, "grace: 0.0 is not allowed"),
        ({"headers": {"a.b": 1}}, "headers: the name 'a.b'"),
        ({"priority": 10}, "priority: 10 is not allowed"),
        ({"priorty": 1}, "priorty: a schedule has no such option"),
        ({"name": "a b"}, "name: invalid name 'a b'"),
        ({"queue": "a b"}, "queue: invalid queue name"),
        ({"payload": {"at": object()}}, "payload.at: not storable as BSON"),
    ],
)
def test_invalid_definition_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises((ConfigurationError, InvalidName, InvalidMessage)) as refused:
        given(**options)
    assert text in str(refused.value)


def test_same_definition_is_no_change() -> None:
    steps = Steps()
    options: dict[str, Any]
    options = {"payload": {"a": (1, 2), "at": NOW}, "headers": {"h": 1}, "cron": "0  3 * * *"}
    assert steps.run(managing.schedule(given(**options))) is True
    before = steps.all()
    steps.seconds = 5
    options["cron"] = "0 3 * * *"
    assert steps.run(managing.schedule(given(**options))) is False
    assert steps.all() == before
    assert steps.signals == [(SCHEDULES, None)]
    assert steps.run(managing.schedule(given(**options | {"payload": 1}))) is True
    assert info(steps).next == after(15 * 3600)


def test_payload_of_another_type_is_a_change() -> None:
    steps = Steps()
    for value in (1, True, 1.0, float("nan")):
        assert steps.run(managing.schedule(given(payload={"a": value}))) is True
        assert steps.run(managing.schedule(given(payload={"a": value}))) is False


def test_pause_lets_ticks_pass_and_survives_a_change() -> None:
    steps = at_the_tick()
    assert steps.run(managing.pause("n", True)) is True
    assert steps.run(managing.schedule(given(every=60))) is True
    steps.run(scheduler())
    assert (info(steps).paused, info(steps).next, pushed(steps)) == (True, None, [])
    assert steps.run(managing.pause("n", False)) is True
    assert info(steps).next == TICK + timedelta(seconds=60)
    absent = [managing.pause("x", True), managing.unschedule("x"), managing.run("x")]
    assert [steps.run(each) for each in absent] == [False, False, None]


def test_run_pushes_at_once_and_keeps_the_ticks() -> None:
    steps = Steps(stored())
    steps.run(managing.pause("n", True))
    before = info(steps)
    id = steps.run(managing.run("n"))
    assert [each["_id"] for each in pushed(steps)] == [id]
    assert info(steps) == replace(before, last=id)


# ---- messages


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("standard", {"key": "k", "headers": {"h": 1}}),
        ("priority", {"priority": 9}),
        ("ordered", {"group": "g"}),
        ("bucket", {}),
    ],
)
def test_queue_of_each_kind_gets_the_message(kind: str, options: dict[str, Any]) -> None:
    steps = Steps()
    queue = plans_of("reports", Options(dead_letter="dead"), kind=kind, owner="me")
    steps.run(queue.pause(False))  # makes its record
    steps.run(managing.schedule(given(payload={"a": 1}, **options)))
    steps.seconds = MONTH
    steps.run(scheduler())
    assert ("reports", TICK) in steps.signals
    (held,) = steps.run(queue.receive(Waiters("reports"), 5, timeout=0))
    assert held.id.startswith(f"cron:n:{TICK:%Y%m%dT%H%M%SZ}:")
    assert (held.payload, held.tries) == ({"a": 1}, 1)
    assert {name: getattr(held, name) for name in options} == options
    steps.run(queue.commit([held]))
    assert pushed(steps) == []


def stream(name: str) -> Document:
    return {"_id": f"~queue:{name}", "q": name, "when": NOW, "record": True} | {
        "kind": "stream",
        "v": 2,
    }


@pytest.mark.parametrize(
    ("record", "options", "text"),
    [
        (stream("reports"), {}, "queue: 'reports' is a stream"),
        (None, {"priority": 1}, "priority: queue 'reports' is of kind 'standard'"),
        (None, {"group": "g"}, "group: queue 'reports' is of kind 'standard'"),
    ],
)
def test_queue_that_refuses_is_refused(
    record: Document | None, options: dict[str, Any], text: str
) -> None:
    """When the schedule is stored, and when its queue has become such a queue."""
    steps = Steps([record] if record else None)
    before = steps.all()
    with pytest.raises(ConfigurationError, match=text):
        steps.run(managing.schedule(given(**options)))
    assert steps.all() == before
    kinds = {"priority": "priority", "group": "ordered"}
    kind = next((kinds[each] for each in options), "standard")
    steps = Steps([{**stream("reports"), "kind": kind}])
    steps.run(managing.schedule(given(**options)))
    steps.collection.update_one(
        {"_id": "~queue:reports"}, {"$set": {"kind": record["kind"] if record else "standard"}}
    )
    steps.seconds = MONTH
    steps.run(scheduler())
    assert pushed(steps) == []
    assert (info(steps).skipped, info(steps).next) == (1, after(2 * MONTH))
    assert text in (info(steps).error or "")


def test_overlapping_tick_is_skipped_and_counted() -> None:
    steps = lasting()
    queue = plans_of("reports", Options(dead_letter="dead", history=DAY), owner="me")
    steps.run(managing.schedule(given(overlap=False, every=60)))
    waiting = Waiters("reports")

    def tick() -> int:
        steps.seconds += 60
        steps.run(scheduler())
        return info(steps).skipped

    assert tick() == 0
    assert tick() == 1
    (held,) = steps.run(queue.receive(waiting, 1, timeout=0))
    assert tick() == 2
    steps.run(queue.move([(held, 1)], to="elsewhere"))
    assert tick() == 3, "in another queue"
    steps.collection.update_many({"q": "elsewhere"}, {"$set": {"dead": {}}})
    assert tick() == 3, "dead"
    (held,) = steps.run(queue.receive(waiting, 1, timeout=0))
    steps.run(queue.commit([held]))
    assert tick() == 3, "in the history"
    assert len(pushed(steps)) == 2


def test_unreadable_schedule_holds_up_no_other(caplog: pytest.LogCaptureFixture) -> None:
    steps = at_the_tick()
    wrong: list[Document] = [
        {},
        {"spec": 1},
        {"spec": {"queue": "x"}},
        {"spec": {**given().spec, "cron": "x"}},
        {"spec": {**given().spec, "group": 7}},
        {"spec": {**given().spec, "priority": [1]}},
        {"spec": given().spec, "skipped": "x"},
    ]
    for number, each in enumerate(wrong):
        steps.collection.insert_one(
            {"_id": f"~cron:{number}", "q": SCHEDULES, "when": NOW, "token": "t", **each}
        )
    waiting = Waiters(SCHEDULES)
    ids, _ = steps.run(find_due(waiting, set()))
    unreadable = steps.run(tick_each(waiting, ids))
    assert unreadable == {f"~cron:{number}" for number in range(len(wrong))}
    assert steps.run(find_due(waiting, unreadable)) == ([], after(2 * MONTH))
    assert len(pushed(steps)) == 1
    assert "schedule '1' cannot be read" in caplog.text
    assert [each.name for each in steps.run(managing.schedules())] == ["n"]


def test_more_unreadable_schedules_than_one_read_returns() -> None:
    steps, waiting = at_the_tick(), Waiters(SCHEDULES)
    early = {"q": SCHEDULES, "when": NOW, "token": "t"}
    steps.collection.insert_many([{"_id": f"~cron:{number}", **early} for number in range(250)])
    unreadable: set[object] = set()
    reads = 0
    while not pushed(steps):
        ids, _ = steps.run(find_due(waiting, unreadable))
        unreadable |= steps.run(tick_each(waiting, ids))
        reads += 1
    assert (reads, len(unreadable)) == (3, 250)


def test_schedule_that_the_server_refuses_holds_up_no_other() -> None:
    """Its ``skipped`` became a bool, for example, which ``$inc`` cannot count up."""
    steps = Steps(stored())
    steps.run(managing.schedule(given("a", missed="skip")))
    steps.seconds = MONTH + 100

    def refuse(number: int, done: bool) -> None:
        request = steps.commands[-1]
        if isinstance(request, Update) and request.filter.get("_id") == "~cron:a":
            raise InvalidMessage("the server rejected it")

    waiting = Waiters(SCHEDULES)
    ids, _ = steps.run(find_due(waiting, set()))
    assert steps.run(tick_each(waiting, ids), refuse) == {"~cron:a"}
    assert len(pushed(steps)) == 1


def test_idle_scheduler_reads_once_in_a_minute() -> None:
    runner = Runner([], [{"_id": "~cron:n", "when": after(1)}])
    runner.on_wait = runner.pass_time
    waiting = Waiters(SCHEDULES)
    assert runner.run(find_due(waiting, set())) == ([], None)
    runner.run(await_tick(waiting, None))
    assert IDLE <= runner.now - NOW <= 1.5 * IDLE
    runner.now = NOW
    assert runner.run(find_due(waiting, set())) == ([], after(1))
    runner.run(await_tick(waiting, after(1)))
    assert after(1) <= runner.now <= after(1.25)
    assert len(runner.commands) == 2


def test_schedules_have_their_own_topic(client: Client) -> None:
    waiters = runner_of(client).waiters
    assert waiters(SCHEDULES).topic == "pyqueue/pyqueue/~cron"
    assert waiters("log~group").topic == "pyqueue/pyqueue/log"
