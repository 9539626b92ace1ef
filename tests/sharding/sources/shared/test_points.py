"""Sweeps in files that lie about what they hold."""

from __future__ import annotations

import io

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
        (
            pcd("999999999999") + b"1 2 3\n",
            "POINTS '999999999999'; expected a number of points",
        ),
        (pcd("999999999999", "binary") + bytes(12), "POINTS '999999999999'"),
        (
            pcd("2", "binary") + bytes(12),
            "12 bytes after its header; 2 points have 24: the file is cut off",
        ),
        (pcd("9" * 5000) + b"1 2 3\n", "without a line DATA"),
        (pcd("-5", "binary") + bytes(12), "POINTS '-5'"),
        (
            pcd("1", "binary", "99999999 4 4") + bytes(12),
            "TYPE and SIZE F99999999; known are F2",
        ),
        (pcd("1") + b"1 \xff 3\n", "not a valid PCD"),
        (pcd("1") + b"1 2\n", "not a valid PCD"),
    ],
)
def test_a_pcd_that_lies_is_named(data, says):
    with pytest.raises(SourceError, match=f"^sweep 7.*({says})"):
        parse_points(data, ("x", "y", "z"), "sweep 7")


def test_a_sound_pcd_is_read():
    np.testing.assert_array_equal(parse_points(pcd("1") + b"1 2 3\n", ("z", "x"), "x"), [[3, 1]])


def test_points_in_all_forms():
    points = np.random.default_rng(3).normal(size=(7, 4)).astype(np.float32)
    head = (
        "# .PCD v0.7\nVERSION 0.7\nFIELDS x y z t intensity\nSIZE 4 4 4 8 4\nTYPE F F F F F\nCOUNT 1 1 1 1 1\n"
        "WIDTH 7\nHEIGHT 1\nVIEWPOINT 0 0 0 1 0 0 0\nPOINTS 7\nDATA "
    )
    table = np.zeros(
        7,
        [
            ("x", "f4"),
            ("y", "f4"),
            ("z", "f4"),
            ("t", "f8"),
            ("intensity", "f4"),
        ],
    )
    for column, name in enumerate(("x", "y", "z", "intensity")):
        table[name] = points[:, column]
    text = "\n".join(" ".join(f"{value:.9g}" for value in row) for row in table.tolist())
    forms = [
        points.tobytes(),
        (head + "binary\n").encode() + table.tobytes(),
        (head + "ascii\n" + text).encode(),
    ]
    for data in forms:
        np.testing.assert_array_equal(
            parse_points(data, ("x", "y", "z", "intensity"), "lidar"), points
        )
    objects = io.BytesIO()
    np.save(objects, np.array([{"x": 1}], object), allow_pickle=True)
    for data, match in (
        (forms[0][:-3], "rows of 4 float32"),
        (forms[1][:-3], "the file is cut off"),
        ((head + "binary_compressed\n").encode(), "binary_compressed"),
        (head.encode(), "without a line DATA"),
        (b"\x93NUMPY garbage", "not a valid .npy"),
        (objects.getvalue(), "not a valid .npy"),
        (b"version https://git-lfs", "git-LFS"),
    ):
        with pytest.raises(SourceError, match=match):
            parse_points(data, ("x", "y", "z", "intensity"), "lidar")
    with pytest.raises(SourceError, match="has no ring"):
        parse_points(forms[1], ("x", "y", "z", "ring"), "lidar")
