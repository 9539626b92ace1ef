"""One corpus of bad bytes for the files of a dataset: any flip, any cut, any bytes, and rows of what is refused how."""

from __future__ import annotations

import io
import json
import random
import tarfile
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
import safetensors.numpy
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from fuelrail.pipeline.errors import (
    CodecError,
    FrameError,
    FuelrailError,
    IndexFileError,
    ManifestError,
    MemberError,
    SchemaError,
    ShardError,
    TarFormatError,
    TruncatedShardError,
)
from fuelrail.pipeline.format import codecs
from fuelrail.pipeline.format.dataset import open_dataset, read_members
from fuelrail.pipeline.format.index.samples import INDEX_FILE, SampleIndex
from fuelrail.pipeline.format.manifest import MANIFEST_FILE, decode_manifest
from fuelrail.pipeline.format.tar import (
    END_OF_ARCHIVE,
    StoredMember,
    iter_members,
    member_header,
    pack_sample,
)
from fuelrail.pipeline.format.zstd_frames import (
    encode_frame,
    encode_seek_table,
    read_seek_table,
)
from fuelrail.pipeline.sample.arrays import (
    read_npy,
    read_tensors,
    write_npy,
    write_tensors,
)
from fuelrail.pipeline.sample.schema import (
    BOXES,
    META,
    Boxes,
    Meta,
    decode_arrays,
    decode_meta,
)

if TYPE_CHECKING:
    from collections.abc import Callable

SHARD = "train-000000.tar"
FRAMED = "train-000000.tar.zst"
RAW = bytes(range(256)) * 2 + b"tail"


class Form(NamedTuple):
    """One kind of bytes: good ones, the reader, its errors, and what must hold of damaged bytes that it takes.

    ``frame`` leads any bytes past the first checks. The last ``may_miss`` bytes may be cut unseen. The bytes lie at
    ``place`` in their file.
    """

    good: bytes
    read: Callable[[bytes], Any]
    error: type[FuelrailError] | tuple[type[FuelrailError], ...]
    agrees: Callable[[Any, bytes], bool] = lambda content, damaged: True
    frame: Callable[[bytes], bytes] = bytes
    may_miss: int = 0
    place: int = 0


def same(ours: Any, theirs: Any) -> bool:
    """Equal arrays to the bit, one or several by name."""
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[name], theirs[name]) for name in ours)
    return (
        ours.dtype == theirs.dtype
        and ours.shape == theirs.shape
        and ours.tobytes() == theirs.tobytes()
    )


def add_header_size(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data


def npy(header: str, data: bytes = b"") -> bytes:
    return (
        b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode("latin-1") + data
    )


def write_npy_header(
    descr: str = "'<f4'",
    fortran_order: str = "False",
    shape: str = "(1,)",
    data: bytes = bytes(4),
) -> bytes:
    return npy(
        f"{{'descr': {descr}, 'fortran_order': {fortran_order}, 'shape': {shape}, }}\n",
        data,
    )


def foreign(name: str, form: int = tarfile.USTAR_FORMAT, **attributes: Any) -> bytes:
    """A tar of one header by Python's tarfile."""
    info = tarfile.TarInfo(name)
    info.mode = 0o644
    for attribute, value in attributes.items():
        setattr(info, attribute, value)
    return info.tobuf(form) + END_OF_ARCHIVE


def sized_in_header(name: str, size: bytes) -> bytes:
    """A tar whose first header states this size, with its checksum right."""
    header = member_header(name, 5)
    blank = header[:124] + size + header[135:148] + b" " * 8 + header[156:512]
    return (
        blank[:148]
        + b"%06o\0 " % sum(blank)
        + blank[156:]
        + header[512:]
        + bytes(512)
        + END_OF_ARCHIVE
    )


def tensors(data: bytes = b"", **entries: tuple[str, list[Any], int, int]) -> bytes:
    """A safetensors file of entries (dtype, shape, first byte, end)."""
    names = ("dtype", "shape", "data_offsets")
    header = {
        name: dict(zip(names, (*entry[:2], entry[2:]), strict=True))
        for name, entry in entries.items()
    }
    text = json.dumps(header).encode()
    return add_header_size(text + b" " * (-len(text) % 8)) + data


def rewrite_index(
    good: bytes,
    metadata: dict[bytes, bytes] | None = None,
    batch: pa.RecordBatch | None = None,
) -> bytes:
    """The index with other metadata or another batch, by pyarrow alone."""
    with pa.ipc.open_file(good) as file:
        table = file.read_all()
    batch = batch or table.to_batches()[0]
    sink = io.BytesIO()
    schema = batch.schema.with_metadata({**table.schema.metadata, **(metadata or {})})
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(batch.columns, schema=schema))
    return sink.getvalue()


