"""A reader's desk: a folder of one's own, with the dataset that the quickstart makes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from support.pages import ROOT, follow


def read_quickstart(folder):
    before = Path.cwd()
    os.chdir(folder)
    try:
        follow(ROOT / "docs" / "guides" / "quickstart.md", "Without data")
    finally:
        os.chdir(before)


@pytest.fixture(scope="session")
def quickstart(made_once):
    """The folder that the first commands of the quickstart leave, run as they are printed."""
    return made_once("quickstart", read_quickstart)


@pytest.fixture
def desk(quickstart, tmp_path, monkeypatch):
    """A folder with ``drive``, ``dataset`` and the presets, which is the current one."""
    for name in ("drive", "dataset"):
        shutil.copytree(quickstart / name, tmp_path / name)
    (tmp_path / "configs").symlink_to(ROOT / "configs")  # pages name presets as a checkout has them
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def empty_desk(tmp_path, monkeypatch):
    """An empty folder, which is the current one, but for the presets of a checkout."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    return tmp_path
