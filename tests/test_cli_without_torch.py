"""Commands without torch, which refuse what is wrong before they import it, and without the packages of extras."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions
from importlib.metadata import requires as metadata_requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

SOURCE = Path(__file__).resolve().parents[1] / ".src"
BLOCK = """
import importlib.metadata, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1:]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Finder())
known = importlib.metadata.Distribution.from_name
def from_name(name):
    if {"opencv-python-headless": "cv2"}.get(name, name) in sys.argv[1:]:
        raise importlib.metadata.PackageNotFoundError(name)
    return known(name)
importlib.metadata.Distribution.from_name = from_name
"""
WITHOUT = f"""{BLOCK}
import contextlib, io, json
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
        "browse nowhere": NOT_A_FOLDER,
        "annotate nowhere layer --model a:b": NOT_A_FOLDER,
        "bench diff a b": "report 'a' cannot be read",
        "bench train DATA --strategy never": "; got 'never'",
        "bench train DATA --storage never": "; got 'never'",
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
    run_without(
        ["torch"],
        {case: (2, message) for case, message in cases.items()},
        data,
        tmp_path,
    )


@pytest.mark.process
def test_the_core_works_without_the_extras_and_the_rest_names_its_extra(
    tiny_dataset, tmp_path
) -> None:
    data = str(tiny_dataset({"train": (4, 3)}).root)
    bench = "pip install -e '.[bench]'"
    cases = {
        **dict.fromkeys(
            ["reshard DATA again --seed 1", "verify DATA", "inspect DATA"],
            (0, ""),
        ),
        **dict.fromkeys(
            [
                "bench train DATA",
                "plan --model gpt2",
                "order describe DATA",
                "top http://x",
            ],
            (2, bench),
        ),
    }
    extras = [
        "jinja2",
        "markupsafe",
        "prometheus_client",
        "psutil",
        "rich",
        "scipy",
        "matplotlib",
        "PIL",
    ]
    run_without(extras, cases, data, tmp_path)


@pytest.mark.process
def test_commands_name_the_extra_that_brings_torch_or_opencv(tiny_dataset, tmp_path) -> None:
    data = str(tiny_dataset({"train": (4, 3)}).root)
    cases = {
        "reshard DATA again --seed 1": (0, ""),
        "verify DATA": (0, ""),
        "inspect DATA": (0, ""),
        "reshard DATA smaller --images resize=0.5": (
            2,
            "pip install -e '.[opencv]'",
        ),
        "synth drive": (2, "`fuelrail synth` needs cv2"),
        "browse DATA": (2, "pip install -e '.[opencv]'"),
        "view DATA": (2, "pip install -e '.[torch]'"),
        "plan --model gpt2": (2, "pip install -e '.[bench]'"),
    }
    run_without(["torch", "cv2", "webdataset"], cases, data, tmp_path)


@pytest.mark.process
def test_names_of_the_loader_name_the_extra_that_brings_torch() -> None:
    code = f"""{BLOCK}
import fuelrail as fr
from fuelrail import bench
fr.OrderSpec, fr.order.Sampler, fr.shard, fr.open
for face, name in ((fr, "DataLoader"), (bench, "train")):
    try:
        getattr(face, name)
    except fr.errors.ConfigError as error:
        print(error)
"""
    loader, train = run_program(code, ["torch"])
    how = "needs torch, which is not installed or does not load: pip install -e '.[torch]'"
    assert loader.startswith(f"fuelrail.DataLoader {how}")
    assert train.startswith(f"fuelrail.bench.train {how}")


@pytest.mark.process
def test_a_table_of_images_is_read_by_torchs_loader_without_opencv_and_webdataset(
    tmp_path,
) -> None:
    code = f"{BLOCK}import support.ordered_images\nsupport.ordered_images.main()"
    (refused,) = run_program(code, ["cv2", "webdataset"], tmp_path)
    assert refused.startswith("fuelrail.DataLoader needs cv2")
    assert "pip install -e '.[opencv]'" in refused


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("page", ["README.md", "docs/guides/quickstart.md"])
def test_the_first_commands_need_the_extras_that_the_page_names_and_no_more(page, tmp_path) -> None:
    text = page_text(page)
    extras = re.search(r"^pip install .*\[(.+?)\]", text, re.MULTILINE)[1].split(",")
    words = r"^(?:\$ )?(fuelrail (?:synth|shard|view) [^#\n]*)"
    commands = [command.strip() for command in re.findall(words, text, re.MULTILINE)[:3]]
    assert len(commands) == 3
    allowed = {"fuelrail"} | find_distributions("fuelrail", extras)
    absent = sorted(
        name
        for name, owners in packages_distributions().items()
        if not allowed & {canonicalize_name(owner) for owner in owners}
    )
    assert "mcap" in absent
    assert "torch" not in absent
    cases = {
        command.removeprefix("fuelrail ").replace("320x180", "64x36"): (0, "")
        for command in commands
    }
    run_without(absent, cases, "", tmp_path)
    assert (tmp_path / "dataset" / "dataset.json").exists()


def page_text(page: str) -> str:
    return (SOURCE.parent / page).read_text(encoding="utf-8")


def find_distributions(name: str, extras: list[str]) -> set[str]:
    """Return the distributions that pip installs with a distribution and extras of it."""
    distributions: set[str] = set()
    pending = [(name, extra) for extra in ["", *extras]]
    done = set()
    while pending:
        name, extra = pending.pop()
        if (name, extra) in done:
            continue
        done.add((name, extra))
        for text in read_requirements(name):
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                distributions.add(canonicalize_name(requirement.name))
                pending += [
                    (requirement.name, extra_name) for extra_name in ["", *requirement.extras]
                ]
    return distributions


def read_requirements(name: str) -> list[str]:
    """Return what a distribution requires; of fuelrail as this checkout says, installed or not."""
    if name == "fuelrail":
        project = tomllib.loads(page_text("pyproject.toml"))["project"]
        extras = [
            f"{text}; extra == '{extra}'"
            for extra, texts in project["optional-dependencies"].items()
            for text in texts
            if ";" not in text
        ]
        return [*project["dependencies"], *extras]
    try:
        return metadata_requires(name) or []
    except PackageNotFoundError:
        return []


def run_program(code: str, packages: list[str], folder: Path = SOURCE) -> list[str]:
    """Run Python where the packages cannot be imported; return the lines that it printed."""
    paths = os.pathsep.join(map(str, (SOURCE, Path(__file__).parent)))
    done = subprocess.run(
        [sys.executable, "-c", code, *packages],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def run_without(
    packages: list[str],
    cases: dict[str, tuple[int, str]],
    data: str,
    folder: Path,
) -> None:
    """Run command lines, to exit code and part of the message, where the packages cannot be imported."""
    case_words = json.dumps(
        [[data if word == "DATA" else word for word in case.split()] for case in cases]
    )
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *packages],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        input=case_words,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('["')]
    for (case, (status, message)), line in zip(cases.items(), lines, strict=True):
        code, said = json.loads(line)
        assert (code, message in said) == (str(status), True), f"{case}: {code}, {said}"
