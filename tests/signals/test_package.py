"""The package as a whole: opening by URL, twins, processes, and the code of the documentation."""

import ast
import asyncio
import inspect
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import signals
from signals.hub import Subscription
from signals.runner import AsyncFacade, BlockingFacade
from tests.signals.portal import NOW, python
from tests.support.servers import RedisServer

ROOT = Path(signals.__file__).parent.parent
TWINS = [
    ("MemoryBus", "AsyncMemoryBus"),
    ("NullBus", "AsyncNullBus"),
    ("RedisBus", "AsyncRedisBus"),
]
TWINS += [("CappedBus", "AsyncCappedBus"), ("open", "open_async")]


def test_open_finds_the_bus_by_url() -> None:
    for url, one, other in [
        ("memory:", signals.MemoryBus, signals.AsyncMemoryBus),
        ("none:", signals.NullBus, signals.AsyncNullBus),
        ("redis://h", signals.RedisBus, signals.AsyncRedisBus),
        ("rediss://h:1/0", signals.RedisBus, signals.AsyncRedisBus),
        ("unix:///tmp/s", signals.RedisBus, signals.AsyncRedisBus),
    ]:
        assert type(signals.open(url)) is one
        assert type(signals.open_async(url)) is other


@pytest.mark.parametrize("url", ["", "kafka://secret@h", "x", None])
def test_open_refuses_unknown_urls(url: str) -> None:
    with pytest.raises(signals.BusError, match="use one of") as caught:
        signals.open(url)
    assert "secret" not in str(caught.value)


def test_open_capped_needs_a_database() -> None:
    with pytest.raises(signals.BusError, match="database"):
        signals.open("capped:")
    with pytest.raises(signals.BusError, match="AsyncIOMotorDatabase"):
        signals.open_async("capped:")


@pytest.mark.parametrize(("one", "other"), TWINS)
def test_twins_have_the_same_signatures(one: str, other: str) -> None:
    parameters = [inspect.signature(getattr(signals, name)).parameters for name in (one, other)]
    assert parameters[0] == parameters[1]


def test_facades_have_the_same_members() -> None:
    def members(cls: type) -> set[str]:
        return {name for name in dir(cls) if not name.startswith("_")}

    assert members(BlockingFacade) == members(AsyncFacade)
    for name in ("emit", "listen", "check", "close"):
        assert inspect.signature(getattr(BlockingFacade, name)).parameters.keys() == (
            inspect.signature(getattr(AsyncFacade, name)).parameters.keys()
        )


def test_buses_fulfil_the_protocols() -> None:
    bus: signals.Bus = signals.RedisBus("redis://h")
    async_bus: signals.AsyncBus = signals.AsyncRedisBus("redis://h")
    assert bus
    assert async_bus


def test_package_imports_nothing_from_pyqueue() -> None:
    for path in (ROOT / "signals").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[0] == "pyqueue"], path


def test_all_exported_names_exist() -> None:
    assert sorted(signals.__all__) == sorted(set(signals.__all__))
    assert all(hasattr(signals, name) for name in signals.__all__)


def test_missing_redis_package_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(signals.BusError, match=r'pip install "pyqueue-mongo\[redis\]"'):
        signals.open("redis://h")


def test_bus_refuses_to_pickle() -> None:
    with pytest.raises(signals.BusError, match="pickle"):
        pickle.dumps(signals.MemoryBus())


def test_asyncio_bus_belongs_to_one_loop() -> None:
    bus = signals.AsyncRedisBus("redis://127.0.0.1:1")
    with pytest.raises(signals.BusError, match="event loop runs"):
        bus.emit("a", NOW)

    async def use() -> None:
        async with bus.listen("a"):
            pass

    asyncio.run(use())
    with pytest.raises(signals.BusError, match="first used"):
        asyncio.run(use())
    bus.emit("a", NOW)  # the loop is gone, but emitting raises nothing
    assert bus.stats["failed"] == 1


def test_listener_is_entered_once_and_before_waiting() -> None:
    with signals.MemoryBus("once") as bus:
        listener = bus.listen("a")
        with pytest.raises(signals.BusError, match="enter"):
            listener.wait(0)
        with listener:
            pass
        with pytest.raises(signals.BusError, match="once"):
            listener.__enter__()

    async def use() -> None:
        async with signals.AsyncMemoryBus("once") as bus:
            with pytest.raises(signals.BusError, match="enter"):
                await bus.listen("a").wait(0)

    asyncio.run(use())


def test_listener_closed_before_entering_stays_closed() -> None:
    with signals.MemoryBus("early") as bus:
        listener = bus.listen("a")
        listener.close()
        assert listener.closed
        with pytest.raises(signals.BusError, match="open bus"):
            listener.__enter__()
        bus.emit("a", NOW)
        assert bus.stats["heard"] == 0


def test_interrupted_entering_leaves_no_listener_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C interrupts like this."""

    def interrupt(self: Subscription) -> None:
        raise KeyboardInterrupt

    with signals.MemoryBus("interrupted") as bus:
        listener = bus.listen("a")
        monkeypatch.setattr(Subscription, "confirm", interrupt)
        with pytest.raises(KeyboardInterrupt):
            listener.__enter__()
        assert listener.closed
        bus.emit("a", NOW)
        assert bus.stats["heard"] == 0

    async def use() -> None:
        async with signals.AsyncMemoryBus("interrupted") as bus:
            listener = bus.listen("a")
            with pytest.raises(KeyboardInterrupt):
                await listener.__aenter__()
            assert listener.closed
            bus.emit("a", NOW)
            assert bus.stats["heard"] == 0

    asyncio.run(use())


FORK = """
import datetime, os, sys, signals
now = datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC)
for url in ("memory:", sys.argv[1]):
    bus = signals.open(url, prefix="fork")
    with bus.listen("a") as listener:
        bus.emit("a", now)
        assert listener.wait(20)
        child = os.fork()
        if not child:
            assert listener.closed and not listener.wait(None)
            with bus.listen("a") as own:
                bus.emit("a", now)
                assert own.wait(20)
            bus.close()
            sys.exit()
        assert os.waitpid(child, 0)[1] == 0
        while listener.wait(0.2):
            pass
        bus.emit("a", now)
        assert listener.wait(20)
        assert bus.stats["restarts"] == 0
    bus.close()
print("fine")
"""


def test_bus_starts_again_in_a_child_of_fork(redis_server: RedisServer) -> None:
    assert python(FORK, redis_server.url) == "fine\n"


EXIT = """
import datetime, sys, signals
bus = signals.open(sys.argv[1], prefix="exit")
for _ in range(2):
    bus.emit("a", datetime.datetime.now(datetime.UTC))
"""


def test_script_that_exits_without_closing_is_heard(redis_server: RedisServer) -> None:
    with signals.RedisBus(redis_server.url, prefix="exit") as bus, bus.listen("a") as listener:
        python(EXIT, redis_server.url)
        assert listener.wait(20)


PAGES = ["docs/topics/signals.md", "docs/how-to/choose-a-bus.md", "docs/how-to/write-a-bus.md"]


@pytest.mark.parametrize("page", PAGES)
def test_code_of_the_documentation_runs(page: str) -> None:
    space: dict[str, Any] = {"__name__": "page"}
    blocks = re.findall(
        r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL
    )
    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), space)
