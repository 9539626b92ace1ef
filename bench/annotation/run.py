"""Run a model over a dataset and write what it returns as a layer: alone, on all ranks of a
launcher, or on Ray.

Batch b of B samples holds positions b B to b B + B - 1 of its split, on any number of ranks, so the
model sees the same batches however many ranks there are and however often a run is interrupted.
Positions count the samples that the model sees: a window that drops leaves out those that lack a
frame. A task of Ray makes some of these batches.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from fuelrail.bench.annotation.outputs import infer_table, rows_of
from fuelrail.bench.trainer.models.settings import import_function
from fuelrail.loaders.config import Transforms
from fuelrail.loaders.schedule.layers import view_settings
from fuelrail.pipeline.channels.logits import logits_store
from fuelrail.pipeline.cli import counted
from fuelrail.pipeline.errors import ConfigError, DatasetError, FuelrailError
from fuelrail.pipeline.format.attributes import ClipTable
from fuelrail.pipeline.format.dataset import Dataset, open_dataset
from fuelrail.pipeline.format.layers import LayerView
from fuelrail.pipeline.order.batching import Cursor, World
from fuelrail.pipeline.order.compile import plain
from fuelrail.pipeline.order.windows import FrameWindow, window_lookup
from fuelrail.pipeline.runtime.stages import stage_error
from fuelrail.pipeline.settings import (
    CheckedSettings,
    PathText,
    flag,
    load_yaml,
    make_options,
)
from fuelrail.pipeline.storage.filesystem import is_url
from fuelrail.pipeline.text import escaped
from fuelrail.sharding.engines import RayAddress, check_address
from fuelrail.sharding.output.folder import check_out, open_output
from fuelrail.sharding.write.layers.segments import ROWS_PER_SEGMENT
from fuelrail.sharding.write.layers.writer import LayerWriter

if TYPE_CHECKING:
    from fuelrail.loaders.loader import DataLoader

    Model = Callable[[dict[str, Any]], Mapping[str, Any]]
    Rows = np.ndarray[Any, np.dtype[np.bool_]]

_LAUNCHER_RANK: Final = "LOCAL_RANK"
_PIECES: Final = 64
"""Tasks of Ray, at least, where there are as many batches."""


class AnnotateOptions(CheckedSettings, frozen=True, kw_only=True):
    """Options of `fuelrail.bench.annotate`, and flags of ``fuelrail annotate``."""

    batch_size: Annotated[int, Meta(ge=1), flag("samples that the model gets at a time")] = 8
    channels: Annotated[
        PathText | None,
        flag(
            "YAML or JSON list of channels (default: from what the model returns)",
            metavar="FILE",
        ),
    ] = None
    store: Annotated[
        str,
        flag(
            "without --channels: how floating arrays are stored: as_is, float16, int8, "
            "which adds {name}_scale; or logits [T, V]: topk:K, sampled:K tokens a position"
        ),
    ] = "as_is"
    temperature: Annotated[
        float,
        Meta(gt=0),
        flag("of logits that are stored as topk or sampled"),
    ] = 1.0
    positions: Annotated[
        float,
        Meta(gt=0, le=1),
        flag("share of a sample's positions whose logits are stored: of the largest entropy"),
    ] = 1.0
    teacher: Annotated[
        str | None,
        flag("name of the teacher's weights (default: their digest, where known)"),
    ] = None
    view: Annotated[
        Literal["fixed", "per_view"],
        flag("show samples without augmentation, or as augmented in --epoch with --seed"),
    ] = "fixed"
    seed: Annotated[int, Meta(ge=0), flag("seed of the augmentation, with --view per_view")] = 0
    epoch: Annotated[int, Meta(ge=0), flag("epoch of the augmentation, with --view per_view")] = 0
    transforms: Annotated[
        Transforms | None,
        flag("size, augmentation, points, what is selected, ..."),
    ] = None
    window: Annotated[
        FrameWindow | None,
        flag(
            "frames that the model sees with each sample: frames, stride, pad; pad: drop "
            "leaves out samples whose clip lacks one"
        ),
    ] = None
    device: Annotated[
        str | None,
        flag("device of the batches, such as cuda (of this local rank)"),
    ] = None
    workers: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        flag(
            "decoding threads (default: this rank's CPUs; with --engine ray one, which a "
            "task takes a CPU for)"
        ),
    ] = None
    engine: Annotated[
        Literal["ray"] | None,
        flag(
            "make the rows in tasks of a Ray cluster, which take a GPU each with --device "
            "cuda (default: here)"
        ),
    ] = None
    ray_address: RayAddress = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_address(self.ray_address, "the engine ray", is_used=self.engine == "ray")
        if self.store not in ("as_is", "float16", "int8") and logits_store(self.store) is None:
            raise ConfigError(
                f"store={self.store!r} must be as_is, float16, int8, topk:K or sampled:K, "
                "such as topk:64"
            )
        stores_logits = self.channels is not None or logits_store(self.store) is not None
        if (self.temperature, self.positions) != (1, 1) and not stores_logits:
            raise ConfigError(
                f"temperature={self.temperature}, positions={self.positions} are for "
                f"logits, and store={self.store!r} stores none: give store='topk:K' or "
                "'sampled:K', or channels with a kind of logits"
            )
        if self.view == "fixed" and (self.seed or self.epoch):
            raise ConfigError(
                f"seed={self.seed}, epoch={self.epoch} draw an augmentation, and "
                "view='fixed' shows samples without any: leave them out, or give view='per_view'"
            )
        if self.view == "per_view" and self.window is not None:
            raise ConfigError(
                "view='per_view' with a window: a window augments its frames by the sample's "
                "draw, and the layer would be of no single view: leave one of them out"
            )
        if self.channels is not None and self.store != "as_is":
            raise ConfigError(
                f"store={self.store!r} is for values without a table: '{self.channels}' has "
                "their dtypes"
            )


class AnnotateReport(msgspec.Struct, frozen=True, kw_only=True):
    """What this rank did: rows written by it, rows that were there before, samples of the base
    that the window leaves out, and the layer where it is finished.
    """

    layer: str
    fingerprint: str | None
    num_written: int
    num_kept: int
    num_left_out: int = 0
    seconds: float

    def as_text(self) -> str:
        """Return a line for people."""
        rows = counted(self.num_written, "row")
        text = f"{escaped(self.layer)}: {rows} in {self.seconds:,.1f} s"
        if self.num_kept:
            text += f" ({self.num_kept:,} were there before)"
        if self.num_left_out:
            samples = counted(self.num_left_out, "sample")
            text += f"; {samples} without all frames of the window left out"
        if self.fingerprint is None:
            text += "; other ranks have not finished"
        else:
            text += f"; fingerprint {self.fingerprint}"
        return f"{text}\n"


def annotate(
    base: Dataset | str | os.PathLike[str],
    layer: str | os.PathLike[str],
    model: Model | str,
    options: AnnotateOptions | None = None,
    **changes: Any,  # fields of AnnotateOptions
) -> AnnotateReport:
    """Run a model over all samples of a dataset, in their order, and write a layer.

    ``model`` is a function, or ``"MODULE:NAME"`` of one in a module that can be imported from the
    working folder; a class is instantiated first. It gets a batch of the loader and returns a dict
    of channel name to a tensor [B, ...] or a list of B values. It runs in inference mode. It must
    give the same values for the same batch.

    Every rank of a launcher such as torchrun runs the same call; the one that finds all rows
    written finishes the layer. An interrupted run is resumed by the same call, on any number of
    ranks, with the same weights only: their digest is in the layer, as
    ``provenance.recipe.teacher``, if the model is a module, has some or uses some by name.

    Raises ConfigError for a model that cannot be imported, for outputs without a table and for
    logits with NaN, StageError, whose ``__cause__`` is the exception, for a model that raises,
    SchemaError for values that are not as the table says, DatasetExistsError for another teacher,
    and what `DataLoader` and `LayerWriter` raise.
    """
    options = make_options(AnnotateOptions, options, changes)
    start = time.monotonic()
    base = base if isinstance(base, Dataset) else open_dataset(base)
    check_out(open_output(layer))  # before the model runs
    if options.engine is None:
        work = _Annotation(base, _load(model) if isinstance(model, str) else model, options)
        with LayerWriter(
            base,
            layer,
            channels=work.table(),
            view=work.view,
            recipe=work.recipe(),
        ) as writer:
            done = writer.written() & ~work.left_out
            num_kept = int(done.sum())
            pieces = work.pieces(done, sys.maxsize)
            num_written = sum(work.write(piece, writer, done) for piece in pieces)
        fingerprint = None
        is_whole = (writer.written() | work.left_out).all()
        if is_whole:
            is_partial = bool(work.left_out.any())
            manifest = writer.finish(partial=is_partial)
            fingerprint = manifest.fingerprint
    else:
        work = _Annotation(base, None, options, World(0, 1))
        fingerprint, num_kept, num_written = _on_ray(work, os.fspath(layer), model, options)
    return AnnotateReport(
        layer=os.fspath(layer),
        fingerprint=fingerprint,
        num_written=num_written,
        num_kept=num_kept,
        num_left_out=int(work.left_out.sum()),
        seconds=round(time.monotonic() - start, 3),
    )


def _on_ray(
    work: _Annotation,
    layer: str,
    model: Model | str,
    options: AnnotateOptions,
) -> tuple[str, int, int]:
    """Make the rows that are not there in tasks of a cluster; return fingerprint, rows that were
    there, and new ones.

    A process loads the model once, and publishes the rows of a task at its end. What is inferred
    from the model's outputs is inferred there too, as this machine may not have its device.
    """
    from fuelrail.loaders.distributed import detect_world

    world = detect_world()
    if world.size > 1:
        raise ConfigError(
            f"engine='ray' divides the work itself, and this is one of {world.size} ranks: "
            "start it once"
        )
    import torch
    from ray import cloudpickle

    from fuelrail.sharding.engines.ray import RayEngine

    cpus = options.workers or 1
    gpus = int((options.device or "").startswith("cuda"))
    engine = RayEngine(options.ray_address, cpus=cpus, gpus=gpus)
    options = msgspec.structs.replace(options, workers=cpus)
    if not is_url(layer):
        layer = os.path.abspath(layer)  # noqa: PTH100 - of a process in another folder
    try:
        setup = cloudpickle.dumps((work.base, model, options, torch.get_num_threads()))
    except Exception as error:
        raise ConfigError(
            f"the model cannot be pickled for the processes of engine='ray' ({error}): give "
            "it as 'MODULE:NAME'"
        ) from error
    start = partial(_start, setup)
    with engine.connected():
        facts = next(engine.make(partial(start, None), [0]))
        with LayerWriter(work.base, layer, **facts, view=work.view) as writer:
            done = writer.written() & ~work.left_out
            is_lacking = ~(done | work.left_out)
            num_lacking = int(is_lacking.sum())
            piece_rows = min(ROWS_PER_SEGMENT, num_lacking // _PIECES)
            pieces = work.pieces(done, max(1, piece_rows // options.batch_size))
            start_writer = partial(start, (layer, facts, pieces, done))
            for _ in engine.make(start_writer, range(len(pieces))):
                pass
            is_partial = bool(work.left_out.any())
            manifest = writer.finish(partial=is_partial)
            return manifest.fingerprint, int(done.sum()), num_lacking


def _start(
    setup: bytes,
    rows: tuple[str, Any, list[_Piece], Rows] | None,
    node: str,
) -> Callable[[int], Any]:
    """Return, in a process of the cluster, what writes a piece's rows to a layer; None: what
    tells table and recipe.
    """
    import torch

    try:
        base, model, options, num_threads = pickle.loads(setup)
        if rows is not None and not (is_url(rows[0]) or Path(rows[0]).is_dir()):
            raise DatasetError(f"there is no folder '{rows[0]}'")
        model = _load(model) if isinstance(model, str) else model
    except (ConfigError, DatasetError, ImportError, AttributeError) as error:
        raise ConfigError(
            f"node {node} cannot begin: {error}. Dataset, layer and the model's module must "
            "be on a file system that all nodes share, at the same path, or at a URL"
        ) from error
    torch.set_num_threads(num_threads)  # as where the command runs: sums may depend on it
    work = _Annotation(base, model, options, World(0, 1))
    if rows is None:
        return lambda _: {"channels": work.table(), "recipe": work.recipe()}
    layer, facts, pieces, done = rows
    writer = LayerWriter(base, layer, **facts, view=work.view)

    def make(number: int) -> None:
        work.write(pieces[number], writer, done)
        writer.flush()

    return make


class _Piece(NamedTuple):
    """Global batches of a split, one after another: the first one's position, and how many."""

    split: str
    begin: int
    num_batches: int


