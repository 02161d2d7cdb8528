"""Recipes: a pipeline as a TOML or YAML file.

::

    name = "flights"

    [[stages]]
    queue = "raw"
    handler = "flights.stages:parse"     # an import path, never code
    model = "flights.models:Row"
    to = "parsed"                        # one queue: a link; a list of queues: a choice; nothing: a sink

    [[stages]]
    queue = "parsed"
    spark = "flights.frames:clean"       # a transform of DataFrames: see ``Pipeline.spark``
    to = "clean"

Beside these a stage takes the options of ``Pipeline.link``, or of ``Pipeline.spark``.
Reading a recipe imports the modules it names, as ``import`` would.
"""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError

from pyqueue.errors import ConfigurationError
from pyqueue.messages import Backoff

__all__ = ["Recipe", "read"]

ImportPath = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")]


class Part(BaseModel):
    """A part of a recipe; what it does not know it refuses."""

    model_config = ConfigDict(extra="forbid", strict=True)


class BackoffPart(Part):
    """A Backoff."""

    base: float = 1
    factor: float = 2
    maximum: float = 3600
    jitter: float = 0.1


class QueuePart(Part):
    """What all stages have."""

    queue: str
    model: ImportPath | None = None
    lease: float | None = None
    max_tries: int | None = None
    dead_letter: str | None = None
    history: float | None = None
    poll: float | None = None
    backoff: BackoffPart | None = None

    def options(self, *own: str) -> dict[str, Any]:
        """The options of the queue and of the stage, without those fields that are its own."""
        options = self.model_dump(exclude_none=True, exclude={"queue", "model", "backoff", *own})
        if self.backoff is not None:
            options["backoff"] = Backoff(**self.backoff.model_dump())
        if self.model is not None:
            options["model"] = found(self.model)
        return options


class SparkPart(QueuePart):
    """A stage whose batches Spark transforms."""

    spark: ImportPath
    to: str
    group: str | None = None
    output: str | None = None
    max_messages: int | None = None

    def add_to(self, pipeline: Any) -> None:
        """Add the stage to a pipeline."""
        pipeline.spark(self.queue, found(self.spark), to=self.to, **self.options("spark", "to"))


class StagePart(QueuePart):
    """A stage whose messages Python handles."""

    handler: ImportPath
    to: str | list[str] = []
    concurrency: int | None = None
    time_limit: float | None = None

    def add_to(self, pipeline: Any) -> None:
        """Add the stage to a pipeline."""
        options = self.options("handler", "to")
        add = pipeline.choice if isinstance(self.to, list) else pipeline.link
        if self.to:
            options["to"] = self.to
        else:
            add = pipeline.sink
        add(self.queue, found(self.handler), **options)


def _kind(stage: Any) -> str:
    return "spark" if isinstance(stage, dict) and "spark" in stage else "handler"


AnyStage = Annotated[
    Annotated[StagePart, Tag("handler")] | Annotated[SparkPart, Tag("spark")], Discriminator(_kind)
]


class Recipe(Part):
    """A pipeline."""

    name: str = ""
    concurrency: Annotated[int, Field(ge=1)] = 16
    stages: Annotated[list[AnyStage], Field(min_length=1)]


def found(path: str) -> Any:
    """What an import path names."""
    module, _, name = path.partition(":")
    try:
        value: Any = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"{path!r} cannot be imported: {error}") from error
    return value


def read(path: Path) -> Recipe:
    """The recipe in a file.

    Raises:
        ConfigurationError: it cannot be read, or is no recipe.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not in UTF-8, or a path with NUL
        raise ConfigurationError(f"recipe {path}: cannot be read: {error}") from error
    try:
        recipe = Recipe.model_validate(_parsed(path, text))
    except ValidationError as error:
        faults = "; ".join(f"{_place(each['loc'])}: {each['msg']}" for each in error.errors())
        raise ConfigurationError(f"recipe {path}: {faults}") from error
    if not recipe.name:
        recipe.name = path.stem
    return recipe


def _place(location: tuple[str | int, ...]) -> str:
    """Where in a recipe."""
    if location[0:1] == ("stages",):
        location = location[:2] + location[3:]  # without the name of the kind of stage
    return (
        ".".join(f"[{each}]" if isinstance(each, int) else each for each in location).replace(
            ".[", "["
        )
        or "the file"
    )


def _parsed(path: Path, text: str) -> Any:
    if path.suffix == ".toml":
        try:
            return tomllib.loads(text)
        except (
            ValueError,
            RecursionError,
        ) as error:  # beside what tomllib raises: huge ints, deep nesting
            raise ConfigurationError(f"recipe {path}: no valid TOML: {error}") from error
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigurationError(f"recipe {path}: the name ends in .toml, .yaml or .yml")
    try:
        yaml: Any = importlib.import_module("yaml")
    except ImportError as error:
        raise ConfigurationError(
            f"recipe {path}: reading YAML needs PyYAML: pip install PyYAML (or write it as TOML)"
        ) from error
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"recipe {path}: no valid YAML: {error}") from error