def index_column(good: bytes, name: str, change: Callable[[pa.Array], pa.Array]) -> bytes:
    with pa.ipc.open_file(good) as file:
        batch = file.get_batch(0)
    number = batch.schema.get_field_index(name)
    return rewrite_index(
        good,
        batch=batch.set_column(number, batch.schema.field(number), change(batch.column(number))),
    )


def set_member_code(members: pa.ListArray, number: int, code: int) -> pa.Array:
    """The members with one field of all entries set to ``code``."""
    fields = [members.values.field(field_number) for field_number in range(6)]
    fields[number] = pa.array([code] * len(members.values), pa.int16())
    values = pa.StructArray.from_arrays(fields, fields=list(members.type.value_type))
    return pa.ListArray.from_arrays(members.offsets, values)


def pack_members(key: str, *members: tuple[str, bytes]) -> bytes:
    return b"".join(pack_sample(key, [StoredMember(*item) for item in members]).pieces)


def load_npy(data: bytes) -> Any:
    return np.load(io.BytesIO(bytes(data)), allow_pickle=False)


def load_tensors(data: bytes) -> Any:
    return safetensors.numpy.load(bytes(data))


@pytest.fixture(scope="module")
def forms(tiny_dataset, tmp_path_factory) -> dict[str, Form]:
    root, raw = tiny_dataset({"train": (4, 3)}, size=(32, 24), layout="frame")
    members = raw["clip-0000-000003"]
    folder = tmp_path_factory.mktemp("index")

    def read_index(data: bytes) -> list[Any]:
        (folder / INDEX_FILE).write_bytes(data)
        index = SampleIndex(folder / INDEX_FILE)
        assert len(index.strings("key")) == len(index.column("xxh3"))
        return [index.row(row_number) for row_number in range(len(index))]

    def read_zstd(codec: str, promise: int | None) -> Callable[[bytes], bytes]:
        return lambda data: codecs.decode(codec, data, promise)

    dataset = open_dataset(root)
    shard = (root / FRAMED).read_bytes()
    row = dataset.index.row(1)
    span = shard[row.offset : row.offset + row.length]
    manifest = (root / MANIFEST_FILE).read_bytes()
    table = read_seek_table(shard, shard=FRAMED)
    end = table[-1].offset + table[-1].stored_bytes
    arrays = {
        "points": np.arange(6, dtype="<f4").reshape(2, 3),
        "n": np.array([7]),
        "none": np.zeros((0, 7)),
    }
    tar = pack_members(
        "clip-0",
        ("meta.json", b"{}"),
        ("x_" + "n" * 120 + ".bin", b"n"),
        ("x_empty.bin", b""),
    )
    forms_by_name = {
        "tensors": Form(
            good=write_tensors(arrays),
            read=read_tensors,
            error=SchemaError,
            agrees=lambda content, data: same(content, load_tensors(data)),
            frame=add_header_size,
        ),
        "npy": Form(
            good=write_npy(np.arange(10, dtype="<f4").reshape(2, 5)),
            read=read_npy,
            error=SchemaError,
            agrees=lambda content, data: same(content, load_npy(data)),
            frame=lambda data: npy(data.decode("latin-1")),
        ),
        "meta": Form(
            members[META],
            decode_meta,
            SchemaError,
            lambda content, _: isinstance(content, Meta),
        ),
        "boxes": Form(
            good=members[BOXES],
            read=lambda data: decode_arrays(data, Boxes),
            error=SchemaError,
            agrees=lambda content, _: content.boxes3d.shape == (3, 7),
            frame=add_header_size,
        ),
        "manifest": Form(
            manifest,
            lambda data: decode_manifest(bytes(data), "here"),
            ManifestError,
            lambda content, _: content == decode_manifest(manifest, "here"),
            may_miss=1,
        ),
        "tar": Form(
            tar + pack_members("clip-1", ("meta.json", b"[" * 513)) + END_OF_ARCHIVE,
            lambda data: list(iter_members(data, shard=SHARD)),
            ShardError,
        ),
        "frame": Form(
            span,
            lambda data: read_members(row, data, FRAMED),
            (ShardError, IndexFileError),
            lambda content, _: content == read_members(row, span, FRAMED),
            place=row.offset,
        ),
        "seek table": Form(
            shard,
            lambda data: read_seek_table(data, shard=FRAMED),
            ShardError,
            lambda content, data: content != table or data[:end] != shard[:end],
        ),
        "index": Form((root / INDEX_FILE).read_bytes(), read_index, IndexFileError),
    }
    for codec in (codecs.ZSTD, "zstd-p1", "zstd-p20"):
        for promise in (None, len(RAW)):
            read = read_zstd(codec, promise)
            good = bytes(codecs.encode(codec, RAW))
            forms_by_name[f"{codec} {promise}"] = Form(
                good,
                read,
                MemberError,
                lambda content, _, size=promise: size in (None, len(content)),
            )
    return forms_by_name


