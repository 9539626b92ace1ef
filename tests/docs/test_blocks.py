"""Every block of Python on every page runs, in a task, in a test of its own, or here; or its reason not to is given."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path

import pytest

import fuelrail as fr
from fuelrail.__main__ import main
from support import pages
from support.pages import ROOT, Block, blocks_of, run

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WITH_TASKS = {
    "quickstart.md",
    "frames.md",
    "own-source.md",
    "migrate.md",
    "large-scale.md",
    "parallelism.md",
    "team.md",
}
WITH_TASKS |= {"diagnose.md", "distillation.md"}
ELSEWHERE = {
    "README.md": "tests/docs/test_readme.py",
    "sources.md": "tests/sharding/sources/tables/test_page.py",
    "your-dataset.md": "tests/docs/test_your_dataset.py",
    "decode.md": "tests/docs/test_decode.py",
    "lerobot.md": "tests/loaders/integrations/test_lerobot.py",
    "torchtitan.md": "tests/loaders/integrations/test_torchtitan.py",
    "huggingface.md": "tests/loaders/integrations/test_huggingface.py",
    "features-once.md": "tests/docs/test_layer_recipes.py",
    "video-latents.md": "tests/docs/test_layer_recipes.py",
}
NOT_RUN = {
    ("loader.md", "CUDA graphs and `torch.compile`"): "needs a GPU",
    (
        "runs.md",
        "Delete a clip",
    ): "needs a clean checkpoint: tests/bench/studies/runs/test_runs.py makes one",
    (
        "training.md",
        "Distillation",
    ): "needs a trained teacher: tests/bench/trainer/distill/test_student.py has one",
}


def python_blocks(page: Path) -> list[Block]:
    return [block for block in blocks_of(page) if block.language == "python"]


RUN_HERE = [p for p in PAGES if python_blocks(p) and p.name not in WITH_TASKS | ELSEWHERE.keys()]


def test_the_lists_name_pages_with_code() -> None:
    named = {page.name for page in PAGES if python_blocks(page)}
    assert named >= WITH_TASKS | ELSEWHERE.keys() | {name for name, _ in NOT_RUN}
    assert all((ROOT / test).is_file() for test in ELSEWHERE.values())
    tasks = (Path(__file__).parent / "test_tasks.py").read_text(encoding="utf-8")
    assert all(f'"{name}"' in tasks for name in WITH_TASKS)


def test_blocks_are_found_with_language_title_and_heading(tmp_path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        '# A\n\n```text\n# no heading\n```\n\n1. item\n\n    ```python title="x.py"\n    a = 1\n\n    b = 2\n    ```\n'
    )
    text, python = blocks_of(page)
    assert text == Block(language="text", title=None, code="# no heading\n", heading="A", line=4)
    assert python == Block(
        language="python",
        title="x.py",
        code="a = 1\n\nb = 2\n",
        heading="A",
        line=10,
    )


def test_a_command_that_fails_fails_the_page(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError, match="inspect nothing"):
        pages.run_command("fuelrail inspect nothing")
    with pytest.raises(AssertionError, match="nosuch"):
        pages.run_command('pip install "fuelrail[nosuch]"')


def trains(call: ast.Call) -> bool:
    """Whether a call makes a loader of ours that is neither of another split nor one for a single look."""
    is_loader = ast.unparse(call.func) in ("fr.DataLoader", "DataLoader")
    return is_loader and not any(keyword.arg in ("split", None) for keyword in call.keywords)


def test_loaders_that_train_say_that_they_shuffle_and_drop_the_last_samples() -> None:
    """Whoever copies a page or an example must not get the defaults, which are those of validation."""
    programs = {page: [block.code for block in python_blocks(page)] for page in PAGES}
    programs |= {
        file: [file.read_text(encoding="utf-8")]
        for file in (ROOT / "configs" / "trainers").glob("*.py")
    }
    num_loaders = 0
    for file, codes in programs.items():
        for tree in map(ast.parse, codes):
            looks = [
                call.args[0]
                for call in ast.walk(tree)
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "iter"
            ]
            for call in ast.walk(tree):
                if isinstance(call, ast.Call) and trains(call) and call not in looks:
                    arguments = {keyword.arg for keyword in call.keywords}
                    assert "drop_last" in arguments and arguments & {
                        "shuffle",
                        "order",
                    }, f"{file.name}: {ast.unparse(call)}"
                    num_loaders += 1
    assert num_loaders > 15


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN_HERE, ids=lambda page: page.name)
def test_blocks_run(page, desk, monkeypatch) -> None:
    """Each page alone, with folders that it leaves to its reader: what its code names, it imports or makes."""
    monkeypatch.syspath_prepend(str(desk))
    fr.reshard("dataset", "DATASET", splits={"train": 1.0}, workers=1)
    names = {"__name__": "page"}
    if page.name == "layers.md":
        (desk / "filler.py").write_text(
            "def fill(batch):\n"
            "    known = batch['img'].float().mean(dim=(1, 2, 3, 4))\n"
            "    return {'logits': known[:, None], 'loss': known * 0 + 1}\n"
        )
        monkeypatch.delitem(sys.modules, "filler", raising=False)
        for layer in ("layers/teacher", "LAYERS/losses-v2"):
            assert main(["annotate", "DATASET", layer, "--model", "filler:fill"]) == 0
    missing = [name for name in ("torchvision", "kornia") if importlib.util.find_spec(name) is None]
    for block in python_blocks(page):
        if (page.name, block.heading) not in NOT_RUN and not any(
            name in block.code for name in missing
        ):
            run(block, names, page.name)
