"""The restore benchmark: each loader that is installed goes on exactly where its state stands."""

from __future__ import annotations

import gc
import importlib.util
import json

import pytest

from fuelrail.bench.micro import restore
from fuelrail.bench.micro.restore_loaders import KINDS

pytestmark = pytest.mark.slow

NUM = 13_000
NAMES = ["fuelrail", "torchdata-webdataset", "mosaicml-streaming", "litdata"]


@pytest.fixture
def in_process(monkeypatch, capsys):
    """Children run here instead of in processes of their own."""

    def run(options, name, doing):
        arguments = [str(options.work), "--samples", str(options.samples), "--child", name, doing]
        assert restore.main(arguments) == 0
        return json.loads(capsys.readouterr().out.strip().splitlines()[-1])

    monkeypatch.setattr(restore, "_run", run)


# torchdata calls a deprecated function of torch; webdataset leaves closing the shard it was reading to the collector.
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", NAMES)
def test_starts_go_on_where_the_epoch_was(in_process, tmp_path, name):
    for module in KINDS[name].modules:
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            pytest.skip(f"{module} is not installed (extra 'peers')")
    out = tmp_path / "restore.json"
    arguments = [str(tmp_path / "work"), "--samples", str(NUM), "--loaders", name, "--rounds", "1", "--out", str(out)]
    assert restore.main(arguments) == 0
    gc.collect()  # while this test's warning filters hold
    loader = json.loads(out.read_text())["loaders"][0]
    assert loader["failure"] is None
    assert [start["fraction"] for start in loader["starts"]] == list(restore.POINTS)
    assert all(start["exact"] for start in loader["starts"])
    assert loader["starts"][0]["state_bytes"] == 0
    assert loader["starts"][2]["state_bytes"] > 10


def test_a_loader_that_fails_is_reported(tmp_path, capsys):
    assert restore.main([str(tmp_path / "work"), "--samples", "200", "--loaders", "fuelrail-images"]) == 0
    assert "fuelrail-images needs --dataset" in capsys.readouterr().out
