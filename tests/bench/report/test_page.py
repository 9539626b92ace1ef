"""Building blocks of the reports' pages."""

from __future__ import annotations

import msgspec
import pytest

from fuelrail.bench.report.page import (
    as_text,
    format_number,
    plain,
    render_markdown,
    render_page,
    when,
)
from support.bench_runs import SETTINGS, log, report_of, steps


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"seed": 0, "verify": False, "storage": "auto"},
            "seed=0, verify=False, storage=auto",
        ),
        ({"window": None, "cpus": [0], "leave_out": []}, "cpus=[0]"),
        ({"image": {"flip_prob": 0.0, "resize": None, "lens": {}}}, ""),
        (
            {"image": {"flip_prob": 0.5, "lens": {"tilt": 2.0}}},
            "image.flip_prob=0.5, image.lens.tilt=2.0",
        ),
        (
            {"image": {"flip_prob": 0.0, "crop_bottom": (0.0, 0.2)}},
            "image.crop_bottom=[0.0, 0.2]",
        ),
    ],
)
def test_options_are_reported_flat_and_without_what_is_off(options, said):
    assert as_text(options) == said


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0, "0"),
        (2e-6, "2e-06"),
        (0.000131, "0.000131"),
        (0.0131, "0.0131"),
        (1.2345, "1.23"),
        (12.345, "12.3"),
        (123.45, "123"),
        (12345.6, "12,346"),
        (-0.0131, "-0.0131"),
    ],
)
def test_numbers_keep_three_digits_however_small(value, said):
    assert format_number(value) == said


def test_commands_show_as_code_and_other_backticks_as_they_are():
    said = "Try `fuelrail reshard A B --x <1>`, not `it` of a|b`."
    report = msgspec.structs.replace(
        report_of([log(steps(20))], settings=SETTINGS), warnings=[said]
    )
    page = render_page(report)
    assert "<code>fuelrail reshard A B --x &lt;1&gt;</code>, not `it` of a|b`." in page
    assert "`fuelrail reshard A B --x <1>`, not \\`it\\` of a\\|b\\`." in render_markdown(report)
    assert plain(said) == said


def test_a_reports_time_is_reported_to_the_minute():
    assert when("2026-11-21T15:50:55+00:00") == "2026-11-21 15:50 UTC"
