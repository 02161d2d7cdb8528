"""The Redis of the fault suite: the bus of some clients, which can be killed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.chaos.processes import Process
from tests.support.servers import find_redis, free_port


def serve(spec: dict[str, Any]) -> None:
    """Become a redis-server, which ends with the program.

    Args:
        spec: ``program`` (its path) and ``port``.
    """
    options = {"port": spec["port"], "bind": "127.0.0.1", "save": "", "logfile": os.devnull}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    os.execv(spec["program"], [spec["program"], *words])


class Redis:
    """A redis-server that can be killed and started again on its port.

    Args:
        folder: A folder for its standard error.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._spec = {"program": find_redis(), "port": free_port()}
        self.start()

    @property
    def url(self) -> str:
        """Its URL."""
        return f"redis://127.0.0.1:{self._spec['port']}/0"

    def start(self) -> None:
        """Start it, and do not wait."""
        self._process = Process("redis", self._folder, self._spec)

    def kill(self) -> None:
        """End it by SIGKILL."""
        self._process.kill()
