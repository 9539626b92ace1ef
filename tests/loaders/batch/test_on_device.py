"""The loader with a device that is faked in host memory: streams, lanes and memory; see also `test_device_options`."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from fuelrail import World
from fuelrail.loaders.batch.transfer import make_transfer
from support import batched_turbo
from support.batches import SMALL, batches, load, unlike
from support.fake_cuda import FakeCuda
from support.fake_streams import FakeEvent

DEVICE = {"device": "cuda:0", "seed": 3}


def forever(loader):
    while True:
        yield from loader


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch):
    batched_turbo.install(monkeypatch)
    with FakeCuda(monkeypatch) as fake:
        yield fake


@pytest.fixture(scope="module")
def dataset(build_once):
    return build_once({"train": (6, 6)})[0]


def test_leaving_out_the_decoding_takes_the_decoders_memory(dataset, cuda) -> None:
    with load(dataset, 4, decoder="batched", **DEVICE) as loader:
        loader.leave_out(["decode"])
        for batch in loader:
            assert batch["img"].shape == (4, 2, 3, SMALL.height, SMALL.width)
            assert bool((batch["img"] == 9).all())


@pytest.mark.parametrize("decoder", ["turbo", "batched"])
def test_the_users_functions_run_on_streams_of_their_own_and_are_waited_for(
    dataset, cuda, decoder, monkeypatch
):
    used = []
    waited = set()
    record = FakeEvent.record
    monkeypatch.setattr(
        FakeEvent,
        "record",
        lambda event, stream: waited.add(stream.stream_id) or record(event, stream),
    )

    def transform(sample):
        used.append(torch.cuda.current_stream())
        return {**sample, "img": sample["img"] + 1}

    def collate(samples):
        used.append(torch.cuda.current_stream())
        return {"img": torch.stack([sample["img"] for sample in samples])}

    collated = batches(
        dataset,
        4,
        decoder=decoder,
        transform=transform,
        collate_fn=collate,
        **DEVICE,
    )
    assert len(collated) == 3 and len(used) >= 15
    user_streams = {stream.stream_id for stream in used}
    assert user_streams.isdisjoint(stream.stream_id for stream in cuda._defaults), (
        "behind the trainer's kernels"
    )
    copying = {stream.stream_id for stream in cuda.streams if stream.priority < 0}
    assert user_streams.isdisjoint(copying)
    assert user_streams <= waited, "handed on before its kernels were done"


def test_a_function_that_fails_is_waited_for_too(dataset, cuda) -> None:
    used = []

    def fail(sample):
        sample["img"].add_(1)
        used.append(torch.cuda.current_stream())
        raise ValueError("no")

    with pytest.raises(Exception, match="no"):
        batches(dataset, 4, transform=fail, **DEVICE)
    assert all(stream.query() for stream in used)


def test_copies_come_first_and_waiting_takes_no_core(cuda, monkeypatch) -> None:
    blocking = []
    monkeypatch.setattr(
        torch.cuda,
        "Event",
        lambda **options: blocking.append(options) or FakeEvent(),
    )
    transfer = make_transfer("cuda")
    assert transfer is not None
    assert cuda.streams[-1].priority < 0
    moved = transfer({"img": torch.ones(3)})
    assert blocking == [{"blocking": True}], "a thread that spins takes a core"
    assert cuda.streams[-1].query(), "handed on before the copy was done"
    assert transfer.hand_over(moved)["img"].cpu().tolist() == [1, 1, 1]


@pytest.mark.parametrize("decoder", ["turbo", "batched"])
def test_a_loader_on_a_device_changes_its_ranks(dataset, cuda, decoder):
    """Buffers, lanes and what is on its way: nothing of it is used for another shape."""
    options = {"decoder": decoder, "drop_last": False, **DEVICE}
    with load(dataset, 5, **options) as alone:
        expected = [batch["img"].cpu() for _ in range(2) for batch in alone]
    with load(dataset, 5, **options) as loader:
        loader.commit()
        steps = forever(loader)
        for step, (rank, size) in enumerate([(0, 1), (1, 2), (2, 3), (2, 4), (0, 1)]):
            loader.reshape(World(rank, size))
            next(steps)
            loader.rollback()
            images = next(steps)["img"]
            loader.commit()
            rows = slice(rank * 5 // size, (rank + 1) * 5 // size)
            assert torch.equal(images.cpu(), expected[step][rows])
        del images, steps
    gc.collect()
    assert cuda.finish() == []


def test_images_that_dali_failed_on_are_counted_in_the_stats(dataset, cuda) -> None:
    for decoder, refused in (
        ("batched", batched_turbo.BatchedTurbo.num_refused),
        ("turbo", 0),
    ):
        with load(dataset, 4, decoder=decoder, **DEVICE) as loader:
            assert loader.stats().refused_images == refused


def test_three_lanes_decode_and_auto_tunes_their_number(dataset, cuda) -> None:
    for num_workers, lanes in ((1, 3), (64, 4), ("auto", 3)):
        with load(dataset, 4, decoder="batched", num_workers=num_workers, **DEVICE) as loader:
            (decode,) = [stage for stage in loader.stages() if stage.name == "decode"]
            assert decode.num_threads == lanes
            tuner = loader._runner._tuner
    assert (
        tuner._fewest,
        tuner.tuning.num_workers,
        tuner.limits.num_workers,
    ) == (3, 3, 4)


@pytest.mark.costly
@pytest.mark.parametrize("decoder", ["turbo", "batched"])
def test_static_batches_keep_their_addresses_on_a_device(dataset, cuda, decoder) -> None:
    options = {
        "static": {"max_points": 4000, "buffers": 2},
        "points": True,
        "shuffle": False,
        "seed": 3,
    }
    addresses_by_name: dict[str, list[int]] = {}
    on_host = [map_clone(batch) for batch in load(dataset, 2, **options)]
    with load(dataset, 2, decoder=decoder, device="cuda:0", **options) as loader:
        for got, expected in zip(loader, on_host, strict=True):
            assert unlike(got, expected) == []
            for name, value in got.items():
                if isinstance(value, torch.Tensor):
                    addresses_by_name.setdefault(name, []).append(value.data_ptr())
            del got
            gc.collect()
    for name, addresses in addresses_by_name.items():
        assert addresses == addresses[:2] * 3, name


def map_clone(batch: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }
