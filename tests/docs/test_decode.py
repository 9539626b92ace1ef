"""The page "Your loader, our decoder": each example runs where its library is installed."""

from __future__ import annotations

import numpy as np
import pytest

import fuelrail as fr
from support.pages import ROOT, follow
from support.pictures import encode, natural

PAGE = ROOT / "docs" / "decode.md"
FILES = [encode(natural(320, 180, seed=n), subsampling="4:2:0") for n in range(6)]
EXPECTED = [fr.decode_jpeg(file, size=(704, 256)) for file in FILES]


@pytest.fixture(autouse=True)
def photos(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    for number, file in enumerate(FILES):
        (tmp_path / "photos" / f"{number}.jpg").write_bytes(file)


@pytest.mark.process
@pytest.mark.filterwarnings("ignore::Warning")  # of the libraries
@pytest.mark.parametrize(
    ("heading", "module", "is_planes"),
    [
        ("torch", "torch", True),
        ("webdataset", "webdataset", False),
        ("Grain", "grain", False),
        ("SPDL", "spdl.pipeline", True),
    ],
    ids=["torch", "webdataset", "grain", "spdl"],
)
def test_batches_hold_every_photo(heading: str, module: str, is_planes: bool) -> None:
    pytest.importorskip(module, reason=f"{module} is not installed")
    batches = follow(PAGE, heading)["batches"]
    assert [len(batch) for batch in batches] == [4, 2]
    pixels = np.concatenate([np.asarray(batch) for batch in batches])
    assert np.array_equal(pixels.transpose(0, 2, 3, 1) if is_planes else pixels, EXPECTED)
