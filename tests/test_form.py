"""The limits of form: how long a module, a class, a function and a line may be.

The tables below name today's offenders. They may only shrink: a new offender fails, and so
does an entry that is no longer needed. `docs/contributing.md` gives the limits in words.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from radon.complexity import cc_visit
from radon.visitors import Class

#: One worker reads all files for the tests of this module.
pytestmark = pytest.mark.xdist_group("form")

ROOT = Path(__file__).parents[1]
MAX_MODULE = 500
#: These modules hold one public class each, which mirrors the promised API.
MAX_API_MODULE = 700
API_MODULES = {"queues", "async_queues", "client", "async_client"}
MAX_MEMBERS = 30
#: The clients of the testing kit are clients, too.
API_CLASSES = {
    *("Queue", "AsyncQueue", "Client", "AsyncClient", "TestClient", "AsyncTestClient"),
    *("Consumer", "AsyncConsumer", "Manageable", "AsyncManageable"),
}
#: The modules whose public functions may take any number of arguments.
WITH_API = {*API_MODULES, "manageable", "async_manageable", "scheduling", "async_scheduling"}
MAX_FUNCTION = 60
MAX_ARGUMENTS = 5
#: The most fields of a value, and the most values that a call gives by position.
MAX_FIELDS = 10
MAX_POSITIONAL = 5
#: The highest complexity of these grades.
GRADE_B, GRADE_C = 10, 20

#: Locks that a forked child may inherit held, by a thread that it does not have.
LOCKS = {"Lock", "RLock", "Condition", "Event", "Semaphore", "BoundedSemaphore", "Barrier"}

# ---- today's offenders: lower or remove an entry as soon as you can

LONG_MODULES: dict[str, int] = {}
LARGE_CLASSES: dict[str, int] = {
    "pyqueue/messages.py::PackedReservation": 31,  # it inherits the fields of two classes
}
LONG_FUNCTIONS: dict[str, int] = {
    "tests/model/explorer.py::_mark": 75,
}
#: Functions that take more than five arguments, apart from ``self``, those of the public API and
#: the command line, and constructors of values.
MANY_ARGUMENTS: dict[str, int] = {
    "pyqueue/async_streams.py::consumer": 7,
    "pyqueue/backends/bucket/leaving.py::leave_each": 7,
    "pyqueue/backends/invalid.py::add": 6,
    "pyqueue/backends/limits/slots.py::free_slots": 6,
    "pyqueue/backends/queue_plans.py::plans_of": 6,
    "pyqueue/backends/streams/appending.py::_document": 6,
    "pyqueue/backends/streams/appending.py::append": 7,
    "pyqueue/backends/streams/consumers.py::receive": 7,
    "pyqueue/backends/streams/ranges.py::claim_step": 6,
    "pyqueue/backends/streams/delivering.py::_burial": 6,
    "pyqueue/backends/streams/delivering.py::deliver": 6,
    "pyqueue/backends/streams/receiving.py::receive": 7,
    "pyqueue/backends/streams/settling.py::bury": 6,
    "pyqueue/backends/transitions.py::burying": 6,
    "pyqueue/backends/turns.py::place_firsts": 6,
    "pyqueue/backends/turns.py::write_when": 6,
    "pyqueue/pipeline/__init__.py::spark": 7,
    "pyqueue/stream_base.py::_group": 7,
    "pyqueue/streams.py::consumer": 7,
}
#: Named tuples and dataclasses.
LARGE_VALUES: dict[str, int] = {
    "pyqueue/backends/scan.py::ScanState": 18,
    "pyqueue/messages.py::Message": 19,
    "pyqueue/pipeline/graph.py::Stage": 12,
    "pyqueue/spark/option_table.py::ReadOptions": 16,
}
#: Functions of backends/ of grade D or worse; see https://radon.readthedocs.io/en/latest/intro.html.
COMPLEX_FUNCTIONS: dict[str, int] = {}
#: How many functions of backends/ have grade C.
MOST_OF_GRADE_C = 57
#: Modules that import each other, directly or through other modules.
IN_A_CIRCLE: dict[str, int] = {}
#: For each module of backends/ the number of private names that it takes from another object.
PRIVATE_ACCESS: dict[str, int] = {}

# ---- measurements


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def package_files() -> list[Path]:
    """The modules of the two packages."""
    return [path for each in ("pyqueue", "signals") for path in sorted((ROOT / each).rglob("*.py"))]


def all_files() -> list[Path]:
    return [*package_files(), *sorted((ROOT / "tests").rglob("*.py"))]


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(text_of(path))


def module_of(path: Path) -> str:
    """The dotted name under which a file is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def long_modules() -> dict[str, int]:
    found = {}
    for path in package_files():
        limit = MAX_API_MODULE if path.stem in API_MODULES else MAX_MODULE
        lines = text_of(path).count("\n")
        if lines > limit:
            found[name_of(path)] = lines
    return found


