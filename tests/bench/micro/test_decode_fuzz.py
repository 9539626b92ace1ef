from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest

from fuelrail.bench.micro import decode_fuzz
from fuelrail.loaders.decode import make_decoder
from fuelrail.loaders.decode.native import load
from support.pictures import encode, natural

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    (folder / "a.jpg").write_bytes(encode(natural(160, 120), subsampling="4:2:0"))
    (folder / "b.png").write_bytes(encode(natural(64, 48), "png"))
    return folder


def test_slices_in_processes_of_their_own_add_up_to_the_whole(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "fuzz.json"
    assert decode_fuzz.main(["--images", str(images), "--count", "50", "--slice", "30", "--out", str(out)]) == 0
    found = json.loads(out.read_text())["tallies"]["turbo"]
    whole = decode_fuzz.fuzz(make_decoder("turbo"), decode_fuzz.load_files([images]), range(50), 1)
    for name in ("decoded", "refused_by_header", "refused_by_decoder"):
        assert found[name] == getattr(whole, name) > 0


def test_what_fails_is_named(images: Path) -> None:
    with pytest.raises(SystemExit, match="nothing ended with 1 at mutation 0 of seed 1") as caught:
        decode_fuzz.main(["--images", str(images), "--count", "3", "--backend", "nothing"])
    assert "decoder='nothing' must be one of" in str(caught.value)
    with pytest.raises(SystemExit, match="turbo hangs at mutation 0 of seed 1"):
        decode_fuzz.main(["--images", str(images), "--count", "3", "--timeout", "0.01"])


@pytest.mark.parametrize("options", [[], ["--sanitize"]])
def test_l3_mutations_are_the_same_with_and_without_the_native_decoder(
    images: Path, tmp_path: Path, options: list[str]
) -> None:
    if isinstance(load(), str) or (options and shutil.which("gcc") is None):
        pytest.skip("needs the native decoder, and gcc to build it with sanitizers")
    out = tmp_path / "fuzz.json"
    command = ["--images", str(images), "--backend", "native", "--small", "--count", "200", "--out", str(out), *options]
    assert decode_fuzz.main(command) == 0
    found = json.loads(out.read_text())["tallies"]["native"]
    assert found["compared"] > 20
    assert found["decoded"] > 20
