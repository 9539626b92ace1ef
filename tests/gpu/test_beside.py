"""GPU checks of what runs beside a loader: steps, CUDA graphs, memory, and ten thousand batches."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from torch import nn

from fuelrail import StaticBatches, Transforms
from fuelrail.bench.measure.machine import peak_memory_bytes
from fuelrail.bench.trainer.models.resnet import ResNet
from fuelrail.bench.trainer.models.settings import ResNetSettings
from support.gpu_bench import (
    Mark,
    cameras,
    check,
    each_decoder,
    endless,
    jpeg_engines,
    keep_busy,
    make_loader,
    percentiles,
)

_DEMAND_IMAGES_PER_S = 340.0  # of a trainer on one H100, the upper end
_MAX_SLOWDOWN = 1.05
_MAX_GROWTH_BYTES = 256 << 20
_DELAY_CYCLES = 2_000_000


@check(60)
@each_decoder
def test_contention(bench, facts, decoder):
    """How long a step of many small kernels lasts while a loader works beside it at 1 x and 4 x the demand, and freely.

    Median and 99th percentile, by events. At the demand of a trainer the median may rise by 5 %. At 4 x the demand it
    is measured once more with the steps on a stream of high priority: what a trainer gains that asks for it.
    """
    resnet = ResNet(ResNetSettings())
    model = nn.Sequential(resnet.stem, *resnet.blocks).to(bench.device).eval()
    side = bench.pick(224, 64)
    images = torch.zeros(
        bench.pick(64, 1),
        1,
        3,
        side,
        side,
        dtype=torch.uint8,
        device=bench.device,
    )

    def step():
        start = Mark(bench)
        with (
            torch.no_grad(),
            torch.autocast(bench.device.type, torch.bfloat16, enabled=bench.on_gpu),
        ):
            model(images)
        end = Mark(bench)
        end.wait()
        return start.ms_to(end)

    def steps():
        return percentiles([step() for _ in range(bench.pick(150, 2))])

    for _ in range(bench.pick(10, 1)):
        step()
    paces = {
        "1x": _DEMAND_IMAGES_PER_S,
        "4x": 4 * _DEMAND_IMAGES_PER_S,
        "free": None,
    }
    facts["idle"] = steps()
    first = torch.cuda.Stream(bench.device, priority=-1) if bench.on_gpu else None
    with jpeg_engines(bench, decoder, facts):
        for name, images_per_s in list(paces.items())[: bench.pick(3, 1)]:
            with make_loader(bench, cameras(bench), bench.pick(16, 1), decoder) as loader:
                facts[name] = _beside(loader, images_per_s, steps)
                if name == "4x":
                    with torch.cuda.stream(first):
                        facts["4x_high_priority"] = _beside(loader, images_per_s, steps)
    facts["idle_again"] = steps()
    slowdown = facts["1x"][0] / min(facts["idle"][0], facts["idle_again"][0])
    facts["slowdown_at_1x"] = round(slowdown, 3)
    assert not bench.on_gpu or slowdown <= _MAX_SLOWDOWN, (
        f"a step lasts {slowdown:.2f} times as long with the loader beside it"
    )


def _beside(loader, images_per_s, measure):
    """Measure while a thread takes batches at a pace, or as fast as they come."""
    over = threading.Event()
    failed = []

    def take():
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


@check(15)
@each_decoder
def test_graphs_beside_the_loader(bench, facts, decoder):
    """A CUDA graph is captured while the loader's threads work, and computes from each batch what eager mode does.

    The batches are static ones, so the graph reads them where they are.
    """
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 8, 8, 8).to(bench.device)
    worst = 0.0
    num_batches = bench.pick(20, 2)
    transforms = Transforms(static=StaticBatches(buffers=1))
    loader = make_loader(bench, cameras(bench), bench.pick(4, 1), decoder, transforms=transforms)
    with torch.no_grad(), loader:
        batches = endless(loader)
        fixed = next(batches)["img"]

        def compute():
            return layer(fixed.flatten(0, 1).float() / 255.0).mean(dim=(2, 3))

        compute()
        replay, result = _captured(bench, compute)
        for _ in range(num_batches):
            assert next(batches)["img"].data_ptr() == fixed.data_ptr(), (
                "a static batch came at another address"
            )
            replay()
            worst = max(worst, float((result() - compute()).abs().max()))
    facts |= {
        "captured": bench.on_gpu,
        "batches": num_batches,
        "largest_difference": worst,
    }
    assert worst <= 1e-4, f"the captured graph's results differ by {worst:g} from eager mode's"


def _captured(bench, compute):
    """Return what replays the graph, and what returns its result; without a GPU it computes again."""
    if not bench.on_gpu:
        return (lambda: None), compute
    side = torch.cuda.Stream(bench.device)
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


@check(60, twins=("cpu", "fake"))
@each_decoder
def test_memory_stays(bench, facts, decoder):
    """A loader takes no more of the device's memory after many batches than after few, and gives torch's back."""
    taken = []
    with make_loader(bench, cameras(bench), bench.pick(16, 1), decoder) as loader:
        batches = endless(loader)
        for count in bench.pick((40, 200), (4, 8)):
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
    assert taken[-1] - taken[0] <= _MAX_GROWTH_BYTES, "the device's memory in use grew"


def _taken_bytes(bench):
    if not bench.on_gpu:
        return 0
    free, total = torch.cuda.mem_get_info(bench.device)
    return total - free


@check(90, twins=("cpu", "fake"))
@each_decoder
def test_batches_stay_right(bench, facts, decoder):
    """Ten thousand batches hold what those of the first epoch held, while the trainer's stream is busy now and then.

    A checksum of each is made on the device, where every pixel's weight is its place; the host waits for none of them.
    """
    num_batches = bench.pick(10_000, 40)
    sums = []
    with make_loader(bench, bench.dataset, 1, decoder, shuffle=False) as loader:
        per_epoch = len(loader)
        for number, batch in enumerate(itertools.islice(endless(loader), num_batches)):
            if bench.on_gpu and number % 7 == 0:
                keep_busy(_DELAY_CYCLES)
            pixels = batch["img"].flatten().long()
            sums.append((pixels * torch.arange(1, len(pixels) + 1, device=pixels.device)).sum())
            del batch, pixels
    values = [int(value) for value in sums]
    wrong = [number for number, value in enumerate(values) if value != values[number % per_epoch]]
    facts |= {
        "batches": len(values),
        "batches_of_an_epoch": per_epoch,
        "different_sums": len(set(values)),
    }
    assert not wrong, (
        f"{len(wrong)} of {len(values)} batches changed between epochs, the first is {wrong[0]}"
    )


@pytest.mark.costly
def test_a_batch_that_changed_is_found(bench, monkeypatch):
    honest = endless

    def tampering(loader):
        for number, batch in enumerate(honest(loader)):
            if number == 33:
                batch["img"].view(-1)[[5, 6]] = batch["img"].view(-1)[[6, 5]] + torch.tensor(
                    [1, 0], dtype=torch.uint8
                )
            yield batch

    monkeypatch.setitem(globals(), "endless", tampering)
    with pytest.raises(
        AssertionError,
        match="1 of 40 batches changed between epochs, the first is 33",
    ):
        test_batches_stay_right(bench, {}, "turbo")
