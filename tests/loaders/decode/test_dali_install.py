"""What is known of DALI without loading it: versions, and the meaning of its errors."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

import pytest

from fuelrail.loaders.decode import dali_install
from fuelrail.loaders.decode.dali_install import (
    InstalledDali,
    explain_failure,
    is_about_an_image,
)

PYPROJECT = Path(__file__).resolve().parents[3] / "pyproject.toml"

# As DALI 2.4.0 says it.
BAD_IMAGE = (
    "Critical error in pipeline:\nCritical error in pipeline:\nError in CPU operator `nvidia.dali.fn.decoders.image`,\n"
    'which was used in the pipeline definition with the following traceback:\n\n  File "x.py", line 10, in build\n\n'
    "encountered:\n\nFailed to decode sample #2 : \nCurrent pipeline object is no longer valid.\n"
    "Current pipeline object is no longer valid."
)
CODE_STREAM = BAD_IMAGE.replace("Failed to decode sample #2 : ", "nvImageCodec failure: '#3'")
INTERNAL = BAD_IMAGE.replace("Failed to decode sample #2 : ", "nvImageCodec failure: '#8'")
NO_MEMORY = BAD_IMAGE.replace("Failed to decode sample #2 : ", "CUDA allocation failed")
STICKY = "CUDA runtime API error cudaErrorIllegalAddress (700):\nan illegal memory access was encountered"
STICKY_ON_A_SAMPLE = BAD_IMAGE.replace("sample #2 : ", f"sample #2 : {STICKY}")
OLD_DRIVER = "CUDA runtime API error cudaErrorInsufficientDriver (35):\nCUDA driver version is insufficient for CUDA"


def test_errors_about_images_are_known_and_no_others_are() -> None:
    texts = (
        BAD_IMAGE,
        CODE_STREAM,
        INTERNAL,
        NO_MEMORY,
        STICKY,
        STICKY_ON_A_SAMPLE,
        OLD_DRIVER,
        "unknown",
    )
    assert [text for text in texts if is_about_an_image(text)] == [
        BAD_IMAGE,
        CODE_STREAM,
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            NO_MEMORY,
            "there is no memory left to decode in: take a smaller batch_size",
        ),
        (
            STICKY,
            "a CUDA error, after which this process cannot use the GPU any more: start it again",
        ),
        (INTERNAL, "take decoder='turbo', and run fuelrail doctor"),
        (
            OLD_DRIVER,
            "the NVIDIA driver 570.10 is older than 580, which nvidia-dali-cuda130 needs: update it",
        ),
    ],
)
def test_a_failure_is_one_sentence_that_says_what_to_do(text, expected, monkeypatch) -> None:
    installed = InstalledDali(
        package="nvidia-dali-cuda130",
        version="2.4.0",
        missing=[],
        nvjpeg="13.3.2.43",
        nvimgcodec="0.9.0.20",
    )
    monkeypatch.setattr(dali_install, "installed_dali", lambda: installed)
    monkeypatch.setattr(dali_install, "driver_version", lambda: "570.10")
    message = explain_failure(text)
    assert message.startswith("decoder='dali': ")
    assert expected in message
    assert "nvidia-dali-cuda130 2.4.0 (nvJPEG 13.3.2.43, nvImageCodec 0.9.0.20) says: " in message
    assert "pipeline definition" not in message
    assert "\n" not in message


def test_the_extras_ask_for_the_version_that_the_decoder_needs() -> None:
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    floor = ".".join(map(str, dali_install.MIN_VERSION))
    assert f"nvidia-dali-cuda120>={floor}; platform_system == 'Linux'" in extras["dali"]
    assert f"nvidia-dali-cuda130>={floor}; platform_system == 'Linux'" in extras["dali-cu13"]


def test_versions_below_the_floor_are_a_problem() -> None:
    for version, is_usable in (
        ("1.53.0", False),
        ("2.1.1", False),
        ("2.2.0", True),
        ("2.10", True),
    ):
        installed = InstalledDali(
            package="nvidia-dali-cuda120",
            version=version,
            missing=[],
            nvjpeg="12.4.0.76",
            nvimgcodec="0.8.0",
        )
        assert (installed.problem == "") == is_usable, version


def test_the_libraries_of_the_installed_dali_are_found() -> None:
    installed = dali_install.installed_dali()
    if installed is None:
        pytest.skip("NVIDIA DALI is not installed")
    assert installed.nvjpeg == importlib.metadata.version(
        dali_install._LINES[installed.package].nvjpeg
    )
    assert installed.nvimgcodec is not None
    assert installed.problem == ""


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23 02:03:04 2025\nGCC",
            "570.86.15",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n",
            "580.65.06",
        ),
        ("", None),
    ],
)
def test_the_drivers_version_is_read(tmp_path, monkeypatch, text, version) -> None:
    monkeypatch.setattr(dali_install, "_DRIVER_FILE", tmp_path / "version")
    assert dali_install.driver_version() is None
    (tmp_path / "version").write_text(text)
    assert dali_install.driver_version() == version
