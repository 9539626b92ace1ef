"""Plots as inline SVG: one style, and what the reports' plots share."""

from __future__ import annotations

import io
import re
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from fuelrail.pipeline.errors import needs

with needs("report.html (leave it out by --no-html)", "fuelrail[view]"):
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

from collections.abc import Sequence

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from matplotlib.axes import Axes

__all__ = [
    "BLUE",
    "COLOURS",
    "GREY",
    "MaxNLocator",
    "PercentFormatter",
    "legend_above",
    "new_figure",
    "stage_bars",
    "style",
    "to_svg",
]

# Okabe and Ito's colours, which colour-blind readers can tell apart.
BLUE = "#0072b2"
_ORANGE = "#e69f00"
GREY = "#bbbbbb"
COLOURS = (
    BLUE,
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#f0e442",
    "#999999",
)
_LEGEND_CHARACTERS = 96
"""The characters of the legend's font that fit beside each other above a page's figure."""
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: sharp, selectable, and in the page's own font
    "svg.hashsalt": "fuelrail",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#777777",
    "axes.labelcolor": "#333333",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.7,
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "legend.frameon": False,
    "legend.fontsize": 8.5,
}


def style() -> AbstractContextManager[None]:
    """Draw plots inside it in the reports' style."""
    return mpl.rc_context(_STYLE)


def new_figure(height_in: float) -> tuple[Figure, Axes]:
    """Make a figure with one pair of axes, as wide as a page and as high as this, in inches."""
    figure = Figure(figsize=(7.4, height_in), layout="constrained")
    return figure, figure.subplots()


def legend_above(axes: Axes) -> None:
    """Put the legend above the axes, where it covers nothing, in as many lines as its texts
    need.
    """
    widths = [
        len(label) + 5 for label in axes.get_legend_handles_labels()[1]
    ]  # 5: the line, and the space after it
    columns = (
        len(widths)
        if sum(widths) <= _LEGEND_CHARACTERS
        else max(1, _LEGEND_CHARACTERS // max(widths))
    )
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=columns,
        borderaxespad=0.2,
        handlelength=1.2,
        columnspacing=1.2,
    )


def stage_bars(rows: Sequence[tuple[str, float, float, float]]) -> str:
    """Draw loader stages, each with the shares of its threads' time: (label, busy, starved,
    blocked).
    """
    figure, axes = new_figure(0.9 + 0.32 * len(rows))
    places = np.arange(len(rows))
    base = np.zeros(len(rows))
    for column, (name, colour) in enumerate(
        (("busy", BLUE), ("starved", _ORANGE), ("blocked", GREY)), 1
    ):
        values = np.array([row[column] for row in rows], dtype=np.float64)
        axes.barh(
            places,
            values,
            0.66,
            left=base,
            color=colour,
            label=name,
            linewidth=0,
        )
        for place, value, offset in zip(places, values, base, strict=True):
            if value > 0.06:  # narrower bars have no room for their figure
                ink = "white" if name == "busy" else "#333333"
                middle = float(offset + value / 2)
                axes.text(
                    middle,
                    float(place),
                    f"{value:.0%}",
                    ha="center",
                    va="center",
                    color=ink,
                    fontsize=8,
                )
        base = base + values
    axes.set_yticks(places, [row[0] for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("share of the stage's thread time")
    legend_above(axes)
    return to_svg(figure, "Loader stages: busy, starved, blocked")


def to_svg(figure: Figure, title: str) -> str:
    """Render to an ``<svg>`` for inlining: no prologue, metadata or namespace addresses; scales
    with the page.
    """
    buffer = io.StringIO()
    figure.savefig(
        buffer,
        format="svg",
        metadata={"Date": None, "Creator": None},
        transparent=True,
    )
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text)
    # Several plots share one page: names defined in one must not be found from another.
    prefix = re.sub(r"\W+", "-", title.lower()).strip("-")
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\1{prefix}-", text)
    return re.sub(
        r'<svg\s[^>]*?viewBox="([^"]+)"[^>]*>',
        rf'<svg viewBox="\1" role="img" aria-label="{escape(title)}">',
        text,
        count=1,
    )
