"""Layers of a loader: open them, and refuse those whose values belong to another view of the
samples.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

from fuelrail.loaders.schedule.state import (
    sample_settings,
    settings_that_differ,
)
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.format.layers import Layer, Missing, open_layer
from fuelrail.pipeline.order.windows import TimeWindow
from fuelrail.pipeline.settings import (
    CheckedSettings,
    PathText,
    as_settings,
    must_be,
)

if TYPE_CHECKING:
    from fuelrail.pipeline.format.dataset import Dataset
    from fuelrail.pipeline.order.windows import Window

Layers = Mapping[str, "tuple[Layer, ...]"]
"""The layers of each dataset, by the dataset's name."""

_OF_A_VIEW = (
    "image",
    "camera_groups",
    "ego",
    "pixels",
    "undistort",
    "two_views",
)
"""What decides the view of a sample: settings that only change dtypes or frames of reference are
not among them.
"""

_FORM: Final = (
    'layers={!r:.200} must map names to folders, URLs or LayerOptions: {{"teacher": PATH}}'
)


class LayerOptions(CheckedSettings, frozen=True):
    """A layer of a loader.

    Attributes:
        path: folder or URL of the layer.
        missing: where the layer has no row for a sample: ``"error"`` when the loader is made,
            ``"mask"`` the value in the batch, or ``"drop"`` the sample from the order.
        teacher: digest, or name, of the weights that must have made the layer, as `inspect` shows
            it.

    Raises ConfigError for values that are not allowed.
    """

    path: Annotated[PathText, must_be("a folder or a URL")]
    missing: Annotated[Missing, must_be("one of error, mask, drop")] = "error"
    teacher: Annotated[str | None, must_be("a text or None")] = None


def open_layers(
    datasets: Mapping[str, Dataset],
    layers: Mapping[str, Any] | None,
    opening: Mapping[str, Any],
    *,
    is_mix: bool,
) -> Layers:
    """Open the layers of the datasets.

    ``layers`` maps names to places or to `LayerOptions`; of a mix, dataset names to such maps.
    ``opening`` are the keywords of `open_layer`.

    Raises ConfigError for what is not such a map, and what `open_layer` raises.
    """
    if not layers:
        return dict.fromkeys(datasets, ())
    by_dataset = layers if is_mix else {next(iter(datasets)): layers}
    unknown = [name for name in by_dataset if name not in datasets]
    if unknown:
        raise ConfigError(
            f"layers={layers!r:.200}: {unknown[0]!r} is not a dataset of the mix; there "
            f"are: {', '.join(datasets)}; "
            'give layers={"DATASET": {"LAYER": PATH}}'
        )
    opened: dict[str, tuple[Layer, ...]] = {}
    for name, base in datasets.items():
        places = by_dataset.get(name, {})
        if not isinstance(places, Mapping):
            raise ConfigError(_FORM.format(layers))
        layers_of_dataset = []
        for layer, place in places.items():
            if not isinstance(layer, str):
                raise ConfigError(_FORM.format(layers))
            if isinstance(place, Layer):  # as it was, for a replay
                layers_of_dataset.append(place)
                continue
            if isinstance(place, LayerOptions | Mapping):
                options = as_settings(place, LayerOptions, f"layers['{layer}']")
            elif isinstance(place, str | os.PathLike):
                options = LayerOptions(place)
            else:
                raise ConfigError(_FORM.format(layers))
            layers_of_dataset.append(
                open_layer(layer, options.path, base, options.missing, **opening)
            )
            made_by = layers_of_dataset[-1].manifest.recipe.get("teacher")
            if options.teacher not in (None, made_by):
                raise ConfigError(
                    f"layer '{layer}' ('{options.path}') was made by the teacher "
                    f"{made_by or 'of unknown weights'}, not by {options.teacher}: give its "
                    "layer, or make it again"
                )
        opened[name] = tuple(layers_of_dataset)
    return opened


def fingerprints_of(layers: Layers, *, is_mix: bool) -> dict[str, Any] | None:
    """Return the fingerprints for the loader's state: by layer, of a mix by dataset and layer;
    None without layers.
    """
    fingerprints = {
        name: {layer.name: layer.manifest.fingerprint for layer in dataset_layers}
        for name, dataset_layers in layers.items()
        if dataset_layers
    }
    if not fingerprints:
        return None
    if is_mix:
        return dict(fingerprints)
    return next(iter(fingerprints.values()))


def view_settings(seed: int, content: Mapping[str, object]) -> dict[str, Any]:
    """Return what decides the view of every sample in an epoch, as plain JSON types with a digest.

    ``content`` is that of the loader's transforms (`Transforms.content`).
    """
    return sample_settings(seed, **{name: content[name] for name in _OF_A_VIEW})


def check_views(
    layers: Layers,
    seed: int,
    content: Mapping[str, object],
    *,
    is_mix: bool,
    window: Window | None,
) -> None:
    """Raise ConfigError, with both sides, for a layer of other views than a loader with these
    settings shows.
    """
    settings = view_settings(seed, content)
    for layer in _view_layers(layers):
        view = layer.manifest.view
        if (
            is_mix
            or isinstance(window, TimeWindow)
            or (window is not None and len(window.frames) > 1)
        ):
            raise ConfigError(
                f"layer '{layer.name}' holds values of single augmented views (per_view), and "
                f"{'a mix' if is_mix else 'a window'} augments its frames otherwise; make "
                "the layer with view 'fixed'"
            )
        if view.settings != settings:
            raise ConfigError(
                f"layer '{layer.name}' was made from samples under other settings; "
                f"{settings_that_differ(view.settings, settings, 'layer')}; "
                "make the loader with the layer's settings, or the layer again with the loader's"
            )


def check_epoch(layers: Layers, epoch: int) -> None:
    """Raise ConfigError for a layer whose values belong to the views of another epoch."""
    for layer in _view_layers(layers):
        made_in = layer.manifest.view.epoch
        if made_in != epoch:
            raise ConfigError(
                f"layer '{layer.name}' holds values of the views of epoch {made_in}, the "
                f"loader is at epoch {epoch}: call set_epoch({made_in}), or give the layer "
                f"of epoch {epoch}"
            )


def _view_layers(layers: Layers) -> Sequence[Layer]:
    view_layers: list[Layer] = []
    for layers_of_dataset in layers.values():
        view_layers += [
            layer for layer in layers_of_dataset if layer.manifest.view.kind == "per_view"
        ]
    return view_layers
