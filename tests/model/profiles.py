"""How long hypothesis searches: a short and a long profile.

The short profile is the same every time. The long profile is different each time and prints a blob
for ``@reproduce_failure``. Nothing is kept between runs, and a slow machine must not fail a test.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from hypothesis import HealthCheck, settings

_ALL: Final = settings(
    database=None,
    deadline=None,
    print_blob=True,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
SHORT: Final = partial(settings, settings(_ALL, derandomize=True))
LONG: Final = partial(settings, settings(_ALL, derandomize=False))
