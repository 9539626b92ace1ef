"""The recipes for features and for latents run as they are printed, and store what they say."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

import fuelrail as fr
from support.openscene_files import openscene_world, write_log
from support.pages import ROOT, follow

pytestmark = pytest.mark.slow

GUIDES = ROOT / "docs" / "guides"


@pytest.fixture
def own_modules(tmp_path, monkeypatch):
    """Modules that a page writes are imported from its folder, and forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in ("builders", "features", "vae"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("own_modules")
def test_a_changed_setting_makes_the_layer_of_its_builder_alone(tmp_path, capsys) -> None:
    world = openscene_world(every=5, num_clips=2, num_frames=40)
    for clip in world.clips:
        write_log(tmp_path / "openscene", clip)
    names = follow(GUIDES / "features-once.md")
    assert "poses: 0 rows made, 16 kept\nhistogram: 16 rows made\n" in capsys.readouterr().out
    assert names["poses"].layer == names["same_poses"].layer
    assert len(list((tmp_path / "layers").iterdir())) == 3

    select = ["ego_trajectory", "poses.poses", "poses.exists", "fine.counts"]
    with fr.DataLoader(
        "navsim",
        16,
        shuffle=False,
        transforms={**names["lidar"], "select": select},
        layers={"poses": names["poses"].layer, "fine": names["second"].layer},
    ) as loader:
        (batch,) = loader
    steps = batch["ego_trajectory"][:, 5:13]
    expected_poses = torch.where(steps[..., 5:] > 0, steps[..., [0, 1, 3]], 0.0)
    torch.testing.assert_close(batch["poses.poses"], expected_poses)
    assert 0 < int(batch["poses.exists"].sum()) < batch["poses.exists"].numel()
    assert torch.equal(batch["poses.exists"], steps[..., 5] > 0)
    for counts, points, lidar2ego in zip(
        batch["fine.counts"], batch["points"], batch["lidar2ego"], strict=True
    ):
        xyz = points[:, :3].numpy() @ lidar2ego[:3, :3].numpy().T + lidar2ego[:3, 3].numpy()
        expected = np.histogram2d(xyz[:, 0], xyz[:, 1], bins=128, range=[(-32, 32)] * 2)[0]
        assert np.array_equal(counts, expected.clip(max=5))

    source = (tmp_path / "builders.py").read_text()
    changed_source = source.replace("clamp(max=max_count)", "clamp(0, max_count)")
    assert changed_source != source
    (tmp_path / "builders.py").write_text(changed_source)
    del sys.modules["builders"]
    from builders import coming_poses, histogram

    make_layer = names["make_layer"]
    changed = make_layer("navsim", histogram, names["coarse"], names["lidar"])
    kept = make_layer("navsim", coming_poses, {"num_poses": 8}, names["ego"])
    assert changed.layer != names["first"].layer
    assert kept.layer == names["poses"].layer


@pytest.mark.usefixtures("own_modules", "desk")
def test_latents_of_windows_are_those_of_the_frames_beside_them(capsys) -> None:
    names = follow(GUIDES / "video-latents.md")
    printed = capsys.readouterr().out
    assert "layers/latents: 4 rows in" in printed
    assert "; 4 samples without all frames of the window left out; fingerprint" in printed
    from vae import encode

    num_windows = 0
    for split in ("train", "val"):
        with fr.DataLoader(
            "dataset",
            1,
            split=split,
            shuffle=False,
            transforms=names["view"],
            window=names["window"],
            layers={"latents": names["latents"]},
        ) as loader:
            for batch in loader:
                with torch.inference_mode():
                    expected = encode(batch)
                assert int(batch["frame"]) in (0, 1)
                for name, values in expected.items():
                    torch.testing.assert_close(
                        batch[f"latents.{name}"][:, 0].float(),
                        values,
                        rtol=1e-3,
                        atol=1e-3,
                    )
                num_windows += 1
    assert num_windows == 4
