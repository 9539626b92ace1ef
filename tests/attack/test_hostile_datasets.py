"""Hostile datasets and layers through every command and the loader: one sentence or a result, never more.

No code of the dataset runs, nothing is written beside OUT, no traceback, no signal, no wait beyond the limit, and no
process above the memory limit. Some cases of each part of the format run by default::

    FUELRAIL_ATTACK=all pytest tests/attack      every case
    python tests/attack/test_hostile_datasets.py [PATTERN ...]     the same without pytest, with a line for each run

Each command runs in a fork of this process, which has all modules loaded: a start would take longer than the work.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import sys
import tempfile
from fnmatch import fnmatch
from functools import partial
from itertools import groupby, islice
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.hostile import edited, small_dataset, small_layer
from support.hostile_cases import cases
from support.hostile_layers import MAY_PASS
from support.hostile_layers import cases as layer_cases
from support.hostile_runs import Outcome, footprint, in_fork, run
from support.loaders import make_loader

pytestmark = pytest.mark.process

EVERY = 120  # of the cases of a part, by default

COMMANDS = {
    "verify": ["verify", "DS"],
    "verify-deep": ["verify", "--deep", "DS", "--workers", "2"],
    "inspect": ["inspect", "DS"],
    "inspect-key": ["inspect", "DS", "clip-0000-000000"],
    "view": ["view", "DS", "--output", "out/sheet.png"],
    "reshard": ["reshard", "DS", "out/resharded", "--workers", "2"],
    "append": ["reshard", "--append", "FIRST", "DS", "out/appended"],
    "inspect-json": ["inspect", "DS", "--json"],
    "order": ["order", "describe", "DS", "--global-batch=1"],
    "loader": [],
}
LAYER_COMMANDS = {
    "verify": ["verify", "LAYER"],
    "verify-deep": ["verify", "--deep", "LAYER", "--workers", "2"],
    "inspect": ["inspect", "LAYER"],
    "inspect-key": ["inspect", "LAYER", "clip-0000-000001"],
    "view": [
        "view",
        "DS",
        "clip-0000-000001",
        "--layers",
        "t=LAYER",
        "--output",
        "out/sheet.png",
    ],
    "rebase": ["layer", "rebase", "LAYER", "DS", "out/rebased"],
    "diff": ["diff", "LAYER", "GOOD"],
    "log": ["log", "LAYER"],
    "loader": [],
    "loader-filter": [],
}


def preload() -> None:
    """Load what the commands load, so that a fork has it."""
    import cv2
    import torch

    import fuelrail.__main__
    import fuelrail.bench.studies.order.describe
    import fuelrail.loaders.commands
    import fuelrail.loaders.loader
    import fuelrail.loaders.storage.reader
    import fuelrail.loaders.view
    import fuelrail.sharding.commands
    import fuelrail.sharding.verify.dataset  # noqa: F401

    torch.set_num_threads(1)
    cv2.setNumThreads(1)


def load(name: str, *, is_layer: bool) -> int:
    """Read an epoch as a trainer does."""
    from fuelrail import ImageAugment, OrderSpec
    from fuelrail.pipeline.errors import FuelrailError

    options = {"layers": {"t": {"path": "LAYER", "missing": "mask"}}} if is_layer else {}
    if name == "loader-filter":
        options["order"] = OrderSpec(filter="t.loss >= 0")
    image = ImageAugment(height=32, width=64)
    try:
        with contextlib.closing(make_loader("DS", 1, image=image, seed=1, **options)) as loader:
            for _ in loader:
                pass
    except FuelrailError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


def make_small(place: Path) -> None:
    """The dataset that is edited, and beside it FIRST, to which it can be appended: the same with other clips."""
    small_dataset(place)
    with edited(place, place.parent / "FIRST") as parts:
        for sample in parts.samples:
            sample.key = sample.row.key.replace("clip", "other")
        parts.edit_rows = lambda rows: [
            row._replace(clip_id=row.clip_id.replace("clip", "other")) for row in rows
        ]
    small_layer(place, place.parent / "GOOD")


def attack(case: str, small: Path, place: Path) -> dict[str, Outcome | str]:
    """Every command on one case; faults as text under the name of what they are about."""
    shutil.rmtree(place, ignore_errors=True)
    (place / "out").mkdir(parents=True)
    (place / "tmp").mkdir()
    (place / "evil.bin").write_bytes(b"mine")

    is_layer = case.startswith("layers/")

    def make() -> None:
        with edited(
            small.parent / "GOOD" if is_layer else small,
            place / ("LAYER" if is_layer else "DS"),
        ) as parts:
            CASES[case](parts)

    in_fork(make)
    for name in ("DS", "GOOD") if is_layer else ("FIRST",):
        (place / name).symlink_to(small.parent / name)
    before = footprint(place)
    commands = LAYER_COMMANDS if is_layer else COMMANDS
    results: dict[str, Outcome | str] = {
        name: run(words or partial(load, name, is_layer=is_layer), place)
        for name, words in commands.items()
    }
    deep_outcome = results["verify-deep"]
    if (
        is_layer
        and deep_outcome.status == 0
        and not any(fnmatch(case, pattern) for pattern in MAY_PASS)
    ):
        results["accepted"] = "verify --deep found nothing"
    if footprint(place) != before:
        results["files"] = "something beside OUT was written"
    return results


def list_faults(results: dict[str, Outcome | str]) -> list[str]:
    return [
        f"{name}: {fault}"
        for name, result in results.items()
        for fault in ([result] if isinstance(result, str) else result.faults())
    ]


CASES = cases() | layer_cases()
PARTS = groupby(CASES, lambda name: name.partition("/")[0])
SELECTED_CASES = [name for _, names in PARTS for name in islice(names, 0, None, EVERY)]
CHOSEN = list(CASES) if os.environ.get("FUELRAIL_ATTACK") == "all" else SELECTED_CASES


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    preload()
    place = tmp_path_factory.mktemp("small") / "DS"
    in_fork(lambda: make_small(place))
    return place


@pytest.mark.parametrize("case", CHOSEN)
def test_hostile_datasets_and_layers_end_in_a_sentence(case, small, tmp_path) -> None:
    assert list_faults(attack(case, small, tmp_path / "place")) == []


def main() -> int:
    """All cases that match one of the patterns given; a line for each fault, and for each run with -v."""
    patterns = [argument for argument in sys.argv[1:] if argument != "-v"] or ["*"]
    preload()
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    num_runs = num_faults = num_cases = 0
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder) / "small" / "DS"
        small.parent.mkdir()
        in_fork(lambda: make_small(small))
        for case in CASES:
            if not any(fnmatch(case, pattern) for pattern in patterns):
                continue
            results = attack(case, small, Path(folder) / "place")
            num_cases += 1
            num_runs += sum(isinstance(result, Outcome) for result in results.values())
            for fault in list_faults(results):
                num_faults += 1
                print(f"{case}: {fault}", flush=True)
            if "-v" in sys.argv:
                for name, result in results.items():
                    if isinstance(result, Outcome):
                        line = result.text.strip().rpartition("\n")[2][:300]
                        figures = f"{result.status} {result.seconds:.1f} s {result.memory_bytes >> 20} MiB"
                        print(f"  {case} {name}: {figures} {line}")
    print(f"{num_cases} datasets and layers, {num_runs} runs, {num_faults} faults")
    return 1 if num_faults else 0


if __name__ == "__main__":
    sys.exit(main())