def members(kind: type) -> set[str]:
    """The names of a class and of its bases here: methods, properties, fields, however bound.

    Names between double underscores are not counted.
    """
    ours = [
        base for base in kind.__mro__ if base.__module__.partition(".")[0] in ("pyqueue", "signals")
    ]
    names = {name for base in ours for name in (*vars(base), *inspect.get_annotations(base))}
    return {name for name in names if not (name.startswith(("__", "_abc_")))}


def large_classes() -> dict[str, int]:
    found = {}
    for path in package_files():
        if path.stem == "__main__":
            continue
        module = importlib.import_module(module_of(path))
        for kind in vars(module).values():
            if isinstance(kind, type) and kind.__module__ == module.__name__:
                count = len(members(kind))
                if count > MAX_MEMBERS and kind.__name__ not in API_CLASSES:
                    found[f"{name_of(path)}::{kind.__name__}"] = count
    return found


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function of a file. Expressions have none, and are most of a tree."""
    left: list[ast.AST] = [tree]
    while left:
        node = left.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node
        left += [each for each in ast.iter_child_nodes(node) if not isinstance(each, ast.expr)]


def long_functions() -> dict[str, int]:
    """Functions over the limit, from `def` to the last line."""
    found = {}
    for path in all_files():
        # The trees of the tests are large, and nothing else reads them.
        for node in functions(ast.parse(path.read_text(encoding="utf-8"))):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines > MAX_FUNCTION:
                found[f"{name_of(path)}::{node.name}"] = lines
    return found


def many_arguments() -> dict[str, int]:
    """Functions with more than ``MAX_ARGUMENTS``, by the number that they take."""
    found = {}
    for path in package_files():
        name = name_of(path)
        if path.stem in WITH_API or name.startswith("pyqueue/cli/"):
            continue
        for node in ast.walk(tree_of(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                given = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
                given += [each.arg for each in node.args.kwonlyargs]
                number = len([each for each in given if each not in ("self", "cls")])
                if number > MAX_ARGUMENTS and node.name != "__init__":
                    found[f"{name}::{node.name}"] = number
    return found


def fields_of(node: ast.ClassDef) -> list[str]:
    """The fields of a named tuple or a dataclass; of another class none."""
    says = " ".join(map(ast.unparse, (*node.bases, *node.decorator_list)))
    if "NamedTuple" not in says and "dataclass" not in says:
        return []
    annotated = (each for each in node.body if isinstance(each, ast.AnnAssign))
    return [
        ast.unparse(each.target)
        for each in annotated
        if not ast.unparse(each.annotation).startswith("ClassVar")
    ]


def large_values() -> dict[str, int]:
    found = {}
    for path in package_files():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef) and len(fields_of(node)) > MAX_FIELDS:
                found[f"{name_of(path)}::{node.name}"] = len(fields_of(node))
    return found


def long_calls(tree: ast.Module) -> dict[int, int]:
    """Calls with too many values by position, by line. A log record may have any number."""
    return {
        node.lineno: len(node.args)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and len(node.args) > MAX_POSITIONAL
        and not ast.unparse(node.func).startswith("log.")
    }


def calls_by_position() -> dict[str, int]:
    return {
        f"{name_of(path)}:{line}": number
        for path in package_files()
        for line, number in long_calls(tree_of(path)).items()
    }


def blocks() -> Iterator[tuple[str, Any]]:
    """The functions and methods of backends/, as radon sees them."""
    for path in sorted((ROOT / "pyqueue" / "backends").rglob("*.py")):
        for block in cc_visit(text_of(path)):
            if not isinstance(block, Class):
                yield f"{name_of(path)}::{block.name}", block


def complex_functions() -> dict[str, int]:
    return {name: block.complexity for name, block in blocks() if block.complexity > GRADE_C}


def imported(tree: ast.Module) -> Iterator[str]:
    """Every module of ours that a file imports: in functions and under TYPE_CHECKING too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            for each in node.names:
                module = f"{node.module}.{each.name}"
                place = ROOT / module.replace(".", "/")
                is_module = place.with_suffix(".py").exists() or (place / "__init__.py").exists()
                yield module if is_module else str(node.module)


def circles(edges: dict[str, set[str]]) -> dict[str, int]:
    """The modules from which a chain of imports leads back, each with the length of the circle."""
    found = {}
    for start in edges:
        reached, new, steps = set[str](), edges[start], 1
        while new and start not in new:
            reached |= new
            new = {far for near in new for far in edges.get(near, ())} - reached
            steps += 1
        if start in new:
            found[start] = steps
    return found


def in_a_circle() -> dict[str, int]:
    return circles({module_of(path): set(imported(tree_of(path))) for path in package_files()})


def private_names(tree: ast.Module) -> list[str]:
    """`_name` of each `x._name` where x is neither `self` nor `cls`, and imported private names.

    The underscores of a named tuple's methods only keep them apart from its fields.
    """
    public = {"_asdict", "_fields", "_make", "_replace"}
    taken = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                taken.append(node.attr)
        elif isinstance(node, ast.ImportFrom):
            taken += [each.name for each in node.names]
    private = [name for name in taken if name.startswith("_") and not name.startswith("__")]
    return [name for name in private if name not in public]


