"""Jobs on a cluster of two executors whose Python has no pyqueue: the job ships it."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pyspark
import pytest

from pyqueue import Client
from pyqueue.spark.session import find_java
from tests.spark.processes import SLOW_S, build_wheel
from tests.support.processes import ROOT, last_json, program

#: Two executors with a JVM each, which share no files.
MASTER = "local-cluster[2,1,1024]"
#: Missing in the Python of the cluster: this package, and its dependencies beside pymongo.
MISSING = (
    *("pyqueue", "signals", "pydantic", "anyio", "cronsim"),
    *("_editable_impl_pyqueue", "pyspark_pyqueue"),
)

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("spark")]


def bare_python(directory: Path) -> Path:
    """Make a Python with all packages of this one but ``MISSING``; return its directory.

    Like the result of ``venv-pack``, the directory works wherever it is unpacked.
    """
    packages = directory.with_name(f"{directory.name}-packages")
    packages.mkdir()
    for each in Path(sysconfig.get_path("purelib")).iterdir():
        if not each.name.startswith(MISSING) and each.suffix != ".pth":
            (packages / each.name).symlink_to(each)
    venv.create(directory, symlinks=True)
    (site,) = directory.glob("lib/python*/site-packages")
    (site / "packages.pth").write_text(f"{packages}\n")
    return directory


def spark_home(directory: Path) -> Path:
    """Return a home of Spark in which its workers may write, with the files of pip's Spark."""
    directory.mkdir()
    for each in Path(pyspark.__path__[0]).iterdir():
        if each.name in ("bin", "jars", "python", "sbin"):
            (directory / each.name).symlink_to(each)
    return directory


def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the environment of a job: Java, Spark, and nothing of this checkout."""
    monkeypatch.setenv("JAVA_HOME", os.environ.get("JAVA_HOME", ""))  # find_java() may set it
    find_java()
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    if os.environ.get("JAVA_HOME"):
        kept["JAVA_HOME"] = os.environ["JAVA_HOME"]
    return kept | {
        "SPARK_HOME": str(spark_home(tmp_path / "spark")),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(tmp_path / "scratch"),
    }


def submitted(
    url: str, tmp_path: Path, env: Mapping[str, str], *options: str
) -> list[tuple[str, bool, str]]:
    """Submit the job and check its results. Return the places where its tasks ran."""
    with Client(url, signals="none:") as client:
        client.queue("raw").push_many(range(20))
        command = [
            str(Path(env["SPARK_HOME"], "bin", "spark-submit")),
            *("--master", MASTER, "--conf", "spark.ui.enabled=false"),
            *("--conf", "spark.executor.memory=512m", *options),
            *(str(ROOT / "tests/spark/submitted.py"), url, str(tmp_path / "checkpoint")),
        ]
        execute = "import os, sys; os.execv(sys.argv[1], sys.argv[1:])"
        log = tmp_path / "log"
        with (
            log.open("w") as stderr,
            program("-c", execute, *command, env=env, cwd=tmp_path, stderr=stderr.fileno()) as job,
        ):
            try:
                result = last_json(job, SLOW_S)
            except (AssertionError, subprocess.TimeoutExpired) as error:
                raise AssertionError(log.read_text()[-10_000:]) from error
        assert (result["read"], result["parts"]) == (20, 2)
        for queue, expected in {"table": range(10), "clean": range(20)}.items():
            found = client.queue(queue).peek(100)
            assert sorted(each.payload for each in found) == [*expected], queue
        assert client.queue("raw").counts().ready == 0
    return [(file, pydantic, directory) for file, pydantic, directory in result["places"]]


def test_job_ships_the_wheel_by_py_files(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The executors have pymongo and pyarrow, and neither pydantic nor anyio."""
    wheel = build_wheel(tmp_path / "built")
    python = str(bare_python(tmp_path / "bare") / "bin" / "python")
    env = environment(tmp_path, monkeypatch) | {"PYSPARK_PYTHON": python}
    places = submitted(url, tmp_path, env, "--py-files", str(wheel))
    assert [pydantic for _, pydantic, _ in places] == [False, False]
    assert all(f"{wheel.stem}.zip/pyqueue/" in file for file, _, _ in places), places


def test_job_ships_a_packed_environment_by_archives(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver runs in a directory with the unpacked environment, since it plans the reads."""
    unpacked = bare_python(tmp_path / "environment")
    (site,) = unpacked.glob("lib/python*/site-packages")
    with zipfile.ZipFile(build_wheel(tmp_path / "built")) as wheel:
        wheel.extractall(site)
    archive = tmp_path / "environment.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(unpacked, arcname=".")
    env = environment(tmp_path, monkeypatch) | {
        "PYSPARK_PYTHON": "./environment/bin/python",
        "PYSPARK_DRIVER_PYTHON": str(unpacked / "bin" / "python"),
    }
    places = submitted(url, tmp_path, env, "--archives", f"{archive}#environment")
    for file, _, directory in places:
        assert Path(file).is_relative_to(Path(directory, "environment")), places
        assert Path(directory) != tmp_path


def test_python_of_the_cluster_has_no_pyqueue(tmp_path: Path) -> None:
    """Otherwise the tests above would prove nothing."""
    python = bare_python(tmp_path / "bare") / "bin" / "python"
    code = (
        "import importlib.util as u, pymongo, pyarrow, pyspark; "
        f"print([name for name in {MISSING!r} if u.find_spec(name)])"
    )
    found = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, env={}, cwd=tmp_path
    )
    assert found.stdout == "[]\n", found.stderr
