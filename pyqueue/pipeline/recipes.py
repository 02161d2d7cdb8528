"""Recipes: a pipeline as a TOML or YAML file.

::

    name = "flights"

    [[stages]]
    queue = "raw"
    handler = "flights.stages:parse"     # an import path, never code
    model = "flights.models:Row"
    to = "parsed"                        # a queue for a link, a list for a choice, none for a sink

    [[stages]]
    queue = "parsed"
    spark = "flights.frames:clean"       # a transform of DataFrames, as in ``Pipeline.spark``
    to = "clean"                         # in a list, the column "queue" chooses; none for a sink

    [[cron]]
    name = "nightly"                     # a schedule: pushes a message to a queue
    queue = "raw"
    cron = "0 3 * * *"

Durations are seconds, or texts such as "1m" and "2h30m".
A stage also takes the options of ``Pipeline.link``, or of ``Pipeline.spark``. A schedule also takes
the options of ``Client.schedule``. Reading a recipe imports the modules that it names.
"""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Final, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
)

from pyqueue.durations import seconds_of
from pyqueue.errors import ConfigurationError
from pyqueue.limits import Limit
from pyqueue.messages import Backoff, ScheduleOptions

ImportPath = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")]


def _seconds(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return seconds_of(value)
    except ValueError:
        # Errors of recipes name no values, which may be secrets.
        raise ValueError("expected a duration; use seconds, or units as in 1m or 500ms") from None


#: A duration: seconds, or a text such as "1m" or "2h30m".
Seconds = Annotated[float, BeforeValidator(_seconds)]


class Part(BaseModel):
    """A part of a recipe. Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


class BackoffPart(Part):
    """The fields of a Backoff."""

    base: Seconds = 1
    factor: float = 2
    maximum: Seconds = 3600
    jitter: float = 0.1


class LimitPart(Part):
    """The fields of a Limit."""

    concurrency: int | None = None
    rate: float | None = None
    period: Seconds | None = None
    burst: int | None = None
    per: str | None = None


#: The fields of a stage that are not options, or whose options have another form.
_NOT_OPTIONS: Final = frozenset({"queue", "model", "backoff", "limit", "handler", "spark", "to"})


class QueuePart(Part):
    """The fields of every stage."""

    queue: str
    model: ImportPath | None = None
    lease: Seconds | None = None
    max_tries: int | None = None
    dead_letter: str | None = None
    history: Seconds | None = None
    poll: Seconds | None = None
    kind: str | None = None
    strict: bool | None = None
    pack: int | None = None
    auto_delete: Seconds | None = None
    limit: LimitPart | None = None
    backoff: BackoffPart | None = None

    def options(self) -> dict[str, Any]:
        """Return the options of the stage and its queue, as ``Pipeline.link`` takes them."""
        options = self.model_dump(exclude_none=True, exclude=set(_NOT_OPTIONS))
        if self.backoff is not None:
            options["backoff"] = Backoff(**self.backoff.model_dump())
        if self.limit is not None:
            options["limit"] = Limit(**self.limit.model_dump(exclude_none=True))
        if self.model is not None:
            options["model"] = imported(self.model, f"model of queue {self.queue!r}")
        return options


class SparkPart(QueuePart):
    """A stage in which Spark transforms batches."""

    spark: ImportPath
    to: str | list[str] | None = None
    group: str | None = None
    output: str | None = None
    max_messages: int | None = None
    members: int | None = None


class StagePart(QueuePart):
    """A stage with a Python handler."""

    handler: ImportPath
    to: str | list[str] = []
    concurrency: int | None = None
    time_limit: Seconds | None = None
    on_invalid: str | None = None
    batch: int | None = None
    window: Seconds | None = None


class CronPart(Part):
    """A schedule."""

    name: str
    queue: str
    cron: str | None = None
    every: Seconds | None = None
    timezone: str | None = None
    payload: Any = None
    headers: dict[str, Any] | None = None
    key: str | None = None
    priority: int | None = None
    group: str | None = None
    missed: str | None = None
    overlap: bool | None = None
    grace: Seconds | None = None

    def options(self) -> ScheduleOptions:
        """Return the options of the schedule, as ``Client.schedule`` takes them."""
        given = self.model_dump(exclude_unset=True, exclude={"name", "queue", "cron"})
        return cast("ScheduleOptions", given)


def _kind(stage: object) -> str:
    return "spark" if isinstance(stage, dict) and "spark" in stage else "handler"


AnyStage = Annotated[
    Annotated[StagePart, Tag("handler")] | Annotated[SparkPart, Tag("spark")], Discriminator(_kind)
]


class Recipe(Part):
    """A pipeline, as a file describes it."""

    name: str = ""
    concurrency: Annotated[int, Field(ge=1)] = 16
    stages: Annotated[list[AnyStage], Field(min_length=1)]
    cron: list[CronPart] = []


def imported(path: str, user: str) -> Any:
    """Import and return the object that an import path names.

    Args:
        path: The import path, MODULE:OBJECT.
        user: What the object is for, such as "handler of queue 'raw'".

    Raises:
        ConfigurationError: There is no such module or object, or an import in the module failed.
    """
    module, _, name = path.partition(":")
    try:
        value: Any = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"{user}: {path!r} cannot be imported: {_import_mistake(module, error)}"
        ) from error
    return value


def _import_mistake(module: str, error: Exception) -> str:
    """Return why an import failed, and the remedy."""
    if (missing := missing_module(module, error)) is not None:
        return missing
    if isinstance(error, ImportError):
        return f"an import in its module failed ({error}); install what is missing"
    return f"{error}; correct the name"


def missing_module(module: str, error: Exception) -> str | None:
    """Return what to do if a module, or its package, does not exist.

    Return None if the import failed for another reason, such as an import in the module.
    """
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    if name is None or not (name == module or module.startswith(f"{name}.")):
        return None
    return (
        f"no module {name!r} in the current directory or installed; run it from its directory, or "
        "set PYTHONPATH"
    )


def read(path: Path) -> Recipe:
    """Read the recipe in a file.

    Raises:
        ConfigurationError: The file cannot be read, or is not a valid recipe.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path with a NUL
        raise ConfigurationError(f"recipe {path}: cannot be read ({error})") from error
    mistakes = ""
    try:
        recipe = Recipe.model_validate(_parsed(path, text))
    except ValidationError as error:
        mistakes = "; ".join(f"{_place(each['loc'])}: {_mistake(each)}" for each in error.errors())
    if mistakes:  # not in the handler above: the text of pydantic's error shows the values
        raise ConfigurationError(f"recipe {path}: {mistakes}")
    if not recipe.name:
        recipe.name = path.stem
    return recipe


def _mistake(error: Mapping[str, Any]) -> str:
    """Return a mistake in a recipe, and the remedy. Texts show no values, which may be secrets."""
    match error["type"]:
        case "extra_forbidden":
            near = get_close_matches(str(error["loc"][-1]), _known_keys(error["loc"]), 1)
            return f"unknown key; did you mean `{near[0]}`?" if near else "unknown key; remove it"
        case "string_pattern_mismatch":
            module, _, name = str(error["input"]).rpartition(".")
            dotted = all(map(str.isidentifier, (*module.split("."), name)))
            example = f"{module}:{name}" if dotted else "etl.stages:parse"
            return f"use MODULE:OBJECT, for example {example}"
    text: str = error["msg"]
    return text.removeprefix("Value error, ")


def _known_keys(location: tuple[str | int, ...]) -> list[str]:
    """Return the keys that are allowed at the place of an unknown key."""
    parts: dict[str, type[Part]] = {"spark": SparkPart, "handler": StagePart, "cron": CronPart}
    parts |= {"backoff": BackoffPart, "limit": LimitPart}
    found: type[Part] = Recipe
    for name in location[:-1]:
        found = parts.get(str(name), found)
    return list(found.model_fields)


def _place(location: tuple[str | int, ...]) -> str:
    """Return the place of a mistake in a recipe, such as ``stages[0].lease``."""
    if location[0:1] == ("stages",):
        location = location[:2] + location[3:]  # pydantic adds the tag of the stage here
    names = (f"[{each}]" if isinstance(each, int) else each for each in location)
    return ".".join(names).replace(".[", "[") or "the file"


def _parsed(path: Path, text: str) -> object:
    if path.suffix == ".toml":
        try:
            return tomllib.loads(text)
        except (ValueError, RecursionError) as error:  # RecursionError: deep nesting
            raise ConfigurationError(f"recipe {path}: invalid TOML ({error})") from error
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigurationError(
            f"recipe {path}: unknown format; use a file name that ends in .toml, .yaml or .yml"
        )
    try:
        yaml: Any = importlib.import_module("yaml")
    except ImportError as error:
        raise ConfigurationError(
            f"recipe {path}: reading YAML needs PyYAML; pip install PyYAML, or use TOML"
        ) from error
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"recipe {path}: invalid YAML ({error})") from error
