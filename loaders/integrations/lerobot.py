"""Fuelrail's order over LeRobot's episodes: in LeRobot's trainer, and for loops of one's own.

In place of ``lerobot-train``, with the same arguments::

    from lerobot.scripts import lerobot_train

    from fuelrail.loaders.integrations.lerobot import keep_order

    keep_order(lerobot_train)
    lerobot_train.main()

The position is in LeRobot's checkpoints. Any number of processes, of any batch size, continues with
the frames that the epoch has not shown.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fuelrail.loaders.integrations.sampler import BatchSampler, Sampler
from fuelrail.loaders.schedule.state import state_at
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.order.batching import Cursor, World
from fuelrail.pipeline.order.spec import OrderSpec

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from torch.distributed.device_mesh import DeviceMesh

    from fuelrail.pipeline.dtypes import I64

_LOG = logging.getLogger(__name__)
_POSITION: Final = Path("training_state", "fuelrail_order.json")
"""The file of the position in a checkpoint of LeRobot."""
_OPTIONS: Final = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "prefetch_factor",
    "persistent_workers",
    "multiprocessing_context",
)
"""Options of LeRobot's loader that ours has too."""


class EpisodeSampler(Sampler):
    """Frames of episodes, with the interface of LeRobot's ``EpisodeAwareSampler``.

    ::

        sampler = EpisodeSampler.from_dataset(episodes, global_batch=64, drop_n_last_frames=7)
        loader = sampler.count(torch.utils.data.DataLoader(episodes, sampler.rank_batch,
        sampler=sampler))

    An epoch ends with a full batch, filled up with its first frames.

    Args:
        dataset_from_indices: the first frame of each episode.
        dataset_to_indices: the frame after the last one of each episode.
        episode_indices_to_use: the episodes to draw from; None: all.
        drop_n_first_frames: frames that are left out at the beginning of each episode.
        drop_n_last_frames: the same at the end. Both together leave out frames whose delta
            timestamps are not all in their episode.
        shuffle: whether the order is shuffled, if ``order`` is None.
        seed: that of the order, if ``order`` is None.
        absolute_to_relative_idx: the item of the dataset for a frame; None: the frame.
        order: any other order; it finds ``clip_id`` (the episode), ``frame`` and ``columns``.
        columns: values by name, one for each frame that the indices above count.
        global_batch: as of `BatchSampler`. None: each rank has all frames, as with LeRobot's
            sampler, whose batches Accelerate deals out.
        world: as of `BatchSampler`.

    Raises ConfigError where no frame is left, and what `BatchSampler` raises.
    """

    def __init__(
        self,
        dataset_from_indices: ArrayLike,
        dataset_to_indices: ArrayLike,
        episode_indices_to_use: Collection[int] | None = None,
        drop_n_first_frames: int = 0,
        drop_n_last_frames: int = 0,
        shuffle: bool = False,
        seed: int = 0,
        absolute_to_relative_idx: Mapping[int, int] | None = None,
        *,
        order: OrderSpec | None = None,
        columns: Mapping[str, Any] | None = None,
        global_batch: int | None = None,
        world: World | DeviceMesh | None = None,
    ) -> None:
        dropped = {
            "drop_n_first_frames": drop_n_first_frames,
            "drop_n_last_frames": drop_n_last_frames,
        }
        for name, number in dropped.items():
            if number < 0:
                raise ConfigError(f"{name} must be >= 0, got {number}")
        starts = np.asarray(dataset_from_indices, np.int64) + drop_n_first_frames
        lengths = np.asarray(dataset_to_indices, np.int64) - drop_n_last_frames - starts
        is_used = np.ones(len(starts), bool)
        if episode_indices_to_use is not None:
            is_used = np.isin(np.arange(len(starts)), list(episode_indices_to_use))
        for episode in np.flatnonzero(is_used & (lengths <= 0)):
            _LOG.warning("Episode %d has no frame left after %s; it is left out", episode, dropped)
        is_used &= lengths > 0
        if not is_used.any():
            raise ConfigError(
                f"No valid frames remain of {len(starts)} episodes after {dropped}, with "
                f"episode_indices_to_use={episode_indices_to_use}"
            )
        self._cum_lengths = np.cumsum(lengths[is_used])
        self._shifts = (starts + lengths)[is_used] - self._cum_lengths
        """What is added to a row of the order, counted over all episodes, to have its frame."""
        self._item_of = absolute_to_relative_idx
        self._first_epoch = 0
        self._is_at_end = False
        num_frames = int(self._cum_lengths[-1])
        data: int | dict[str, Any] = num_frames
        if order is None:
            order = OrderSpec(kind="shuffled" if shuffle else "sequential", seed=seed)
        else:
            frames = self._frames(np.arange(num_frames))
            clips = np.repeat(np.flatnonzero(is_used), lengths[is_used])
            data = {"clip_id": clips, "frame": frames - starts[clips]}
            for name, column in (columns or {}).items():
                data[name] = np.asarray(column)[frames]
        if global_batch is None:
            global_batch = 1
            world = World()
        super().__init__(
            data,
            order,
            global_batch=global_batch,
            world=world,
            drop_last=False,
        )

    @classmethod
    def from_dataset(
        cls, dataset: Any, order: OrderSpec | None = None, **options: Any
    ) -> EpisodeSampler:
        """Return a sampler of a LeRobotDataset; ``order`` None: shuffled.

        The order finds the dataset's columns of single values, such as ``task_index``.
        """
        from datasets import Value

        table = dataset.hf_dataset
        names = [name for name, kind in table.features.items() if isinstance(kind, Value)]
        columns = table.select_columns(names).with_format("numpy")[:]
        steps = np.diff(columns["episode_index"], prepend=-1)
        starts = np.flatnonzero(steps)
        ends = np.append(starts[1:], len(table))
        return cls(
            starts,
            ends,
            order=order or OrderSpec(),
            columns=columns,
            **options,
        )

    @property
    def indices(self) -> list[int]:
        """The items of an epoch, as stored."""
        return self._items(np.arange(self._cum_lengths[-1]))

    def _frames(self, rows: I64) -> I64:
        """Return the frames of rows of the order."""
        episodes = np.searchsorted(self._cum_lengths, rows, side="right")
        frames: I64 = rows + self._shifts[episodes]
        return frames

    def _items(self, rows: ArrayLike) -> list[int]:
        """Return the dataset's items of rows of the order."""
        frames: list[int] = self._frames(np.asarray(rows)).tolist()
        if self._item_of is None:
            return frames
        return [self._item_of[frame] for frame in frames]

    def __getitem__(self, step: int) -> list[int]:
        """Return batch ``step`` of a run, counted from 0 through all epochs."""
        return self._items(super().__getitem__(step))

    def __iter__(self) -> Iterator[int]:
        """Iterate over the rest of the epoch, then over the next one; see `BatchSampler`."""
        if self._is_at_end and not self._expects_pass:
            self._is_at_end = False
            return
        for rows in BatchSampler.__iter__(self):
            yield from self._items(rows)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch, unless the position is in it.

        Epochs count from that of the state that was loaded, because Accelerate counts them from 0
        after a resume too.
        """
        epoch += self._first_epoch
        if epoch != self._position().rolled(self._batching).epoch:
            self._go_to(Cursor(epoch))

    def _go_to(self, place: Cursor) -> None:
        state = state_at(self._identity, place, self._batching.global_batch)
        super().load_state_dict(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, or from what LeRobot's ``compute_sampler_state`` returns.

        Raises what `BatchSampler.load_state_dict` raises.
        """
        if "start_index" in state:
            self._go_to(Cursor(state["epoch"], state["start_index"]))
            self._is_at_end = state["start_index"] == self._cum_lengths[-1]
        else:
            super().load_state_dict(state)
        self._first_epoch = self._position().rolled(self._batching).epoch


