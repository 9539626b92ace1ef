"""Loaders for tests, made from single options."""

from __future__ import annotations

from typing import Any

from fuelrail import (
    BadSamplePolicy,
    DataLoader,
    FrameWindow,
    StorageOptions,
    Transforms,
)

STRUCTS = {
    "transforms": Transforms,
    "storage": StorageOptions,
    "bad_samples": BadSamplePolicy,
    "window": FrameWindow,
}


def grouped(**options: Any) -> dict[str, Any]:
    """Return the loader's arguments for these options, of which some are fields of its structs."""
    for argument, kind in STRUCTS.items():
        fields = {name: options.pop(name) for name in kind.__struct_fields__ if name in options}
        if fields.get("frames", ()) is not None and fields:
            assert argument not in options, f"{argument} is given as a struct and by its fields"
            options[argument] = fields
    return options


def make_loader(dataset: Any, batch_size: int, **options: Any) -> DataLoader:
    """Make a loader of options that may be fields of its structs, such as ``image=`` or ``on_error=``.

    It is one for training, shuffled and of full batches only, where the options do not say otherwise.
    """
    shuffle = None if "order" in options else True
    return DataLoader(
        dataset,
        batch_size,
        **{"shuffle": shuffle, "drop_last": True, **grouped(**options)},
    )
