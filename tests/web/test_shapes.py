"""Values as people read them, charts, and the filter's language."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from bson import ObjectId

from pyqueue import ConfigurationError, Latency, QueueStats
from pyqueue.telemetry.figures import COUNTS
from pyqueue.web import charts, shapes
from pyqueue.web.charts import Lane
from pyqueue.web.filters import conditions
from pyqueue.web.redacting import SECRETS, Redactor
from pyqueue.where import contains, exists, ge, gt, le, lt

NOW = datetime(2030, 1, 31, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *[(0.0241, "24 ms"), (3.21, "3.2 s"), (61, "61 s"), (960, "16 min"), (7300, "2 h")],
        *[(200_000, "2 d"), (None, "–")],
    ],
)
def test_lengths_are_short(seconds: float | None, text: str) -> None:
    assert shapes.length(seconds) == text


def test_numbers_are_grouped_and_marked_at_the_cap() -> None:
    assert shapes.number(12_345) == "12\u202f345"
    assert [shapes.number(each, 1001) for each in (1000, 1001)] == ["1\u202f000", "1\u202f000+"]
    rates = {None: "–", 0.0: "0", 1234.4: "1\u202f234/s", 99.96: "100/s", 0.1: "0.1/s"}
    rates |= {0.09: "5.4/min", 0.001: "3.6/h", 0.00001: "0.9/d"}
    assert {each: shapes.rate(each) for each in rates} == rates
    assert (shapes.number(None), shapes.size(None), shapes.size(2**21)) == ("–", "–", "2 MB")


def test_instants_are_ages() -> None:
    now = datetime.now(UTC)
    assert shapes.ago(now - timedelta(minutes=16)) == "16 min ago"
    assert shapes.ago(now + timedelta(hours=5, seconds=9)) == "in 5 h"
    assert (shapes.ago(None), shapes.since(None)) == ("–", "–")
    assert shapes.ago(now.replace(year=9000)) == "never"
    assert shapes.since(NOW, NOW + timedelta(seconds=70)) == "70 s"
    assert shapes.clock(NOW.replace(microsecond=7000)) == "2030-01-31 12:00:00.007Z"


def test_leaves_have_types() -> None:
    values: dict[str, Any] = {"a": None, "b": True, "c": 1.5, "d": NOW, "e": b"xyz", "f": "t"}
    values["g"] = ObjectId("6b00635bb4b31ce5bc7b3ac2")
    found = shapes.tree(Redactor(SECRETS), "payload", values)["items"]
    assert [(each["type"], each["text"]) for each in found] == [
        *[("null", "null"), ("bool", "true"), ("number", "1.5")],
        *[("time", "2030-01-31 12:00:00.000Z"), ("bytes", "3 bytes"), ("text", '"t"')],
        ("id", "6b00635bb4b31ce5bc7b3ac2"),
    ]
    assert shapes.tree(Redactor(SECRETS), "payload", values, ["x", "y"])["text"] == "null"


def test_sparkline_fits_into_its_box() -> None:
    points = [tuple(map(float, each.split(","))) for each in charts.line([0, 5, 10]).split()]
    assert points == [(0.0, 22.0), (60.0, 12.0), (120.0, 2.0)]
    assert charts.line([0]) == "0.0,22.0"


def figures(minutes: int) -> QueueStats:
    """Return the figures of a queue in some minutes, in which nothing happened."""
    nothing = Latency()
    return QueueStats(
        queue="a",
        since=NOW,
        until=NOW + timedelta(minutes=minutes),
        counts=dict.fromkeys(COUNTS, 0),
        moved={},
        waiting=nothing,
        working=nothing,
        end_to_end=nothing,
        points={},
    )


def test_chart_of_times_breaks_where_nothing_was_measured() -> None:
    took = {
        NOW + timedelta(minutes=minute): {
            "waiting": Latency(),
            "working": Latency(3, 0.1, p50=0.01, p95=seconds),
        }
        for minute, seconds in {0: 1.0, 1: 0.1, 3: 0.0001}.items()
    }
    text = str(charts.times(figures(4), took))
    # The scale ends at 1 s, at a height of 8, and begins at 1 ms, at 148; a minute is 147 wide.
    assert '<polyline class="line working p95" points="52.0,8.0 199.0,54.7"/>' in text
    assert '<circle class="dot working p95" cx="493.0" cy="148.0" r="2"/>' in text
    assert text.count("working p50") == 2
    assert "waiting" not in text.partition(">")[2]
    assert re.findall(r'text-anchor="end">([\d.]+ m?s)<', text) == [
        *["1 ms", "10 ms", "100 ms", "1.0 s"]
    ]
    assert charts.times(figures(4), {}) is None


def test_chart_of_times_grows_with_the_times() -> None:
    took = {NOW: {name: Latency(1, 90.0, 90.0, 90.0, 90.0) for name in ("waiting", "working")}}
    text = str(charts.times(figures(1), took))
    assert ">100 s<" in text
    heights = {float(each) for each in re.findall(r'cy="([\d.]+)"', text)}
    assert len(heights) == 1
    assert 8 < heights.pop() < 12


def test_lanes_keep_to_one_scale_and_escape_names() -> None:
    minute = timedelta(minutes=1)
    some = [
        Lane("<a>", NOW, NOW + minute, "past"),
        Lane("b" * 40, NOW + minute, NOW + 4 * minute, "now"),
    ]
    text = str(charts.lanes(some))
    assert "&lt;a&gt;" in text
    assert "<a>" not in text
    assert 'class="bar past" x="130.0" y="6" width="107.5"' in text
    assert 'class="bar now" x="237.5" y="32" width="322.5"' in text
    assert "…" in text


def test_filter_is_read_as_conditions() -> None:
    text = (
        'payload.n>3 payload.m>=4 headers.a<5 headers.b<="x y" key=k error.message~"no book" '
        "payload.vip? payload.t:true payload.z:null pushed>2030-01-31T12:00Z"
    )
    found = conditions(text, Redactor(SECRETS))
    assert found == {
        "payload.n": gt(3),
        "payload.m": ge(4),
        "headers.a": lt(5),
        "headers.b": le("x y"),
        "key": "k",
        "error.message": contains("no book"),
        "payload.vip": exists(),
        "payload.t": True,
        "payload.z": None,
        "pushed": gt(NOW),
    }
    assert conditions("payload.s:a:b", Redactor(SECRETS)) == {"payload.s": "a:b"}
    assert conditions("error.message~12", Redactor(SECRETS)) == {"error.message": contains("12")}
    assert conditions("", Redactor(SECRETS)) == {}


@pytest.mark.parametrize("value", ['{"$gt":1}', "[1]", "1e999", "9" * 30, "NaN", '{"$where":"1"}'])
def test_filter_values_are_never_operators(value: str) -> None:
    assert conditions(f"payload.n:{value}", Redactor(SECRETS)) == {"payload.n": value}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("payload", "filter: expected PATH:VALUE, found 'payload'"),
        ("$where:1", "filter: expected PATH:VALUE"),
        ("payload..n:1", "filter: expected PATH:VALUE"),
        ("payload.$n:1", "filter: expected PATH:VALUE"),
        ("a:1 a:2", "filter: a is set twice"),
        ("pushed>yesterday", "filter: expected a time for pushed, found 'yesterday'"),
        ("x" * 501, "filter: expected at most 500 characters, found 501"),
        (" ".join(f"a{n}:1" for n in range(11)), "filter: expected at most 10 conditions"),
    ],
)
def test_filter_that_cannot_be_read_is_refused(text: str, error: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        conditions(text, Redactor(SECRETS))
    assert str(refused.value).startswith(error)
