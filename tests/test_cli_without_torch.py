"""Commands refuse what is wrong before they import torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / ".src"
WITHOUT_TORCH = """
import contextlib, io, json, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        assert name.partition(".")[0] != "torch", "torch is imported"
sys.meta_path.insert(0, Finder())
from fuelrail.__main__ import main
for arguments in json.load(sys.stdin):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            code = main(arguments)
        except (SystemExit, AssertionError) as end:
            code = getattr(end, "code", end)
    print(json.dumps([str(code), said.getvalue()]))
"""
NOT_A_FOLDER = "'nowhere' is not a folder"


@pytest.mark.process
def test_errors_that_need_no_torch_come_without_it(tiny_dataset, tmp_path) -> None:
    data = str(tiny_dataset({"train": (4, 3)}).root)
    cases = {f"bench {word} nowhere": NOT_A_FOLDER for word in ("train", "loader", "compare", "scale", "diagnose")} | {
        "inspect nowhere --batch": NOT_A_FOLDER,
        "view nowhere": NOT_A_FOLDER,
        "annotate nowhere layer --model a:b": NOT_A_FOLDER,
        "bench diff a b": "report 'a' cannot be read",
        "bench train DATA --strategy never": "invalid choice: 'never'",
        "bench train DATA --storage never": "invalid choice: 'never'",
        "bench train DATA --split never": "has no split 'never'",
        "bench train DATA --decoder never --batch-size 1": "decoder='never' must be one of",
        "bench train DATA --transforms never.yaml --batch-size 1": "never.yaml' cannot be read",
        "bench train DATA --accelerator emulated:never": "never",
        "bench loader DATA --batch-size 99": "fewer than a batch of 99",
        "bench loader DATA --image never.yaml": "never.yaml",
        "bench compare DATA --batch-size 99": "too few to warm up",
        "bench scale DATA --ranks 2": "must contain 1",
        "bench diagnose DATA --batch-size 99": "one step takes 99",
        "bench comm --mesh never": "mesh 'never'",
        "bench comm --base never": "known: ",
        "plan never": "'never' cannot be read",
        "plan --model gpt2 --cluster never --global-batch 8": "known: ",
        "annotate DATA layer --model a": "must be MODULE:FUNCTION",
        "annotate DATA layer --model os:getcwd --channels never.yaml": "'never.yaml' cannot be read",
        "view DATA never": "has no sample 'never'",
        "view DATA --image never.yaml": "never.yaml",
        "view DATA --channels never": "has no channel 'never'",
        "view DATA --frames 1 2": "different offsets with 0 among them",
    }
    given = json.dumps([[data if word == "DATA" else word for word in case.split()] for case in cases])
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(SOURCE)},
        input=given, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    for (case, message), line in zip(cases.items(), done.stdout.splitlines(), strict=True):
        code, said = json.loads(line)
        assert (code, message in said) == ("2", True), f"{case}: {code}, {said}"
