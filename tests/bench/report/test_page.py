"""Building blocks of the reports' pages."""

from __future__ import annotations

import pytest

from fuelrail.bench.report.page import as_text, when


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"seed": 0, "verify": False, "storage": "auto"}, "seed=0, verify=False, storage=auto"),
        ({"window": None, "cpus": [0], "leave_out": []}, "cpus=[0]"),
        ({"image": {"flip_prob": 0.0, "resize": None, "lens": {}}}, ""),
        (
            {"image": {"flip_prob": 0.5, "lens": {"tilt": 2.0}}},
            "image.flip_prob=0.5, image.lens.tilt=2.0",
        ),
        ({"image": {"flip_prob": 0.0, "crop_bottom": (0.0, 0.2)}}, "image.crop_bottom=[0.0, 0.2]"),
    ],
)
def test_options_are_reported_flat_and_without_what_is_off(options, said):
    assert as_text(options) == said


def test_a_reports_time_is_reported_to_the_minute():
    assert when("2026-11-21T15:50:55+00:00") == "2026-11-21 15:50 UTC"
