"""The exception tree: as drawn, all of it reachable by `except FuelrailError`, and whole after a trip to a worker."""

from __future__ import annotations

import importlib
import inspect
import pickle
import re

import pytest

from fuelrail.pipeline import errors
from fuelrail.pipeline.errors import (
    FuelrailError,
    ImageError,
    MemberError,
    ShardError,
    TruncatedShardError,
)

CLASSES = [
    c for _, c in inspect.getmembers(errors, inspect.isclass) if c.__module__ == errors.__name__
]


def drawn_parents() -> dict[str, str]:
    """Child to parent as the module's docstring draws it, by indentation."""
    parents: dict[str, str] = {}
    branch: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"([ │├└─]*)([A-Z]\w+Error)", line)
        if match is None:
            continue
        depth = len(match[1])
        name = match[2]
        while branch and branch[-1][0] >= depth:
            branch.pop()
        parents[name] = branch[-1][1] if branch else "Exception"
        branch.append((depth, name))
    return parents


def test_tree_in_the_docstring_is_the_tree_of_classes() -> None:
    assert drawn_parents() == {c.__name__: c.__bases__[0].__name__ for c in CLASSES}


def test_what_users_get_wrong_is_a_value_error_too() -> None:
    drawn = set(re.findall(r"(\w+)\s+\(ValueError\)", errors.__doc__ or ""))
    assert drawn == {c.__name__ for c in CLASSES if issubclass(c, ValueError)}


@pytest.mark.parametrize("kind", CLASSES)
def test_every_error_is_documented_ours_and_takes_a_sentence(kind) -> None:
    assert kind.__doc__
    assert issubclass(kind, FuelrailError)
    assert str(kind("what was wrong")) == "what was wrong"


def test_shard_error_carries_and_prints_its_address() -> None:
    error = TruncatedShardError("cut", shard="train-000000.tar", offset=0, key="clip-0")
    assert (error.shard, error.offset, error.key) == (
        "train-000000.tar",
        0,
        "clip-0",
    )
    assert str(error) == "cut (shard train-000000.tar, offset 0, sample clip-0)"
    assert str(ShardError("cut", offset=512)) == "cut (offset 512)"


def test_member_error_carries_and_prints_its_address() -> None:
    error = ImageError("broken", key="clip-0", member="cam_front.jpg")
    assert (error.message, error.key, error.member) == (
        "broken",
        "clip-0",
        "cam_front.jpg",
    )
    assert str(error) == "clip-0.cam_front.jpg: broken"
    assert str(MemberError("broken", member="meta.json")) == "meta.json: broken"


@pytest.mark.parametrize(
    "error",
    [
        ShardError("cut", shard="a.tar", offset=3, key="k"),
        MemberError("broken", key="k", member="m.json"),
        errors.ConfigError("no"),
    ],
)
def test_errors_survive_the_way_back_from_a_worker_process(error) -> None:
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back) == vars(error)


@pytest.mark.parametrize("name", ["no_such_package", "no_such_package.part"])
def test_a_package_that_is_missing_is_named_with_what_brings_it(name) -> None:
    fix = (
        r"a test needs no_such_package, .*: pip install -e '\.\[it\]' in a checkout of Fuelrail "
        r"\(No module named 'no_such_package'"
    )
    with (
        pytest.raises(errors.ConfigError, match=fix),
        errors.needs("a test", "fuelrail[it]"),
    ):
        importlib.import_module(name)
