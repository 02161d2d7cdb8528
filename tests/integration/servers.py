"""The former name of ``tests.support.servers.mongod_process``."""

from tests.support.servers import mongod_process as standalone

__all__ = ["standalone"]
