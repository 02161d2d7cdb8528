"""The definition of a schedule, its stored form, and the messages that it pushes.

A schedule is one document::

    _id      "~cron:NAME"
    q, when  "~cron", and the next tick; ``NEVER`` while the schedule is paused
    token    its revision: a random value, new at every change and at every tick
    spec     the arguments of the caller: queue, cron or every, timezone, payload and so on
    last     the id of the last message
    skipped  how many ticks pushed nothing: the last message was unfinished, or an error occurred
    error    why the last tick pushed no message, if an error prevented that
    paused   present while the schedule is paused

Each tick is a handover from the schedule to its queue, so the document may also have ``handed``,
which lists hidden copies of messages.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple, get_args

import bson

from pyqueue import arguments
from pyqueue.backends import kind as kinds
from pyqueue.backends.kind import Kind
from pyqueue.backends.namespace import STREAM
from pyqueue.backends.naming_kind import GUESSED_KIND
from pyqueue.backends.pushing import Content, new_document
from pyqueue.backends.recovering import SCHEDULES
from pyqueue.backends.schedules.timing import Timing, timing_of
from pyqueue.clock import BAND
from pyqueue.errors import ConfigurationError, QueueError, suggestion
from pyqueue.limits import shown
from pyqueue.messages import Missed, ScheduleInfo, ScheduleOptions
from pyqueue.payloads import OPTIONS, Codec, encode
from pyqueue.requests import Document, Filter

#: The beginning of the id of a schedule.
_IDS: Final = f"{SCHEDULES}:"
#: The shortest ``grace``, in seconds. Normally, a tick pushes its message within a second.
_LEAST_GRACE_S: Final = 1.0
#: The options that are stored only if the caller gave them, each with the check of its value.
_OPTIONAL: Final[Mapping[str, Callable[[Any], Any]]] = {
    "headers": arguments.headers,
    "key": arguments.key,
    "priority": arguments.priority,
    "group": arguments.ordered_group,
}


class Definition(NamedTuple):
    """A schedule as the caller gave it."""

    name: str
    #: The checked arguments, in their stored form.
    spec: Document


def schedule_id(name: object) -> str:
    """Return the _id of a schedule.

    Raises:
        ConfigurationError: The name is not allowed.
    """
    return _IDS + arguments.group(name, "name")


def definition(name: str, queue: str, cron: str | None, options: ScheduleOptions) -> Definition:
    """Check the definition of a schedule, as far as that is possible without a server.

    Raises:
        ConfigurationError: An argument is not allowed.
        InvalidName: The queue has an invalid name.
        InvalidMessage: The payload cannot be stored.
    """
    arguments.group(name, "name")
    known = ScheduleOptions.__annotations__
    if unknown := sorted(set(options) - set(known)):
        remedy = suggestion(unknown[0], known)
        raise ConfigurationError(f"{unknown[0]}: a schedule has no such option; {remedy}")
    timing = timing_of(cron, options.get("every"), options.get("timezone", "UTC"))
    rhythm = {"cron": timing.cron} if timing.every_s is None else {"every": timing.every_s}
    spec = {
        "queue": arguments.queue_name(queue, "queue"),
        **rhythm,
        "timezone": timing.timezone,
        **_rules(options),
        **_optional(options),
        "payload": Codec[Any]().dump(options.get("payload", {})),
    }
    # In the stored form, so that it can be compared with a stored definition.
    return Definition(name, bson.decode(encode(spec).raw, OPTIONS))


def _rules(options: Mapping[str, object]) -> Document:
    """Return the checked options that concern missed ticks and unfinished messages."""
    missed, overlap = options.get("missed", "once"), options.get("overlap", False)
    arguments.one_of("missed", missed, get_args(Missed))
    if not isinstance(overlap, bool):
        raise ConfigurationError(f"overlap: expected True or False, found {shown(overlap)}")
    if missed == "all" and not overlap:
        raise ConfigurationError(
            "missed: 'all' pushes several messages at once; set overlap=True, too"
        )
    grace_s = arguments.duration("grace", options.get("grace", 60))
    if grace_s < _LEAST_GRACE_S:
        raise ConfigurationError(f"grace: {shown(grace_s)} is not allowed; use at least 1 second")
    return {"missed": missed, "overlap": overlap, "grace": grace_s}


def _optional(options: Mapping[str, object]) -> Document:
    """Return the checked options that are stored only if the caller gave them."""
    return {
        each: check(options[each])
        for each, check in _OPTIONAL.items()
        if options.get(each) is not None
    }


def check_target(spec: Document, stored: str | None) -> Kind:
    """Check the queue of a schedule, and return its kind.

    Args:
        spec: The definition of the schedule.
        stored: The kind in the record of the queue, or None if there is no record.

    Raises:
        ConfigurationError: The queue is a stream, or its kind does not offer an option.
    """
    queue = spec["queue"]
    if stored == STREAM:
        raise ConfigurationError(
            f"queue: {queue!r} is a stream, but a schedule can push only to queues; name a queue, "
            "and let a worker of that queue append to the stream"
        )
    kind = kinds.lookup(stored or GUESSED_KIND)
    for option, capability in (("key", "keys"), ("priority", "priority"), ("group", "group")):
        if option in spec:
            kinds.require(kind, queue, capability, option)
    return kind


def timing_in(spec: Document) -> Timing:
    """Return the timing of a stored definition."""
    return Timing(spec.get("cron"), spec["timezone"], spec.get("every"))


class Schedule(NamedTuple):
    """A stored schedule, as it was read."""

    name: str
    spec: Document
    timing: Timing
    #: The next tick, or ``NEVER`` if the schedule is paused or has no further tick.
    when: datetime
    #: Its revision, which changes with every change and every tick.
    token: str
    paused: bool
    #: The whole document, as it was read.
    stored: Document

    @property
    def unchanged(self) -> Filter:
        """The filter that matches the schedule until it changes or ticks."""
        return {"_id": self.stored["_id"], "when": self.when, "token": self.token}

    def info(self) -> ScheduleInfo:
        """Return the schedule as users see it."""
        return ScheduleInfo(
            self.name,
            self.spec["queue"],
            next=self.when if self.when < BAND else None,
            paused=self.paused,
            last=self.stored.get("last"),
            skipped=self.stored.get("skipped", 0),
            error=self.stored.get("error"),
            options={name: value for name, value in self.spec.items() if name != "queue"},
        )

    def messages(self, kind: Kind, ticks: Sequence[datetime], now: datetime) -> list[Document]:
        """Return a message for each tick. Each call gives the messages new ids.

        With equal ids, two processes would overwrite each other's hidden copies.
        """
        spec = self.spec
        given = {each: spec.get(each) for each in _OPTIONAL}
        contents = [
            Content(None, spec["payload"], id=self._message_id(tick), **given) for tick in ticks
        ]
        return [new_document(spec["queue"], kind, now, now, each) for each in contents]

    def _message_id(self, tick: datetime) -> str:
        return f"cron:{self.name}:{tick:%Y%m%dT%H%M%SZ}:{secrets.token_hex(6)}"


def read(stored: Document) -> Schedule:
    """Return the schedule that a document stores.

    Raises:
        ConfigurationError: This release cannot read the schedule.
    """
    name = str(stored["_id"]).removeprefix(_IDS)
    try:
        spec, when, token = stored["spec"], stored["when"], stored["token"]
        timing = timing_of(spec.get("cron"), spec.get("every"), spec["timezone"])
        _rules({each: spec[each] for each in ("missed", "overlap", "grace")})
        _optional(spec)
        arguments.queue_name(spec["queue"])
        valid = "payload" in spec and isinstance(when, datetime) and isinstance(token, str)
        if not (valid and isinstance(stored.get("skipped", 0), int)):
            raise ConfigurationError("a field is missing or invalid")
    except (QueueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f"schedule {name!r} cannot be read ({error}); delete the schedule and define it "
            "again, or upgrade pyqueue-mongo"
        ) from error
    paused = "paused" in stored
    return Schedule(name, spec, timing, when=when, token=token, paused=paused, stored=stored)
