"""Batches at fixed addresses, with fixed shapes: for CUDA graphs and torch.compile.

``Transforms(static=...)``.

Lists of tensors that differ in length from sample to sample become one tensor each, padded to a
maximum, beside a mask. At hand-over the batch is copied into one of a few sets of buffers, in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from fuelrail.loaders.batch.packs import pad_packs
from fuelrail.pipeline.channels.kinds import Packed
from fuelrail.pipeline.channels.logits import Logits
from fuelrail.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from fuelrail.loaders.config import StaticBatches
    from fuelrail.pipeline.order.pack import Pack

_BOX_FILL: Final = {
    "gt_boxes_3d": 0.0,
    "gt_labels_3d": -1,
    "gt_velocity": 0.0,
    "gt_valid": False,
    "instance_id": -1,
}
"""The entries that have a row a box, and the content of the rows beyond a sample's boxes."""


def pad(
    settings: StaticBatches,
    batch: Any,
    pack: Pack | None = None,
    num_packs: int = 0,
) -> dict[str, Any]:
    """Return a collated batch with its lists of tensors padded: ``gt_mask`` and ``points_mask`` say
    what is real.

    ``gt_mask`` is bool [B, max_boxes], ``points_mask`` bool [B, max_points], with windows [B, T,
    max_points]. A batch of ``num_packs`` of a ``pack`` is padded by `pad_packs`, too. Raises
    ConfigError for a sample that has more, and for a list of tensors that has no maximum.
    """
    if not isinstance(batch, dict):
        raise ConfigError(
            f"static batches must be dicts, and collate_fn returned {type(batch).__name__}: "
            "return a dict of tensors"
        )
    padded: dict[str, Any] = {}
    for name, value in batch.items():
        is_fixed = (
            pack is not None if isinstance(value, Packed) else bool(_split_entry(name, value))
        )
        if is_fixed or not _has_tensors(value):
            padded[name] = value
        elif name in _BOX_FILL:
            padded[name], mask = _pad_lists(
                batch,
                name=name,
                maximum=settings.max_boxes,
                option="max_boxes",
                fill=_BOX_FILL[name],
            )
            padded.setdefault("gt_mask", mask)
        elif name == "points" and settings.max_points is not None:
            padded[name], padded["points_mask"] = _pad_lists(
                batch,
                name=name,
                maximum=settings.max_points,
                option="max_points",
                fill=0.0,
            )
        else:
            fix = (
                "set max_points"
                if name == "points"
                else "make it one tensor of one shape in transform or collate_fn"
            )
            raise ConfigError(
                f"static batches need a fixed shape, and {name!r} is a "
                f"{type(value).__name__} of tensors: {fix}"
            )
    if pack is None:
        return padded
    return pad_packs(
        pack,
        num_packs=num_packs,
        max_tokens=settings.max_tokens,
        batch=padded,
        fills=_BOX_FILL,
    )


def _has_tensors(value: object) -> bool:
    """Return whether a value other than a tensor holds tensors."""
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, (list, tuple)) and any(
        isinstance(item, torch.Tensor) or _has_tensors(item) for item in value
    )


def _split_entry(name: str, value: object) -> dict[tuple[str, ...], torch.Tensor]:
    """Return the tensors of fixed shape of an entry: itself, its images by group of cameras, its
    logits, its packs.
    """
    if isinstance(value, torch.Tensor):
        return {(name,): value}
    if isinstance(value, Packed):
        value = value._asdict()
    elif isinstance(value, Logits) and value.offsets is None:
        value = value.parts
    elif name != "img" or not isinstance(value, dict):
        return {}
    is_flat = all(isinstance(tensor, torch.Tensor) for tensor in value.values())
    if is_flat:
        return {(name, part): tensor for part, tensor in value.items()}
    return {}


