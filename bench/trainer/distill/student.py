"""Distillation: a student learns from a teacher's predictions besides the labels.

The teacher is a trained model out of its checkpoints, which predicts beside the student (online),
or a layer of its predictions (offline). The loss is the weighted sum of up to four parts:

=========  ========================================================================================
labels     the student's own loss
logits     divergence (Kullback and Leibler) of the student's distribution from the teacher's, both
           softened by a temperature T, times T^2 (arXiv 1503.02531); a cell of a grid has the two
           classes free and occupied
features   mean squared difference of the maps in front of the heads, the student's through a
           learnt linear map (arXiv 1412.6550); the teacher's is averaged to the student's size
targets    the student's own loss, with the teacher's detections in place of the labels
=========  ========================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fuelrail.bench.trainer.distill.settings import (
    DISTILL,
    TEMPERATURE,
    weights_of,
)
from fuelrail.bench.trainer.distill.teacher import (
    Source,
    Teacher,
    make_layer_teacher,
)
from fuelrail.bench.trainer.models.settings import (
    GptSettings,
    GridSettings,
    VitSettings,
    feature_width,
    predictions,
)
from fuelrail.bench.trainer.models.staged import StagedModel, mean_over_samples
from fuelrail.pipeline.channels.logits import Logits
from fuelrail.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from fuelrail.bench.trainer.models.settings import ModelSettings
    from fuelrail.loaders.loader import DataLoader


class Distilled(StagedModel):
    """A student with the loss of distillation; its inputs end with the teacher's tensors.

    It takes over the student's parts, so parameters keep their names. With the part ``features``
    the head has one more, ``projection``.
    """

    def __init__(
        self,
        student: StagedModel,
        source: Source,
        weights: Mapping[str, float],
        temperature: float,
    ) -> None:
        super().__init__(student.settings)
        self.stem = student.stem
        self.blocks = student.blocks
        self.head = student.head
        self.plan = student.plan
        # The student lives on for its inputs and losses.
        del student.stem, student.blocks, student.head
        self.student = student
        self._weights = weights
        self._source = source
        self._temperature = temperature
        if "features" in weights:
            width = feature_width(self.settings)
            projection = nn.Conv2d(width, source.width, kernel_size=1, bias=False)
            self.head.register_module("projection", projection)

            def with_features(
                head: nn.Module,
                arguments: tuple[Tensor, ...],
                logits: Tensor,
            ) -> tuple[Tensor, Tensor]:
                features = self.student.feature_map(*arguments)
                projected = head.get_submodule("projection")(features.flatten(0, 1))
                return logits, projected.unflatten(0, features.shape[:2])

            self.head.register_forward_hook(with_features)

    def inputs(self, batch: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Return the student's inputs, and of a layer the teacher's tensors."""
        student_inputs = self.student.inputs(batch)
        teacher_tensors = self._source.of_batch(batch)
        return (*student_inputs, *teacher_tensors)

    def real_share(self, *inputs: Tensor) -> Tensor:
        """Return the share of the batch's samples that are real, by the student's inputs."""
        student_inputs = inputs[: -len(self._source.names)]
        return self.student.real_share(*student_inputs)

    def losses(self, logits: Tensor, *inputs: Tensor) -> Tensor:
        """Return the student's own losses by name."""
        return self.student.losses(logits, *inputs)

    def loss(self, logits: Any, *inputs: Tensor) -> Tensor:
        """Return the weighted sum of the parts, the mean over the batch's real samples."""
        names = self._source.names
        student = self.student
        parts = dict[str, Tensor]()
        student_inputs = inputs[: -len(names)]
        *others, _, weight = student_inputs
        said = dict(zip(names, inputs[-len(names) :], strict=True))
        if "features" in self._weights:
            logits, features = logits
            teacher_features = said["features"].flatten(0, 1).float()
            teacher_features = F.adaptive_avg_pool2d(teacher_features, features.shape[-2:])
            difference = features.flatten(0, 1).float() - teacher_features
            squares = difference.square().mean(dim=(1, 2, 3))
            parts["features"] = squares.view(features.shape[:2])
        if "labels" in self._weights:
            parts["labels"] = student.losses(logits, *student_inputs)
        if "targets" in self._weights:
            detected = said.get("targets")
            if detected is None:
                detected = (said["logits"].flatten(1) > 0).float()
            parts["targets"] = student.losses(logits, *others, detected, weight)
        if "logits" in self._weights:
            binary = isinstance(self.settings, GridSettings)
            teacher: Any = said.get("logits")
            if teacher is None:
                fields = {}
                for name, value in said.items():
                    channel, _, field = name.partition(".")
                    if channel == "logits":
                        fields[field] = value
                teacher = Logits(**fields)
            parts["logits"] = divergence(logits, teacher, self._temperature, binary=binary)
            if isinstance(teacher, Logits):  # the mean is over the positions that are stored
                share = teacher.mask.float().mean(-1, keepdim=True)
                parts["logits"] = parts["logits"] / (share + (share == 0))
        total = torch.zeros((), device=weight.device)
        for name, part in parts.items():
            losses = student.by_sample(part, *student_inputs)
            total = total + self._weights[name] * mean_over_samples(losses, weight)
        return total