def private_access() -> dict[str, int]:
    paths = sorted((ROOT / "pyqueue" / "backends").rglob("*.py"))
    counts = {name_of(path): len(private_names(tree_of(path))) for path in paths}
    return {name: count for name, count in counts.items() if count}


def called(nodes: Iterable[ast.AST], *, deep: bool) -> set[str]:
    """The names of what is called when a module is imported; ``deep``: in functions, too."""
    found, left = set[str](), list(nodes)
    while left:
        node = left.pop()
        if isinstance(node, ast.Call):
            found |= {str(getattr(node.func, name, None)) for name in ("id", "attr")}
        if deep or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            left += ast.iter_child_nodes(node)
    return found


def locks_of(tree: ast.Module) -> set[str]:
    """What a module makes when it is imported: locks, and objects of its classes that have some."""
    classes = [each for each in tree.body if isinstance(each, ast.ClassDef)]
    having = {each.name for each in classes if LOCKS & called(each.body, deep=True)}
    return called(tree.body, deep=False) & (LOCKS | having)


def locks_without_a_fork() -> dict[str, int]:
    """Modules with locks that a child of fork would inherit as they are."""
    found = {name_of(path): len(locks_of(tree_of(path))) for path in package_files()}
    renewed = {name_of(path) for path in package_files() if "register_at_fork(" in text_of(path)}
    return {name: count for name, count in found.items() if count and name not in renewed}


CHECKS = {
    "modules too long": (long_modules, LONG_MODULES),
    "classes with too many members": (large_classes, LARGE_CLASSES),
    "functions too long": (long_functions, LONG_FUNCTIONS),
    "functions with too many arguments": (many_arguments, MANY_ARGUMENTS),
    "values with too many fields": (large_values, LARGE_VALUES),
    "calls with too many values by position": (calls_by_position, {}),
    "functions too complex": (complex_functions, COMPLEX_FUNCTIONS),
    "modules in a circle": (in_a_circle, IN_A_CIRCLE),
    "private access": (private_access, PRIVATE_ACCESS),
    "locks of a module that a fork inherits": (locks_without_a_fork, {}),
}


@pytest.mark.parametrize("check", CHECKS)
def test_limits_are_kept_but_for_the_tables(check: str) -> None:
    measure, allowed = CHECKS[check]
    found = measure()
    too_much = {name: found[name] for name in found if found[name] > allowed.get(name, 0)}
    assert too_much == {}, f"{check}: split or rewrite"
    not_needed = set(allowed) - set(found)
    assert not_needed == set(), f"{check}: remove these entries of the table"


def test_few_functions_have_grade_c() -> None:
    found = [name for name, block in blocks() if GRADE_B < block.complexity <= GRADE_C]
    assert len(found) <= MOST_OF_GRADE_C, "write plainer ones"
    assert len(found) >= MOST_OF_GRADE_C - 3, "lower MOST_OF_GRADE_C"


# ---- the measures themselves


def test_members_count_however_they_are_bound() -> None:
    def bound() -> None: ...

    kind = type(
        "Kind", (), {"__module__": "pyqueue.x", "a": bound, "_b": staticmethod(bound), "c": 1}
    )
    child = type("Child", (kind,), {"__module__": "pyqueue.x", "__annotations__": {"d": int}})
    assert members(child) == {"a", "_b", "c", "d"}


def test_imports_under_type_checking_count() -> None:
    source = "if TYPE_CHECKING:\n    from pyqueue import client\nimport signals.api"
    assert set(imported(ast.parse(source))) == {"pyqueue.client", "signals.api"}


def test_fields_and_values_by_position_are_counted() -> None:
    source = "@dataclass(slots=True)\nclass A:\n x: int\n y: ClassVar[int] = 1\nclass B:\n z: int"
    a_value, no_value = ast.parse(source).body
    assert isinstance(a_value, ast.ClassDef)
    assert isinstance(no_value, ast.ClassDef)
    assert (fields_of(a_value), fields_of(no_value)) == (["x"], [])
    calls = "f(1, 2, 3, 4, 5, g=6)\nf(1, 2, 3, 4, 5, 6)\nlog.info('', 1, 2, 3, 4, 5)"
    assert long_calls(ast.parse(calls)) == {2: 6}


def test_circles_are_found_with_their_length() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set[str]()}
    assert circles(edges) == {"a": 3, "b": 3, "c": 3}


def test_locks_of_modules_are_found() -> None:
    source = "class A:\n    def __init__(self): self.x = threading.RLock()\n{} = {}"
    for made, count in {"Lock()": 1, "A().x": 1, "lambda: Lock()": 0, "[Event()]": 1}.items():
        assert len(locks_of(ast.parse(source.format("it", made)))) == count


def test_private_names_of_other_objects_are_found() -> None:
    source = "from x import _a, b\nself._c = d._e._replace()\ncls._f.__class__._g"
    assert sorted(private_names(ast.parse(source))) == ["_a", "_e", "_g"]
