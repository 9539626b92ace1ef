"""Loader state: a few numbers for the position of a run in a training sequence, and the identity of
that sequence.

The identity is the dataset, split, order and windows, which decide the samples and their order, and
the settings that decide the content of a sample. A state holds no shuffled list, no generator and
no queue content, so it is the same on every rank, and restoring it costs one seek for any position.
Batches that were prefetched but not delivered do not count as consumed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from fuelrail.pipeline.errors import StateMismatchError
from fuelrail.pipeline.settings import Settings, explain, find_fault

if TYPE_CHECKING:
    from fuelrail.pipeline.order.batching import Cursor

STATE_VERSION: Final = 1
_MAX_NUMBER: Final = 2**62
_DIGEST_CHARS: Final = 16

_NONE: Final = "none"


class Identity(Settings, frozen=True, omit_defaults=True):
    """What a position is a position of.

    Two loaders with one identity give the same samples with the same content.
    """

    dataset: str | dict[str, str]
    """The dataset's fingerprint; for a mix, those of all datasets by name."""
    split: str
    order: dict[str, Any]
    drop_last: bool
    frames: dict[str, Any] | None = None
    """The temporal window."""
    layers: dict[str, Any] | None = None
    """Fingerprints of the layers by name; of a mix, by dataset and name."""
    settings: dict[str, Any] | None = None
    """What each sample is made into (:func:`sample_settings`); None until the loader adds them."""


def sample_settings(seed: int, **settings: object) -> dict[str, Any]:
    """Return what decides the content of a sample, as plain JSON types with a digest: the seed and
    the settings.

    ``settings`` are of the loader's arguments, by name: structs, dicts of structs, or booleans.
    None, False and augmentations that draw nothing are left out. The decoder is not part of it, for
    backends differ by rounding only; nor are transform and collate_fn, for code has no name that
    outlives a run.
    """
    plain: dict[str, Any] = {"seed": seed}
    for name, value in settings.items():
        if value is not None and value is not False:
            plain[name] = _plain(value)
    encoded = msgspec.json.encode(plain, order="sorted")
    digest = hashlib.sha256(encoded).hexdigest()
    return {"digest": digest[:_DIGEST_CHARS], **plain}


def _plain(value: object) -> object:
    """Return settings, or a mapping of them by name, as plain JSON types; everything else as it
    is.
    """
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if not isinstance(value, msgspec.Struct):
        return value
    # Conversion makes an integer in a float field a float, so that equal settings are equal texts.
    fields = msgspec.to_builtins(value)
    settings = msgspec.convert(fields, type(value))
    return msgspec.json.decode(msgspec.json.encode(settings))


class LoaderState(Settings, frozen=True):
    """The state as a dict of plain JSON types: epoch, samples of it consumed over all ranks, and
    the identity.

    ``global_batch_size`` is for the record: a run may continue with another one, after the samples
    consumed.
    """

    version: int
    identity: Identity
    epoch: int
    samples_consumed: int
    global_batch_size: int

    @property
    def full_batch(self) -> int:
        """What whole epochs were cut into: the positions that fill none were not shown."""
        return self.global_batch_size if self.identity.drop_last else 1


def encode_state(state: LoaderState) -> dict[str, Any]:
    """Return the state as plain JSON types, for ``state_dict``.

    The identity is one text of JSON: checkpoints that are loaded in place, as
    torch.distributed.checkpoint does it, look for the entries that the loading side has, so one
    that only the saved state has would go unnoticed.
    """
    encoded: dict[str, Any] = msgspec.to_builtins(state)
    identity = msgspec.json.encode(state.identity)
    return {**encoded, "identity": identity.decode()}


def state_at(
    identity: Identity,
    place: Cursor,
    global_batch: int,
) -> dict[str, Any]:
    """Return the encoded state of a run at a place."""
    state = LoaderState(
        version=STATE_VERSION,
        identity=identity,
        epoch=place.epoch,
        samples_consumed=place.samples_consumed,
        global_batch_size=global_batch,
    )
    return encode_state(state)


