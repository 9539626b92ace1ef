"""Staging is killed at random points: it resumes, takes no more disk than the source has, and leaves nothing behind."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fuelrail.pipeline.errors import DatasetError
from fuelrail.sharding.engines.local import LocalEngine
from fuelrail.sharding.planning.recipe import make_recipe
from fuelrail.sharding.progress import Quiet
from fuelrail.sharding.run import shard
from fuelrail.sharding.sources.registry import SourceSpec
from fuelrail.sharding.write.staging import Bands
from support.forked import fork, join
from support.manifest_world import as_video, write_wide
from support.neutral_source import Neutral, install_plugin, write_neutral
from support.sharding import digests
from support.source_world import make_world

pytestmark = pytest.mark.timeout(1800)  # dozens of runs; a busy machine is not a fault

NUM_CLIPS = 3
WORK = ".fuelrail"


@pytest.fixture
def source(tmp_path, monkeypatch):
    """The root of a source that is read by clip; its location is also a plug-in's."""
    install_plugin(
        tmp_path / "site",
        "neutral_by_clip",
        "support.neutral_source:NeutralByClip",
    )
    monkeypatch.syspath_prepend(tmp_path / "site")
    root = tmp_path / "source"
    root.mkdir()
    write_neutral(make_world(NUM_CLIPS, 3, noise=True), root)
    return root


def run(source: Path, out: Path, num_workers: int = 1, **changes):
    recipe = make_recipe(seed=7, shard_size_bytes=1 << 16, splits={"train": 1.0}, **changes)
    spec = SourceSpec("neutral_by_clip", str(source), {"images": "made"})
    return shard(
        spec,
        out=out,
        recipe=recipe,
        num_workers=num_workers,
        progress=Quiet(),
        engine=LocalEngine(num_workers, "threads"),
    )


def kill_at(point: int) -> None:
    """Let this process die at this point from now on: an image is about to be made, or a file is or was renamed."""
    num_points = 0
    replace = Path.replace
    make = Neutral.make_images

    def count():
        nonlocal num_points
        num_points += 1
        if num_points == point:
            os.kill(os.getpid(), signal.SIGKILL)

    def dying_replace(self, target):
        count()
        result = replace(self, target)
        count()
        return result

    def dying_make(self, refs):
        for image in make(self, refs):
            count()
            yield image

    Path.replace = dying_replace
    Neutral.make_images = dying_make


def num_made_and_run(source: Path, out: Path) -> None:
    """Run, and leave in a file beside OUT how many images were made."""
    Neutral.num_made = 0
    run(source, out)
    out.with_suffix(".made").write_text(str(Neutral.num_made))


def complete_clips(out: Path) -> int:
    staging = out / WORK / "staging"
    return len(list(staging.glob("*.index")))


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def check_killed_and_resumed(source: Path, out: Path, point: int, expected: dict[str, str]) -> bool:
    """Die at this point, look at what is there, and resume; whether there was such a point."""
    world = make_world(NUM_CLIPS, 3, noise=True)
    num_images = sum(len(frame.images) for _, _, frame in world.frames())

    def work():
        kill_at(point)
        run(source, out)

    status = join(fork(work))
    assert status in (0, -signal.SIGKILL)
    if status == 0:
        assert digests(out) == expected
        return False
    staging = out / WORK / "staging"
    source_bytes = sum(
        path.stat().st_size for path in source.rglob("*") if path.suffix in (".jpg", ".npy")
    )
    staged = bytes_in(staging) if staging.exists() else 0
    indexes = sum(path.stat().st_size for path in staging.glob("*ind*")) + sum(
        path.stat().st_size for path in staging.glob("*.arrow")
    )
    assert staged - indexes <= source_bytes
    num_clips_kept = complete_clips(out)
    assert join(fork(lambda: num_made_and_run(source, out))) == 0
    assert digests(out) == expected, f"killed at point {point}"
    assert not (out / WORK).exists()
    # Images of clips that were whole are not made again; a list that was written last stands for its clip.
    assert (
        int(out.with_suffix(".made").read_text())
        == num_images * (NUM_CLIPS - num_clips_kept) // NUM_CLIPS
    )
    return True


