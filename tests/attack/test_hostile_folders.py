"""What came with a dataset in its working folder or lies in caches: no command follows, believes or
awaits it.

Each command meets links, FIFOs, sockets, folders and crafted files at the names that it uses below
``.fuelrail/`` or in a cache. It ends in a result or a sentence, within seconds, and a tree outside
is as it was. Some by default, more in the slow lane::

    FUELRAIL_ATTACK=all pytest tests/attack/test_hostile_folders.py     every shape at every name
    python tests/attack/test_hostile_folders.py SEED NUMBER     states by chance, also of killed
    commands
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from itertools import product
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.forked import fork, join
from support.hostile_folders import (
    COMMANDS,
    SHAPES,
    die,
    edit,
    make_place,
    make_small,
    outside_now,
    plant,
)
from support.hostile_runs import in_fork, run

IS_WHOLE = os.environ.get("FUELRAIL_ATTACK") == "all"
pytestmark = [
    pytest.mark.process,
    *([pytest.mark.timeout(0)] if IS_WHOLE else []),
]


def preload() -> None:
    """Load what the commands load, so that a fork has it."""
    import torch

    import fuelrail.__main__
    import fuelrail.bench.annotation.run
    import fuelrail.loaders.loader
    import fuelrail.loaders.storage.reader
    import fuelrail.sharding.commands
    import fuelrail.sharding.forget
    import fuelrail.sharding.verify.dataset
    import fuelrail.sharding.write.layers.rebase  # noqa: F401

    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    preload()
    folder = tmp_path_factory.mktemp("small")
    in_fork(lambda: make_small(folder))
    return folder


def list_faults(command: str, place: Path) -> list[str]:
    """Run a command in a place; return what must not be."""
    before = outside_now(place)
    outcome = run(COMMANDS[command][0], place)
    faults = outcome.faults()
    if outside_now(place) != before:
        faults.append("something outside was changed")
    if outcome.status and "error: " not in outcome.text and "fault" not in outcome.text:
        faults.append("ended without a word")
    if outcome.status == 0 and command == "forget" and b"clip-0000" in _index(place):
        faults.append("said that it deleted a clip, and did not")
    return faults


def _index(place: Path) -> bytes:
    return (place / "DS" / "index.arrow").read_bytes()


def states(command: str, every: int) -> list[tuple[str, str]]:
    """Names and shapes that are tried with a command: a step through all of them, from another one
    for each command, has both many times.
    """
    chosen = [(name, shape) for shape, name in product(SHAPES, COMMANDS[command][2])]
    return chosen if IS_WHOLE else chosen[list(COMMANDS).index(command) :: every]


@pytest.mark.parametrize("every", [59, pytest.param(7, marks=pytest.mark.long)])
@pytest.mark.parametrize("command", COMMANDS)
def test_what_lies_in_a_working_folder_or_cache_is_checked(command, every, small, tmp_path) -> None:
    faults_by_state = {}
    for name, shape in states(command, every):
        make_place(small, tmp_path / "place")
        plant(command, name, shape, tmp_path / "place")
        if faults := list_faults(command, tmp_path / "place"):
            faults_by_state[name, shape] = faults
    assert faults_by_state == {}


FOR_ALL = (
    ("", "link-to-folder"),
    ("tmp", "link-to-folder"),
    ("lock", "link-to-file"),
    ("lock", "fifo"),
)


@pytest.mark.parametrize("command", ["forget", "repair", "shard", "append", "layer", "annotate"])
def test_links_and_fifos_are_refused_in_words(command, small, tmp_path, capfd) -> None:
    for name, shape in FOR_ALL:
        make_place(small, tmp_path / "place")
        plant(command, name, shape, tmp_path / "place")
        before = outside_now(tmp_path / "place")
        outcome = run(COMMANDS[command][0], tmp_path / "place")
        assert outcome.status == 2, outcome.text
        assert "it is a FIFO" in outcome.text or "it is a link" in outcome.text
        assert outside_now(tmp_path / "place") == before


@pytest.mark.parametrize("shape", ["plan", "plan-with-parts", "cut", "deep", "empty"])
def test_a_plan_that_came_with_the_dataset_is_not_obeyed(shape, small, tmp_path) -> None:
    make_place(small, tmp_path / "place")
    plant("forget", "forget.json", shape, tmp_path / "place")
    before = outside_now(tmp_path / "place")
    outcome = run(COMMANDS["forget"][0], tmp_path / "place")
    assert outcome.status == 0, outcome.text
    assert "deleted 4 samples of 1 clip" in outcome.text
    assert b"clip-0000" not in _index(tmp_path / "place")
    assert outside_now(tmp_path / "place") == before


def by_chance(seed: int, number: int, folder: Path) -> int:
    """Try states by chance; print the faults."""
    chance = random.Random(seed)
    small = folder / "small"
    place = folder / "place"
    small.mkdir()
    in_fork(lambda: make_small(small))
    num_faults = 0
    for count in range(number):
        command = chance.choice(list(COMMANDS))
        make_place(small, place)
        done = []
        if chance.random() < 0.5:
            done.append(_killed(command, place, chance))
        for _ in range(chance.choice((0, 1, 1, 2, 3)) if done else chance.choice((1, 1, 2, 4))):
            name = chance.choice(COMMANDS[command][2])
            shape = chance.choice(list(SHAPES))
            try:
                plant(command, name, shape, place)
                done.append(f"{name}={shape}")
            except OSError:
                continue
        for fault in list_faults(command, place):
            num_faults += 1
            text = (place / "output.txt").read_text(errors="replace").strip().rpartition("\n")[2]
            print(
                f"{seed}/{count} {command} {done}: {fault} | {text[:300]}",
                flush=True,
            )
    print(f"{number} states, {num_faults} faults")
    return num_faults


def _killed(command: str, place: Path, chance: random.Random) -> str:
    """Kill the command at a rename, and edit a file of what it has left in working folders or
    caches.
    """
    work = COMMANDS[command][0]
    number = chance.randrange(1, 40)

    def dying() -> None:
        from fuelrail.__main__ import main

        os.chdir(place)
        os.environ.update(HOME=str(place), XDG_CACHE_HOME=str(place / "tmp"))
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        die(lambda: main(work) if isinstance(work, list) else work(), number)

    join(fork(dying))
    roots = [*place.glob("*/.fuelrail"), place / "cache"]
    files = [path for root in roots for path in sorted(root.rglob("*")) if path.is_file()]
    if not files or chance.random() < 0.2:
        return f"killed at {number}"
    path = chance.choice(files)
    edit(path, chance)
    return f"killed at {number}, {path.relative_to(place)} edited"


if __name__ == "__main__":
    preload()
    with tempfile.TemporaryDirectory() as scratch:
        sys.exit(bool(by_chance(int(sys.argv[1]), int(sys.argv[2]), Path(scratch))))