def decode_state(
    encoded: object,
    expected: Identity,
    *,
    strict: bool = True,
) -> LoaderState:
    """Check a state dict against this loader's identity.

    Raises StateMismatchError showing both sides where version, dataset, split, order, frames or
    settings differ, or the dict is not a loader state. Without ``strict`` the settings may differ,
    and nothing else.
    """
    if not isinstance(encoded, Mapping):
        raise StateMismatchError(
            f"not a Fuelrail loader state: a dict is needed, got {type(encoded).__name__}"
        )
    version = encoded.get("version")
    if version != STATE_VERSION:
        raise StateMismatchError(
            f"loader state has version {version!r}; this Fuelrail reads {STATE_VERSION}"
        )
    plain = dict(encoded)
    try:
        if isinstance(plain.get("identity"), str):
            plain["identity"] = msgspec.json.decode(plain["identity"])
        state = msgspec.convert(plain, LoaderState)
    except msgspec.ValidationError as error:
        fault = find_fault(error, plain, LoaderState)
        raise StateMismatchError(f"not a Fuelrail loader state: {fault}") from error
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        text = explain(error, b"", LoaderState)
        raise StateMismatchError(
            f"not a Fuelrail loader state: its 'identity' is not JSON: {text}"
        ) from error
    if not (0 <= state.epoch < _MAX_NUMBER and 0 <= state.samples_consumed < _MAX_NUMBER):
        raise StateMismatchError(
            f"loader state is at epoch {state.epoch}, sample {state.samples_consumed}; both "
            "must be 0 or more, and below 2**62"
        )
    if not 1 <= state.global_batch_size < _MAX_NUMBER:
        raise StateMismatchError(
            f"loader state has global_batch_size {state.global_batch_size}; it must be 1 or "
            "more, and below 2**62"
        )
    theirs = _so_far(state.identity, state)
    ours = _so_far(expected, state)
    differing = []
    for name in Identity.__struct_fields__:
        stated = getattr(theirs, name)
        current = getattr(ours, name)
        if name != "settings" and stated != current:
            differing.append(f"{name}: state has {stated!r}, loader has {current!r}")
    if differing:
        raise StateMismatchError(
            f"loader state belongs to another training sequence; {'; '.join(differing)}; "
            "load it into a loader of the dataset and settings that it was saved with, or "
            "start without it"
        )
    if strict and state.identity.settings != expected.settings:
        raise StateMismatchError(
            f"loader state was saved with other settings of the samples' content; "
            f"{settings_that_differ(state.identity.settings, expected.settings or {}, 'state')}; "
            "make the loader with the state's settings, or continue with the loader's by "
            "load_state_dict(state, strict=False)"
        )
    return state


def settings_of_state(state: dict[str, Any]) -> dict[str, Any]:
    """Return what a state says of the run, each setting by its name: plain JSON types."""
    identity = msgspec.json.decode(state.pop("identity"))
    return {**identity.pop("settings"), **identity, **state}


def _so_far(identity: Identity, state: LoaderState) -> Identity:
    """Return an identity without the stages that begin after a state, and the layers that it has
    besides the state's.

    So a run may get further stages, over layers that were made from what it has learnt. Nor has it
    what the order leaves out besides what the state's does, which `check_unseen` looks at.
    """
    order = identity.order
    state_layers = state.identity.layers or {}
    left_out = state.identity.order.get("without", [])
    own_left_out = order.get("without")
    if isinstance(left_out, list) and isinstance(own_left_out, list):
        first_entries = own_left_out[: len(left_out)]
        order = {name: item for name, item in order.items() if name != "without"}
        if first_entries:
            order["without"] = first_entries
    if left_out:  # whose positions are not those of the stages
        return msgspec.structs.replace(identity, order=order)
    try:
        stages = order["stages"]
        position = state.epoch * order["epoch_length"] + state.samples_consumed
        is_to_come = [stage["until"] is None or stage["until"] >= position for stage in stages]
        current = is_to_come.index(True)
        last = current + stages[current]["ramp"]
        last_stage = {**stages[last], "until": None, "ramp": False}
        order = {**order, "stages": [*stages[:last], last_stage]}
    except (
        KeyError,
        TypeError,
        ValueError,
        IndexError,
    ):
        # An order without stages, or what is not a state of ours.
        return msgspec.structs.replace(identity, order=order)
    layers = {name: item for name, item in (identity.layers or {}).items() if name in state_layers}
    return msgspec.structs.replace(identity, order=order, layers=layers or None)


def settings_that_differ(
    first: Mapping[str, Any] | None,
    current: Mapping[str, Any],
    whose: str,
) -> str:
    """Return both sides of each setting, and of a struct of each entry, that differs; ``whose``
    are the first ones.
    """
    if first is None:
        return f"settings: {whose} names none"
    earlier = _flat(first)
    present = _flat(current)
    names = [
        name
        for name in {**earlier, **present}
        if earlier.get(name, _NONE) != present.get(name, _NONE)
    ]
    names_shown = [name for name in names if name != "digest"] or names
    return "; ".join(
        f"{name}: {whose} has {earlier.get(name, _NONE)}, loader has {present.get(name, _NONE)}"
        for name in names_shown
    )


def _flat(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return each setting as text, by name; the entries of a struct by ``name.entry``."""
    flat: dict[str, str] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            flat.update({f"{name}.{entry}": repr(item) for entry, item in value.items()})
        else:
            flat[name] = repr(value)
    return flat
