"""The rules that keep the house in order: sizes, rooms, floors, cycles, names, docstrings."""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
HALLS = ("pipeline", "sharding", "loaders", "bench")
FILES = sorted(file.relative_to(ROOT) for hall in HALLS for file in (ROOT / hall).rglob("*.py"))

MAX_ENTRIES = 12
MAX_README_LINES = 40
MAX_MODULE_LINES = 450
MAX_FUNCTION_LINES = 80
MAX_METHODS = 16
MAX_PARAMETERS = 8
MAX_CONSTRUCTOR_PARAMETERS = 10
MAX_FMT_SKIPS = 151  # it may only fall

# Classes and functions above these limits, each with the number that it must not exceed. The list may only shrink.
MANY_METHODS = {
    "loaders/loader.py DataLoader": 22,  # what trainers, worker processes and the process of where= call
    "pipeline/transforms/image_map.py ImageMap": 18,  # one value: five ways to make it, and what is read off it
}
MANY_PARAMETERS = {
    "loaders/loader.py DataLoader.__init__": 26,
    "sharding/api.py reshard": 10,
}
# Modules above MAX_MODULE_LINES, each with the number of lines that it must not exceed.
LONG = {
    "loaders/loader.py": 510,  # the public class, of which the arguments' documentation is 80 lines
}
# Private names of other libraries that are used because there is no public way: ruff's SLF001, switched off there.
PRIVATE_REACH = {
    "bench/peers/torch_workers.py",
    "bench/planner/fake_rank.py",
    "bench/trainer/models/build.py",
    "loaders/integrations/mmengine.py",
    "loaders/storage/clients.py",
    "sharding/sources/openscene/pickles.py",
}

# Folders with more entries than MAX_ENTRIES, each with its reason.
WIDE = {
    "bench": "rooms, and three files on what was measured and decided",
    "bench/peers": "plug-ins, one loader a file",
    "bench/results": "data, one result a file",
    "loaders": "rooms, and the public class with its settings, records and commands",
    "loaders/batch": "what a batch can hold or become, one subject a file",
    "pipeline/order": "parts of an order, one a file: what a part does is read without the others",
    "sharding": "rooms, and a file for each thing that is done to a whole dataset",
    "sharding/sources": "plug-ins, one format each",
    "sharding/write": "steps from a sample to a published dataset, one a file",
}

# The rooms of each hall from the ground up. A room imports rooms of lower floors only.
FLOORS: dict[str, list[set[str]]] = {
    "pipeline": [
        {"rigid", "text"},
        {"errors"},
        {"settings"},
        {"runtime", "sample"},
        {"storage", "transforms", "cli"},
        {"channels"},
        {"format"},
        {"order"},
    ],
    "sharding": [
        {"sources"},
        {"demo"},
        {"planning"},
        {"output"},
        {"write"},
        {"engines", "progress", "verify"},
        {"run"},
        {"append"},
        {"forget"},
        {"api"},
        {"commands"},
    ],
    "loaders": [
        {"decode", "distributed"},
        {"storage"},
        {"records"},
        {"schedule"},
        {"config"},
        {"autotune"},
        {"batch"},
        {"serving", "viewer"},
        {"loader"},
        {"integrations", "view"},
        {"commands"},
    ],
    "bench": [
        {"measure"},
        {"ranks", "report", "trainer"},
        {"annotate", "peers", "planner"},
        {"studies"},
        {"commands"},
        {"micro"},
    ],
}


def module_name(file: Path) -> str:
    parts = file.with_suffix("").parts
    return ".".join(("fuelrail", *(parts[:-1] if parts[-1] == "__init__" else parts)))


NAMES = {module_name(file): file for file in FILES}


