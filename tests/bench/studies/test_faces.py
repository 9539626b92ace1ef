"""Each command of the harness from Python: options as keywords, a report, and files only where they are asked for."""

from __future__ import annotations

import argparse

import msgspec
import pytest

from fuelrail.bench.measure.accelerator import load_profile
from fuelrail.bench.studies.compare.session import CompareOptions, compare
from fuelrail.bench.studies.diagnose.run import DiagnoseOptions, diagnose
from fuelrail.bench.studies.diff import DiffOptions, diff
from fuelrail.bench.studies.loader.measure import bench_loader
from fuelrail.bench.studies.loader.report import LoaderOptions
from fuelrail.bench.studies.order.describe import (
    DescribeOptions,
    describe_order,
)
from fuelrail.bench.studies.scale.report import ScaleOptions
from fuelrail.bench.studies.scale.run import scale
from fuelrail.bench.studies.train.run import bench_train
from fuelrail.bench.studies.train.settings import TrainOptions
from fuelrail.pipeline.cli import add_flags, from_flags
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.order.spec import OrderSpec

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("warm_ranks")]
QUICK = {
    "batch_size": 1,
    "steps": 12,
    "warmup": 2,
    "workers": 1,
    "model": "light",
}
KINDS = [
    TrainOptions,
    DiagnoseOptions,
    ScaleOptions,
    LoaderOptions,
    CompareOptions,
    DiffOptions,
    DescribeOptions,
]


@pytest.fixture
def work_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_command_line_without_flags_is_the_defaults(kind):
    parser = argparse.ArgumentParser()
    add_flags(parser, kind)
    assert from_flags(parser.parse_args([]), kind) == kind()


def test_train_returns_a_report_and_writes_nothing(dataset, work_folder):
    report = bench_train(dataset, **QUICK)
    assert (report.cut_off, report.window.num_measured_steps) == (None, 10)
    assert list(work_folder.iterdir()) == []


def test_train_takes_a_struct_and_an_accelerator_and_writes_what_is_asked_for(dataset, work_folder):
    options = TrainOptions(**QUICK, profile=load_profile("resnet50-224-h100"), trace=True)
    report = bench_train(
        str(dataset),
        options,
        out=work_folder / "out",
        html=False,
        leave_out=["decode"],
    )
    assert report.accelerator["name"] == "resnet50-224-h100"
    assert "left out decode" in report.warnings[0]
    assert sorted(path.name for path in (work_folder / "out").iterdir()) == [
        "records",
        "report.json",
        "report.md",
        "trace.json",
    ]
    changes = diff(work_folder / "out", report, threshold=0.5)
    assert (changes.worse, changes.differences) == ([], [])


def test_scale_returns_measured_runs(dataset, work_folder):
    report = scale(
        dataset,
        ranks=[1],
        batch_size=1,
        steps=14,
        warmup=4,
        workers=1,
    )
    assert [run.num_ranks for run in report.measured] == [1]
    assert list(work_folder.iterdir()) == []


def test_bench_loader_returns_rates(dataset, work_folder):
    report = bench_loader(dataset, batch_size=2, workers=1, seconds=0.3, repeats=1)
    assert [rate.name for rate in report.stages] == [
        "fetch",
        "parse",
        "decode",
        "collate",
    ]
    assert list(work_folder.iterdir()) == []


def test_compare_returns_the_contestants(dataset, work_folder):
    report = compare(
        dataset,
        only=["fuelrail:turbo"],
        batch_size=2,
        height=32,
        width=48,
        psnr=15,
        rounds=0,
    )
    assert [entry.name for entry in report.contestants] == ["fuelrail:turbo"]
    assert list(work_folder.iterdir()) == []


def test_describe_order_returns_figures(dataset):
    description = describe_order(dataset, OrderSpec(kind="sequential"), global_batch=4)
    assert description.figures[0].name == "fuelrail sequential"
    assert description.num_steps == 6


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"rank": 2},
            "the field 'rank' is unknown; allowed here: strategy, mesh",
        ),
        ({"ranks": 0}, "TrainOptions: at 'ranks': must be a whole number >= 1"),
        (
            {"leave_out": ["nothing"]},
            "must be one of all-reduce, decode",
        ),
        ({"steps": 9, "epochs": 1}, "steps=9 and epochs=1 exclude each other"),
        ({"trace": True}, "give out=FOLDER"),
    ],
)
def test_wrong_options_are_refused(dataset, work_folder, wrong, message):
    with pytest.raises(ConfigError, match=message):
        bench_train(dataset, **wrong)
    assert list(work_folder.iterdir()) == []


def test_a_struct_checks_its_fields():
    with pytest.raises(ConfigError, match="ranks=0 must be a whole number >= 1"):
        TrainOptions(ranks=0)
    with pytest.raises(ConfigError, match="ranks=0 must be a whole number >= 1"):
        msgspec.structs.replace(TrainOptions(), ranks=0)


def test_diagnose_chooses_itself_what_to_leave_out(dataset):
    with pytest.raises(ConfigError, match="diagnose chooses itself"):
        diagnose(dataset, leave_out=["decode"])
