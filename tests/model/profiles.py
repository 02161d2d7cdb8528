"""How long hypothesis looks, here and at length.

The short form is the same every time; the long form is another each time, and prints a blob for
``@reproduce_failure``. Nothing is kept between runs, and a busy machine is no failure.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from hypothesis import HealthCheck, settings

__all__ = ["LONG", "SHORT"]

_ALL: Final = settings(
    database=None,
    deadline=None,
    print_blob=True,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
SHORT: Final = partial(settings, settings(_ALL, derandomize=True))
LONG: Final = partial(settings, settings(_ALL, derandomize=False))
