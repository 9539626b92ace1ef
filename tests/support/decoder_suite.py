"""What every decode backend must do; each backend's test module inherits `DecoderSuite`.

Geometry is measured, not assumed: spots and corners are drawn at known places, encoded by Pillow, decoded under a map
by the backend, and found again with sub-pixel accuracy.
"""

from __future__ import annotations

import functools
import io
import math
import struct
import threading
import zlib
from typing import TYPE_CHECKING, ClassVar

import cv2
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from fuelrail.loaders.decode import make_decoder
from fuelrail.pipeline.errors import ConfigError, ImageError
from fuelrail.pipeline.sample.image_header import probe
from fuelrail.pipeline.transforms.image_map import ImageMap
from support.image_maps import (
    ALL_MAPS,
    EVERY_PRESET,
    NUSCENES_WH,
    PRESETS,
    photograph,
    preset_map,
)
from support.pictures import (
    blob_place,
    blobs,
    checkerboard,
    encode,
    natural,
    open_with_pillow,
    psnr_db,
    reference,
    seen,
    shift_px,
)
from support.shared_data import shared_data

if TYPE_CHECKING:
    from pathlib import Path

    from fuelrail.loaders.decode.protocol import ImageDecoder


@functools.cache
def expected_photograph(name: str, filter_: str) -> np.ndarray:
    return reference(photograph(), ALL_MAPS[name], filter_)


@functools.cache
def spots(name: str, subsampling: str) -> tuple[list[tuple[float, float]], float, bytes]:
    """Where spots lie on a stored image that a map sees, how wide they are, and the image's file."""
    image_map = ALL_MAPS[name]
    scale = math.sqrt(abs(np.linalg.det(image_map.matrix[:, :2])))
    sigma = max(5.0, 1.8 / scale)
    reach = 4.5 * sigma
    rng = np.random.default_rng(5)
    left, top, right, bottom = image_map.visible
    columns, rows = (3, 2) if name == "larger" else (6, 4)
    u = np.linspace(left + reach + 8, right - reach - 9, columns) + rng.uniform(-3, 3, columns)
    v = np.linspace(top + reach + 8, bottom - reach - 9, rows) + rng.uniform(-3, 3, rows)
    assert min(u.min() - left, right - u.max(), v.min() - top, bottom - v.max()) >= reach, (
        "spots lie in the picture"
    )
    places = [(float(a), float(b)) for a in u for b in v]
    return (
        places,
        sigma,
        encode(blobs(*NUSCENES_WH, places, sigma), subsampling=subsampling),
    )


