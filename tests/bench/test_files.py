from __future__ import annotations

import pytest

from fuelrail.bench.files import publish, publish_json
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
