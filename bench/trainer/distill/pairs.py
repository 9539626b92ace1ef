"""Distillation of models of the caller's own: any pair of layers, with a loss of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Pair(NamedTuple):
    """A part of a student that learns from a part of a teacher, each by its name in its model; ""
    is the whole.

    The mean of ``loss(student's output, teacher's output)`` times ``weight`` is trained:
    `fuelrail.bench.divergence` of logits, torch's ``mse_loss`` of features. ``projection`` is a
    module that is trained with the student, such as a linear map of its features to the teacher's
    width.
    """

    student: str
    teacher: str
    loss: Callable[[Any, Any], Tensor]
    weight: float = 1.0
    projection: nn.Module | None = None


class Distilling(nn.Module):
    """A student with a teacher beside it, as a model for `fuelrail.bench.parallelise`; evaluated it
    is the student.

    Both have ``forward(batch)``. The student returns its losses, or what ``loss(outputs, batch)``
    makes them of; those of the pairs are added, by the names of the student's parts. The teacher
    predicts in evaluation mode and does not learn; its parameters, named ``teacher.*``, are divided
    as the student's. Raises AttributeError for a part that a model has not.
    """

    def __init__(
        self,
        student: nn.Module,
        teacher: nn.Module,
        pairs: Sequence[Pair],
        loss: Callable[[Any, Any], Tensor | Mapping[str, Tensor]] | None = None,
    ) -> None:
        super().__init__()
        for pair in pairs:
            student.get_submodule(pair.student)
            teacher.get_submodule(pair.teacher)
        self.student = student
        self.teacher = teacher.requires_grad_(requires_grad=False)
        self.projections = nn.ModuleList(pair.projection or nn.Identity() for pair in pairs)
        self._pairs = [pair._replace(projection=None) for pair in pairs]
        self._loss = loss

    def forward(self, batch: Any) -> Any:
        """Return the losses by name; in evaluation mode what the student returns."""
        if not self.training:
            return self.student(batch)
        teacher_parts = [pair.teacher for pair in self._pairs]
        student_parts = [pair.student for pair in self._pairs]
        self.teacher.eval()
        with torch.no_grad(), outputs_of(self.teacher, teacher_parts) as teacher_outputs:
            self.teacher(batch)
        with outputs_of(self.student, student_parts) as student_outputs:
            outputs = self.student(batch)
        student_loss = outputs if self._loss is None else self._loss(outputs, batch)
        losses = {"student": student_loss}
        if isinstance(student_loss, Mapping):
            losses = dict(student_loss)
        pairs = zip(self._pairs, self.projections, strict=True)
        for number, (pair, project) in enumerate(pairs):
            student_output = project(student_outputs[pair.student])
            loss = pair.loss(student_output, teacher_outputs[pair.teacher])
            losses[f"distilled/{number}/{pair.student}"] = loss.mean() * pair.weight
        return losses


@contextmanager
def outputs_of(model: nn.Module, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the outputs of parts of a model by name, of their last call inside."""
    outputs: dict[str, Any] = {}

    def keep(_: nn.Module, __: object, output: Any, name: str) -> None:
        outputs[name] = output

    hooks = []
    for name in {*names}:
        part = model.get_submodule(name)
        hook = part.register_forward_hook(partial(keep, name=name))
        hooks.append(hook)
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()
