"""Push a message into several queues at once: all of them get it, or none does.

Outside a transaction, the message and its copies are inserted hidden, and one update then decides
that they are published; see ``handover.enter_together``. In the caller's transaction, they are
plain inserts.

A push that is repeated with the same id finds one of three states. If an earlier call was decided,
the push publishes its messages. If an earlier call has only inserted hidden messages, the push
makes sure that they are never published. Otherwise the id is free, or belongs to a message.
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
    """The plans of one queue, for pushes into this queue and into other queues at once."""

    plans: QueuePlans
    #: The other queues.
    targets: Sequence[QueuePlans | str]

    @property
    def queue(self) -> str:
        """The name of the queue."""
        return self.plans.queue

    def push(self, payloads: Sequence[Any], **how: Unpack[PushOptions]) -> Plan[list[Id | None]]:
        """Push a message into all queues, or into none. Return the id that it gets in ``queue``."""
        names = list(map(_name, self.targets))

        def push(found: QueuePlans) -> Plan[list[Id | None]]:
            return again_in_kind(names, lambda: _push(found, self.targets, payloads, how))

        return in_recorded_kind(self.plans, push)


def refuse_key(how: PushOptions) -> None:
    """Refuse a key, because another message may take the key before this message is published.

    Raises:
        ConfigurationError: The push has a key or ``unique_for``.
    """
    for argument, given in (("key", how.get("keys")), ("unique_for", how.get("uniques"))):
        for value in given or ():
            raise ConfigurationError(
                f"{argument}: cannot be combined with also=, found {shown(value)}; use id= instead "
                "to make a repeated push harmless, or push to each queue separately"
            )


def targets(
    queue: str, given: object, target_of: Callable[[object], QueuePlans | str]
) -> list[QueuePlans | str]:
    """Return the other queues that get a message.

    Args:
        queue: The queue that is pushed to, which must not be among the other queues.
        given: The value that the caller passed as ``also``.
        target_of: Checks one element of ``given``, and returns the plans or the name of its queue.

    Raises:
        ConfigurationError: The value is not a list of different other queues.
        InvalidName: One of the names is not allowed.
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
            "also: expected at least one queue, found none; name a queue, or leave out also="
        )
    if queue in names:
        raise ConfigurationError(
            f"also: expected other queues, found {queue!r}, which gets the message anyway; remove "
            "this name"
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
    """Push a message into a queue and the other queues. Return the id in the first, as a list."""
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
    """Return the target for another queue that gets a message. This creates no record.

    Args:
        given: The plans or the name of the queue.
        codec: The codec that stores the payload if ``given`` is only a name.

    Raises:
        ConfigurationError: The queue is a stream, or of a kind that this release does not know.
    """
    queue = _name(given)
    stored = yield from asking_for_kind(queue)
    kind = namespace.target_kind(queue, stored or GUESSED_KIND, "also")
    if isinstance(given, str):
        return Target(queue, kind, codec, None)
    return (yield from found_target(given))


def _copy(own: Checked, target: Target, payloads: Sequence[Any]) -> Checked:
    """Return the content of a message as another queue gets it.

    The copy gets a new id, and neither a kept result nor a gather: these follow one message only.
    """
    values, none = each_of(target.codec.dump, payloads), [None] * len(payloads)
    rest: dict[str, Any] = {"ids": none, "keeps": none, "gathers": none}
    return own._replace(values=values, **rest)


def _entries(entering: Sequence[tuple[Target, Checked]], session: object) -> Plan[list[Entries]]:
    """Return the documents to insert into each queue, with the ids that the caller chose."""
    now = yield from ServerTime()
    entries: list[Entries] = []
    for target, given in entering:
        documents = given.documents(target.queue, target.kind, target.codec.name, now)
        chosen = frozenset(id for id in given.ids if id is not None)
        encoded = each_of(encode, documents)
        entries.append(Entries(target.queue, documents, encoded, chosen, session))
    return entries


def _ensure(target: Target, given: Checked) -> Plan[None]:
    """Make sure that a queue has a record, and that the record has what the messages need.

    Raises:
        ConfigurationError: The queue now has another kind.
    """
    options = yield from given.noted(target.queue, target.kind, target.options or Options())
    request = namespace.ensuring(target.queue, target.kind, target.options, given.priorities)
    yield from namespace.ensured(replace(request, shape=options.shape), target.kind)


def _write(kind: Kind, entries: Sequence[Entries]) -> Plan[None]:
    """Write the message into each queue, or into none if the first queue already knows its id.

    Args:
        kind: The kind of the first queue.
        entries: The queues, each with one document.

    Raises:
        DuplicateKey: The chosen id belongs to a message that was never in the first queue.
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
    """Return whether a message with the chosen id is or was in the queue.

    Raises:
        DuplicateKey: The id belongs to a message that was never in the queue.
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
    """Publish the hidden message with this id, and its copies, if their push decided to do so."""
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
