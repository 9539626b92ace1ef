"""`fuelrail view` and `fuelrail doctor`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fuelrail.loaders.config import Transforms, default_num_workers
from fuelrail.loaders.decode import dali_install
from fuelrail.loaders.decode.native import load as load_native
from fuelrail.pipeline.cli import Command
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.runtime.metrics import Metric, MetricsServer, loader_metrics

if TYPE_CHECKING:
    import argparse

    from fuelrail.loaders.loader import DataLoader


def _configure_view(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dataset", metavar="OUT", help="folder of a Fuelrail dataset")
    parser.add_argument("key", nargs="?", help="sample key; left out: the first sample of the dataset")
    parser.add_argument("--image", metavar="YAML", help="image settings; default 704x256 from the bottom")
    parser.add_argument("--train", action="store_true", help="augment as a loader does, for this seed and epoch")
    parser.add_argument("--seed", type=int, default=0, help="of the augmentation (default 0)")
    parser.add_argument("--epoch", type=int, default=0, help="of the augmentation (default 0)")
    parser.add_argument("--output", "-o", default="contact_sheet.png", metavar="PNG", help="default contact_sheet.png")


def _run_view(args: argparse.Namespace) -> int:
    import cv2
    import msgspec

    from fuelrail.loaders.contact_sheet import contact_sheet, decode_single
    from fuelrail.loaders.storage.reader import SampleReader
    from fuelrail.pipeline.format.dataset import open_dataset
    from fuelrail.pipeline.settings import as_settings
    from fuelrail.pipeline.text import shown
    from fuelrail.pipeline.transforms.image import ImageAugment

    for name in ("seed", "epoch"):
        if getattr(args, name) < 0:
            raise ConfigError(f"--{name} {getattr(args, name)} must be 0 or more")
    output = Path(args.output)
    if output.suffix.lower() != ".png":
        raise ConfigError(f"--output {args.output!r} must end with .png")
    dataset = open_dataset(args.dataset)
    reader = SampleReader(dataset)
    row = 0 if args.key is None else reader.find(args.key)
    sample = reader.sample(row)
    image = as_settings(args.image, ImageAugment, "--image") if args.image else Transforms().image
    image = msgspec.structs.replace(image, train=args.train)
    cameras = [camera.channel for camera in dataset.manifest.cameras]
    try:
        batch = decode_single(sample, cameras, image, seed=args.seed, epoch=args.epoch, row=row)
        sheet = contact_sheet(
            batch["img"][0].numpy(), batch["ego2img"][0].numpy(), cameras, sample.boxes, dataset.manifest.classes
        )
        encoded = cv2.imencode(".png", sheet[..., ::-1])[1].tobytes()
    except MemoryError as error:
        num_bytes = len(cameras) * 3 * image.height * image.width
        raise ConfigError(
            f"no memory to draw {len(cameras)} cameras of {image.width}x{image.height} pixels, {num_bytes} bytes and "
            "the same for the sheet: give a smaller height and width with --image"
        ) from error
    try:
        output.write_bytes(encoded)
    except OSError as error:
        raise ConfigError(f"--output '{output}' cannot be written: {error.strerror}") from error
    num_boxes = 0 if sample.boxes is None else len(sample.boxes.boxes3d)
    print(f"{shown(sample.key)}: {len(sample.images)} cameras, {num_boxes} boxes -> {output}")  # noqa: T201
    return 0


def _run_doctor(args: argparse.Namespace) -> int:  # noqa: ARG001

    print(render(examine()))  # noqa: T201
    return 0


COMMANDS = {
    "view": Command(
        "draw a sample's cameras and boxes, through the augmentation, as a PNG", _configure_view, _run_view
    ),
    "doctor": Command("say what is installed to decode with, and what would be better", lambda _: None, _run_doctor),
}


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
        *_dali(),
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


def _dali() -> list[Finding]:
    """Return whether DALI can be used, what decodes on a GPU, and the known faults of its libraries."""
    import torch

    found = dali_install.installed_dali()
    if found is None:
        return [Finding("decoder=dali", "NVIDIA DALI is not installed", dali_install.what_to_install()), _engine()]
    if found.problem:
        return [Finding("decoder=dali", f"not ready: {found.problem}", found.advice), _engine()]
    ready = Finding(
        "decoder=dali",
        f"ready: {found}; on the CPU it decodes in full size and is slower than turbo",
        "with a GPU give the loader decoder='dali' and device='cuda'; auto does not choose it",
    )
    faults = [
        Finding("known fault", f"{fault.library} {fault.effect}; avoided: {fault.avoided_by}")
        for fault in found.known_faults
    ]
    return [ready, _engine(), *(faults if torch.cuda.is_available() else ())]


def _engine() -> Finding:
    """Return what decodes with decoder='dali' and device='cuda'."""
    import torch

    loads = f"libnvcuvid.so.1 {'loads' if dali_install.has_libnvcuvid() else 'does not load'}"
    facts = f"driver {dali_install.driver_version() or 'not found'}, {loads}"
    if not torch.cuda.is_available():
        return Finding("GPU decoding", f"none: torch finds no GPU ({facts})")
    engine = dali_install.gpu_engine()
    return Finding("GPU decoding", f"by {engine.name}: {engine.reason} ({facts})", engine.advice)


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


def serve_metrics(loader: DataLoader, *, port: int = 0, host: str = "127.0.0.1") -> MetricsServer:
    """Serve a loader's :meth:`~fuelrail.loaders.DataLoader.stats` at ``http://HOST:PORT/metrics``.

    ``port`` 0 takes any free one; with several ranks on a host give each its own, such as ``9400 + local_rank``. The
    answer's ``url`` is what ``fuelrail top`` wants, its ``close()`` ends it. Metrics and labels:
    :mod:`fuelrail.pipeline.runtime.metrics`; the labels here are ``dataset``, ``rank`` and ``world_size``. The server
    does not keep the loader alive. Raises ConfigError if the port is not available.
    """
    labels = {
        "dataset": loader.dataset.manifest.name,
        "rank": str(loader.world.rank),
        "world_size": str(loader.world.size),
    }
    alive = weakref.ref(loader)

    def collect() -> list[Metric]:
        there = alive()
        return [] if there is None else loader_metrics(there.stats(), labels)

    return MetricsServer(collect, port=port, host=host)
