from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import simplejpeg

import support.decode_fuzz
from fuelrail.loaders import commands
from fuelrail.loaders.decode.turbo import TurboDecoder
from fuelrail.pipeline import native
from fuelrail.pipeline.errors import ImageError
from fuelrail.pipeline.native import CameraJpeg, Scratch, build, open_library
from fuelrail.pipeline.sample.image_header import probe
from fuelrail.pipeline.transforms.image import ImageAugment
from fuelrail.pipeline.transforms.image_map import ImageMap, scaled_size
from support.decode_fuzz import sanitized_library
from support.image_maps import ALL_MAPS
from support.pictures import encode, natural, psnr_db, shift_px
from support.shared_data import shared_data


@pytest.fixture(scope="module")
def camera_jpeg() -> CameraJpeg:
    loaded = native.load()
    if isinstance(loaded, str):
        pytest.skip(f"no native decoder: {loaded}")
    return loaded


@pytest.fixture(scope="module")
def portable(tmp_path_factory) -> CameraJpeg:
    """The same sources without AVX2, as on aarch64: the pixels must not depend on it."""
    return compiled(tmp_path_factory.mktemp("portable"))


def compiled(folder: Path, *flags: str) -> CameraJpeg:
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("no C compiler")
    library = open_library(build.build(copy_of_sources(folder), flags=flags))
    assert isinstance(library, CameraJpeg)
    return library


def copy_of_sources(folder: Path) -> Path:
    for file in native.FOLDER.glob("*.[ch]"):
        shutil.copy(file, folder)
    return folder


def decode(library: CameraJpeg, encoded: bytes, factor: int) -> np.ndarray | None:
    info = probe(encoded)
    picture = library.picture(encoded, info, factor, (0, info.height), Scratch())
    return None if picture is None else picture[..., :3].copy()


def by_libjpeg(encoded: bytes, factor: int) -> np.ndarray:
    info = probe(encoded)
    height = scaled_size(info.height, 1, factor)
    width = scaled_size(info.width, 1, factor)
    return simplejpeg.decode_jpeg(encoded, "RGB", min_height=height, min_width=width)


def saturated(width: int, height: int) -> np.ndarray:
    """Every value that colours and coefficients may take, and what clips."""
    return np.random.default_rng(3).choice(
        np.array([0, 3, 128, 252, 255], np.uint8), (height, width, 3)
    )


class TestPixels:
    @pytest.mark.costly
    @pytest.mark.parametrize("factor", [2, 4])
    @pytest.mark.parametrize("wh", [(16, 16), (17, 33), (160, 96), (333, 215), (640, 360)])
    @pytest.mark.parametrize("options", [{}, {"quality": 100}, {"quality": 5}, {"optimize": True}])
    @pytest.mark.parametrize("restarts", [False, True])
    def test_they_are_those_of_libjpeg_turbo(
        self, camera_jpeg, portable, factor, wh, options, restarts
    ) -> None:
        rows = {"restart_marker_rows": 1} if restarts else {}
        for picture in (natural(*wh), saturated(*wh)):
            encoded = encode(picture, subsampling="4:2:0", **options, **rows)
            expected = by_libjpeg(encoded, factor)
            for library in (camera_jpeg, portable):
                got = decode(library, encoded, factor)
                assert got is not None
                assert np.array_equal(got, expected)

    def test_rows_are_those_of_the_whole(self, camera_jpeg) -> None:
        for rows in ({}, {"restart_marker_rows": 1}):
            encoded = encode(natural(320, 400), subsampling="4:2:0", **rows)
            info = probe(encoded)
            full_image = decode(camera_jpeg, encoded, 2)
            for first, last in ((0, 1), (77, 130), (199, 200), (96, 104)):
                part = camera_jpeg.picture(encoded, info, 2, (first, last), Scratch())
                assert part is not None
                assert np.array_equal(part[first:last, :, :3], full_image[first:last])

    @pytest.mark.costly
    @pytest.mark.parametrize("name", ALL_MAPS)
    def test_the_resize_is_bilinear_interpolation(self, camera_jpeg, portable, name: str) -> None:
        image_map = ALL_MAPS[name]
        encoded = encode(natural(1600, 900), subsampling="4:2:0", quality=92)
        for factor in (2, 4):
            scaled = image_map.of_scaled(factor)
            info = probe(encoded)
            width, height = image_map.out_wh
            out, same = np.full((2, 3, height, width), 7, np.uint8)
            image = native.ScaledImage(
                encoded=encoded,
                info=info,
                factor=factor,
                image_map=scaled,
                out=out,
            )
            (is_taken,) = camera_jpeg.resize([image], Scratch())
            assert [is_taken] == portable.resize([image._replace(out=same)], Scratch())
            assert np.array_equal(out, same)
            if not is_taken:
                assert (out == 7).all()
                continue
            expected = bilinear(by_libjpeg(encoded, factor), scaled)
            assert np.abs(out - expected).max() <= 1.0
            assert abs((out - expected).mean()) < 0.04  # ties are rounded up

    @pytest.mark.real
    @pytest.mark.parametrize(
        "name",
        [
            "eval",
            "bevdet",
            "streampetr",
            "padded",
            "flipped",
            "upside-down",
            "beyond",
        ],
    )
    def test_the_backend_gives_nearly_the_same_without_it(self, camera_jpeg, name: str) -> None:
        image_map = ALL_MAPS[name]
        shape = (3, image_map.out_wh[1], image_map.out_wh[0])
        for file in sorted(shared_data("nuscenes-mini").glob("samples/CAM_*/*.jpg"))[::7]:
            first = np.empty(shape, np.uint8)
            second = np.empty(shape, np.uint8)
            TurboDecoder().decode_into(file.read_bytes(), image_map, first)
            TurboDecoder(native=False).decode_into(file.read_bytes(), image_map, second)
            assert psnr_db(first, second) > 48.0
            assert max(map(abs, shift_px(first, second, np.ones(shape[1:], bool)))) < 0.02


