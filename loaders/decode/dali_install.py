"""Which DALI is installed, what it lacks, and what its errors mean; DALI is not loaded."""

from __future__ import annotations

import ctypes
import importlib.metadata
import re
from pathlib import Path
from typing import NamedTuple

from fuelrail.pipeline.errors import how_to_install

MIN_VERSION = (2, 2)
"""The first DALI whose decoder is nvImageCodec's, which knows `adjust_orientation`."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_DRIVER_FILE = Path("/proc/driver/nvidia/version")

_ABOUT_AN_IMAGE = re.compile(
    r"Failed to decode sample #\d+|nvImageCodec failure: '#(3|4|13|14|19)'"
)
"""What DALI says of bad images; the numbers are nvImageCodec's: bad, unsupported or incomplete
code stream.
"""

_CUDA = re.compile(
    r"CUDA (runtime|driver) API error|\bcudaError\w|\bCUDA_ERROR_",
    re.IGNORECASE,
)
_NO_MEMORY = re.compile(
    r"out of memory|allocation failed|ALLOCATOR_FAILURE|cudaErrorMemoryAllocation|bad_alloc"
    r"|nvImageCodec failure: '#(5|15)'",
    re.IGNORECASE,
)


class _Line(NamedTuple):
    """One CUDA line of DALI: our extra, the packages of its libraries, and the driver that it
    needs.
    """

    extra: str
    nvjpeg: str
    nvimgcodec: str
    min_driver: tuple[int, ...]


_LINES = {
    "nvidia-dali-cuda120": _Line(
        "fuelrail[dali]",
        "nvidia-nvjpeg-cu12",
        "nvidia-nvimgcodec-cu12",
        (525, 60),
    ),
    "nvidia-dali-cuda130": _Line(
        "fuelrail[dali-cu13]", "nvidia-nvjpeg", "nvidia-nvimgcodec-cu13", (580,)
    ),
}


class InstalledDali(NamedTuple):
    """A DALI package with its version, the packages that it requires and that are missing, and
    its libraries.
    """

    package: str
    version: str
    missing: list[str]
    nvjpeg: str | None
    nvimgcodec: str | None

    @property
    def advice(self) -> str:
        """Advice about a problem."""
        return f"install it with what it requires: {how_to_install(self._line.extra)}"

    @property
    def problem(self) -> str:
        """The reason why it cannot be used; empty if none is known."""
        if self.missing:
            return f"{self.package} {self.version} is installed without {', '.join(self.missing)}"
        if _numbers(self.version) < MIN_VERSION:
            return (
                f"{self.package} {self.version} is too old: {_dotted(MIN_VERSION)} or newer is "
                "needed"
            )
        return ""

    @property
    def min_driver(self) -> tuple[int, ...]:
        """The oldest NVIDIA driver that it works with."""
        return self._line.min_driver

    @property
    def _line(self) -> _Line:
        return _LINES[self.package]

    def __str__(self) -> str:
        """Return the versions as one phrase."""
        return (
            f"{self.package} {self.version} (nvJPEG {self.nvjpeg or 'missing'}, nvImageCodec "
            f"{self.nvimgcodec})"
        )


def installed_dali() -> InstalledDali | None:
    """Return the first DALI package that is installed; None where there is none."""
    for package, line in _LINES.items():
        version = _version(package)
        if version is not None:
            required = importlib.metadata.requires(package) or []
            names = [_NAME.match(text) for text in required if "extra ==" not in text]
            missing = [name[0] for name in names if name is not None and _version(name[0]) is None]
            return InstalledDali(
                package=package,
                version=version,
                missing=missing,
                nvjpeg=_version(line.nvjpeg),
                nvimgcodec=_version(line.nvimgcodec),
            )
    return None


class Engine(NamedTuple):
    """What decodes JPEGs where a loader has decoder='dali' and a GPU, with what to do for a
    better one.
    """

    name: str
    reason: str
    advice: str = ""


def gpu_engine(index: int = 0) -> Engine:
    """Return what DALI decodes baseline JPEGs with on that GPU of torch's: "hardware", "CUDA",
    "CPU" or "nothing".
    """
    import torch

    dali_package = installed_dali()
    if dali_package is None:
        return Engine("nothing", "NVIDIA DALI is not installed", what_to_install())
    if dali_package.problem:
        return Engine("nothing", dali_package.problem, dali_package.advice)
    driver = driver_version()
    if driver is not None and _numbers(driver) < dali_package.min_driver:
        return Engine("nothing", *_old_driver(dali_package, driver))
    if dali_package.nvjpeg is None:
        return Engine(
            "CPU",
            f"{dali_package.package} finds no nvJPEG, so libjpeg-turbo decodes inside DALI",
            dali_package.advice,
        )
    if not has_libnvcuvid():
        return Engine(
            "CUDA",
            "libnvcuvid.so.1 does not load, without which nvJPEG has no hardware decoder",
            "in a container set NVIDIA_DRIVER_CAPABILITIES=compute,utility,video; elsewhere "
            "install the driver's video libraries",
        )
    gpu = torch.cuda.get_device_name(index)
    capability = torch.cuda.get_device_capability(index)
    # Data-centre cards; consumer cards of the same generations have no JPEG engines that nvJPEG
    # uses.
    if capability in {(8, 0), (9, 0), (10, 0), (10, 3)} or re.search(r"\bL(4|40|40S)\b", gpu):
        return Engine("hardware", f"the JPEG engines of {gpu}")
    return Engine("CUDA", f"{gpu} is not known to have JPEG engines")


def has_libnvcuvid() -> bool:
    """Return whether the driver's video library loads."""
    try:
        ctypes.CDLL("libnvcuvid.so.1")
    except OSError:
        return False
    return True


