"""The public names of a package, which its stub ``__init__.pyi`` lists.

Each is imported on first use.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def read_public_names(stub: Path) -> dict[str, tuple[str, str]]:
    """Return each public name of a stub with its module and its name there."""
    tree = ast.parse(stub.read_text(encoding="utf-8"))
    places = {}
    for statement in tree.body:
        if isinstance(statement, ast.ImportFrom):
            module = statement.module or ""
            for alias in statement.names:
                public_name = alias.asname or alias.name
                places[public_name] = (module, alias.name)
        elif isinstance(statement, ast.Assign):  # a name that is another one in its module
            (target,) = statement.targets
            public_name = ast.unparse(target)
            imported_name = ast.unparse(statement.value)
            places[public_name] = places.pop(imported_name)
    return places


def lazy_names(
    package: str,
    file: str,
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package whose ``__init__.py`` is ``file``.

    ``__getattr__`` raises ConfigError where a name needs an extra that is not installed.
    """
    stub = Path(file).with_suffix(".pyi")
    public_names = functools.cache(lambda: read_public_names(stub))

    def resolve(name: str) -> Any:
        if name.startswith("__") or name not in public_names():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, attribute = public_names()[name]
        if module == package:  # a module of the package itself
            return import_module(f"{package}.{attribute}")

        # Imported here, for `import fuelrail` alone is light.
        from fuelrail.pipeline.errors import needs

        with needs(f"{package}.{name}"):
            value = getattr(import_module(module), attribute)
        setattr(sys.modules[package], name, value)
        return value

    def list_names() -> list[str]:
        module_names = vars(sys.modules[package])
        special = [name for name in module_names if name.startswith("__")]
        return sorted([*special, *public_names()])

    return resolve, list_names