def divergence(
    logits: Tensor,
    teacher: Tensor | Logits,
    temperature: float | None = None,
    *,
    binary: bool = False,
    weights: Tensor | None = None,
) -> Tensor:
    """Return the student's divergence from the teacher's distribution, at a temperature, times its
    square, in nats.

    ``binary``: [B, ...] of logits of two classes each, the teacher's of any shape with as many;
    else classes are along the last axis, which the result has not. The temperature is 2 by default;
    of stored `Logits` [..., T] it is 1, and must be that at which they were stored. Positions that
    ``mask`` leaves out have 0. Of top-k all other tokens count as one. Of draws the result is the
    cross-entropy: its expectation is the divergence plus the teacher's entropy, with the gradient
    of the divergence (arXiv 2503.16870).

    With ``weights``, of the result's shape, such as a mask of real tokens, returns the weighted
    mean over stored positions; 0 where all weights are 0.
    """
    if isinstance(teacher, Logits):
        temperature = 1.0 if temperature is None else temperature
        student = logits.float() / temperature  # [..., T, V]
        indices = teacher.indices.long()
        total = student.logsumexp(-1)
        listed = student.gather(-1, indices) - total[..., None]
        values: Tensor = -(teacher.weights * listed).sum(-1)
        if teacher.tail is not None:
            values = values + torch.xlogy(teacher.weights, teacher.weights).sum(-1)
        if teacher.tail is not None and indices.shape[-1] < student.shape[-1]:
            # Not 1 - sum of the listed probabilities: where the student is sure of them, nothing is
            # left of its digits.
            rest = student.scatter(-1, indices, -torch.inf).logsumexp(-1) - total
            values = values + torch.xlogy(teacher.tail, teacher.tail) - teacher.tail * rest
        if weights is not None:
            weights = weights * teacher.mask
    else:
        temperature = TEMPERATURE if temperature is None else temperature
        student = logits.float() / temperature
        target = teacher.reshape(logits.shape).float() / temperature
        if binary:
            occupied = F.logsigmoid(target) - F.logsigmoid(student)
            free = F.logsigmoid(-target) - F.logsigmoid(-student)
            values = target.sigmoid() * occupied + (-target).sigmoid() * free
        else:
            student = student.log_softmax(-1)
            target = target.log_softmax(-1)
            values = F.kl_div(student, target, reduction="none", log_target=True).sum(-1)
    values = values * temperature**2
    if weights is None:
        return values
    total_weight = weights.sum()
    return (values * weights).sum() / (total_weight + (total_weight == 0))


def distilled(
    size: ModelSettings,
    loader: DataLoader,
    device: str,
    *,
    teacher: str | None = None,
    layer: str | None = None,
    weights: str = DISTILL,
    temperature: float | None = None,
    tp: int = 1,
) -> tuple[
    Callable[[StagedModel], StagedModel],
    Callable[..., tuple[Tensor, ...]] | None,
]:
    """Return what gives a student of a size the loss of distillation, and the teacher to call with
    a batch's inputs.

    The teacher is one out of checkpoints, or a ``layer`` of predictions, which needs no call: its
    values are in the batches. ``weights`` is the text that :func:`weights_of` reads;
    ``temperature`` softens the logits (default: 2, or that of a layer of top-k or draws); ``tp`` is
    the student's degree of tensor parallel. All ranks must call this. Raises ConfigError for a
    teacher that predicts other things than the student or was stored at another temperature, and
    what :class:`Teacher` and `open_layer` raise.
    """
    parts = weights_of(weights)
    if "targets" in parts and not isinstance(size, GridSettings):
        raise ConfigError(
            f"distill '{weights}': 'targets' are detections, which this model does not "
            "learn; use a model of occupancy, or 'logits'"
        )
    if "features" in parts and tp > 1 and isinstance(size, VitSettings | GptSettings):
        raise ConfigError(
            f"distill '{weights}': 'features' lie in parts on the ranks of tp={tp}; use "
            "tp=1, or a model of convolutions"
        )
    if teacher is None:
        source = make_layer_teacher(
            str(layer),
            student=size,
            dataset=loader.dataset,
            weights=parts,
            transforms=loader.transforms,
        )
        stored = source.temperature
        if stored is not None and temperature not in (None, stored):
            raise ConfigError(
                f"temperature={temperature}: layer '{layer}' has logits that were stored at "
                f"{stored}; leave it out, or make the layer again by annotate --temperature "
                f"{temperature}"
            )
        distil = partial(
            Distilled,
            source=source,
            weights=parts,
            temperature=temperature or stored or TEMPERATURE,
        )
        return distil, None
    model = Teacher(
        teacher,
        device,
        shard=dist.is_initialized() and dist.get_world_size() > 1,
    )
    num_cameras = len(loader.cameras)
    student_predictions = predictions(size, num_cameras)
    teacher_predictions = predictions(model.settings, num_cameras)
    if student_predictions != teacher_predictions:
        student_shape, student_meaning = student_predictions
        shape, meaning = teacher_predictions
        raise ConfigError(
            f"teacher '{model.name}' predicts {list(shape)} ({meaning}), the student "
            f"{list(student_shape)} ({student_meaning}); use a teacher of the same predictions"
        )
    source = Source(("logits", "features"), feature_width(model.settings))
    distil = partial(
        Distilled,
        source=source,
        weights=parts,
        temperature=temperature or TEMPERATURE,
    )
    return distil, model
