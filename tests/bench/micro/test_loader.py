"""The loader's benchmarks still run, and what they report fits together."""

from __future__ import annotations

import json

import pytest

from fuelrail.bench.micro import loader_endurance, loader_first_batch, loader_overhead
from fuelrail.bench.micro.decode import made_image

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def test_overhead(tmp_path, capsys):
    out = tmp_path / "report.json"
    assert loader_overhead.main([str(tmp_path), "--samples", "8", "--rounds", "1", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["share_of_whole"]["whole"] == 1
    assert 0 < report["share_of_whole"]["without decoding"] < 1
    assert report["machine"]["packages"]
    assert "without decoding" in capsys.readouterr().out


def test_endurance(tmp_path):
    out = tmp_path / "report.json"
    arguments = [str(tmp_path), "--samples", "8", "--epochs", "4", "--cycles", "4", "--out", str(out)]
    assert loader_endurance.main(arguments) == 0
    report = json.loads(out.read_text())
    assert set(report["same_batches"].values()) == {True}
    assert report["epochs"]["turns"] == report["cycles"]["turns"] == 4
    assert report["threads_before_after"][0] == report["threads_before_after"][1]
    assert report["files_before_after"][0] == report["files_before_after"][1]


def test_a_line_that_grows_is_seen():
    line = loader_endurance._line([100 + 7 * turn for turn in range(20)])
    assert line.slope_bytes == pytest.approx(7)
    assert line.error_bytes == pytest.approx(0, abs=1e-9)
    assert loader_endurance._line([5] * 20).slope_bytes == 0


@pytest.mark.parametrize("recipe", loader_first_batch.RECIPES)
def test_the_recipes_give_what_the_loader_gives(recipe):
    planes = loader_first_batch.decode_image(made_image(), recipe)
    assert planes.shape == (3, 256, 704)
    assert planes.flags.c_contiguous


def test_first_batch(tmp_path):
    out = tmp_path / "report.json"
    arguments = [str(tmp_path), "--samples", "16", "--quick", "--recipes", "half", "--large", "70000"]
    arguments += ["--out", str(out)]
    assert loader_first_batch.main(arguments) == 0
    report = json.loads(out.read_text())
    assert [entry["name"] for entry in report["candidates"]] == [
        "fuelrail", "fuelrail, 70000 samples", "torch workers, webdataset, half",
    ]  # fmt: skip
    assert report["candidates"][0]["ratio"] == 1
    assert all(entry["median_s"] > 0 for entry in report["candidates"])
