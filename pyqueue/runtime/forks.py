"""Forked processes: their labels, and what becomes of the connections of their parent."""

from __future__ import annotations

import os
import socket
import weakref
from functools import cache
from typing import Protocol

from pyqueue.runtime.opened import Opened


class Forkable(Protocol):
    """A connection, which may be used in a forked process."""

    def begin_again(self) -> None:
        """In a forked child, prepare to connect again, unless the parent has sent a command."""


#: The connections of this process, for its forked children.
connections: weakref.WeakSet[Forkable] = weakref.WeakSet()
#: Resources that a parent process opened but did not use. A child neither closes nor drops them.
of_parent: list[Opened] = []


def _forked() -> None:
    for each in connections:
        each.begin_again()


os.register_at_fork(after_in_child=_forked)


def process_label() -> str:
    """Return "host:pid" of the current process, which may be a fork of the client's process."""
    return _label(os.getpid())


@cache
def _label(pid: int) -> str:
    # Cached, because every reserve needs the label, and the name of the host costs a system call.
    return f"{socket.gethostname()}:{pid}"
