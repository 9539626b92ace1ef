"""The tests' own kinds, installed as a plug-in's are."""

from __future__ import annotations

import pytest

from support.neutral_source import install_plugin


@pytest.fixture(autouse=True)
def plugins(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("site")
    install_plugin(folder, "neutral", "support.neutral_source:Neutral")
    install_plugin(folder, "neutral_by_clip", "support.neutral_source:NeutralByClip")
    install_plugin(
        folder,
        "neutral_without_poses",
        "support.neutral_source:NeutralWithoutPoses",
    )
    monkeypatch.syspath_prepend(folder)