def bilinear(picture: np.ndarray, image_map: ImageMap) -> np.ndarray:
    """Exact bilinear samples (3, h, w) of an axis-aligned map, black where it sees nothing."""
    a, _, tx, _, d, ty = image_map.coefficients
    width, height = image_map.out_wh
    x = np.clip((np.arange(width) + 0.5 - tx) / a - 0.5, 0, picture.shape[1] - 1)
    y = np.clip((np.arange(height) + 0.5 - ty) / d - 0.5, 0, picture.shape[0] - 1)
    x0 = x.astype(int)
    y0 = y.astype(int)
    x1 = np.minimum(x0 + 1, picture.shape[1] - 1)
    y1 = np.minimum(y0 + 1, picture.shape[0] - 1)
    wx = (x - x0)[None, :, None]
    wy = (y - y0)[:, None, None]
    planes = picture.astype(float)
    above = planes[y0][:, x0] * (1 - wx) + planes[y0][:, x1] * wx
    below = planes[y1][:, x0] * (1 - wx) + planes[y1][:, x1] * wx
    samples = (above * (1 - wy) + below * wy).transpose(2, 0, 1)
    left, top, right, bottom = image_map.covered_output()
    out = np.zeros_like(samples)
    out[:, top:bottom, left:right] = samples[:, top:bottom, left:right]
    return out