class DecoderSuite:
    """Subclasses name their backend, and what it may differ in."""

    backend: ClassVar[str]
    place_tolerance_px: ClassVar[float] = 0.05
    """Largest error of a spot's centre of gravity in the output."""
    turn: ClassVar[int] = 0
    """0 or 1: which half of the pairs of map and filter, or subsampling, it tests; all classes together test all."""
    refuses: ClassVar[frozenset[str]] = frozenset()
    """Coding variants that this backend answers with ImageError."""

    @pytest.fixture
    def decoder(self) -> ImageDecoder:
        return make_decoder(self.backend)

    def decode(
        self,
        decoder: ImageDecoder,
        encoded: bytes,
        image_map: ImageMap,
        filter_: str = "bilinear",
    ):
        width, height = image_map.out_wh
        out = np.full((3, height, width), 123, np.uint8)
        decoder.decode_into(encoded, image_map, out, filter_)
        return out

    # Geometry

    def one_of(self, name: str, *choices: str) -> str:
        """Pick for a map, so that the classes' pairs of class, map and choice all come."""
        return choices[([*ALL_MAPS].index(name) + self.turn) % 2]

    @pytest.mark.parametrize("name", ALL_MAPS)
    def test_spots_land_where_the_map_says(self, decoder: ImageDecoder, name: str) -> None:
        image_map = ALL_MAPS[name]
        (places, sigma, encoded) = spots(name, self.one_of(name, "4:4:4", "4:2:0"))
        out = self.decode(decoder, encoded, image_map)
        width, height = image_map.out_wh
        radius = math.ceil(3.5 * sigma * image_map.max_scale)
        errors = []
        for place in places:
            x, y = (image_map.centre_matrix() @ (*place, 1.0))[:2]
            if radius + 1 < x < width - radius - 2 and radius + 1 < y < height - radius - 2:
                spot = blob_place(out, (x, y), radius)
                errors.append((spot[0] - x, spot[1] - y))
        assert len(errors) >= 3
        assert np.abs(errors).max() < self.place_tolerance_px, (
            f"largest errors {np.abs(errors).max(axis=0)} px"
        )
        assert np.abs(np.mean(errors, axis=0)).max() < 0.03, (
            f"mean errors {np.mean(errors, axis=0)} px"
        )

    @given(
        wh=st.tuples(st.integers(120, 300), st.integers(120, 300)),
        size=st.tuples(st.integers(40, 400), st.integers(40, 400)),
        crop=st.tuples(st.integers(-20, 20), st.integers(-20, 20)),
        flip=st.booleans(),
        degrees=st.sampled_from([0.0, 0.0, -5.4, 3.0, 40.0, 180.0]),
        place=st.tuples(st.floats(0.42, 0.58), st.floats(0.42, 0.58)),
        kind=st.sampled_from(["jpeg", "png"]),
    )
    @settings(
        max_examples=40,
        suppress_health_check=[
            HealthCheck.function_scoped_fixture,
            HealthCheck.differing_executors,
        ],
    )
    def test_any_map_takes_a_spot_where_it_says(
        self, decoder, wh, size, crop, flip, degrees, place, kind
    ) -> None:
        image_map = ImageMap.identity(wh).resize(*size).crop(*crop, *size)
        image_map = (image_map.flip() if flip else image_map).rotate(degrees)
        u = place[0] * wh[0]
        v = place[1] * wh[1]
        shortest = np.linalg.svd(image_map.matrix[:, :2])[1][1]
        sigma = max(3.0, 1.8 / shortest)
        out = self.decode(decoder, encode(blobs(*wh, [(u, v)], sigma), kind), image_map)
        x, y = (image_map.centre_matrix() @ (u, v, 1.0))[:2]
        radius = math.ceil(3.5 * sigma * image_map.max_scale)
        source_reach = 4.5 * sigma
        is_whole = (
            source_reach
            < u - image_map.visible[0]
            < image_map.visible[2] - image_map.visible[0] - source_reach
            and source_reach
            < v - image_map.visible[1]
            < image_map.visible[3] - image_map.visible[1] - source_reach
            and radius < x < size[0] - 1 - radius
            and radius < y < size[1] - 1 - radius
        )
        if is_whole:
            spot = blob_place(out, (x, y), radius)
            assert abs(spot[0] - x) < self.place_tolerance_px * max(1.0, image_map.max_scale)
            assert abs(spot[1] - y) < self.place_tolerance_px * max(1.0, image_map.max_scale)

    @pytest.mark.parametrize("name", PRESETS)
    def test_a_point_in_the_world_projects_onto_its_pixels(
        self, decoder: ImageDecoder, name: str
    ) -> None:
        # The whole chain: ego point -> stored pixel, drawn there; decoded under a drawn map; found where ego2img' says.
        ego2img, points, encoded = world_points()
        found_any = 0
        for sample in range(4):
            image_map = preset_map(name, sample)
            out = self.decode(decoder, encoded, image_map)
            projected = image_map.ida_mat() @ ego2img @ points
            radius = math.ceil(21 * image_map.max_scale)
            for x, y in (projected[:2] / projected[2]).T:
                if (
                    radius < x < image_map.out_wh[0] - radius
                    and radius < y < image_map.out_wh[1] - radius
                ):
                    spot = blob_place(out, (x, y), radius)
                    assert math.hypot(spot[0] - x, spot[1] - y) < 1.5 * self.place_tolerance_px
                    found_any += 1
        assert found_any >= 4

    @pytest.mark.parametrize("name", EVERY_PRESET)
    def test_checkerboard_corners_land_within_a_tenth_of_a_pixel(
        self, decoder: ImageDecoder, name: str
    ) -> None:
        image_map = preset_map(name, sample=5)
        square = 100
        encoded = _encoded_checkerboard(100)
        gray = self.decode(decoder, encoded, image_map).mean(axis=0).astype(np.float32)
        corners = []
        visible = seen(image_map, 40)
        for u in range(square, NUSCENES_WH[0], square):
            for v in range(square, NUSCENES_WH[1], square):
                x, y = (image_map.centre_matrix() @ (u - 0.5, v - 0.5, 1.0))[:2]
                inside = 12 < x < image_map.out_wh[0] - 13 and 12 < y < image_map.out_wh[1] - 13
                if inside and visible[round(y), round(x)]:
                    corners.append((x, y))
        assert len(corners) >= 20
        expected = np.array(corners, np.float32)[:, None]
        criteria = (cv2.TERM_CRITERIA_EPS | cv2.TERM_CRITERIA_COUNT, 100, 1e-4)
        refined = cv2.cornerSubPix(
            gray.astype(np.uint8), expected.copy(), (6, 6), (-1, -1), criteria
        )
        errors = np.abs(refined - expected)[:, 0]
        # 0.002: cornerSubPix of OpenCV 4 finds corners that much further away than that of OpenCV 5.
        assert errors.max() < 0.1 + 0.002, f"{errors.max(axis=0)} px"

    @pytest.mark.parametrize("name", ALL_MAPS)
    def test_pixels_agree_with_an_independent_reference(
        self, decoder: ImageDecoder, name: str
    ) -> None:
        image_map = ALL_MAPS[name]
        filter_ = self.one_of(name, "bilinear", "bicubic")
        out = self.decode(decoder, photograph(), image_map, filter_)
        expected = expected_photograph(name, filter_)
        where = seen(image_map, 2.0 / min(1.0, image_map.max_scale))
        # Bicubic differs more: OpenCV's kernel is another than Pillow's, and is not stretched for antialiasing.
        assert psnr_db(out, expected, where) > {"bilinear": 38.0, "bicubic": 36.0}[filter_]
        assert max(map(abs, shift_px(out, expected, where))) < 0.05

    @pytest.mark.parametrize("name", PRESETS)
    def test_real_pictures_agree_with_an_independent_reference(
        self, decoder: ImageDecoder, name: str
    ) -> None:
        files = sorted(shared_data("nuscenes-mini").glob("samples/CAM_*/*.jpg"))[::3]
        assert len(files) == 6
        for number, file in enumerate(files):
            image_map = preset_map(name, number)
            out = self.decode(decoder, file.read_bytes(), image_map)
            expected = _expected_file(file, name, number)
            where = seen(image_map, 2.0 / image_map.max_scale)
            assert psnr_db(out, expected, where) > 38.0, file.name
            assert max(map(abs, shift_px(out, expected, where))) < 0.05, file.name

    @pytest.mark.parametrize("filter_", ["bilinear", "bicubic"])
    def test_a_flipped_map_gives_the_mirrored_picture(
        self, decoder: ImageDecoder, filter_: str
    ) -> None:
        encoded = encode(natural(640, 360), subsampling="4:2:0")
        for image_map in (
            ImageMap.identity((640, 360)),
            ImageMap.identity((640, 360)).resize(281, 158).crop(7, 21, 250, 131),
            ImageMap.identity((640, 360)).resize(281, 158).crop(-7, 21, 300, 131),
        ):
            plain = self.decode(decoder, encoded, image_map, filter_).astype(int)
            mirrored = self.decode(decoder, encoded, image_map.flip(), filter_).astype(int)
            assert np.abs(mirrored[:, :, ::-1] - plain).mean() < 0.6
            assert psnr_db(mirrored[:, :, ::-1], plain) > 45.0

    @pytest.mark.parametrize("name", ["beyond", "padded", "turned", "quarter-turn"])
    def test_what_sees_nothing_is_black_and_nothing_else_is(
        self, decoder: ImageDecoder, name: str
    ) -> None:
        image_map = ALL_MAPS[name]
        out = self.decode(decoder, encode(np.full((900, 1600, 3), 180, np.uint8)), image_map)
        outside = ~seen(image_map, -1e-4)
        inside = seen(image_map, 1e-4)
        assert outside.any()
        assert (out[:, outside] == 0).all()
        assert (np.abs(out[:, inside].astype(int) - 180) <= 2).all()

    def test_a_map_that_sees_nothing_at_all_is_black(self, decoder: ImageDecoder) -> None:
        encoded = encode(np.full((60, 80, 3), 180, np.uint8))
        start = ImageMap.identity((80, 60))
        for image_map in (
            start.crop(200, 0, 40, 30),
            start.crop(0, -90, 40, 30).rotate(4.0),
        ):
            assert not self.decode(decoder, encoded, image_map).any()

    # Kinds of files

    @pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0"])
    def test_odd_sizes(self, decoder: ImageDecoder, subsampling: str) -> None:
        for wh in (
            (1, 1),
            (2, 3),
            (7, 9),
            (8, 8),
            (15, 17),
            (16, 16),
            (31, 33),
            (1, 200),
            (333, 5),
        ):
            self.check_size(decoder, wh, encode(natural(*wh), subsampling=subsampling))

    def check_size(self, decoder: ImageDecoder, wh: tuple[int, int], encoded: bytes) -> None:
        full_image = self.decode(decoder, encoded, ImageMap.identity(wh))
        assert (
            np.abs(full_image.astype(int) - open_with_pillow(encoded).transpose(2, 0, 1)).max() <= 3
        ), wh
        for size in (
            (5, 4),
            (max(1, wh[0] // 2), max(1, wh[1] // 2)),
            (2 * wh[0], wh[1]),
        ):
            resized = self.decode(decoder, encoded, ImageMap.identity(wh).resize(*size))
            assert resized.shape == (3, size[1], size[0])
            assert abs(resized.mean() - full_image.mean()) < 25

    @pytest.mark.parametrize(
        "kind",
        [
            "progressive",
            "restart",
            "4:2:2",
            "4:4:4",
            "gray",
            "cmyk",
            "png",
            "png-gray",
            "png-rgba",
            "optimized",
        ],
    )
    def test_kinds_of_files(self, decoder: ImageDecoder, kind: str) -> None:
        picture = natural(322, 243)
        encoded = {
            "progressive": lambda: encode(picture, progressive=True),
            "restart": lambda: encode(picture, restart_marker_rows=1, subsampling="4:2:0"),
            "4:2:2": lambda: encode(picture, subsampling="4:2:2"),
            "4:4:4": lambda: encode(picture),
            "optimized": lambda: encode(picture, optimize=True, quality=60),
            "gray": lambda: encode(picture[..., 0]),
            "cmyk": lambda: _cmyk(picture),
            "png": lambda: encode(picture, "png"),
            "png-gray": lambda: encode(picture[..., 0], "png"),
            "png-rgba": lambda: encode(
                np.dstack((picture, np.full(picture.shape[:2], 255, np.uint8))),
                "png",
            ),
        }[kind]()
        if kind in self.refuses:
            with pytest.raises(ImageError):
                self.decode(decoder, encoded, ImageMap.identity((322, 243)))
            return
        full_image = self.decode(decoder, encoded, ImageMap.identity((322, 243)))
        expected = open_with_pillow(encoded).transpose(2, 0, 1)
        assert np.abs(full_image.astype(int) - expected).max() <= 3
        image_map = ImageMap.identity((322, 243)).resize(141, 107).crop(10, 20, 120, 80)
        out = self.decode(decoder, encoded, image_map)
        where = seen(image_map, 4.0)
        assert psnr_db(out, reference(encoded, image_map), where) > 38.0

    def test_pixels_come_as_stored_whatever_exif_says(self, decoder: ImageDecoder) -> None:
        picture = natural(96, 64)
        image_map = ImageMap.identity((96, 64)).resize(60, 40)
        plain = self.decode(decoder, encode(picture), image_map)
        for orientation in range(1, 9):
            tag = struct.pack(">HHIHH", 0x0112, 3, 1, orientation, 0)
            encoded = encode(
                picture,
                exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x01" + tag + b"\0\0\0\0",
            )
            assert probe(encoded).orientation == orientation
            assert np.array_equal(self.decode(decoder, encoded, image_map), plain)

    # What is refused

    def assert_refused(
        self,
        decoder: ImageDecoder,
        encoded: bytes,
        wh: tuple[int, int],
        message: str | None = None,
    ) -> None:
        out = np.full((3, 30, 40), 123, np.uint8)
        with pytest.raises(ImageError, match=message):
            decoder.decode_into(encoded, ImageMap.identity(wh).resize(40, 30), out)
        assert (out == 123).all(), "an error must leave the output alone"

    def test_cut_files_are_refused_wherever_they_are_cut(self, decoder: ImageDecoder) -> None:
        picture = natural(96, 64)
        for encoded in (
            encode(picture),
            encode(picture, progressive=True),
            encode(picture, "png"),
        ):
            for end in (
                0,
                1,
                2,
                10,
                100,
                len(encoded) // 2,
                len(encoded) * 3 // 4,
                len(encoded) - 12,
            ):
                self.assert_refused(decoder, encoded[:end], (96, 64))

    def test_other_sizes_than_the_geometry_says_are_refused(self, decoder: ImageDecoder) -> None:
        self.assert_refused(
            decoder,
            encode(natural(96, 64)),
            (64, 96),
            "96x64 pixels, but .* says 64x96",
        )

    def test_decompression_bombs_are_refused_before_anything_is_allocated(
        self, decoder: ImageDecoder
    ) -> None:
        ihdr = struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0)
        chunk = b"IHDR" + ihdr
        png = (
            b"\x89PNG\r\n\x1a\n"
            + struct.pack(">I", 13)
            + chunk
            + struct.pack(">I", zlib.crc32(chunk))
        )
        self.assert_refused(decoder, png, (60000, 60000), "over the limit")
        jpeg = bytearray(encode(natural(16, 16)))
        size_offset = jpeg.index(b"\xff\xc0") + 5
        jpeg[size_offset : size_offset + 4] = struct.pack(">HH", 60000, 60000)
        self.assert_refused(decoder, bytes(jpeg), (60000, 60000), "over the limit")

    @pytest.mark.parametrize(
        ("encoded", "message"),
        [
            (b"", "empty"),
            (
                b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n",
                "git-LFS pointer",
            ),
            (b"<!DOCTYPE html><html></html>", "HTML"),
            (b"\0" * 4096, "zero bytes"),
            (b"GIF89a" + b"\0" * 100, "GIF"),
            (b"RIFF\0\0\0\0WEBPVP8 ", "WebP"),
            (b"some text", "neither JPEG nor PNG"),
        ],
    )
    def test_strangers_are_named(self, decoder: ImageDecoder, encoded: bytes, message: str) -> None:
        self.assert_refused(decoder, encoded, (40, 30), message)

    def test_a_wrong_output_array_is_the_callers_mistake(self, decoder: ImageDecoder) -> None:
        encoded = encode(natural(40, 30))
        image_map = ImageMap.identity((40, 30))
        read_only = np.zeros((3, 30, 40), np.uint8)
        read_only.flags.writeable = False
        for wrong in (
            np.zeros((30, 40, 3), np.uint8),
            np.zeros((3, 30, 40), np.float32),
            np.zeros((3, 40, 30), np.uint8),
            np.zeros((3, 30, 80), np.uint8)[:, :, ::2],
            read_only,
        ):
            with pytest.raises(ConfigError, match="out must be a writable uint8 array of shape"):
                decoder.decode_into(encoded, image_map, wrong)
        with pytest.raises(
            ConfigError,
            match="interpolation='nearest' must be one of bilinear, bicubic",
        ):
            decoder.decode_into(encoded, image_map, np.zeros((3, 30, 40), np.uint8), "nearest")

    def test_buffers_of_all_kinds_and_rows_apart(self, decoder: ImageDecoder) -> None:
        encoded = encode(natural(64, 48))
        image_map = ImageMap.identity((64, 48)).resize(40, 30)
        expected = self.decode(decoder, encoded, image_map)
        batch = np.full((2, 3, 3, 30, 40), 9, np.uint8)
        wide = np.full((3, 30, 55), 9, np.uint8)
        view = memoryview(b"xx" + encoded + b"yy")[2:-2]
        decoder.decode_into(view, image_map, batch[1, 2])
        decoder.decode_into(bytearray(encoded), image_map, wide[:, :, 10:50])
        assert np.array_equal(batch[1, 2], expected)
        assert (batch[0] == 9).all()
        assert (batch[1, :2] == 9).all()
        assert np.array_equal(wide[:, :, 10:50], expected)
        assert (wide[:, :, :10] == 9).all()
        assert (wide[:, :, 50:] == 9).all()

    # Threads

    def test_many_threads_give_the_same_bytes(self, decoder: ImageDecoder) -> None:
        sizes = [(320, 180), (64, 64), (250, 333), (401, 97)]
        jobs = []
        for number in range(12):
            wh = sizes[number % len(sizes)]
            image_map = ImageMap.identity(wh).resize(90 + number, 70).crop(number, 5, 64, 48)
            if number % 3 == 0:
                image_map = image_map.flip().rotate(2.0 * number)
            encoded = encode(natural(*wh, seed=number), "png" if number % 5 == 0 else "jpeg")
            jobs.append((encoded, image_map, self.decode(decoder, encoded, image_map)))
        broken = jobs[1][0][:-200]
        wrong: list[str] = []

        def work(first: int) -> None:
            for turn in range(15):
                encoded, image_map, expected = jobs[(first + turn) % len(jobs)]
                try:
                    got = self.decode(decoder, encoded, image_map)
                except ImageError as error:
                    wrong.append(str(error))
                    continue
                if not np.array_equal(got, expected):
                    wrong.append(f"job {(first + turn) % len(jobs)} differs")
                if turn % 5 == 0:  # errors of one thread must not touch the others
                    with pytest.raises(ImageError):
                        self.decode(decoder, broken, jobs[1][1])

        threads = [threading.Thread(target=work, args=(first,)) for first in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


@functools.cache
def world_points() -> tuple[np.ndarray, np.ndarray, bytes]:
    """A projection (4, 4), points in the ego frame as columns (4, n), and an image with a spot where each is seen."""
    ego2img = np.eye(4)
    ego2img[:3, :3] = [[1266.4, 0, 816.3], [0, 1266.4, 491.5], [0, 0, 1]]
    ego2img @= np.array(
        [[0, -1, 0, 0], [0, 0, -1, 1.5], [1, 0, 0, -1.7], [0, 0, 0, 1.0]]
    )  # ego x is forward
    points = np.array(
        [
            [18.0, 1.5, 0.4, 1],
            [35.0, -6.0, 1.0, 1],
            [26.0, 9.0, 0.5, 1],
            [12.0, 0.2, 0.2, 1],
        ]
    ).T
    places = [(float(p[0] / p[2]), float(p[1] / p[2])) for p in (ego2img @ points).T]
    return (
        ego2img,
        points,
        encode(blobs(*NUSCENES_WH, places, 6.0), subsampling="4:2:0"),
    )


@functools.cache
def _encoded_checkerboard(square_px: int) -> bytes:
    return encode(checkerboard(*NUSCENES_WH, square_px), subsampling="4:2:0")


@functools.cache
def _expected_file(file: Path, name: str, number: int) -> np.ndarray:
    return reference(file.read_bytes(), preset_map(name, number))


def _cmyk(picture: np.ndarray) -> bytes:
    """A CMYK JPEG with ink values stored inverted, as Adobe writes them and Pillow reads them."""
    inks = np.dstack((255 - picture, np.full(picture.shape[:2], 40, np.uint8)))
    with io.BytesIO() as file:
        Image.fromarray(inks, "CMYK").save(file, "jpeg", quality=98, subsampling=0)
        return file.getvalue()
