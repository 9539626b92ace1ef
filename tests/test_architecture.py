"""The rules that keep the house in order: sizes, rooms, floors, cycles, names, and the words that users read."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
HALLS = ("pipeline", "sharding", "loaders", "bench")
FILES = sorted(file for hall in HALLS for file in (ROOT / hall).rglob("*.py"))
TREES = {file.relative_to(ROOT): ast.parse(file.read_text(encoding="utf-8"), str(file)) for file in FILES}

MAX_ENTRIES = 12
MAX_README_LINES = 40
MAX_MODULE_LINES = 450
MAX_FUNCTION_LINES = 80

# Folders with more entries than MAX_ENTRIES, each with its reason.
WIDE = {
    "bench/micro": "one benchmark a file; becomes fewer when the benchmarks are rewritten",
    "bench/peers": "plug-ins, one loader a file",
    "bench/results": "data, one result a file",
    "sharding/demo": "the painters, which a smaller renderer replaces",
    "sharding/sources": "plug-ins, one format each",
}

# The rooms of each hall from the ground up. A room imports rooms of lower floors only.
FLOORS: dict[str, list[set[str]]] = {
    "pipeline": [
        {"rigid", "text"},
        {"errors"},
        {"settings", "runtime", "sample"},
        {"storage", "transforms", "cli"},
        {"format"},
        {"order"},
    ],
    "sharding": [
        {"sources", "demo"},
        {"planning"},
        {"output"},
        {"write"},
        {"engines", "progress", "verify"},
        {"run"},
        {"append"},
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
        {"loader", "contact_sheet"},
        {"integrations", "commands"},
    ],
    "bench": [
        {"measure", "planner"},
        {"report", "trainer"},
        {"peers"},
        {"studies"},
        {"commands", "micro"},
        {"gpu"},
    ],
}


def module_name(file: Path) -> str:
    parts = file.with_suffix("").parts
    return ".".join(("fuelrail", *(parts[:-1] if parts[-1] == "__init__" else parts)))


NAMES = {module_name(file): file for file in TREES}


def imports(file: Path) -> set[Path]:
    """The project's own modules that a file imports, type-only and lazy imports included."""
    found = set()
    for node in ast.walk(TREES[file]):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                found.add(NAMES.get(f"{node.module}.{alias.name}") or NAMES.get(node.module))
        elif isinstance(node, ast.Import):
            found |= {NAMES.get(alias.name) for alias in node.names}
    return {other for other in found if other is not None and other != file}


GRAPH = {file: imports(file) for file in TREES}


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
    found = {room(file) for file in TREES if file.parts[0] == hall and file.parts != (hall, "__init__.py")}
    assert found == level.keys(), "FLOORS lists the rooms that exist"
    for file, others in GRAPH.items():
        for other in others:
            if file.parts[0] == other.parts[0] == hall and "__init__.py" not in {file.parts[1], other.parts[1]}:
                mine, theirs = room(file), room(other)
                assert mine == theirs or level[theirs] < level[mine], f"{file} imports {other}"


def test_no_import_cycles() -> None:
    """Kahn's algorithm: what is left when nothing without imports remains is a cycle."""
    waiting = {file: set(others) for file, others in GRAPH.items()}
    while free := [file for file, others in waiting.items() if not others]:
        for file in free:
            del waiting[file]
        for others in waiting.values():
            others.difference_update(free)
    assert not waiting, f"a cycle is among {sorted(map(str, waiting))}"


def test_modules_and_functions_stay_short() -> None:
    for file, tree in TREES.items():
        lines = len((ROOT / file).read_text(encoding="utf-8").splitlines())
        assert lines <= MAX_MODULE_LINES, f"{file} has {lines} lines"
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or 0) - node.lineno + 1
                where = f"{file}:{node.lineno} {node.name} has {length} lines"
                assert length <= MAX_FUNCTION_LINES, where


def test_no_private_reach_between_halls() -> None:
    for file, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fuelrail."):
                for alias in node.names:
                    private = alias.name.startswith("_") and not alias.name.startswith("__")
                    assert not private, f"{file}:{node.lineno} imports {alias.name} of {node.module}"


# What a user reads: docstrings, messages, help texts and pages. Each word with what to write in its place.
WORDS = {
    r"\btold\b": "reported",
    r"\banew\b": "again",
    r"\bbegun\b": "started, partial",
    r"\bgoes on\b": "resumes, continues",
    r"\bgo on\b": "resume, continue",
    r"\bso many\b": "this number of",
    r"\bso much\b": "this amount of",
    r"\bwhoever\b": "the caller, the process",
    r"\bheld against\b": "checked against",
    r"\bhasn't got\b": "has no",
    r"\ball is well\b": "OK",
    r"\bwas there already\b": "already complete",
    r"\bmeans something with\b": "needs",
    r"\bcannot be had\b": "is not available",
}


def prose(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def test_plain_words() -> None:
    found = defaultdict(list)
    for file, tree in TREES.items():
        for line, text in prose(tree):
            for pattern, better in WORDS.items():
                if re.search(pattern, text):
                    found[str(file)].append(f"{line}: {pattern} -> {better}")
    for page in (*ROOT.glob("*.md"), *(ROOT / "pipeline").rglob("*.md")):
        if page.name == "CHANGELOG.md":
            continue
        for number, text in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            words = re.sub(r"`[^`]*`", "", text)  # names of files and options stay as they are
            found[page.name] += [f"{number}: {pattern}" for pattern in WORDS if re.search(pattern, words)]
    assert not {file: words for file, words in found.items() if words}
