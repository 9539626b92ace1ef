from __future__ import annotations

import json

import msgspec
import pytest

from fuelrail import ImageAugment
from fuelrail.__main__ import main
from fuelrail.bench.measure.limits import jpeg_limit, measure_limits
from fuelrail.bench.measure.machine import peak_memory_bytes
from fuelrail.bench.studies.loader.measure import bench_loader
from fuelrail.bench.studies.loader.report import LoaderOptions, LoaderReport
from fuelrail.bench.studies.loader.run import run_loader
from fuelrail.bench.studies.loader.stages import measure_stages, record_stages
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.format.dataset import open_dataset
from support.datasets import build_dataset

pytestmark = pytest.mark.slow

OPTIONS = LoaderOptions(
    batch_size=2,
    workers=2,
    decoder="turbo",
    image=ImageAugment(height=32, width=48),
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "tiny"
    build_dataset(folder, {"train": (5, 4), "val": (1,)})
    return folder


def bench(dataset, out, *options):
    return main(["bench", "loader", str(dataset), "--out", str(out), *map(str, options)])


def test_stages_are_recorded_with_what_went_into_them(dataset):
    recorded = record_stages(open_dataset(dataset), OPTIONS, 3)
    assert [entry.stage.name for entry in recorded] == [
        "fetch",
        "parse",
        "decode",
        "collate",
    ]
    assert [len(entry.items) for entry in recorded] == [6, 6, 6, 3]
    assert [entry.per_batch for entry in recorded] == [
        False,
        False,
        False,
        True,
    ]
    rates = measure_stages(recorded, 2, 0.0)
    assert [(rate.name, rate.num_threads) for rate in rates] == [
        ("fetch", 1),
        ("parse", 1),
        ("decode", 2),
        ("collate", 1),
    ]


def test_more_batches_than_an_epoch_are_recorded_over_epochs(dataset):
    recorded = record_stages(open_dataset(dataset), OPTIONS, 6)  # an epoch has four
    assert [len(entry.items) for entry in recorded] == [12, 12, 12, 6]


def test_limits_of_frame_shards(tmp_path):
    build_dataset(tmp_path / "tiny", {"train": (8,)}, layout="frame")
    opened = open_dataset(tmp_path / "tiny")
    items = {entry.stage.name: entry.items for entry in record_stages(opened, OPTIONS, 2)}
    limits = measure_limits(
        items["parse"],
        parsed=items["decode"],
        skipped={"lidar_top"},
        output_bytes=2 * 3 * 32 * 48,
        num_threads=1,
        seconds=0.0,
        dataset=opened,
    )
    assert "zstd" in [rate.name for rate in limits]


def test_limits_are_of_what_the_loader_reads(dataset):
    opened = open_dataset(dataset)
    items = {entry.stage.name: entry.items for entry in record_stages(opened, OPTIONS, 2)}
    picture = bytes(2 * 3 * 32 * 48)
    device = bytearray(2 * 3 * 32 * 48)

    def to_device(_):  # emulated: it takes what a copy takes
        device[:] = picture

    limits = measure_limits(
        items["parse"],
        parsed=items["decode"],
        skipped={"lidar_top"},
        output_bytes=len(picture),
        num_threads=1,
        seconds=0.0,
        dataset=None,
        to_device=to_device,
    )
    assert limits[-1].num_threads == 1
    names = [rate.name for rate in limits]
    # Images of 96 x 64 that end up 48 wide are decoded at half size.
    assert names[-3:] == [
        "libjpeg-turbo at 1/2",
        "libjpeg-turbo at full size",
        "host to device",
    ]
    assert jpeg_limit(limits).name == "libjpeg-turbo at 1/2"
    assert "zstd" in names


def test_a_measurement_is_reported(dataset, tmp_path, capsys):
    out = tmp_path / "out"
    options = (
        "--batch-size",
        2,
        "--workers",
        1,
        "--seconds",
        0.8,
        "--repeats",
        2,
    )
    assert bench(dataset, out, *options) == 0
    text = (out / "report.json").read_text()
    report = msgspec.json.decode(text, type=LoaderReport)
    assert (report.schema, report.version) == ("fuelrail-bench-loader", 6)
    assert len(report.runs) == 2
    figures = report.figures
    assert figures.samples_per_s.low <= figures.samples_per_s.median <= figures.samples_per_s.high
    assert figures.images_per_s.median == pytest.approx(2 * figures.samples_per_s.median)
    assert figures.cpu_s_per_1000_images == pytest.approx(figures.cpu_ms_per_sample.median / 2)
    # Less than this process has now, as a parent's peak would not be: nothing was freed that large.
    assert 2**20 < figures.peak_rss_bytes <= peak_memory_bytes()
    assert "## Machine, dataset, options" in (out / "report.md").read_text()
    assert str(dataset) not in text
    assert "How fast can this dataset be loaded here?" in (out / "report.html").read_text()
    printed = capsys.readouterr().out
    for word in (
        "samples/s",
        "per 1,000 images",
        "first batch",
        "xxh3 digest",
        report.figures.bound.finding,
    ):
        assert word in printed


@pytest.mark.process
@pytest.mark.filterwarnings("ignore")  # Ray's own, of its dependencies
@pytest.mark.parametrize("where", ["process", "node", "remote"])
def test_another_place_is_measured_beside_threads_of_this_process(
    dataset, tmp_path, monkeypatch, where, request
):
    if where == "remote":
        ray = pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")
        request.addfinalizer(ray.shutdown)  # of the cluster that the measurement starts
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)  # what the measurement sets is gone afterwards
    report = bench_loader(
        dataset,
        batch_size=2,
        workers=1,
        seconds=1.0,
        repeats=2,
        where=where,
        out=tmp_path / "out",
        html=False,
    )
    thread_rate = next(rate for rate in report.limits if rate.name == "the loader in threads here")
    assert thread_rate.samples_per_s > 0
    figures = report.figures
    assert figures.samples_per_s.median > 0
    assert 0 < figures.trainer_cpu_ms_per_sample.median < figures.cpu_ms_per_sample.median
    assert f"where='{where}'" in (tmp_path / "out" / "report.md").read_text()


