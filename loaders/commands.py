"""`fuelrail view`, `fuelrail doctor`, and the metrics of a loader for `fuelrail top`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import weakref
from typing import TYPE_CHECKING

import msgspec

from fuelrail.loaders.decode import dali_install, plugin_decoders
from fuelrail.pipeline.cli import (
    Argument,
    Command,
    PrintOptions,
    command,
    from_flags,
    given_flags,
    print_json,
)
from fuelrail.pipeline.errors import ConfigError, how_to_install
from fuelrail.pipeline.native import load as load_native
from fuelrail.pipeline.runtime.host import default_num_workers

if TYPE_CHECKING:
    import argparse

    from fuelrail.loaders.loader import DataLoader
    from fuelrail.pipeline.runtime.metrics import Metric, MetricsServer


COMMANDS: dict[str, Command] = {}


@command(
    COMMANDS,
    Argument("dataset", "DATASET", "folder or URL of a Fuelrail dataset"),
    Argument("key", "KEY", "sample key (default: the first sample of the dataset)", nargs="?"),
    options=["loaders.view:ViewOptions", "loaders.integrations.rerun:RecordOptions"],
)
def run_view(args: argparse.Namespace) -> int:
    """Draw a sample's cameras and boxes, through the augmentation, as a PNG."""
    from fuelrail.loaders.integrations.rerun import RecordOptions, record_clip
    from fuelrail.loaders.view import ViewOptions, view

    recording = from_flags(args, RecordOptions).rerun
    if recording is not None:
        flags_given = given_flags(args, ViewOptions)
        if flags_given:
            raise ConfigError(
                "--rerun records the stored images, so it cannot be combined with "
                f"{min(flags_given.values())}"
            )
        recorded = record_clip(args.dataset, args.key, recording)
        print(f"{recorded.as_text()} -> {recording}")  # noqa: T201
        return 0
    options = from_flags(args, ViewOptions)
    output = options.output or "contact_sheet.png"
    report = view(args.dataset, args.key, options, output=output)
    print(f"{report.as_text()} -> {output}")  # noqa: T201
    return 0


@command(COMMANDS, options=["pipeline.cli:PrintOptions"])
def run_doctor(args: argparse.Namespace) -> int:
    """Check which decoders are installed and suggest faster ones."""
    report = doctor()
    if from_flags(args, PrintOptions).json:
        print_json(report)
    else:
        print(report.as_text())  # noqa: T201
    return 0


class Finding(msgspec.Struct, frozen=True):
    """One line of the report; ``advice`` says how to get a faster decoder, empty where there is
    nothing to do.
    """

    subject: str
    state: str
    advice: str = ""


class DoctorReport(msgspec.Struct, frozen=True):
    """Report which decoders are installed, and which would be faster."""

    findings: list[Finding]

    def as_text(self) -> str:
        """Return the findings as text, an advice below the finding that it is about."""
        width = max(len(finding.subject) for finding in self.findings)
        lines = []
        for finding in self.findings:
            lines.append(f"{finding.subject:<{width}}  {finding.state}")
            if finding.advice:
                lines.append(f"{'':<{width}}    -> {finding.advice}")
        return "\n".join(lines)


def doctor() -> DoctorReport:
    """Look at the decode backends and what they depend on; nothing is decoded, and DALI is not
    loaded.
    """
    findings = [Finding("decoder=auto", "uses turbo, the fastest CPU decoder")]
    if importlib.util.find_spec("cv2") is None:
        state = "OpenCV is not installed"
        advice = how_to_install("fuelrail[opencv]")
    else:
        opencv = _find_version(
            "opencv-python-headless",
            "opencv-python",
            "opencv-contrib-python-headless",
        )
        state = f"ready: {_find_version('simplejpeg')}, {opencv or 'OpenCV'}"
        advice = ""
    findings.append(Finding("decoder=turbo", state, advice))
    loaded = load_native()
    if isinstance(loaded, str):
        state = (
            "the native decoder was not built, so decoding takes about 1.5 times as long, and "
            "`shard --jpeg restart` does not work"
        )
        advice = loaded
    else:
        state = (
            "ready: turbo decodes baseline 4:2:0 JPEGs at 1/2 and 1/4 with it, and `shard --jpeg "
            "restart` writes by it JPEGs of which crops decode faster"
        )
        advice = ""
    findings.append(Finding("native JPEG", state, advice))
    simd = _find_version("pillow-simd")
    plain = _find_version("pillow")
    advice = ""
    if simd is not None:
        state = f"ready, with SIMD: {simd}"
    elif plain is None:
        state = "Pillow is not installed"
        advice = "pip install pillow"
    else:
        state = f"ready, without SIMD: {plain}"
        advice = (
            "pillow-simd in its place halves the time: pip uninstall pillow, then "
            f"{how_to_install('fuelrail[simd]')}"
        )
    findings.append(Finding("decoder=pillow", state, advice))
    dali_package = dali_install.installed_dali()
    if dali_package is None:
        state = "NVIDIA DALI is not installed"
        advice = dali_install.what_to_install()
    elif dali_package.problem:
        state = f"not ready: {dali_package.problem}"
        advice = dali_package.advice
    else:
        state = (
            f"ready: {dali_package}; on the CPU it decodes in full size and is slower than turbo"
        )
        advice = (
            "with a GPU give the loader decoder='dali' and device='cuda'; auto does not choose it"
        )
    findings.append(Finding("decoder=dali", state, advice))
    if importlib.util.find_spec("torch") is None:
        state = "none: torch is not installed"
        advice = how_to_install("fuelrail[torch]")
    else:
        import torch

        if torch.cuda.is_available():
            engine = dali_install.gpu_engine()
            state = f"by {engine.name}: {engine.reason}"
            advice = engine.advice
        else:
            built = "" if torch.version.cuda else "; this torch is built without CUDA"
            state = f"none: torch finds no GPU{built}"
            advice = ""
    findings.append(Finding("GPU decoding", state, advice))
    for name, entry in plugin_decoders().items():
        findings.append(Finding(f"decoder={name}", f"plug-in: {entry.value}"))
    num_workers = default_num_workers()
    state = f"{num_workers} by default: the CPUs that this process may use"
    findings.append(Finding("decoding threads", state))
    return DoctorReport(findings)


def _find_version(*packages: str) -> str | None:
    """Return the first of these packages that is installed, with its version."""
    for package in packages:
        try:
            return f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def serve_metrics(
    loader: DataLoader,
    *,
    port: int = 0,
    host: str = "127.0.0.1",
) -> MetricsServer:
    """Serve a loader's :meth:`~fuelrail.DataLoader.stats` at ``http://HOST:PORT/metrics``.

    ``port`` 0 takes any free one; with several ranks on a host give each its own, such as ``9400 +
    local_rank``. The answer's ``url`` is what ``fuelrail top`` wants, its ``close()`` ends it.
    Metrics and labels: :mod:`fuelrail.pipeline.runtime.metrics`; the labels here are ``dataset``,
    ``rank`` and ``world_size``. The server does not keep the loader alive. Raises ConfigError if
    the port is not available.
    """
    from fuelrail.pipeline.runtime.metrics import MetricsServer, loader_metrics

    labels = {
        "dataset": loader.dataset.manifest.name,
        "rank": str(loader.world.rank),
        "world_size": str(loader.world.size),
    }
    alive = weakref.ref(loader)

    def collect() -> list[Metric]:
        current_loader = alive()
        if current_loader is None:
            return []
        return loader_metrics(current_loader.stats(), labels)

    return MetricsServer(collect, port=port, host=host)
