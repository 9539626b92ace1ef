"""Building blocks of the reports' pages."""

from __future__ import annotations

import pytest

from fuelrail.bench.report.page import as_text, when
from fuelrail.pipeline.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"seed": 0, "verify": False, "storage": "auto"}, "seed=0, verify=False, storage=auto"),
        ({"window": None, "cpus": [0], "leave_out": []}, "cpus=[0]"),
        ({"inject": {"read": 0.0, "rank": None, "stage_lasts": {}}}, ""),
        ({"inject": {"read": 0.5, "stage_lasts": {"decode": 2.0}}}, "inject.read=0.5, inject.stage_lasts.decode=2.0"),
        ({"image": {"flip_prob": 0.0, "crop_bottom": (0.0, 0.2)}}, "image.crop_bottom=[0.0, 0.2]"),
    ],
)
def test_options_are_told_flat_and_without_what_is_off(options, told):
    assert as_text(options) == told


def test_a_reports_time_is_told_to_the_minute():
    assert when("2026-11-21T15:50:55+00:00") == "2026-11-21 15:50 UTC"


@pytest.mark.parametrize(("labels", "lines"), [(["short"] * 9, 1), (["weak, 1% of the ranks 20% slower"] * 4, 2)])
def test_a_legend_takes_as_many_lines_as_fit_the_page(labels, lines):
    plots = pytest.importorskip("fuelrail.bench.report.plots", exc_type=ConfigError, reason="matplotlib is missing")
    with plots.style():
        drawn, axes = plots.new_figure(2)
        for label in labels:
            axes.plot([0, 1], label=label)
        plots.legend_above(axes)
        drawn.canvas.draw()
        box = axes.get_legend().get_window_extent()
        assert box.x1 <= drawn.bbox.x1
        assert round(box.height / axes.get_legend().get_texts()[0].get_window_extent().height / 1.4) == lines
