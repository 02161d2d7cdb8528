"""Property tests have no deadline: a slow machine must not fail them."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("pyqueue", deadline=None, derandomize=True, database=None)
settings.load_profile("pyqueue")
