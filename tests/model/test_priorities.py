"""The machine over queues with priorities: the model's order is the priority, and then the age."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from pyqueue import ConfigurationError
from pyqueue.backends.priority import levels
from pyqueue.backends.priority.kind import Priority
from tests.model import machine
from tests.model.machine import Machine, outcome
from tests.model.places import Cluster, Place, plans_place, virtual_time
from tests.model.profiles import LONG, SHORT
from tests.model.reference import Rules

pytestmark = pytest.mark.xdist_group("hypothesis")

#: Two queues with priorities. Messages that leave them for the other two keep their priority there.
BY_LEVEL = {
    name: replace(rules, priorities=name in ("a", "b")) for name, rules in machine.RULES.items()
}
#: The same, if every scan goes by age.
BY_AGE = {name: replace(rules, by_age=rules.priorities) for name, rules in BY_LEVEL.items()}

priorities = st.sampled_from([0, 4, 4, 9, None])


class Priorities(Machine):
    """Clients that also give, change and keep priorities."""

    options: ClassVar[Mapping[str, Rules]] = BY_LEVEL

    def __init__(self) -> None:
        super().__init__()
        for name, rules in self.options.items():
            if rules.priorities:  # a queue that is first named by a move is a standard queue
                assert self.queue(0, name).pop(0) is None

    @rule(
        client=machine.clients,
        queue=machine.queues,
        entries=st.lists(st.tuples(machine.keys, priorities), min_size=1, max_size=4),
        delay=machine.delays,
        on_duplicate=machine.duplicates,
    )
    def push_by_level(
        self,
        client: int,
        queue: str,
        entries: list[tuple[str | None, int | None]],
        delay: float | None,
        on_duplicate: str,
    ) -> None:
        for key, priority in entries:
            payload, target = self.payload(), self.queue(client, queue)
            given = {"key": key, "delay": delay, "on_duplicate": on_duplicate}
            if priority is not None and not self.options[queue].priorities:
                answer = outcome(lambda: target.push(0, **given, priority=priority))  # noqa: B023
                assert isinstance(answer, ConfigurationError)
                continue
            self._push(
                lambda: [target.push(payload, **given, priority=priority)],  # noqa: B023
                queue,
                [(payload, key, None)],
                delay=round((delay or 0) * 1000),
                on_duplicate=on_duplicate,
                priority=priority,
            )

    @precondition(lambda self: self.handles)
    @rule(
        client=machine.clients,
        which=machine.many,
        to=machine.queues,
        named=st.booleans(),
        priority=st.sampled_from([0, 9]),
    )
    def move_by_level(
        self, client: int, which: list[int], to: str, named: bool, priority: int
    ) -> None:
        given, held, reservations, queue = self.some(client, which, elsewhere=False)
        target = to if named else self.queue(client, to)

        def package() -> None:
            queue.move(*reservations, to=target, priority=priority)

        if not self.options[to].priorities:
            assert isinstance(outcome(package), ConfigurationError)
            return
        pairs = [(each, ...) for each in held]
        self._settle(given, package, lambda: self.model.move(pairs, to=to, priority=priority))

    @rule(
        client=machine.clients,
        queue=st.sampled_from(["a", "b"]),
        place=machine.places,
        priority=st.integers(0, 9),
    )
    def reprioritize(self, client: int, queue: str, place: int, priority: int) -> None:
        id = self.id(queue, place)
        done = self.queue(client, queue).reprioritize(id, priority)
        assert done == self.model.reprioritize(queue, id, priority)


def play(place: Place, how: settings, rules: Mapping[str, Rules] = BY_LEVEL) -> None:
    """Run the machine on a place."""
    with virtual_time() as time, pytest.MonkeyPatch.context() as patch:
        if rules is BY_AGE:
            patch.setattr(levels, "LOOKS_PER_AGE_LOOK", 1)

        class Here(Priorities):
            make = staticmethod(lambda: Cluster(place, time))

        Here.options = rules
        run_state_machine_as_test(Here, settings=how)


BOTH = pytest.mark.parametrize("rules", [BY_LEVEL, BY_AGE], ids=["by level", "by age"])


@BOTH
def test_priorities_follow_the_model(rules: Mapping[str, Rules]) -> None:
    play(plans_place(), SHORT(max_examples=12, stateful_step_count=25), rules)


def test_priorities_follow_the_model_on_a_server(server: Place) -> None:
    play(server, SHORT(max_examples=2, stateful_step_count=20))


@pytest.mark.slow
@BOTH
def test_priorities_follow_the_model_in_the_long_run(rules: Mapping[str, Rules]) -> None:
    play(plans_place(), LONG(max_examples=1_000, stateful_step_count=60), rules)


@pytest.mark.slow
def test_priorities_follow_the_model_on_a_server_for_long(server: Place) -> None:
    play(server, LONG(max_examples=200, stateful_step_count=60))


ENTERING = Priority.entering


def _forgetful(self: Priority, queue: str, when: Any, *_: object) -> Any:
    """Let a message that enters lose its priority."""
    return ENTERING(self, queue, when)


def _unmoved(self: levels.LevelStarts, when: Any) -> None:
    """Keep the start of each level although a message came back below it."""


@pytest.mark.parametrize(
    "rule", ["priority is kept", pytest.param("starts move back", marks=pytest.mark.slow)]
)
def test_broken_rule_of_priorities_is_detected(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    if rule == "priority is kept":
        monkeypatch.setattr(Priority, "entering", _forgetful)
    else:
        monkeypatch.setattr(levels.LevelStarts, "move_back", _unmoved)
    with pytest.raises(AssertionError):
        play(
            plans_place(), SHORT(max_examples=2000, stateful_step_count=25, phases=[Phase.generate])
        )
