"""Loaders for the restore benchmark: each writes a data set of tiny samples, and starts on it from any saved state.

Every sample is its own number, so the order can be checked. All shuffle, all run in one process (a worker process
would add its start to each figure), all hand out batches as lists of those numbers.
"""

from __future__ import annotations

import shutil
import struct
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import msgspec

from fuelrail.bench.micro.made_dataset import MadeSample, even_lengths, write_made_dataset
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.format.codecs import RAW
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.format.index.samples import INDEX_FILE, write_index
from fuelrail.pipeline.format.index.tables import write_tables
from fuelrail.pipeline.format.manifest import MANIFEST_FILE, encode_manifest
from fuelrail.pipeline.order.batching import Batching, Cursor, World
from fuelrail.pipeline.order.compile import CompiledOrder, compile_order
from fuelrail.pipeline.order.spec import OrderSpec
from fuelrail.sharding.write.packer import RawMember

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fuelrail.pipeline.format.dataset import Dataset

BATCH = 64
_IMAGE_BATCH = 4
SAMPLES_PER_SHARD = 10_000
_NUMBER = struct.Struct("<q56x")  # 64 bytes a sample


class RestoreLoader(Protocol):
    """One loader on one folder."""

    def batches(self) -> Iterator[list[int]]:
        """Batches from the start of the epoch, or from the state it was made with."""

    def state(self) -> dict[str, Any]:
        """Where it stands after the last batch, as JSON."""


class LoaderKind(Protocol):
    """How to write a loader's data and start it."""

    packages: ClassVar[tuple[str, ...]]
    """Distributions whose versions a figure carries."""
    modules: ClassVar[tuple[str, ...]]
    """What to import before the clock starts."""

    def write(self, folder: Path, num_samples: int, source: str | None, /) -> None:
        """Write the data set; ``source``: the dataset whose images are to be used."""

    def start(self, folder: Path, state: dict[str, Any] | None, /) -> RestoreLoader:
        """Start at the epoch's beginning, or from a state."""

    def point(self, _folder: Path, _consumed: int, /) -> tuple[dict[str, Any], list[int]] | None:
        """State and next batch after ``consumed`` samples, for a loader whose epoch takes too long; None: run it."""
        return None


class FuelrailSpans(LoaderKind):
    """Order, batches, index and checked spans from mapped shards, as `DataLoader` uses them; nothing is decoded."""

    packages: ClassVar[tuple[str, ...]] = ("numpy", "pyarrow")
    modules: ClassVar[tuple[str, ...]] = ("fuelrail.loaders.storage.reader",)

    def write(self, folder: Path, num_samples: int, _source: str | None, /) -> None:
        """Tar shards of one small member a sample, with their index."""
        samples = (
            MadeSample(f"{number:09d}", f"{number // 100:07d}", number % 100, 0, [_number_member(number)])
            for number in range(num_samples)
        )
        write_made_dataset(folder, even_lengths(num_samples, SAMPLES_PER_SHARD), samples)

    def start(self, folder: Path, state: dict[str, Any] | None, /) -> RestoreLoader:
        """Open the dataset and seek."""
        return _Spans(open_dataset(folder), state)


def _number_member(number: int) -> RawMember:
    return RawMember("n.bin", RAW, _NUMBER.pack(number))


class _Spans:
    def __init__(self, dataset: Dataset, state: dict[str, Any] | None) -> None:
        from fuelrail.loaders.storage.reader import SampleReader

        order = compile_order(OrderSpec(seed=0), dataset)
        assert isinstance(order, CompiledOrder)
        self._order, self._reader = order, SampleReader(dataset)
        self._cursor = Cursor(**state) if state else Cursor()
        self._batching = Batching(order.epoch_length, BATCH, World())

    def batches(self) -> Iterator[list[int]]:
        order, rest, first = self._order.epoch(self._cursor.epoch), self._cursor.rest(self._batching), self._cursor
        for step in range(rest.num_steps):
            batch = []
            for number in order(rest.positions(step)).tolist():
                fetched = self._reader.fetch(number)
                batch.append(_NUMBER.unpack_from(fetched.base, fetched.row.members[0].offset)[0])
            self._cursor = Cursor(first.epoch, rest.consumed(step + 1))
            yield batch

    def state(self) -> dict[str, Any]:
        return {"epoch": self._cursor.epoch, "samples_consumed": self._cursor.samples_consumed}


