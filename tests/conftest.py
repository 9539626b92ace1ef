"""What holds for all tests."""

from __future__ import annotations

import fcntl
import gc
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from support.datasets import DatasetMaker

# Tests run beside each other, and their processes inherit it: OpenMP's threads that share a CPU wait for each other at
# every operator, and small models then take ten times as long. Read when torch is imported, so it is set first.
os.environ.setdefault("OMP_NUM_THREADS", "1")

LANES: Final = ("unit", "process", "slow", "gpu", "real", "network", "long")

# No test asserts times: on a busy machine an example may take as long as it likes.
settings.register_profile("fuelrail", deadline=None)
settings.load_profile("fuelrail")

# Shells start background jobs with Ctrl-C ignored, and children inherit that: tests interrupt some of theirs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


_OTHER_LANE: Final = re.compile(
    rf"^pytestmark = \[?\s*pytest\.mark\.({'|'.join(LANES[1:])})\b",
    re.MULTILINE,
)
_ALL_COSTLY: Final = "\npytestmark = pytest.mark.costly\n"
# Where Hypothesis keeps the settings of a test; what it decorates has no public place to change them.
_EXAMPLES: Final = "_hypothesis_internal_use_settings"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files without a test of the lanes asked for before they are imported: that takes seconds."""
    if not collection_path.match("test_*.py") or config.option.markexpr not in (
        "unit",
        "long",
    ):
        return None
    text = collection_path.read_text(encoding="utf-8")
    if config.option.markexpr == "long":
        left_out = "mark.long" not in text
    else:
        left_out = bool(_OTHER_LANE.search(text)) or (
            config.option.first_cases and _ALL_COSTLY in text
        )
    return True if left_out else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--first-cases",
        action="store_true",
        help="run the first case of each test of the unit lane, but of costly ones",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put each test that names no lane into the lane ``unit``; with ``--first-cases`` leave out all other cases.

    It leaves out costly tests too. Files with tests of other lanes come first: with the short ones at the end all
    workers end together.
    """
    for item in items:
        if not any(item.get_closest_marker(lane) for lane in LANES):
            item.add_marker(pytest.mark.unit)
    long = {item.path for item in items if not item.get_closest_marker("unit")}
    items.sort(key=lambda item: item.path not in long)
    if config.getoption("first_cases", False):
        unit = (item for item in reversed(items) if item.get_closest_marker("unit"))
        quick = [item for item in unit if not item.get_closest_marker("costly")]
        first = {item.nodeid.partition("[")[0]: item for item in quick}
        chosen = set(first.values())
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = [item for item in items if item in chosen]
        for item in items:  # of properties a few examples
            if (example_settings := getattr(item.function, _EXAMPLES, None)) is not None:
                setattr(
                    item.function,
                    _EXAMPLES,
                    settings(
                        example_settings,
                        max_examples=min(example_settings.max_examples, 5),
                    ),
                )


def pytest_collection_finish() -> None:
    """Take what is imported by now out of garbage collection: many tests call it, and walking torch takes 0.1 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_dataset(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[DatasetMaker]:
    """What makes each small dataset once: ``tiny_dataset({"train": (4, 3)}, size=(64, 48)).root``, also ``.raw``.

    They are read only. A test that writes takes a copy: ``tiny_dataset(splits, copy_to=tmp_path / "d")``.
    """
    from support.datasets import DatasetMaker

    maker = DatasetMaker(tmp_path_factory.mktemp("datasets"))
    yield maker
    maker.check()


@pytest.fixture(scope="session")
def made_once(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str, Callable[[Path], object]], Path]:
    """Make a folder that takes seconds once for all workers: ``made_once("name", fill)`` fills it; it is read only."""
    base = tmp_path_factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def make(name: str, fill: Callable[[Path], object]) -> Path:
        folder = root / f"once-{name}"
        with folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
            if not folder.exists():
                making = tmp_path_factory.mktemp(name)
                fill(making)
                making.rename(folder)
        return folder

    return make


@pytest.fixture
def warm_ranks(monkeypatch):
    """Have the ranks of `fuelrail bench` be forks of a process that has torch loaded."""
    from fuelrail.bench.ranks import launch
    from support.warm_ranks import Warm

    monkeypatch.setattr(launch, "subprocess", Warm)
