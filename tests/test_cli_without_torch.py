"""Commands without torch, which refuse what is wrong before they import it, and without the packages of extras."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / ".src"
WITHOUT = """
import contextlib, io, json, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1:]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Finder())
from fuelrail.__main__ import main
for arguments in json.load(sys.stdin):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            code = main(arguments)
        except (SystemExit, ModuleNotFoundError) as end:
            code = getattr(end, "code", end)
    print(json.dumps([str(code), said.getvalue()]))
"""
NOT_A_FOLDER = "'nowhere' is not a folder"


@pytest.mark.process
def test_errors_that_need_no_torch_come_without_it(tiny_dataset, tmp_path) -> None:
    data = str(tiny_dataset({"train": (4, 3)}).root)
    cases = {
        f"bench {word} nowhere": NOT_A_FOLDER
        for word in ("train", "loader", "compare", "scale", "diagnose")
    } | {
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
        "view DATA --select never": "has no channel or attribute 'never'",
        "view DATA --frames 1 2": "different offsets with 0 among them",
    }
    run_without(["torch"], {case: (2, message) for case, message in cases.items()}, data, tmp_path)


@pytest.mark.process
def test_the_core_works_without_the_extras_and_the_rest_names_its_extra(
    tiny_dataset, tmp_path
) -> None:
    data = str(tiny_dataset({"train": (4, 3)}).root)
    bench = "pip install -e '.[bench]'"
    cases = {
        **dict.fromkeys(
            ["reshard DATA again --seed 1", "verify DATA", "inspect DATA --batch"], (0, "")
        ),
        **dict.fromkeys(
            ["bench train DATA", "plan --model gpt2", "order describe DATA", "top http://x"],
            (2, bench),
        ),
    }
    extras = [
        "duckdb",
        "jinja2",
        "markupsafe",
        "prometheus_client",
        "psutil",
        "scipy",
        "matplotlib",
        "PIL",
    ]
    run_without(extras, cases, data, tmp_path)


def run_without(
    packages: list[str], cases: dict[str, tuple[int, str]], data: str, folder: Path
) -> None:
    """Run command lines, to exit code and part of the message, where the packages cannot be imported."""
    given = json.dumps(
        [[data if word == "DATA" else word for word in case.split()] for case in cases]
    )
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *packages],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        input=given,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('["')]
    for (case, (status, message)), line in zip(cases.items(), lines, strict=True):
        code, said = json.loads(line)
        assert (code, message in said) == (str(status), True), f"{case}: {code}, {said}"
