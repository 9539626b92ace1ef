"""The teacher of a distillation: a trained model, or a layer of its predictions.

A layer's channels are moved by their laws with the sample's augmentation: ``logits`` [B, g, g] of
an occupancy grid (law ``ego_grid``; axes x, y), [B, T, V] of tokens, [B, N, classes] of images;
``features_{camera}`` [B, H, W, C] of each camera (law ``image``), or ``features`` [B, N, C, h, w]
of one view; ``detections`` (law ``ego_boxes``), boxes. An int8 channel is multiplied by the channel
``{name}_scale``. Logits of tokens may be of kind ``logits_topk`` or ``logits_sampled``: the
teacher's tensors are then the parts of `Logits`, named ``logits.{part}``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fuelrail.bench.trainer.checkpoints.store import DamagedError, Store
from fuelrail.bench.trainer.models.bev import occupied_cells
from fuelrail.bench.trainer.models.build import build_model, draft
from fuelrail.bench.trainer.models.settings import (
    MODELS,
    GridSettings,
    predictions,
)
from fuelrail.pipeline.channels.logits import SAMPLED, TOPK
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.format.layers import open_layer

if TYPE_CHECKING:
    from fuelrail.bench.trainer.models.settings import ModelSettings
    from fuelrail.bench.trainer.models.staged import StagedModel
    from fuelrail.loaders.config import Transforms
    from fuelrail.pipeline.channels.table import Channel
    from fuelrail.pipeline.format.dataset import Dataset

LAYER = "teacher"
"""What the loader calls a teacher's layer."""


