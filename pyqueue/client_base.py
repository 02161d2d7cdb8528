"""The base of ``Client`` and ``AsyncClient``: it checks the options of their queues."""

from __future__ import annotations

from typing import Any, Literal, Unpack

from pyqueue import arguments
from pyqueue.backends.options import Options
from pyqueue.backends.queue_plans import QueuePlans, plans_of
from pyqueue.backends.streams.plans import StreamPlans
from pyqueue.limits import Limit, check_limit
from pyqueue.messages import Duration, OnFailure, QueueOptions
from pyqueue.payloads import Codec
from pyqueue.runtime.connecting import BaseConnection
from pyqueue.specs import DEFAULTS, QueueSpec


def shape_of(
    *,
    strict: bool | None = None,
    on_failure: OnFailure | None = None,
    retention: Duration | None = None,
    pack: int | None = None,
    limit: Limit | Literal[False] | None = None,
) -> dict[str, object]:
    """Check and return the given options, on which all users of a queue must agree.

    Raises:
        ConfigurationError: A value is not allowed.
    """
    if strict is not None:
        arguments.flag("strict", strict)
    if on_failure is not None:
        arguments.one_of("on_failure", on_failure, ("block", "skip"))
    kept_s = None if retention is None else arguments.retention(retention)
    if pack is not None:
        arguments.pack(pack)
    if limit is not None and limit is not False:
        check_limit(limit)
    given = {
        "strict": strict,
        "on_failure": on_failure,
        "retention": kept_s,
        "pack": pack,
        "limit": limit.stored() if limit else limit,
    }
    return {name: value for name, value in given.items() if value is not None}


def make_backend(
    connection: BaseConnection[Any],
    name: str | QueueSpec[Any],
    model: object,
    **given: Unpack[QueueOptions],
) -> QueuePlans:
    """Check the options of a queue and return its plans.

    Args:
        connection: The connection of the client that uses the queue.
        name: The name, or a QueueSpec. With a QueueSpec, all options must have their defaults.
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
    """Check the options of a stream and return its plans."""
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
