from __future__ import annotations

import re
import sys

import msgspec
import pytest

from fuelrail.__main__ import main
from fuelrail.bench.report.files import prepare_folder, publish, publish_json
from fuelrail.pipeline.errors import ConfigError
from support.bench_runs import RESULTS


def test_a_file_appears_whole_and_alone(tmp_path):
    path = tmp_path / "report.json"
    publish_json(path, {"a": 1})
    publish_json(path, {"a": 2})
    assert path.read_text() == '{\n "a": 2\n}\n'
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_is_a_sentence_and_leaves_nothing(
    tmp_path,
):
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
    for name in ("matplotlib", "psutil"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match="--no-html"):
        prepare_folder(tmp_path / "out", html=True)
    prepare_folder(tmp_path / "out", html=False)
    with pytest.raises(
        ConfigError,
        match=r"needs psutil, .* pip install -e '\.\[bench\]' in a checkout",
    ):
        prepare_folder(tmp_path / "out", html=False, modules=("psutil",))


def test_every_result_names_a_clean_commit():
    machines = {
        path.name: msgspec.json.decode(path.read_bytes())["machine"]
        for path in RESULTS.glob("*.json")
    }
    changed = [
        name
        for name, machine in machines.items()
        if not machine["commit"] or machine["uncommitted_changes"] is not False
    ]
    assert changed == [], "measure from a clean commit"


def test_a_report_that_is_not_a_regular_file_is_refused(capsys):
    assert main(["bench", "diff", "/dev/zero", "/dev/zero"]) == 2
    error = capsys.readouterr().err
    assert "'/dev/zero' cannot be read: it is not a regular file" in error
    assert error.count("\n") == 1


def test_a_report_of_endless_lists_is_refused(tmp_path, capsys):
    (tmp_path / "report.json").write_text("[" * 100_000)
    assert main(["bench", "diff", str(tmp_path), str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert re.search("cannot be read: (maximum recursion depth|Stack overflow)", said)
