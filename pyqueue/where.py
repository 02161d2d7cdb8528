"""Conditions on the fields of messages, for ``where=`` of ``Queue.browse`` and ``Queue.select``.

``where`` maps paths to values or to conditions of this module. A message must meet all of them::

    queue.browse(where={"payload.amount": gt(100), "headers.tenant": "a", "error": exists()})

Values are compared as they are stored. Numbers are compared by value, whatever their type; other
values are equal only to values of the same type. A dict is compared as a value: MongoDB operators
in it have no effect.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, repr=False)
class Condition:
    """A condition on a value. Use the functions of this module to create one."""

    name: Literal["equal", "gt", "ge", "lt", "le", "one_of", "exists", "contains"]
    #: The value to compare with; a tuple of values for "one_of".
    value: object

    def __repr__(self) -> str:
        return f"{self.name}({self.value!r})"


def gt(value: object) -> Condition:
    """Match values greater than this number, str or instant. Values of other types do not match."""
    return Condition("gt", value)


def ge(value: object) -> Condition:
    """Match values greater than or equal to this number, str or instant."""
    return Condition("ge", value)


def lt(value: object) -> Condition:
    """Match values less than this number, str or instant. Values of other types do not match."""
    return Condition("lt", value)


def le(value: object) -> Condition:
    """Match values less than or equal to this number, str or instant."""
    return Condition("le", value)


def one_of(*values: object) -> Condition:
    """Match values that are equal to one of the given values.

    Args:
        values: The values. A single list, tuple or set stands for its items.
    """
    if len(values) == 1 and isinstance(values[0], (list, tuple, set, frozenset)):
        values = tuple(values[0])
    return Condition("one_of", values)


def exists(value: bool = True) -> Condition:
    """Match messages that have the field, even if it is null; with False, messages that lack it."""
    return Condition("exists", value)


def contains(value: object) -> Condition:
    """Match lists with an item that equals this value, and strs that contain this str."""
    return Condition("contains", value)
