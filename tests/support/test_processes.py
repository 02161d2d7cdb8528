"""The programs that tests start."""

from __future__ import annotations

import sys

from tests.support.processes import program


def test_started_program_stores_bytecode() -> None:
    """Whatever the environment of the run says. Else it would compile all modules at each start."""
    assert not sys.dont_write_bytecode
    with program("-c", "import sys; print(sys.dont_write_bytecode)") as started:
        assert started.communicate(timeout=60)[0] == "False\n"
