"""Recordings for Rerun, checked with Rerun's own tools."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fuelrail.__main__ import main
from fuelrail.loaders.integrations.rerun import record_clip
from fuelrail.pipeline.errors import ConfigError, OrderError
from fuelrail.pipeline.format.dataset import open_dataset


@pytest.fixture(scope="module")
def root(build_once):
    return build_once({"train": (3, 4)}, size=(64, 48))[0]


def rrd(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "rerun", "rrd", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.process
def test_a_clip_is_recorded_whole(root, tmp_path, capsys) -> None:
    pytest.importorskip("rerun", reason="the extra viewer is not installed here")
    file = tmp_path / "clip.rrd"
    assert main(["view", str(root), "clip-0001-000002", "--rerun", str(file)]) == 0
    said = capsys.readouterr().out
    frames = open_dataset(root).index.texts("clip_id").to_pylist().count("clip-0001")
    assert f"clip clip-0001: {frames} frames, {2 * frames} images" in said
    assert str(file) in said
    rrd("verify", str(file))
    printed = rrd("print", "-vv", str(file))
    for entity in (
        "world/path",
        "world/ego/cam_front",
        "world/ego/cam_back",
        "world/ego/boxes",
        "world/ego/lidar",
    ):
        assert f"/{entity}" in printed, entity
    for kind in (
        "Pinhole",
        "EncodedImage",
        "Boxes3D",
        "Points3D",
        "LineStrips3D",
        "Transform3D",
    ):
        assert kind in printed, kind


@pytest.mark.process
def test_the_same_clip_is_the_same_recording(root, tmp_path) -> None:
    pytest.importorskip("rerun", reason="the extra viewer is not installed here")
    reports = [record_clip(root, None, tmp_path / f"{number}.rrd") for number in range(2)]
    assert reports[0] == reports[1]
    rrd(
        "compare",
        "--unordered",
        *(str(tmp_path / f"{number}.rrd") for number in range(2)),
    )


def test_what_cannot_be_recorded_is_refused(root, tmp_path, monkeypatch, capsys) -> None:
    assert main(["view", str(root), "--rerun", "x.rrd", "--train"]) == 2
    assert (
        "--rerun records the stored images, so it cannot be combined with --train"
        in capsys.readouterr().err
    )
    monkeypatch.setitem(sys.modules, "rerun", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[viewer\]' in a checkout"):
        record_clip(root, None, tmp_path / "x.rrd")


def test_an_unknown_sample_is_named(root, tmp_path) -> None:
    pytest.importorskip("rerun", reason="the extra viewer is not installed here")
    with pytest.raises(OrderError, match="nothing"):
        record_clip(root, "nothing", tmp_path / "x.rrd")
