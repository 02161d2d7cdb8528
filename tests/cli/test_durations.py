"""Durations as text, in options and recipes."""

from __future__ import annotations

import re

import pytest

from pyqueue import Client
from pyqueue.durations import readable_rate, seconds_of
from tests.cli.shell import Shell


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("90", 90), ("0", 0), ("0.5", 0.5), ("1m", 60), ("2h30m", 9000), ("1d", 86400)),
        *(("1.5h", 5400), ("500ms", 0.5), ("1m500ms", 60.5), ("1d2h3m4s5ms", 93784.005)),
    ],
)
def test_duration_is_seconds(text: str, seconds: float) -> None:
    assert seconds_of(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "-1",
        "m",
        "1x",
        "30m2h",
        "1m1m",
        "1h 5m",
        "1e3",
        "nan",
        "inf",
        "1.",
        "٣",
        "9" * 5000,
    ],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"^expected a duration, found .*; use seconds, or"
    ) as error:
        seconds_of(text)
    assert len(str(error.value)) < 250


def test_options_take_durations(shell: Shell, client: Client) -> None:
    shell.json("push", "a", "1", "--delay", "1h")
    assert client.queue("a").counts().scheduled == 1
    assert shell.json("redrive", "a.dead", "--older", "2h30m", "--dry-run") == [{"matched": 0}]
    assert shell.run("pop", "a", "--timeout", "10ms")[0] == 1
    limited = shell.run("reshape", "a", "--limit", "rate=5,period=1m")
    assert limited[:2] == (0, "a: limit=rate=5,period=60.0\n")


@pytest.mark.parametrize(
    ("command", "option"),
    [
        *(("push a 1", "--delay"), ("pop a", "--timeout"), ("rm a", "--older")),
        *(("get x", "--wait"), ("reshape a", "--retention"), ("top", "--interval")),
        ("reshape a", "--auto-delete"),
        *(("worker a:b", "--grace"), ("pipeline run x.toml", "--grace")),
    ],
)
def test_wrong_duration_names_its_option(bare_shell: Shell, command: str, option: str) -> None:
    error = bare_shell.refused(*command.split(), option, "1x")
    assert error == (
        f"pyqueue: {option}: expected a duration, found '1x'; use seconds, or units as in 1m, "
        "2h30m or 500ms\n"
    )


def test_help_shows_defaults_of_durations(bare_shell: Shell) -> None:
    status, text, _ = bare_shell.run("top", "--help")
    assert status == 0
    assert re.search(r"--interval +DURATION", text)


@pytest.mark.parametrize(
    ("rate", "unit", "number", "found"),
    [
        *[(8.3, "s", 8.3, "s"), (0.1, "s", 0.1, "s"), (0.09, "s", 5.4, "min"), (0.0, "s", 0, "s")],
        *[(0.001, "s", 3.6, "h"), (1e-5, "s", 0.864, "d"), (1e-9, "s", 8.64e-5, "d")],
        *[(2.0, "min", 2.0, "min"), (0.05, "min", 3.0, "h"), (0.0, "min", 0, "min")],
    ],
)
def test_rate_is_not_too_small(rate: float, unit: str, number: float, found: str) -> None:
    scaled, shown = readable_rate(rate, unit)
    assert scaled == pytest.approx(number)
    assert shown == found
