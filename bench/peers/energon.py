"""Megatron Energon over WebDataset shards with its index."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fuelrail.bench.peers import wds
from fuelrail.bench.peers.peer import Batch, Sample, Work, new_sample, prepare_worker, unpack_number
from fuelrail.bench.peers.torch_workers import stack

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


_SHUFFLE_BUFFER = 100
_DATASET = "__module__: megatron.energon\n__class__: CrudeWebdataset\ndecoder: null\n"


class Energon:
    """Crude samples (members as bytes) and a task encoder that decodes, as its guide shows for data of one's own."""

    def write(self, samples: Iterable[Sample], folder: Path, work: Work, /) -> None:
        """Tar shards by the webdataset library, Energon's index and configuration beside them."""
        wds.PEER.write(samples, folder, work)
        webdataset = import_module("megatron.energon.flavors.webdataset.prepare")
        webdataset.WebdatasetPreparator.prepare_dataset(
            folder,
            sorted(path.name for path in folder.glob("*.tar")),
            split_parts_ratio=[("train", 1.0)],
            shuffle_seed=work.seed,
            workers=1,
        )
        (folder / ".nv-meta" / "dataset.yaml").write_text(_DATASET, encoding="utf-8")

    def batches(self, folder: Path, work: Work, recipe: str, /) -> Iterator[Batch]:
        """Its training dataset, which repeats, in its own loader."""
        energon = import_module("megatron.energon")
        prepare_worker()  # before the workers are forked from this process
        torch.set_num_threads(1)
        dataset = energon.get_train_dataset(
            folder,
            worker_config=energon.WorkerConfig(rank=0, world_size=1, num_workers=work.num_workers),
            batch_size=work.batch_size,
            shuffle_buffer_size=_SHUFFLE_BUFFER,
            max_samples_per_sequence=None,
            task_encoder=_encoder(work, recipe),
        )
        for numbers, images in energon.get_loader(dataset):
            yield Batch(numbers, images.numpy())


def _encoder(work: Work, recipe: str) -> Any:  # noqa: ANN401 - a class whose base is imported here
    energon = import_module("megatron.energon")
    stateless = import_module("megatron.energon.task_encoder.base").stateless

    @dataclass
    class Decoded(energon.Sample):  # type: ignore[name-defined, misc]
        number: int
        images: NDArray[np.uint8]

    @stateless  # type: ignore[untyped-decorator]
    def cook(sample: dict[str, Any]) -> Decoded:
        encoded = [sample[f"{camera}.jpg"] for camera in work.cameras]
        return Decoded(
            **energon.basic_sample_keys(sample),
            number=unpack_number(sample[wds.NUMBER]),
            images=new_sample(encoded, recipe, work),
        )

    class Encoder(energon.DefaultTaskEncoder):  # type: ignore[name-defined, misc]
        cookers = (energon.Cooker(cook),)

        @stateless  # type: ignore[untyped-decorator]
        def batch(self, samples: list[Decoded]) -> tuple[list[int], torch.Tensor]:
            return stack([(sample.number, sample.images) for sample in samples])

        @stateless  # type: ignore[untyped-decorator]
        def encode_batch(self, batch: tuple[list[int], torch.Tensor]) -> tuple[list[int], torch.Tensor]:
            return batch

    return Encoder()


PEER = Energon()
