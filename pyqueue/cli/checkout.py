"""The commands that need a checkout of the repository: the benchmarks and the fault suite."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

import typer

import pyqueue as library
from pyqueue import ConfigurationError

app = typer.Typer()

#: Pass every argument on, ``--help`` included.
_PASS_ON = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}


def run_from_checkout(command: str, package: str, arguments: list[str]) -> NoReturn:
    """Replace this process with ``python -m tests.<package>``.

    Args:
        command: The name of the command, which is also its target in the Makefile.
        package: The package of ``tests`` that is run.
        arguments: The arguments for the package.

    Raises:
        ConfigurationError: This pyqueue does not run from a checkout.
    """
    checkout = Path(library.__file__).parents[1]
    if not (checkout / "tests" / package / "__main__.py").exists():
        raise ConfigurationError(
            f"{command}: not part of the installed package; "
            f"clone the repository and run `make {command}` there"
        )
    # -P keeps out another package named `tests` in the working directory.
    program = [sys.executable, "-P", "-m", f"tests.{package}", *arguments]
    os.execve(sys.executable, program, os.environ | {"PYTHONPATH": str(checkout)})


@app.command(context_settings=_PASS_ON)
def bench(context: typer.Context) -> None:
    """Measure the speed, as ratios to the raw driver. This needs a checkout. See bench --help."""
    run_from_checkout("bench", "bench", context.args)


@app.command(context_settings=_PASS_ON)
def faults(context: typer.Context) -> None:
    """Make servers, the network and clients fail, and count losses. This needs a checkout.

    See faults --help.
    """
    run_from_checkout("faults", "chaos", context.args)
