"""Fuelrail's order, and its datasets, as loaders of torchtitan.

::

    config.dataloader = OrderedDataLoader.Config(rows=documents, order=fr.OrderSpec(seed=7))

The state is one position for all ranks, so a checkpoint continues on another data-parallel degree.
Every rank has the same number of batches, also at the end of finite data, and documents are packed
before they are dealt to ranks.

torchtitan's own options hold: ``num_workers``, ``persistent_workers``, ``pin_memory``,
``prefetch_factor`` and ``infinite``. If ``training.global_batch_size`` stays the same on another
degree, each optimiser step has the rows that it would have had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import torch
import tyro
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset as TorchDataset
from torchtitan.components.dataloader import BaseDataLoader, ParallelAwareDataloader
from torchtitan.components.loss import IGNORE_INDEX

from fuelrail.loaders.integrations.sampler import BatchSampler
from fuelrail.loaders.loader import DataLoader
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.order.batching import World
from fuelrail.pipeline.order.spec import OrderSpec

if TYPE_CHECKING:
    from fuelrail.pipeline.order.table import Entry

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]
"""What torchtitan's trainer takes: ``input``, ``positions`` and the like; labels."""


class PositionedLoader(BaseDataLoader):  # type: ignore[misc, unused-ignore]
    """Iterates over a loader whose state is a position of all ranks, epoch after epoch.

    Without ``infinite`` it ends after the first epoch, also where a run is resumed in it.
    """

    def __init__(
        self,
        loader: Any,
        *,
        infinite: bool,
        to_batch: Callable[[Any], Batch] = tuple,
    ) -> None:
        self._loader = loader
        self._infinite = infinite
        self._to_batch = to_batch

    def __iter__(self) -> Iterator[Batch]:
        while self._infinite or self._loader.state_dict()["epoch"] == 0:
            for batch in self._loader:
                yield self._to_batch(batch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the batch received last; the same on every rank."""
        return dict(self._loader.state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state, on any data-parallel degree; an empty one changes nothing.

        Raises StateMismatchError for a state of other data or another order.
        """
        if state_dict:
            self._loader.load_state_dict(state_dict)


class OrderedDataLoader(PositionedLoader):
    """Loads a map-style dataset of one's own in the order of a spec.

    Without packs an item is a pair of a dict of tensors (``input``, int64 [seq_len], and others)
    and labels, int64 [seq_len]. Under ``OrderSpec(pack=...)`` an item is the tokens of a document,
    integers [T]. Then a row of the batch is a pack: its documents one after the other, each with
    ``positions`` from 0, padded to ``seq_len`` with labels that the loss ignores.

    Raises ConfigError for packs that may be longer than ``seq_len``, and what
    `fuelrail.order.BatchSampler` raises.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):  # type: ignore[misc, unused-ignore]
        """What torchtitan builds the loader from."""

        rows: Annotated[Callable[[Any, int], Any], tyro.conf.Suppress]
        """Takes torchtitan's tokenizer and ``seq_len``; returns the map-style dataset."""

        columns: Annotated[Callable[[Any], Mapping[str, Any]] | None, tyro.conf.Suppress] = None
        """Takes the dataset; returns a value a row by name, for packs, filters and weights."""

        order: Annotated[OrderSpec, tyro.conf.Suppress] = field(default_factory=OrderSpec)
        """The order; by default shuffled."""

        infinite: bool = True
        """Whether epochs follow one another without an end."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: Any,
        seq_len: int,
        local_batch_size: int,
        **_: Any,  # torchtitan's snapshot_every_n_steps: a position needs no snapshots
    ) -> None:
        rows = config.rows(tokenizer, seq_len)
        pack = config.order.pack
        sampler = BatchSampler(
            len(rows) if config.columns is None else config.columns(rows),
            config.order,
            global_batch=local_batch_size * dp_world_size,
            world=World(dp_rank, dp_world_size),
            entries=pack is not None,
        )
        collate = None
        if pack is not None:
            if pack.budget > seq_len:
                raise ConfigError(
                    f"the order's pack has a budget of {pack.budget}, and training.seq_len is "
                    f"{seq_len}; a budget of at most seq_len is needed"
                )
            rows = PackedDocuments(rows)
            collate = partial(join_packs, num_packs=local_batch_size, seq_len=seq_len)
        loader: TorchLoader[Any] = TorchLoader(
            rows,
            batch_sampler=sampler,
            num_workers=config.num_workers,
            persistent_workers=config.persistent_workers and config.num_workers > 0,
            prefetch_factor=config.prefetch_factor if config.num_workers > 0 else None,
            pin_memory=config.pin_memory,
            collate_fn=collate,
        )
        super().__init__(sampler.count(loader), infinite=config.infinite)


class FuelrailDataLoader(PositionedLoader):
    """Loads a Fuelrail dataset: its images, tokens and other channels, decoded on this rank.

    Raises what `fuelrail.DataLoader` raises.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc, unused-ignore]
        """What torchtitan builds the loader from; ``dataset`` is the dataset's path or URL."""

        batch: Annotated[Callable[[dict[str, Any]], Batch], tyro.conf.Suppress]
        """Makes the model's inputs and labels of a batch."""

        options: Annotated[Mapping[str, Any], tyro.conf.Suppress] = field(default_factory=dict)
        """Further arguments of `fuelrail.DataLoader`."""

        infinite: bool = True
        """Whether epochs follow one another without an end."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        local_batch_size: int,
        **_: Any,  # torchtitan's tokenizer, seq_len and snapshot_every_n_steps
    ) -> None:
        options = {"shuffle": True, "drop_last": True, **config.options}
        loader = DataLoader(
            config.dataset,
            batch_size=local_batch_size,
            world=World(dp_rank, dp_world_size),
            **options,
        )
        super().__init__(loader, infinite=config.infinite, to_batch=config.batch)


class PackedDocuments(TorchDataset[tuple[int, torch.Tensor]]):
    """The documents of a map-style dataset, each with the pack that it is in."""

    def __init__(self, documents: Any) -> None:
        self._documents = documents

    def __getitem__(self, entry: Entry) -> tuple[int, torch.Tensor]:
        tokens = torch.as_tensor(self._documents[entry.row], dtype=torch.int64)
        return entry.pack, tokens


def join_packs(
    documents: list[tuple[int, torch.Tensor]],
    *,
    num_packs: int,
    seq_len: int,
) -> Batch:
    """Join documents pack by pack to rows of ``seq_len`` tokens.

    Returns ``input`` and ``positions``, int64 [num_packs, seq_len], and labels of the same shape:
    of each token the next one of its document, and IGNORE_INDEX in the padding, whose inputs are 0.
    """
    inputs = torch.zeros(num_packs, seq_len, dtype=torch.int64)
    positions = torch.zeros_like(inputs)
    labels = torch.full_like(inputs, IGNORE_INDEX)
    ends = [0] * num_packs
    for pack, tokens in documents:
        begin = ends[pack]
        end = min(begin + len(tokens) - 1, seq_len)
        length = end - begin
        inputs[pack, begin:end] = tokens[:length]
        labels[pack, begin:end] = tokens[1 : length + 1]
        positions[pack, begin:end] = torch.arange(length)
        ends[pack] = max(begin, end)
    for pack, end in enumerate(ends):
        positions[pack, end:] = torch.arange(seq_len - end)
    return {"input": inputs, "positions": positions}, labels
