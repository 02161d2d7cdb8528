"""A line of the file, and the flight that it tells of."""

from __future__ import annotations

from pyqueue.demo import flights

LINE = {
    "id": "1",
    "year": "2013",
    "month": "1",
    "day": "1",
    "dep_time": "517",
    "arr_delay": "11",
    "carrier": "UA",
    "flight": "1545",
    "origin": "EWR",
    "dest": "IAH",
}


def flight(**columns: str) -> flights.Flight:
    """Return the flight of the line, with other values in some columns."""
    [parsed] = flights.parse([flights.Row.model_validate(LINE | columns)])
    return parsed
