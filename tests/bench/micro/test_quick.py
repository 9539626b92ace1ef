"""Each micro-benchmark once on little data: it runs, its candidates do the same work, and its report is whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields

import numpy as np
import pyarrow as pa
import pytest
import safetensors.numpy
import torch.distributed as dist

from fuelrail.bench.micro import timing
from fuelrail.bench.micro.loaders import decode, layers, overhead
from fuelrail.bench.micro.pipeline import metadata
from fuelrail.bench.micro.sharding import listed, memory, rate
from fuelrail.bench.micro.trainer import checkpoint_kills, checkpoint_stall
from fuelrail.pipeline.format.index.samples import SampleIndex, write_index
from fuelrail.pipeline.sample.schema import GEOMETRY, META, decode_sample
from fuelrail.pipeline.transforms.image import ImageAugment
from support.cameras import CHANNELS, KEY, NUM_BOXES, SOURCE_WH, made_image, sample_members
from support.datasets import build_dataset
from support.manifest_world import write_wide
from support.pictures import psnr_db
from support.source_world import make_world

pytestmark = [pytest.mark.process, pytest.mark.slow]


@pytest.fixture
def quick(tmp_path, capsys):
    """Run a benchmark; returns its report and what it printed. It leaves nothing else in its folder."""

    def run(main, *words):
        out = tmp_path / "report" / "report.json"
        out.parent.mkdir(exist_ok=True)
        assert not main([*map(str, words), "--out", str(out)])
        assert [path.name for path in out.parent.iterdir()] == ["report.json"]
        return json.loads(out.read_text()), capsys.readouterr().out

    return run


def test_they_run_as_the_pages_print_them(tmp_path):
    """``python -m fuelrail.bench.micro.ROOM.NAME`` in any folder, without a path of modules."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-m", "fuelrail.bench.micro.pipeline.metadata", "--help"]
    assert (
        subprocess.run(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, check=False).returncode == 0
    )


def test_sharding_and_a_case_that_is_measured_again(quick, tmp_path, capsys):
    out = tmp_path / "report"
    out.mkdir()
    words = ["--quick", "--cpus", 1, "--dir", out]
    report, printed = quick(rate.main, *words)
    assert [comparison["title"] for comparison in report["comparisons"]] == list(rate.CASES)
    expected = {"webdataset.ShardWriter", "fuelrail shard, the whole command", "floor: with SHA-256 and XXH3"}
    for comparison in report["comparisons"]:
        names = {entry["name"] for entry in comparison["entries"]}
        assert expected <= names
        assert not names & set(rate.CASES[comparison["title"]].leave_out)
        for figures in ("mb_per_s", "cpu_s_per_gb"):
            assert set(report[figures][comparison["title"]]) == names
    assert list(report["num_files"].values()) == [6 * 6, 6 * 7, 6 * 6, 6 * 6]
    assert set(report["share_of_floor"]) == set(report["commits"]) == set(rate.CASES)
    assert all(0 < low <= middle <= high for low, middle, high in report["share_of_floor"].values())
    assert report["num_cpus"] == 1
    assert "MB/s" in printed

    first, *_, last = rate.CASES
    again, _ = quick(rate.main, *words, "--case", last)
    assert [comparison["title"] for comparison in again["comparisons"]] == list(rate.CASES)
    assert again["mb_per_s"][first] == report["mb_per_s"][first]
    assert again["mb_per_s"][last] != report["mb_per_s"][last]
    path = out / "report.json"
    path.write_text(path.read_text().replace('"cpu": "', '"cpu": "no '))
    other, _ = quick(rate.main, *words, "--case", last)
    assert list(other["mb_per_s"]) == [last], "figures of another machine are left out"
    with pytest.raises(SystemExit):
        rate.main(["--quick", "--cpus", "100000", "--dir", str(out)])
    assert "--cpus 100000: there are" in capsys.readouterr().err


def test_sharding_of_lists(quick, tmp_path, monkeypatch):
    monkeypatch.setattr(listed, "ROUNDS", 1)
    report, printed = quick(listed.main, "--rows", 450, "--samples", 3)
    assert report["scan"]["rows"] == 450
    assert [one["form"] for one in report["rates"]] == list(listed.FORMS)
    assert printed
    (tmp_path / "source").mkdir()
    write_wide(make_world(num_frames=3), tmp_path / "source", "parquet")
    report, _ = quick(listed.main, "--sources", f"manifest:{tmp_path / 'source'}")
    (found,) = report["scans"]
    assert (found["kind"], found["frames"], found["cameras"]) == ("manifest", 6, 3)
    assert found["cpu_us_per_frame"] > 0


def test_memory_of_plans_and_runs(quick, tmp_path):
    pytest.importorskip("s3fs")
    (tmp_path / "report").mkdir()
    report, printed = quick(memory.main, "--quick", "--dir", tmp_path / "report")
    found = [(entry["what"], entry["count"]) for entry in report["measured"]]
    more = memory.MORE_SAMPLES
    runs = [(("run", n), ("reshard", n), ("append", n + more), ("listing", n)) for n in (5, 50)]
    # 125 clips of 40 frames, every third of them at night.
    assert found == [("plan", 5000), ("plan with --select", 83 * 40), *runs[0], *runs[1]]
    assert all(entry["peak_rss_bytes"] >= entry["rss_before_bytes"] > 0 for entry in report["measured"])
    assert "plan, 5,000 samples" in printed


