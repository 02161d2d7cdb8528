"""The server that the workers of a run share."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.support.eventually import eventually
from tests.support.processes import gone, program
from tests.support.servers import require_mongod
from tests.support.shared import Run

WORKER = """
import os, signal, sys
from tests.support.shared import Run
Run(int(sys.argv[1]), sys.argv[2]).mongod()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("ending", [pytest.param("regular", marks=pytest.mark.slow), "killed"])
def test_shared_mongod_outlives_a_worker_not_the_run(tmp_path: Path, ending: str) -> None:
    """The worker that starts the server crashes; other workers use it; it ends with the run."""
    require_mongod()
    directory = tmp_path / "shared"
    with subprocess.Popen(["sleep", "600"]) as controller:
        run = Run(controller.pid, str(directory))
        try:
            with program("-c", WORKER, str(controller.pid), str(directory)) as worker:
                assert worker.wait(60) == -signal.SIGKILL
                server = run.mongod()
            process = psutil.Process(server.pid)
            assert run.mongod() == server
            assert not gone(process)
            if ending == "regular":
                run.end()
                assert gone(process)
            else:
                os.kill(controller.pid, signal.SIGKILL)
                eventually(lambda: gone(process), "the end of mongod")
            eventually(lambda: not directory.exists(), "the removal of its directory")
        finally:
            controller.kill()
