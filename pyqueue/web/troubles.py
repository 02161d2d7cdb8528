"""What needs attention: the troubles that the overview names, their causes, and what helps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from functools import partial
from typing import Final, NamedTuple

from pyqueue.messages import ConsumerInfo, ScheduleInfo
from pyqueue.telemetry.watching import RunSummary
from pyqueue.web.redacting import Redactor
from pyqueue.web.sampling import Row, Sample, rate_of
from pyqueue.web.shapes import counted, length, rate, since
from pyqueue.web.site import path_to, query

#: The kinds in the order of the page: the look of each, and the action that helps.
KINDS: Final = {
    "silent worker": ("bad", "Check its process; its messages return when their leases end"),
    "blocked group": ("bad", "Release or requeue the message"),
    "no worker": ("bad", "Start a worker for it"),
    "schedule": ("bad", "Start a worker, or run it now"),
    "dead letters": ("bad", "Redrive or remove them"),
    "behind": ("warn", "Start workers for the group, or let it seek"),
    "limit used up": ("warn", "Wait, or raise it with pyqueue reshape --limit"),
    "growing": ("warn", "Start more workers"),
    "paused": ("warn", "Resume it"),
}
#: The maximum number of troubles of a kind that are shown, and of errors that one of them names.
MAX_SHOWN: Final = 10
_MAX_ERRORS: Final = 5
#: A shorter wait, in seconds, is no trouble.
_WAIT_S: Final = 60.0
#: A group that is fewer messages behind, or that catches up in less time, is no trouble.
_LEAST_BEHIND: Final = 1000
_CATCH_UP_S: Final = 3600.0
#: A limit counts as used up if at least this share of its rate is used.
_USED_UP: Final = 0.9


class Trouble(NamedTuple):
    """A trouble of a queue, a consumer group, a worker or a schedule."""

    kind: str
    name: str
    path: str
    cause: str
    #: The page with the action that helps, if it is another page.
    help_path: str = ""


def caught_up_s(row: Row, group: ConsumerInfo) -> float | None:
    """Return in how many seconds a consumer group will catch up, or None if it will not."""
    done = rate_of(row.group_stats.get(group.name), ("finished", "moved"))
    faster = (done or 0.0) - (rate_of(row.stats, ("pushed",)) or 0.0)
    return group.counts.total / faster if group.counts.total and faster > 0 else None


def of_row(sample: Sample, row: Row, redactor: Redactor) -> Iterator[Trouble]:
    """Yield the troubles of a queue or a stream, apart from its dead letters."""
    info, name, held = row.info, row.info.name, row.blocked
    messages = partial(counted, cap=sample.cap)
    path, ready = path_to("s" if info.kind == "stream" else "q", name), messages(info.counts.ready)
    texts = [text for _, text in row.badges]
    for group in row.groups:
        yield from _of_group(sample, row, group)
    if info.paused:
        yield Trouble("paused", name, path, f"it is paused; {ready} waiting")
        return
    if "no worker" in texts:
        cause = f"no worker receives from it; {ready} waiting, the oldest for {since(info.oldest)}"
        yield Trouble("no worker", name, path, cause)
    if "growing" in texts:
        came = rate((rate_of(row.stats, ("pushed",)) or 0.0) + row.came)
        done = rate(rate_of(row.stats, ("finished", "moved")))
        workers = counted(row.workers, "worker")
        yield Trouble("growing", name, path, f"{came} come in, and {done} are done by {workers}")
    if _is_used_up(sample, row):
        number = messages(info.counts.ready or info.counts.scheduled)
        yield Trouble("limit used up", name, path, f"{info.limit!r}; {number} waiting")
    if held is not None and (why := _why_blocked(sample, row)):
        group_name = redactor.text("group", held.group)
        waiting = held.number if held.holder else held.number - 1  # without the one that failed
        cause = f"group {group_name!r}: {messages(waiting)} waiting {why}"
        id = held.holder["_id"] if held.holder else held.first["id"]
        yield Trouble("blocked group", name, path, cause, path_to("m", id))


def _is_used_up(sample: Sample, row: Row) -> bool:
    """Return whether messages are waiting because the limit of a queue is used up."""
    info, limit = row.info, row.info.limit
    if limit is None or _age_s(sample, info.oldest) <= _WAIT_S:
        return False
    if limit.per is not None:
        return info.counts.scheduled > 0 and not info.counts.ready
    started = rate_of(row.stats, ("received",)) or 0.0
    used = limit.rate is not None and started >= _USED_UP * limit.rate / limit.period_s
    return used or (limit.concurrency is not None and info.counts.reserved >= limit.concurrency)


def _why_blocked(sample: Sample, row: Row) -> str:
    """Return what the messages of a group are waiting for, or "" if they have not waited long."""
    assert row.blocked is not None
    _, _, first, holder = row.blocked
    if holder:
        ends_s, held_s = -_age_s(sample, holder["when"]), _age_s(sample, holder.get("reserved"))
        lease = f"; its lease ended {length(-ends_s)} ago" if ends_s < 0 else ""
        by = holder.get("owner") or "a consumer"
        return f"while {by} holds one for {length(held_s)}{lease}" if held_s > _WAIT_S else ""
    left_s = -_age_s(sample, first["when"])
    fails = first.get("tries") and left_s > _WAIT_S
    return f"behind one whose try failed, and whose next is in {length(left_s)}" if fails else ""


def of_dead(sample: Sample, row: Row, dead: int) -> Trouble:
    """Return the trouble of a queue, or of a consumer group, that has ``dead`` dead letters."""
    name = row.info.name
    errors = []
    for each in sample.errors:
        stream, _, group = each.queue.partition("~")
        if each.dead and (f"{stream}.{group}.dead" if group else stream) == name:
            errors.append(each)
    types = ", ".join([each.type for each in errors[:_MAX_ERRORS]])
    more = f" of {counted(len(errors), 'error')}: {types}" if errors else ""
    dead_letter = name if row.holds_dead else row.dead_letter
    path = "/errors" + query({"queue": errors[0].queue}) if errors else path_to("q", dead_letter)
    cause = counted(dead, "dead letter", sample.cap) + more
    return Trouble("dead letters", name, path_to("q", name), cause, path)


def _of_group(sample: Sample, row: Row, group: ConsumerInfo) -> Iterator[Trouble]:
    """Yield the trouble of a consumer group that is paused, or does not catch up."""
    name, path = f"{row.info.name}~{group.name}", path_to("s", row.info.name)
    behind, left_s = f"{counted(group.counts.total)} behind", caught_up_s(row, group)
    if group.paused:
        yield Trouble("paused", name, path, f"the consumer group is paused, {behind}")
    elif group.counts.total >= _LEAST_BEHIND and (left_s is None or left_s > _CATCH_UP_S):
        done = rate_of(row.group_stats.get(group.name), ("finished",))
        works = any(each.works_on(name) and not each.silent for each in sample.runs)
        came = rate(rate_of(row.stats, ("pushed",)) or 0.0)
        why = f"{rate(done or 0.0)} are done, and {came} come in"
        yield Trouble("behind", name, path, f"{behind}; {why if works or done else 'no worker'}")


def of_runs(runs: Sequence[RunSummary]) -> Iterator[Trouble]:
    """Yield the troubles of the workers and pipelines that are silent."""
    for each in runs:
        if each.silent:
            place = f"{each.process.get('host')}:{each.process.get('pid')}"
            cause = f"{place} has not reported for {since(each.beat)}, with "
            cause += f"{counted(each.messages)} in work"
            yield Trouble("silent worker", each.name, "/workers", cause)


def of_schedule(sample: Sample, plan: ScheduleInfo, redactor: Redactor) -> Iterator[Trouble]:
    """Yield the trouble of a schedule that is paused, that fails, or that no worker serves."""
    row, late_s = sample.rows.get(plan.queue), _age_s(sample, plan.next)
    cause = ""
    if plan.error is not None:
        cause = f"the last tick failed: {redactor.text('error.message', plan.error)}"
    elif late_s > float(plan.options.get("grace") or _WAIT_S):
        cause = f"its tick is {length(late_s)} late, because no worker runs"
    elif plan.last is not None and row is not None and ("bad", "no worker") in row.badges:
        cause = f"it pushes to {plan.queue}, from which no worker receives"
    if plan.paused:
        yield Trouble("paused", plan.name, "/schedules", "the schedule is paused")
    elif cause:
        yield Trouble("schedule", plan.name, "/schedules", cause)


def _age_s(sample: Sample, instant: datetime | None) -> float:
    """Return how many seconds ago an instant was. None counts as now."""
    return 0.0 if instant is None else (sample.at - instant).total_seconds()


def shown(troubles: Iterable[Trouble]) -> list[dict[str, object]]:
    """Return troubles by kind, up to ``MAX_SHOWN`` of each kind."""
    every = sorted(troubles, key=lambda each: each.name)
    found: list[dict[str, object]] = []
    for kind, (look, action) in KINDS.items():
        if some := [each._asdict() for each in every if each.kind == kind]:
            rows, more = some[:MAX_SHOWN], max(0, len(some) - MAX_SHOWN)
            found.append({"kind": kind, "look": look, "help": action, "rows": rows, "more": more})
    return found