def test_metadata(quick, monkeypatch):
    monkeypatch.setattr(metadata, "ROWS_PER_BATCH", 40)
    report, printed = quick(lambda words: timing.main(words, "metadata", metadata.measure), "--quick")
    assert [len(comparison["entries"]) for comparison in report["comparisons"]] == [2, 2, 2]
    assert all(entry["speedup"] > 0 for comparison in report["comparisons"] for entry in comparison["entries"])
    assert "metadata of one sample" in printed


def test_both_readers_of_metadata_find_the_same(tmp_path):
    members = sample_members()
    sample = decode_sample(KEY, members)
    assert len(sample.boxes.boxes3d) == NUM_BOXES
    assert len(sample.geometry.intrinsics) == len(CHANNELS)
    theirs = safetensors.numpy.load(members[GEOMETRY])
    for f in fields(sample.geometry):
        np.testing.assert_array_equal(theirs[f.name], getattr(sample.geometry, f.name))
    assert json.loads(members[META])["cameras"]["cam_back"]["width"] == sample.meta.cameras["cam_back"].width

    rows = list(metadata.index_rows(50))
    write_index(tmp_path / "index.arrow", rows, metadata._FIELDS, ["raw"])
    index = SampleIndex(tmp_path / "index.arrow")
    with pa.memory_map(str(tmp_path / "index.arrow")) as source:
        table = pa.ipc.open_file(source).read_all()
        for number in (0, 49):
            row = index.row(number)
            assert row == rows[number]
            stored = {**row._asdict(), "members": [member._asdict() for member in row.members]}
            assert metadata.pyarrow_row(table, number, index.names, index.codecs) | {"is_part": False} == stored


def test_decoders(quick, tmp_path):
    report, printed = quick(decode.main, "--quick")
    assert "images/s  fuelrail turbo" in printed
    assert report["num_images"] == 2
    assert set(report["images_per_s"]) == {"2 images, 1 thread", "2 images, 2 threads"}
    with pytest.raises(SystemExit, match="no JPEG files of 1600x900"):
        decode.main(["--images", str(tmp_path / "report")])


def test_all_decoders_do_the_same_work():
    encoded = made_image()
    assert 100_000 < len(encoded) < 200_000
    (image_map,) = ImageAugment(height=256, width=704).draw([SOURCE_WH], seed=0, epoch=0, sample=0)
    pictures = {}
    for name, work in decode.decoders(image_map).items():
        pictures[name] = np.zeros((3, 256, 704), np.uint8)
        work(encoded, pictures[name])
    reference = pictures["fuelrail pillow (full decode, antialiased)"]
    assert [name for name, picture in pictures.items() if psnr_db(picture, reference) <= 32.0] == []


def test_layers(quick, tmp_path):
    report, _ = quick(layers.main, tmp_path / "work", "--samples", 16, "--rounds", 1)
    assert report["samples_per_s"].keys() == {"without layers", "three layers"}
    assert report["ratio"] > 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_loaders_overhead(quick, tmp_path):
    report, printed = quick(overhead.main, tmp_path / "work", "--samples", 8, "--rounds", 1)
    assert report["share_of_whole"]["whole"] == 1
    assert 0 < report["share_of_whole"]["without decoding"] < 1
    assert report["machine"]["packages"]
    assert "without decoding" in printed


def test_loops_with_and_without_a_save(tmp_path):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        stall, megabytes = checkpoint_stall.measure(tmp_path, 12, 1, "sleep")
    finally:
        dist.destroy_process_group()
    # One layer of 1024 x 1024, thrice: parameters and two moments.
    assert megabytes == pytest.approx(3 * 4 * 1024**2 / 1e6, rel=0.02)
    assert 0 < stall.call_s < stall.save_s
    assert stall.without_s >= stall.num_steps * 0.02
    assert stall.ratio == stall.background_stall_s / stall.waited_stall_s
    assert [path.name[:13] for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000004"]


def test_runs_survive_a_few_kills(quick, tmp_path, monkeypatch):
    """Hundreds of kills on all meshes are in ``bench/results/checkpoint_kills.json``."""
    monkeypatch.setattr(checkpoint_kills, "_PATIENCE_S", 280)  # a busy machine is no fault
    meshes = ["one", "fsdp2", "pipeline2"]
    monkeypatch.setattr(checkpoint_kills, "MESHES", {name: checkpoint_kills.MESHES[name] for name in meshes})
    build_dataset(tmp_path / "data", {"train": (16, 16, 16)})
    report, _ = quick(checkpoint_kills.main, tmp_path / "work", tmp_path / "data", "--kills", 3)
    assert report["kills"] == 3
    assert report["resumed_on_another_mesh"] > 0
    assert report["checkpoints_checked"] > 0
    assert report["wrong_samples"] == report["damaged_checkpoints"] == report["older_than_newest"] == 0
    assert report["largest_loss_difference"] <= 2e-6
