"""The watchdog: a small process between an EmbeddedServer and its mongod.

The watchdog makes sure that mongod never outlives its owner. It stops mongod when the owner process
ends, for any reason, or when the owner sends SIGTERM. If the watchdog itself dies, the kernel
kills mongod. The watchdog exits with the status of mongod, or with ``IN_USE``.

It runs as a script (``python -I -S _watchdog.py OWNER PATH PORT MONGOD...``). For this reason, it
imports little, and only from the standard library.

Why a process? PR_SET_PDEATHSIG on mongod alone would follow the *thread* that started it, not the
owner. A pipe to the owner would stay open in every fork of the owner. The watchdog waits on a
pidfd, which refers to exactly one process. It has one thread: PR_SET_PDEATHSIG ties mongod to it.
"""

import contextlib
import ctypes
import fcntl
import os
import select
import signal
import subprocess
import sys
import time

IN_USE = 75  # EX_TEMPFAIL; mongod never exits with it
GRACE_S = 5.0  # how long mongod may take to shut down cleanly
LOCK_TIMEOUT_S = 2 * GRACE_S  # how long to wait for the previous server of a directory to stop

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
_PIDFD_OPEN = 434  # the same number on every architecture but Alpha


def pidfd(pid: int) -> int:
    """Return a descriptor that refers only to process ``pid``, and is readable once it has ended.

    The system call is made by number: a Python built with kernel headers older than 5.3 has no
    os.pidfd_open.

    Raises:
        OSError: There is no such process.
    """
    descriptor = int(_libc.syscall(_PIDFD_OPEN, pid, 0))
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), f"pidfd_open: {os.strerror(ctypes.get_errno())}")
    return descriptor


def read_lock(path: str) -> tuple[int, list[int]]:
    """Return the port of the last server, and the ids of the processes that hold the lock.

    The holders are the owner and its watchdog; the list is empty once they stop. Without a previous
    server, the port is 0.
    """
    with open(os.path.join(path, "lock")) as lock:
        port, *holders = map(int, lock.read().split() or ["0"])
    return port, holders


def _write_lock(lock: int, line: str) -> None:
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{line}\n".encode(), 0)


def _wait_for_end(*descriptors: int, timeout: float | None = None) -> bool:
    return bool(select.select(descriptors, [], [], timeout)[0])


def _alive(pid: int) -> bool:
    try:
        descriptor = pidfd(pid)
    except OSError:
        return False
    try:
        return not _wait_for_end(descriptor, timeout=0)  # a zombie has ended, but keeps its number
    finally:
        os.close(descriptor)


def _take(path: str) -> int | None:
    """Lock the directory. Return the descriptor of the lock, or None if a living owner holds it."""
    lock = os.open(os.path.join(path, "lock"), os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            _, holders = read_lock(path)
            if time.monotonic() > deadline or (holders and all(map(_alive, holders))):
                return None
            time.sleep(0.02)


def die_with_parent(parent: int) -> None:  # not covered: between fork and exec
    """Have the kernel kill this process when its parent ends. Call this between fork and exec."""
    # SIGKILL is safe: acknowledged writes with j:true are in the journal. A milder signal could be
    # ignored, and no process would be left to repeat it.
    if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) or os.getppid() != parent:
        raise OSError("the parent process has ended")


def watch(owner: int, path: str, port: str, command: list[str]) -> int:
    """Run the command until it ends, the owner ends, or SIGTERM arrives. Return the exit status.

    A SIGTERM that arrives before mongod runs, or a second SIGTERM, ends this process and mongod at
    once.
    """
    # The owner may ignore SIGTERM, and the thread that started this process may block it.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    owner_end = pidfd(owner)
    if os.getppid() != owner:
        return 0  # the owner ended before pidfd(); the descriptor may name an unrelated process
    lock = _take(path)
    if lock is None:
        return IN_USE
    watchdog = os.getpid()
    _write_lock(lock, f"{port} {owner} {watchdog}")
    log = os.open(
        os.path.join(path, "mongod.log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600
    )
    os.dup2(log, 1)
    os.dup2(log, 2)  # errors of this script go to the log too
    # mongod inherits the lock. If the watchdog is killed, the directory stays locked until mongod
    # ends.
    mongod = subprocess.Popen(
        command, pass_fds=[lock], preexec_fn=lambda: die_with_parent(watchdog)
    )
    with contextlib.suppress(KeyboardInterrupt):
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        _wait_for_end(owner_end, pidfd(mongod.pid))
    _write_lock(lock, port)  # from now on a new server waits for this one instead of being refused
    mongod.terminate()
    try:
        return mongod.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        mongod.kill()
        return mongod.wait()


if __name__ == "__main__":  # not covered: python -S loads no coverage
    sys.exit(watch(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:]))
