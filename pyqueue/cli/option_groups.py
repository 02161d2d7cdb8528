"""Groups of options that several commands share.

A group is a named tuple whose fields are options. A command takes it as one value::

    @app.command()
    @grouped
    def rm(name: QueueName, server: Server) -> None: ...
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, get_type_hints

from pyqueue.cli.common import Json, Namespace, Signals, Url


class Server(NamedTuple):
    """The server that a command uses, and the form of its output."""

    url: Url = None
    namespace: Namespace = "pyqueue"
    signals: Signals = None
    as_json: Json = False


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """In a command, replace each parameter that stands for several options by these options."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if isinstance(hints[name], type) and issubclass(hints[name], tuple):
            groups[name] = hints[name]
            parameters += _fields(hints[name])
        else:
            parameters.append(parameter.replace(annotation=hints[name]))

    @wraps(command)
    def call(**given: Any) -> None:
        values = {
            name: group(**{field: given.pop(field) for field in group._fields})
            for name, group in groups.items()
        }
        command(**given, **values)

    call.__annotations__ = {each.name: each.annotation for each in parameters}
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # of any function
    return call


def _fields(group: Any) -> list[inspect.Parameter]:
    """Return the fields of a group as parameters."""
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=group._field_defaults[name],
            annotation=hints[name],
        )
        for name in group._fields
    ]
