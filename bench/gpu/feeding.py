"""GPU checks of feeding: the loader alone, occupancy against the length of a step, contention, copies, memory."""

from __future__ import annotations

import collections
import threading
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fuelrail.bench.gpu.base import (
    Bench,
    CheckFailed,
    Mark,
    cycles_per_ms,
    endless,
    jpeg_engines,
    keep_busy,
    make_loader,
    percentiles,
    raise_clock,
)
from fuelrail.bench.gpu.images import cameras
from fuelrail.bench.measure.machine import peak_memory_bytes
from fuelrail.bench.trainer.models.resnet import ResNet
from fuelrail.bench.trainer.models.settings import ResNetSettings
from fuelrail.loaders import StaticBatches, Transforms
from fuelrail.pipeline.runtime.host import usable_cpus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


_WORKERS = {"turbo": (1, 2, 4, 8, 16), "dali": (2, 8)}  # with DALI workers parse, and more of them add decode lanes
_STEPS_MS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
_MIN_OCCUPANCY, _JUDGED_FROM_MS = 0.99, 10.0
_STEPS_AHEAD = 2
_DEMAND_IMAGES_PER_S = 340.0  # of a trainer on one H100, the upper end
_MAX_SLOWDOWN = 1.05
_MAX_COPIES = 3
_MAX_GROWTH_BYTES = 256 << 20


def loader_alone(bench: Bench, facts: dict[str, Any], decoder: str) -> None:
    """The loader as fast as it goes, into nothing, with 1 to 16 workers: images/s, stages, CPUs in use."""
    kinds = ("plain", "restart") if decoder == "dali" else ("plain",)
    counts = [count for count in _WORKERS[decoder] if count <= max(2, usable_cpus())][: bench.pick(5, 1)]
    with jpeg_engines(bench, decoder, facts):
        for kind in kinds:
            for workers in counts:
                facts[f"{kind}_{workers}_workers"] = _alone(bench, decoder, kind, workers)


def _alone(bench: Bench, decoder: str, kind: str, workers: int) -> dict[str, Any]:
    lasted: dict[str, list[float]] = collections.defaultdict(list)

    def observe(stage: str, at: int, batch: int, begin_s: float, end_s: float) -> None:  # noqa: ARG001 - what the loader calls
        lasted[stage].append(1e3 * (end_s - begin_s))

    batch_size = bench.pick(16, 2)
    with make_loader(bench, cameras(bench, kind), batch_size, decoder, num_workers=workers, trace=observe) as loader:
        batches = endless(loader)
        for _ in range(3):
            next(batches)
        lasted.clear()
        count, started_s, cpu_s = 0, time.perf_counter(), time.process_time()
        while count < 2 or time.perf_counter() - started_s < bench.pick(2.0, 0.05):
            next(batches)
            count += 1
        elapsed_s, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_s
    return {
        "images_per_s": round(count * batch_size * 6 / elapsed_s, 1),
        "cpus_in_use": round(cpu_s / elapsed_s, 2),
        "stage_ms_p50_p99": {stage: percentiles(values) for stage, values in lasted.items() if values},
    }


def occupancy_curve(bench: Bench, facts: dict[str, Any], decoder: str) -> None:
    """Occupancy against the length of a step, B = 16 x 6 cameras; from 10 ms on it must be 0.99.

    A step is a kernel that lasts that long. The host runs ahead by two steps, as a trainer that does not wait for the
    device does. Occupancy is the share of the steps in the time from the first one's begin to the last one's end, by
    the device's own clock.
    """
    cycles = 0.0
    if bench.on_gpu:
        raise_clock(bench.device)
        cycles = cycles_per_ms(bench.device)

    def compute(step_ms: float) -> None:
        if bench.on_gpu:
            keep_busy(round(step_ms * cycles))
        else:
            time.sleep(step_ms / 1e3)

    batch_size, low = bench.pick(16, 1), []
    with jpeg_engines(bench, decoder, facts), make_loader(bench, cameras(bench), batch_size, decoder) as loader:
        batches = endless(loader)
        for step_ms in bench.pick(_STEPS_MS, _STEPS_MS[3:4]):
            point = _point(bench, batches, step_ms, compute)
            needed = batch_size * 6 * 1e3 / step_ms
            facts[f"step_{step_ms:g}_ms"] = point | {"images_per_s_needed": round(needed, 1)}
            if step_ms >= _JUDGED_FROM_MS and point["occupancy"] < _MIN_OCCUPANCY:
                low.append(f"{point['occupancy']:.1%} at {step_ms:g} ms ({needed:.0f} images/s needed)")
    # An emulated device says nothing of a real one.
    if bench.on_gpu and low:
        raise CheckFailed(f"the GPU computed {', '.join(low)}, not {_MIN_OCCUPANCY:.0%} of the time")


