"""The base class of a stack, the rows that it trains on, and the registry."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar, Final

import msgspec

EPOCHS: Final = 2
"""Epochs of a run."""
SHARDS: Final = 24
"""Files of a dataset that is stored in shards; rows and shards divide by each number of ranks and
workers.
"""
ROWS: Final = 288


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What a part of a run is told.

    Attributes:
        rows: of the dataset.
        ranks: number of data-parallel ranks.
        global_batch: rows of a step over all ranks.
        workers: worker processes of a rank's loader; 0: none.
        drop_last: whether rows that do not fill a batch are left out.
        buffer: rows of a shuffle buffer; 0: the stack's shuffle without one.
        evaluation: steps between evaluations; 0: none.
        is_mixed: whether two datasets are mixed: 2 rows of the first two thirds for 1 of the rest.
    """

    rows: int = ROWS
    ranks: int = 2
    global_batch: int = 12
    workers: int = 0
    drop_last: bool = False
    buffer: int = 0
    evaluation: int = 0
    is_mixed: bool = False

    @property
    def batch(self) -> int:
        """Rows of a rank in a step."""
        return self.global_batch // self.ranks

    @property
    def parts(self) -> list[range]:
        """The rows of each dataset of a mix."""
        num_first = self.rows * 2 // 3
        first = range(num_first)
        second = range(num_first, self.rows)
        return [first, second]

    def shards(self, rows: range) -> list[range]:
        """Return the rows of each shard that some rows are stored in."""
        size = max(self.rows // SHARDS, 1)
        return [rows[start : start + size] for start in range(0, len(rows), size)]


class NotRun(Exception):  # noqa: N818 - it is an answer
    """Why a history is not run, such as that nothing is documented for it."""


class Job(msgspec.Struct, kw_only=True):
    """A rank's part of a run: from its start, or from a checkpoint, to a kill or the end.

    Attributes:
        rank: number of this rank.
        folder: the stored dataset, and checkpoints of trainers that write them themselves.
        states: what each rank of the part before had saved; empty at the start.
        before: what that part was told; None at the start.
        epoch: the epoch to begin in.
        step: steps of this epoch that were done before.
        see: is called with the epoch and the rows of each batch that is trained on.
        save: is called with the epoch, the step in it and a state; the rank is then killed.
        is_saving: whether the checkpoint is due now, after this batch.
        is_evaluating: whether an evaluation is due now.
        leaves_loop: whether the loop over batches is left before the checkpoint is saved.
        is_border: whether the checkpoint is due once the epoch's loop is over, not in it.
        steps: steps of this part after which the checkpoint is due; None: never.
    """

    setup: Setup
    rank: int
    folder: Path
    states: list[Any]
    before: Setup | None
    epoch: int
    step: int
    see: Callable[[int, Iterable[Any]], None]
    save: Callable[[int, int, Any], None]
    steps: int | None = None
    is_saving: bool = False
    is_evaluating: bool = False
    leaves_loop: bool = False
    is_border: bool = False

    @property
    def state(self) -> Any:
        """What this rank had saved.

        Raises NotRun where the number of ranks is another.
        """
        assert self.before is not None
        if self.before.ranks != self.setup.ranks:
            raise NotRun("a state belongs to one rank, and none is documented for other ranks")
        return self.states[self.rank]

    @property
    def steps_left(self) -> int:
        """Whole steps that are left of the epoch, for streams without an end."""
        setup_before = self.before or self.setup
        rows_done = self.step * setup_before.global_batch
        rows_left = max(self.setup.rows - rows_done, 0)
        return rows_left // self.setup.global_batch


class Stack:
    """A stack as one rank uses it. A recipe has its own `open`, `epoch` and `state`, or `train`."""

    packages: ClassVar[tuple[str, ...]] = ()
    """Distributions to tell versions of."""
    way: ClassVar[str] = ""
    """How it is documented to resume."""
    offers: ClassVar[frozenset[str]] = frozenset()
    """Of "buffer" and "mix", what it has."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.setup = job.setup
        self.rank = job.rank

    is_shared: ClassVar[bool] = False
    """Whether any rank's state is loaded by all, on any number of ranks."""
    train_loader: Any

    @staticmethod
    def store(setup: Setup, folder: Path) -> None:
        """Write the dataset, where the stack reads one from files."""

    def loader(self, *, shuffle: bool = True) -> Any:
        """Return a loader of this rank's rows; without ``shuffle`` for an evaluation."""
        raise NotImplementedError

    def open(self) -> None:
        """Make the loader, and restore what was saved."""
        self.train_loader = self.loader()
        if self.job.states:
            self.restore()

    @property
    def saved(self) -> Any:
        """The state to go on with: this rank's, or any rank's."""
        return self.job.states[0] if self.is_shared else self.job.state

    def restore(self) -> None:
        """Load what was saved."""
        self.train_loader.load_state_dict(self.saved)

    def epoch(self, _epoch: int) -> Iterable[Any]:
        """Return what the training loop iterates over: the rest of an epoch where one is
        resumed.
        """
        return self.train_loader  # type: ignore[no-any-return]

    def state(self) -> Any:
        """Return what the checkpoint holds of the loader."""
        return self.train_loader.state_dict()

    def evaluate(self) -> None:
        """Read an evaluation's rows."""
        for _ in self.loader(shuffle=False):
            pass

    def train(self) -> None:
        """Train as a script does, from `job.epoch` to the end."""
        job = self.job
        self.open()
        for epoch in range(job.epoch, EPOCHS):
            for batch in self.epoch(epoch):
                job.see(epoch, row_numbers(batch))
                if job.is_evaluating:
                    self.evaluate()
                if job.is_saving and job.leaves_loop:
                    break
                if job.is_saving and not job.is_border:
                    job.save(epoch, job.step, self.state())
            if job.is_saving and job.is_border:
                job.save(epoch + 1, 0, self.state())
            elif job.is_saving:
                job.save(epoch, job.step, self.state())
            job.step = 0


class Stateless(Stack):
    """A stack of which nothing is saved."""

    def restore(self) -> None:
        """Do nothing."""

    def state(self) -> Any:
        """Return nothing."""


def row_numbers(batch: Any) -> list[int]:
    """Return the numbers of a batch's rows."""
    numbers = batch["index"] if isinstance(batch, dict) else batch
    return [int(number) for number in numbers]


STACKS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "torch": ("torch_loader", "TorchEpochs", ("torch",)),
    "torch-skip": ("torch_loader", "TorchSkip", ("torch",)),
    "torchdata": ("torchdata", "Torchdata", ("torchdata",)),
    "torchdata-sampler": ("torchdata", "TorchdataSampler", ("torchdata",)),
    "accelerate-skip": ("accelerate", "AccelerateSkip", ("accelerate",)),
    "accelerate-stateful": ("accelerate", "AccelerateStateful", ("accelerate", "torchdata")),
    "transformers": ("transformers", "TransformersStack", ("transformers", "accelerate")),
    "lightning": ("lightning", "LightningStack", ("pytorch_lightning", "torchdata")),
    "lightning-stateful": ("lightning", "LightningStateful", ("pytorch_lightning", "torchdata")),
    "datasets": ("datasets", "HubStreaming", ("datasets", "torchdata")),
    "webdataset": ("webdataset", "WebdatasetStack", ("webdataset",)),
    "streaming": ("streaming", "MosaicStack", ("streaming",)),
    "litdata": ("litdata", "LitdataStack", ("litdata",)),
    "energon": ("energon", "EnergonStack", ("megatron.energon",)),
    "grain": ("grain", "GrainStack", ("grain",)),
    "grain-elastic": ("grain", "GrainElastic", ("grain",)),
    "torchtitan": ("torchtitan", "TitanStack", ("torchtitan", "torchdata")),
    "lerobot": ("lerobot", "LeRobotStack", ("lerobot",)),
    "lerobot-order": ("lerobot", "LeRobotOrder", ("lerobot",)),
    "mmengine": ("mmengine", "MMEngineStack", ("mmengine",)),
    "ray-train": ("ray_train", "RayTrainStack", ("ray", "torch")),
    "fuelrail-order": ("fuelrail", "OrderStack", ()),
    "fuelrail-loader": ("fuelrail", "LoaderStack", ()),
}
"""Of each stack its module here, its class, and what must be installed."""


def missing_module(name: str) -> str | None:
    """Return a module that a stack needs and that is not installed; None if all are."""
    _, _, modules = STACKS[name]
    for module in modules:
        package = module.partition(".")[0]
        if importlib.util.find_spec(package) is None:
            return module
    return None


def load_stack(name: str) -> type[Stack]:
    """Import a stack's recipe."""
    module_name, class_name, _ = STACKS[name]
    module = importlib.import_module(f"fuelrail.bench.peers.stacks.{module_name}")
    stack: type[Stack] = getattr(module, class_name)
    return stack
