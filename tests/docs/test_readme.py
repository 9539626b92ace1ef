"""README's blocks of Python; its diff runs in tests/loaders/test_box_frame.py."""

from __future__ import annotations

import pytest

from support.pages import ROOT, blocks_of, run

pytestmark = pytest.mark.slow

README = ROOT / "README.md"


def python_blocks() -> dict[str, object]:
    return {block.heading: block for block in blocks_of(README) if block.language == "python"}


def test_our_sampler_serves_torchs_dataloader() -> None:
    namespace = {"__name__": "page"}
    run(python_blocks()["Fuelrail"], namespace, README.name)
    rows = [row for (batch,) in namespace["loader"] for row in batch.tolist()]
    assert len(rows) == len(set(rows)) == 960
    assert rows != sorted(rows)


@pytest.mark.usefixtures("desk")
@pytest.mark.filterwarnings(
    "ignore:unclosed file", "ignore::pytest.PytestUnraisableExceptionWarning"
)
def test_without_fuelrail_webdataset_reads_the_shards(capsys) -> None:
    pytest.importorskip("webdataset")
    run(python_blocks()["Leaving"], {"__name__": "page"}, README.name)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert all(int(line.split()[1]) > 1000 for line in lines)


def test_there_are_no_other_blocks() -> None:
    assert python_blocks().keys() == {"Fuelrail", "Leaving"}
