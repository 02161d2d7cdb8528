"""The former names of ``tests.support.eventually``, for the folders that still use them."""

from tests.support.eventually import LONG, async_eventually, eventually, waiters

__all__ = ["LONG", "async_until", "until", "waiters"]

until = eventually
async_until = async_eventually
