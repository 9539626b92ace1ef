"""What the GPU checks share: their input and its twins, JPEGs, loaders, training runs, marks in a device's queue."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import cv2
import msgspec
import numpy as np
import pytest
import simplejpeg
import torch

from fuelrail import DataLoader, Transforms
from fuelrail.__main__ import main as fuelrail_main
from fuelrail.bench.measure.machine import installed_gpus
from fuelrail.bench.measure.nvml import NvmlWatch
from fuelrail.bench.studies.train import run as train_run
from fuelrail.pipeline.errors import FuelrailError
from support.cameras import SOURCE_WH, made_image, write_cameras

if TYPE_CHECKING:
    from pathlib import Path

CUDA = torch.device("cuda", 0)
_CALIBRATION_CYCLES = 50_000_000
_OPTIONS: dict[str, list[int]] = {
    "plain": [],
    "restart": [cv2.IMWRITE_JPEG_RST_INTERVAL, SOURCE_WH[0] // 16],
    "4:2:2": [
        cv2.IMWRITE_JPEG_SAMPLING_FACTOR,
        cv2.IMWRITE_JPEG_SAMPLING_FACTOR_422,
    ],
    "4:4:4": [
        cv2.IMWRITE_JPEG_SAMPLING_FACTOR,
        cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444,
    ],
    "gray": [],
    "progressive": [cv2.IMWRITE_JPEG_PROGRESSIVE, 1],
}
KINDS = tuple(_OPTIONS)
"""Kinds of JPEG; ``plain`` is baseline 4:2:0, ``restart`` its twin with a marker at each row of MCUs."""

each_decoder = pytest.mark.parametrize("decoder", ["turbo", "dali"], indirect=True)
with_dali = pytest.mark.parametrize("decoder", ["dali"], indirect=True)


class Bench(NamedTuple):
    """Input of a check: the torch device, a dataset with boxes and a lidar, a folder to write to, one to keep."""

    device: torch.device
    dataset: Path
    work: Path
    keep: Path
    is_small: bool = True

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a CUDA one, or a fake of it."""
        return self.device.type == "cuda"

    def pick(self, on_gpu: Any, of_twin: Any) -> Any:
        """Return one of two values: a measurement's size on a GPU, or that of its twins."""
        return of_twin if self.is_small else on_gpu


def check(seconds: float, *, twins: tuple[str, ...] = ("cpu",), lane=pytest.mark.slow):
    """Run a test on a GPU, where it may take this long on an H100, and as twins in their lane: on the CPU, on a fake.

    What libraries warn of on a GPU is not a finding.
    """
    mark = pytest.mark
    on_gpu = [
        mark.gpu,
        mark.seconds(seconds),
        mark.timeout(900),
        mark.filterwarnings("default"),
    ]
    devices = [
        *(pytest.param(twin, marks=lane) for twin in twins),
        pytest.param("cuda", marks=on_gpu),
    ]
    return mark.parametrize("bench", devices, indirect=True)


def why_no_gpu() -> str | None:
    """Return why nothing can be checked here, None where torch sees a GPU."""
    if torch.cuda.is_available():
        return None
    gpus = installed_gpus()
    if not gpus:
        return "the NVIDIA driver shows no GPU here, so there is nothing to check; run it on a GPU machine"
    return (
        f"there is an {gpus[0].name} (driver {gpus[0].driver}), but torch {torch.__version__} cannot use it: "
        "install a build of torch for CUDA that this driver supports"
    )


def require_dali(bench: Bench) -> None:
    """Skip a twin where DALI is not installed; on a GPU that is a failure."""
    if (
        importlib.util.find_spec("nvidia") is None
        or importlib.util.find_spec("nvidia.dali") is None
    ):
        assert bench.is_small, (
            "NVIDIA DALI is not installed, so nothing of the GPU decoder was checked: install fuelrail[dali]"
        )
        pytest.skip("NVIDIA DALI is not installed")


def synthesise(
    folder: Path,
    *,
    num_clips: int = 5,
    num_frames: int = 10,
    size: str = "480x270",
) -> Path:
    """A synthetic dataset of six cameras, through the same commands that users take."""
    source = folder / "synth"
    out = folder / "dataset"
    length = [
        "--clips",
        str(num_clips),
        "--frames",
        str(num_frames),
        "--size",
        size,
    ]
    assert fuelrail_main(["synth", str(source), "--seed", "7", *length]) == 0
    assert (
        fuelrail_main(
            [
                "shard",
                f"nuscenes:{source}",
                str(out),
                "-o",
                "version=v1.0-mini",
                "--seed",
                "7",
            ]
        )
        == 0
    )
    return out


