"""The dashboard, the alert rules and the triggers name metrics that exist, and count correctly."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any

import pytest
from bson import json_util

from pyqueue import Client, LeaseLost
from pyqueue.telemetry import metrics_text
from pyqueue.telemetry.figures import COUNTS
from tests.docs.pages import ROOT, blocks, prose

PAGE = "docs/how-to/monitoring.md"
METRICS = "docs/how-to/metrics.md"
DASHBOARD = ROOT / "docs/examples/grafana.json"
#: A metric in an expression, and its labels.
NAMED = re.compile(r"(pyqueue_\w+)(?:\{([^}]*)\})?")
#: A line of the exporter.
LINE = re.compile(r"(pyqueue_\w+)\{(.*)\} \S+")

# ---- metrics


def labels_of(written: str) -> dict[str, str]:
    return dict(re.findall(r'(\w+)(?:=|=~|!=)"([^"]*)"', written))


@cache
def exported() -> str:
    """Return the text of a namespace in which everything has happened."""
    with Client("memory:", telemetry=True) as client:
        queue = client.queue("orders")
        queue.push_many(range(9))
        held = queue.reserve_many(6, timeout=0)
        queue.commit(held[0])
        with pytest.raises(LeaseLost):
            queue.commit(held[0])
        queue.move(held[1], to="sent")
        queue.rollback(held[2], error="no")
        queue.release(held[3])
        queue.bury(held[4])
        client.stream("clicks").append_many(range(3))
        consumer = client.stream("clicks").consumer("audit", dead_letter="clicks.dead")
        consumer.commit(*consumer.reserve_many(1, timeout=0))
        consumer.bury(*consumer.reserve_many(1, timeout=0))
        then = datetime.now(UTC) - timedelta(days=1)
        for number, beat in enumerate((datetime.now(UTC), then)):
            worker = {"_id": number, "kind": "worker", "beat": beat, "every": 5.0}
            worker |= {"messages": 1, "lag": 0.1}
            client.collection("workers").insert_one(worker)
        telemetry: Any = client._telemetry
        telemetry.flush()
        return metrics_text(client)


@cache
def values() -> Mapping[str, Mapping[str, set[str]]]:
    """Return the metrics that the exporter writes: the values of each label."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name, written in LINE.findall(exported()):
        for label, value in labels_of(written).items():
            found[name][label].add(value)
    return found


def panels() -> list[Any]:
    return list(json.loads(DASHBOARD.read_text())["panels"])


def targets() -> Iterator[tuple[str, str]]:
    """Yield the expressions of the dashboard, with their legends."""
    for panel in panels():
        for target in panel["targets"]:
            yield target["expr"], target.get("legendFormat", "")


def rules() -> list[str]:
    (text,) = (each.text for each in blocks(PAGE) if "alert:" in each.text)
    return re.findall(r"expr: (.*)", text)


def locations() -> list[str]:
    found = re.findall(r"valueLocation: (.*)", "".join(each.text for each in blocks(PAGE)))
    assert len(found) == 2
    return found


def expressions() -> list[str]:
    """Return all expressions of the dashboard and of the page."""
    (variable,) = json.loads(DASHBOARD.read_text())["templating"]["list"][1:]
    return [*(each for each, _ in targets()), *rules(), *locations(), variable["query"]["query"]]


def test_metrics_of_expressions_are_exported() -> None:
    assert len(expressions()) >= 25
    for expression in expressions():
        named = NAMED.findall(expression)
        assert named, expression
        for name, written in named:
            assert name in values(), expression
            for label, value in labels_of(written).items():
                assert label in values()[name], expression
                if label in ("state", "counted"):
                    assert value in values()[name][label], expression
        for inside in re.findall(r"by \(([^)]*)\)", expression):
            known = {label for name, _ in named for label in values()[name]}
            assert set(re.split(r",\s*", inside)) <= known, expression


def test_legends_name_labels_of_their_metrics() -> None:
    for expression, legend in targets():
        known = {label for name, _ in NAMED.findall(expression) for label in values()[name]}
        assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= known, expression


def test_panels_have_places_of_their_own() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        own = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not own & cells, panel["title"]
        assert max(x for x, _ in own) < 24
        cells |= own
    assert len({each["id"] for each in panels()}) == len(panels()) >= 12


def test_page_of_metrics_names_what_is_exported() -> None:
    text = prose(METRICS)
    named = set(re.findall(r"`(pyqueue_\w+)", text))
    counters = {f"pyqueue_{name}_total" for name in COUNTS}
    families = {re.sub("_(bucket|sum|count)$", "", name) for name in values()}
    assert named <= families | counters
    assert families - counters <= named


def test_location_of_a_trigger_selects_one_line() -> None:
    for location in locations():
        ((name, written),) = NAMED.findall(location)
        wanted = labels_of(written).items()
        lines = [
            found
            for found in LINE.findall(exported())
            if found[0] == name and wanted <= labels_of(found[1]).items()
        ]
        assert len(lines) == 1, location


# ---- the query of KEDA


def query() -> dict[str, Any]:
    (text,) = (each.text for each in blocks(PAGE) if "type: mongodb" in each.text)
    found: dict[str, Any] = json_util.loads(text.partition("query: >-\n")[2])
    return found


@pytest.fixture
def counted(client: Client) -> Any:
    """Return a function that counts as KEDA does; ``without``: the parts to leave out."""

    def count(queue: str, *without: str, **more: Any) -> int:
        match = {**query(), "q": queue, **more}
        for name in without:
            del match[name]
        number: int = client.database[client.namespace].count_documents(match)
        return number

    return count


def test_query_counts_work_of_a_standard_queue(client: Client, counted: Any) -> None:
    orders = client.queue("orders", history=3600)
    assert query()["q"] == "orders"
    orders.push("gone")
    assert orders.pop(5) is not None
    assert counted("orders") == 0
    orders.push_many(range(5))
    orders.push("soon", delay=30)
    orders.push("later", delay=120)
    assert counted("orders") == 6
    held = orders.reserve_many(5, timeout=5, lease=600)
    assert counted("orders") == 6
    orders.commit(*held)
    assert counted("orders") == 1


def test_each_part_of_the_query_is_needed(client: Client, counted: Any) -> None:
    orders = client.queue("orders", history=3600)
    orders.push("gone")
    orders.commit(*orders.reserve_many(1, timeout=5))
    assert counted("orders") == 0
    assert counted("orders", "record") == 1
    assert counted("orders", "when") == 1
    orders.push("held")
    orders.push("later", delay=7 * 86_400)
    assert orders.reserve(5, lease=600) is not None
    assert counted("orders") == 1
    assert counted("orders", "$or", **query()["$or"][1]) == 0
    assert counted("orders", "$or") == 2


def test_query_is_wrong_for_other_kinds(client: Client, counted: Any) -> None:
    tasks = client.queue("tasks", kind="priority")
    tasks.push_many([1, 2, 3], priorities=[1, 5, 9])
    tasks.commit(*tasks.reserve_many(3, timeout=5))
    only_the_record = {"_id": {"$ne": "~queue:tasks"}}
    assert (counted("tasks"), counted("tasks", "record", **only_the_record)) == (0, 3)
    packed = client.queue("packed", kind="bucket")
    packed.push_many(range(1000))
    assert counted("packed") in (1, 2)
    turns = client.queue("turns", kind="ordered")
    turns.push_many(range(50), groups=["one"] * 50)
    assert turns.reserve(5, lease=600) is not None
    assert turns.reserve(0) is None
    assert counted("turns") <= 2
