from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from fuelrail.bench.gpu.cameras import SOURCE_WH, made_image
from fuelrail.bench.micro import decode
from fuelrail.pipeline.transforms.image import ImageAugment
from support.pictures import psnr_db

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow


def test_all_candidates_do_the_same_work() -> None:
    encoded = made_image()
    assert 100_000 < len(encoded) < 200_000
    (image_map,) = ImageAugment(height=256, width=704).draw([SOURCE_WH], seed=0, epoch=0, sample=0)
    pictures = {}
    for name, work in decode.decoders(image_map).items():
        out = np.zeros((3, 256, 704), np.uint8)
        work(encoded, out)
        pictures[name] = out
    reference = pictures["fuelrail pillow (full decode, antialiased)"]
    for name, picture in pictures.items():
        assert psnr_db(picture, reference) > 32.0, name


def test_runs_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert decode.main(["--quick", "--out", str(tmp_path / "decode.json")]) == 0
    assert "images/s  fuelrail turbo" in capsys.readouterr().out
    report = json.loads((tmp_path / "decode.json").read_text())
    assert report["num_images"] == 2
    assert set(report["images_per_s"]) == {"2 images, 1 thread", "2 images, 2 threads"}


def test_a_folder_without_such_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no JPEG files of 1600x900"):
        decode.main(["--images", str(tmp_path)])