@functools.cache
def jpeg(kind: str, number: int = 0) -> bytes:
    """Return a JPEG of 1600x900 pixels of that kind; each number is another picture, moved against the others."""
    picture = np.roll(_picture(), (37 * number, 211 * number), axis=(0, 1))
    if kind == "gray":
        picture = np.asarray(cv2.cvtColor(picture, cv2.COLOR_BGR2GRAY), np.uint8)
    done, data = cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, 85, *_OPTIONS[kind]])
    assert done, "OpenCV encodes JPEG"
    return bytes(data)


@functools.cache
def _picture():
    return simplejpeg.decode_jpeg(made_image(), colorspace="BGR")


def cameras(bench: Bench, kind: str = "plain", *, one_camera: bool = False) -> Path:
    """Return the folder of shards of 1600x900 images, six cameras a sample or one; made once."""
    folder = bench.work / f"cameras-{kind.replace(':', '')}{'-one' if one_camera else ''}"
    if not folder.exists():
        count = bench.pick(192, 16)
        if one_camera:
            write_cameras(folder, count * 6, image=jpeg(kind), channels=("cam_front",))
        else:
            write_cameras(folder, count, image=jpeg(kind))
    return folder


@contextmanager
def jpeg_engines(
    bench: Bench,
    decoder: str,
    facts: dict[str, Any],
    name: str = "jpeg_engines_busy",
):
    """Measure how busy the JPEG engines are inside; with DALI on a GPU, idle ones fail the check.

    The share is NVML's, 0 to 1. Without NVML nobody knows whether DALI decodes by hardware, so that fails too.
    """
    if not bench.on_gpu:
        yield
        return
    with NvmlWatch(1) as watch:
        yield
    use = watch.use()
    share = use and use[0].jpeg
    facts[name] = share if share is None else round(share, 4)
    if decoder == "dali":
        reason = watch.reason or "the card does not know"
        assert share is not None, f"NVML does not say how busy the JPEG engines are: {reason}"
        assert share > 0, (
            "the JPEG engines were idle: CUDA cores or CPUs decoded; `fuelrail doctor` says why"
        )


def make_loader(
    bench: Bench, dataset: Path, batch_size: int, decoder: str, **options: Any
) -> DataLoader:
    """Return a loader of a check; its batches go to the device."""
    options["transforms"] = msgspec.structs.replace(
        options.get("transforms", Transforms()), decoder=decoder
    )
    options = {"shuffle": True, "drop_last": True, **options}
    return DataLoader(dataset, batch_size, seed=7, device=bench.device, **options)


def endless(loader: DataLoader):
    """Yield the batches of epoch after epoch."""
    return itertools.chain.from_iterable(itertools.repeat(loader))


def percentiles(values: list[float]) -> list[float]:
    """Return median and 99th percentile, rounded to a thousandth."""
    ordered = sorted(values)
    return [
        round(ordered[min(len(ordered) - 1, int(len(ordered) * share))], 3) for share in (0.5, 0.99)
    ]


def keep_busy(cycles: int) -> None:
    """Queue a kernel on the current stream that only counts clock cycles; there is no public way."""
    torch.cuda._sleep(cycles)


def raise_clock(bench: Bench) -> None:
    """Keep an idle GPU busy for a second until its clock has risen: it starts at a fraction of what it runs at."""
    ends_s = time.monotonic() + bench.pick(1.0, 0.0)
    while time.monotonic() < ends_s:
        cycles_per_ms(bench.device)


def cycles_per_ms(device: torch.device) -> float:
    """Measure the cycles of `keep_busy` in a millisecond, by the host's clock around a long one."""
    torch.cuda.synchronize(device)
    started_s = time.monotonic()
    keep_busy(_CALIBRATION_CYCLES)
    torch.cuda.synchronize(device)
    return _CALIBRATION_CYCLES / (1e3 * (time.monotonic() - started_s))


class Mark:
    """A place in the device's queue with a time: an event on a GPU, the host's clock in the twin."""

    def __init__(self, bench: Bench) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if bench.on_gpu else None
        self._at_s = time.perf_counter()
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Wait until the device is here."""
        if self._event is not None:
            self._event.synchronize()

    def ms_to(self, later: Mark) -> float:
        """Return the milliseconds from here to a later mark; both must have been reached."""
        if self._event is None:
            return 1e3 * (later._at_s - self._at_s)
        return float(self._event.elapsed_time(later._event))


def train(dataset: Path, out: Path, **options: Any):
    """Return the report of `fuelrail.bench.bench_train`, with figures; ``options`` are the fields of its options."""
    try:
        report = train_run.bench_train(dataset, out=out, html=False, **options)
        why = report.cut_off
    except FuelrailError as error:
        why = str(error)
    if why is not None:
        log = out / "records" / "ranks.log"
        tail = log.read_text(encoding="utf-8", errors="replace")[-2000:] if log.exists() else ""
        pytest.fail(f"training on '{dataset}' did not complete: {why}; {tail}")
    assert report.figures is not None, "a run of enough steps has figures"
    return report
