"""FORMAT.md states the tables of the code. A reader written from it alone is in `tests/sharding/test_format.py`."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fuelrail.pipeline.format import codecs, manifest, tar
from fuelrail.pipeline.format.index import keys, shards
from fuelrail.pipeline.format.index import samples as index
from fuelrail.pipeline.sample import schema
from fuelrail.pipeline.transforms.lens import MODELS, UNBENT

if TYPE_CHECKING:
    import msgspec

DOCUMENT = (Path(__file__).resolve().parents[2] / "pipeline" / "format" / "FORMAT.md").read_text(
    encoding="utf-8"
)


def section(title: str) -> str:
    """The text from a heading that begins with ``title`` to the next heading of its depth or above."""
    match = re.search(
        rf"^(#+) {re.escape(title)}.*?$(.*?)(?=^#{{1,2}} |^### |\Z)",
        DOCUMENT,
        re.MULTILINE | re.DOTALL,
    )
    assert match is not None, title
    return match[2]


def first_column(text: str) -> list[str]:
    """The names in backticks of the first column of a table."""
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def structs() -> dict[str, type[msgspec.Struct]]:
    return {
        "splits": manifest.SplitEntry,
        "ancestors": manifest.Ancestor,
        "files": manifest.FileEntry,
    }


class TestTables:
    def test_manifest(self) -> None:
        text = section("2. `dataset.json`")
        assert first_column(text) == list(manifest.Manifest.__struct_fields__)
        for key, kind in structs().items():
            row = next(
                line for line in text.splitlines() if line.startswith("| ") and f"`{key}`" in line
            )
            stated = re.search(r"`[^`]*\{([^}]*)\}", row)
            assert stated is not None
            assert re.findall(r'"(\w+)"', stated[1]) == list(kind.__struct_fields__)
        assert f'`"{manifest.FORMAT}"`' in text
        assert f"| `version` | integer | `{manifest.FORMAT_VERSION}`;" in text

    def test_index(self) -> None:
        text = section("3. `index.arrow`")
        kinds = {"utf8": "string", "list of struct": None}
        for line, column in zip(
            [x for x in text.splitlines() if x.startswith("| `")],
            index._COLUMNS,
            strict=True,
        ):
            name, kind = (cell.strip().strip("`") for cell in line.split("|")[1:3])
            assert name == column.name
            assert kinds.get(kind, kind) in (str(column.type), None)
        prose = " ".join(text.split())
        stated = re.search(r"`\{(name: int16[^}]*)\}`", prose)
        assert stated is not None
        assert stated[1] == ", ".join(f"{f.name}: {f.type}" for f in index._MEMBER_TYPE)
        assert f"exactly {index.ROWS_PER_BATCH:,} rows" in prose
        for key in (index._VERSION_KEY, index._NAMES_KEY, index._CODECS_KEY):
            assert f"`{key.decode()}`" in text

    @pytest.mark.parametrize(
        ("title", "schema"),
        [
            ("`shards.arrow`", shards.SHARDS_SCHEMA),
            ("`keys.arrow`", keys._SCHEMA),
        ],
    )
    def test_tables(self, title, schema) -> None:
        text = section(title)
        stated = [
            [cell.strip().strip("`") for cell in x.split("|")[1:3]]
            for x in text.splitlines()
            if x[:3] == "| `"
        ]
        kinds = {"binary(32)": "fixed_size_binary[32]"}
        assert [(name, kinds.get(kind, kind)) for name, kind in stated] == [
            (f.name, str(f.type)) for f in schema
        ]
        for key, value in schema.metadata.items():
            assert f"`{key.decode()}` = `{value.decode()}`" in text

    @pytest.mark.parametrize("kind", [schema.Geometry, schema.Boxes])
    def test_arrays(self, kind) -> None:
        text = section(f"`{kind.__name__.lower()}.safetensors`")
        names = {
            "|u1": "U8",
            "<i8": "I64",
            "<i4": "I32",
            "<f8": "F64",
            "<f4": "F32",
            "<i2": "I16",
            "|i1": "I8",
        }
        stated = {}
        for line in (x for x in text.splitlines() if x.startswith("| `")):
            cells = line.split("|")
            dtype, shape = cells[2].strip().split(" ", 1)
            for name in re.findall(r"`([^`]+)`", cells[1]):
                stated[name] = (dtype, re.findall(r"\w+", shape))
        assert stated == {
            name: (names[dtype.str], [str(n) for n in shape])
            for name, dtype, shape in schema.ARRAYS[kind]
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
            (
                codecs.MAX_MEMBER_BYTES >> 20,
                "| size of a member, `raw_bytes` | 128 MiB |",
            ),
            (
                codecs.member_cap("meta.json") >> 20,
                "`geometry.safetensors` | 1 MiB each |",
            ),
            (
                codecs.member_cap("boxes.safetensors") >> 20,
                "`boxes.safetensors` | 4 MiB |",
            ),
            (
                codecs.MAX_SAMPLE_BYTES >> 20,
                "that are not of codec `raw` | 512 MiB |",
            ),
        ):
            assert said in caps
            assert f"{cap:,}" in said
        assert tar.MAX_STORED_BYTES == (8 << 30) - 1
        assert "at most 8 GiB less one byte" in " ".join(section("4. Shards").split())


def test_lens_models_and_the_order_of_their_coefficients() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", section("Lens models"), re.MULTILINE)
    stated = {
        name: len(words.split(", ")) for name, words in rows if name not in ("dist_model", "none")
    }
    assert stated == {name: lengths[-1] for name, (_, lengths) in MODELS.items()}
    assert (UNBENT, "none, all NaN") in rows
