"""The GPU check's own code on the CPU: the same checks, the emulated accelerator, and that they can fail."""

from __future__ import annotations

import msgspec
import pytest
import torch

from fuelrail.bench.gpu import check, device
from fuelrail.bench.gpu.check import GpuCheck, run_checks
from fuelrail.bench.gpu.rates import Bench, CheckFailed
from fuelrail.bench.report.files import publish_json
from fuelrail.pipeline.format.dataset import open_dataset
from support.datasets import build_dataset

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu-check")
    build_dataset(folder / "data", {"train": (8, 8)})
    return Bench(torch.device("cpu"), folder / "data", folder)


def test_all_checks_hold_and_the_result_is_kept(bench, tmp_path):
    result = run_checks(bench)
    assert [(check.name, check.problem) for check in result.checks] == [(name, None) for name in check.CHECKS]
    path = tmp_path / "gpu-check.json"
    publish_json(path, result)
    assert msgspec.json.decode(path.read_bytes(), type=GpuCheck) == result


def test_a_check_that_fails_or_breaks_is_told_and_the_others_still_run(bench, monkeypatch):
    def fails(bench):
        raise CheckFailed("it is wrong")

    def breaks(bench):
        raise ZeroDivisionError

    monkeypatch.setattr(check, "CHECKS", {"a": fails, "b": breaks, "c": device.device_facts})
    a, b, c = run_checks(bench).checks
    assert (a.passed, a.problem) == (False, "it is wrong")
    assert "ZeroDivisionError" in b.problem
    assert c.passed


def test_a_difference_between_batches_is_found(bench, monkeypatch):
    honest = device._loader

    class Tampering:
        def __init__(self, device):
            self.loader, self.device = honest(bench, device), device

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.loader.close()

        def __iter__(self):
            for batch in self.loader:
                if self.device is not None:
                    batch["intrinsics"][0, 0, 0, 0] += 1
                yield batch

        def stats(self):
            return self.loader.stats()

    monkeypatch.setattr(device, "_loader", lambda _, device: Tampering(device))
    with pytest.raises(CheckFailed, match="batch 0: intrinsics differ"):
        device.transfer_is_exact(bench)


def test_its_dataset_is_made_by_the_commands_that_users_take(tmp_path):
    dataset = open_dataset(check.synthesise(tmp_path, num_clips=2, num_frames=1, size="160x90"))
    assert len(dataset.manifest.cameras) == 6
    assert dataset.split("train").num_samples == 1


def test_without_a_gpu_it_says_so_in_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(check, "installed_gpus", list)
    assert check.main([]) != 0
    error = capsys.readouterr().err
    assert "shows no GPU here" in error
    assert error.count("\n") == 1
