"""Input of the GPU checks: on a GPU, on the CPU, and on a fake device that checks the order of streams."""

from __future__ import annotations

import pytest
import torch

from fuelrail.bench.ranks import launch
from support import gpu_bench
from support.backends import dali_on_host
from support.datasets import build_dataset
from support.fake_cuda import FakeCuda
from support.gpu_bench import CUDA, Bench, require_dali, synthesise, why_no_gpu
from support.gpu_record import FACTS, pytest_addoption, pytest_configure
from support.nvml_watch import Watch
from support.warm_ranks import Warm

__all__ = ["pytest_addoption", "pytest_configure"]


@pytest.fixture(scope="session")
def small_bench(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu-check-twin")
    build_dataset(folder / "data", {"train": (8, 8)})
    return Bench(torch.device("cpu"), folder / "data", folder, folder)


@pytest.fixture(scope="session")
def whole_bench(tmp_path_factory, pytestconfig):
    folder = tmp_path_factory.mktemp("gpu-check")
    out = pytestconfig.getoption("gpu_out", None)
    dataset = pytestconfig.getoption("gpu_dataset", None) or synthesise(folder)
    return Bench(
        CUDA,
        dataset,
        folder,
        folder if out is None else out.parent,
        is_small=False,
    )


@pytest.fixture
def bench(request, monkeypatch):
    """The input on the device that the test is marked with by `check`; the CPU is the default."""
    device = getattr(request, "param", "cpu")
    if device == "cuda":
        if reason := why_no_gpu():
            pytest.skip(reason)
        yield request.getfixturevalue("whole_bench")
        return
    bench = request.getfixturevalue("small_bench")
    monkeypatch.setattr(launch, "subprocess", Warm)
    if device == "cpu":
        yield bench
        return
    cuda = FakeCuda(monkeypatch)
    monkeypatch.setattr(gpu_bench, "NvmlWatch", Watch)
    yield bench._replace(device=CUDA)
    assert cuda.finish() == []


@pytest.fixture
def decoder(request, bench, monkeypatch):
    """The name of a decode backend that is installed."""
    if request.param == "dali":
        require_dali(bench)
        if bench.on_gpu and bench.is_small:
            dali_on_host(monkeypatch)
    return request.param


@pytest.fixture
def facts(request):
    """What a check measured: it stands in the result file, also where the check failed."""
    return request.node.stash.setdefault(FACTS, {})


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    result = yield
    assert pyfuncitem.stash.get(FACTS, True), "a check that passes has measured something"
    return result
