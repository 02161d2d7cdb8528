"""The keeper: a small process between an EmbeddedServer and its mongod, so that mongod never outlives its owner.

It is run as a script (``python -I -S _watchdog.py OWNER PATH PORT MONGOD...``), so it imports the standard library only,
and little of it. It stops mongod when the owner process is gone, however it went, or when the owner asks by SIGTERM;
mongod in turn is killed by the kernel when the keeper is gone. It ends with mongod's own status, or with ``IN_USE``.

Why a process: PR_SET_PDEATHSIG on mongod alone would follow the *thread* that started it, not the owner, and a pipe to
the owner stays open in every fork of it. A pidfd names exactly one process, and this process has one thread.
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

IN_USE = 75  # EX_TEMPFAIL; mongod itself never ends with it
GRACE = 5.0  # seconds that mongod has for a clean shutdown
PATIENCE = 2 * GRACE  # seconds to wait for a directory whose last server is on its way out

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
_PIDFD_OPEN = 434  # the same number on every architecture but Alpha


def pidfd(pid: int) -> int:
    """Open a descriptor that names this process only and becomes readable when it ends. OSError if there is none.

    By number, since os.pidfd_open is left out of a Python that was built with kernel headers older than 5.3.
    """
    descriptor = int(_libc.syscall(_PIDFD_OPEN, pid, 0))
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), f"pidfd_open: {os.strerror(ctypes.get_errno())}")
    return descriptor


def read_lock(path: str) -> tuple[int, list[int]]:
    """Return what the last holder of the directory wrote: its port (0: none), and [owner, keeper] until it stops."""
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
        return not _wait_for_end(
            descriptor, timeout=0
        )  # a zombie is at its end too, though its number is still taken
    finally:
        os.close(descriptor)


def _take(path: str) -> int | None:
    """Lock the directory and return the lock's descriptor; None if a living owner's server has it."""
    lock = os.open(os.path.join(path, "lock"), os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            _, holders = read_lock(path)
            if time.monotonic() > deadline or (holders and all(map(_alive, holders))):
                return None
            time.sleep(0.02)


def _die_with_keeper(keeper: int) -> None:  # not covered: between fork and exec
    # SIGKILL, because nobody is left to insist: what was acknowledged with j:true is in the journal.
    if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) or os.getppid() != keeper:
        raise OSError("the keeper is gone")


def keep(owner: int, path: str, port: str, command: list[str]) -> int:
    """Run the command (mongod) until it ends, the owner is gone or SIGTERM comes. Returns the status to end with.

    A SIGTERM that comes too early or twice ends this process on the spot, and mongod with it.
    """
    signal.signal(
        signal.SIGTERM, signal.SIG_DFL
    )  # the owner may ignore it, and the thread that started us block it
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    owner_end = pidfd(owner)
    if os.getppid() != owner:
        return 0  # it died before we could watch it: the number may be another's by now
    lock = _take(path)
    if lock is None:
        return IN_USE
    keeper = os.getpid()
    _write_lock(lock, f"{port} {owner} {keeper}")
    log = os.open(
        os.path.join(path, "mongod.log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600
    )
    os.dup2(log, 1)
    os.dup2(log, 2)  # errors of this script are found there too
    # mongod holds the lock as well: should this process be killed, the directory is taken until mongod is gone.
    mongod = subprocess.Popen(command, pass_fds=[lock], preexec_fn=lambda: _die_with_keeper(keeper))
    with contextlib.suppress(KeyboardInterrupt):
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        _wait_for_end(owner_end, pidfd(mongod.pid))
    _write_lock(lock, port)  # who comes now waits for us instead of being refused
    mongod.terminate()
    try:
        return mongod.wait(GRACE)
    except subprocess.TimeoutExpired:
        mongod.kill()
        return mongod.wait()


if __name__ == "__main__":  # not covered: python -S loads no coverage
    sys.exit(keep(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:]))
