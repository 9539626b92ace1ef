from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import msgspec
import pytest
import simplejpeg

from fuelrail.__main__ import main
from fuelrail.pipeline.errors import (
    ConfigError,
    DatasetError,
    DatasetExistsError,
)
from fuelrail.sharding.demo import synth as synth_module
from fuelrail.sharding.demo.capture import record
from fuelrail.sharding.demo.options import VERSION, SynthOptions
from fuelrail.sharding.demo.synth import synth
from fuelrail.sharding.demo.world import captures, make_clip
from support.sharding import digests, environment

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.process

TINY = SynthOptions(seed=1, clips=1, frames=1, size=(160, 90), workers=1)


@pytest.mark.parametrize("workers", [2, 5])
def test_bytes_do_not_depend_on_the_workers(
    small_options: SynthOptions, small_world: Path, tmp_path: Path, workers: int
) -> None:
    """More than one are processes."""
    calls: list[tuple[int, int]] = []
    options = msgspec.structs.replace(small_options, workers=workers)
    synth(
        tmp_path / "again",
        options,
        progress=lambda done, total: calls.append((done, total)),
    )
    assert digests(tmp_path / "again") == digests(small_world)
    clips = [make_clip(options, index) for index in range(options.clips)]
    total = sum(len(captures(options, clip)) for clip in clips)
    assert calls == [(done, total) for done in range(total + 1)]


def test_pictures_are_baseline_420_of_the_size_that_was_asked_for(
    small_world: Path,
) -> None:
    pictures = sorted(small_world.glob("s*/CAM_*/*.jpg"))
    rows = json.loads((small_world / VERSION / "sample_data.json").read_text())
    files = {path.relative_to(small_world).as_posix() for path in small_world.glob("s*/*/*")}
    assert files == {row["filename"] for row in rows}
    assert len(pictures) == 2 * 2 * 6
    for path in pictures:
        data = path.read_bytes()
        assert simplejpeg.decode_jpeg_header(data) == (90, 160, "YCbCr", "420")
        assert b"\xff\xc0" in data
        assert b"\xff\xc2" not in data


def test_the_same_world_is_left_as_it_is(small_options: SynthOptions, small_world: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in small_world.rglob("*")}
    report = synth(small_world, msgspec.structs.replace(small_options, workers=2))
    assert report.reused
    assert report.folder == str(small_world)
    assert report.num_images == 24
    assert {path: path.stat().st_mtime_ns for path in small_world.rglob("*")} == before


def test_a_folder_with_other_files_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(DatasetExistsError, match="isn't empty and holds no synthetic world"):
        synth(tmp_path, TINY)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(DatasetExistsError, match="is a file"):
        synth(tmp_path / "notes.txt", TINY)


def test_a_damaged_world_is_not_called_whole(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()  # an empty folder will do
    assert not synth(tmp_path / "out", TINY).reused
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    next((tmp_path / "out").glob("samples/CAM_FRONT/*.jpg")).unlink()
    with pytest.raises(DatasetExistsError, match="files were changed or removed"):
        synth(tmp_path / "out", TINY)


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_late(world: SynthOptions, root: Path, capture: object) -> object:
        if getattr(capture, "frame", 0) == 1:
            raise OSError(28, "No space left on device")
        return record(world, root, capture)  # type: ignore[arg-type]

    monkeypatch.setattr(synth_module, "record", fail_late)
    with pytest.raises(DatasetError, match="No space left on device"):
        synth(tmp_path / "out", msgspec.structs.replace(TINY, frames=2))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("clips", 0, "an integer from 1 to 999"),
        ("frames", -1, "an integer from 1 to 400"),
        ("seed", -5, "an integer from 0 to"),
        (
            "size",
            (8, 90),
            r"\(width, height\) in pixels, from \(64, 36\) to \(4096, 2304\)",
        ),
    ],
)
def test_worlds_that_cannot_be_are_refused(
    field: str, value: object, message: str, tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"{field}={re.escape(repr(value))} must be {message}",
    ):
        SynthOptions(**{field: value})
    with pytest.raises(ConfigError, match=field):
        synth(tmp_path / "out", **{field: value})
    assert list(tmp_path.iterdir()) == []


def test_the_command_makes_a_world_and_then_says_that_it_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "world")
    words = [
        "synth",
        out,
        "--seed",
        "3",
        "--clips",
        "1",
        "--frames",
        "2",
        "--size",
        "160x90",
        "--workers",
        "1",
    ]
    assert main(words) == 0
    said = capsys.readouterr()
    assert said.out.startswith(
        f"wrote: {out}, v1.0-mini, seed 3: 1 clips of 2 keyframes, 12 images, 3 lidar sweeps"
    )
    assert said.err == ""
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("already complete: ")
    assert main([*words[:3], "4", *words[4:]]) == 2
    refusal = capsys.readouterr().err
    assert refusal.startswith("fuelrail: error: ")
    assert "another synthetic world (seed 3, not 4)" in refusal
    assert refusal.count("\n") == 1
    for size in ("1600", "ax9", "1600x900x3", "-4x4"):
        assert main(["synth", str(tmp_path / "w"), f"--size={size}"]) == 2
        assert f"--size '{size}': it must be WIDTHxHEIGHT" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [tmp_path / "world"]


def test_ctrl_c_while_it_renders_ends_with_one_line(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "fuelrail",
        "synth",
        str(tmp_path / "world"),
        "--size",
        "64x64",
        "--workers",
        "2",
    ]
    process = subprocess.Popen(
        command,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while process.poll() is None and not any(tmp_path.glob(".world.partial-*/samples/CAM_FRONT/*")):
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, said = process.communicate(timeout=280)
    assert process.returncode == 130, said
    assert said == "fuelrail: interrupted\n"
    assert list(tmp_path.iterdir()) == []
