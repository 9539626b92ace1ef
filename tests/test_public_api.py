"""The names of `import fuelrail`: frozen in public_api.txt, each resolved, none of them imported early."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fuelrail

pytestmark = pytest.mark.process

FROZEN = (Path(__file__).parent / "public_api.txt").read_text(encoding="utf-8").split()


def test_the_public_names_are_the_frozen_ones() -> None:
    assert sorted(fuelrail._PUBLIC, key=str.lower) == FROZEN, (
        "a change of the public names needs tests/public_api.txt"
    )


@pytest.mark.parametrize("name", FROZEN)
def test_each_name_resolves_to_the_object_of_its_module(name: str) -> None:
    module, _, attribute = fuelrail._PUBLIC[name].partition(":")
    value = getattr(fuelrail, name)
    assert getattr(sys.modules[module], attribute or name) is value
    assert value.__doc__, f"{name} has no docstring"


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(fuelrail.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    names = {}
    for node in block.body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                is_same_name = alias.asname == alias.name
                attribute = "" if is_same_name else f":{alias.name}"
                names[alias.asname or alias.name] = f"{node.module}{attribute}"
    for node in block.body:  # a name that differs from the one in its module
        if isinstance(node, ast.Assign):
            value = node.value
            (name,) = node.targets
            names[name.id] = names.pop(value.id)
    assert names == fuelrail._PUBLIC


def test_all_errors_are_public() -> None:
    import fuelrail.pipeline.errors as errors

    kinds = {
        name
        for name, member in vars(errors).items()
        if isinstance(member, type) and issubclass(member, Exception)
    }
    assert kinds <= set(FROZEN)


def test_tab_completion_imports_nothing_heavy() -> None:
    code = """
import sys, fuelrail
assert set(open(sys.argv[1]).read().split()) <= set(dir(fuelrail))
assert not {"torch", "numpy", "pyarrow", "msgspec"} & set(sys.modules), sorted(sys.modules)
assert fuelrail.pipeline.__name__ == "fuelrail.pipeline"
"""
    file = Path(__file__).parent / "public_api.txt"
    subprocess.run([sys.executable, "-W", "error", "-c", code, str(file)], check=True)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'fuelrail' has no attribute 'Loader'"):
        _ = fuelrail.Loader