def driver_version() -> str | None:
    """Return the NVIDIA driver's version; None where none is loaded."""
    try:
        text = _DRIVER_FILE.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r"\b\d{3,}\.[\d.]*\d", text)
    return None if match is None else match[0]


def is_about_an_image(text: str) -> bool:
    """Return whether a text of DALI's blames an image, and not the device, the memory or the
    pipeline.
    """
    return bool(_ABOUT_AN_IMAGE.search(text)) and not (
        _CUDA.search(text) or _NO_MEMORY.search(text)
    )


def explain_failure(text: str) -> str:
    """Return one sentence on a failure of DALI's: what failed, what to do, and what DALI says."""
    dali_package = installed_dali()
    driver = driver_version()
    if dali_package is not None and dali_package.problem:
        return f"decoder='dali': {dali_package.problem}; {dali_package.advice}"
    if re.search(r"driver.*insufficient|cudaErrorInsufficientDriver", text):
        failure, advice = (
            _old_driver(dali_package, driver or "in use")
            if dali_package
            else ("the driver is too old", "update it")
        )
    elif _NO_MEMORY.search(text):
        failure = "there is no memory left to decode in"
        advice = (
            "take a smaller batch_size, leave the decoder some of the GPU's memory, or take "
            "decoder='turbo'"
        )
    elif _CUDA.search(text):
        failure = "a CUDA error, after which this process cannot use the GPU any more"
        advice = (
            "start it again; if a kernel of the training caused it, CUDA_LAUNCH_BLOCKING=1 "
            "shows which; if decoder='turbo' runs without it, the decoder caused it"
        )
    else:
        failure = "NVIDIA DALI fails, and not because of an image"
        advice = "take decoder='turbo', and run fuelrail doctor"
    return f"decoder='dali': {failure}: {advice}; {dali_package or 'DALI'} says: {short(text)}"


def short(text: str) -> str:
    """Return DALI's message without its stack of operators."""
    reason = text.split("encountered:")[-1].replace(
        "Current pipeline object is no longer valid.", ""
    )
    return " ".join(reason.split())[:500]


def _old_driver(dali_package: InstalledDali, driver: str) -> tuple[str, str]:
    min_driver = _dotted(dali_package.min_driver)
    if dali_package.package == "nvidia-dali-cuda120":
        alternative = ""
    else:
        alternative = f", or {how_to_install('fuelrail[dali]')} (CUDA 12) in its place"
    return (
        f"the NVIDIA driver {driver} is older than {min_driver}, which {dali_package.package} needs",
        f"update it{alternative}",
    )


def what_to_install() -> str:
    """Return which of the extras to install on this machine."""
    driver = driver_version()
    if driver is not None and _numbers(driver) >= _LINES["nvidia-dali-cuda130"].min_driver:
        newer = how_to_install("fuelrail[dali-cu13]")
        return f"to decode on a GPU: {newer} (CUDA 13, as the driver is {driver})"
    command = how_to_install("fuelrail[dali]")
    return f"to decode on a GPU: {command} (CUDA 12), or with '.[dali-cu13]' from driver 580 on"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