class TestDeclined:
    @pytest.mark.parametrize(
        "encoded",
        [
            encode(natural(160, 96)),
            encode(natural(160, 96), subsampling="4:2:2"),
            encode(natural(160, 96)[..., 0]),
            encode(natural(160, 96), subsampling="4:2:0", progressive=True),
            encode(natural(160, 96), subsampling="4:2:0", restart_marker_blocks=7),
        ],
        ids=["4:4:4", "4:2:2", "gray", "progressive", "restarts anywhere"],
    )
    def test_other_kinds_are_left_to_libjpeg_turbo(self, camera_jpeg, encoded) -> None:
        assert not camera_jpeg.takes(probe(encoded), 2)
        assert decode(camera_jpeg, encoded, 2) is None

    @pytest.mark.costly
    @pytest.mark.parametrize("rows", [{}, {"restart_marker_rows": 1}])
    def test_damaged_files_are_declined_or_libjpeg_turbo_takes_them_too(
        self, camera_jpeg, rows
    ) -> None:
        encoded = encode(natural(160, 96), subsampling="4:2:0", **rows)
        rng = np.random.default_rng(7)
        info = probe(encoded)
        image_map = ImageMap.identity((160, 96)).resize(80, 48)
        decoder = TurboDecoder()
        out = np.empty((3, 48, 80), np.uint8)
        outcomes = set()
        for _ in range(600):
            damaged = bytearray(encoded)
            for _ in range(rng.integers(1, 4)):
                damaged[rng.integers(2, len(damaged))] = rng.integers(256)
            damaged = damaged[: rng.integers(200, len(damaged))] if rng.random() < 0.1 else damaged
            out[:] = 7
            image = native.ScaledImage(
                encoded=damaged,
                info=info,
                factor=2,
                image_map=image_map.of_scaled(2),
                out=out,
            )
            (is_taken,) = camera_jpeg.resize([image], Scratch())
            outcomes.add(is_taken)
            if not is_taken:
                assert (out == 7).all()
                with_fallback = decode_or_none(decoder, damaged, image_map)
                assert with_fallback is None or with_fallback.shape == out.shape
            elif not rows:
                assert by_libjpeg(bytes(damaged), 2).shape == (48, 80, 3)
        assert outcomes == {True, False}

    @pytest.mark.costly
    def test_coefficients_beyond_those_of_pictures_are_declined_or_the_pixels_are_the_same(
        self, camera_jpeg, portable
    ) -> None:
        outcomes = set()
        for picture in (natural(160, 96), saturated(160, 96)):
            encoded = encode(picture, subsampling="4:2:0", quality=100)
            tables = [
                offset + 5
                for offset in range(len(encoded))
                if encoded[offset : offset + 4] == b"\xff\xdb\x00\x43"
            ]
            assert len(tables) == 2
            for quantiser in (
                1,
                2,
                3,
                4,
                6,
                8,
                11,
                16,
                23,
                32,
                45,
                64,
                91,
                128,
                181,
                255,
            ):
                damaged = bytearray(encoded)
                for offset in tables:
                    damaged[offset : offset + 64] = bytes((quantiser,)) * 64
                for factor in (2, 4):
                    for library in (camera_jpeg, portable):
                        got = decode(library, bytes(damaged), factor)
                        assert got is None or np.array_equal(
                            got, by_libjpeg(bytes(damaged), factor)
                        ), quantiser
                        outcomes.add((quantiser, got is not None))
        assert (1, False) not in outcomes
        assert {(2, True), (255, False)} <= outcomes

    @pytest.mark.slow
    @pytest.mark.parametrize("num_samples", [20, pytest.param(200, marks=pytest.mark.long)])
    def test_what_is_refused_does_not_depend_on_the_native_decoder(
        self, camera_jpeg, num_samples
    ) -> None:
        encoded = encode(natural(320, 400), subsampling="4:2:0", restart_marker_rows=1)
        scan = probe(encoded).scan_at
        markers = [
            offset
            for offset in range(scan, len(encoded))
            if encoded[offset] == 0xFF and encoded[offset + 1] != 0
        ]
        assert len(markers) == 400 // 16
        with_it = TurboDecoder(native=camera_jpeg)
        without = TurboDecoder(native=False)
        augment = ImageAugment(
            height=64,
            width=128,
            train=True,
            resize_range=(0.13, 0.49),
            crop_y="random",
            flip_prob=0.5,
        )
        rng = np.random.default_rng(5)
        outcomes = set()
        for sample in range(num_samples):
            (image_map,) = augment.draw([(320, 400)], seed=0, epoch=0, sample=sample)
            image_map = image_map.rotate(3.0) if sample % 10 == 0 else image_map
            image_map = upside_down(image_map) if sample % 4 == 0 else image_map
            for end in [None, *markers]:
                damaged = bytearray(encoded)
                if end is not None:  # a row gets a byte more or less, or zeros
                    damaged[end - 3 : end] = [
                        b"\x12\x34\x56\x78",
                        b"\x12",
                        b"\0\0\0",
                    ][rng.integers(3)]
                trailer = bytes((0, 0, 40)[rng.integers(3)])
                first, second = (
                    decode_or_none(decoder, bytes(damaged) + trailer, image_map)
                    for decoder in (with_it, without)
                )
                assert (first is None) == (second is None), (sample, end)
                outcomes.add((first is None, bool(trailer)))
        assert len(outcomes) == 4

    def test_a_jfif_version_that_libjpeg_warns_of_is_declined(self, camera_jpeg) -> None:
        encoded = encode(natural(160, 96), subsampling="4:2:0")
        offset = encoded.index(b"JFIF\0") + 5
        altered = encoded[:offset] + b"\x02" + encoded[offset + 1 :]
        assert decode(camera_jpeg, altered, 2) is None
        assert (
            decode_or_none(
                TurboDecoder(),
                altered,
                ImageMap.identity((160, 96)).resize(80, 48),
            )
            is None
        )

    def test_sizes_that_the_caller_does_not_know_are_declined(self, camera_jpeg) -> None:
        encoded = encode(natural(160, 96), subsampling="4:2:0")
        lied = probe(encoded)._replace(width=176)
        assert camera_jpeg.picture(encoded, lied, 2, (0, 48), Scratch()) is None


