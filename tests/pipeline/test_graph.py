"""The mistakes that are refused before a run, and drawings of a graph."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from typing import Any, Literal

import pytest

from pyqueue import (
    Client,
    ConfigurationError,
    Counts,
    Drop,
    InvalidName,
    Many,
    Pipeline,
    RetryLater,
    To,
    Worker,
)


def same(payload: Any) -> Any:
    return payload


WRONG: dict[str, tuple[Callable[[Pipeline], Any], str]] = {
    "two stages": (
        lambda p: p.link("a", same, to="b").sink("a", print),
        "'a' has two stages, 'same' and 'print'",
    ),
    "twice": (
        lambda p: p.choice("a", same, to=["b", "c", "b"]),
        "to: the stage of queue 'a' lists 'b' twice",
    ),
    "nowhere": (lambda p: p.choice("a", same, to=[]), "the stage of queue 'a' leads nowhere"),
    "a link to two": (
        lambda p: p.link("a", same, to=["b", "c"]),  # type: ignore[call-overload]
        "leads to one queue; for several, use choice",
    ),
    "a choice of a str": (
        lambda p: p.choice("a", same, to="bc"),
        "to: the stage of queue 'a' needs a list of queue names",
    ),
    "name": (lambda p: p.link("a b", same, to="b"), "invalid queue name 'a b'"),
    "name of a target": (lambda p: p.link("a", same, to="b~"), "invalid queue name 'b~'"),
    "no function": (
        lambda p: p.link("a", "same", to="b"),  # type: ignore[call-overload]
        "handler of queue 'a': expected a function, found str",
    ),
    "three arguments": (
        lambda p: p.sink("a", lambda x, y, z: x),  # type: ignore[arg-type]
        "expected a function that takes .payload. or .payload, delivery.",
    ),
    "no argument": (
        lambda p: p.sink("a", lambda: 1),  # type: ignore[arg-type]
        "expected a function that takes .payload. or .payload, delivery.",
    ),
    "concurrency": (lambda p: p.sink("a", same, concurrency=0), "concurrency: 0 is not allowed"),
    "time limit": (lambda p: p.sink("a", same, time_limit=0), "time_limit: 0 is not allowed"),
    "lease": (lambda p: p.sink("a", same, lease=-1), "lease: -1 is not allowed"),
    "model": (
        lambda p: p.sink("a", same, model=object()),  # type: ignore[call-overload]
        "pydantic cannot validate",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_stage_wrong_argument_is_refused_when_added(offline: Client, case: str) -> None:
    add, reason = WRONG[case]
    with pytest.raises((ConfigurationError, InvalidName), match=reason):
        add(offline.pipeline())
    assert offline.stats == {}  # no command was sent


def test_link_without_target_is_refused(offline: Client) -> None:
    with pytest.raises(TypeError, match="to"):
        offline.pipeline().link("a", same)  # type: ignore[call-overload]


def test_stage_misspelt_option_is_refused(offline: Client) -> None:
    """Type checkers refuse it too: mypy reports an unneeded "type: ignore"."""
    pipeline = offline.pipeline()
    with pytest.raises(TypeError, match=r"^link\(\) .*'max_trys'; did you mean 'max_tries'"):
        pipeline.link("a", same, to="b", max_trys=3)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"^sink\(\) .*mean 'time_limit'"):
        pipeline.sink("a", same, timelimit=3)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"^spark\(\) .*mean 'max_messages'"):
        pipeline.spark("a", same, to="b", max_mesages=3)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"^on\(\) .*mean 'lease'"):
        Worker(offline).on("a", same, leese=3)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"^sink\(\) .*mean 'batch'"):
        pipeline.sink("a", same, batchs=3)  # type: ignore[call-overload]


def test_run_without_stages_is_refused(offline: Client) -> None:
    with pytest.raises(ConfigurationError, match="pipeline: has no stages"):
        offline.pipeline().run(until_empty=True)


def test_pipeline_without_a_client_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="expected a Client or an AsyncClient, found str"):
        Pipeline("memory:")  # type: ignore[call-overload]


def test_worker_takes_a_queue_with_its_options(offline: Client) -> None:
    queue, seen = offline.queue("a", max_tries=1), []

    def fail(payload: int) -> None:
        seen.append(payload)
        raise RetryLater(0)

    queue.push(1)
    worker = Worker(offline).on(queue, fail)
    worker.run(until_empty=True)
    assert (seen, offline.queue("a.dead").counts().total) == ([1], 1)
    with pytest.raises(ConfigurationError, match="pass model and options to"):
        worker.on(queue, fail, lease=3)
    with Client("memory:") as other, pytest.raises(ConfigurationError, match="another client"):
        worker.on(other.queue("a"), fail)


@pytest.mark.parametrize("queues", [["a"], ["a", "b"], ["a", "b", "c"]])
def test_cycle_is_named_and_nothing_runs(offline: Client, queues: list[str]) -> None:
    pipeline = offline.pipeline().link("start", same, to="a")
    for queue, target in zip(queues, [*queues[1:], queues[0]], strict=True):
        pipeline.choice(queue, same, to=[target, "end"])
    with pytest.raises(
        ConfigurationError, match=f"{' -> '.join([*queues, 'a'])} is a cycle; .* allow_cycles=True"
    ):
        pipeline.run(until_empty=True)
    assert offline.stats == {}


def test_paths_that_meet_again_are_not_a_cycle(offline: Client) -> None:
    pipeline = (
        offline.pipeline()
        .choice("a", same, to=["b", "c"])
        .link("b", same, to="d")
        .link("c", same, to="d")
        .sink("d", same)
    )
    assert pipeline.graph.cycle() is None
    assert list(pipeline.graph.depths().items()) == [("a", 0), ("b", 1), ("c", 1), ("d", 2)]
    pipeline.run(until_empty=True)


def test_return_annotation_is_checked_against_to(offline: Client) -> None:
    def good(flight: int) -> To[Literal["late", "on-time"]] | Drop:
        return Drop()

    def bad(flight: int) -> To[Literal["late", "cancelled"]]:
        return To("late")

    def unknown(flight: int) -> To[Any] | Many:
        return Many([])

    offline.pipeline().choice("a", good, to=["late", "on-time", "other"]).choice(
        "b", unknown, to=["late"]
    )
    with pytest.raises(
        ConfigurationError,
        match=r"annotated to return To\('cancelled'\), which is not in to=\['late'\]",
    ):
        offline.pipeline().choice("a", bad, to=["late"])


def test_answers_check_their_values() -> None:
    with pytest.raises(ConfigurationError, match="expected only To"):
        Many(["late"])  # type: ignore[list-item]
    with pytest.raises(ConfigurationError, match="delay: -1 is not allowed"):
        RetryLater(-1)
    assert (
        repr([To("a"), To("a", 1), Drop(), Many([To("a")])])
        == "[To('a'), To('a', 1), Drop(), Many([To('a')])]"
    )


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"concurrency": 0}, "concurrency"),
        ({"grace": -1}, "grace"),
        ({"concurrency": True}, "concurrency"),
    ],
)
def test_run_wrong_option_is_refused(offline: Client, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        Worker(offline).on("a", same).run(**options)
    with pytest.raises(ConfigurationError, match="concurrency"):
        Worker(offline, concurrency=0)


# ---- drawings


def drawn(offline: Client) -> Pipeline:
    def route(flight: Any) -> Any: ...

    pipeline = (
        offline.pipeline("flights")
        .link("raw", same, to="parsed")
        .choice("parsed", route, to=["late", "on-time"])
    )
    return pipeline.sink("late", print)


COUNTS = {
    "raw": Counts(ready=12, scheduled=1, reserved=3),
    "late": Counts(),
    "on-time": Counts(ready=5),
}


def test_show_text(offline: Client) -> None:
    assert drawn(offline).show(counts=COUNTS) == (
        "flights\n"
        "  raw [12 ready, 3 reserved, 1 scheduled] ── same ──> parsed\n"
        "  parsed ── route ┬─> late\n"
        "                  └─> on-time\n"
        "  late [empty] ── print ──■\n"
        "  on-time [5 ready] (output)\n"
    )


def test_show_mermaid(offline: Client) -> None:
    text = drawn(offline).show("mermaid", COUNTS)
    assert text.startswith("---\ntitle: flights\n---\nflowchart LR\n")
    for line in (
        'q0["raw<br/>12 ready, 3 reserved, 1 scheduled"]',
        'q1["parsed"]',
        'q0 -->|"same"| q1',
        'q1 -->|"route"| q2',
        'q1 -->|"route"| q3',
        'q2 -->|"print"| q2end(( ))',
    ):
        assert f"  {line}\n" in text
    assert "-->" in Worker(offline).on("a:b>c", print).show("mermaid")
    assert 'q0["a:b#gt;c"]' in Worker(offline).on("a:b>c", print).show("mermaid")


def test_show_svg(offline: Client) -> None:
    tree = ElementTree.fromstring(drawn(offline).show("svg", COUNTS))
    space = "{http://www.w3.org/2000/svg}"
    texts = [each.text for each in tree.iter(f"{space}text")]
    for text in (
        "flights",
        "raw",
        "parsed",
        "late",
        "on-time",
        "same",
        "route",
        "print",
        "12 ready, 3 reserved, 1 scheduled",
        "empty",
    ):
        assert text in texts
    boxes = [each for each in tree.iter(f"{space}rect") if each.get("rx")]
    assert len({(box.get("x"), box.get("y")) for box in boxes}) == len(boxes) == 4
    width, height = (float(tree.get(name) or 0) for name in ("width", "height"))
    assert all(
        float(box.get("x") or 0) + 150 <= width and float(box.get("y") or 0) + 44 <= height
        for box in boxes
    )
    assert len([path for path in tree.iter(f"{space}path") if path.get("marker-end")]) == 3


def test_show_draws_a_cycle(offline: Client) -> None:
    pipeline = offline.pipeline().link("a", same, to="b").link("b", same, to="a")
    forms: tuple[Literal["text", "mermaid", "svg"], ...] = ("text", "mermaid", "svg")
    for form in forms:
        assert "a" in pipeline.show(form)
    with pytest.raises(ConfigurationError, match="format"):
        pipeline.show("png")  # type: ignore[arg-type]
