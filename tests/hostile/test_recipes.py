"""Recipes of any content give a pipeline, or a ConfigurationError that names the file."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pyqueue import Client, ConfigurationError, InvalidName, Pipeline, QueueError
from pyqueue.pipeline.recipes import read

fixed = [HealthCheck.function_scoped_fixture]
bounded = settings(max_examples=60, suppress_health_check=fixed)
long = settings(max_examples=10_000, derandomize=False, suppress_health_check=fixed)

GOOD = '[[stages]]\nqueue = "a"\nhandler = "builtins:print"\n'

#: The contents of a TOML file, as text.
NUMBERS = [
    *("0", "-1", "1e400", "inf", "-inf", "nan", "1" * 400, "1" * 5000, "0x" + "f" * 50, "true"),
    *("1979-05-27", "12:00:00", "9999-99-99"),
]
TEXTS = [
    *('""', '"a b"', '"\\u0000"', '"~queue:a"', '"' + "x" * 600 + '"', '"builtins:print"'),
    *('"builtins:print()"', '".x:y"', '"a..b:c"'),
]
NESTED = [
    *("[]", "{}", '["a", "a"]', "[[]]", "{base = 1}", "{base = -1}", "{factor = nan}"),
    *('{"$gt" = ""}', "[" * 3000 + "]" * 3000),
]
VALUES = st.sampled_from([*NUMBERS, *TEXTS, *NESTED])
#: The options of a stage that the tests set one by one.
STAGE_OPTIONS = [
    *("queue", "to", "model", "concurrency", "time_limit", "lease", "max_tries", "dead_letter"),
    *("history", "poll", "backoff"),
]
KEYS = st.sampled_from([*STAGE_OPTIONS, "handler", "name", "stages", "unknown", '"$set"', "a.b"])
LINES = st.tuples(KEYS, VALUES).map(" = ".join)
HEADS = st.sampled_from(["[[stages]]", "[stages]", *GOOD.splitlines()])
FILES = st.one_of(
    st.lists(LINES | HEADS, max_size=8).map("\n".join),
    st.lists(LINES, max_size=2).map(lambda lines: GOOD + "\n".join(lines)),
    st.text(max_size=30),
    st.text(string.punctuation + " \n\"'01", max_size=30),
)


def take(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    client = Client("memory:")
    try:
        pipeline = Pipeline.from_recipe(client, path)
    except QueueError as error:
        if str(path) not in str(error):  # the file is valid, but its content is not allowed
            assert read(path).stages
        refused(error)
    else:
        assert pipeline.graph.stages
        assert pipeline.show()
    assert client.stats == {}  # the client was never opened


def refused(error: QueueError) -> None:
    assert isinstance(error, (ConfigurationError, InvalidName))
    assert isinstance(error, ValueError)
    assert len(str(error)) < 20_000


@bounded
@given(FILES)
@example("x = " + "[" * 3000)
@example("x = " + "9" * 5000)
@example(GOOD + "lease = " + "9" * 400)
def test_recipe_of_any_text(tmp_path: Path, text: str) -> None:
    take(tmp_path / "x.toml", text.encode("utf-8", "surrogatepass"))


@pytest.mark.slow
@long
@given(FILES)
def test_recipe_of_any_text_at_length(tmp_path: Path, text: str) -> None:
    take(tmp_path / "x.toml", text.encode("utf-8", "surrogatepass"))


@settings(bounded, max_examples=30)
@given(st.binary(max_size=40))
def test_recipe_of_any_bytes(tmp_path: Path, data: bytes) -> None:
    take(tmp_path / "x.toml", data)


@pytest.mark.parametrize("value", [*NUMBERS, *TEXTS, *NESTED], ids=lambda value: value[:12])
def test_recipe_with_any_value_of_any_option(tmp_path: Path, value: str) -> None:
    for key in STAGE_OPTIONS:
        base = '[[stages]]\nhandler = "builtins:print"\n' if key == "queue" else GOOD
        take(tmp_path / "x.toml", f"{base}{key} = {value}\n".encode())


@pytest.mark.parametrize(
    "name", ["a\0b.toml", ".", "x" * 5000 + ".toml", "missing.toml", "x.json", "x"]
)
def test_recipe_of_any_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match="recipe"):
        Pipeline.from_recipe(Client("memory:"), tmp_path / name)


JSON: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


class Parsed:
    """PyYAML as recipes use it; the test decides the result of parsing a text."""

    class YAMLError(Exception):
        pass

    value: Any = None

    @classmethod
    def safe_load(cls, text: str) -> Any:
        if isinstance(cls.value, BaseException):
            raise cls.value
        return cls.value


@settings(bounded, max_examples=40)
@given(
    st.one_of(
        JSON,
        st.builds(lambda value: {"stages": [value]}, JSON),
        st.builds(lambda value: {"stages": value}, JSON),
    )
)
@example(ValueError("month must be in 1..12"))
@example(RecursionError("too deep"))
@example(Parsed.YAMLError("no YAML"))
def test_recipe_of_any_structure(tmp_path: Path, value: Any) -> None:
    """YAML allows null, keys that are not text, and documents that are not mappings."""
    path = tmp_path / "x.yaml"
    path.write_text("")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "yaml", Parsed)  # as good as a module here
        patch.setattr(Parsed, "value", value)
        with pytest.raises((ConfigurationError, InvalidName)) as caught:
            Pipeline.from_recipe(Client("memory:"), path)
    refused(caught.value)