ZSTD = [
    f"{codec} {promise}"
    for codec in ("zstd", "zstd-p1", "zstd-p20")
    for promise in (None, len(RAW))
]
FORMS = [
    "tensors",
    "npy",
    "meta",
    "boxes",
    "manifest",
    "tar",
    "frame",
    "seek table",
    "index",
    *ZSTD,
]


def check(form: Form, data: bytes, *, must_fail: bool = False) -> None:
    """Read bad bytes: an error with a text, of a shard with its place, or what may be read of them."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy on dtypes it will drop
            content = form.read(data)
    except form.error as error:
        assert str(error)
        if isinstance(error, ShardError):
            assert error.shard in (SHARD, FRAMED)
            assert error.offset is not None
            assert form.place <= error.offset <= form.place + len(data)
    else:
        assert not must_fail, f"{len(data)} of {len(form.good)} bytes were taken"
        assert form.agrees(content, data)


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=60)
@given(st.data())
def test_a_flipped_byte_is_an_error_or_read_as_others_read_it(forms, name, data) -> None:
    damaged = bytearray(forms[name].good)
    end = len(forms[name].good) - 1
    damaged[data.draw(st.integers(0, end) | st.integers(max(0, end - 60), end))] ^= data.draw(
        st.integers(1, 255)
    )
    check(forms[name], bytes(damaged))


@pytest.mark.slow
def test_a_third_of_all_flips_of_an_index_never_end_the_process(forms) -> None:
    good = forms["index"].good
    rng = random.Random(7)
    for position in rng.sample(range(len(good)), len(good) // 3):
        check(
            forms["index"],
            good[:position]
            + bytes([good[position] ^ rng.randrange(1, 256)])
            + good[position + 1 :],
        )


@pytest.mark.parametrize("name", FORMS)
def test_cut_bytes_are_refused_wherever_they_are_cut(forms, name) -> None:
    """Choose at most some 300 places, which differ by an odd number of bytes, and the last ones."""
    end = len(forms[name].good) - forms[name].may_miss
    for length in {
        *range(0, end, end // 300 | 1),
        *range(max(0, end - 9), end),
    }:
        check(forms[name], forms[name].good[:length], must_fail=True)


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=60)
@given(st.binary(max_size=80) | st.binary(max_size=1500), st.booleans())
def test_any_bytes_are_an_error_or_read_as_others_read_it(forms, name, data, framed) -> None:
    form = forms[name]
    try:
        form.read(form.frame(data) if framed else data)
    except form.error as error:
        assert str(error)


HOLE = "hole or an overlap"
WIDE = pa.record_batch({"key": ["a"]})
NO_LIST = "no list fuelrail."
NO_NAME = "no such name or codec"
HELLO = zstandard.ZstdCompressor(write_content_size=False).compress(b"hello")

ROWS: list[tuple[str, bytes | Callable[[bytes], bytes], type[FuelrailError], str]] = [
    *(
        ("tensors", data, SchemaError, words)
        for data, words in (
            (b"", "too few"),
            (bytes(7), "too few"),
            (add_header_size(b"[]      "), "must be a mapping; got "),
            (add_header_size(b"{a}"), "malformed"),
            (
                (1 << 40).to_bytes(8, "little") + b"{}",
                "header of 1099511627776 bytes",
            ),
            (
                (9).to_bytes(8, "little") + b"{}",
                "header of 9 bytes in a buffer of 10",
            ),
            (
                add_header_size(b'{"__metadata__": {"a": "b"}}'),
                "the field 'a' is unknown; allowed here: dtype, shape",
            ),
            (
                add_header_size(
                    b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1], "x": 1}}'
                )
                + b"a",
                "the field 'x' is unknown; allowed here: dtype, shape",
            ),
            (tensors(b"x", a=("F4", [], 0, 1)), "dtype 'F4'; known: BOOL, U8"),
            (
                tensors(b"x", a=("U8", [1], 0, 1), b=("U8", [1], 0, 1)).replace(b'"b"', b'"a"'),
                "'a' occurs twice",
            ),
            (
                add_header_size(
                    b'{"a": {"dtype": "U8", "dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}'
                )
                + b"a",
                "'dtype' occurs twice",
            ),
            (tensors(b"abc", a=("U8", [2], 1, 3)), HOLE),
            (tensors(b"ab", a=("U8", [2], 0, 2), b=("U8", [2], 0, 2)), HOLE),
            (
                tensors(b"ab", a=("U8", [2], -2, 0)),
                "at 'a.data_offsets[0]': must be a whole number from 0 to",
            ),
            (
                tensors(b"abc", a=("U8", [2], 0, 2)),
                "the tensors end at byte 74 of a buffer of 75",
            ),
            (
                tensors(b"abc", a=("U8", [4], 0, 4)),
                "the tensors end at byte 76 of a buffer of 75",
            ),
            (
                tensors(b"ab", a=("U8", [3], 0, 2)),
                "U8[3] does not fit bytes 0 to 2",
            ),
            (
                tensors(b"abcd", a=("F32", [-1, -1], 0, 4)),
                "at 'a.shape[0]': must be a whole number from 0 to",
            ),
            (tensors(a=("U8", [0, 1 << 62, 4], 0, 0)), "U8[0, 4611"),
            (tensors(a=("U8", [0, 10**30], 0, 0)), "shape[1]"),
            (
                tensors(b"a", a=("U8", [1] * 65, 0, 1)),
                "maximum supported dimension",
            ),
            (tensors(a=("U8", [1], 0, 10**30)), "header"),
            (
                tensors(a=("U8", ["9" * 5000], 0, 1)).replace(b'"999', b"999").replace(b'9"', b"9"),
                "safetensors header",
            ),
        )
    ),
    *(
        ("npy", data, SchemaError, ".npy")
        for data in (
            b"",
            b"\x93NUMPY\x01\x00\x00",
            b"\x93NUMPY\x02\x00" + bytes(20),
            npy(""),
            npy("[1]"),
            npy("{}"),
            npy("{'descr': '<f4', 'shape': (1,)}", bytes(4)),
            write_npy_header("'|O'", data=bytes(8)),
            write_npy_header("[('a', '|O')]"),
            write_npy_header("None", shape="(0,)"),
            write_npy_header("'|S0'", data=b""),
            write_npy_header("'no type'"),
            write_npy_header("'<f4' '"),
            write_npy_header(fortran_order="True"),
            write_npy_header(fortran_order="0"),
            write_npy_header(shape="[1]"),
            write_npy_header(shape="1"),
            write_npy_header(shape="(True,)"),
            write_npy_header(shape="(-1,)"),
            write_npy_header(shape="(1.0,)"),
            write_npy_header(shape="(2,)"),
            write_npy_header(data=bytes(8)),
            write_npy_header(shape=f"({10**30},)"),
            write_npy_header(shape=f"(0, {10**30})", data=b""),
            write_npy_header(shape="(" + "1," * 70 + ")"),
            npy("-" * 9_000 + "1"),
            npy("(" * 9_000),
            npy("__import__('os').getcwd()"),
            npy(" " * 20_000, bytes(4)),
            b"\x93NUMPY\x01\x00\xff\xff" + write_npy_header()[10:],
        )
    ),
    *(
        ("meta", data, SchemaError, words)
        for data, words in (
            (b"", "truncated"),
            (b"{", "truncated"),
            (b"[]", "must be a mapping; got "),
            (b"null", "must be a mapping; got "),
            (b"\xff", "malformed"),
            (b'{"schema": "\xff"}', "utf"),
            (
                b'{"tags":' + b"[" * 100_000,
                "it must be a mapping, not a list (at 'tags')",
            ),
            (
                lambda good: edit_json(good, schema="fuelrail/2"),
                "schema 'fuelrail/2'; this version reads 'fuelrail/1'",
            ),
            (
                lambda good: edit_json(good, frame_idx="1"),
                "at 'frame_idx': must be a whole number from 0 to 2147483647; got the text '1'",
            ),
            (
                lambda good: edit_json(good, timestamp_ns=1.5),
                "at 'timestamp_ns': must be a whole number",
            ),
            (
                lambda good: edit_json(good, cameras={"cam_front": {"token": "t"}}),
                "at 'cameras.cam_front': the field 'timestamp_ns' is missing; allowed here: token,",
            ),
        )
    ),
    *(
        (
            "tar",
            lambda good, more=more: good + more,
            TarFormatError,
            "bytes after the end",
        )
        for more in (b"x", bytes(1), bytes(512), bytes(9216), END_OF_ARCHIVE)
    ),
    *(
        ("tar", data, TarFormatError, "offset 0")
        for data in (
            foreign("a.b", mode=0o600),
            foreign("a.b", mtime=1),
            foreign("a.b", uid=1000),
            foreign("a.b", gname="users"),
            foreign("a.b", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
            foreign("a.b", type=tarfile.DIRTYPE),
            foreign("a.b", type=tarfile.LNKTYPE, linkname="c.d"),
            foreign("a.b", type=tarfile.CHRTYPE),
            foreign("a.b", type=tarfile.GNUTYPE_LONGNAME),
            foreign("d" * 90 + "/" + "f" * 90),
            foreign("n" * 150, tarfile.GNU_FORMAT),
            foreign("ä.b", tarfile.GNU_FORMAT),
            foreign("n" * 150, tarfile.PAX_FORMAT, mtime=1.5),
            foreign("n" * 150, tarfile.PAX_FORMAT, pax_headers={"comment": "more"}),
            b"x" * 512 + END_OF_ARCHIVE,
        )
    ),
    *(
        ("tar", sized_in_header(name, size), ShardError, SHARD)
        for name in ("a.b", "n" * 150)
        for size in (
            b"-0000000001",
            b"77777777777",
            b"0_000000001",
            b"00000000x00",
            b"\x80" + bytes(10),
        )
    ),
    *(
        ("frame", data, FrameError, "sample clip-0000-000001)")
        for data in (
            b"",
            lambda good: good[:3],
            lambda good: good[: len(good) // 2],
            lambda good: good + b"\0",
            lambda good: good + good,
            lambda good: b"PK" + good[2:],
            encode_seek_table([(1, 1)]),
            encode_frame(bytes(512), 3),
            zstandard.ZstdCompressor(write_content_size=False).compress(bytes(512)),
        )
    ),
    (
        "frame",
        zstandard.ZstdCompressor().compress(bytes(1 << 24)),
        FrameError,
        "states 16777216 bytes, wanted are",
    ),
    (
        "seek table",
        lambda good: good[:-1] + b"\0",
        TruncatedShardError,
        "no seek table at the end",
    ),
    (
        "seek table",
        lambda good: good[:-5] + b"\1" + good[-4:],
        FrameError,
        "frames, descriptor 1",
    ),
    (
        "seek table",
        lambda good: good[:-9] + bytes([good[-9] + 1]) + good[-8:],
        FrameError,
        "its footer says",
    ),
    (
        "seek table",
        b"abcd" + encode_seek_table([(3, 1)]),
        FrameError,
        "the seek table's frames end at 3, not at 4",
    ),
    *(
        (
            name,
            lambda good, more=more: good + (more or good),
            CodecError,
            "unused data",
        )
        for name in ZSTD
        for more in (b"x", b"")
    ),
    *((name, HELLO, CodecError, "does not state its content size") for name in ZSTD),
    *(
        (
            name,
            bytes(codecs.encode("zstd", b"12345")),
            CodecError,
            "the index promises 516",
        )
        for name in ZSTD[1::2]
    ),
    *(
        (
            "index",
            lambda good, new=metadata: rewrite_index(good, new),
            IndexFileError,
            words,
        )
        for metadata, words in (
            (
                {b"fuelrail.index.version": b"2"},
                "has version 2; this Fuelrail reads 1",
            ),
            ({b"fuelrail.index.version": b"\xff"}, "has version"),
            ({b"fuelrail.members": b"{}"}, NO_LIST + "members"),
            ({b"fuelrail.members": b"[1]"}, NO_LIST + "members"),
            ({b"fuelrail.codecs": b"["}, NO_LIST + "codecs"),
            (
                {b"fuelrail.codecs": b'["raw", "lzma"]'},
                "unknown codec 'lzma'; known: raw, zstd",
            ),
            ({b"fuelrail.members": b'["meta.json"]'}, NO_NAME),
            ({b"fuelrail.codecs": b"[]"}, NO_NAME),
        )
    ),
    (
        "index",
        lambda good: rewrite_index(good, batch=WIDE),
        IndexFileError,
        "columns other than version 1 prescribes",
    ),
    *(
        (
            "index",
            lambda good, args=(number, code): index_column(
                good, "members", lambda old: set_member_code(old, *args)
            ),
            IndexFileError,
            NO_NAME,
        )
        for number in (0, 1)
        for code in (-1, -2, 99, 32767)
    ),
    (
        "index",
        lambda good: index_column(
            good,
            "offset",
            lambda old: pa.array([None, *old[1:].to_pylist()], pa.int64()),
        ),
        IndexFileError,
        "damaged at record batch 0",
    ),
]


def edit_json(good: bytes, **changes: Any) -> bytes:
    return json.dumps({**json.loads(good), **changes}).encode()


@pytest.mark.parametrize(
    ("name", "make", "error", "words"),
    ROWS,
    ids=[f"{n}-{row[0]}" for n, row in enumerate(ROWS)],
)
def test_bad_bytes_are_refused_with_their_words(forms, name, make, error, words) -> None:
    form = forms[name]
    with pytest.raises(error) as caught:
        form.read(make(form.good) if callable(make) else make)
    assert words in str(caught.value)
