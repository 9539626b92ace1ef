"""Eleven tasks of three roles, each done by the blocks of one page alone, word by word."""

from __future__ import annotations

import json
import math
import re
import sys

import cv2
import numpy as np
import pytest
import torch
import yaml

import fuelrail as fr
from support.manifest_world import write_video
from support.neutral_source import install_plugin
from support.pages import ROOT, blocks_of, follow
from support.ranks import run_ranks

pytestmark = pytest.mark.slow

GUIDES = ROOT / "docs" / "guides"


def jpeg(file, shade=0) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    picture = np.add.outer(np.arange(180), np.arange(320))[..., None].repeat(3, 2) // 4 + shade
    file.write_bytes(cv2.imencode(".jpg", picture.astype(np.uint8))[1].tobytes())


# A perception engineer


def test_1_see_and_train_on_a_dataset_without_having_one(desk, quickstart) -> None:
    assert (quickstart / "sample.png").stat().st_size > 10_000
    names = follow(GUIDES / "quickstart.md", "Train")
    assert names["batch"]["img"].shape == (2, 6, 3, 128, 352)
    assert math.isfinite(float(names["loss"].detach()))
    assert names["checkpoint"]["loader"] == names["loader"].state_dict()
    assert names["loader"].show(names["batch"]).pixels.shape[2] == 3
    assert next(iter(names["loader"]))["epoch"] == 2


@pytest.mark.process
@pytest.mark.usefixtures("warm_ranks")
def test_1_measure_a_training_run_as_both_first_pages_print_it(desk) -> None:
    (block,) = [
        b for b in blocks_of(GUIDES / "quickstart.md") if b.heading == "A report of a training run"
    ]
    assert block.code.strip() in (ROOT / "README.md").read_text(encoding="utf-8")
    follow(GUIDES / "quickstart.md", block.heading)
    assert "occupancy" in (desk / "bench-train" / "report.html").read_text(encoding="utf-8")


def test_2_load_a_batch_of_ones_own_files(desk, capsys) -> None:
    for number in range(6):
        jpeg(desk / "mydata" / "front" / f"{number:04d}.jpg", shade=number)
    follow(GUIDES / "quickstart.md", "Your own files")
    assert "torch.Size([2, 1, 3, 180, 320])" in capsys.readouterr().out
    assert len(fr.open("mydataset")) == 6


def test_2_it_takes_five_commands_or_fewer() -> None:
    (commands,) = [
        b.code
        for b in blocks_of(GUIDES / "quickstart.md")
        if (b.heading, b.language) == ("Your own files", "sh")
    ]
    assert commands.startswith("pip install")
    assert len(commands.splitlines()) <= 5


def test_3_augment_without_losing_the_boxes(desk, capsys) -> None:
    names = follow(GUIDES / "frames.md")
    inside, total = map(int, capsys.readouterr().out.split(" box centres")[0].split(" of "))
    assert 0 < inside < total
    # The flip of the page puts the boxes where the flipped pixels are.
    plain = names["plain"]
    flipped = names["flipped"]
    centres = torch.cat(
        [
            plain["gt_boxes_3d"][0][:, :3],
            torch.ones(len(plain["gt_boxes_3d"][0]), 1),
        ],
        1,
    )
    u, v, depth, _ = plain["ego2img"][0, 1] @ centres.T
    u_flipped, v_flipped, depth_flipped, _ = flipped["ego2img"][0, 1] @ centres.T
    ahead = depth > 1
    last = plain["img"].shape[-1] - 1
    torch.testing.assert_close(
        (last - u / depth)[ahead],
        (u_flipped / depth_flipped)[ahead],
        atol=1e-2,
        rtol=1e-4,
    )
    torch.testing.assert_close(
        (v / depth)[ahead],
        (v_flipped / depth_flipped)[ahead],
        atol=1e-2,
        rtol=1e-4,
    )


