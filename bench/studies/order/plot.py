"""The picture of `fuelrail order describe`: where in the dataset each position of the epoch comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from fuelrail.pipeline.errors import ConfigError, needs

with needs("--plot", "fuelrail[view]"):
    from matplotlib.figure import Figure

from collections.abc import Sequence
from pathlib import Path

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fuelrail.bench.studies.order.quality import OrderFigures

_MAX_POINTS: Final = 20_000
_COLOURS: Final = ("#0072b2", "#d55e00", "#777777")


def plot_orders(path: Path, orders: Sequence[NDArray[np.int64]], figures: Sequence[OrderFigures], title: str) -> None:
    """Save one panel an order: position against stored sample, at most 20,000 evenly spaced points of each.

    The file's ending says its format (``.png``, ``.svg``, ``.pdf``). Raises ConfigError where it cannot be written.
    """
    figure = Figure(figsize=(4.2 * len(orders), 4.9), layout="constrained")
    panels = figure.subplots(1, len(orders), sharey=True, squeeze=False)[0]
    for panel, samples, facts, colour in zip(panels, orders, figures, _COLOURS, strict=True):
        n = len(samples)
        at = np.linspace(0, n - 1, min(n, _MAX_POINTS)).astype(np.int64)
        size = max(0.4, min(12.0, 20_000 / len(at)))
        panel.scatter(at, samples[at], s=size, color=colour, linewidths=0, alpha=0.7, rasterized=True)
        pairs = facts.same_clip_pairs
        panel.set_title(
            f"{facts.name}\nrank correlation {facts.quality.rank_correlation:+.3f}\n"
            f"same-clip pairs in a batch {'not known (too few samples)' if np.isnan(pairs) else f'{pairs:.2%}'}",
            fontsize=9,
        )
        panel.set_xlabel("position in the epoch")
        panel.margins(0.01)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("sample, as stored")
    figure.suptitle(title, fontsize=10)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"plot '{path}' cannot be written: {error}") from error
