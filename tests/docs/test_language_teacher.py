"""The guide's teacher of Hugging Face transformers and its student, by its commands; skipped without transformers."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

import fuelrail as fr
from fuelrail.pipeline.channels.table import Channel, Law, Vocabulary
from support.datasets import build_dataset
from support.pages import ROOT, blocks_of, run, run_command

pytestmark = pytest.mark.slow


def test_the_student_learns_from_the_draws_of_the_teacher(tmp_path, monkeypatch) -> None:
    pytest.importorskip("transformers")
    tokens = Channel(
        name="tokens",
        kind="tokens",
        field="tokens.npy",
        law=Law("fixed"),
        dtype="uint16",
        axes=("token",),
        shape=(129,),
        vocabulary=Vocabulary("words", 64),
    )
    extra = [
        (
            tokens,
            lambda row: np.random.default_rng(row).integers(0, 64, 129).astype(np.uint16),
        )
    ]
    build_dataset(tmp_path / "talk", {"train": (10, 10)}, extra=extra, size=(16, 16))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "speaker", raising=False)
    blocks = [
        block
        for block in blocks_of(ROOT / "docs" / "guides" / "distillation.md")
        if block.heading == "A teacher of Hugging Face transformers"
    ]
    for block in blocks:
        if block.title is not None:
            run(block, {}, "distillation.md")
    (commands,) = [block.code.splitlines() for block in blocks if block.title is None]
    for command in commands[:-1]:
        run_command(command)
    assert commands[-1] == "python listener.py"
    losses = runpy.run_path("listener.py")["losses"]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    manifest = fr.inspect(Path("layers") / "speaker").facts["manifest"]
    (channel,) = manifest["channels"]
    assert channel["kind"] == "logits_sampled" and list(channel["shape"]) == [
        128,
        50,
    ]
    assert len(manifest["provenance"]["recipe"]["teacher"]) == 64
