"""Each rule of the language check refuses a bad sample and passes a good one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import language

SAMPLES = {
    "lest": ("# Sorted, lest two claims deadlock.", "# Sorted, so that no two claims deadlock."),
    "whoever": ("# Whoever holds it settles it.", "# The holder settles it."),
    "is told": ("# The consumer is\n# told so.", "# The consumer gets LeaseLost."),
    "be mended": ("log.warning('It must be mended')", "log.warning('It must be fixed')"),
    "Answers": ("'''Answers the state.'''", "'''Return the state. Answers follow.'''"),
    "is no X": (
        "raise InvalidName(f'{name!r} is no queue name')",
        "raise QueueError(f'{name!r} is no longer known; there is no queue {name!r}')",
    ),
    "others": ("# It waits for others.", "# It waits for other consumers."),
    "nobody": ("'''Nobody waits.'''", "'''No consumer waits.'''"),
    "of its own": ("# It has a thread of its own.", "# It has its own thread."),
    "as it is": ("# The payload stays as it is.", "# The payload stays unchanged."),
}


def broken(source: str, tmp_path: Path) -> set[str]:
    path = tmp_path / "module.py"
    path.write_text(source)
    return {hit.rule.name for hit in language.hits(path)}


def test_rules_all_have_a_sample() -> None:
    assert set(SAMPLES) == {rule.name for rule in language.RULES}


@pytest.mark.parametrize("rule", SAMPLES)
def test_rule_finds_bad_and_passes_good(rule: str, tmp_path: Path) -> None:
    bad, good = SAMPLES[rule]
    assert broken(bad, tmp_path) == {rule}
    assert broken(good, tmp_path) == set()


def test_long_test_names_are_found(tmp_path: Path) -> None:
    path = tmp_path / "test_module.py"
    name = "test_" + 55 * "x"
    path.write_text(f"def {name}(): ...\nclass TestA:\n    def {name}y(self): ...\n")
    assert list(language.long_test_names(path)) == [(3, f"{name}y")]


def test_code_is_not_read(tmp_path: Path) -> None:
    assert broken("others = 'nobody'  # see `others` and ``nobody``", tmp_path) == set()
    page = tmp_path / "page.md"
    page.write_text("`others`\n\n```python\n# nobody\n```\n\nThe others.\n")
    assert [(hit.line, hit.rule.name) for hit in language.hits(page)] == [(7, "others")]


def test_error_rule_reads_errors_only(tmp_path: Path) -> None:
    assert broken("print('x is no number')  # x is no number", tmp_path) == set()
    assert broken("def f(): return ConfigurationError('x is no number')", tmp_path) == {"is no X"}
    assert broken("raise QueueError('a' f'{x} is no number' + y)", tmp_path) == {"is no X"}


def test_places_name_the_line(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text('"""A module.\n\nOf others.\n"""\n\nx = 1\n# One,\n# of others.\n')
    assert sorted(hit.line for hit in language.hits(path)) == [3, 8]


def test_exit_code_and_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "module.py"
    path.write_text("# Nobody waits.\n")
    assert language.main([str(path)]) == 0
    path.write_text("# Lest it wait.\n")
    assert language.main([str(path)]) == 1
    assert f"{path}:1: 'lest': write 'so that" in capsys.readouterr().out
    assert language.main(["--report", str(path)]) == 0
    limit = next(rule.limit for rule in language.RULES if rule.name == "nobody")
    assert limit is not None
    path.write_text("# Nobody waits.\n" * (limit + 1))
    assert language.main([str(path)]) == 1
    said = f"'nobody' occurs {limit + 1} times, and may occur {limit} times"
    assert said in capsys.readouterr().out


def test_other_files_are_read_by_their_comments(tmp_path: Path) -> None:
    path = tmp_path / "Makefile"
    path.write_text("others:  ## what nobody runs\n")
    assert [hit.rule.name for hit in language.hits(path)] == ["nobody"]