@functools.cache
def modules() -> dict[Path, list[ast.AST]]:
    """The nodes of each module's syntax tree. Every worker imports this file, one parses the modules."""
    return {file: list(ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"), str(file)))) for file in FILES}


def imports(file: Path) -> set[Path]:
    """The project's own modules that a file imports, type-only and lazy imports included."""
    found = set()
    for node in modules()[file]:
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                found.add(NAMES.get(f"{node.module}.{alias.name}") or NAMES.get(node.module))
        elif isinstance(node, ast.Import):
            found |= {NAMES.get(alias.name) for alias in node.names}
    return {other for other in found if other is not None and other != file}


@functools.cache
def graph() -> dict[Path, set[Path]]:
    return {file: imports(file) for file in FILES}


def room(file: Path) -> str:
    return file.with_suffix("").parts[1]


def folders() -> Iterator[Path]:
    for hall in HALLS:
        for folder in (ROOT / hall, *(ROOT / hall).rglob("*")):
            if folder.is_dir() and folder.name != "__pycache__":
                yield folder


def entries(folder: Path) -> list[str]:
    ignored = {"__init__.py", "README.md", "__pycache__"}
    return sorted(one.name for one in folder.iterdir() if one.name not in ignored and one.suffix != ".so")


def test_no_folder_has_too_many_entries() -> None:
    wide = {folder.relative_to(ROOT).as_posix(): len(entries(folder)) for folder in folders()}
    too_wide = {name: count for name, count in wide.items() if count > MAX_ENTRIES}
    assert too_wide.keys() <= WIDE.keys(), too_wide
    assert all((ROOT / name).is_dir() for name in WIDE)


def test_every_larger_room_has_a_short_page_that_names_its_entries() -> None:
    for folder in folders():
        name = folder.relative_to(ROOT).as_posix()
        modules = [one for one in entries(folder) if one.endswith(".py")]
        if len(modules) <= 3 or "results" in folder.parts:
            continue
        page = folder / "README.md"
        assert page.is_file(), f"{name} has {len(modules)} modules and no README.md"
        text = page.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= MAX_README_LINES, f"{name}/README.md has more than {MAX_README_LINES} lines"
        if name not in WIDE:
            missing = [one for one in entries(folder) if one.removesuffix(".py") not in text]
            assert not missing, f"{name}/README.md does not name {missing}"


@pytest.mark.parametrize("hall", HALLS)
def test_rooms_import_lower_floors_only(hall: str) -> None:
    level = {name: floor for floor, names in enumerate(FLOORS[hall]) for name in names}
    found = {room(file) for file in FILES if file.parts[0] == hall and file.parts != (hall, "__init__.py")}
    assert found == level.keys(), "FLOORS lists the rooms that exist"
    for file, others in graph().items():
        for other in others:
            if file.parts[0] == other.parts[0] == hall and "__init__.py" not in {file.parts[1], other.parts[1]}:
                mine, theirs = room(file), room(other)
                assert mine == theirs or level[theirs] < level[mine], f"{file} imports {other}"


def test_no_source_imports_another() -> None:
    """What two kinds of sources need is in a common room; only the registry knows the kinds."""
    common = {"adapter", "registry", "shared", "source"}
    for file, others in graph().items():
        for other in others:
            if file.parts[:2] == other.parts[:2] == ("sharding", "sources"):
                mine, theirs = file.with_suffix("").parts[2], other.with_suffix("").parts[2]
                assert theirs in common | {mine} or mine == "registry", f"{file} imports {other}"


def test_no_import_cycles() -> None:
    """Kahn's algorithm: what is left when nothing without imports remains is a cycle."""
    waiting = {file: set(others) for file, others in graph().items()}
    while free := [file for file, others in waiting.items() if not others]:
        for file in free:
            del waiting[file]
        for others in waiting.values():
            others.difference_update(free)
    assert not waiting, f"a cycle is among {sorted(map(str, waiting))}"


def test_modules_and_functions_stay_short() -> None:
    for file, nodes in modules().items():
        lines = len((ROOT / file).read_text(encoding="utf-8").splitlines())
        assert lines <= LONG.get(file.as_posix(), MAX_MODULE_LINES), f"{file} has {lines} lines"
        for node in nodes:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or 0) - node.lineno + 1
                where = f"{file}:{node.lineno} {node.name} has {length} lines"
                assert length <= MAX_FUNCTION_LINES, where


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The number of parameters, without ``self`` and ``cls``; a tuple of fixed length counts by its members."""
    given = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    return sum(members(one.annotation) for one in given if one.arg not in ("self", "cls"))


def members(annotation: ast.expr | None) -> int:
    """The number of members of ``tuple[A, B, C]``, also of one that may be None; 1 for any other annotation."""
    if isinstance(annotation, ast.BinOp):
        return max(members(annotation.left), members(annotation.right))
    if not isinstance(annotation, ast.Subscript) or ast.unparse(annotation.value) != "tuple":
        return 1
    parts = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
    return 1 if ast.unparse(parts[-1]) == "..." else sum(map(members, parts))


def functions(tree: ast.AST, owner: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Functions of a module and methods of its classes, by ``function`` or ``Class.method``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from functions(node, f"{owner}{node.name}.")
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield f"{owner}{node.name}", node


def check_limits(found: dict[str, int], limit: int, listed: dict[str, int]) -> None:
    """Check numbers against a limit, or against what is listed for those above it."""
    for name, number in found.items():
        assert number <= listed.get(name, limit), f"{name} has {number}, the limit is {listed.get(name, limit)}"
    done = [name for name in listed if found.get(name, limit + 1) <= limit]
    assert not done, f"take these out of the list, they keep to the limit of {limit}: {done}"


def methods(node: ast.ClassDef, module: ast.AST) -> int:
    """The methods of a class, and the private functions of its module whose first parameter is one of the class."""
    found = sum(isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)) for one in node.body)
    for name, function in functions(module):
        given = (*function.args.posonlyargs, *function.args.args)
        is_outside = name.startswith("_") and given and given[0].annotation is not None
        found += bool(is_outside and ast.unparse(given[0].annotation).strip("'") == node.name)
    return found


def test_classes_have_few_methods() -> None:
    found = {
        f"{file} {node.name}": methods(node, nodes[0])
        for file, nodes in modules().items()
        for node in nodes
        if isinstance(node, ast.ClassDef)
    }
    check_limits(found, MAX_METHODS, MANY_METHODS)


def test_lines_are_rarely_kept_from_the_formatter() -> None:
    """Arrays of numbers and calls of many short arguments are; the longer line must be the more readable one."""
    found = sum((ROOT / file).read_text(encoding="utf-8").count("# fmt: skip") for file in FILES)
    assert found <= MAX_FMT_SKIPS
    assert found > MAX_FMT_SKIPS - 10, f"lower MAX_FMT_SKIPS to {found}"


# Public classes whose name another class of the hall has, too. The list may only shrink.
SAME_NAMES: dict[str, set[str]] = {}


@pytest.mark.parametrize("hall", HALLS)
def test_a_name_is_that_of_one_public_class_of_a_hall(hall: str) -> None:
    found = defaultdict(list)
    for file, nodes in modules().items():
        for node in nodes:
            if file.parts[0] == hall and isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(file))
    twice = {name: files for name, files in found.items() if len(files) > 1}
    listed = SAME_NAMES.get(hall, set())
    assert not twice.keys() - listed, twice
    assert not listed - twice.keys(), f"take these out of the list: {listed - twice.keys()}"


# No sentence starts so, but a fragment that hangs on the name before it.
FRAGMENT = re.compile(r"(As|At|Because|By|For|From|In|Its|Like|None|Of|On|Out|Than|That|Then|Those|To|With|Without)\b")
# A description, where a function is asked to do something; of a property it is a noun phrase.
DESCRIPTION = re.compile(
    r"(A|All|An|Both|Each|Every|Few|How|If|It|Most|No|Nothing|One|Only|Same|Some|The|There|These|They|This|What|When|Where|"
    r"Whether|Which|While|Who|Whole|Whose|Why)\b"
)
# Rooms that are rewritten, whose docstrings still start so. The list may only shrink.
OTHER_WORDS: tuple[str, ...] = ()


def docstrings(nodes: list[ast.AST]) -> Iterator[tuple[int, str, bool]]:
    """Docstrings of functions, classes and fields of a module: line, text, whether it is of a function to call."""
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            is_property = any("property" in ast.unparse(one) for one in node.decorator_list)
            yield node.lineno, ast.get_docstring(node) or "", not is_property
        if isinstance(node, (ast.ClassDef, ast.Module)):
            yield getattr(node, "lineno", 1), ast.get_docstring(node) or "", False
            for before, one in pairwise(node.body):
                if isinstance(before, (ast.Assign, ast.AnnAssign)) and isinstance(one, ast.Expr):
                    yield one.lineno, str(ast.literal_eval(one.value)), False


def test_docstrings_of_functions_are_imperative_and_none_is_a_fragment() -> None:
    found = [
        f"{file}:{line} {text.splitlines()[0]}"
        for file, nodes in modules().items()
        if not file.as_posix().startswith(OTHER_WORDS)
        for line, text, is_function in docstrings(nodes)
        if FRAGMENT.match(text) or (is_function and DESCRIPTION.match(text))
    ]
    assert not found, "\n".join(found)


def test_public_functions_and_constructors_have_few_parameters() -> None:
    """Options beyond that belong into a struct."""
    named = [(f"{file} {name}", node) for file, nodes in modules().items() for name, node in functions(nodes[0])]
    public = {name: parameters(node) for name, node in named if not node.name.startswith("_")}
    constructors = {name: parameters(node) for name, node in named if node.name == "__init__"}
    check_limits(public, MAX_PARAMETERS, {n: c for n, c in MANY_PARAMETERS.items() if not n.endswith("__init__")})
    made = {name: count for name, count in MANY_PARAMETERS.items() if name.endswith("__init__")}
    check_limits(constructors, MAX_CONSTRUCTOR_PARAMETERS, made)


def test_no_private_imports() -> None:
    for file, nodes in modules().items():
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fuelrail."):
                for alias in node.names:
                    private = alias.name.startswith("_") and not alias.name.startswith("__")
                    assert not private, f"{file}:{node.lineno} imports {alias.name} of {node.module}"


def test_no_private_reach() -> None:
    """Ruff refuses ``obj._name``; a subclass in another hall must not use private names of its base class either."""
    off = {str(file) for file in FILES if "SLF001" in (ROOT / file).read_text(encoding="utf-8")}
    assert off <= PRIVATE_REACH, "a private name of another library is used in a new place"
    classes = [(file, node) for file, nodes in modules().items() for node in nodes if isinstance(node, ast.ClassDef)]
    private = {(node.name, file.parts[0]): private_names(node) for file, node in classes}
    for file, node in classes:
        bases = {ast.unparse(base) for base in node.bases}
        foreign = {name: names for (name, hall), names in private.items() if name in bases and hall != file.parts[0]}
        for base, names in foreign.items():
            taken = private_names(node) & names
            assert not taken, f"{file}:{node.lineno} {node.name} uses {base}'s {taken}"


def private_names(node: ast.ClassDef) -> set[str]:
    """Attributes ``self._name`` that a class uses, and its private methods."""
    used = {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute) and ast.unparse(one.value) == "self"}
    used |= {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
    return {name for name in used if name.startswith("_") and not name.startswith("__")}
