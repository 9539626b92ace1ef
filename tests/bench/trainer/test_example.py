"""The examples of models of one's own are killed under FSDP and continue under DDP, with the same losses."""

from __future__ import annotations

import importlib
import re

import pytest
import torch

from support import own_example
from support.ranks import TESTS, run_ranks

pytestmark = [pytest.mark.process, pytest.mark.slow]

EXAMPLES = TESTS.parent / "configs" / "trainers"


def run(example, place, strategy, last=-1):
    words = [
        f"--strategy={strategy}",
        *example[1:],
        "--steps",
        6,
        "--every",
        2,
        "--checkpoint",
        place,
    ]
    return run_ranks(2, own_example.__file__, example[0], last, *words)


def losses(text):
    lines = re.findall(r"^step (\d+) loss (\S+)", text, re.MULTILINE)
    return {int(step): float(loss) for step, loss in lines}


@pytest.mark.parametrize(
    "words",
    [("vla",), pytest.param(("detector", "--small"), marks=pytest.mark.long)],
)
def test_a_killed_run_continues_under_another_strategy(words, tiny_dataset, tmp_path):
    example = (
        *words,
        tiny_dataset({"train": (16, 16, 16), "val": (7, 6)}).root,
    )
    whole_text = run(example, tmp_path / "whole", "ddp")
    with pytest.raises(AssertionError, match="ranks ended with"):
        run(example, tmp_path / "cut", "fsdp2", last=4)  # the second save has waited for the first
    rest = run(example, tmp_path / "cut", "ddp")
    expected = losses(whole_text)
    rest_losses = losses(rest)
    assert sorted(expected) == list(range(6)) and sorted(rest_losses) in (
        [2, 3, 4, 5],
        [4, 5],
    )
    assert all(
        loss == pytest.approx(expected[step], rel=2e-6) for step, loss in rest_losses.items()
    )

    assert "over 48 samples" in rest


def test_the_detector_finds_boxes_of_perfect_maps_and_the_devkit_says_so(
    monkeypatch,
):
    monkeypatch.syspath_prepend(EXAMPLES)
    detector = importlib.import_module("detector")
    model = detector.Detector(2, width=8, blocks=(1, 1, 1, 1), grid=16, channels=16)
    true = torch.tensor(
        [
            [-25.1, 2.3, 0.8, 4.0, 2.0, 1.6, -2.4],
            [10.0, -30.0, 0.5, 0.6, 0.7, 1.7, 0.3],
        ]
    )
    labels = [torch.tensor([0, 1]), torch.tensor([], dtype=torch.long)]
    batch = {"gt_boxes_3d": [true, true[:0]], "gt_labels_3d": labels}
    heat = torch.full((2, 2, 16, 16), -9.0)
    box = torch.zeros(2, 8, 16, 16)
    for label, target in enumerate(true):
        x, y = (((target[:2] / 51.2 + 1) * 8).long()).tolist()
        heat[0, label, x, y] = 9
        offset = (target[:2] - model.centres(target.device)[x, y]) / 6.4
        box[0, :, x, y] = torch.cat(
            (
                offset,
                target[2:3],
                target[3:6].log(),
                torch.stack((target[6].sin(), target[6].cos())),
            )
        )
    perfect = model.losses(heat, box, batch)
    wrong = model.losses(-heat, box, batch)
    assert float(perfect["box"]) < 1e-6 and float(perfect["heat"]) < 0.1 < float(wrong["heat"])
    boxes = model.decode(heat, box)
    assert torch.allclose(boxes[0][:2][boxes[0][:2, 8].argsort(), :7], true, atol=1e-4)
    scores = {"sample_key": ["a", "b"], **detector.score(boxes, batch)}
    assert detector.average_precision(scores, ["car", "pedestrian"]) > 0.99
    scores["found"] = [frame_boxes + torch.tensor([5.0, *[0] * 8]) for frame_boxes in boxes]
    assert detector.average_precision(scores, ["car", "pedestrian"]) == 0


def test_the_backbone_is_torchvisions_by_its_names(monkeypatch):
    torchvision = pytest.importorskip("torchvision")
    monkeypatch.syspath_prepend(EXAMPLES)
    backbone = importlib.import_module("detector").Detector().backbone.eval()
    resnet = torchvision.models.resnet50().eval()
    assert set(backbone.load_state_dict(resnet.state_dict(), strict=False).unexpected_keys) == {
        "fc.weight",
        "fc.bias",
    }
    images = torch.rand(1, 3, 64, 64)
    expected = torchvision.models._utils.IntermediateLayerGetter(resnet, {"layer4": "last"})(
        images
    )["last"]
    assert torch.allclose(backbone(images)[1], expected, atol=1e-5)
