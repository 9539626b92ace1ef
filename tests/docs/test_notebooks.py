"""The notebooks run from top to bottom, are stored without output, and show what their text says."""

from __future__ import annotations

import re

import nbformat
import pytest
from nbclient import NotebookClient

from support.pages import ROOT
from support.ranks import environment

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def test_all_notebooks_are_listed_and_stored_without_output() -> None:
    page = (ROOT / "docs" / "notebooks" / "README.md").read_text(encoding="utf-8")
    assert {path.name for path in NOTEBOOKS} == set(re.findall(r"\]\((\w+\.ipynb)\)", page))
    for path in NOTEBOOKS:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        assert not [
            cell for cell in notebook.cells if cell.get("outputs") or cell.get("execution_count")
        ], path.name


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.network
@pytest.mark.filterwarnings("ignore::Warning")  # of Jupyter's own parts
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path, quickstart, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    text = path.read_text(encoding="utf-8")
    if path.stem == "resume":
        assert "torch.distributed.run" in text
        text = text.replace("torch.distributed.run", "support.torchrun")
    notebook = nbformat.reads(text, as_version=4)
    # What the first cell synthesises is then already there; of other options it is refused.
    (tmp_path / "drive").symlink_to(quickstart / "drive")
    first, *_ = (cell for cell in notebook.cells if cell.cell_type == "code")
    assert "Path(tempfile.mkdtemp())" in first.source
    first.source = first.source.replace("tempfile.mkdtemp()", repr(str(tmp_path)))
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    text = "\n".join(output.get("text", "") for output in outputs)
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    if path.stem == "look":
        tables = "".join(
            output["data"].get("text/html", "") for output in outputs if "data" in output
        )
        assert len(pictures) == 3 and "<td>ego2img</td>" in tables
    if path.stem == "train":
        assert "12 steps, loss" in text
    if path.stem == "resume":
        assert re.search(r"killed after step \d+\s+three ranks went on at step \d+", text)
        assert "each of 240 rows came once in each epoch" in text
        assert "each batch is that of a run that was not interrupted" in text
    if path.stem == "waiting":
        assert len(pictures) == 1
        assert text.count("waited ") == 2 and re.search(r"transform took \d+ times as long", text)
