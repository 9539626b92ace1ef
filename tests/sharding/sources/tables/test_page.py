"""The page docs/sources.md: its table is a dataset. The notes of kinds name the columns and options that there are."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pyarrow as pa
import simplejpeg
from numpy import zeros
from pyarrow import parquet

from fuelrail.__main__ import main
from fuelrail.sharding.sources.registry import options_of_texts
from fuelrail.sharding.sources.tables.boxes import BOX_COLUMNS
from fuelrail.sharding.sources.tables.columns import OF_CAMERA
from fuelrail.sharding.sources.tables.manifest import Manifest
from fuelrail.sharding.sources.webdataset import WebDataset

PAGE = (Path(__file__).resolve().parents[4] / "docs" / "sources.md").read_text()
NOTES = str(Manifest.__doc__)


def test_the_page_s_table_is_a_dataset(tmp_path, monkeypatch, capsys):
    code = PAGE.split("```python")[1].split("```")[0]
    rows = code.split("rows = ")[1].split("pd.DataFrame")[0]
    data = tmp_path / "mydata"
    (data / "front").mkdir(parents=True)
    (data / "front" / "0001.jpg").write_bytes(
        simplejpeg.encode_jpeg(zeros((900, 1600, 3), "uint8"))
    )
    parquet.write_table(
        pa.Table.from_pylist(eval(textwrap.dedent(rows.strip()))),
        data / "frames.parquet",
    )
    monkeypatch.chdir(tmp_path)
    commands = re.findall(
        r"`fuelrail ([^`]*mydata[^`]*|inspect OUT)`",
        PAGE.split("## 2-D boxes")[0],
    )
    assert len(commands) == 3
    for command in commands:
        assert main([*command.split()]) == 0, command
    assert "front" in capsys.readouterr().out


def test_the_notes_name_all_columns():
    for name in (*BOX_COLUMNS, *OF_CAMERA):
        assert re.search(rf"[`.]{name}`", NOTES) or name in ("qx", "qy"), name


def test_the_options_of_the_notes_are_options():
    command = str(WebDataset.__doc__).split("fuelrail shard webdataset")[1].split("\n\n")[0]
    pairs = [quoted or plain for quoted, plain in re.findall(r"-o (?:'([^']+)'|(\S+))", command)]
    assert len(options_of_texts("webdataset", pairs)) == len(pairs) == 7
    options = re.findall(r"`-o (\w+)=?([^`]*)`", " ".join(NOTES.split()))
    for name, value in options:
        number = {"tolerance_ms": "50", "max_gap_s": "0.5"}
        assert options_of_texts("manifest", [f"{name}={value or number[name]}"])
    assert len(options) == 9