class FuelrailImages(LoaderKind):
    """The whole DataLoader, images decoded; the index repeats the entries of a real dataset's samples."""

    packages: ClassVar[tuple[str, ...]] = ("numpy", "torch", "simplejpeg", "opencv-python-headless")
    modules: ClassVar[tuple[str, ...]] = ("fuelrail.loaders",)

    def write(self, folder: Path, num_samples: int, source: str | None, /) -> None:
        """An index of ``num_samples`` entries over the first split of ``source``, whose shards are linked."""
        if source is None:
            raise ConfigError("fuelrail-images needs --dataset, a Fuelrail dataset with cameras")
        dataset = open_dataset(source)
        manifest, index = dataset.manifest, dataset.index
        folder.mkdir(parents=True)
        split, entry = next(iter(manifest.splits.items()))
        shards = dataset.shards[entry.first_shard : entry.first_shard + entry.num_shards]
        for shard in shards:
            (folder / shard.name).hardlink_to(dataset.root / shard.name)
        bounds = [num_samples * number // len(shards) for number in range(len(shards) + 1)]
        rows = (
            index.row(shard.first_sample + n % shard.num_samples)._replace(shard=number)
            for number, shard in enumerate(shards)
            for n in range(bounds[number + 1] - bounds[number])
        )
        write_index(folder / INDEX_FILE, rows, index.names, index.codecs)
        repeated = tuple(
            shard._replace(first_sample=first, num_samples=end - first)
            for shard, first, end in zip(shards, bounds[:-1], bounds[1:], strict=True)
        )
        whole = msgspec.structs.replace(
            entry, first_sample=0, num_samples=num_samples, first_shard=0, num_shards=len(shards)
        )
        aliased = msgspec.structs.replace(
            manifest, num_samples=num_samples, num_bytes=sum(shard.bytes for shard in repeated), splits={split: whole},
            files=tuple(write_tables(folder, repeated)),
        )  # fmt: skip
        (folder / MANIFEST_FILE).write_bytes(encode_manifest(aliased))

    def start(self, folder: Path, state: dict[str, Any] | None, /) -> RestoreLoader:
        """Make the DataLoader and load its state."""
        return _Images(folder, state)

    def point(self, folder: Path, consumed: int, /) -> tuple[dict[str, Any], list[int]]:
        """By arithmetic: an epoch would take hours."""
        from fuelrail.loaders import DataLoader

        dataset = open_dataset(folder)
        with DataLoader(dataset, _IMAGE_BATCH, split=next(iter(dataset.manifest.splits)), seed=0) as loader:
            state = loader.state_dict() | {"samples_consumed": consumed}
            order = compile_order(loader.order, dataset, next(iter(dataset.manifest.splits)))
        assert isinstance(order, CompiledOrder)
        rest = Cursor(0, consumed).rest(Batching(order.epoch_length, _IMAGE_BATCH, World()))
        return state, order.epoch(0)(rest.positions(0)).tolist()


class _Images:
    def __init__(self, folder: Path, state: dict[str, Any] | None) -> None:
        from fuelrail.loaders import DataLoader

        split = next(iter(open_dataset(folder).manifest.splits))
        self._loader = DataLoader(folder, _IMAGE_BATCH, split=split, seed=0)
        if state is not None:
            self._loader.load_state_dict(state)

    def batches(self) -> Iterator[list[int]]:
        for batch in self._loader:
            yield batch["global_index"].tolist()

    def state(self) -> dict[str, Any]:
        return self._loader.state_dict()


class TorchdataWebdataset(LoaderKind):
    """torchdata's StatefulDataLoader over a seeded webdataset pipeline, on Fuelrail's own tar shards."""

    packages: ClassVar[tuple[str, ...]] = ("torchdata", "webdataset", "torch")
    modules: ClassVar[tuple[str, ...]] = ("torchdata.stateful_dataloader", "webdataset")

    def write(self, folder: Path, num_samples: int, source: str | None, /) -> None:
        """The same shards."""
        FuelrailSpans().write(folder, num_samples, source)

    def start(self, folder: Path, state: dict[str, Any] | None, /) -> RestoreLoader:
        """Make the pipeline and load its state."""
        return _Torchdata(folder, state)


class _Torchdata:
    def __init__(self, folder: Path, state: dict[str, Any] | None) -> None:
        import webdataset as wds
        from torchdata.stateful_dataloader import StatefulDataLoader

        pipeline = wds.DataPipeline(
            wds.SimpleShardList(sorted(map(str, folder.glob("*.tar")))),
            wds.detshuffle(100, seed=0),
            wds.tarfile_to_samples(),
            wds.detshuffle(1000, seed=0),
            wds.map(_webdataset_number),
        )
        self._loader = StatefulDataLoader(pipeline, batch_size=BATCH, num_workers=0, collate_fn=list)
        if state is not None:
            self._loader.load_state_dict(state)

    def batches(self) -> Iterator[list[int]]:
        yield from self._loader

    def state(self) -> dict[str, Any]:
        return dict(self._loader.state_dict())


def _webdataset_number(sample: dict[str, Any]) -> int:
    number: int = _NUMBER.unpack(sample["n.bin"])[0]
    return number


class MosaicStreaming(LoaderKind):
    """MosaicML Streaming's StreamingDataLoader over MDS shards, its default shuffle."""

    packages: ClassVar[tuple[str, ...]] = ("mosaicml-streaming", "torch")
    modules: ClassVar[tuple[str, ...]] = ("streaming", "streaming.base.util")

    def write(self, folder: Path, num_samples: int, _source: str | None, /) -> None:
        """MDS shards."""
        streaming = import_module("streaming")
        with streaming.MDSWriter(out=str(folder), columns={"n": "int", "pad": "bytes"}) as writer:
            for number in range(num_samples):
                writer.write({"n": number, "pad": bytes(56)})

    def start(self, folder: Path, state: dict[str, Any] | None, /) -> RestoreLoader:
        """Make the dataset and load its state."""
        return _Mosaic(folder, state)


class _Mosaic:
    def __init__(self, folder: Path, state: dict[str, Any] | None) -> None:
        streaming = import_module("streaming")
        import_module("streaming.base.util").clean_stale_shared_memory()
        dataset = streaming.StreamingDataset(local=str(folder), shuffle=True, shuffle_seed=0, batch_size=BATCH)
        self._loader = streaming.StreamingDataLoader(dataset, batch_size=BATCH, num_workers=0, collate_fn=_numbers)
        if state is not None:
            self._loader.load_state_dict(state)

    def batches(self) -> Iterator[list[int]]:
        for batch in self._loader:
            yield batch["n"]

    def state(self) -> dict[str, Any]:
        return dict(self._loader.state_dict() or {})


def _numbers(samples: list[dict[str, Any]]) -> dict[str, list[int]]:
    return {"n": [int(sample["n"]) for sample in samples]}


class LitData(LoaderKind):
    """LitData's StreamingDataLoader over its own chunks."""

    packages: ClassVar[tuple[str, ...]] = ("litdata", "torch")
    modules: ClassVar[tuple[str, ...]] = ("litdata",)

    def write(self, folder: Path, num_samples: int, _source: str | None, /) -> None:
        """LitData chunks, one worker."""
        litdata = import_module("litdata")
        litdata.optimize(
            fn=_lit_sample, inputs=list(range(num_samples)), output_dir=str(folder), chunk_bytes="16MB", num_workers=1,
            start_method="fork",
        )  # fmt: skip

    def start(self, folder: Path, state: dict[str, Any] | None, /) -> RestoreLoader:
        """Make the dataset and load its state."""
        return _Lit(folder, state)


def _lit_sample(number: int) -> dict[str, Any]:
    return {"n": number, "pad": bytes(56)}


class _Lit:
    def __init__(self, folder: Path, state: dict[str, Any] | None) -> None:
        litdata = import_module("litdata")
        dataset = litdata.StreamingDataset(str(folder), shuffle=True, seed=0, drop_last=True)
        self._loader = litdata.StreamingDataLoader(dataset, batch_size=BATCH, num_workers=0, collate_fn=_numbers)
        if state is not None:
            self._loader.load_state_dict(state)

    def batches(self) -> Iterator[list[int]]:
        for batch in self._loader:
            yield batch["n"]

    def state(self) -> dict[str, Any]:
        return dict(self._loader.state_dict())


KINDS: dict[str, LoaderKind] = {
    "fuelrail": FuelrailSpans(),
    "fuelrail-images": FuelrailImages(),
    "torchdata-webdataset": TorchdataWebdataset(),
    "mosaicml-streaming": MosaicStreaming(),
    "litdata": LitData(),
}


def remove(folder: Path) -> None:
    """Remove a loader's data, if any."""
    shutil.rmtree(folder, ignore_errors=True)