def test_an_address_of_ray_is_for_remote_batches_alone(dataset):
    with pytest.raises(
        ConfigError,
        match="a Ray address needs where='remote', got address 'auto' without it",
    ):
        bench_loader(dataset, where="process", ray_address="auto")


def test_a_run_too_short_gives_no_figure_and_says_so(dataset, tmp_path, capsys):
    out = tmp_path / "out"
    assert (
        bench(
            dataset,
            out,
            "--batch-size",
            2,
            "--seconds",
            0.001,
            "--repeats",
            1,
            "--json",
            "--no-html",
        )
        == 0
    )
    assert sorted(path.name for path in out.iterdir()) == [
        "report.json",
        "report.md",
    ]
    printed = json.loads(capsys.readouterr().out)
    assert printed["figures"] is None
    assert "no run became steady" in printed["too_short"]


def test_an_interrupted_measurement_reports_its_finished_rounds_as_partial(
    dataset, tmp_path, capsys, monkeypatch
):
    calls = []

    def interrupted(*arguments, **keywords):
        calls.append(arguments)
        if len(calls) == 3:  # the warm-up, one round, and then
            raise KeyboardInterrupt
        return run_loader(*arguments, **keywords)

    monkeypatch.setattr("fuelrail.bench.studies.loader.run.run_loader", interrupted)
    options = ("--batch-size", 2, "--seconds", 0.8, "--repeats", 5, "--no-html")
    assert bench(dataset, tmp_path / "out", *options) == 130
    report = msgspec.json.decode((tmp_path / "out" / "report.json").read_bytes(), type=LoaderReport)
    assert report.cut_off == "it was interrupted after 1 of 5 rounds"
    assert len(report.runs) == 1
    assert "the report is partial" in capsys.readouterr().err


@pytest.mark.parametrize("interrupted", ["run_loader", "record_stages", "measure_limits"])
def test_interrupted_before_a_whole_round_it_says_that_there_is_no_report(
    dataset, tmp_path, capsys, monkeypatch, interrupted
):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"fuelrail.bench.studies.loader.run.{interrupted}", interrupt)
    out = tmp_path / "out"
    assert bench(dataset, out, "--batch-size", 2, "--seconds", 0.01, "--no-html") == 130
    assert capsys.readouterr().err == (
        "fuelrail: interrupted before anything was measured whole: no report was written\n"
    )
    assert list(out.iterdir()) == []