class Teacher(nn.Module):
    """A trained model out of the newest whole checkpoint of a run; it predicts, and does not learn.

    With ``shard`` its parameters are divided over all ranks from the start, and gathered block by
    block; all ranks must call it. Load checkpoints that you trust only. Raises ConfigError where
    there is none, and StateMismatchError for another version.
    """

    def __init__(self, place: str, device: str = "cpu", *, shard: bool = False) -> None:
        super().__init__()
        store = Store(place)
        skipped = []
        for folder in store.complete():
            try:
                manifest = store.read(folder)
                break
            except DamagedError as error:
                skipped.append(f"{folder}: {error}")
        else:
            why = f" ({'; '.join(skipped)})" if skipped else ""
            raise ConfigError(
                f"teacher '{store.shown}' has no whole checkpoint{why}; give the folder "
                "that `fuelrail bench train --checkpoint` wrote"
            )
        self.name = manifest.identity["model"]
        if self.name not in MODELS:
            raise ConfigError(
                f"teacher '{store.shown}' is of model '{self.name}'; models: {', '.join(MODELS)}"
            )
        self.settings = MODELS[self.name]
        make = partial(build_model, self.settings)
        self.model: StagedModel
        # The student draws the same weights with any teacher.
        with torch.random.fork_rng(devices=[]):
            if not shard:
                self.model = make().to(device)
                self.eval().requires_grad_(requires_grad=False)
            else:
                self.model, fill = draft(make, device, 0)
                self.eval().requires_grad_(requires_grad=False)
                device_type, _, _ = device.partition(":")
                mesh = init_device_mesh(device_type, (dist.get_world_size(),))
                for block in self.model.blocks:
                    fully_shard(block, mesh=mesh)
                fully_shard(self, mesh=mesh)
                fill([self.model], False)  # buffers; the weights are those of the checkpoint
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        with warnings.catch_warnings():
            # Each rank loads its own.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            load(tensors, storage_reader=store.reader(folder), no_dist=True)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and features of a model's inputs."""
        hidden, logits = self.model.predict(*inputs)
        return logits, self.model.feature_map(hidden, *inputs)

    def outputs(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return ``logits`` and ``features`` of a loader's batch, in the shape of a layer's
        channels.
        """
        device = next(self.parameters()).device
        inputs = [tensor.to(device) for tensor in self.model.inputs(batch)]
        logits, features = self(*inputs)
        num_cameras = features.shape[1]
        shape, _ = predictions(self.settings, num_cameras)
        return {"logits": logits.reshape(-1, *shape), "features": features}


class Source(NamedTuple):
    """The teacher's tensors: their names, the channels of its features, and how a loader's batch
    gives them.

    ``temperature`` is that at which logits were stored, where they are top-k or draws.
    """

    names: tuple[str, ...]
    width: int
    of_batch: Callable[[Mapping[str, Any]], tuple[Tensor, ...]] = lambda _: ()
    temperature: float | None = None


def make_layer_teacher(
    place: str,
    student: ModelSettings,
    dataset: Dataset,
    weights: Collection[str],
    transforms: Transforms,
) -> Source:
    """Make the teacher of a layer of a dataset.

    Raise ConfigError where its channels are not what the student needs.

    ``transforms`` are the loader's: what they move, a channel of a fixed view must follow.
    """
    layer = open_layer(LAYER, place, dataset)
    table = {channel.name: channel for channel in layer.channels}
    cameras = [camera.channel for camera in dataset.manifest.cameras]
    shape, meaning = predictions(student, len(cameras))

    def find(
        name: str,
        shape_rule: tuple[int | None, ...],
        law: str,
        *,
        moves: bool = False,
    ) -> Channel:
        """Find the channel of a shape (None: any size; no axes: boxes).

        ``moves``: the samples are augmented.
        """
        channel = table.get(f"{LAYER}.{name}")
        sides = "boxes"
        if shape_rule:
            names_of_sides = ("any" if side is None else str(side) for side in shape_rule)
            sides = f"[{', '.join(names_of_sides)}]"
        has_shape: tuple[int | None, ...] = ()
        if channel is not None:
            has_shape = channel.shape
            # Of stored logits, the shape of those that they stand for.
            if channel.kind in (TOPK, SAMPLED) and channel.vocabulary is not None:
                has_shape = channel.shape[0], channel.vocabulary.size
        if not shape_rule:
            fits = channel is not None and channel.law.name == law
        elif len(shape_rule) != len(has_shape):
            fits = False
        else:
            pairs = zip(shape_rule, has_shape, strict=True)
            fits = all(side in (None, size) for side, size in pairs)
        if channel is None or not fits:
            has = f"its channels are {', '.join(sorted(table))}"
            if channel:
                has = f"it has {list(has_shape) or channel.kind}"
            raise ConfigError(
                f"teacher layer '{place}' must have a channel '{name}' of {sides}, for a "
                f"student of {meaning}; {has}; make the layer with a teacher of the same "
                "predictions"
            )
        if moves and layer.manifest.view.kind == channel.law.name == "fixed":
            raise ConfigError(
                f"teacher layer '{place}': channel '{name}' has the law 'fixed', and the "
                f"samples are augmented; give it the law '{law}', or make the layer with "
                "--view per_view"
            )
        return channel

    makers: dict[str, Callable[[Mapping[str, Any]], Tensor]] = {}
    moved = transforms.image is not None and bool(transforms.image.train)
    width = 0
    temperature = None
    has_boxes = "targets" in weights and f"{LAYER}.detections" in table
    if "logits" in weights or ("targets" in weights and not has_boxes):
        logits = find(
            "logits",
            shape,
            "ego_grid",
            moves=isinstance(student, GridSettings) and bool(transforms.ego.train),
        )
        if logits.kind in (TOPK, SAMPLED):
            stated = layer.manifest.recipe.get("temperature")
            temperature = stated if isinstance(stated, float) else 1.0
            parts = ["indices", "weights", "mask"]
            if logits.kind == TOPK:
                parts.append("tail")

            def read_part(batch: Mapping[str, Any], part: str) -> Tensor:
                tensor: Tensor = getattr(batch[logits.name], part)
                return tensor

            makers = {f"logits.{part}": partial(read_part, part=part) for part in parts}
        else:
            makers["logits"] = lambda batch: _values(batch, logits)
    if has_boxes and isinstance(student, GridSettings):  # of other models targets were refused
        detections = find("detections", (), "ego_boxes")
        (group,) = detections.law.roles["boxes"]
        part = group[0]
        grid = student.grid
        range_m = student.range_m

        def find_cells(batch: Mapping[str, Any]) -> Tensor:
            boxes = batch[detections.name][part]
            return occupied_cells(boxes, grid, range_m)

        makers["targets"] = find_cells
    if "features" in weights and f"{LAYER}.features" in table:
        features = find("features", (len(cameras), None, None, None), "image", moves=moved)
        width = features.shape[1] or 0
        makers["features"] = lambda batch: _values(batch, features)
    elif "features" in weights:
        maps = []
        for camera in cameras:
            channel = find(f"features_{camera}", (None, None, None), "image", moves=moved)
            maps.append(channel)
        width = maps[0].shape[2] or 0

        def stack_maps(batch: Mapping[str, Any]) -> Tensor:
            features = [_values(batch, channel).movedim(-1, 1) for channel in maps]
            return torch.stack(features, dim=1)

        makers["features"] = stack_maps
    return Source(
        names=tuple(makers),
        width=width,
        of_batch=lambda batch: tuple(make(batch) for make in makers.values()),
        temperature=temperature,
    )


def _values(batch: Mapping[str, Any], channel: Channel) -> Tensor:
    values: Tensor = batch[channel.name].float()
    scale = batch.get(f"{channel.name}_scale")
    if scale is None:
        return values
    ones = [1] * (values.ndim - 1)
    scaled: Tensor = values * scale.view(-1, *ones)
    return scaled
