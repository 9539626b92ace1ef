"""Kill runs that save checkpoints, at random moments, and resume them on other meshes.

A run of 1, 2 or 4 processes is killed (SIGKILL) in a phase that is drawn at random: start, load, train, copy, write,
publish or remove; one rank of it, or all. The next run continues on a mesh drawn from the others. After every kill each
visible checkpoint is read and compared with its manifest. After every resume the run must continue from the newest of
them, with the samples and losses that an uninterrupted run on one process has.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import xxhash

from support.checkpoint_ranks import (
    KEEP,
    MESHES,
    NUM_STEPS,
    OWN_MESHES,
    PHASES,
    run_rank,
)
from support.ranks import warm

MAX_LOSS_DIFFERENCE = 2e-6
FAULTS = ("wrong_samples", "damaged_checkpoints", "older_than_newest")
_PATIENCE_S = 120.0
_POLL_S = 0.0005
# How long after the beginning of a phase the kill comes, at most: about as long as the phase lasts.
_LONGEST_S = {
    "start": 1.0,
    "load": 0.2,
    "train": 0.4,
    "copy": 0.02,
    "write": 0.03,
    "publish": 0.006,
    "remove": 0.006,
}


class Kills:
    """The harness: one folder of runs, and what was found so far.

    ``largest`` is the largest difference of a loss, of any step of any run, to the uninterrupted run on one process.
    ``found`` counts ``wrong_samples``, ``damaged_checkpoints`` and ``older_than_newest``, which must be 0, and what was
    compared.
    """

    def __init__(self, work: Path, dataset: Path, seed: int, *, own: bool = False) -> None:
        self._work = work
        self._dataset = dataset
        self._own = own
        self._meshes = OWN_MESHES if own else MESHES
        self._draw = random.Random(seed)
        self._context = warm()
        self._number = count()
        self.by_phase: Counter[str] = Counter()
        self.by_mesh: Counter[str] = Counter()
        self.found: Counter[str] = Counter()
        self.largest = 0.0
        work.mkdir(parents=True, exist_ok=True)
        self._reference = {
            line["step"]: line
            for line in _lines(self._launch("one", work / "reference", kill=None))
            if "step" in line
        }
        assert sorted(self._reference) == list(range(NUM_STEPS))

    def run(self, num_kills: int, end_s: float) -> None:
        """Kill and resume until there were this many kills, or until ``end_s``; then let the last run end."""
        place = self._new_place()
        mesh = self._draw.choice(list(self._meshes))
        while True:
            last = self.by_phase.total() >= num_kills or time.monotonic() > end_s
            before = _visible(place)
            lines = self._launch(mesh, place, kill=None if last else self._draw.choice(PHASES))
            self._compare(lines, place, before, mesh)
            finished = any(line.get("step") == NUM_STEPS - 1 for line in _lines(lines))
            if finished and last:
                return
            if finished:
                self.found["runs_completed"] += 1
                place = self._new_place()
            mesh = self._draw.choice([candidate for candidate in self._meshes if candidate != mesh])

    def _new_place(self) -> Path:
        return self._work / f"run-{next(self._number):04d}"

    def _launch(self, mesh: str, place: Path, *, kill: str | None) -> list[Path]:
        """Start a run, kill it in that phase, and wait until all its processes are gone; returns its files."""
        number = next(self._number)
        num_ranks = MESHES[mesh].num_ranks
        meeting = self._work / f"meeting-{number}"
        files = [self._work / f"lines-{number}-{rank}.jsonl" for rank in range(num_ranks)]
        phases = self._context.Array("i", num_ranks, lock=False)
        ranks = [
            self._context.Process(
                target=run_rank,
                args=(mesh, rank, str(meeting)),
                kwargs={
                    "files": {
                        "dataset": str(self._dataset),
                        "place": str(place),
                        "lines": str(files[rank]),
                    },
                    "phases": phases,
                    "own": self._own,
                },
            )
            for rank in range(num_ranks)
        ]
        self.found["launches"] += 1
        for process in ranks:
            process.start()
        try:
            killed = kill is not None and self._kill(ranks, phases, kill, mesh)
            deadline = time.monotonic() + _PATIENCE_S
            for process in ranks:
                process.join(max(0.0, deadline - time.monotonic()))
            if not killed:
                codes = [process.exitcode for process in ranks]
                assert codes == [0] * num_ranks, f"{mesh}: ranks ended with {codes}"
        finally:
            for process in ranks:
                process.kill()
                process.join()
        return files

    def _kill(self, ranks: Sequence[Any], phases: Sequence[int], kill: str, mesh: str) -> bool:
        """Wait for the phase on rank 0, which alone publishes, or on any other; then a random while; then kill.

        Returns whether it killed: the run may end before.
        """
        watched = 0 if kill in ("publish", "remove") else self._draw.randrange(len(ranks))
        code = PHASES.index(kill)
        times = self._draw.randint(1, 1 if kill in ("start", "load") else 4)
        delay_s = self._draw.uniform(0, _LONGEST_S[kill])
        alone = self._draw.random() < 0.5
        before = -1
        deadline = time.monotonic() + _PATIENCE_S
        while times and all(process.is_alive() for process in ranks):
            assert time.monotonic() < deadline, (
                f"{mesh}: ranks hang, at {[PHASES[phase] for phase in phases]}"
            )
            now = phases[watched]
            times -= now == code != before
            before = now
            time.sleep(_POLL_S)
        time.sleep(delay_s)
        current_phase = PHASES[phases[watched]]
        if times or not all(process.is_alive() for process in ranks):
            return False
        for process in [ranks[watched]] if alone else ranks:
            os.kill(process.pid, signal.SIGKILL)
        self.by_phase[current_phase] += 1
        self.by_mesh[mesh] += 1
        self.found["one_rank"] += alone and len(ranks) > 1
        if alone:
            # The others end by themselves, when a collective fails; what is still alive then is killed.
            deadline = time.monotonic() + 1.0
            while time.monotonic() < deadline and any(process.is_alive() for process in ranks):
                time.sleep(0.01)
            for process in ranks:
                process.kill()
        return True

    def _compare(
        self,
        files: Sequence[Path],
        place: Path,
        before: Mapping[int, Path],
        mesh: str,
    ) -> None:
        """Compare what the ranks did with the reference, and the visible checkpoints with their manifests."""
        keys_by_step: dict[int, list[set[str]]] = {}
        newest = max(before, default=0)
        visible_said = 0
        for file in files:
            for line in _lines([file]):
                if "restored" in line:
                    self.found["older_than_newest"] += line["restored"] < newest
                    self.found["resumed_on_another_mesh"] += (
                        line["restored"] > 0 and file == files[0]
                    )
                elif "visible" in line:
                    visible_said = max(visible_said, line["visible"])
                else:
                    expected = self._reference[line["step"]]
                    self.found["steps_compared"] += 1
                    self.largest = max(self.largest, abs(line["loss"] - expected["loss"]))
                    keys_by_step.setdefault(line["step"], []).append(set(line["keys"]))
        for step, parts in keys_by_step.items():
            # A step that all ranks wrote down has all its samples; of a cut one each part must belong to it.
            expected_keys = set(self._reference[step]["keys"])
            union = set().union(*parts)
            wrong = not union <= expected_keys or (
                len(parts) == len(files) and union != expected_keys
            )
            self.found["wrong_samples"] += wrong
        checkpoints = _visible(place)
        after = max(checkpoints, default=0)
        self.found["older_than_newest"] += after < max(newest, visible_said)
        for folder in checkpoints.values():
            self.found["checkpoints_checked"] += 1
            self.found["damaged_checkpoints"] += not _is_complete(folder)
        # A run that is killed before it removes old ones leaves one more, also after such a run.
        assert len(checkpoints) <= max(KEEP, len(before)) + 1, (
            mesh,
            checkpoints,
        )


def _lines(files: Sequence[Path]) -> list[dict[str, Any]]:
    """All whole lines; a killed rank's last one may be cut."""
    return [
        json.loads(line)
        for file in files
        if file.exists()
        for line in file.read_text(encoding="utf-8").split("\n")[:-1]
    ]


def _visible(place: Path) -> dict[int, Path]:
    """Checkpoints by step, found without the code under test: a folder of the final name, whatever is in it."""
    names = {
        path: re.fullmatch(r"step-(\d+)\.[0-9a-f]{8}", path.name) for path in place.glob("step-*")
    }
    return {
        int(match[1]): path
        for path, match in names.items()
        # A removal that was cut off has lost its manifest first.
        if match is not None and (path / "checkpoint.json").exists()
    }


def _is_complete(folder: Path) -> bool:
    files = json.loads((folder / "checkpoint.json").read_bytes())["manifest"]["files"]
    return ".metadata" in files and all(
        (folder / name).stat().st_size == size
        and xxhash.xxh3_64_hexdigest((folder / name).read_bytes()) == digest
        for name, (size, digest) in files.items()
    )
