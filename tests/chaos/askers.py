"""The work of producers that wait for results, and of consumers that give them.

A result names the content of its message and the claim that finished it.
"""

from __future__ import annotations

from tests.chaos.names import ASKS
from tests.chaos.steps import Held, Plan, Step, WorkloadState, new_payload, push_step, settle_step

#: For how long results are kept: no run is as long.
_KEPT_S = 86400.0
#: How long a producer waits for a result. A few requests end too early.
_ANSWER_S, _HASTY_S = 5.0, 0.05


class Askers(WorkloadState):
    """The generators of requests and replies."""

    def ask(self) -> Plan:
        """Push one message after the other, and wait for its result, by two calls or by one."""
        while not self.stopping.is_set():
            [content] = self.new_ids(1)
            if self.dice.random() < 0.5:
                yield from self.until_ok(push_step(ASKS, content, id=content, result=_KEPT_S))
                step = Step("wait", ASKS, "wait", (content,), {"timeout": _ANSWER_S}, [content])
            else:
                timeout = self.dice.choice([_HASTY_S, _ANSWER_S, _ANSWER_S])
                given = (self.queues[ASKS], new_payload(content))
                step = Step("request", ASKS, "request", given, {"timeout": timeout}, [content])
            step.on_client = True
            if not self.stopping.is_set():
                yield step
            yield self.dice.uniform(0, 2)

    def answer(self) -> Plan:
        """Finish messages with results. Bury a few, give some back, and leave some unsettled."""
        while not self.stopping.is_set():
            call = yield Step("reserve", ASKS, "reserve_many", (8,), {"timeout": 0.5})
            held: Held = list(call.result or [])
            for each in held:
                chance = 1.0 if self.draining else self.dice.random()
                if chance < 0.02:
                    yield settle_step("bury", ASKS, [each], error="no answer")
                elif chance < 0.04:
                    yield settle_step("rollback", ASKS, [each], delay=0, error=f"by {each.token}")
                elif chance > 0.06:
                    result = {"n": each.payload["n"], "by": each.token}
                    commit = settle_step("commit", ASKS, [each], result=result)
                    yield from self.perhaps_again(commit)
            if call.outcome != "ok":
                yield 0.1
