"""A forked child that pushes, while other threads of its parent push, too.

The child inherits the locks that those threads held at that moment, and none of the threads. It
makes a new client, as the documentation demands. For the ledger, its push is a call of the parent.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from pyqueue import Client, Unavailable, _watchdog
from tests.chaos.queues import COMMAND_TIMEOUT_S, QUEUES

#: A child that takes longer hangs. Its push has a few commands, each with a limit of 8 s.
CHILD_S = 60.0


def push_in_child(
    spec: dict[str, Any], queue: str, payloads: Sequence[Any], **options: Any
) -> list[Any]:
    """Push many by a forked child and return the ids.

    Raises:
        Unavailable: The servers did not answer the child.
        RuntimeError: The child did not end in time, or failed.
    """
    here, there = Pipe(duplex=False)
    with here:
        with there:
            parent, child = os.getpid(), os.fork()
            if not child:
                _end(parent, there, partial(_push, spec, queue, payloads, options))
        ended = here.poll(CHILD_S)
        if not ended:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if not ended:
            raise RuntimeError(f"a forked child did not end within {CHILD_S:g} s")
        if status:
            code = os.waitstatus_to_exitcode(status)
            raise RuntimeError(f"a forked child ended with status {code}")
        ids, unavailable, error = here.recv()
    if unavailable:
        raise Unavailable(unavailable, ids=options["ids"])
    if error:
        raise RuntimeError(f"a forked child failed: {error}")
    return list(ids)


def _push(
    spec: dict[str, Any], queue: str, payloads: Sequence[Any], options: dict[str, Any]
) -> list[Any]:
    address = {"namespace": spec["namespace"], "command_timeout": COMMAND_TIMEOUT_S}
    with Client(spec["url"], **address) as client:
        return client.queue(queue, **QUEUES[queue]).push_many(payloads, **options)


def _end(parent: int, result: Connection, push: Callable[[], list[Any]]) -> NoReturn:
    """Push in the child, send the ids and the text of Unavailable or of an error, and end.

    It ends without the usual clean-up, which would wait for the thread of its parent that reads
    the standard input.
    """
    status = 1
    try:
        _watchdog.die_with_parent(parent)
        try:
            result.send((push(), "", ""))
        except Unavailable as error:
            result.send(([], str(error) or "no answer", ""))
        except Exception:
            result.send(([], "", traceback.format_exc()))
        status = 0
    finally:
        os._exit(status)
