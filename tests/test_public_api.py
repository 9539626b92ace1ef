"""The names of `import fuelrail as fr` and `fuelrail.bench`: few, each resolved, none of them imported early."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import fuelrail
from fuelrail import bench, errors
from fuelrail.pipeline.face import read_public_names

pytestmark = pytest.mark.process

FACES = {
    package: read_public_names(Path(package.__file__).with_suffix(".pyi"))
    for package in (fuelrail, bench)
}
NAMES = [(package, name) for package, places in FACES.items() for name in places]


def test_a_user_of_datasets_faces_at_most_62_names() -> None:
    assert len(FACES[fuelrail]) <= 62
    of_bench = [name for name, (module, _) in FACES[fuelrail].items() if ".bench." in module]
    assert of_bench == ["watch"], "for any trainer, with no other name of the laboratory"
    assert not FACES[fuelrail].keys() & FACES[bench].keys()


@pytest.mark.parametrize(
    ("package", "name"),
    NAMES,
    ids=[f"{package.__name__}.{name}" for package, name in NAMES],
)
def test_each_name_resolves_to_the_object_of_its_module(package, name) -> None:
    value = getattr(package, name)
    module, attribute = FACES[package][name]
    assert getattr(sys.modules[module], attribute) is value
    assert value.__doc__, f"{name} has no docstring"


def test_each_name_is_written_once() -> None:
    """A stub says `import X as X`; `open`, of another name in its module, is an assignment."""
    for package, places in FACES.items():
        text = Path(package.__file__).with_suffix(".pyi").read_text(encoding="utf-8")
        assert text.count("\nfrom ") == len(places)
        renamed = {name for name, (_, attribute) in places.items() if name != attribute}
        assert renamed == ({"open"} if package is fuelrail else set())


def test_errors_are_in_one_module() -> None:
    assert fuelrail.errors is errors
    kinds = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert kinds & set(dir(fuelrail)) == {"FuelrailError"}


def test_tab_completion_imports_nothing_heavy() -> None:
    code = """
import sys, fuelrail
from fuelrail import bench
assert {"DataLoader", "errors", "shard", "__version__"} <= set(dir(fuelrail))
assert {"train", "plan"} <= set(dir(bench))
assert not {"torch", "numpy", "pyarrow", "msgspec"} & set(sys.modules), sorted(sys.modules)
assert fuelrail.order.__name__ == "fuelrail.order"
import fuelrail.bench.annotation.run
assert isinstance(fuelrail.bench.annotate, type(lambda: 0)), "the function, and no module"
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


@pytest.mark.parametrize("package", [fuelrail, bench], ids=["fuelrail", "bench"])
def test_an_unknown_name_is_an_attribute_error(package: ModuleType) -> None:
    with pytest.raises(
        AttributeError,
        match=f"module '{package.__name__}' has no attribute 'Loader'",
    ):
        _ = package.Loader
