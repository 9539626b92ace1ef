"""What every word of the harness makes of no dataset, of one that ends before the warm-up does, and of wild clocks."""

from __future__ import annotations

import time

import pytest

from fuelrail import ImageAugment
from fuelrail.__main__ import main
from fuelrail.bench.studies.diff import load_comparable
from fuelrail.bench.studies.loader.report import LoaderOptions
from fuelrail.bench.studies.loader.run import run_loader
from fuelrail.bench.studies.train.report import load_report
from fuelrail.pipeline.format.dataset import open_dataset

pytestmark = pytest.mark.process

QUICK = (
    "--workers",
    1,
    "--batch-size",
    1,
    "--accelerator",
    "emulated:resnet50-224-h100",
    "--no-html",
)
HOUR_S = 3600.0

# Found by Python as it starts: each time that anybody looks at the wall clock it has been set, an hour on or back.
_WILD_CLOCK = f"""
import itertools, pathlib, sys, time
real, hours = time.time, itertools.cycle((0, {HOUR_S}, -{HOUR_S}))
time.time = lambda: real() + next(hours)
if "fuelrail.bench.studies.train.worker" in sys.orig_argv:
    pathlib.Path(__file__).with_name("a-rank-was-here").touch()
"""


def bench(word, dataset, out, *options):
    return main(["bench", word, str(dataset), "--out", str(out), *map(str, options)])


@pytest.mark.usefixtures("warm_ranks")
def test_a_dataset_that_ends_in_the_warm_up_gives_no_figure(dataset, tmp_path, capsys):
    assert bench("train", dataset, tmp_path, *QUICK, "--epochs", 1, "--warmup", 20) == 0
    report = load_report(tmp_path / "report.json")
    assert (report.figures, report.cut_off) == (None, None)
    printed = capsys.readouterr().out
    for said in (printed, (tmp_path / "report.md").read_text()):
        assert f": {report.window.too_short}." in said
        assert "samples/s" not in said


@pytest.mark.usefixtures("warm_ranks")
def test_scaling_over_too_few_steps_gives_no_figure(dataset, tmp_path, capsys):
    options = ("--ranks", "1", "--steps", 6, "--warmup", 5)
    assert bench("scale", dataset, tmp_path, *QUICK, *options) == 0
    report = load_comparable(tmp_path / "report.json")
    assert report.measured == []
    assert report.warnings[0].startswith("No figures: ")
    assert report.warnings[0] in " ".join(capsys.readouterr().out.split())


def test_a_wall_clock_that_jumps_moves_no_step_of_a_rank(dataset, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(_WILD_CLOCK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert (
        bench(
            "train",
            dataset,
            tmp_path / "out",
            *QUICK,
            "--steps",
            20,
            "--warmup",
            5,
        )
        == 0
    )
    assert (tmp_path / "a-rank-was-here").exists()
    report = load_report(tmp_path / "out" / "report.json")
    assert report.cut_off is None
    assert 0 < report.figures.step_time.max_ms < HOUR_S * 1e3 / 2
    assert 0 < report.figures.occupancy.mean <= 1
    assert all(phase.time.mean_ms >= 0 for phase in report.figures.phases)


def test_a_wall_clock_that_is_set_back_shortens_no_batch(dataset, monkeypatch):
    image = ImageAugment(height=32, width=48)
    options = LoaderOptions(batch_size=2, workers=1, decoder="turbo", image=image, seconds=0.3)
    real = time.time
    looks = []

    def set_back():
        looks.append(None)
        return real() - (HOUR_S if len(looks) > 1 else 0.0)

    monkeypatch.setattr(time, "time", set_back)
    run = run_loader(open_dataset(dataset), options)
    assert all(0 <= lasted < HOUR_S / 2 for lasted in run.batch_s)
