"""Parse durations as people write them ("90", "1m", "2h30m"), and show rates in fitting units."""

from __future__ import annotations

import re
from typing import Final

from pyqueue.limits import shown

_NUMBER: Final = r"([0-9]{1,12}(?:\.[0-9]{1,9})?)"
_SECONDS: Final = re.compile(_NUMBER)
#: The units, from the longest to the shortest, with their lengths in seconds.
_UNITS: Final = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_WITH_UNITS: Final = re.compile("".join(f"(?:{_NUMBER}{unit})?" for unit in _UNITS))
#: The units of rates, and how many seconds each has.
_RATE_UNITS: Final = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
#: With one digit after the point, a smaller rate would be shown as 0.
_LEAST_RATE: Final = 0.1


def seconds_of(text: str) -> float:
    """Return the number of seconds that a text stands for.

    Args:
        text: A number of seconds, or numbers with the units d, h, m, s and ms in this order.

    Raises:
        ValueError: The text is not a duration.
    """
    if _SECONDS.fullmatch(text):
        return float(text)
    found = _WITH_UNITS.fullmatch(text)
    if not text or found is None:
        raise ValueError(
            f"expected a duration, found {shown(text)}; use seconds, or units as in 1m, 2h30m or "
            "500ms"
        )
    sizes = zip(found.groups(), _UNITS.values(), strict=True)
    return sum(float(number) * size for number, size in sizes if number is not None)


def readable_rate(rate: float, unit: str = "s") -> tuple[float, str]:
    """Return a rate in the shortest unit in which it is at least 0.1, together with this unit.

    Args:
        rate: How often something happens per ``unit``.
        unit: "s", "min", "h" or "d". A shorter unit is never returned.

    Returns:
        The number and its unit. A rate of 0 keeps its unit.
    """
    found = rate, unit
    for name, seconds in _RATE_UNITS.items():
        if seconds >= _RATE_UNITS[unit]:
            found = rate * seconds / _RATE_UNITS[unit], name
            if found[0] >= _LEAST_RATE or not rate:
                break
    return found
