"""The base of ``Client`` and ``AsyncClient``: it checks the options of their queues."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Literal, TypedDict, Unpack

from pyqueue import arguments
from pyqueue.backends import uses
from pyqueue.backends.options import Options
from pyqueue.backends.queue_plans import QueuePlans, plans_of
from pyqueue.backends.streams.plans import StreamPlans
from pyqueue.limits import Limit, check_limit
from pyqueue.messages import Duration, OnFailure, QueueOptions
from pyqueue.payloads import Codec
from pyqueue.runtime.connecting import BaseConnection
from pyqueue.specs import DEFAULTS, QueueSpec


class ShapeOptions(TypedDict, total=False):
    """The options on which all users of a queue must agree. False removes an option."""

    strict: bool | None
    on_failure: OnFailure | None
    retention: Duration | None
    pack: int | None
    limit: Limit | Literal[False] | None
    auto_delete: Duration | Literal[False] | None


#: The checks of these options, which return the stored values.
_CHECKS: Final[Mapping[str, Callable[[Any], object]]] = {
    "strict": partial(arguments.flag, "strict"),
    "on_failure": lambda value: arguments.one_of("on_failure", value, ("block", "skip")),
    "retention": arguments.retention,
    "pack": arguments.pack,
    "limit": lambda value: check_limit(value).stored(),
    uses.AUTO_DELETE: uses.length,
}
#: The options that ``reshape`` removes with False.
_REMOVABLE: Final = frozenset({"limit", uses.AUTO_DELETE})


def shape_of(**given: Unpack[ShapeOptions]) -> dict[str, object]:
    """Check and return the given options, on which all users of a queue must agree.

    Raises:
        ConfigurationError: A value is not allowed.
    """
    return {
        name: False if value is False and name in _REMOVABLE else _CHECKS[name](value)
        for name, value in given.items()
        if value is not None
    }


def make_backend(
    connection: BaseConnection[Any],
    name: str | QueueSpec[Any],
    model: object,
    **given: Unpack[QueueOptions],
) -> QueuePlans:
    """Check the options of a queue, and return the object that builds its commands (its plans).

    Args:
        connection: The connection of the client that uses the queue.
        name: The name of the queue, or a QueueSpec, which requires that ``model`` and all options
            have their defaults.
        model: As for ``Client.queue``.
        given: All options of ``Client.queue``.
    """
    if isinstance(name, QueueSpec):
        name.refuse_more({"model": model, **given})
        options: QueueOptions = {**DEFAULTS, **name.options}
        return make_backend(connection, name.name, name.model, **options)
    arguments.queue_name(name)
    arguments.backoff(given["backoff"])
    max_tries, history, limit = given["max_tries"], given["history"], given["limit"]
    if limit is not None:
        check_limit(limit)
    if given["auto_delete"] is not None:  # only ``reshape`` takes False
        uses.length(given["auto_delete"])
    return plans_of(
        name,
        Options(
            lease=arguments.duration("lease", given["lease"], positive=True),
            max_tries=None if max_tries is None else arguments.count("max_tries", max_tries),
            dead_letter=arguments.dead_letter(name, given["dead_letter"]),
            history=None
            if history is None
            else arguments.duration("history", history, positive=True),
            backoff=given["backoff"],
            poll=arguments.duration("poll", given["poll"], positive=True),
            shape=shape_of(
                strict=given["strict"],
                on_failure=given["on_failure"],
                pack=given["pack"],
                limit=limit,
                auto_delete=given["auto_delete"],
            ),
        ),
        Codec(model),
        kind=given["kind"],
        owner=connection.owner,
        command_timeout=connection.command_timeout,
    )


def make_stream_backend(
    connection: BaseConnection[Any],
    name: str,
    model: object,
    retention: Duration | None,
    limit: Limit | None,
) -> StreamPlans:
    """Check the options of a stream, and return the object that builds its commands (its plans)."""
    arguments.queue_name(name)
    if limit is not None:
        check_limit(limit)
    shape = shape_of(retention=retention, limit=limit)
    return StreamPlans(
        name,
        Codec(model),
        shape,
        owner=connection.owner,
        command_timeout=connection.command_timeout,
    )