def upside_down(image_map: ImageMap) -> ImageMap:
    a, b, tx, c, d, ty = image_map.coefficients
    coefficients = (a, b, tx, -c, -d, image_map.out_wh[1] - ty)
    return ImageMap(coefficients, image_map.source_wh, image_map.out_wh, image_map.visible)


def decode_or_none(decoder: TurboDecoder, encoded: bytes, image_map: ImageMap) -> np.ndarray | None:
    out = np.empty((3, image_map.out_wh[1], image_map.out_wh[0]), np.uint8)
    try:
        decoder.decode_into(encoded, image_map, out)
    except ImageError:
        return None
    return out


CROSS = {"aarch64-linux-gnu-gcc": "aarch64-linux-gnu-gcc"}
if importlib.util.find_spec("ziglang") is not None:
    CROSS["ziglang"] = f"{sys.executable} -m ziglang cc -target aarch64-linux-gnu"
STRICT = ("-Wall", "-Wextra", "-Werror")


def digest_by(compiler: str, runner: list[str], folder: Path) -> str:
    """What the harness, built by a compiler in a folder with pictures, says of these and of mutations of them."""
    program = folder / compiler
    sources = [native.FOLDER / name for name in ("add_restarts.c", "restart_rows.c")]
    command = [compiler, "-O3", "-std=gnu11", "-fwrapv", "-static", "-Wno-psabi", *STRICT]
    harness = Path(support.decode_fuzz.__file__).parent / "native_digest.c"
    command += [f"-I{native.FOLDER}", harness, *sources, "-lm", "-o", program]
    subprocess.run(command, check=True)
    words = [*runner, program, "1", "120", *sorted(folder.glob("*.jpg"))]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def digested(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with pictures, and what is said of them by the program that gcc has built."""
    folder = tmp_path_factory.mktemp("digested")
    for number, rows in enumerate(({}, {"restart_marker_rows": 1})):
        encoded = encode(natural(333, 215), subsampling="4:2:0", quality=90, **rows)
        (folder / f"{number}.jpg").write_bytes(encoded)
    return folder, digest_by("gcc", [], folder)


class TestLibrary:
    @pytest.mark.slow
    @pytest.mark.parametrize("level", [(), ("-march=x86-64-v3",)])
    @pytest.mark.parametrize("compiler", ["gcc", "clang-14"])
    def test_the_compiler_has_nothing_to_say(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        compiler: str,
        level: tuple[str, ...],
    ) -> None:
        if level and platform.machine() != "x86_64":
            pytest.skip("flags of x86-64")
        if not shutil.which(compiler):
            pytest.skip(f"needs {compiler} (Debian package)")
        monkeypatch.setenv("CC", compiler)
        compiled(tmp_path, *STRICT, *level)

    @pytest.mark.slow
    def test_it_compiles_for_aarch64(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Build by the installed compiler, with the flags that a build there takes."""
        compiler = next(
            (CROSS[name] for name in CROSS if name == "ziglang" or shutil.which(name)),
            None,
        )
        if compiler is None:
            pytest.skip(
                "no compiler for aarch64: pip install ziglang, or Debian package gcc-aarch64-linux-gnu"
            )
        for name in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"):
            monkeypatch.setenv(name, str(tmp_path / "cache"))
        monkeypatch.setenv("CC", f"{compiler} {' '.join(STRICT)}")
        monkeypatch.setenv("_PYTHON_HOST_PLATFORM", "linux-aarch64")
        header = build.build(copy_of_sources(tmp_path)).read_bytes()[:20]
        assert header[:4] == b"\x7fELF"
        assert int.from_bytes(header[18:20], "little") == 183, "EM_AARCH64"

    @pytest.mark.slow
    @pytest.mark.process
    @pytest.mark.parametrize(
        ("other", "runner"),
        [("aarch64-linux-gnu-gcc", ["qemu-aarch64"]), ("clang-14", [])],
        ids=["aarch64", "clang"],
    )
    def test_another_compiler_makes_the_same_bytes(
        self, request: pytest.FixtureRequest, other: str, runner: list[str]
    ) -> None:
        """Pictures, resampled planes and restart markers of files and of mutations."""
        if not all(map(shutil.which, [other, *runner])):
            pytest.skip(
                "needs Debian packages gcc-aarch64-linux-gnu, libc6-dev-arm64-cross, qemu-user, clang-14"
            )
        folder, digest = request.getfixturevalue("digested")
        assert digest_by(other, runner, folder) == digest
        _, *numbers = digest.split()
        assert min(map(int, numbers)) > 20

    @pytest.mark.slow
    def test_one_built_from_other_sources_is_not_used(self, tmp_path: Path) -> None:
        folder = copy_of_sources(tmp_path)
        with (folder / "camera_jpeg.c").open("a") as file:
            file.write("/* changed */\n")
        try:
            library = build.build(folder)
        except build.BuildError as error:
            pytest.skip(str(error))
        assert "built from other sources" in open_library(library)

    def test_what_is_wrong_is_said_with_what_to_do(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert "install a C compiler" in open_library(tmp_path / build.LIBRARY_NAME)
        (tmp_path / build.LIBRARY_NAME).write_bytes(b"no library")
        assert "cannot be loaded" in open_library(tmp_path / build.LIBRARY_NAME)
        monkeypatch.setattr(
            commands,
            "load_native",
            lambda: "it was not built: install a C compiler",
        )
        finding = next(f for f in commands.doctor().findings if f.subject == "native JPEG")
        assert finding.advice == "it was not built: install a C compiler"
        monkeypatch.setenv("CC", "false")
        with pytest.raises(build.BuildError, match="the C compiler 'false' failed"):
            build.build(copy_of_sources(tmp_path))
        with monkeypatch.context() as elsewhere:
            elsewhere.setenv("_PYTHON_HOST_PLATFORM", "linux-riscv64")
            with pytest.raises(
                build.BuildError,
                match="no vector code for processors of kind 'riscv64'",
            ):
                build.build(copy_of_sources(tmp_path))
        monkeypatch.delenv("CC")
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(build.BuildError, match="no C compiler: install one"):
            build.build(tmp_path)

    @pytest.mark.process
    def test_it_is_built_with_the_standard_library_alone(self) -> None:
        code = "import sys, runpy; runpy.run_path(sys.argv[1]); print('numpy' in sys.modules, 'fuelrail' in sys.modules)"  # noqa: E501
        command = [sys.executable, "-c", code, str(native.FOLDER / "build.py")]
        assert (
            subprocess.run(command, check=True, capture_output=True, text=True).stdout
            == "False False\n"
        )


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("sanitize", [False, True])
def test_mutations_are_the_same_with_and_without_the_native_decoder(sanitize, tmp_path):
    """The same files are refused with and without the native decoder, and the same pixels decoded."""
    if isinstance(native.load(), str) or (sanitize and shutil.which("gcc") is None):
        pytest.skip("needs the native decoder, and gcc to build it with sanitizers")
    images = [tmp_path / "a.jpg", tmp_path / "b.png"]
    images[0].write_bytes(encode(natural(160, 120), subsampling="4:2:0"))
    images[1].write_bytes(encode(natural(64, 48), "png"))
    preload = sanitized_library(tmp_path) if sanitize else {}
    library = (tmp_path if sanitize else build.FOLDER) / build.LIBRARY_NAME
    done = subprocess.run(
        [sys.executable, "-m", "support.decode_fuzz", library, "200", *images],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **preload},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert report["compared"] > 20
    assert report["decoded"] > 20
    assert report["restarts"]["rewritten"] >= report["restarts"]["same_pixels"] > 20
    assert min(report["restarts"]["refused"], report["restarts"]["left"]) > 10