def test_4_bring_a_source_and_a_channel_of_ones_own(desk, monkeypatch, capsys) -> None:
    forward = [[0, 0, 1, 1.5], [-1, 0, 0, 0], [0, -1, 0, 1.6], [0, 0, 0, 1]]
    rows = []
    for number in range(3):
        rows.append(
            {
                "timestamp_ns": 1_600_000_000_000_000_000 + number * 100_000_000,
                "intrinsics": [[200, 0, 160], [0, 200, 90], [0, 0, 1]],
                "cam2ego": forward,
                "ego2global": [
                    [1, 0, 0, number],
                    [0, 1, 0, 0],
                    [0, 0, 1, 0],
                    [0, 0, 0, 1],
                ],
                "boxes": [
                    {
                        "xyzlwh_yaw": [10, 0, 0.8, 4.5, 1.9, 1.6, 0.1],
                        "category": "car",
                    }
                ],
                "action": [number / 4, -1.5],
                "night": number == 1,
                **({"caption": f"frame {number}"} if number else {}),
            }
        )
    (desk / "drives").mkdir()
    write_video(
        desk / "drives" / "monday.mp4",
        [np.full((180, 320, 3), 60 * shade, np.uint8) for shade in range(3)],
    )
    (desk / "drives" / "monday.json").write_text(json.dumps(rows))
    install_plugin(desk, "drives", "fuelrail_drives:Drives")  # what `pip install -e .` leaves
    monkeypatch.syspath_prepend(str(desk))
    monkeypatch.delitem(sys.modules, "fuelrail_drives", raising=False)
    names = follow(GUIDES / "own-source.md")
    assert "drives" in capsys.readouterr().out
    batch = next(iter(names["loader"]))
    assert batch["gt_boxes_3d"][0].tolist()[0][3:6] == pytest.approx([4.5, 1.9, 1.6])
    assert batch["weather.wetness"].shape == (1,)
    assert (
        names["picture"].shape == (180, 320, 3) and abs(float(names["picture"].mean()) - 120) < 3
    ), "frame 2"
    values = names["batch"]
    assert values["img"].float().mean((1, 2, 3, 4)).tolist() == pytest.approx(
        [60 * n for n in values["frame"].tolist()], abs=3
    )
    numbers = values["frame"].tolist()
    assert (values["action"].dtype, values["action"].tolist()) == (
        torch.float32,
        [[n / 4, -1.5] for n in numbers],
    )
    assert values["caption"] == [f"frame {n}" if n else None for n in numbers]
    assert (values["night"].dtype, values["night"].tolist()) == (
        torch.bool,
        [n == 1 for n in numbers],
    )


def test_5_move_from_other_loaders(desk) -> None:
    names = follow(
        GUIDES / "migrate.md",
        "torch's DataLoader",
        "mmdetection3d, BEVDet, BEVFormer",
    )
    batch = names["batch"]
    data = names["data"]
    boxes = data["data_samples"][0]["gt_bboxes_3d"]
    assert boxes.shape[1] == 9
    assert (names["imgs"] is batch["img"]) and names["bda"].shape == (2, 3, 3)


@pytest.mark.filterwarnings("ignore::Warning")
def test_5_move_a_config_of_mmengine(desk) -> None:
    """The lines of the page in a config of which all else is MMEngine's own, run by its Runner."""
    pytest.importorskip(
        "mmengine",
        reason="mmengine is not installed: pip install -e '.[trainers]'",
    )
    from mmengine.config import Config
    from mmengine.model import BaseModel
    from mmengine.registry import MODELS
    from mmengine.runner import Runner

    batches = []

    @MODELS.register_module(force=True)
    class Detector(BaseModel):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, mode="loss", **batch):
            batches.append((batch["epoch"], tuple(batch["img"].shape), batch["sample_key"]))
            return {"loss": self.weight * batch["img"].float().mean()}

    follow(GUIDES / "migrate.md", "mmdetection3d, BEVDet, BEVFormer")
    config = Config.fromfile(str(desk / "config.py"))
    config.merge_from_dict(
        {
            "work_dir": str(desk / "work"),
            "model": {"type": "Detector"},
            "log_level": "ERROR",
            "optim_wrapper": {"optimizer": {"type": "SGD", "lr": 1e-3}},
            "train_cfg": {"by_epoch": True, "max_epochs": 2},
        }
    )
    Runner.from_cfg(config).train()
    num_steps = fr.open("dataset").split("train").num_samples // 2
    assert [epoch for epoch, *_ in batches] == [0] * num_steps + [1] * num_steps
    assert {shape for _, shape, _ in batches} == {(2, 6, 3, 256, 704)}
    assert batches[0][2] != batches[num_steps][2], "shuffled"


