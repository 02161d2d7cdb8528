"""Pipelines from files."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from pyqueue import Backoff, Client, ConfigurationError, InvalidName, Limit, Pipeline
from pyqueue.queue_base import backend_of
from tests.pipeline.place import Place

GOOD = """
name = "numbers"
concurrency = 4

[[stages]]
queue = "raw"
handler = "tests.pipeline.stages:parse"
model = "tests.pipeline.stages:Row"
to = "parsed"
lease = 30
max_tries = 3
history = 60.5
backoff = {base = 2, maximum = 10}

[[stages]]
queue = "parsed"
handler = "tests.pipeline.stages:Routes.route"
to = ["even", "odd"]
concurrency = 2
time_limit = 5.0

[[stages]]
queue = "even"
handler = "tests.pipeline.stages:store"
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_recipe_is_a_pipeline(place: Place, tmp_path: Path) -> None:
    path = write(tmp_path / "numbers.toml", GOOD)
    place.queue("raw").push_many([{"number": 1}, {"number": 2}, {"number": "many"}])
    report = place.run(lambda client: Pipeline.from_recipe(client, path), until_empty=True)
    assert {name: each["out"] for name, each in report.stages.items()} == {
        "raw": 2,
        "parsed": 2,
        "even": 1,
    }
    assert place.payloads("odd") == [1]
    assert place.queue("raw.dead").counts().total == 1


def test_recipe_sets_every_option(offline: Client, tmp_path: Path) -> None:
    pipeline = Pipeline.from_recipe(offline, str(write(tmp_path / "numbers.toml", GOOD)))
    assert (pipeline.name, pipeline._concurrency) == ("numbers", 4)
    raw, parsed, even = pipeline.graph.stages.values()
    assert [each.kind for each in (raw, parsed, even)] == ["link", "choice", "sink"]
    options = backend_of(raw.queue).options
    assert (options.lease, options.max_tries, options.history) == (30, 3, 60.5)
    assert options.backoff == Backoff(base=2, maximum=10)
    assert (parsed.concurrency, parsed.time_limit) == (2, 5.0)
    assert backend_of(parsed.queue).options.max_tries == 20
    assert parsed.awaited


def test_recipe_stage_takes_a_limit(offline: Client, tmp_path: Path) -> None:
    text = STAGE + "limit = { rate = 100, period = 60, burst = 20, per = 'headers.a' }"
    pipeline = Pipeline.from_recipe(offline, write(tmp_path / "x.toml", text))
    [stage] = pipeline.graph.stages.values()
    limit = Limit(rate=100, period=60, burst=20, per="headers.a")
    assert backend_of(stage.queue).options.shape == {"limit": limit.stored()}


def test_recipe_takes_durations(offline: Client, tmp_path: Path) -> None:
    text = STAGE + 'lease = "1m"\nhistory = "2h30m"\ntime_limit = "45s"\nauto_delete = "2d"\n'
    text += 'backoff = { base = "500ms", maximum = "1h" }\nlimit = { rate = 5, period = "1m" }\n'
    text += '[[cron]]\nname = "often"\nqueue = "raw"\nevery = "5m"\n'
    pipeline = Pipeline.from_recipe(offline, write(tmp_path / "x.toml", text))
    [stage] = pipeline.graph.stages.values()
    options = backend_of(stage.queue).options
    assert (options.lease, options.history, stage.time_limit) == (60, 9000, 45)
    assert options.backoff == Backoff(base=0.5, maximum=3600)
    limit = Limit(rate=5, period=60)
    assert options.shape == {"limit": limit.stored(), "auto_delete": 172800}
    [schedule] = pipeline._schedules.values()
    assert schedule.spec["every"] == 300


def test_recipe_stage_takes_batches(offline: Client, tmp_path: Path) -> None:
    text = STAGE.replace("store", "store_all") + "batch = 500\nwindow = 0.5"
    pipeline = Pipeline.from_recipe(offline, write(tmp_path / "x.toml", text))
    [stage] = pipeline.graph.stages.values()
    assert (stage.batch, stage.window) == (500, 0.5)


def test_recipe_name_defaults_to_the_file_name(offline: Client, tmp_path: Path) -> None:
    path = write(tmp_path / "letters.toml", GOOD.replace('name = "numbers"', ""))
    assert Pipeline.from_recipe(offline, path).name == "letters"


