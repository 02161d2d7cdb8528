"""The former names of ``tests.support.processes``, for the tests that still use them."""

from tests.support.processes import Peer as Other
from tests.support.processes import peer_process as other_process

__all__ = ["Other", "other_process"]