# A platform engineer


def test_6_plan_and_permit_a_petabyte(desk, capsys) -> None:
    follow(GUIDES / "large-scale.md")
    assert "on 4 devices (1x4-a100-pcie)" in capsys.readouterr().out
    for policy in ("writer-policy.json", "reader-policy.json"):
        assert json.loads((desk / policy).read_text())["Version"] == "2012-10-17"
    assert json.loads((desk / "lifecycle.json").read_text())["Rules"][0]["Status"] == "Enabled"
    (container,) = yaml.safe_load((desk / "shard-job.yaml").read_text())["spec"]["template"][
        "spec"
    ]["containers"]
    parsed = container["args"]
    assert parsed[0] == "shard" and parsed[2].startswith("s3://")
    assert (desk / "cache").is_dir()


@pytest.mark.process
def test_7_train_on_two_ranks_and_resume_on_one(desk, capfd) -> None:
    names = follow(GUIDES / "parallelism.md")
    assert capfd.readouterr().out.splitlines()[-2:] == ["1", f"2 {4 / 3}"]
    assert len(names["parts"][0]) == len(names["parts"][1]) > 0
    run_ranks(4, "modules.py")
    said = run_ranks(2, "train.py")
    keys = [line.split()[-1] for line in said.splitlines() if line.startswith("rank ")]
    assert len(keys) == len(set(keys)) >= 2


@pytest.mark.process
@pytest.mark.usefixtures("warm_ranks")
def test_8_find_out_why_the_gpus_wait(empty_desk, capsys) -> None:
    names = follow(GUIDES / "diagnose.md")
    out = capsys.readouterr().out
    assert "waited" in out and "decode" in out and "http://127.0.0.1:" in out
    report = json.loads((empty_desk / "occupancy" / "report.json").read_text())
    assert report["figures"]["occupancy"]
    assert names["trace"].spans() and (empty_desk / "trace.json").stat().st_size > 1000
    for file in ("alerts.yaml", "grafana.json"):
        assert (ROOT / "configs" / "monitoring" / file).is_file()


def test_9_prepare_data_for_a_team(empty_desk, monkeypatch, capsys) -> None:
    monkeypatch.syspath_prepend(str(empty_desk))
    monkeypatch.delitem(sys.modules, "teacher", raising=False)
    names = follow(GUIDES / "team.md")
    out = capsys.readouterr().out
    assert "clips only in b: 1 (scene-9003)" in out
    assert "4 samples of the base without a value" in out
    first, second = fr.open("fleet-v1"), fr.open("fleet-v2")
    assert set(first.table["key"].to_pylist()) < set(second.table["key"].to_pylist())
    assert (len(first), len(second)) == (8, 12)
    assert len(names["loader"]) == 4, "12 samples, of which 4 are for validation"


def test_10_distil_a_teacher(desk, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(desk))
    monkeypatch.delitem(sys.modules, "teacher", raising=False)
    names = follow(GUIDES / "distillation.md")
    predicted = names["predicted"]
    teacher = names["batch"]["teacher.logits"].float()
    assert predicted.shape == (2, 10)
    assert names["mask"].all()
    student_logs, teacher_logs = ((logits / 2).log_softmax(1) for logits in (predicted, teacher))
    expected = 4 * torch.nn.functional.kl_div(
        student_logs, teacher_logs, reduction="batchmean", log_target=True
    )
    assert float(names["loss"].detach()) == pytest.approx(float(expected.detach()), rel=1e-4)


# A maintainer


def test_11_know_what_to_run_before_a_change_and_a_release() -> None:
    make = (ROOT / "Makefile").read_text(encoding="utf-8")
    for page in ("CONTRIBUTING.md", ".github/RELEASING.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        used = {
            word
            for line in re.findall(r"(?:^|`)make ([a-z -]+)", text, re.MULTILINE)
            for word in line.split()
        }
        assert used, page
        for target in used:
            assert re.search(rf"^{target}:", make, re.MULTILINE), f"{page}: make {target}"
        for path in re.findall(r"pytest -q ((?:tests/)[\w/.]+)", text):
            assert (ROOT / path).exists(), path
    assert (
        yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["license"]
        == "Apache-2.0"
    )
