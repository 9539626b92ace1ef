"""The comparison on the command line, with those of the other loaders that the test environment has anyway."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import cv2
import msgspec
import numpy as np
import pytest

import fuelrail
from fuelrail.__main__ import main
from fuelrail.bench.peers.peer import (
    PEERS,
    RECIPES,
    Work,
    contestants,
    decode_sample,
    is_there,
    seen_box,
    shrink_factor,
)
from fuelrail.bench.peers.process import (
    Failure,
    Task,
    perform,
    read_samples,
    reference,
)
from fuelrail.bench.studies.compare.report import load_compare_report
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.format.dataset import open_dataset
from support.datasets import build_dataset

pytestmark = pytest.mark.process

SIZE = (
    "--height",
    32,
    "--width",
    48,
    "--batch-size",
    2,
    "--no-html",
    "--cpus",
    0,
)


def bench(dataset, out, *options):
    return main(
        [
            "bench",
            "compare",
            str(dataset),
            "--out",
            str(out),
            *map(str, SIZE),
            *map(str, options),
        ]
    )


def test_loaders_are_checked_then_timed_then_timed_again(dataset, tmp_path, capsys):
    out = tmp_path / "out"
    only = (
        "--only",
        "fuelrail:turbo",
        "--only",
        "wds:cv2fast",
        "--psnr",
        15,
        "--seconds",
        0.3,
    )
    assert bench(dataset, out, *only, "--rounds", 1) == 0
    report = load_compare_report(out / "report.json")
    assert [(entry.name, len(entry.runs), entry.left_out) for entry in report.contestants] == [
        ("fuelrail:turbo", 1, None),
        ("wds:cv2fast", 1, None),
    ]
    for entry in report.contestants:
        assert entry.check.fault is None
        assert entry.check.num_missing == 0
        assert entry.runs[0].peak_memory_bytes > 50 << 20
        (run,) = entry.runs
        assert (
            run.doubt or run.images_per_s > 0 < run.num_batches
        )  # a machine that stands still is not a fault of ours
    assert (report.cut_off, report.num_rounds) == (None, 1)
    assert str(dataset) not in (out / "report.json").read_text()
    assert "speed-up of fuelrail:turbo" in capsys.readouterr().out
    # Another round joins the first; another size does not.
    assert bench(dataset, out, *only, "--rounds", 1, "--continue") == 0
    more = load_compare_report(out / "report.json")
    assert [run.round for run in more.contestants[1].runs] == [0, 1]
    reference, contestant = more.contestants
    for beside, run in zip(reference.runs, contestant.runs, strict=True):
        assert beside.doubt or run.reference_images_per_s > 0
    assert bench(dataset, out, *only, "--continue", "--batch-size", 1) == 2
    assert "has another work" in capsys.readouterr().err
    assert load_compare_report(out / "report.json") == more


def test_images_that_differ_and_missing_packages_keep_loaders_out(
    dataset, tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(
        PEERS,
        "mds",
        PEERS["mds"]._replace(needs=("no_such_module_of_streaming",)),
    )
    assert (
        bench(
            dataset,
            tmp_path,
            "--only",
            "fuelrail:turbo",
            "--only",
            "mds",
            "--psnr",
            90,
            "--rounds",
            2,
        )
        == 0
    )
    ours, *theirs = load_compare_report(tmp_path / "report.json").contestants
    assert "90 dB are required" in ours.left_out
    assert ours.runs == []
    assert {entry.peer for entry in theirs} == {"mds"}
    assert all("pip install mosaicml-streaming" in entry.left_out for entry in theirs)
    printed = capsys.readouterr()
    assert "Left out\nfuelrail:turbo" in printed.out
    assert "pip install mosaicml-streaming" in printed.err


def test_what_a_peer_raises_is_its_answer(dataset, tmp_path):
    """A process of its own, as it is run: the failure is said, and the exit is clean."""
    work = Work(
        height=32,
        width=48,
        batch_size=2,
        num_workers=1,
        seed=0,
        num_samples=24,
        source_wh=(96, 64),
        cameras=tuple(camera.channel for camera in open_dataset(dataset).manifest.cameras),
    )
    task = Task(
        action="time",
        peer="loose",
        recipe="cv2",
        folder=str(tmp_path / "empty"),
        dataset=str(dataset),
        work=work,
        whole_epoch=False,
        cpus=(0,),
        result=str(tmp_path / "result.json"),
        arrivals=str(tmp_path / "arrivals"),
    )
    with pytest.raises(FileNotFoundError):
        perform(task)
    (tmp_path / "task.json").write_bytes(msgspec.json.encode(task))
    command = [
        sys.executable,
        "-m",
        "fuelrail.bench.peers.process",
        str(tmp_path / "task.json"),
    ]
    environment = {
        "PYTHONPATH": str(Path(fuelrail.__file__).parents[1]),
        "PATH": "",
    }
    subprocess.run(command, env=environment, capture_output=True, check=True)
    answer = msgspec.json.decode((tmp_path / "result.json").read_bytes(), type=Failure)
    assert "FileNotFoundError" in answer.message


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_shows_the_same_part_of_a_picture(recipe):
    """A smooth picture, so that filters matter little: what is left is where its pixels come from."""
    x, y = np.meshgrid(np.arange(400), np.arange(240))
    picture = np.stack((x * 255 / 400, y * 255 / 240, (x + y) * 255 / 640), axis=-1).astype(
        np.uint8
    )
    encoded = cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, 100])[1].tobytes()
    work = Work(
        height=64,
        width=176,
        batch_size=1,
        num_workers=1,
        seed=0,
        num_samples=2,
        source_wh=(400, 240),
        cameras=("c",),
    )
    decoded = decode_sample([encoded], recipe, np.empty(work.sample_shape, np.uint8))[0]
    assert np.abs(decoded.astype(float) - reference(encoded, work)).max() <= 3


def test_what_is_seen_fills_the_width_and_ends_at_the_bottom():
    left_edge, upper, right, lower = seen_box((1600, 900), (704, 256))
    assert (left_edge, right, lower) == (0, 1600, 900)
    assert upper == pytest.approx(140 / 396 * 900)
    assert shrink_factor((1600, 900), (704, 256)) == 2
    assert shrink_factor((1600, 900), (100, 50)) == 8
    assert shrink_factor((640, 480), (704, 256)) == 1


def test_samples_are_numbered_by_key(dataset):
    opened = open_dataset(dataset)
    numbers = [sample.number for sample in read_samples(opened)]
    assert numbers == list(range(24))
    assert len({sample.images for sample in read_samples(opened)}) == 24
    assert next(iter(read_samples(opened, [3]))).images == list(read_samples(opened))[3].images


def test_every_peer_is_listed_once_and_ours_come_along():
    names = [contestant.name for contestant in contestants()]
    assert len(names) == len(set(names))
    assert {contestant.peer for contestant in contestants(("loose:pil",))} == {
        "fuelrail",
        "loose",
    }
    assert [contestant.name for contestant in contestants(("fuelrail:turbo", "loose:pil"))] == [
        "fuelrail:turbo",
        "loose:pil",
    ]
    assert is_there("fuelrail") is None
    with pytest.raises(ConfigError):
        contestants(("nothing",))


def test_compare_takes_one_split_of_several(tmp_path, capsys):
    build_dataset(tmp_path / "two", {"train": (6, 6), "val": (5, 3)})
    only = ("--only", "fuelrail:turbo", "--psnr", 15, "--rounds", 0)
    assert bench(tmp_path / "two", tmp_path / "out", *only) == 2
    assert "choose it with --split" in capsys.readouterr().err
    assert bench(tmp_path / "two", tmp_path / "out", *only, "--split", "nope") == 2
    assert bench(tmp_path / "two", tmp_path / "out", *only, "--split", "val") == 0
    report = load_compare_report(tmp_path / "out" / "report.json")
    assert (
        report.dataset.split,
        report.dataset.num_samples,
        report.work.num_samples,
    ) == (
        "val",
        8,
        8,
    )