def _pad_lists(
    batch: dict[str, Any],
    name: str,
    maximum: int,
    option: str,
    fill: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return lists of tensors (n, ...), one a sample or one a frame of it, as one tensor, and
    the mask of real rows.
    """
    samples: Sequence[Any] = batch[name]
    frames = [sample if isinstance(sample, (list, tuple)) else [sample] for sample in samples]
    lengths = torch.tensor([[len(tensor) for tensor in sample] for sample in frames])
    if int(lengths.max()) > maximum:
        batch_row = int(lengths.amax(1).argmax())
        keys = batch.get("sample_key")
        name_of_row = f"sample {keys[batch_row]!r}" if keys else f"row {batch_row} of the batch"
        raise ConfigError(
            f"{name_of_row} has {int(lengths.max())} rows of {name!r}, and static batches "
            f"hold {option}={maximum}: raise {option}, or drop rows in transform or by the "
            "order's filter"
        )
    first = frames[0][0]
    shape = (*lengths.shape, maximum, *first.shape[1:])
    out = first.new_full(shape, fill)
    for row, sample in zip(out, frames, strict=True):
        for place, tensor in zip(row, sample, strict=True):
            place[: len(tensor)] = tensor
    mask = torch.arange(maximum) < lengths[..., None]
    has_frames = isinstance(samples[0], (list, tuple))
    if has_frames:
        return out, mask
    return out[:, 0], mask[:, 0]


class FixedBuffers:
    """Sets of buffers that batches are copied into in turn, each set's tensors at one address for
    ever.

    A batch is overwritten when the ``count``-th one after it is handed out. The copy is queued on
    the stream that is current then, so it comes after what the consumer has queued there before.
    """

    def __init__(self, count: int) -> None:
        self._sets: list[dict[tuple[str, ...], torch.Tensor]] = [{} for _ in range(count)]
        self._arenas: list[torch.Tensor | None] = [None] * count
        self._next = 0

    def __call__(self, batch: dict[str, Any], arena: torch.Tensor | None = None) -> dict[str, Any]:
        """Return the batch with its tensors copied into the next set; those that lie in ``arena``
        by one copy.

        Raises ConfigError where a tensor is not what it was in the first batch.
        """
        set_number = self._next
        self._next = (set_number + 1) % len(self._sets)
        buffers = self._sets[set_number]
        first = self._sets[0]
        tensors = {
            key: tensor
            for name, value in batch.items()
            for key, tensor in _split_entry(name, value).items()
        }
        if first and tensors.keys() != first.keys():
            unlike = ", ".join(sorted(map(".".join, tensors.keys() ^ first.keys())))
            raise ConfigError(
                f"static batches must have the same entries, and these come and go: {unlike}"
            )
        for name, tensor in tensors.items():
            expected = first.get(name, tensor)
            if (
                tensor.shape != expected.shape
                or tensor.dtype != expected.dtype
                or tensor.stride() != expected.stride()
            ):
                raise ConfigError(
                    f"static batches need fixed shapes, and {'.'.join(name)!r} is {tensor.dtype} "
                    f"{list(tensor.shape)} where it was {expected.dtype} "
                    f"{list(expected.shape)}: pad it in transform or collate_fn"
                )
        home = None if arena is None else arena.untyped_storage().data_ptr()
        if arena is not None and self._arenas[set_number] is None:
            self._arenas[set_number] = torch.empty_like(arena)
        set_arena = self._arenas[set_number]
        if arena is not None and set_arena is not None:
            set_arena.copy_(arena)
        for name, tensor in tensors.items():
            is_packed = tensor.untyped_storage().data_ptr() == home
            if name not in buffers and is_packed and set_arena is not None:
                # The view of this set's arena that the tensor is of its own.
                buffers[name] = set_arena.view(tensor.dtype).as_strided(
                    tensor.shape, tensor.stride(), tensor.storage_offset()
                )
            elif name not in buffers:
                buffers[name] = torch.empty_like(tensor)
            if not is_packed:
                buffers[name].copy_(tensor)
        entries: dict[str, Any] = {
            name[0]: tensor for name, tensor in buffers.items() if len(name) == 1
        }
        for entry, value in batch.items():
            parts: dict[str, Any] = {
                key[1]: buffers[key] for key in _split_entry(entry, value) if len(key) > 1
            }
            if parts:
                entries[entry] = (
                    value._replace(**parts) if isinstance(value, Logits | Packed) else parts
                )
        return {**batch, **entries}
