"""Sweeps in files that lie about what they hold."""

from __future__ import annotations

import numpy as np
import pytest

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.shared.points import parse_points


def pcd(points, form="ascii", size="4 4 4", kind="F F F"):
    head = f"VERSION 0.7\nFIELDS x y z\nSIZE {size}\nTYPE {kind}\nCOUNT 1 1 1\nPOINTS {points}\nDATA {form}\n"
    return head.encode()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (pcd("999999999999") + b"1 2 3\n", "POINTS 999999999999"),
        (pcd("999999999999", "binary") + bytes(12), "POINTS 999999999999"),
        (pcd("2", "binary") + bytes(12), "no sound PCD"),
        (pcd("9" * 5000) + b"1 2 3\n", "PCD"),
        (pcd("-5", "binary") + bytes(12), "no sound PCD"),
        (pcd("1", "binary", "99999999 4 4") + bytes(12), "no sound PCD"),
        (pcd("1") + b"1 \xff 3\n", "no sound PCD"),
        (pcd("1") + b"1 2\n", "no sound PCD"),
    ],
)
def test_a_pcd_that_lies_is_named(data, says):
    with pytest.raises(SourceError, match=f"^sweep 7.*({says})"):
        parse_points(data, ("x", "y", "z"), "sweep 7")


def test_a_sound_pcd_is_read():
    np.testing.assert_array_equal(parse_points(pcd("1") + b"1 2 3\n", ("z", "x"), "x"), [[3, 1]])
