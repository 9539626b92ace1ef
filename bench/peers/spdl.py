"""SPDL's pipeline of threads over tar shards, with decoding by hand."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from fuelrail.bench.peers import wds
from fuelrail.bench.peers.peer import Batch, decode_sample, prepare_worker, unpack_number
from fuelrail.bench.peers.tar_samples import RawSample, shuffled_batches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from fuelrail.bench.peers.peer import Sample, Work


class Spdl:
    """Its tar iterator on mapped files, its pipeline; one task makes one batch."""

    def write(self, samples: Iterable[Sample], folder: Path, work: Work, /) -> None:
        """As the webdataset library does."""
        wds.PEER.write(samples, folder, work)

    def batches(self, folder: Path, work: Work, recipe: str, /) -> Iterator[Batch]:
        """As many decoding threads as there are CPUs."""
        prepare_worker()
        parse = import_module("spdl.io").iter_tarfile
        return run_pipeline(shuffled_batches(folder, work, parse), partial(_decode, work, recipe), work)


def run_pipeline(source: Iterable[list[RawSample]], decode: Callable[[Any], Batch], work: Work) -> Iterator[Batch]:
    """SPDL's pipeline from a source of batches over threads that decode."""
    builder = import_module("spdl.pipeline").PipelineBuilder()
    pipeline = (
        builder.add_source(source)
        .pipe(decode, concurrency=work.num_workers)
        .add_sink(2)
        .build(num_threads=work.num_workers)
    )
    with pipeline.auto_stop():
        yield from pipeline


def _decode(work: Work, recipe: str, samples: list[RawSample]) -> Batch:
    images = np.empty((len(samples), *work.sample_shape), np.uint8)
    for (_, encoded), planes in zip(samples, images, strict=True):
        decode_sample(encoded, recipe, planes)
    return Batch([unpack_number(number) for number, _ in samples], images)


PEER = Spdl()
