"""Messages with their own options: how ``Push`` objects become the arguments of a push."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any, Final

from pyqueue import arguments
from pyqueue.backends.pushing import PushOptions
from pyqueue.errors import ConfigurationError
from pyqueue.messages import Push

#: For each option of a push that a ``Push`` sets for itself, the attribute that holds it.
_OWN: Final = {
    "payloads": "payload",
    "delay": "delay",
    "at": "at",
    "labels": "headers",
    "keys": "key",
    "ids": "id",
    "priorities": "priority",
    "groups": "group",
    "results": "result",
    "expires": "expires",
    "uniques": "unique_for",
    "gathers": "gather",
}


def unpacked(payloads: Iterable[Any], how: PushOptions) -> tuple[list[Any], PushOptions]:
    """Return the payloads and the options of a push whose messages may be ``Push`` objects.

    Raises:
        ConfigurationError: Only some messages are ``Push`` objects, or an option is also set for
            all messages.
    """
    given = arguments.payloads(payloads, "push()")
    wrapped = sum(type(each) is Push for each in given)
    if not wrapped:
        return given, how
    if wrapped < len(given):
        place, bare = next(pair for pair in enumerate(given) if type(pair[1]) is not Push)
        raise ConfigurationError(
            f"payloads: expected a Push at each place, found {type(bare).__name__} at place "
            f"{place}; wrap all payloads in a Push, or none of them"
        )
    for name, value in how.items():
        if value is not None and name not in ("on_duplicate", "session"):
            raise ConfigurationError(
                f"{name}: expected None beside Push objects, found {value!r}; set it in each Push"
            )
    each_of_all = zip(*map(attrgetter(*_OWN.values()), given), strict=True)
    own: Any = dict(zip(_OWN, map(list, each_of_all), strict=True))
    own["starts"] = list(zip(own.pop("delay"), own.pop("at"), strict=True))
    return own.pop("payloads"), {**how, **own}
