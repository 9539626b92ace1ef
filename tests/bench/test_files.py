from __future__ import annotations

import importlib.util

import pytest

from fuelrail.bench.files import prepare_folder, publish, publish_json
from fuelrail.pipeline.errors import ConfigError


def test_a_file_appears_whole_and_alone(tmp_path):
    path = tmp_path / "report.json"
    publish_json(path, {"a": 1})
    publish_json(path, {"a": 2})
    assert path.read_text() == '{\n "a": 2\n}\n'
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_is_a_sentence_and_leaves_nothing(tmp_path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(ConfigError, match="taken' cannot be written"):
        publish(tmp_path / "taken", b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_a_folder_is_made_and_an_earlier_report_taken_out(tmp_path):
    out = tmp_path / "a" / "b"
    prepare_folder(out, html=False)
    for name in ("report.json", "report.html", "notes.txt"):
        (out / name).write_text("old")
    prepare_folder(out, html=False)
    assert [path.name for path in out.iterdir()] == ["notes.txt"]


def test_a_page_that_cannot_be_drawn_is_refused_before_the_measurement(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="--no-html"):
        prepare_folder(tmp_path / "out", html=True)
    prepare_folder(tmp_path / "out", html=False)
