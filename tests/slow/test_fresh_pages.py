"""What a page prints, runs: README, quickstart and guides in environments with exactly the extras that they name.

The environment grows from page to page: first what comes with the package alone, then each larger set of extras. Make
it anew for each session: an environment in which somebody has worked has more than a reader's.
"""

from __future__ import annotations

import re
import shutil

import cv2
import numpy as np
import pytest

from support.fresh_pages import (
    Environment,
    installs_of,
    lacking_figures,
    run_console,
)
from support.pages import ROOT

pytestmark = [pytest.mark.long, pytest.mark.process, pytest.mark.timeout(1800)]

README = ROOT / "README.md"
GUIDES = ROOT / "docs" / "guides"
QUICKSTART = GUIDES / "quickstart.md"


@pytest.fixture(scope="module")
def package_alone(tmp_path_factory):
    """An environment with what comes with the package, without torch."""
    environment = Environment(tmp_path_factory.mktemp("environment") / "venv")
    environment.install("pip install --compile .")  # a reader's has compiled modules, too
    return environment


@pytest.fixture(scope="module")
def bare(package_alone):
    """The same as the quickstart installs it for the files of a reader; to be asked for after ``package_alone``."""
    package_alone.install_torch()
    (line,) = installs_of(QUICKSTART, "Your own files")
    package_alone.install(line)
    return package_alone


@pytest.fixture(scope="module")
def laboratory(bare):
    """The same with the extras of the first command of both first pages; to be asked for after ``bare``."""
    extras = [re.findall(r"\[.*\]", line) for line in installs_of(README, "Try it")]
    assert extras == [
        re.findall(r"\[.*\]", line) for line in installs_of(QUICKSTART, "Without data")
    ]
    for line in installs_of(README, "Try it"):
        bare.install(line)
    return bare


@pytest.fixture(scope="module")
def quickstart_folder(bare, tmp_path_factory):
    """A folder with the drive and the dataset of the quickstart, by the package alone."""
    folder = tmp_path_factory.mktemp("made")
    page = QUICKSTART.read_text(encoding="utf-8")
    synth, shard = re.findall(r"^fuelrail (?:synth|shard) .*$", page, re.MULTILINE)[:2]
    bare.run(folder, "bash", "-c", f"{synth} && {shard}")
    return folder


@pytest.fixture
def desk(quickstart_folder, tmp_path):
    shutil.copytree(quickstart_folder / "dataset", tmp_path / "dataset")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    return tmp_path


def test_the_first_install_is_small_and_its_order_serves_torchs_loader(
    package_alone, tmp_path
) -> None:
    """The package alone, then torch by hand: neither OpenCV nor webdataset."""
    assert package_alone.num_megabytes() <= 320
    package_alone.install_torch()
    printed = package_alone.run(tmp_path, package_alone.python, "-m", "support.ordered_images")
    assert "pip install -e '.[opencv]'" in printed


def test_the_first_batch_of_the_files_of_a_reader(bare, tmp_path) -> None:
    picture = np.add.outer(np.arange(900), np.arange(1600))[..., None].repeat(3, 2) // 10
    for number in range(6):
        file = tmp_path / "mydata" / "front" / f"{number:04d}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(cv2.imencode(".jpg", picture.astype(np.uint8))[1].tobytes())
    printed = bare.read(QUICKSTART, tmp_path, "Your own files")
    assert "torch.Size([2, 1, 3, " in printed


def test_quickstart_trains(bare, desk) -> None:
    bare.read(QUICKSTART, desk, "Train")
    assert (desk / "checkpoint.pt").stat().st_size > 1000


@pytest.mark.parametrize(
    ("page", "headings"),
    [
        ("frames.md", ()),
        ("distillation.md", ("1. Run the teacher", "2. Train the student")),
        ("parallelism.md", ()),
        ("runs.md", ("The ledger of a run",)),
        ("your-dataset.md", ("torch's DataLoader", "What an order can do")),
        ("your-dataset.md", ("JAX, or a loop of your own",)),
        ("migrate.md", ("torch's DataLoader",)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_guide_that_names_no_extra_runs_without_any(page, headings, bare, desk) -> None:
    assert not installs_of(GUIDES / page)
    bare.read(GUIDES / page, desk, *headings)


def test_the_first_commands_of_readme(laboratory, tmp_path) -> None:
    """With the figures in it: the numbers of samples and bytes."""
    laboratory.read(README, tmp_path, "Try it")
    assert (tmp_path / "bench-train" / "report.html").is_file()


def test_the_first_commands_of_quickstart(laboratory, tmp_path) -> None:
    printed = laboratory.read(QUICKSTART, tmp_path, "Without data", "A report of a training run")
    page = QUICKSTART.read_text(encoding="utf-8")
    (number,) = re.findall(r"(\d+)\s+samples\s+to\s+train\s+on", page)
    assert f"({number} samples, split train)" in printed
    assert (tmp_path / "bench-train" / "report.html").is_file()


@pytest.mark.parametrize("page", ["diagnose.md", "team.md"])
def test_a_path_that_begins_in_an_empty_folder(page, laboratory, tmp_path) -> None:
    laboratory.read(GUIDES / page, tmp_path)


@pytest.mark.parametrize(
    ("page", "headings"),
    [("video-latents.md", ()), ("large-scale.md", ("How long, how much",))],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_page_of_the_laboratory(page, headings, laboratory, desk) -> None:
    laboratory.read(GUIDES / page, desk, *headings)


def test_a_figure_that_a_command_does_not_print_is_found(capfd) -> None:
    assert lacking_figures("# 40 samples, 39 MB", "wrote 40 samples, 38.6 MB, 1,200 images") == []
    assert lacking_figures("# 1,200 images, 39.1 MB", "1,200 images 39.12 MB") == []
    assert lacking_figures("# 41 samples, 39 MB", "40 samples, 39.6 MB") == [
        "41 samples",
        "39 MB",
    ]
    run_console("$ echo one   two\none two\n")
    with pytest.raises(AssertionError, match="the page shows 'three'"):
        run_console("$ echo one\nthree\n")
    with pytest.raises(AssertionError, match="ended with 3"):
        run_console("$ exit 3\n")
