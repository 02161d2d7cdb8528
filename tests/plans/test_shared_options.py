"""The options on which all users of a queue agree: the table of docs/how-to/share-options.md.

Each option meets each situation. Races of two programs are cut, stalled and undone at each command.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from pyqueue import Client, ConfigurationError, Limit, Unavailable
from pyqueue.backends import namespace, reshaping
from pyqueue.requests import EnsureQueue, Plan
from tests.plans.runner import record, record_of
from tests.plans.steps import FAULT_AT, Cut, Steps

BY, OTHER, STORED = "alice:1", "bob:2", "~queue:a"


@dataclass(frozen=True)
class Shared:
    """An option, two values of it, how the record has them, and the default."""

    name: str
    kind: Any
    value: Any
    other: Any
    stored: tuple[Any, Any]
    default: Any = None

    def use(self, client: Client, *value: Any) -> None:
        """Write to the queue with an object that gives this value of the option, or none."""
        given = dict.fromkeys([self.name] * len(value), *value)
        if self.kind == "stream":
            client.stream("a", **given).append(1)
        else:
            client.queue("a", kind=self.kind, **given).push(1)

    def receive(self, client: Client, *value: Any) -> None:
        """Receive with such an object."""
        given = dict.fromkeys([self.name] * len(value), *value)
        if self.kind == "stream":
            consumer = client.stream("a", **given).consumer("g", start="first")
            assert consumer.reserve(0) is not None
        else:
            assert client.queue("a", kind=self.kind, **given).reserve(0) is not None

    def in_force(self, client: Client) -> Any:
        """Return the value that the record has."""
        return record_of(client).get("shape", {}).get(self.name)


#: The options that are stored in seconds.
DURATIONS = ("retention", "auto_delete")
TWO, FIVE = Limit(concurrency=2), Limit(concurrency=5)
OPTIONS = [
    Shared("strict", "priority", True, False, (True, False), False),
    Shared("on_failure", "ordered", "skip", "block", ("skip", "block"), "block"),
    Shared("pack", "bucket", 5, 7, (5, 7), 500),
    Shared("retention", "stream", 3600, 7200, (3600.0, 7200.0), 7 * 86400.0),
    Shared("limit", "standard", TWO, FIVE, (TWO.stored(), FIVE.stored())),
    Shared("auto_delete", "standard", 60, 90, (60.0, 90.0)),
]
each_option = pytest.mark.parametrize("option", OPTIONS, ids=lambda each: each.name)


def named(client: Client, option: Shared) -> tuple[list[Any], str]:
    """Return the values that code named, and who was the last to name or change the option."""
    entry = record_of(client)["named"][option.name]
    assert entry["at"] is not None
    return entry["code"], entry["by"]


@pytest.fixture
def programs() -> Iterator[Callable[[str], Client]]:
    """Return a function that starts a program with this name on one store."""
    with Client("memory:") as first:
        yield lambda owner: Client(first.database, owner=owner)


Programs = Callable[[str], Client]


@each_option
def test_producer_first(programs: Programs, option: Shared) -> None:
    """A producer that names nothing does not freeze the default."""
    alice, bob = programs(BY), programs(OTHER)
    option.use(alice)
    assert option.in_force(alice) == option.default
    option.receive(bob, option.value)
    assert option.in_force(alice) == option.stored[0]
    assert named(alice, option) == ([option.stored[0]], OTHER)
    assert record_of(alice)["v"] == 2
    option.use(alice)


@each_option
def test_consumer_first(programs: Programs, option: Shared) -> None:
    alice = programs(BY)
    option.use(alice, option.value)
    before = record_of(alice)
    option.receive(programs(OTHER))
    option.use(programs(OTHER), option.value)
    after = record_of(alice)
    assert [after[each] for each in ("shape", "named", "v")] == [
        before[each] for each in ("shape", "named", "v")
    ]
    assert named(alice, option) == ([option.stored[0]], BY)


def refuses(option: Shared, client: Client, value: Any, shown: Any, by: str) -> None:
    """Expect that a value is refused, with both values, who named the other one, and when."""
    before = record_of(client)
    by = rf" .*by {by} at 20\d\d-\S+ \S+ UTC\)" if by else ""
    shown, value_shown = (
        re.escape(repr(float(each) if option.name in DURATIONS else each))
        for each in (shown, value)
    )
    name = option.name
    with pytest.raises(
        ConfigurationError,
        match=rf"^{name}: .*{name}={shown}{by}, but this program has {name}={value_shown}; ",
    ):
        option.use(client, value)
    assert record_of(client) == before


@each_option
def test_other_value_is_refused(programs: Programs, option: Shared) -> None:
    alice, bob = programs(BY), programs(OTHER)
    option.use(alice, option.value)
    refuses(option, bob, option.other, option.value, BY)
    option.use(bob)


def change(option: Shared, client: Client, value: Any) -> None:
    client.reshape("a", **{option.name: value})


@each_option
def test_reshape_is_followed(programs: Programs, option: Shared) -> None:
    alice = programs(BY)
    option.use(alice, option.value)
    change(option, programs(OTHER), option.other)
    option.use(alice, option.value)
    option.use(alice)
    assert option.in_force(alice) == option.stored[1]
    assert named(alice, option) == ([option.stored[0]], OTHER)
    change(option, alice, option.value)
    assert option.in_force(alice) == option.stored[0]
    assert named(alice, option) == ([*option.stored], BY)


@each_option
def test_reshape_names_an_option(programs: Programs, option: Shared) -> None:
    """No code gave the default, so that no restart needs it."""
    alice = programs(BY)
    option.use(alice)
    change(option, alice, option.value)
    assert (option.in_force(alice), named(alice, option)) == (option.stored[0], ([], BY))
    refuses(option, programs(OTHER), option.other, option.value, BY)
    option.use(programs(OTHER), option.value)


@each_option
def test_restart_of_unchanged_code_goes_on(
    programs: Programs, option: Shared, caplog: pytest.LogCaptureFixture
) -> None:
    """``reshape`` holds, and each process says once that its code has another value."""
    option.use(programs(BY), option.value)
    change(option, programs(OTHER), option.other)
    with caplog.at_level(logging.WARNING, "pyqueue"):
        restarted = programs(BY)
        for _ in range(3):
            option.use(restarted, option.value)
            option.use(restarted, option.other)
    assert option.in_force(restarted) == option.stored[1]
    assert [OTHER in each.getMessage() for each in caplog.records] == [True]


@each_option
def test_record_without_names_is_read(programs: Programs, option: Shared) -> None:
    """Earlier releases store a value alone: one that is not the default was named by code."""
    alice, bob = programs(BY), programs(OTHER)
    option.use(alice, option.value)
    stored = alice.database["pyqueue"]
    stored.update_one({"_id": STORED}, {"$unset": {"named": ""}})
    refuses(option, bob, option.other, option.value, "")
    option.use(bob, option.value)
    change(option, alice, option.other)
    assert named(alice, option)[0] == [option.stored[0]]
    option.use(programs("restarted"), option.value)
    put = {"$set": {f"shape.{option.name}": option.default}, "$unset": {"named": ""}}
    gone = {"$unset": {"named": "", f"shape.{option.name}": ""}}
    stored.update_one({"_id": STORED}, gone if option.default is None else put)
    option.use(bob)
    option.use(programs(OTHER), option.value)
    assert option.in_force(bob) == option.stored[0]


# ---- limits, which may be removed


def test_record_of_the_first_version_names_nothing(programs: Programs) -> None:
    alice = programs(BY)
    alice.queue("a", kind="standard").push(1)
    assert record_of(alice)["v"] == 1
    assert "named" not in record_of(alice)
    alice.queue("a", kind="standard", limit=TWO).push(1)
    assert (record_of(alice)["v"], record_of(alice)["shape"]) == (2, {"limit": TWO.stored()})


def test_limit_that_was_removed_stays_removed(programs: Programs) -> None:
    alice, option = programs(BY), OPTIONS[4]
    option.use(alice, TWO)
    alice.reshape("a", limit=False)
    option.use(programs(OTHER), TWO)
    assert option.in_force(alice) is None
    with pytest.raises(ConfigurationError, match=rf"limit=None .*by {BY} at .*concurrency=5"):
        option.use(programs(OTHER), FIVE)


def test_auto_delete_that_was_removed_stays_removed(programs: Programs) -> None:
    alice, option = programs(BY), OPTIONS[5]
    option.use(alice, 60)
    alice.reshape("a", auto_delete=False)
    option.use(programs(OTHER), 60)
    assert option.in_force(alice) is False
    with pytest.raises(ConfigurationError, match=rf"=False .*by {BY} at .*auto_delete=90\.0"):
        option.use(programs(OTHER), 90)


def test_record_keeps_eight_values_of_code(programs: Programs) -> None:
    alice = programs(BY)
    for pack in range(2, 14):
        alice.queue("a", kind="bucket").push(1)
        alice.reshape("a", pack=pack)
    assert named(alice, OPTIONS[2])[0] == [*range(5, 13)]
    alice.reshape("a", pack=6)
    assert named(alice, OPTIONS[2])[0] == [*range(6, 14)]


def test_value_of_a_newer_release_is_passed_over(programs: Programs) -> None:
    alice, option = programs(BY), OPTIONS[4]
    option.use(alice, TWO)
    newer = {"$set": {"named.limit.code": [{"weight": 1}], "named.strict": 5}}
    alice.database["pyqueue"].update_one({"_id": STORED}, newer)
    refuses(option, programs(OTHER), FIVE, TWO, BY)


# ---- two programs at once

#: The operations of two programs, and the options that they give.
DEEDS: dict[str, dict[str, Any]] = {
    "both": {"pack": 5, "limit": {"rate": 5}},
    "one": {"pack": 7},
    "the other": {"limit": {"rate": 4}},
    "reshape": {"pack": 9},
}
#: The record before the race.
FORMS: dict[str, list[Any]] = {
    "missing": [{"_id": "other", "q": "b"}],
    "unnamed": [record("bucket", v=2, shape={"pack": 500})],
}


def does(deed: str) -> Plan[Any]:
    if deed == "reshape":
        return reshaping.reshape("a", DEEDS[deed], by=deed)
    request = EnsureQueue("a", "bucket", None, DEEDS[deed])
    return namespace.read_or_create_record(request, by=deed)


def attempt(run: Callable[[], object]) -> bool:
    """Return whether a program is not refused."""
    text = ""
    try:
        run()
    except ConfigurationError as error:
        text = str(error)
    refused = re.search(r"does not exist|(pack|limit)=.* .*by \w+.* at .*, but .* \1=", text)
    assert bool(text) == bool(refused), text
    return not text


def judge(steps: Steps, accepted: dict[str, bool]) -> None:
    """Check that each program got all that it named, or was refused and changed nothing."""
    found = record_of(steps)
    given = [each for deed, each in DEEDS.items() if accepted.get(deed)]  # reshape is the last
    named = found.get("named", {})
    assert named.keys() == {name for each in given for name in each}, accepted
    for name, entry in named.items():
        values = [each[name] for each in given if name in each]
        assert found["shape"][name] == values[-1]
        code = values[:-1] if name == "pack" and accepted.get("reshape") else values
        assert entry["code"] == code


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("quick", DEEDS)
@pytest.mark.parametrize("slow", DEEDS)
def test_race_is_all_or_none(slow: str, quick: str, form: str) -> None:
    """A program sleeps before each command while another one works, and a server fails over."""
    for at in range(10 if slow != quick else 0):
        for undone in (False, True):
            steps = Steps(FORMS[form])
            steps.safe = FORMS[form] if undone else None
            running = steps.steps(does(slow))
            try:
                for _ in range(at + 1):
                    next(running)
            except (StopIteration, ConfigurationError):
                return
            if undone:
                steps.fail_over()
            first = attempt(lambda steps=steps: steps.run(does(quick)))  # type: ignore[misc]
            second = attempt(lambda running=running: [*running])  # type: ignore[misc]
            judge(steps, {quick: first, slow: second})
            assert form == "missing" or ("a", None) in steps.signals  # consumers follow


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("quick", DEEDS)
@pytest.mark.parametrize("fault", FAULT_AT)
def test_program_that_dies_names_all_or_none(fault: str, quick: str, form: str) -> None:
    """Another one follows. A program whose reply is lost does the same again."""
    for at in range(10):
        steps = Steps(FORMS[form])
        try:
            steps.run(does("both"), FAULT_AT[fault](at))
        except Unavailable:
            steps.run(does("both"))
        except Cut:
            pass
        else:
            assert at > 1
            return
        named = record_of(steps).get("named", {})
        assert named.keys() in (set(), {"pack", "limit"})
        before = {"both": bool(named)}
        judge(steps, before | {quick: attempt(lambda steps=steps: steps.run(does(quick)))})  # type: ignore[misc]
