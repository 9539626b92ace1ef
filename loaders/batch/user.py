"""User functions in the pipeline: `transform` on each sample, `collate_fn` on samples,
`batch_transform` on batches.

All run in the loader's threads, so their Python runs under the interpreter's lock, against the
trainer's own: numpy, torch and other C code that releases the lock is fine, Python loops over
points or pixels are not: these belong in worker processes
(:mod:`fuelrail.loaders.batch.processes`). ``stats()`` shows the functions as stages.

A *sample* is a dict with the names of a batch (:mod:`fuelrail.loaders.batch.assemble`) and no B
axis (with temporal windows the T axis is the first: `fuelrail.loaders.batch.temporal`); ``img`` is
a view of the batch's own buffer, so changing it in place costs no copy. ``seed`` is an int drawn
from the loader's seed, the epoch and the sample: randomness that comes from it, and from nothing
else, is the same under any ``num_workers``, on any number of ranks and after a resume.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fuelrail.loaders.batch.channels import split_sample
from fuelrail.pipeline.errors import ConfigError, FuelrailError
from fuelrail.pipeline.runtime.stages import stage_error
from fuelrail.pipeline.transforms.randomness import (
    ALL_CAMERAS,
    second_view,
    uniforms,
)

if TYPE_CHECKING:
    from fuelrail.loaders.records import BatchSlot, Collated, Parsed


class Sample(NamedTuple):
    """One sample for the user's functions, with what collating needs to know.

    ``joins`` has, by name, what joins values that are never stacked, for any lengths: which batch
    happens to have equal ones must not change its type. ``common`` is what a batch has once.
    """

    slot: BatchSlot
    batch_row: int
    key: str
    value: Any
    joins: Mapping[str, Callable[[list[Any]], Any]]
    common: dict[str, Any]
    second: Sample | None = None
    """The other view of the sample, where there are two."""

    @property
    def views(self) -> tuple[Sample, ...]:
        """The sample itself, and its other view."""
        if self.second is None:
            return (self,)
        return self, self.second

    def __str__(self) -> str:
        return f"sample {self.key!r} (epoch {self.slot.epoch}, step {self.slot.step})"


def transform(
    function: Callable[[dict[str, Any]], Any] | None,
    assemble: Callable[[Sequence[Parsed]], dict[str, Any]],
    seed: int,
    decoded: Parsed,
) -> Sample:
    """Pass each view of a sample through the user's function, as a dict: a batch of one without
    its B axis; ``seed`` is that of the loader.
    """
    batch = assemble([decoded])
    images = batch.pop("img")
    task = decoded.task
    batch_row = task.batch_row
    if isinstance(images, dict):
        image = {name: image_buffer[batch_row] for name, image_buffer in images.items()}
    else:
        image = images[batch_row]
    parts = {}
    joins = {}
    common = {}
    for name, value in batch.items():
        if isinstance(value, torch.Tensor):
            parts[name] = value[0]
        elif (part := split_sample(value, has_windows=decoded.slot.has_windows)) is not None:
            parts[name], joins[name] = part
        else:
            common[name] = value
    number = second_view(task.number) if decoded.view else task.number
    drawn = uniforms(
        seed,
        epoch=decoded.slot.epoch,
        sample=number,
        cameras=[ALL_CAMERAS],
        stream="transform",
        count=1,
    )
    seed_of_sample = int(drawn[0, 0] * 2**53)
    sample = {"img": image, **parts, **common, "seed": seed_of_sample}
    value = sample if function is None else function(sample)
    second = None
    if decoded.second is not None:
        second = transform(function, assemble, seed, decoded.second)
    return Sample(
        slot=decoded.slot,
        batch_row=batch_row,
        key=decoded.key,
        value=value,
        joins=joins,
        common=common,
        second=second,
    )


def collate(function: Callable[[list[Any]], Any] | None, transformed: Sequence[Sample]) -> Any:
    """Do the stage's work: call the user's function on the list of samples, or
    :func:`stack_samples`.
    """
    if function is not None:
        return function([entry.value for entry in transformed])
    return stack_samples(transformed)


class BatchTransform:
    """The last work on a batch: its images normalised, then the user's ``batch_transform``, on the
    current stream.

    The function gets the batch and a generator on the batch's device, whose seed is drawn from the
    loader's seed, the epoch and the position of the batch's first row: the same after a resume, and
    for a batch that begins there on any number of ranks. What it returns is handed out.
    """

    def __init__(
        self,
        function: Callable[[Any, torch.Generator], Any],
        normalize: Callable[[Any], Any] | None,
        device: torch.device,
        seed: int,
        *,
        must_be_dict: bool,
    ) -> None:
        self._function = function
        self._normalize = normalize
        self._device = device
        self._seed = seed
        self._must_be_dict = must_be_dict

    def __call__(self, collated: Collated) -> Any:
        """Return the batch; raise StageError, with the batch's place and keys, for an error of
        the function.
        """
        batch = collated.batch if self._normalize is None else self._normalize(collated.batch)
        drawn = uniforms(
            self._seed,
            epoch=collated.epoch,
            sample=collated.position,
            cameras=[ALL_CAMERAS],
            stream="batch_transform",
            count=1,
        )
        seed = int(drawn[0, 0] * 2**53)
        generator = torch.Generator(self._device).manual_seed(seed)
        try:
            result = self._function(batch, generator)
        except FuelrailError:
            raise
        except BaseException as error:
            raise stage_error(f"batch_transform failed on {collated}", error) from error
        if result is None or (self._must_be_dict and not isinstance(result, dict)):
            expected = (
                "a dict of tensors, as static batches need" if self._must_be_dict else "the batch"
            )
            raise ConfigError(
                f"batch_transform returned {type(result).__name__} for {collated}: return "
                f"{expected}"
            )
        return result


def stack_samples(transformed: Sequence[Sample]) -> dict[str, Any]:
    """Collate samples to a batch: stack tensors of one shape and numbers of one kind, put
    everything else into lists.

    An ``img`` that still lies in the batch's buffer is not copied. Raises ConfigError where a
    transform returned anything but a dict, or dicts with different names.
    """
    samples = [entry.value for entry in transformed]
    for entry in transformed:
        if not isinstance(entry.value, dict):
            raise ConfigError(
                f"transform returned {type(entry.value).__name__} for {entry}; return the "
                "sample's dict, or give a collate_fn that takes what it returns"
            )
        if entry.value.keys() != samples[0].keys():
            unlike_names = entry.value.keys() ^ samples[0].keys()
            unlike = sorted(map(str, unlike_names))
            raise ConfigError(
                f"transform gave {entry} other names than {transformed[0]}: {', '.join(unlike)}"
            )
    joins = transformed[0].joins
    common = transformed[0].common
    batch: dict[str, Any] = {}
    for name in samples[0]:
        values = [sample[name] for sample in samples]
        if name == "img":
            # The batch's buffer itself if every image is still its own row of it; so for each
            # group of cameras.
            buffer = transformed[0].slot.img()
            if not isinstance(buffer, dict):
                batch[name] = _keep_rows(buffer, transformed, values)
            elif all(isinstance(image, dict) and image.keys() == buffer.keys() for image in values):
                batch[name] = {
                    group: _keep_rows(rows, transformed, [image[group] for image in values])
                    for group, rows in buffer.items()
                }
            else:
                batch[name] = _stack(values)
        elif name in common:
            batch[name] = values[0]
        else:
            batch[name] = joins[name](values) if name in joins else _stack(values)
    return batch


def _stack(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, torch.Tensor) and all(
        isinstance(value, torch.Tensor)
        and value.shape == first.shape
        and value.dtype == first.dtype
        for value in values
    ):
        return torch.stack(values)
    if isinstance(first, (bool, int, float)) and all(
        type(value) is type(first) for value in values
    ):
        return torch.tensor(values)
    return values


def _keep_rows(
    buffer: torch.Tensor,
    transformed: Sequence[Sample],
    images: list[Any],
) -> Any:
    for entry, image in zip(transformed, images, strict=True):
        row = buffer[entry.batch_row]
        if not (
            isinstance(image, torch.Tensor)
            and image.data_ptr() == row.data_ptr()
            and image.dtype == row.dtype
            and image.shape == row.shape
            and image.stride() == row.stride()
        ):
            return _stack(images)
    return buffer
