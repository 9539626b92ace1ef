"""GPU checks of the machine: what it is, which engine decodes, that NVML answers and the device's times are right."""

from __future__ import annotations

import shutil
import subprocess
import time

import numpy as np
import pytest
import torch

from fuelrail import ImageAugment
from fuelrail.bench.measure.accelerator import (
    DEFAULT_PROFILE,
    EmulatedAccelerator,
    load_profile,
)
from fuelrail.bench.measure.clock import NS_PER_MS, Clock
from fuelrail.bench.measure.cuda import CudaAccelerator
from fuelrail.bench.measure.machine import usable_cpus
from fuelrail.bench.studies.train import run as train_run
from fuelrail.loaders.decode import dali_install, make_decoder
from fuelrail.pipeline.format.dataset import open_dataset
from support import gpu_bench
from support.cameras import SOURCE_WH
from support.gpu_bench import (
    CUDA,
    check,
    cycles_per_ms,
    jpeg,
    jpeg_engines,
    keep_busy,
    raise_clock,
    with_dali,
)
from support.nvml_watch import Watch

_COPY_BYTES = 26 << 20  # B = 8 of six cameras of 704 x 256
_TIMING_TOLERANCE = 0.05


@check(10)
def test_torch_computes_and_nvml_answers(bench, facts):
    """With facts on CPUs, bus and device."""
    backend = make_decoder("turbo")
    picture = np.empty((3, 256, 704), np.uint8)
    augment = ImageAugment(height=256, width=704)
    (image_map,) = augment.draw([SOURCE_WH], seed=0, epoch=0, sample=0)
    started_s = time.perf_counter()
    count = 0
    while count == 0 or time.perf_counter() - started_s < bench.pick(1.0, 0.05):
        backend.decode_into(jpeg("plain"), image_map, picture)
        count += 1
    facts["cpus"] = usable_cpus()
    facts["turbo_images_per_s_of_one_cpu"] = round(count / (time.perf_counter() - started_s), 1)
    facts["torch"] = str(torch.__version__)
    product = torch.ones(64, 64, device=bench.device) @ torch.ones(64, 64, device=bench.device)
    assert product.sum().item() == 64**3
    if not bench.on_gpu:
        return
    properties = torch.cuda.get_device_properties(bench.device)
    facts |= {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "libnvcuvid_loads": dali_install.has_libnvcuvid(),
        "nvidia_smi": _nvidia_smi(),
        **{
            f"host_to_device_gb_per_s_{kind}": _copy_rate(bench, kind == "pinned")
            for kind in ("pinned", "pageable")
        },
    }
    assert torch.distributed.is_nccl_available(), "this build of torch has no NCCL"
    with gpu_bench.NvmlWatch(1) as watch:
        time.sleep(0.3)
    facts["nvml"] = watch.reason or "usable"
    assert watch.use() is not None, f"NVML does not answer: {watch.reason}"


@check(5)
@with_dali
def test_dali_decodes_by_hardware(bench, facts, decoder):
    """DALI is installed with all that it needs, and baseline JPEGs will go to the JPEG engines."""
    found = dali_install.installed_dali()
    facts["dali"] = str(found)
    if bench.on_gpu:
        engine = dali_install.gpu_engine(bench.device.index)
        facts |= {
            "engine": engine.name,
            "reason": engine.reason,
            "advice": engine.advice,
        }
        assert engine.name == "hardware", (
            f"JPEGs are decoded by {engine.name}: {engine.reason}; {engine.advice}"
        )


