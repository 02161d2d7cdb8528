"""Push a message into several queues at once: all of them get it, or none does.

The message and its copies in the other queues are the copies of a handover, whose source is new;
see ``handover.enter_together``. In the caller's transaction they are plain inserts.

A push that is repeated with its id finds one of three things. If a former call has decided, it
publishes the messages of that call. If a former call has only inserted them, it deletes their
source, so that call can decide nothing any more. Otherwise the id is free, or names a message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, Unpack

from bson import ObjectId

from pyqueue import arguments
from pyqueue.backends import inserting, namespace
from pyqueue.backends.handover import Handover, enter_together, finish
from pyqueue.backends.hidden import HANDED, MARK, is_copy
from pyqueue.backends.inserting import Entries
from pyqueue.backends.kind import Kind
from pyqueue.backends.naming_kind import GUESSED_KIND
from pyqueue.backends.options import Options, Target
from pyqueue.backends.pushing import Checked, PushOptions, checked
from pyqueue.backends.queue_plans import QueuePlans, found_target, in_recorded_kind
from pyqueue.backends.taking_kind import again_in_kind, asking_for_kind
from pyqueue.backends.transitions import new_token
from pyqueue.errors import ConfigurationError, Unavailable
from pyqueue.hooks import Tell
from pyqueue.limits import shown
from pyqueue.messages import Id
from pyqueue.payloads import Codec, each_of, encode
from pyqueue.requests import Find, Plan, ServerTime

#: How many times a push is tried while other processes push a message with the same id.
_TRIES: Final = 20


class AlsoPlans(NamedTuple):
    """The plans of one queue, for a push that other queues get, too."""

    plans: QueuePlans
    #: The other queues.
    targets: Sequence[QueuePlans | str]

    @property
    def queue(self) -> str:
        """The name of the queue."""
        return self.plans.queue

    def push(self, payloads: Sequence[Any], **how: Unpack[PushOptions]) -> Plan[list[Id | None]]:
        """Push a message into all queues, or into none. Return its id in the queue itself."""
        names = list(map(_name, self.targets))

        def push(found: QueuePlans) -> Plan[list[Id | None]]:
            return again_in_kind(names, lambda: _push(found, self.targets, payloads, how))

        return in_recorded_kind(self.plans, push)


def refuse_key(how: PushOptions) -> None:
    """Refuse a key: a copy gets its key only after the decision, and then it may be taken.

    Raises:
        ConfigurationError: the push has a key, or a time for which a key stays taken.
    """
    for argument, given in (("key", how.get("keys")), ("unique_for", how.get("uniques"))):
        for value in given or ():
            raise ConfigurationError(
                f"{argument}: expected None beside also, found {shown(value)}; pass id= to make a "
                "repeated push harmless, or push to each queue by itself"
            )


def targets(
    queue: str, given: object, target_of: Callable[[object], QueuePlans | str]
) -> list[QueuePlans | str]:
    """Return the other queues that get a message.

    Args:
        queue: the queue of the push.
        given: the argument of the caller.
        target_of: returns the plans or the name of one of them.

    Raises:
        ConfigurationError: the argument is not a list of different queues.
        InvalidName: one of the names is not allowed.
    """
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise ConfigurationError(
            f"also: expected a list of queues, found {type(given).__name__}; use a list, such as "
            'also=["audit"]'
        )
    found = [target_of(each) for each in given]
    names = list(map(_name, found))
    if not names:
        raise ConfigurationError(
            "also: expected at least one queue, found none; name a queue, or leave also out"
        )
    if queue in names:
        raise ConfigurationError(
            f"also: expected other queues, found {queue!r}, which gets the message anyway; remove "
            "it"
        )
    if twice := [name for place, name in enumerate(names) if name in names[:place]]:
        raise ConfigurationError(
            f"also: expected different queues, found {twice[0]!r} twice; list each queue once"
        )
    return found


def _name(target: QueuePlans | str) -> str:
    # A consumer group has a queue, too, with a name that no message may enter.
    return arguments.queue_name(target if isinstance(target, str) else target.queue, "also")


def _push(
    plans: QueuePlans,
    others: Sequence[QueuePlans | str],
    payloads: Sequence[Any],
    how: PushOptions,
) -> Plan[list[Id | None]]:
    """Push a message into a queue and into other queues. Return its id in the queue itself."""
    own = checked(plans.queue, plans.kind, plans.codec, payloads, how)
    entering = [(plans.target, own)]
    for each in others:
        target = yield from _target(each, plans.codec)
        entering.append((target, _copy(own, target, payloads)))
    entries = yield from _entries(entering, how.get("session"))
    for target, given in entering:
        yield from _ensure(target, given)
    id: Id = entries[0].documents[0]["_id"]
    try:
        yield from _write(plans.kind, entries)
    except Unavailable as error:
        raise Unavailable(str(error), ids=[id]) from error
    return [id]


def _target(given: QueuePlans | str, codec: Codec[Any]) -> Plan[Target]:
    """Return another queue that gets a message. This creates no record.

    Args:
        given: the plans or the name of the queue.
        codec: how the payload is stored if only the name is given.

    Raises:
        ConfigurationError: the queue is a stream, or of a kind that this release does not know.
    """
    queue = _name(given)
    stored = yield from asking_for_kind(queue)
    kind = namespace.target_kind(queue, stored or GUESSED_KIND, "also")
    if isinstance(given, str):
        return Target(queue, kind, codec, None)
    return (yield from found_target(given))


def _copy(own: Checked, target: Target, payloads: Sequence[Any]) -> Checked:
    """Return the message as another queue gets it.

    It has a new id. A client waits for the end of one message, and a gather for one, too.
    """
    values, none = each_of(target.codec.dump, payloads), [None] * len(payloads)
    rest: dict[str, Any] = {"ids": none, "keeps": none, "gathers": none}
    return own._replace(values=values, **rest)


def _entries(entering: Sequence[tuple[Target, Checked]], session: object) -> Plan[list[Entries]]:
    """Return the documents of each queue, with the ids that the caller chose."""
    now = yield from ServerTime()
    entries: list[Entries] = []
    for target, given in entering:
        documents = given.documents(target.queue, target.kind, target.codec.name, now)
        chosen = frozenset(id for id in given.ids if id is not None)
        encoded = each_of(encode, documents)
        entries.append(Entries(target.queue, documents, encoded, chosen, session))
    return entries


def _ensure(target: Target, given: Checked) -> Plan[None]:
    """Make sure of the record of a queue, and of what its messages need there.

    Raises:
        ConfigurationError: the queue is of another kind by now.
    """
    options = yield from given.noted(target.queue, target.kind, target.options or Options())
    request = namespace.ensuring(target.queue, target.kind, target.options, given.priorities)
    yield from namespace.ensured(replace(request, shape=options.shape), target.kind)


def _write(kind: Kind, entries: Sequence[Entries]) -> Plan[None]:
    """Write the message of each queue, or nothing if the message of the first is known.

    Args:
        kind: the kind of the first queue.
        entries: the queues, each with one document.

    Raises:
        DuplicateKey: the chosen id belongs to a message that was never in the first queue.
    """
    own = entries[0]
    if own.session is not None:
        if not (yield from _is_known(kind, own)):
            yield from _write_in_transaction(entries)
        return
    documents = [each for entry in entries for each in entry.documents]
    id = documents[0]["_id"]
    for _ in range(_TRIES):
        if (yield from _is_known(kind, own)):
            return
        # The caller reports its own message to hooks, as after any push.
        handover = Handover(own.queue, ObjectId(), new_token(), documents, new=True, told=id)
        if (yield from enter_together(handover)):
            return
    raise Unavailable(f"queue {own.queue!r}: other processes keep pushing {id!r}; try again")


def _is_known(kind: Kind, own: Entries) -> Plan[bool]:
    """Return whether the queue has or had the chosen id of a message.

    Raises:
        DuplicateKey: the id belongs to a message that was never in the queue.
    """
    queue, session = own.queue, own.session
    for id in own.given:
        known, foreign = yield from kind.packed_ids(queue, [id], session)
        inserting.raise_foreign_ids(queue, foreign)
        if known:
            return True
        for _ in range(1 if session is not None else _TRIES):
            # This also ends a former call that has decided nothing.
            stored = yield from inserting.ids_of_this_queue(queue, [id], session)
            if stored.get(id) is not False:
                return id in stored
            # Another call may have decided, whose message is still hidden.
            if session is None:
                yield from _publish_decided(id)
        inserting.raise_foreign_ids(queue, [id])
    return False


def _publish_decided(id: Id) -> Plan[None]:
    """Publish the hidden message with this id, and its copies, if they are decided."""
    match, fields = {"_id": id, MARK: {"$exists": True}}, {MARK: 1, "q": 1, "when": 1}
    for copy in (yield from Find(match, fields, limit=1)):
        if is_copy(copy):
            source = {"_id": copy[MARK].get("source")}
            for each in (yield from Find(source, {HANDED: 1}, limit=1)):
                yield from finish(each)


def _write_in_transaction(entries: Sequence[Entries]) -> Plan[None]:
    """Insert the message of each queue in the caller's transaction."""
    for place, each in enumerate(entries):
        written = yield from inserting.write(each)
        inserting.raise_foreign_ids(each.queue, written.foreign)
        if place:  # the caller reports its own message to hooks
            yield Tell("pushed", each.queue, written.ids, session=each.session)
