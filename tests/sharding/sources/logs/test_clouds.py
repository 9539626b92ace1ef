"""Point clouds of any layout."""

from __future__ import annotations

import numpy as np
import pytest

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.logs.files.log_file import (
    Locator,
    Message,
    Topic,
)
from fuelrail.sharding.sources.logs.messages.clouds import points_of
from fuelrail.sharding.sources.logs.messages.reader import Reader
from support.log_world import Ros, store


def test_clouds_of_any_layout():
    types = store()
    ros = Ros()
    field = [
        ros.of("sensor_msgs/PointField", name, offset, kind, 1)
        for name, offset, kind in (
            ("x", 0, 8),
            ("y", 8, 8),
            ("z", 16, 8),
            ("ring", 24, 2),
            ("t", 28, 6),
        )
    ]
    dtype = np.dtype(
        {
            "names": ["x", "y", "z", "ring", "t"],
            "formats": [">f8", ">f8", ">f8", "u1", ">u4"],
            "offsets": [0, 8, 16, 24, 28],
            "itemsize": 40,
        }
    )
    rows = np.zeros((2, 3), dtype)
    rows["x"], rows["ring"], rows["t"] = (
        np.arange(6).reshape(2, 3),
        7,
        50_000_000,
    )
    rows["y"][1, 2] = np.nan
    data = np.concatenate([np.frombuffer(row.tobytes() + bytes(8), np.uint8) for row in rows])
    cloud = ros.of(
        "sensor_msgs/PointCloud2",
        ros.header(5, "l"),
        2,
        3,
        field,
        True,
        40,
        128,
        data,
        False,
    )
    raw = bytes(types.serialize_cdr(cloud, "sensor_msgs/msg/PointCloud2"))
    reader = Reader(Topic("/l", "sensor_msgs/PointCloud2", "cdr"))
    message = Message(
        topic="/l",
        log_ns=0,
        place=Locator("f", -1, 0),
        data=raw,
        length=len(raw),
    )
    assert reader.cloud_head(message) == (5, "l", 6)
    points = points_of(reader.cloud(message), "t")
    assert points.dtype == np.float32
    np.testing.assert_allclose(points[:, 0], range(5))
    assert np.isnan(points[:, 3]).all()
    np.testing.assert_allclose(points[:, 4:], [[7, 0.05]] * 5)
    with pytest.raises(SourceError, match="does not fit into its"):
        points_of(reader.cloud(message)._replace(width=4), "t")