def test_a_disk_without_room_is_refused_before_anything_is_staged(source, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    Neutral.num_made = 0
    with pytest.raises(
        DatasetError,
        match=r"takes with the shards about 0\.\d GB.*0\.0 GB are free",
    ):
        run(source, tmp_path / "out")
    assert Neutral.num_made == 0


def test_staged_members_go_when_their_shards_are_finished(source, tmp_path, monkeypatch):
    staged_bytes = []
    on_disk = []
    out = tmp_path / "out"
    finished = Bands.finished

    class Watch(Quiet):
        def shard_done(self, shard):
            staged_bytes.append(
                sum(path.stat().st_size for path in (out / WORK / "staging").glob("*.bin"))
            )

    def watched(self, number):
        on_disk.append(
            sum(path.stat().st_size for path in out.rglob("*") if path.suffix in (".tar", ".bin"))
        )
        finished(self, number)

    monkeypatch.setattr(Bands, "finished", watched)
    spec = SourceSpec("neutral_by_clip", str(source), {"images": "made"})
    recipe = make_recipe(seed=7, shard_size_bytes=1 << 16, splits={"train": 1.0})
    shard(
        spec,
        out=out,
        recipe=recipe,
        num_workers=1,
        progress=Watch(),
        engine=LocalEngine(1),
    )
    assert len(staged_bytes) > 1
    assert staged_bytes == sorted(set(staged_bytes), reverse=True)
    assert not staged_bytes[-1]
    shards = [path.stat().st_size for path in out.glob("*.tar")]
    assert max(on_disk) < sum(shards) + max(shards), (
        "a shard more than the dataset, for each is a band here"
    )


def test_samples_that_are_not_selected_are_not_staged(source, tmp_path):
    Neutral.num_made = 0
    run(source, tmp_path / "out", limit=2)
    assert Neutral.num_made == 2 * len(make_world(1, 1).cameras)


@pytest.fixture
def expected(source, tmp_path):
    run(source, tmp_path / "whole")
    return digests(tmp_path / "whole")


# Dozens of points; of each the whole run is done twice.
POINT_STEP = 1 if os.environ.get("FUELRAIL_ATTACK") == "all" else 5


@pytest.mark.slow
def test_killed_at_every_point_a_run_resumes(source, tmp_path, expected):
    deaths = 0
    for point in range(1, 1000, POINT_STEP):
        if not check_killed_and_resumed(source, tmp_path / "out", point, expected):
            break
        shutil.rmtree(tmp_path / "out")
        deaths += 1
    assert deaths * POINT_STEP > 30


@pytest.mark.costly
def test_killed_again_and_again_a_run_resumes(source, tmp_path, expected):
    """Each death comes a little later than the one before it, on what that one left."""
    out = tmp_path / "out"
    for point in (3, 5, 14, 17, 9, 11):

        def work(point=point):
            kill_at(point)
            run(source, out)

        if join(fork(work)) == 0:
            break
    else:
        run(source, out)
    assert digests(out) == expected
    assert not (out / WORK).exists()


@pytest.mark.process
def test_a_command_killed_while_it_stages_video_finishes_when_it_is_given_again(
    tmp_path,
):
    """As it happens: deaths at random times of a run whose clips are decoded from video."""
    root = tmp_path / "source"
    out = tmp_path / "out"
    root.mkdir()
    write_wide(make_world(6, 8), root, "jsonl")
    as_video(make_world(6, 8), root, "frames")
    options = [
        "-o",
        "boxes_in=global",
        "-o",
        "lidar_columns=[x, y, z, intensity, ring]",
        "--splits",
        "train=1",
    ]

    def command(to: Path) -> list[str]:
        return [
            sys.executable,
            "-m",
            "fuelrail",
            "shard",
            f"manifest:{root}",
            str(to),
            *options,
            "--workers",
            "2",
        ]

    expected_run = subprocess.run(command(tmp_path / "whole"), capture_output=True, text=True)
    assert expected_run.returncode == 0, expected_run.stderr
    draw = random.Random(1)
    staging = out / WORK / "staging"
    indexes = set[str]()
    for _ in range(3):
        process = subprocess.Popen(
            command(out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while process.poll() is None and {path.name for path in staging.glob("*.index")} <= indexes:
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.02))
        process.send_signal(signal.SIGKILL)
        process.wait()
        indexes = {path.name for path in staging.glob("*.index")}
    finished = subprocess.run(command(out), capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert digests(out) == digests(tmp_path / "whole")
    assert not (out / WORK).exists()
