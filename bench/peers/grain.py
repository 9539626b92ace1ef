"""Grain with threads in this process, over ArrayRecord files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path

import msgspec
import numpy as np

from fuelrail.bench.peers.peer import (
    Batch,
    Sample,
    Work,
    decode_sample,
    prepare_worker,
)

_DECODER = msgspec.msgpack.Decoder(tuple[int, list[memoryview]])
_BATCHES_AHEAD = 2


class Grain:
    """Records read at random; what its threads hand over are whole batches."""

    def write(self, samples: Iterable[Sample], folder: Path, work: Work, /) -> None:
        """Write ArrayRecord files with one record a group, which random reading needs."""
        module = import_module("array_record.python.array_record_module")
        writer = None
        for count, sample in enumerate(samples):
            if count % work.samples_per_shard == 0:
                if writer is not None:
                    writer.close()
                path = folder / f"train-{count // work.samples_per_shard:06d}.array_record"
                writer = module.ArrayRecordWriter(str(path), "group_size:1")
            assert writer is not None
            writer.write(msgspec.msgpack.encode(sample))
        if writer is not None:
            writer.close()

    def batches(self, folder: Path, work: Work, recipe: str, /) -> Iterator[Batch]:
        """Return batches of a MapDataset: seeded shuffle, each decoded by one of as many threads
        as there are CPUs.
        """
        grain = import_module("grain.python")
        prepare_worker()
        decoding = recipe.removeprefix("thr-")

        def decode(records: Sequence[bytes]) -> Batch:
            images = np.empty((len(records), *work.sample_shape), np.uint8)
            numbers = []
            for record, planes in zip(records, images, strict=True):
                number, encoded = _DECODER.decode(record)
                decode_sample(encoded, decoding, planes)
                numbers.append(number)
            return Batch(numbers, images)

        source = grain.ArrayRecordDataSource(sorted(map(str, folder.glob("*.array_record"))))
        dataset = (
            grain.MapDataset.source(source)
            .seed(work.seed)
            .shuffle()
            .repeat()
            .batch(
                work.batch_size,
                drop_remainder=True,
                batch_fn=decode,
            )
        )
        options = grain.ReadOptions(
            num_threads=work.num_workers,
            prefetch_buffer_size=_BATCHES_AHEAD * work.num_workers,
        )
        return iter(dataset.to_iter_dataset(options))


PEER = Grain()
