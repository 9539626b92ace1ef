"""The rules that keep the house in order: imports point downward, no cycles, public names."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HALLS = ("pipeline", "sharding", "loaders", "bench")
FILES = sorted(file.relative_to(ROOT) for hall in HALLS for file in (ROOT / hall).rglob("*.py"))

# The rooms of each hall from the ground up. A room imports rooms of lower floors only.
FLOORS: dict[str, list[set[str]]] = {
    "pipeline": [
        {"dtypes", "limits", "text"},
        {"rigid"},
        {"errors"},
        {"face", "settings"},
        {"runtime", "sample"},
        {"storage", "transforms", "cli"},
        {"channels", "native"},
        {"format"},
        {"order"},
    ],
    "sharding": [
        {"sources"},
        {"demo"},
        {"planning"},
        {"output"},
        {"write"},
        {"engines", "progress", "tar_rows", "verify"},
        {"run"},
        {"append"},
        {"traces"},
        {"forget"},
        {"forgotten"},
        {"api"},
        {"commands"},
    ],
    "loaders": [
        {"decode", "distributed"},
        {"witness"},
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
        {"annotation", "peers", "planner"},
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
    return {
        file: list(ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"), str(file))))
        for file in FILES
    }


def imports(file: Path) -> set[Path]:
    """The project's own modules that a file imports, type-only and lazy imports included."""
    modules_imported = set()
    for node in modules()[file]:
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                modules_imported.add(
                    NAMES.get(f"{node.module}.{alias.name}") or NAMES.get(node.module)
                )
        elif isinstance(node, ast.Import):
            modules_imported |= {NAMES.get(alias.name) for alias in node.names}
    return {module for module in modules_imported if module is not None and module != file}


@functools.cache
def graph() -> dict[Path, set[Path]]:
    return {file: imports(file) for file in FILES}


def room(file: Path) -> str:
    return file.with_suffix("").parts[1]


@pytest.mark.parametrize("hall", HALLS)
def test_rooms_import_lower_floors_only(hall: str) -> None:
    level = {name: floor for floor, names in enumerate(FLOORS[hall]) for name in names}
    rooms = {
        room(file)
        for file in FILES
        if file.parts[0] == hall and file.parts != (hall, "__init__.py")
    }
    assert rooms == level.keys(), "FLOORS lists the rooms that exist"
    for file, imported in graph().items():
        for module in imported:
            if file.parts[0] == module.parts[0] == hall and "__init__.py" not in {
                file.parts[1],
                module.parts[1],
            }:
                mine = room(file)
                theirs = room(module)
                assert mine == theirs or level[theirs] < level[mine], f"{file} imports {module}"


def test_no_source_imports_another() -> None:
    """What two kinds of sources need is in a common room; only the registry knows the kinds."""
    common = {"adapter", "registry", "shared", "source"}
    for file, imported in graph().items():
        for module in imported:
            if file.parts[:2] == module.parts[:2] == ("sharding", "sources"):
                mine = file.with_suffix("").parts[2]
                theirs = module.with_suffix("").parts[2]
                assert theirs in common | {mine} or mine == "registry", f"{file} imports {module}"


def test_no_import_cycles() -> None:
    """Kahn's algorithm: what is left when nothing without imports remains is a cycle."""
    waiting = {file: set(imported) for file, imported in graph().items()}
    while free := [file for file, imported in waiting.items() if not imported]:
        for file in free:
            del waiting[file]
        for imported in waiting.values():
            imported.difference_update(free)
    assert not waiting, f"a cycle is among {sorted(map(str, waiting))}"


@pytest.mark.parametrize("hall", HALLS)
def test_a_name_is_that_of_one_public_class_of_a_hall(hall: str) -> None:
    files_by_name = defaultdict(list)
    for file, nodes in modules().items():
        for node in nodes:
            if (
                file.parts[0] == hall
                and isinstance(node, ast.ClassDef)
                and not node.name.startswith("_")
                and node.name != "Config"  # torchtitan's name for the options of a loader
            ):
                files_by_name[node.name].append(str(file))
    duplicates = {name: files for name, files in files_by_name.items() if len(files) > 1}
    assert not duplicates


def test_no_private_imports() -> None:
    for file, nodes in modules().items():
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fuelrail."):
                for alias in node.names:
                    private = alias.name.startswith("_") and not alias.name.startswith("__")
                    assert not private, (
                        f"{file}:{node.lineno} imports {alias.name} of {node.module}"
                    )