class _Annotation:
    """A model and the batches that it sees."""

    def __init__(
        self,
        base: Dataset,
        model: Model | None,
        options: AnnotateOptions,
        world: World | None = None,
    ) -> None:
        """Take the ranks that divide the work; None: those of torch.distributed."""
        self.base = base
        self._model = model
        self._options = options
        self._given_world = world
        transforms = options.transforms or Transforms()
        transforms = transforms.with_stored_size({base.manifest.name: base})
        if transforms.two_views:
            raise ConfigError(
                "transforms.two_views=True: a layer has one value a sample; leave two_views out"
            )
        if options.view == "fixed":
            transforms = transforms.evaluation()
            self.view = LayerView()
        else:
            settings = view_settings(options.seed, transforms.content())
            self.view = LayerView(kind="per_view", epoch=options.epoch, settings=settings)
        self._transforms = transforms
        self._device = options.device
        if options.device == "cuda":
            local_rank = os.environ.get(_LAUNCHER_RANK, "0")
            self._device = f"cuda:{local_rank}"

    @cached_property
    def _world(self) -> World:
        from fuelrail.loaders.distributed import detect_world

        return self._given_world or detect_world()

    @cached_property
    def left_out(self) -> Rows:
        """Which samples of the base lack a frame of a window that drops: bool (num_samples,)."""
        window = self._options.window
        left_out = np.zeros(len(self.base), dtype=bool)
        if window is None or window.pad != "drop":
            return left_out
        for name, entry in self.base.splits.items():
            clips = ClipTable.of_split(self.base, name)
            lookup = window_lookup(clips, window)
            end = entry.first_sample + entry.num_samples
            left_out[entry.first_sample : end] = ~lookup.complete()
        if left_out.all():
            raise ConfigError(
                f"{window}: no clip of '{self.base.root}' has all of these frames; give "
                "fewer frames, a smaller stride, or another pad"
            )
        return left_out

    def recipe(self) -> dict[str, Any]:
        """Return what the values depend on beside the table and the view: facts that all writers
        must agree on.
        """
        from fuelrail.bench.annotation.teacher import weights_digest

        options = self._options
        teacher = options.teacher or weights_digest(self._model)
        facts = {
            "teacher": teacher,
            "temperature": options.temperature,
            "positions": options.positions,
            "window": None if options.window is None else plain(options.window),
        }
        return {name: value for name, value in facts.items() if value not in (None, 1.0)}

    def table(self) -> list[dict[str, Any]]:
        """Return channels: those of the file, or those of the first batch's outputs, which all
        ranks compute alike.
        """
        if self._options.channels is not None:
            return load_yaml(self._options.channels, list[dict[str, Any]])  # type: ignore[type-var]
        first_row = int(np.argmin(self.left_out))
        split = next(
            name
            for name, entry in self.base.splits.items()
            if 0 <= first_row - entry.first_sample < entry.num_samples
        )
        with self._loader(split, World(0, 1)) as loader:
            (batch,) = loader.make_steps(Cursor(), 0)
        outputs = self._outputs(batch)
        num_rows = len(batch["sample_key"])
        return infer_table(outputs, num_rows, self._options.store)

    def pieces(self, done: Rows, max_batches: int) -> list[_Piece]:
        """Return the batches with rows that are not ``done``, at most this number of them in a
        piece.
        """
        size = self._options.batch_size * self._world.size
        pieces_found = []
        for name, entry in self.base.splits.items():
            split_rows = slice(entry.first_sample, entry.first_sample + entry.num_samples)
            is_seen = ~self.left_out[split_rows]
            is_lacking = ~done[split_rows][is_seen]
            positions = np.flatnonzero(is_lacking)
            batches = np.unique(positions // size).tolist()
            for _, batches_of_piece in groupby(batches, lambda batch: batch // max_batches):
                numbers = list(batches_of_piece)
                num_batches = numbers[-1] - numbers[0] + 1
                piece = _Piece(name, begin=numbers[0] * size, num_batches=num_batches)
                pieces_found.append(piece)
        return pieces_found

    def write(self, piece: _Piece, writer: LayerWriter, done: Rows) -> int:
        """Write this rank's rows of a piece that are not ``done``; returns how many."""
        from fuelrail.bench.annotation.teacher import Reduction

        options = self._options
        reduction = Reduction(options.temperature, options.positions, options.seed, options.epoch)
        num_written = 0
        cursor = Cursor(options.epoch, piece.begin)
        with self._loader(piece.split, self._world) as loader:
            for batch in loader.make_steps(cursor, 0, piece.num_batches):
                rows = batch["global_index"].tolist()
                missing_rows = []
                for index, row in enumerate(rows):
                    if batch["valid"][index] and not done[row]:
                        missing_rows.append(index)
                if not missing_rows:
                    continue
                values = rows_of(
                    self._outputs(batch),
                    batch["sample_key"],
                    writer.channels,
                    reduction,
                )
                for index in missing_rows:
                    writer.write(rows[index], values[index])
                num_written += len(missing_rows)
        return num_written

    def _outputs(self, batch: dict[str, Any]) -> Mapping[str, Any]:
        import torch

        assert self._model is not None, "it is loaded where it runs"
        try:
            with torch.inference_mode():
                outputs = self._model(batch)
        except FuelrailError:
            raise
        except (Exception, SystemExit) as error:
            keys = batch["sample_key"]
            model = self._model
            name = getattr(model, "__qualname__", type(model).__qualname__)
            raise stage_error(
                f"model '{name}' failed on samples {keys[0]!r} .. {keys[-1]!r}",
                error,
            ) from error
        if not hasattr(outputs, "items") or not outputs:
            returned = "no outputs" if outputs == {} else type(outputs).__name__
            raise ConfigError(
                f"the model returned {returned}; it must return a dict of channel name to a "
                "tensor [B, ...] or a list of B values"
            )
        return outputs

    def _loader(self, split: str, world: World) -> DataLoader:
        from fuelrail.loaders.loader import DataLoader

        options = self._options
        return DataLoader(
            self.base,
            options.batch_size,
            seed=options.seed,
            split=split,
            num_workers=options.workers,
            window=options.window,
            transforms=self._transforms,
            device=self._device,
            world=world,
        )


def _load(name: str) -> Model:
    """Import ``MODULE:NAME``; a class is instantiated."""
    target = import_function(name)
    try:
        model: Any = target() if isinstance(target, type) else target
    except FuelrailError:
        raise
    except (Exception, SystemExit) as error:
        raise stage_error(f"model {name!r} cannot be made", error) from error
    if not callable(model):
        raise ConfigError(f"model {name!r} is {type(model).__name__}, not a function")
    return model  # type: ignore[no-any-return]