def _point(bench: Bench, batches: Iterator[Any], step_ms: float, compute: Callable[[float], None]) -> dict[str, Any]:
    spans: list[tuple[Mark, Mark]] = []
    waits_ms: list[float] = []
    for _ in range(_STEPS_AHEAD + 2):
        next(batches)
    start_s, cpu_s = time.perf_counter(), time.process_time()
    while len(spans) < bench.pick(40, 3) or time.perf_counter() - start_s < bench.pick(2.5, 0.05):
        asked_s = time.perf_counter()
        batch = next(batches)
        waits_ms.append(1e3 * (time.perf_counter() - asked_s))
        start = Mark(bench)
        batch["img"].flatten()[::4097].sum()
        compute(step_ms)
        spans.append((start, Mark(bench)))
        del batch
        if len(spans) > _STEPS_AHEAD:
            spans[-1 - _STEPS_AHEAD][1].wait()
    spans[-1][1].wait()
    wall_s = time.perf_counter() - start_s
    busy_ms = [start.ms_to(end) for start, end in spans]
    return {
        "occupancy": round(sum(busy_ms) / spans[0][0].ms_to(spans[-1][1]), 4),
        "step_ms_p50_p99": percentiles(busy_ms),
        "wait_ms_p50_p99": percentiles(waits_ms),
        "cpus_in_use": round((time.process_time() - cpu_s) / wall_s, 2),
    }


def contention(bench: Bench, facts: dict[str, Any], decoder: str) -> None:
    """How long a step of many small kernels lasts while a loader works beside it at 1 x and 4 x the demand, and freely.

    Median and 99th percentile, by events. At the demand of a trainer the median may rise by 5 %. At 4 x the demand it
    is measured once more with the steps on a stream of high priority: what a trainer gains that asks for it.
    """
    resnet = ResNet(ResNetSettings())
    model = nn.Sequential(resnet.stem, *resnet.blocks).to(bench.device).eval()
    side = bench.pick(224, 64)
    images = torch.zeros(bench.pick(64, 1), 1, 3, side, side, dtype=torch.uint8, device=bench.device)

    def step() -> tuple[Mark, Mark]:
        start = Mark(bench)
        with torch.no_grad(), torch.autocast(bench.device.type, torch.bfloat16, enabled=bench.on_gpu):
            model(images)
        return start, Mark(bench)

    for _ in range(bench.pick(10, 1)):
        step()[1].wait()
    paces: dict[str, float | None] = {"1x": _DEMAND_IMAGES_PER_S, "4x": 4 * _DEMAND_IMAGES_PER_S, "free": None}
    facts["idle"] = _steps(bench, step)
    first = torch.cuda.Stream(bench.device, priority=-1) if bench.on_gpu else None  # type: ignore[no-untyped-call]
    with jpeg_engines(bench, decoder, facts):
        for name, images_per_s in list(paces.items())[: bench.pick(3, 1)]:
            with make_loader(bench, cameras(bench), bench.pick(16, 1), decoder) as loader:
                facts[name] = _beside(loader, images_per_s, lambda: _steps(bench, step))
                if name == "4x":
                    with torch.cuda.stream(first):
                        facts["4x_high_priority"] = _beside(loader, images_per_s, lambda: _steps(bench, step))
    facts["idle_again"] = _steps(bench, step)
    idle = min(facts["idle"][0], facts["idle_again"][0])
    facts["slowdown_at_1x"] = round(facts["1x"][0] / idle, 3)
    if bench.on_gpu and facts["slowdown_at_1x"] > _MAX_SLOWDOWN:
        raise CheckFailed(f"a step lasts {facts['slowdown_at_1x']:.2f} times as long with the loader beside it")


def _steps(bench: Bench, step: Callable[[], tuple[Mark, Mark]]) -> list[float]:
    lasted = []
    for _ in range(bench.pick(150, 2)):
        start, end = step()
        end.wait()
        lasted.append(start.ms_to(end))
    return percentiles(lasted)


def _beside(loader: Any, images_per_s: float | None, measure: Callable[[], list[float]]) -> list[float]:  # noqa: ANN401
    """Measure while a thread takes batches at a pace, or as fast as they come."""
    over, failed = threading.Event(), []

    def take() -> None:
        try:
            for batch in endless(loader):
                images = batch["img"].shape[0] * batch["img"].shape[1]
                del batch
                if over.wait(0.0 if images_per_s is None else images / images_per_s):
                    return
        except BaseException as error:  # noqa: BLE001 - raised where it is seen
            failed.append(error)

    thread = threading.Thread(target=take, name="taker")
    thread.start()
    try:
        return measure()
    finally:
        over.set()
        thread.join()
        if failed:
            raise failed[0]