class EpisodeLoader:
    """The batches of LeRobot's training, without an end, with a position in its checkpoints.

    ``loader`` is the one that LeRobot and Accelerate made: its dataset, workers, device and ranks
    are kept. ``config`` is LeRobot's of the training; ``order`` None: shuffled, with the seed of
    ``config``. A resumed run continues at the position in its checkpoint.

    Raises ConfigError for a dataset that is streamed, and for a checkpoint without a position.
    """

    def __init__(
        self,
        loader: Any,
        config: Any,
        order: OrderSpec | None = None,
    ) -> None:
        from torch.utils.data import DataLoader as TorchLoader

        if config.dataset.streaming:
            raise ConfigError(
                "dataset.streaming=true has no rows by number, and an order needs them: set "
                "dataset.streaming=false"
            )
        policy = getattr(config, "trainable_config", config.policy)
        shard = loader.batch_sampler  # Accelerate's, on several processes
        world = World(
            rank=getattr(shard, "process_index", 0),
            size=getattr(shard, "num_processes", 1),
        )
        sampler = EpisodeSampler.from_dataset(
            loader.dataset,
            order or OrderSpec(seed=config.seed or 0),
            drop_n_last_frames=getattr(policy, "drop_n_last_frames", 0),
            global_batch=config.batch_size * world.size,
            world=world,
        )
        options = {name: getattr(loader, name) for name in _OPTIONS}
        options |= {"batch_size": sampler.rank_batch, "sampler": sampler}
        self._loader = sampler.count(TorchLoader(loader.dataset, **options))
        self._device = loader.device
        if not config.resume:
            return
        file = Path(config.checkpoint_path, _POSITION)
        if not file.exists():
            raise ConfigError(
                f"there is no '{file}': the checkpoint is of a training without keep_order; resume "
                "it without, or begin a new training with its policy (--policy.path)"
            )
        self._loader.load_state_dict(json.loads(file.read_bytes()))

    def __iter__(self) -> Iterator[Any]:
        from accelerate.utils import send_to_device

        while True:
            for batch in self._loader:
                yield send_to_device(batch, self._device, non_blocking=True)

    def save(self, checkpoint: Path) -> None:
        """Write the position after the batch received last; it is the same on every rank."""
        state = self._loader.state_dict()
        Path(checkpoint, _POSITION).write_text(json.dumps(state))


