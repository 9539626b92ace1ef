"""A reader's desk: a folder of one's own, with the dataset that the quickstart makes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from support.pages import ROOT, follow


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory):
    """The folder that the first commands of the quickstart leave, run as they are printed."""
    folder, before = tmp_path_factory.mktemp("quickstart"), Path.cwd()
    os.chdir(folder)
    try:
        follow(ROOT / "docs" / "guides" / "quickstart.md", "Without data")
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def desk(quickstart, tmp_path, monkeypatch):
    """A folder with ``drive``, ``dataset`` and the presets, which is the current one."""
    for name in ("drive", "dataset"):
        shutil.copytree(quickstart / name, tmp_path / name)
    (tmp_path / "configs").symlink_to(ROOT / "configs")  # pages name presets as a checkout has them
    monkeypatch.chdir(tmp_path)
    return tmp_path
