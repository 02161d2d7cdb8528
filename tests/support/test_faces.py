"""The async classes are generated from the blocking classes, and a difference is noticed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support import faces


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the modules."""
    for name in faces.MODULES:
        for file in (f"{name}.py", f"async_{name}.py"):
            shutil.copy(faces.FOLDER / file, tmp_path)
    monkeypatch.setattr(faces, "FOLDER", tmp_path)
    return tmp_path


def test_committed_classes_are_as_generated() -> None:
    assert faces.main(["--check"]) == 0


def test_changed_docstring_is_noticed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, twin = folder / "queues.py", folder / "async_queues.py"
    text = source.read_text()
    source.write_text(text.replace('"""Push a message.', '"""Push one message; see ``Stream``.'))
    assert faces.main(["--check"]) == 1
    remedy = "pyqueue/async_queues.py differs: edit pyqueue/queues.py, run `make faces`\n"
    assert capsys.readouterr().out == remedy
    assert faces.main([]) == 0
    assert '"""Push one message; see ``AsyncStream``.' in twin.read_text()
    assert faces.main(["--check"]) == 0


def test_phrase_without_a_place_is_noticed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in faces.MODULES:
        path = folder / f"{name}.py"
        path.write_text(path.read_text().replace("for blocking code", "for threads"))
    assert faces.main([]) == 1
    assert "'for blocking code' is in no blocking module" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("blocking", "twin"),
    [
        ("Queue  # Queue, ``Queue``", "AsyncQueue  # Queue, ``AsyncQueue``"),
        ("x = '''Queue\n``Queue.get``'''\n", "x = '''Queue\n``AsyncQueue.get``'''\n"),
        ("def f(): self._runner.run(Queue)", "async def f(): await self._runner.run(AsyncQueue)"),
        ("def f():\n  self.close(  # why\n  )", "async def f():\n  await self.close(  # why\n  )"),
        ("if 1:\n  with self._x:\n    y\nz", "if 1:\n  async with self._x:\n    y\nz"),
        ("def f(): self._connection.owner()", "def f(): self._connection.owner()"),
        (
            "@overload\ndef f(): ...\ndef f(): self.close()\n@overload\ndef g(): ...",
            "@overload\nasync def f(): ...\nasync def f(): await self.close()\n"
            "@overload\ndef g(): ...",
        ),
    ],
)
def test_names_and_calls_are_converted(blocking: str, twin: str) -> None:
    assert faces.converted(blocking) == twin
