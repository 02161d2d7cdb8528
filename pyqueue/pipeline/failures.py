"""How a stage reacts to payloads that do not fit its model, and to exceptions of its handler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from pyqueue import arguments
from pyqueue.errors import ConfigurationError, LeaseLost, QueueClosed, Unavailable

#: How a stage reacts if most of its first messages do not fit its model.
OnInvalid = Literal["stop", "bury"]

#: Exceptions, as ``except`` takes them.
ErrorTypes = type[Exception] | tuple[type[Exception], ...]

#: Errors for which no message is to blame: it is tried again, unless ``reject_on`` names them.
_OF_THE_SERVER: Final = (Unavailable, QueueClosed, LeaseLost)


@dataclass(frozen=True, slots=True)
class FailureRules:
    """How a stage reacts to failures."""

    on_invalid: OnInvalid = "stop"
    #: The exceptions after which a message is tried again. If empty, all except ``reject_on``.
    retry_on: tuple[type[Exception], ...] = ()
    #: The exceptions that send a message to the dead-letter queue at once.
    reject_on: tuple[type[Exception], ...] = ()

    def rejects(self, error: BaseException) -> bool:
        """Return whether an exception sends its message to the dead-letter queue at once.

        If both ``retry_on`` and ``reject_on`` name a base class of the exception, the nearest base
        class decides.
        """
        for each in type(error).__mro__:
            if each in self.retry_on:
                return False
            if each in self.reject_on:
                return True
        unnamed_retried = (
            not self.retry_on
            or isinstance(error, _OF_THE_SERVER)
            or not isinstance(error, Exception)
        )
        return not unnamed_retried


def failure_rules(on_invalid: Any, retry_on: Any, reject_on: Any) -> FailureRules:
    """Check the options of a stage about failures, and return its rules.

    Raises:
        ConfigurationError: A value is not allowed, or both lists name an exception.
    """
    arguments.one_of("on_invalid", on_invalid, ("stop", "bury"))
    retried, rejected = _types("retry_on", retry_on), _types("reject_on", reject_on)
    if both := [each.__name__ for each in retried if each in rejected]:
        raise ConfigurationError(
            f"retry_on, reject_on: {both[0]} is in both; remove it from one of them"
        )
    return FailureRules(on_invalid, retried, rejected)


def _types(name: str, value: Any) -> tuple[type[Exception], ...]:
    given = value if isinstance(value, (tuple, list)) else () if value is None else (value,)
    for each in given:
        if not (isinstance(each, type) and issubclass(each, Exception)):
            found = each.__name__ if isinstance(each, type) else type(each).__name__
            raise ConfigurationError(
                f"{name}: expected subclasses of Exception, found {found}; give a class such as "
                "ValueError, or a tuple of classes"
            )
    return tuple(given)
