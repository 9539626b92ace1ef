"""Loader state: a few numbers that say where in the training sequence a run stands, and of what dataset and order.

It holds no shuffled list, no generator and no queue content, so it is the same on every rank, and restoring it costs
one seek whatever the position. Batches that were prefetched but not handed out do not count as consumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from fuelrail.pipeline.errors import StateMismatchError
from fuelrail.pipeline.settings import Settings

STATE_VERSION: Final = 1


class Identity(Settings, frozen=True, omit_defaults=True):
    """What a position is a position of. Two loaders with one identity yield the same sequence of samples."""

    dataset: str | dict[str, str]
    """Its fingerprint; of a mix, those of all datasets by name."""
    split: str
    order: dict[str, Any]
    drop_last: bool
    frames: dict[str, Any] | None = None
    """The temporal window."""


class LoaderState(Settings, frozen=True):
    """The state as a dict of plain JSON types: epoch, samples of it consumed over all ranks, and the identity.

    ``global_batch_size`` is told for the record: a run may go on with another one, and then continues after the
    samples consumed.
    """

    version: int
    identity: Identity
    epoch: int
    samples_consumed: int
    global_batch_size: int


def encode_state(state: LoaderState) -> dict[str, Any]:
    """The state as plain JSON types, for ``state_dict``.

    The identity is one text of JSON: checkpoints that are loaded in place, as torch.distributed.checkpoint does it,
    look for the entries that the loading side has, so one that only the saved state has would go unnoticed.
    """
    encoded: dict[str, Any] = msgspec.to_builtins(state)
    return {**encoded, "identity": msgspec.json.encode(state.identity).decode()}


def decode_state(encoded: object, expected: Identity) -> LoaderState:
    """Check a state dict against this loader's identity.

    Raises StateMismatchError showing both sides where version, dataset, split, order or frames differ, or the dict is
    not a loader state.
    """
    if not isinstance(encoded, Mapping):
        raise StateMismatchError(f"not a Fuelrail loader state: a dict is needed, got {type(encoded).__name__}")
    version = encoded.get("version")
    if version != STATE_VERSION:
        raise StateMismatchError(f"loader state has version {version!r}; this Fuelrail reads {STATE_VERSION}")
    try:
        plain = dict(encoded)
        if isinstance(plain.get("identity"), str):
            plain["identity"] = msgspec.json.decode(plain["identity"])
        state = msgspec.convert(plain, LoaderState)
    except msgspec.DecodeError as error:
        raise StateMismatchError(f"not a Fuelrail loader state: {error}") from error
    if state.epoch < 0 or state.samples_consumed < 0:
        raise StateMismatchError(
            f"loader state is at epoch {state.epoch}, sample {state.samples_consumed}; both must be 0 or more"
        )
    differing = [
        f"{name}: state has {theirs!r}, loader has {ours!r}"
        for name in Identity.__struct_fields__
        if (theirs := getattr(state.identity, name)) != (ours := getattr(expected, name))
    ]
    if differing:
        raise StateMismatchError(f"loader state belongs to another training sequence; {'; '.join(differing)}")
    return state
