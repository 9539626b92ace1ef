"""Single samples by row or key: what was written, checked against the manifest's rig."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from fuelrail.loaders.storage import reader as reader_module
from fuelrail.loaders.storage.reader import FetchedSpan, SampleReader
from fuelrail.pipeline.errors import OrderError, SchemaError
from fuelrail.pipeline.format.dataset import Dataset, open_dataset
from fuelrail.pipeline.sample.schema import (
    GEOMETRY,
    Geometry,
    decode_arrays,
    encode_arrays,
)
from support.datasets import CAMERAS, LIDAR

if TYPE_CHECKING:
    from fuelrail.pipeline.format.index.row import IndexRow


@pytest.fixture(scope="module")
def built(build_once):
    return build_once({"train": (4,), "val": (2,)}, missing=frozenset({(1, "cam_back")}))


@pytest.fixture(scope="module")
def dataset(built) -> Dataset:
    return open_dataset(built[0])


def test_samples_are_what_was_written(built, dataset) -> None:
    raw = built[1]
    reader = SampleReader(dataset)
    for number in range(6):
        sample = reader.sample(number)
        assert {f"{channel}.jpg": bytes(data) for channel, data in sample.images.items()} == {
            name: data for name, data in raw[sample.key].items() if name.endswith(".jpg")
        }
        assert encode_arrays(sample.geometry) == raw[sample.key][GEOMETRY]
        assert sample.points[LIDAR].shape == (50 + number, 5)


def test_points_are_left_out_where_not_wanted(dataset) -> None:
    assert SampleReader(dataset, points=False).sample(0).points == {}


def test_samples_by_key(dataset) -> None:
    reader = SampleReader(dataset)
    assert reader.sample(reader.find("clip-0001-000001")).key == "clip-0001-000001"
    with pytest.raises(
        OrderError,
        match=f"has no sample 'clip-9'; the first of its 6 is '{reader.sample(0).key}'",
    ):
        reader.find("clip-9")


@pytest.mark.parametrize("index", [-1, 6])
def test_rows_outside_are_refused(dataset, index) -> None:
    with pytest.raises(OrderError, match=f"sample {index} is outside"):
        SampleReader(dataset).sample(index)


def test_many_threads_read(dataset) -> None:
    reader = SampleReader(dataset)
    with ThreadPoolExecutor(8) as pool:
        keys = list(pool.map(lambda number: reader.sample(number % 6).key, range(120)))
    assert keys == [dataset.index.row(number % 6).key for number in range(120)]


class TestRig:
    """A blank image must never pass for a valid one."""

    def read(self, monkeypatch, dataset: Dataset, number: int, **changes) -> None:
        """Parse a sample whose geometry says something else."""
        reader = SampleReader(dataset)
        fetched = reader.fetch(number)

        def other_geometry(row: IndexRow, *arguments, **options) -> dict[str, bytes]:
            members = plain(row, *arguments, **options)
            geometry = replace(decode_arrays(members[GEOMETRY], Geometry), **changes)
            return {**members, GEOMETRY: encode_arrays(geometry)}

        plain = reader_module.read_members
        monkeypatch.setattr("fuelrail.loaders.storage.reader.read_members", other_geometry)
        reader.parse(FetchedSpan(fetched.row, fetched.span))

    @pytest.mark.parametrize(
        ("number", "stated", "has_image"),
        [(0, [1, 0], [1, 1]), (1, [1, 1], [1, 0]), (0, [2, 1], [1, 1])],
    )
    def test_cam_valid_and_images_must_agree(
        self, monkeypatch, dataset, number, stated, has_image
    ) -> None:
        with pytest.raises(SchemaError) as caught:
            self.read(
                monkeypatch,
                dataset,
                number,
                cam_valid=np.array(stated, np.uint8),
            )
        assert caught.value.member == GEOMETRY
        assert caught.value.key == dataset.index.row(number).key
        assert f"cam_valid is {stated}, but of the cameras {', '.join(CAMERAS)} these have" in str(
            caught.value
        )
        assert str(caught.value).endswith(f"{has_image}")

    def test_another_number_of_cameras(self, monkeypatch, dataset) -> None:
        geometry = SampleReader(dataset).sample(0).geometry
        first_camera = {
            name: getattr(geometry, name)[:1]
            for name in (
                "cam_valid",
                "cam_timestamp_ns",
                "img_wh",
                "intrinsics",
                "dist",
                "cam2ego",
                "cam_ego2global",
            )
        }
        with pytest.raises(
            SchemaError,
            match=r"cam_valid is \[1\], but of the cameras cam_front, cam_back",
        ):
            self.read(monkeypatch, dataset, 0, **first_camera)

    def test_another_number_of_lidars(self, monkeypatch, dataset) -> None:
        geometry = SampleReader(dataset).sample(0).geometry
        names = ("lidar2ego", "lidar_ego2global", "lidar_timestamp_ns")
        two = {name: np.repeat(getattr(geometry, name), 2, axis=0) for name in names}
        with pytest.raises(SchemaError, match="of 2 lidars, the manifest has 1"):
            self.read(monkeypatch, dataset, 0, **two)
