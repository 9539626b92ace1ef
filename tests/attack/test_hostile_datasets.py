"""Hostile datasets and layers through every command and the loader: one sentence or a result, never more.

No code of the dataset runs, nothing is written beside OUT, no traceback, no signal, no wait beyond the limit, and no
process above the memory limit. A dozen of the cases run by default::

    FUELRAIL_ATTACK=all pytest tests/attack      every case
    python tests/attack/test_hostile_datasets.py [PATTERN ...]     the same without pytest, with a line for each run

Each command runs in a fork of this process, which has all modules loaded: a start would take longer than the work.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.forked import fork, join, resident_bytes
from support.hostile import edited, small_dataset, small_layer
from support.hostile_cases import cases
from support.hostile_layers import MAY_PASS
from support.hostile_layers import cases as layer_cases
from support.loaders import make_loader

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.process

SECONDS = 10
MEMORY_BYTES = 1024 << 20  # beyond what the fork begins with
EVERY = 40  # of the cases, by default

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
    "view": ["view", "DS", "clip-0000-000001", "--layers", "t=LAYER", "--output", "out/sheet.png"],
    "rebase": ["layer", "rebase", "LAYER", "DS", "out/rebased"],
    "diff": ["diff", "LAYER", "GOOD"],
    "log": ["log", "LAYER"],
    "loader": [],
    "loader-filter": [],
}


class Outcome(NamedTuple):
    """How one command ended: exit status (minus a signal), seconds, memory that it took [bytes], what it printed."""

    status: int
    seconds: float
    memory_bytes: int
    text: str

    def faults(self) -> list[str]:
        """What must not be."""
        found = []
        if self.status not in (0, 1, 2):
            found.append(f"ended with {self.status}")
        if "Traceback" in self.text:
            found.append("a traceback: " + self.text.strip().rpartition("\n")[2][:200])
        if self.seconds > SECONDS:
            found.append(f"took {self.seconds:.1f} s")
        if self.memory_bytes > MEMORY_BYTES:
            found.append(f"took {self.memory_bytes >> 20} MiB")
        if any(not (char.isprintable() or char == "\n") for char in self.text):
            found.append(f"printed control characters: {self.text[:200]!r}")
        longest = max(map(len, self.text.split("\n")))
        if longest > 12_000:
            found.append(f"printed a line of {longest} characters")
        return found


def preload() -> None:
    """Load what the commands load, so that a fork has it."""
    import cv2
    import torch

    import fuelrail.__main__
    import fuelrail.bench.studies.order.command
    import fuelrail.loaders.commands
    import fuelrail.loaders.loader
    import fuelrail.loaders.storage.reader
    import fuelrail.loaders.viewer.view
    import fuelrail.sharding.commands
    import fuelrail.sharding.verify.dataset  # noqa: F401

    torch.set_num_threads(1)
    cv2.setNumThreads(1)


def load(name: str, *, is_layer: bool) -> int:
    """Read an epoch as a trainer does."""
    from fuelrail.loaders import ImageAugment, OrderSpec
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


def run(name: str, words: list[str], place: Path) -> Outcome:
    """One command on ``DS`` and ``LAYER`` in ``place``, in a fork whose home and current folder that is."""
    output, start_s = place / "output.txt", time.monotonic()
    at_first = mmap.mmap(-1, 8)  # shared with the fork

    def work() -> None:
        at_first[:] = resident_bytes().to_bytes(8, "little")
        handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", encoding="utf-8") for number in (1, 2))
        os.chdir(place)
        os.environ.update(HOME=str(place), TMPDIR=str(place / "tmp"), XDG_CACHE_HOME=str(place / "tmp"))
        tempfile.tempdir = None
        from fuelrail.__main__ import main

        try:
            status = main(words) if words else load(name, is_layer=Path("LAYER").exists())
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 70
        except BaseException:  # noqa: BLE001 - reported by traceback and status
            traceback.print_exc()
            status = 70
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    sys.stdout.flush()
    pid = fork(work)
    done = 0
    while not done and time.monotonic() - start_s < 2 * SECONDS:
        done, status, usage = os.wait4(pid, os.WNOHANG)
        time.sleep(0.002)
    if not done:
        os.kill(pid, signal.SIGKILL)
        _, status, usage = os.wait4(pid, 0)
    text = output.read_text(errors="replace") if output.exists() else ""
    taken = (usage.ru_maxrss << 10) - int.from_bytes(at_first, "little")
    return Outcome(os.waitstatus_to_exitcode(status), time.monotonic() - start_s, taken, text)


def make_small(place: Path) -> None:
    """The dataset that is edited, and beside it FIRST, to which it can be appended: the same with other clips."""
    small_dataset(place)
    with edited(place, place.parent / "FIRST") as parts:
        for sample in parts.samples:
            sample.key = sample.row.key.replace("clip", "other")
        parts.edit_rows = lambda rows: [row._replace(clip_id=row.clip_id.replace("clip", "other")) for row in rows]
    small_layer(place, place.parent / "GOOD")


def in_fork(work: Callable[[], object]) -> None:
    """Run it in a fork, so that this process has neither its threads nor its memory."""
    assert join(fork(work)) == 0, "the dataset could not be made"


def footprint(place: Path) -> dict[str, str]:
    """Every path under ``place`` but OUT, temporary files and our own record, with its kind and content."""
    found = {}
    for path in sorted(place.rglob("*")):
        name = str(path.relative_to(place))
        if name.partition("/")[0] in ("out", "tmp", "output.txt"):
            continue
        regular = path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 30
        found[name] = hashlib.sha256(path.read_bytes()).hexdigest() if regular else str(path.lstat().st_mode)
    return found


def attack(case: str, small: Path, place: Path) -> dict[str, Outcome | str]:
    """Every command on one case; faults as text under the name of what they are about."""
    shutil.rmtree(place, ignore_errors=True)
    (place / "out").mkdir(parents=True)
    (place / "tmp").mkdir()
    (place / "evil.bin").write_bytes(b"mine")

    is_layer = case.startswith("layers/")

    def make() -> None:
        with edited(small.parent / "GOOD" if is_layer else small, place / ("LAYER" if is_layer else "DS")) as parts:
            CASES[case](parts)

    in_fork(make)
    for name in ("DS", "GOOD") if is_layer else ("FIRST",):
        (place / name).symlink_to(small.parent / name)
    before = footprint(place)
    commands = LAYER_COMMANDS if is_layer else COMMANDS
    results: dict[str, Outcome | str] = {name: run(name, words, place) for name, words in commands.items()}
    found = results["verify-deep"]
    if is_layer and found.status == 0 and not any(fnmatch(case, pattern) for pattern in MAY_PASS):
        results["accepted"] = "verify --deep found nothing"
    if footprint(place) != before:
        results["files"] = "something beside OUT was written"
    return results


def faults_of(results: dict[str, Outcome | str]) -> list[str]:
    return [
        f"{name}: {fault}"
        for name, result in results.items()
        for fault in ([result] if isinstance(result, str) else result.faults())
    ]


CASES = cases() | layer_cases()
CHOSEN = list(CASES) if os.environ.get("FUELRAIL_ATTACK") == "all" else list(CASES)[::EVERY]


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    preload()
    place = tmp_path_factory.mktemp("small") / "DS"
    in_fork(lambda: make_small(place))
    return place


@pytest.mark.parametrize("case", CHOSEN)
def test_hostile_datasets_and_layers_end_in_a_sentence(case, small, tmp_path) -> None:
    assert faults_of(attack(case, small, tmp_path / "place")) == []


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
            for fault in faults_of(results):
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