def keep_order(script: Any, order: OrderSpec | None = None) -> None:
    """Give LeRobot's training script, the module ``lerobot.scripts.lerobot_train``, our order.

    Its functions ``cycle``, ``update_last_checkpoint`` and the one that makes datasets are
    replaced. ``order`` is as of `EpisodeLoader`. Raises ConfigError for a script without them.
    """
    names = ("make_train_eval_datasets", "make_dataset")  # the second one: LeRobot 0.4 and 0.5
    maker = next((name for name in names if hasattr(script, name)), names[0])
    for name in (maker, "cycle", "update_last_checkpoint"):
        if not hasattr(script, name):
            raise ConfigError(
                f"{script.__name__} has no '{name}'; LeRobot 0.4.4 to 0.6.1 have it: use "
                "EpisodeLoader in a script of your own"
            )
    make_datasets = getattr(script, maker)
    update_last_checkpoint = script.update_last_checkpoint
    run: dict[str, Any] = {}

    def make_datasets_of(config: Any) -> Any:
        run["config"] = config
        return make_datasets(config)

    def cycle(loader: Any) -> Iterator[Any]:
        run["loader"] = EpisodeLoader(loader, run["config"], order)
        return iter(run["loader"])

    def update_with_position(checkpoint: Path) -> Any:
        run["loader"].save(checkpoint)
        return update_last_checkpoint(checkpoint)

    setattr(script, maker, make_datasets_of)
    script.cycle = cycle
    script.update_last_checkpoint = update_with_position