@check(5)
def test_accelerator_times_are_right(bench, facts):
    """Phases of known length come out at that length."""
    cycles = 0.0
    if bench.on_gpu:
        accelerator = CudaAccelerator(bench.device.index)
        expected = {"forward": 20.0, "backward": 40.0, "optimiser": 5.0}
        raise_clock(bench)
        cycles = cycles_per_ms(bench.device)
    else:  # the emulated device is busy by itself
        profile = load_profile(DEFAULT_PROFILE)
        accelerator = EmulatedAccelerator(profile, Clock())
        expected = {
            phase: getattr(profile, f"{phase}_ms") for phase in ("forward", "backward", "optimiser")
        }
    for phase, arguments in (
        ("forward", (1, 1)),
        ("backward", ()),
        ("optimiser", ()),
    ):
        with getattr(accelerator, phase)(*arguments):
            if bench.on_gpu:
                keep_busy(round(expected[phase] * cycles))
    times = accelerator.finish_step()
    # Work is counted in cycles: a clock that changed meanwhile is not an error of the measurement's.
    drift = cycles_per_ms(bench.device) / cycles if bench.on_gpu else 1.0
    for phase, expected_ms in expected.items():
        found_ms = getattr(times, f"{phase}_ns") / NS_PER_MS
        facts[f"{phase}_ms"] = [round(expected_ms, 3), round(found_ms, 3)]
        said = f"{phase} of {expected_ms:.2f} ms was measured as {found_ms:.2f} ms"
        # Shorter than the work it holds is impossible; longer, by what a disturbed host adds, is not judged on the CPU.
        assert found_ms >= expected_ms * min(1.0, 1 / drift) * (1 - _TIMING_TOLERANCE), said
        assert not bench.on_gpu or found_ms <= expected_ms * max(1.0, 1 / drift) * (
            1 + _TIMING_TOLERANCE
        ), said


def _copy_rate(bench, pinned):
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, pin_memory=pinned)
    target = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=bench.device)
    target.copy_(source)
    torch.cuda.synchronize(bench.device)
    started_s = time.perf_counter()
    for _ in range(20):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize(bench.device)
    return round(20 * _COPY_BYTES / (time.perf_counter() - started_s) / 1e9, 2)


def _nvidia_smi():
    """What the driver says of bus and clocks."""
    names = [
        "pcie.link.gen.current",
        "pcie.link.width.current",
        "clocks.max.sm",
        "power.limit",
        "compute_mode",
    ]
    if shutil.which("nvidia-smi") is None:
        return {}
    query = [
        "nvidia-smi",
        f"--query-gpu={','.join(names)}",
        "--format=csv,noheader",
        "-i",
        "0",
    ]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    return dict(zip(names, answer.stdout.strip().split(", "), strict=False))


@pytest.mark.parametrize(
    ("jpeg", "reason", "problem"),
    [
        (0.5, None, None),
        (0.0, None, "the JPEG engines were idle"),
        (
            None,
            None,
            "NVML does not say how busy the JPEG engines are: the card does not know",
        ),
        (
            None,
            "OSError: Driver Not Loaded",
            "NVML does not say.*Driver Not Loaded",
        ),
    ],
)
def test_idle_jpeg_engines_fail_a_check_and_so_does_not_knowing(
    jpeg, reason, problem, bench, monkeypatch
):
    monkeypatch.setattr(
        gpu_bench,
        "NvmlWatch",
        type("Card", (Watch,), {"jpeg": jpeg, "reason": reason}),
    )
    on_gpu = bench._replace(device=CUDA)
    found = {}
    if problem is None:
        with jpeg_engines(on_gpu, "dali", found):
            pass
    else:
        with (
            pytest.raises(AssertionError, match=problem),
            jpeg_engines(on_gpu, "dali", found),
        ):
            pass
    assert found == {"jpeg_engines_busy": jpeg}
    with jpeg_engines(on_gpu, "turbo", {}):  # which uses none
        pass


@pytest.mark.process
def test_why_nvml_says_nothing_is_in_the_report(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(
        train_run,
        "NvmlWatch",
        type("Card", (Watch,), {"reason": "OSError: Driver Not Loaded"}),
    )
    report = train_run.bench_train(
        bench.dataset,
        out=tmp_path,
        html=False,
        steps=4,
        warmup=1,
        batch_size=1,
        model="light",
        accelerator="emulated:resnet50-224-h100",
        workers=1,
    )
    assert "No facts of the GPUs from NVML: OSError: Driver Not Loaded." in report.warnings


@pytest.mark.slow
def test_its_dataset_is_made_by_the_commands_that_users_take(tmp_path):
    dataset = open_dataset(gpu_bench.synthesise(tmp_path, num_clips=2, num_frames=1, size="160x90"))
    assert len(dataset.manifest.cameras) == 6
    assert dataset.split("train").num_samples == 1
