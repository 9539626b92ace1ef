"""NVIDIA DALI on the CPU, with its reader of WebDataset shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path

import numpy as np

from fuelrail.bench.peers import wds
from fuelrail.bench.peers.peer import Batch, Sample, Work, seen_box

_SHUFFLE_BUFFER = 100


class Dali:
    """``roi`` decodes what the crop shows and shrinks with antialiasing; ``noaa`` without, and with the fast IDCT."""

    def write(self, samples: Iterable[Sample], folder: Path, work: Work, /) -> None:
        """As the webdataset library does."""
        wds.PEER.write(samples, folder, work)

    def batches(self, folder: Path, work: Work, recipe: str, /) -> Iterator[Batch]:
        """One pipeline with as many threads as there are CPUs."""
        dali, fn = import_module("nvidia.dali"), import_module("nvidia.dali.fn")
        shards = sorted(folder.glob("*.tar"))
        indexes = [_index(shard) for shard in shards]
        left, upper, right, lower = seen_box(work.source_wh, (work.width, work.height))
        antialias = recipe == "roi"
        pipeline = dali.Pipeline(
            batch_size=work.batch_size, num_threads=work.num_workers, device_id=None, seed=work.seed,
            prefetch_queue_depth=2,
        )  # fmt: skip
        with pipeline:
            number, *encoded = fn.readers.webdataset(
                name="shards",
                paths=list(map(str, shards)),
                index_paths=list(map(str, indexes)),
                ext=[wds.NUMBER, *(f"{camera}.jpg" for camera in work.cameras)],
                random_shuffle=True,
                initial_fill=_SHUFFLE_BUFFER,
                missing_component_behavior="error",
            )
            images = []
            for image in encoded:
                decoded = fn.decoders.image_slice(
                    image,
                    start=[round(upper), round(left)],
                    end=[round(lower), round(right)],
                    axes=[0, 1],
                    output_type=dali.types.RGB,
                    use_fast_idct=not antialias,
                )
                small = fn.resize(
                    decoded, resize_x=work.width, resize_y=work.height, antialias=antialias,
                    interp_type=dali.types.INTERP_LINEAR,
                )  # fmt: skip
                images.append(fn.transpose(small, perm=[2, 0, 1]))
            pipeline.set_outputs(number, fn.stack(*images, axis=0))
        pipeline.build()
        while True:
            numbers, tensors = pipeline.run()
            yield Batch(numbers.as_array().view(np.int64).reshape(-1).tolist(), np.asarray(tensors.as_tensor()))


def _index(shard: Path) -> Path:
    """DALI's index of a shard, by its own tool; made once, and no part of what is timed."""
    path = shard.with_suffix(".idx")
    if not path.exists():
        with import_module("wds2idx").IndexCreator(str(shard), str(path)) as creator:
            creator.create_index()
    return path


PEER = Dali()
