"""What this machine decodes with: which backends are there, which one `auto` takes, and why not a better one."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
from typing import NamedTuple

from fuelrail.loaders.budget import default_num_workers
from fuelrail.loaders.decode.dali_install import installed_dali
from fuelrail.loaders.decode.native import load as load_native


class Finding(NamedTuple):
    """One line of the report. ``advice`` is what to do for more, empty where nothing is to be done."""

    subject: str
    state: str
    advice: str = ""


def examine() -> list[Finding]:
    """Look at the decode backends and what they depend on; nothing is decoded, and DALI is not loaded."""
    return [
        Finding("decoder=auto", "takes turbo: the fastest on the CPU, and always installed"),
        _turbo(),
        _native(),
        _pillow(),
        _dali(),
        _gpu(),
        _jpegtran(),
        Finding("decoding threads", f"{default_num_workers()} by default: the CPUs that this process may use"),
    ]


def _version(*packages: str) -> str | None:
    """The first of these packages that is installed, with its version."""
    for package in packages:
        try:
            return f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _turbo() -> Finding:
    opencv = _version("opencv-python-headless", "opencv-python", "opencv-contrib-python-headless") or "OpenCV"
    return Finding("decoder=turbo", f"ready: {_version('simplejpeg')}, {opencv}")


def _native() -> Finding:
    loaded = load_native()
    if isinstance(loaded, str):
        return Finding("native JPEG", "not used by turbo: camera JPEGs take about 1.5 times as long", loaded)
    return Finding("native JPEG", "ready: turbo decodes baseline 4:2:0 JPEGs at 1/2 and 1/4 with it")


def _pillow() -> Finding:
    simd = _version("pillow-simd")
    if simd is not None:
        return Finding("decoder=pillow", f"ready, with SIMD: {simd}")
    plain = _version("pillow")
    if plain is None:
        return Finding("decoder=pillow", "Pillow is not installed", "pip install pillow (or 'fuelrail[simd]')")
    return Finding(
        "decoder=pillow",
        f"ready, without SIMD: {plain}",
        "pillow-simd in its place halves the time: pip uninstall pillow, then pip install 'fuelrail[simd]'",
    )


def _dali() -> Finding:
    found = installed_dali()
    if found is None:
        return Finding(
            "decoder=dali", "NVIDIA DALI is not installed", "to decode on a GPU: pip install 'fuelrail[dali]' (CUDA 12)"
        )
    package = f"{found.package} {found.version}"
    if found.missing:
        return Finding(
            "decoder=dali", f"not ready: {package} is installed without {', '.join(found.missing)}", found.advice
        )
    return Finding(
        "decoder=dali",
        f"ready: {package}; on the CPU it decodes in full size and is slower than turbo",
        "with a GPU give the loader decoder='dali' and device='cuda'; auto does not choose it",
    )


def _gpu() -> Finding:
    import torch

    if torch.cuda.is_available():
        names = sorted({torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())})
        return Finding("GPU", f"{torch.cuda.device_count()} for torch: {', '.join(names)}")
    built = torch.version.cuda
    return Finding("GPU", "none that torch can use" + ("; this torch is built without CUDA" if built is None else ""))


def _jpegtran() -> Finding:
    if shutil.which("jpegtran") is None:
        return Finding(
            "jpegtran",
            "not installed",
            "it writes restart markers, with which crops decode faster: Debian package libjpeg-turbo-progs",
        )
    return Finding("jpegtran", "installed: `jpegtran -restart 1` makes JPEGs of which crops decode faster")


def render(findings: list[Finding]) -> str:
    """The findings as text, an advice below what it is about."""
    width = max(len(finding.subject) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.subject:<{width}}  {finding.state}")
        if finding.advice:
            lines.append(f"{'':<{width}}    -> {finding.advice}")
    return "\n".join(lines)