def few_copies(bench: Bench, facts: dict[str, Any], decoder: str) -> None:
    """The loader makes at most three copies to the device for a batch, and none from pageable memory.

    As the profiler sees them. With DALI its own copies of encoded images count too, and are not judged.
    """
    activities = [torch.profiler.ProfilerActivity.CUDA if bench.on_gpu else torch.profiler.ProfilerActivity.CPU]
    with make_loader(bench, bench.dataset, 2, decoder, transforms=Transforms(points=True)) as loader:
        batches, count = endless(loader), bench.pick(20, 2)
        for _ in range(5):
            next(batches)
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(count):
                next(batches)
    names = collections.Counter(event.name for event in profile.events() if "Memcpy HtoD" in event.name)
    facts |= {"batches": count, "copies_a_batch": {name: round(number / count, 2) for name, number in names.items()}}
    if bench.on_gpu and decoder != "dali" and sum(names.values()) > _MAX_COPIES * (count + 4):
        raise CheckFailed(f"{sum(names.values()) / count:.1f} copies to the device for each batch, not {_MAX_COPIES}")


def memory_stays(bench: Bench, facts: dict[str, Any], decoder: str) -> None:
    """A loader takes no more of the device's memory after many batches than after few, and gives torch's back."""
    counts = bench.pick((40, 200), (4, 8))
    taken: list[int] = []
    with make_loader(bench, cameras(bench), bench.pick(16, 1), decoder) as loader:
        batches = endless(loader)
        for count in counts:
            for _ in range(count):
                next(batches)
            taken.append(_taken_bytes(bench))
    facts["host_peak_bytes"] = peak_memory_bytes()
    if not bench.on_gpu:
        return
    facts |= {
        "device_bytes_in_use": taken,
        "torch_peak_bytes": torch.cuda.max_memory_allocated(bench.device),
        "torch_bytes_after": torch.cuda.memory_allocated(bench.device),
        "device_bytes_after": _taken_bytes(bench),
    }
    if taken[-1] - taken[0] > _MAX_GROWTH_BYTES:
        raise CheckFailed(f"the device's memory in use grew from {taken[0]} to {taken[-1]} bytes")


def _taken_bytes(bench: Bench) -> int:
    if not bench.on_gpu:
        return 0
    free, total = torch.cuda.mem_get_info(bench.device)
    return total - free


def graphs_beside_the_loader(bench: Bench, facts: dict[str, Any], decoder: str) -> None:
    """A CUDA graph is captured while the loader's threads work, and computes from each batch what eager mode does.

    The batches are static ones, so the graph reads them where they are.
    """
    torch.manual_seed(0)
    layer = torch.nn.Conv2d(3, 8, 8, 8).to(bench.device)
    batch_size, num_batches = bench.pick(4, 1), bench.pick(20, 2)
    worst, transforms = 0.0, Transforms(static=StaticBatches(buffers=1))
    with torch.no_grad(), make_loader(bench, cameras(bench), batch_size, decoder, transforms=transforms) as loader:
        batches = endless(loader)
        fixed = next(batches)["img"]

        def compute() -> torch.Tensor:
            features: torch.Tensor = layer(fixed.flatten(0, 1).float() / 255.0)
            return features.mean(dim=(2, 3))

        compute()
        replay, result = _captured(bench, compute)
        for _ in range(num_batches):
            if next(batches)["img"].data_ptr() != fixed.data_ptr():
                raise CheckFailed("a static batch came at another address than the one before")
            replay()
            worst = max(worst, float((result() - compute()).abs().max()))
    facts |= {"captured": bench.on_gpu, "batches": num_batches, "largest_difference": worst}
    if worst > 1e-4:
        raise CheckFailed(f"the captured graph's results differ by {worst:g} from eager mode's")


def _captured(
    bench: Bench, compute: Callable[[], torch.Tensor]
) -> tuple[Callable[[], None], Callable[[], torch.Tensor]]:
    """Return what replays the graph, and what returns its result; without a GPU it computes again."""
    if not bench.on_gpu:
        return (lambda: None), compute
    side = torch.cuda.Stream(bench.device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(bench.device))
    with torch.cuda.stream(side):
        for _ in range(3):
            compute()
    torch.cuda.current_stream(bench.device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # The loader's threads allocate and query meanwhile, which the default mode ("global") does not allow.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = compute()
    return graph.replay, lambda: captured