STAGE = '[[stages]]\nqueue = "raw"\nhandler = "tests.pipeline.stages:store"\n'
WRONG = {
    "no TOML": ("x = \ny = 1", r"recipe .*x\.toml: invalid TOML .*line 1"),
    "no stages": ('name = "x"', "stages: Field required"),
    "empty": ("stages = []", "stages: List should have at least 1 item"),
    "unknown key": (
        STAGE + "leese = 5",
        r"stages\[0\]\.leese: unknown key; did you mean `lease`\?$",
    ),
    "exceptions": (STAGE + 'retry_on = "OSError"', r"stages\[0\]\.retry_on: unknown key"),
    "no handler": ('[[stages]]\nqueue = "raw"', r"stages\[0\]\.handler: Field required"),
    "code": (
        STAGE + '[[stages]]\nqueue = "b"\nhandler = "lambda x: x"',
        r"stages\[1\]\.handler: use MODULE:OBJECT, for example etl\.stages:parse$",
    ),
    "a call": (
        STAGE.replace("store", "store()"),
        r"stages\[0\]\.handler: use MODULE:OBJECT, for example etl\.stages:parse$",
    ),
    "a dot for the colon": (
        STAGE.replace(":store", ".store"),
        r"handler: use MODULE:OBJECT, for example tests\.pipeline\.stages:store$",
    ),
    "unknown key of a file": ("stage = 1\n" + STAGE, "^recipe .*: stage: .* mean `stages`"),
    "unknown key of Spark": (
        STAGE.replace("handler", "too = 'a'\nspark"),
        r"stages\[0\]\.too: unknown key; did you mean `to`\?",
    ),
    "unknown key of a schedule": (
        STAGE + "[[cron]]\nname = 'a'\nqueue = 'raw'\nevry = 5",
        r"cron\[0\]\.evry: unknown key; did you mean `every`\?",
    ),
    "type": (STAGE + "lease = true", r"stages\[0\]\.lease: Input should be a valid number"),
    "a duration": (
        STAGE + 'lease = "long"',
        r"stages\[0\]\.lease: expected a duration; use seconds, or units",
    ),
    "a duration of a limit": (
        STAGE + 'limit = { rate = 1, period = "1x" }',
        r"stages\[0\]\.limit\.period: expected a duration; use",
    ),
    "a number as a word": (
        STAGE + 'concurrency = "4"',
        r"stages\[0\]\.concurrency: Input should be a valid integer",
    ),
    "backoff": (
        STAGE + "backoff = {bass = 1}",
        r"stages\[0\]\.backoff\.bass: unknown key; did you mean `base`\?",
    ),
    "two mistakes": (
        STAGE + "lease = []\npoll = []",
        r"stages\[0\]\.lease: .*; stages\[0\]\.poll: ",
    ),
    "no module": (
        STAGE.replace("tests.pipeline.stages", "no.such.module"),
        "^handler of queue 'raw': 'no.such.module:store' cannot be imported: no module 'no' in the "
        "current directory or installed; run it from its directory, or set PYTHONPATH$",
    ),
    "no attribute": (
        STAGE.replace("store", "shop"),
        "'tests.pipeline.stages:shop' cannot be imported: .* no attribute 'shop'; correct the name",
    ),
    "no function": (
        STAGE.replace("store", "NO_FUNCTION"),
        "handler of queue 'raw': expected a function, found int",
    ),
    "model": (
        STAGE + 'model = "tests.pipeline.stages:Rows"',
        "^model of queue 'raw': 'tests.pipeline.stages:Rows' cannot be imported: ",
    ),
    "a spec": (
        STAGE + 'model = "tests.typed.service:SHIP"',
        "model: pydantic cannot validate QueueSpec",
    ),
    "a limit": (STAGE + "limit = { rate = 0 }", "rate: 0.0 is not allowed"),
    "a field of a limit": (
        STAGE + "limit = { speed = 1 }",
        r"stages\[0\]\.limit\.speed: unknown key; remove it",
    ),
    "a lease": (STAGE + "lease = -1", "lease: -1.0 is not allowed"),
    "a window alone": (STAGE + "window = 1", "window: .* queue 'raw' .* set batch=, too"),
    "two stages": (STAGE + STAGE, "'raw' has two stages"),
    "name": (STAGE.replace('"raw"', '"ra w"'), "invalid queue name"),
}


@pytest.mark.parametrize("case", WRONG)
def test_recipe_mistake_is_named_with_its_place(offline: Client, tmp_path: Path, case: str) -> None:
    text, reason = WRONG[case]
    with pytest.raises((ConfigurationError, InvalidName), match=reason):
        Pipeline.from_recipe(offline, write(tmp_path / "x.toml", text))
    assert offline.stats == {}


def test_recipe_file_that_cannot_be_read_is_refused(offline: Client, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        Pipeline.from_recipe(offline, tmp_path / "missing.toml")
    with pytest.raises(ConfigurationError, match=r"ends in \.toml, \.yaml or \.yml"):
        Pipeline.from_recipe(offline, write(tmp_path / "x.json", "{}"))
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        Pipeline.from_recipe(offline, tmp_path / "bytes.toml")


def test_yaml_without_pyyaml_names_the_remedy(
    offline: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)  # importing it fails
    with pytest.raises(ConfigurationError, match="reading YAML needs PyYAML; pip install PyYAML"):
        Pipeline.from_recipe(offline, write(tmp_path / "x.yaml", "stages: []"))


class StandIn:
    """A stand-in for PyYAML. Flow-style YAML of this shape is a Python literal."""

    class YAMLError(Exception):
        pass

    @classmethod
    def safe_load(cls, text: str) -> Any:
        import ast

        try:
            return ast.literal_eval(text)
        except SyntaxError as error:
            raise cls.YAMLError(str(error)) from error


def test_yaml_is_read_like_toml(
    offline: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("yaml") is None:
        monkeypatch.setitem(sys.modules, "yaml", StandIn)
    text = '{"stages": [{"queue": "raw", "handler": "tests.pipeline.stages:store"}]}'
    pipeline = Pipeline.from_recipe(offline, write(tmp_path / "x.yaml", text))
    assert list(pipeline.graph.stages) == ["raw"]
    with pytest.raises(ConfigurationError, match="invalid YAML"):
        Pipeline.from_recipe(offline, write(tmp_path / "y.yml", "{"))
