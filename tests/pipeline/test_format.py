"""FORMAT.md is enough: its tables are the code's, and a reader written from it alone reads a dataset."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pytest
import xxhash
import zstandard

from fuelrail.pipeline.format import codecs, manifest, tar
from fuelrail.pipeline.format.index import keys, shards
from fuelrail.pipeline.format.index import samples as index
from fuelrail.pipeline.sample import schema
from fuelrail.pipeline.transforms.lens import MODELS, UNBENT
from support.plain_tables import check_files, read_shards

if TYPE_CHECKING:
    import msgspec

DOCUMENT = (Path(__file__).resolve().parents[2] / "pipeline" / "format" / "FORMAT.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    """The text from a heading that begins with ``title`` to the next heading of its depth or above."""
    match = re.search(rf"^(#+) {re.escape(title)}.*?$(.*?)(?=^#{{1,2}} |^### |\Z)", DOCUMENT, re.MULTILINE | re.DOTALL)
    assert match is not None, title
    return match[2]


def first_column(text: str) -> list[str]:
    """The names in backticks of the first column of a table."""
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def structs() -> dict[str, type[msgspec.Struct]]:
    return {
        "splits": manifest.SplitEntry,
        "ancestors": manifest.Ancestor, "files": manifest.FileEntry,
    }  # fmt: skip


class TestTables:
    def test_manifest(self) -> None:
        text = section("2. `dataset.json`")
        assert first_column(text) == list(manifest.Manifest.__struct_fields__)
        for key, kind in structs().items():
            row = next(line for line in text.splitlines() if line.startswith("| ") and f"`{key}`" in line)
            stated = re.search(r"`[^`]*\{([^}]*)\}", row)
            assert stated is not None
            assert re.findall(r'"(\w+)"', stated[1]) == list(kind.__struct_fields__)
        assert f'`"{manifest.FORMAT}"`' in text
        assert f"| `version` | integer | `{manifest.FORMAT_VERSION}`;" in text

    def test_index(self) -> None:
        text = section("3. `index.arrow`")
        kinds = {"utf8": "string", "list of struct": None}
        for line, column in zip([x for x in text.splitlines() if x.startswith("| `")], index._COLUMNS, strict=True):
            name, kind = (cell.strip().strip("`") for cell in line.split("|")[1:3])
            assert name == column.name
            assert kinds.get(kind, kind) in (str(column.type), None)
        stated = re.search(r"`\{(name: int16[^}]*)\}`", text)
        assert stated is not None
        assert stated[1] == ", ".join(f"{f.name}: {f.type}" for f in index._MEMBER_TYPE)
        assert f"exactly {index.ROWS_PER_BATCH:,} rows" in text
        for key in (index._VERSION_KEY, index._NAMES_KEY, index._CODECS_KEY):
            assert f"`{key.decode()}`" in text

    @pytest.mark.parametrize(
        ("title", "schema"), [("`shards.arrow`", shards.SHARDS_SCHEMA), ("`keys.arrow`", keys._SCHEMA)]
    )
    def test_tables(self, title, schema) -> None:
        text = section(title)
        stated = [[cell.strip().strip("`") for cell in x.split("|")[1:3]] for x in text.splitlines() if x[:3] == "| `"]
        kinds = {"binary(32)": "fixed_size_binary[32]"}
        assert [(name, kinds.get(kind, kind)) for name, kind in stated] == [(f.name, str(f.type)) for f in schema]
        for key, value in schema.metadata.items():
            assert f"`{key.decode()}` = `{value.decode()}`" in text

    @pytest.mark.parametrize("kind", [schema.Geometry, schema.Boxes])
    def test_arrays(self, kind) -> None:
        text = section(f"`{kind.__name__.lower()}.safetensors`")
        names = {"|u1": "U8", "<i8": "I64", "<i4": "I32", "<f8": "F64", "<f4": "F32", "<i2": "I16", "|i1": "I8"}
        stated = {}
        for line in (x for x in text.splitlines() if x.startswith("| `")):
            cells = line.split("|")
            dtype, shape = cells[2].strip().split(" ", 1)
            for name in re.findall(r"`([^`]+)`", cells[1]):
                stated[name] = (dtype, re.findall(r"\w+", shape))
        assert stated == {
            name: (names[dtype.str], [str(n) for n in shape]) for name, dtype, shape in schema._SPECS[kind]
        }
        assert list(stated) == [f.name for f in fields(kind)]

    def test_meta(self) -> None:
        text = section("`meta.json`")
        stated = set(re.findall(r"`(\w+)`", text))
        assert stated >= set(schema.Meta.__struct_fields__)
        camera = re.search(r"`\{([^}]*)\}`", text)
        assert camera is not None
        assert re.findall(r'"(\w+)"', camera[1]) == list(schema.CameraMeta.__struct_fields__)
        assert f'"{schema.SCHEMA}"' in text

    def test_codecs_and_limits(self) -> None:
        text = section("5. Codecs")
        assert first_column(text) == ["raw", "zstd", "zstd-dict", "zstd-pR"]
        assert f"R is 1 to {codecs.MAX_ROW_BYTES}" in text
        caps = section("3. `index.arrow`")
        for cap, said in (
            (tar.MAX_KEY_BYTES, "`clip_id` | 512 bytes |"),
            (codecs.MAX_MEMBERS, "| members of a sample | 4,096 |"),
            (codecs.MAX_MEMBER_BYTES >> 20, "| size of a member, `raw_bytes` | 128 MiB |"),
            (codecs.member_cap("meta.json") >> 20, "`geometry.safetensors` | 1 MiB each |"),
            (codecs.member_cap("boxes.safetensors") >> 20, "`boxes.safetensors` | 4 MiB |"),
            (codecs.MAX_SAMPLE_BYTES >> 20, "that are not of codec `raw` | 512 MiB |"),
        ):
            assert said in caps
            assert f"{cap:,}" in said
        assert tar.MAX_STORED_BYTES == (8 << 30) - 1
        assert "at most 8 GiB less one byte" in section("4. Shards")


class PlainReader:
    """A reader written from FORMAT.md, with nothing of Fuelrail in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.manifest = json.loads((root / "dataset.json").read_bytes())
        assert (self.manifest["format"], self.manifest["version"]) == ("fuelrail-dataset", 1)
        left_out = ("name", "fingerprint", "seed", "order_unit", "license", "compression", "lineage", "provenance",
                    "digest")  # fmt: skip
        covered = {name: value for name, value in self.manifest.items() if name not in left_out}
        covered["files"] = [
            file for file in covered["files"] if file["name"] in ("shards.arrow", "index.arrow", "zstd.dict")
        ]
        canonical = json.dumps(covered, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        assert hashlib.sha256(canonical.encode()).hexdigest() == self.manifest["fingerprint"]
        check_files(root, self.manifest)
        self.shards = read_shards(root, self.manifest)
        with pa.memory_map(str(root / "index.arrow")) as source:
            table = pa.ipc.open_file(source).read_all()
            self.names = json.loads(table.schema.metadata[b"fuelrail.members"])
            self.codecs = json.loads(table.schema.metadata[b"fuelrail.codecs"])
            self.rows = table.to_pylist()

    def sample(self, position: int) -> tuple[str, dict[str, bytes]]:
        row = self.rows[position]
        shard = (self.root / self.shards[row["shard"]]["name"]).read_bytes()
        span = shard[row["offset"] : row["offset"] + row["length"]]
        assert xxhash.xxh3_64_intdigest(span) == row["xxh3"]
        members = {}
        for member in row["members"]:
            stored = span[member["offset"] : member["offset"] + member["stored_bytes"]]
            raw = self.decode(self.codecs[member["codec"]], stored)
            assert len(raw) == member["raw_bytes"]
            members[self.names[member["name"]]] = raw
        return row["key"], members

    @staticmethod
    def decode(codec: str, stored: bytes) -> bytes:
        if codec == "raw":
            return stored
        raw = zstandard.ZstdDecompressor().decompress(stored)
        if codec == "zstd":
            return raw
        r = int(codec.removeprefix("zstd-p"))
        n = len(raw)
        h, m = n % r, n // r
        unshuffled = bytearray(raw[:h] + bytes(n - h))
        for j in range(r):
            for i in range(m):
                unshuffled[h + j + r * i] = raw[h + j * m + i]
        return bytes(unshuffled)

    @staticmethod
    def tensors(data: bytes) -> dict[str, np.ndarray]:
        (length,) = struct.unpack("<Q", data[:8])
        dtypes = {"U8": "u1", "I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8", "F32": "<f4", "F64": "<f8"}
        return {
            name: np.frombuffer(data[8 + length :][slice(*entry["data_offsets"])], dtypes[entry["dtype"]]).reshape(
                entry["shape"]
            )
            for name, entry in json.loads(data[8 : 8 + length]).items()
        }


def test_a_reader_from_the_document_alone(tiny_dataset) -> None:
    root, raw = tiny_dataset({"train": (3, 2), "val": (2,)}, size=(32, 24), missing=frozenset({(1, "cam_back")}))
    reader = PlainReader(root)
    found = dict(reader.sample(i) for i in range(len(reader.rows)))
    assert found == raw
    key, members = reader.sample(1)
    ours = schema.decode_sample(key, members)
    for f in fields(ours.geometry):
        np.testing.assert_array_equal(
            reader.tensors(members["geometry.safetensors"])[f.name], getattr(ours.geometry, f.name)
        )
    assert json.loads(members["meta.json"])["key"] == key
    assert list(ours.geometry.cam_valid) == [1, 0]
    assert "cam_back.jpg" not in members


def test_n12_lens_models_and_the_order_of_their_coefficients() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", section("Lens models"), re.MULTILINE)
    stated = {name: len(words.split(", ")) for name, words in rows if name not in ("dist_model", "none")}
    assert stated == {name: lengths[-1] for name, (_, lengths) in MODELS.items()}
    assert (UNBENT, "none, all NaN") in rows
