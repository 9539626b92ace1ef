from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from fuelrail.__main__ import main
from fuelrail.loaders import commands
from fuelrail.loaders.decode import BACKENDS, dali_install

if TYPE_CHECKING:
    from pathlib import Path


def pretend(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Let exactly these packages be installed."""

    def version(package: str) -> str:
        try:
            return versions[package.replace("-", "_")]
        except KeyError:
            raise importlib.metadata.PackageNotFoundError(package) from None

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.metadata, "requires", lambda package: [])


def pretend_gpus(
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    name: str,
    capability: tuple[int, int],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)


def finding_about(subject: str) -> commands.Finding:
    return next(finding for finding in commands.doctor().findings if finding.subject == subject)


def test_every_backend_is_spoken_of() -> None:
    subjects = [finding.subject for finding in commands.doctor().findings]
    assert {f"decoder={name}" for name in (*BACKENDS, "auto")} <= set(subjects)
    assert finding_about("decoder=turbo").state.startswith("ready: simplejpeg ")


def test_what_is_missing_comes_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch, simplejpeg="1.9.0")
    assert "pip install pillow" in finding_about("decoder=pillow").advice
    assert "pip install -e '.[dali]'" in finding_about("decoder=dali").advice
    pretend(
        monkeypatch,
        simplejpeg="1.9.0",
        pillow="12.0",
        nvidia_dali_cuda120="2.4.0",
    )
    assert finding_about("decoder=pillow").state == "ready, without SIMD: pillow 12.0"
    assert "'.[simd]'" in finding_about("decoder=pillow").advice
    assert "nvidia-dali-cuda120 2.4.0" in finding_about("decoder=dali").state
    pretend(monkeypatch, simplejpeg="1.9.0", pillow_simd="9.5")
    assert finding_about("decoder=pillow") == commands.Finding(
        "decoder=pillow", "ready, with SIMD: pillow-simd 9.5"
    )


@pytest.fixture
def incomplete_dali(tmp_path: Path) -> Path:
    """A folder to import from, with DALI as `pip install --no-deps` leaves it."""
    dist_info = tmp_path / "nvidia_dali_cuda120-2.4.0.dist-info"
    dist_info.mkdir()
    (dist_info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: nvidia-dali-cuda120\nVersion: 2.4.0\nRequires-Dist: numpy\n"
        "Requires-Dist: nvidia-nvimgcodec-cu12-of-nobody[all]<0.10.0,>=0.9.0\nRequires-Dist: optree-of-nobody\n"
        "Requires-Dist: unneeded-of-nobody; extra == 'more'\n"
    )
    package = tmp_path / "nvidia" / "dali"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import optree_of_nobody\n")
    return tmp_path


MISSING = "nvidia-dali-cuda120 2.4.0 is installed without nvidia-nvimgcodec-cu12-of-nobody, optree-of-nobody"


def test_dali_without_what_it_requires_is_not_ready(
    incomplete_dali: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(incomplete_dali)
    assert finding_about("decoder=dali").state == f"not ready: {MISSING}"
    assert "pip install -e '.[dali]'" in finding_about("decoder=dali").advice


@pytest.mark.process
def test_the_loaders_error_names_what_dali_misses(
    incomplete_dali: Path,
) -> None:
    code = "from fuelrail.loaders.decode import make_decoder; make_decoder('dali')"
    path = os.pathsep.join((str(incomplete_dali), *sys.path))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert f"ConfigError: decoder='dali': {MISSING}" in done.stderr
    assert "pip install -e '.[dali]'" in done.stderr.splitlines()[-1]


def test_a_dali_that_is_too_old_is_one_sentence(
    incomplete_dali: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = incomplete_dali / "nvidia_dali_cuda120-2.4.0.dist-info" / "METADATA"
    metadata.write_text(
        "Metadata-Version: 2.1\nName: nvidia-dali-cuda120\nVersion: 2.1.1\nRequires-Dist: numpy\n"
    )
    monkeypatch.syspath_prepend(incomplete_dali)
    assert (
        finding_about("decoder=dali").state
        == "not ready: nvidia-dali-cuda120 2.1.1 is too old: 2.2 or newer is needed"
    )
    assert "pip install -e '.[dali]'" in finding_about("decoder=dali").advice


CUDA12 = {
    "nvidia_dali_cuda120": "2.4.0",
    "nvidia_nvjpeg_cu12": "12.4.0.76",
    "nvidia_nvimgcodec_cu12": "0.9.0.20",
}
CUDA13 = {
    "nvidia_dali_cuda130": "2.4.0",
    "nvidia_nvjpeg": "13.3.2.43",
    "nvidia_nvimgcodec_cu13": "0.9.0.20",
}


@pytest.mark.parametrize(
    ("installed", "gpu", "capability", "loads", "state", "advice"),
    [
        (
            CUDA13,
            "NVIDIA H100",
            (9, 0),
            True,
            "by hardware: the JPEG engines of NVIDIA H100",
            "",
        ),
        (CUDA12, "NVIDIA H100", (9, 0), True, "by hardware: ", ""),
        (CUDA13, "NVIDIA L4", (8, 9), True, "by hardware: ", ""),
        (
            CUDA13,
            "NVIDIA GeForce RTX 4090",
            (8, 9),
            True,
            "by CUDA: NVIDIA GeForce RTX 4090 is not",
            "",
        ),
        (
            CUDA13,
            "NVIDIA H100",
            (9, 0),
            False,
            "by CUDA: libnvcuvid.so.1 does not",
            "compute,utility,video",
        ),
        (
            {**CUDA13, "nvidia_nvjpeg": None},
            "NVIDIA H100",
            (9, 0),
            True,
            "by CPU: ",
            "'.[dali-cu13]'",
        ),
        (
            {},
            "NVIDIA H100",
            (9, 0),
            True,
            "by nothing: NVIDIA DALI",
            "pip install -e '.[dali]'",
        ),
    ],
)
def test_what_decodes_on_a_gpu_is_named_with_what_to_install(
    monkeypatch, installed, gpu, capability, loads, state, advice
) -> None:
    pretend(
        monkeypatch,
        simplejpeg="1.9.0",
        **{name: version for name, version in installed.items() if version},
    )
    pretend_gpus(monkeypatch, 1, gpu, capability)
    monkeypatch.setattr(dali_install, "has_libnvcuvid", lambda: loads)
    finding = finding_about("GPU decoding")
    assert finding.state.startswith(state)
    assert (advice in finding.advice) if advice else not finding.advice


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "decoder=auto" in printed
    for finding in commands.doctor().findings:
        assert finding.state in printed
        assert finding.advice in printed
