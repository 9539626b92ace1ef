"""`fuelrail annotate` on ranks as torchrun starts them: two processes, one layer, the bytes of one process."""

from __future__ import annotations

import json

import pytest

from fuelrail.__main__ import main
from support.datasets import build_dataset
from support.layers import digests
from support.ranks import run_ranks

pytestmark = pytest.mark.process

MODEL = """
def mean(batch):
    return {"mean": batch["img"].float().flatten(1).mean(1), "name": batch["sample_key"]}
"""


def test_two_ranks_write_the_layer_of_one(tmp_path, monkeypatch, capfd) -> None:
    build_dataset(tmp_path / "base", {"train": (3, 4), "val": (4,)})
    (tmp_path / "teacher.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def words(out: str) -> list[str]:
        return [
            "annotate",
            "base",
            out,
            "--model",
            "teacher:mean",
            "--batch-size",
            "2",
            "--workers",
            "1",
            "--json",
        ]

    assert main(words("alone/teacher")) == 0
    alone = json.loads(capfd.readouterr().out)
    text = run_ranks(2, "-m", "fuelrail", *words("torchrun/teacher")).strip()
    decoder = json.JSONDecoder()
    ranks = []
    while text:
        report, end = decoder.raw_decode(text)
        ranks.append(report)
        text = text[end:].strip()
    assert len(ranks) == 2 and all(0 < rank_report["num_written"] < 11 for rank_report in ranks)
    assert sum(rank_report["num_written"] for rank_report in ranks) == alone["num_written"] == 11
    assert alone["fingerprint"] in [rank_report["fingerprint"] for rank_report in ranks]
    assert digests(tmp_path / "torchrun" / "teacher") == digests(tmp_path / "alone" / "teacher")
