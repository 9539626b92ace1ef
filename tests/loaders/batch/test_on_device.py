"""The loader with a device, in host memory: CUDA's streams and copies are stood in for, everything else is real."""

from __future__ import annotations

import contextlib
import gc
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch

from fuelrail.loaders import ImageAugment, Normalize
from fuelrail.loaders.batch import stages
from fuelrail.loaders.batch.buffer_pool import BufferPool
from fuelrail.loaders.batch.transfer import make_transfer
from fuelrail.loaders.decode import BACKENDS, turbo
from fuelrail.loaders.decode.turbo import TurboDecoder
from fuelrail.pipeline.channels.table import ArraySpec, Channel, Law, Vocabulary
from support.datasets import build_dataset
from support.loaders import make_loader

if TYPE_CHECKING:
    from fuelrail.pipeline.errors import ImageError

IMAGE = ImageAugment(height=32, width=64)
DEFAULT = "the default stream"


class Event(NamedTuple):
    """What happened: on which stream, and the thread."""

    what: str
    stream: Any


class HostCuda:
    """Streams that only have names, copies that are counted; ``log`` is in the order of time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[Event] = []
        self.num_copies = 0
        self.pinned: list[tuple[int, ...]] = []
        self._local = threading.local()
        host = self

        class Stream:
            def __init__(self, device: torch.device, priority: int = 0) -> None:
                self.device, self.priority = device, priority
                host.log.append(Event("made", self))

        class Done:
            def __init__(self, blocking: bool = False) -> None:
                self.blocking = blocking

            def record(self, stream: Stream) -> None:
                self.stream = stream

            def synchronize(self) -> None:
                assert self.blocking, "a thread that spins takes a core"
                host.log.append(Event("waited", self.stream))

        @contextlib.contextmanager
        def stream(one: Stream):
            before, self._local.stream = self.current(), one
            yield
            self._local.stream = before

        to = torch.Tensor.to

        def copy(tensor: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
            if arguments and str(arguments[0]).startswith("cuda"):
                self.num_copies += 1
                self.log.append(Event("copied", self.current()))
                return tensor.clone()
            return to(tensor, *arguments, **options)

        def pin(pool: BufferPool) -> np.ndarray:
            if pool._pinned:
                self.pinned.append(pool._shape)
            return np.empty(pool._shape, np.uint8)

        for name, value in {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "current_stream": lambda device=None: self.current(),
            "Stream": Stream,
            "Event": Done,
            "stream": stream,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.Tensor, "to", copy)
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor.nbytes > 1 << 20)
        monkeypatch.setattr(
            torch.Tensor, "record_stream", lambda tensor, stream: self.log.append(Event("recorded", stream))
        )
        monkeypatch.setattr(BufferPool, "_new", pin)
        monkeypatch.setattr(stages, "with_ranges", lambda stage: stage)

    def current(self) -> Any:
        return getattr(self._local, "stream", DEFAULT)

    def note(self, what: str) -> None:
        self.log.append(Event(what, self.current()))

    def events(self, *names: str) -> list[Event]:
        return [event for event in self.log if event.what in names]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> HostCuda:
    return HostCuda(monkeypatch)


class OnDevice(TurboDecoder):
    """The turbo backend, as one that decodes on a device."""

    name = "on_device"
    num_refused = 7

    def __init__(self, device: str = "cuda:0") -> None:
        super().__init__()
        self.device = torch.device("cuda:0")

    def new_output(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.full(shape, 9, dtype=torch.uint8)

    def decode_batch(self, encoded, image_maps, out, interpolation="bilinear"):
        errors: list[ImageError | None] = []
        for data, image_map, picture in zip(encoded, image_maps, out, strict=True):
            if data is None:
                picture.zero_()
            else:
                self.decode_into(data, image_map, picture.numpy(), interpolation)
            errors.append(None)
        return errors

    def close(self) -> None:
        """Nothing is held."""


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turbo, "OnDevice", OnDevice, raising=False)
    monkeypatch.setitem(BACKENDS, "on_device", "fuelrail.loaders.decode.turbo:OnDevice")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("device") / "dataset"
    build_dataset(root, {"train": (6, 6)})
    return root


def batches(dataset, **options: Any) -> list[dict[str, Any]]:
    settings = {"batch_size": 4, "seed": 3, "image": IMAGE, "num_workers": 2, "points": True, **options}
    with make_loader(dataset, **settings) as loader:
        return list(loader)


def assert_equal(first: Any, second: Any) -> None:
    if isinstance(first, torch.Tensor):
        assert torch.equal(first.nan_to_num(), second.nan_to_num())
    elif isinstance(first, dict):
        assert first.keys() == second.keys()
        for name, value in first.items():
            assert_equal(value, second[name])
    elif isinstance(first, (list, tuple)):
        assert len(first) == len(second)
        for one, other in zip(first, second, strict=True):
            assert_equal(one, other)
    else:
        assert first == second


@pytest.mark.parametrize("frames", [None, [-1, 0]])
@pytest.mark.parametrize("decoder", ["turbo", "on_device"])
def test_f14_a_batch_is_at_most_three_copies_whatever_it_holds(dataset, cuda, decoder, frames) -> None:
    options = {"frames": frames, "image": ImageAugment(height=256, width=704)}
    expected = batches(dataset, **options)
    assert cuda.num_copies == 0
    # The decoder's images are on the device already: here too, since copies of host memory are what is counted.
    got = batches(dataset, decoder=decoder, device="cuda:0", **options)
    (copying,) = {event.stream for event in cuda.events("copied")}
    # Batches of the next epoch are copied ahead; each is waited for.
    num_batches = len([event for event in cuda.events("waited") if event.stream is copying])
    assert cuda.num_copies == 2 * num_batches  # large pinned images, and all else
    assert_equal(got, expected)
    recorded = cuda.events("recorded")
    assert len(recorded) == 2 * len(got), "a call in the trainer's thread for each memory, not for each tensor"
    assert {event.stream for event in recorded} == {DEFAULT}


def test_f21_normalising_copies_nothing_more(dataset, cuda, monkeypatch) -> None:
    made = []
    tensor = torch.tensor
    monkeypatch.setattr(
        torch, "tensor", lambda *values, **options: made.append(options.get("device")) or tensor(*values, **options)
    )
    got = batches(dataset, device="cuda:0", normalize=Normalize(mean=(1.5, 2.5, 3.5), std=(4.5, 5.5, 6.5)))
    assert len(got) == 3
    assert len([device for device in made if device is not None]) == 2  # mean and deviation, once
    assert_equal(got, batches(dataset, normalize=Normalize(mean=(1.5, 2.5, 3.5), std=(4.5, 5.5, 6.5))))


def test_f15_no_pinned_images_where_the_decoder_has_the_memory(dataset, cuda) -> None:
    with_images = len(batches(dataset, device="cuda:0")) and [shape for shape in cuda.pinned if len(shape) > 1]
    assert with_images
    cuda.pinned.clear()
    got = batches(dataset, device="cuda:0", decoder="on_device")
    assert [shape for shape in cuda.pinned if len(shape) > 1] == []
    assert_equal(got, batches(dataset))


def test_f15_leaving_out_the_decoding_takes_the_decoders_memory(dataset, cuda) -> None:
    with make_loader(dataset, 4, image=IMAGE, device="cuda:0", decoder="on_device") as loader:
        loader.leave_out(["decode"])
        for batch in loader:
            assert batch["img"].shape == (4, 2, 3, 32, 64)
            assert bool((batch["img"] == 9).all())


@pytest.mark.parametrize("decoder", ["turbo", "on_device"])
def test_f5_the_users_functions_run_on_streams_of_their_own_and_are_complete(dataset, cuda, decoder) -> None:
    def transform(sample):
        cuda.note("transform")
        return sample

    def collate(samples):
        cuda.note("collate")
        return {"img": torch.stack([sample["img"] for sample in samples])}

    batches(dataset, device="cuda:0", decoder=decoder, transform=transform, collate_fn=collate)
    work = cuda.events("transform", "collate")
    assert len([event for event in work if event.what == "transform"]) >= 12
    assert all(event.stream is not DEFAULT for event in work), "behind the trainer's kernels"
    copying = {event.stream for event in cuda.events("copied")}
    assert copying.isdisjoint({event.stream for event in work})
    for at, event in enumerate(cuda.log):
        if event in work:
            later = [one for one in cuda.log[at + 1 :] if one.stream is event.stream and one.what != "transform"]
            assert later[0].what == "waited", "handed on before its kernels were done"


def test_f5_a_function_that_fails_is_waited_for_too(dataset, cuda) -> None:
    def fail(sample):
        cuda.note("transform")
        raise ValueError("no")

    with pytest.raises(Exception, match="no"):
        batches(dataset, device="cuda:0", transform=fail)
    at = max(number for number, event in enumerate(cuda.log) if event.what == "transform")
    stream = cuda.log[at].stream
    assert any(event == Event("waited", stream) for event in cuda.log[at:])


def test_f22_copies_come_first_and_waiting_takes_no_core(cuda) -> None:
    transfer = make_transfer("cuda")
    assert transfer is not None
    (made,) = cuda.events("made")
    assert made.stream.priority < 0
    moved = transfer({"img": torch.ones(3)})
    assert [event.what for event in cuda.log] == ["made", "copied", "waited"]
    assert transfer.hand_over(moved)["img"].tolist() == [1, 1, 1]


def test_f9_images_that_dali_failed_on_are_counted_in_the_stats(dataset, cuda) -> None:
    with make_loader(dataset, 4, image=IMAGE, device="cuda:0", decoder="on_device") as loader:
        assert loader.stats().refused_images == 7
    with make_loader(dataset, 4, image=IMAGE) as loader:
        assert loader.stats().refused_images == 0


def test_f16_f23_three_lanes_decode_and_auto_tunes_their_number(dataset, cuda) -> None:
    def lanes(**options: Any) -> int:
        with make_loader(dataset, 4, image=IMAGE, device="cuda:0", decoder="on_device", **options) as loader:
            (decode,) = [stage for stage in loader.stages() if stage.name == "decode"]
            return decode.num_threads

    assert lanes(num_workers=1) == 3
    assert lanes(num_workers=64) == 4
    assert lanes(num_workers="auto") == 3
    with make_loader(dataset, 4, image=IMAGE, device="cuda:0", decoder="on_device", num_workers="auto") as loader:
        tuner = loader._runner._tuner
        assert (tuner._fewest, tuner.tuning.num_workers, tuner.most.num_workers) == (3, 3, 4)


@pytest.mark.parametrize("decoder", ["turbo", "on_device"])
def test_static_batches_keep_their_addresses_on_a_device(dataset, cuda, decoder) -> None:
    options = {"max_points": 4000, "buffers": 2}
    seen: dict[str, list[int]] = {}
    with (
        make_loader(
            dataset, 2, image=IMAGE, points=True, device="cuda:0", decoder=decoder, static=options, shuffle=False
        ) as loader,
        make_loader(dataset, 2, image=IMAGE, points=True, static=options, shuffle=False) as on_cpu,
    ):
        for got, expected in zip(loader, on_cpu, strict=True):
            assert_equal(got, expected)
            for name, value in got.items():
                if isinstance(value, torch.Tensor):
                    seen.setdefault(name, []).append(value.data_ptr())
            del got
            gc.collect()
    for name, addresses in seen.items():
        assert addresses == addresses[:2] * 3, name


CHANNELS = (
    Channel(
        name="returns", kind="points", field="returns.npy", law=Law("fixed"), dtype="float32",
        axes=("point", "column"), shape=(None, 2), columns=("x", "y"), optional=True,
    ),
    Channel(name="labels", kind="array", field="labels.npy", law=Law("fixed"), dtype="uint16", axes=("a",), shape=(5,)),
    Channel(
        name="agents", kind="ragged", field="agents.safetensors", law=Law("fixed"), arrays=(ArraySpec("age", "int8"),)
    ),
    Channel(
        name="words", kind="tokens", field="words.npy", dtype="int32", axes=("token",), shape=(None,),
        law=Law("fixed"), vocabulary=Vocabulary("words", 100),
    ),
)  # fmt: skip


def test_selected_channels_come_in_the_same_copy(tmp_path, cuda) -> None:
    values = {
        "returns": lambda row: None if row == 2 else np.full((row, 2), row, np.float32),
        "labels": lambda row: np.arange(row, row + 5, dtype=np.uint16),
        "agents": lambda row: {"age": np.arange(row, dtype=np.int8)},
        "words": lambda row: np.arange(row % 3, dtype=np.int32),
    }
    build_dataset(tmp_path / "d", {"train": (8,)}, extra=[(one, values[one.name]) for one in CHANNELS])
    names = list(values)
    found = batches(tmp_path / "d", channels=names, device="cuda", shuffle=False)
    for batch in found:
        agents, words = batch["agents"]["age"], batch["words"]
        copied = [batch["cam_valid"], batch["returns_valid"], batch["labels"], words.values, words.offsets, *agents]
        copied += [points for points in batch["returns"] if points is not None]
        assert len({tensor.untyped_storage().data_ptr() for tensor in copied}) == 1
    for batch, host in zip(found, batches(tmp_path / "d", channels=names, shuffle=False), strict=True):
        assert batch.keys() == host.keys()
        for name in names:
            assert_equal(batch[f"{name}_valid"], host[f"{name}_valid"])
        assert torch.equal(batch["labels"].int(), host["labels"].int())
        assert_equal([batch["agents"], batch["words"]], [host["agents"], host["words"]])
        assert_equal(batch["returns"], host["returns"])
