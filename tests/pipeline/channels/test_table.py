"""The table of channels: what does not hold together is refused by name, kinds give back what they were given."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint
from typing import Any

import cv2
import msgspec
import numpy as np
import pytest

from fuelrail.pipeline.channels import kinds, plugins
from fuelrail.pipeline.channels.kinds import KINDS, Kind, Packed
from fuelrail.pipeline.channels.laws import LAWS, LawCode
from fuelrail.pipeline.channels.selection import (
    broken_table,
    check_members,
    decode_values,
    select,
)
from fuelrail.pipeline.channels.sensors import (
    BOXES_CHANNEL,
    CameraEntry,
    LidarEntry,
    camera_channel,
    lidar_channel,
)
from fuelrail.pipeline.channels.table import ArraySpec, Channel, Law, Vocabulary
from fuelrail.pipeline.errors import (
    ConfigError,
    ImageError,
    ManifestError,
    SchemaError,
)
from fuelrail.pipeline.limits import UNTYPED
from fuelrail.pipeline.sample.arrays import write_npy

CAMERA = camera_channel(CameraEntry(channel="cam", source_name="CAM", sizes=((6, 4),)))
LIDAR = lidar_channel(LidarEntry(channel="lidar", source_name="LIDAR", columns=("x", "y", "z")))
FIXED = Law("fixed")
POINTS: dict[str, Any] = {
    "kind": "points",
    "dtype": "float32",
    "axes": ("point", "column"),
    "shape": (None, 3),
    "columns": ("x", "y", "v"),
}
ARRAY: dict[str, Any] = {
    "kind": "array",
    "dtype": "int16",
    "axes": ("x", "y"),
    "shape": (2, 3),
}
MASK: dict[str, Any] = {
    "kind": "image",
    "dtype": "uint16",
    "axes": ("height", "width"),
    "shape": (None, None),
}
BOXES2D: dict[str, Any] = {
    "kind": "ragged",
    "arrays": (ArraySpec("box", "float32", (4,)), ArraySpec("id", "int32")),
}
TOKENS: dict[str, Any] = {
    "kind": "tokens",
    "dtype": "int32",
    "axes": ("token",),
    "shape": (None,),
    "vocabulary": Vocabulary("v", 9),
}
EXTENSION = {
    "image": "png",
    "ragged": "safetensors",
    "text": "txt",
    "texts": "json",
    "bytes": "bin",
}


def channel(facts: dict[str, Any], law: Law = FIXED, **changes: Any) -> Channel:
    facts = {"name": "it", **facts, **changes}
    extension = EXTENSION.get(facts["kind"], "npy")
    return Channel(**{"field": f"{facts['name']}.{extension}", "law": law, **facts})


def texts(*channels: Channel, known_only: bool = False) -> str:
    return "; ".join(broken_table((CAMERA, LIDAR, *channels), known_only=known_only))


IN_EGO = {"frame": "ego"}
GRID = Law("ego_grid", extent_m=(-1.0, -1.0, 1.0, 1.0))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (
            channel(POINTS, kind="voxels", field="it.npy"),
            "'it': its kind 'voxels' is unknown; known: image, points, array",
        ),
        (
            channel(POINTS, Law("ego_flow")),
            "'it': its law 'ego_flow' is unknown; known: fixed, image, image_points",
        ),
        (
            channel(MASK, Law("image")),
            "law 'image' needs its camera: give law.camera",
        ),
        (
            channel(MASK, Law("image", camera="rear")),
            "names the camera 'rear'; the table has: cam",
        ),
        (
            channel(MASK, Law("image", camera="lidar")),
            "names the camera 'lidar'; the table has: cam",
        ),
        (
            channel(MASK, Law("image", camera="cam"), frame="image:rear"),
            "law 'image' of camera 'cam' needs the frame 'image:cam'; it is 'image:rear'",
        ),
        (
            channel(MASK, Law("image", camera="cam", fraction=0)),
            "fraction 0 must be 1 or more",
        ),
        (
            channel(ARRAY, Law("image", camera="cam")),
            "with the axes height, width first; not ['x', 'y']",
        ),
        (
            channel(MASK, dtype="float32"),
            "dtype 'float32' must be uint8, or uint16 as PNG",
        ),
        (channel(MASK, name="cam"), "'cam': the name occurs twice"),
        (channel(MASK, name="Cam"), "channel name 'Cam' does not match"),
        (
            channel(MASK, field="other.png"),
            "field 'other.png' must be the channel's name",
        ),
        (
            channel(MASK, field="it.pkl"),
            "field 'it.pkl' of kind 'image' must end with one of png, jpg",
        ),
        (
            channel({"kind": "bytes"}, field="it.pt"),
            "must end with one of aac, avif, bin",
        ),
        (channel(ARRAY, dtype="complex64"), "dtype 'complex64' is unknown"),
        (channel(ARRAY, dtype=""), "dtype is missing"),
        (channel(ARRAY, shape=(2, None)), "must be fixed"),
        (channel(ARRAY, shape=(2, 0)), "must have sides from 1"),
        (channel(ARRAY, shape=(2,)), "2 axes and a shape of 1"),
        (channel(ARRAY, axes=("x", "x")), "axes x, x must differ"),
        (channel(POINTS, columns=("x", "y")), "must end with the 2 columns"),
        (
            channel(POINTS, columns=("x", "y", "x")),
            "columns x, y, x must differ",
        ),
        (
            channel(POINTS, units=("m", "m")),
            "2 units: give one for all values, or one for each of 3 columns",
        ),
        (channel(POINTS, shape=(5, 3)), "must be [null, C]"),
        (channel(POINTS, frame="moon"), "frame 'moon' is unknown"),
        (channel(BOXES2D, arrays=()), "arrays must name at least one array"),
        (
            channel(BOXES2D, dtype="int8"),
            "dtype, shape and columns are in its arrays",
        ),
        (
            channel(BOXES2D, arrays=2 * (ArraySpec("a", "int8"),)),
            "arrays a, a must differ",
        ),
        (
            channel(BOXES2D, arrays=(ArraySpec("a", "void"),)),
            "array 'a' has the unknown dtype 'void'",
        ),
        (
            channel(TOKENS, dtype="float32"),
            "dtype 'float32' must be one of integers",
        ),
        (
            channel(TOKENS, vocabulary=None),
            "vocabulary must name the vocabulary and its size",
        ),
        (
            channel(BOXES2D, Law("image_points", camera="cam")),
            "needs a role 'points' or 'boxes'",
        ),
        (
            channel(
                BOXES2D,
                Law("image_points", camera="cam", roles={"boxes": (("id",),)}),
            ),
            "has 1 columns in ['id']",
        ),
        (
            channel(
                BOXES2D,
                Law("image_points", camera="cam", roles={"boxes": (("no",),)}),
            ),
            "names ['no']; a group of",
        ),
        (
            channel(
                POINTS,
                Law("ego_points", roles={"vectors": (("x", "w"),)}),
                **IN_EGO,
            ),
            "names the columns ['w']",
        ),
        (
            channel(
                POINTS,
                Law("ego_points", roles={"speeds": (("x", "y"),)}),
                **IN_EGO,
            ),
            "has no role 'speeds'; known",
        ),
        (
            channel(
                POINTS,
                Law("ego_points", roles={"vectors": (("x", "y"),)}),
                dtype="int16",
                **IN_EGO,
            ),
            "role 'vectors' needs floats",
        ),
        (
            channel(POINTS, Law("ego_points"), **IN_EGO),
            "needs a role 'positions' or 'vectors'",
        ),
        (
            channel(BOXES2D, Law("ego_boxes"), **IN_EGO),
            "needs a role 'boxes' or 'vectors' or 'rotations'",
        ),
        (
            channel(
                POINTS,
                Law(
                    "ego_points",
                    roles={
                        "positions": (("x", "y"),),
                        "vectors": (("y", "z"),),
                    },
                ),
                **IN_EGO,
            ),
            "roles name ['y'] twice",
        ),
        (
            channel(MASK, Law("image", camera="cam", fill=65536.0)),
            "fill 65536.0 must be finite and a value of dtype",
        ),
        (
            channel(
                ARRAY,
                msgspec.structs.replace(GRID, fill=float("nan")),
                **IN_EGO,
            ),
            "fill nan must be finite",
        ),
        (
            channel(ARRAY, msgspec.structs.replace(GRID, fill=1e39), **IN_EGO),
            "fill 1e+39 must be finite and a value",
        ),
        (
            channel(POINTS, Law("ego_points")),
            "needs the frame 'ego' or that of a lidar of the table; it is None",
        ),
        (
            channel(POINTS, Law("ego_points"), frame="sensor:radar"),
            "it is 'sensor:radar'",
        ),
        (
            channel(ARRAY, GRID),
            "law 'ego_grid' needs the frame 'ego'; it is None",
        ),
        (
            channel(ARRAY, GRID, axes=("x", "z"), **IN_EGO),
            "with the axes x and y (and z); not ['x', 'z']",
        ),
        (
            channel(ARRAY, Law("ego_grid"), **IN_EGO),
            "extent_m [] must have 4 finite borders in m",
        ),
        (
            channel(ARRAY, Law("ego_grid", extent_m=(0.0, 0.0, 0.0, 1.0)), **IN_EGO),
            "is empty",
        ),
        (
            channel(ARRAY, Law("ego_poses"), **IN_EGO),
            "without roles moves 4x4 matrices of floats",
        ),
    ],
)
def test_what_does_not_hold_together_is_refused_by_name(wrong, says) -> None:
    assert says in texts(wrong)


def test_a_sound_table_is_taken_and_survives_json() -> None:
    lidar_labels = channel(
        POINTS,
        Law("ego_points", roles={"positions": (("x", "y"),)}),
        frame="sensor:lidar",
    )
    grid = channel(ARRAY, GRID, name="grid", **IN_EGO)
    mask = channel(MASK, Law("image", camera="cam"), name="mask", optional=True)
    table = (CAMERA, LIDAR, BOXES_CHANNEL, lidar_labels, grid, mask)
    assert list(broken_table(table)) == []
    encoded = msgspec.json.encode(table)
    assert msgspec.json.decode(encoded, type=tuple[Channel, ...]) == table
    assert msgspec.json.encode(msgspec.json.decode(encoded, type=tuple[Channel, ...])) == encoded


def test_an_unknown_kind_or_law_is_refused_unless_it_is_not_selected() -> None:
    new = channel(POINTS, name="new", kind="voxels", field="new.npy")
    table = (CAMERA, channel(ARRAY), new)
    assert list(broken_table(table, known_only=True)) == []
    assert [entry.name for entry in select(table, ["it", "cam"], "here")] == [
        "cam",
        "it",
    ]
    with pytest.raises(
        ManifestError,
        match=r"'here': channel 'new': its kind 'voxels' is unknown; known: .*leave it out",
    ):
        select(table, ["new"], "here")
    with pytest.raises(ConfigError, match="'here' has no channel 'none'; it has: cam, it, new"):
        select(table, ["none"], "here")


VALUES = [
    (channel(POINTS), np.arange(12, dtype=np.float32).reshape(4, 3)),
    (channel(POINTS), np.empty((0, 3), np.float32)),
    (channel(ARRAY), np.arange(6, dtype=np.int16).reshape(2, 3)),
    (
        channel(ARRAY, dtype="float16", allows_nan=True),
        np.array([[1, np.nan, 3], [4, 5, 6]], np.float16),
    ),
    (channel(MASK), np.arange(24, dtype=np.uint16).reshape(4, 6) * 2700),
    (channel(MASK, dtype="uint8"), np.arange(24, dtype=np.uint8).reshape(4, 6)),
    (
        channel(
            MASK,
            shape=(None, None, 3),
            axes=("height", "width", "colour"),
            dtype="uint8",
        ),
        np.random.default_rng(0).integers(0, 256, (4, 6, 3)).astype(np.uint8),
    ),
    (
        channel(MASK, shape=(None, None, 3), axes=("height", "width", "colour")),
        np.random.default_rng(0).integers(0, 65536, (4, 6, 3)).astype(np.uint16),
    ),
    (channel(TOKENS), np.array([0, 8, 3], np.int32)),
    (
        channel(BOXES2D),
        {"box": np.ones((2, 4), np.float32), "id": np.array([7, 9], np.int32)},
    ),
    (channel({"kind": "text"}), "Straße, Regen"),
    (channel({"kind": "texts"}), ["Straße, Regen", "", '"quoted",\n']),
    (channel({"kind": "texts"}), []),
    (channel({"kind": "bytes"}), b"\x00\x01"),
]


@pytest.mark.parametrize(("entry", "value"), VALUES, ids=lambda value: getattr(value, "kind", ""))
def test_a_kind_gives_back_what_it_was_given(entry, value) -> None:
    kind = KINDS[entry.kind]
    assert list(kind.broken(entry)) == []
    data = kind.encode(value, entry)
    kind.check(data, entry)
    decoded = kind.decode(memoryview(data), entry)
    np.testing.assert_equal(decoded, value)
    if isinstance(value, np.ndarray):
        assert decoded.dtype == value.dtype
    assert kind.encode(decoded, entry) == data


@pytest.mark.parametrize(
    ("entry", "value", "says"),
    [
        (
            channel(POINTS),
            np.ones((2, 4), np.float32),
            r"float32\[2, 4\]; the table has float32\[any, 3\]",
        ),
        (channel(POINTS), np.ones((2, 3)), "is float64"),
        (
            channel(POINTS),
            np.full((2, 3), np.nan, np.float32),
            r"NaN at \[0, 0\]; the table of channel 'it' forbids it: remove it, or set allows_nan there",
        ),
        (
            channel(POINTS, allows_nan=True),
            np.full((2, 3), np.inf, np.float32),
            "an infinity at",
        ),
        (
            channel(TOKENS),
            np.array([9], np.int32),
            "tokens of channel 'it' are 9 to 9; vocabulary 'v' has 0 to 8",
        ),
        (
            channel(BOXES2D),
            {"box": np.ones((2, 4), np.float32)},
            "has the arrays box; the table has box, id",
        ),
        (
            channel(BOXES2D),
            {"box": np.ones((2, 4), np.float32), "id": np.ones(3, np.int32)},
            r"have the lengths \[2, 3\]",
        ),
        (
            channel(BOXES2D),
            {
                "box": np.full((1, 4), np.inf, np.float32),
                "id": np.ones(1, np.int32),
            },
            "an infinity at",
        ),
        (channel(MASK), np.ones((2, 2), np.uint8), "is uint8"),
        (
            channel({"kind": "texts"}),
            "one",
            "is 'one'; kind 'texts' takes a list of str",
        ),
        (
            channel({"kind": "texts"}),
            ["one", 2],
            "kind 'texts' takes a list of str",
        ),
        (channel({"kind": "texts"}), ["\ud800"], "cannot be stored as UTF-8"),
    ],
)
def test_a_value_that_is_not_as_the_table_says_is_refused(entry, value, says) -> None:
    with pytest.raises(SchemaError, match=says):
        KINDS[entry.kind].encode(value, entry)


FREE = {"allows_nan": True, "allows_inf": True}
TWO = (
    ArraySpec(name="a", dtype="float32"),
    ArraySpec(name="b", dtype="float64"),
)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("entry", "make"),
    [
        (
            channel(POINTS),
            lambda x: np.array([[0, 1, 2], [3, x, 5]], np.float32),
        ),
        (
            channel(ARRAY, dtype="float16"),
            lambda x: np.array([[60000, 60000, x], [1, 2, 3]], np.float16),
        ),
        (
            channel(ARRAY, dtype="float64"),
            lambda x: np.array([[1e308, 1e308, x], [1, 2, 3]], np.float64),
        ),
        (
            channel({"kind": "ragged", "field": "it.safetensors"}, arrays=TWO),
            lambda x: {"a": np.ones(3, np.float32), "b": np.array([1, x, 1.0])},
        ),
    ],
)
def test_values_that_the_table_forbids_are_not_handed_out(entry, make, wrong) -> None:
    """A stranger has written them: a loader decodes, and does not check besides."""
    kind = KINDS[entry.kind]
    data = kind.encode(make(1), entry)
    assert kind.decode(data, entry) is not None
    data = kind.encode(make(wrong), msgspec.structs.replace(entry, **FREE))
    assert kind.decode(data, msgspec.structs.replace(entry, **FREE)) is not None
    with pytest.raises(SchemaError, match="the table of channel 'it' forbids it"):
        kind.decode(data, entry)
    with pytest.raises(SchemaError, match="forbids it") as error:
        decode_values({entry.field: data}, [entry], "k")
    assert (error.value.key, error.value.member) == ("k", entry.field)


def test_tokens_beyond_the_vocabulary_are_not_handed_out() -> None:
    data = write_npy(np.array([0, 9], np.int32))
    with pytest.raises(SchemaError, match="vocabulary 'v' has 0 to 8"):
        KINDS["tokens"].decode(data, channel(TOKENS))


def test_lists_of_texts_are_limited_as_a_text_becomes_an_object(
    monkeypatch,
) -> None:
    entry = channel({"kind": "texts"})
    monkeypatch.setattr(kinds, "UNTYPED", UNTYPED._replace(maximum=100))
    assert KINDS["texts"].decode(KINDS["texts"].encode(["a"] * 24, entry), entry) == ["a"] * 24
    with pytest.raises(SchemaError, match="takes 101 bytes when it is decoded"):
        KINDS["texts"].encode(["a"] * 25, entry)
    with pytest.raises(SchemaError, match="takes 101 bytes when it is decoded"):
        KINDS["texts"].decode(b" " * 101, entry)


@pytest.mark.parametrize(
    "data",
    [
        b"[1]",
        b'"one"',
        b'["a"',
        b'["\xff"]',
        b'["a"] "b"',
        b"[null]",
        b"",
        b'["\\ud800"]',
    ],
)
def test_what_is_not_a_list_of_texts_is_refused(data) -> None:
    with pytest.raises(SchemaError, match="channel 'it' is not a JSON list of texts"):
        KINDS["texts"].check(data, channel({"kind": "texts"}))


def test_lists_of_texts_are_json_that_others_read() -> None:
    value = ["Straße", 'a "b"\n', "\u2028", ""]
    assert json.loads(KINDS["texts"].encode(value, channel({"kind": "texts"}))) == value
    indented = json.dumps(value, indent=2).encode()
    assert KINDS["texts"].decode(memoryview(indented), channel({"kind": "texts"})) == value


def test_images_of_other_bits_colours_and_formats_are_refused() -> None:
    gray = cv2.imencode(".png", np.zeros((4, 6), np.uint8))[1].tobytes()
    deep = cv2.imencode(".png", np.zeros((4, 6), np.uint16))[1].tobytes()
    colour = cv2.imencode(".png", np.zeros((4, 6, 3), np.uint16))[1].tobytes()
    jpeg = cv2.imencode(".jpg", np.zeros((4, 6), np.uint8))[1].tobytes()
    kind = KINDS["image"]
    mask = channel(MASK)
    kind.check(deep, mask)
    for data, entry, says in (
        (gray, mask, "PNG of 8 bits"),
        (colour, mask, "a png of 3 components"),
        (
            jpeg,
            channel(MASK, dtype="uint8"),
            "a jpeg of 1 components; the table has '.png' with 1",
        ),
        (deep, channel(MASK, shape=(4, 7)), "is 6 x 4 pixels; the table has"),
        (deep[:-20], mask, "PNG"),
        (b"text", mask, "neither JPEG nor PNG"),
    ):
        with pytest.raises(ImageError, match=says):
            kind.decode(data, entry)


def test_members_are_checked_against_the_table_and_their_cameras() -> None:
    mask = channel(MASK, Law("image", camera="cam", fraction=2), name="mask")
    note = channel({"kind": "text"}, name="note")
    maybe = channel({"kind": "text"}, name="maybe", optional=True)
    encoded = KINDS["image"].encode(np.zeros((2, 3), np.uint16), mask)
    table = (mask, note, maybe)
    assert (
        list(check_members({"mask.png": encoded, "note.txt": b"x"}, table, {"cam": (6, 4)})) == []
    )
    assert (
        list(check_members({"mask.png": encoded, "note.txt": b"x"}, table, {"cam": (5, 3)})) == []
    )
    faults = dict(
        check_members({"mask.png": encoded, "maybe.txt": b"\xff"}, table, {"cam": (8, 4)})
    )
    assert faults["mask.png"] == "3 x 2 pixels; on the image of 'cam' of 8 x 4 at 1/2 it has 4 x 2"
    assert faults["note.txt"] == "channel 'note' is missing, and the table does not say optional"
    assert "is not UTF-8" in faults["maybe.txt"]
    (fault,) = check_members({"mask.png": encoded, "note.txt": b"x"}, table, {})
    assert "the sample has no image of camera 'cam'" in fault[1]
    values = decode_values({"note.txt": b"x"}, (note, maybe), "key")
    assert values == {"note": "x", "maybe": None}
    with pytest.raises(SchemaError, match="key") as caught:
        decode_values({"note.txt": b"\xff"}, (note,), "key")
    assert (caught.value.key, caught.value.member) == ("key", "note.txt")


def collate(entry: Channel, values: list[Any], shape: tuple[int, ...] = ()) -> Any:
    return KINDS[entry.kind].collate(values, entry, shape)


def test_batches_are_stacked_packed_or_lists_by_kind_and_missing_values_are_distinguished() -> None:
    ones = np.ones((2, 3), np.int16)
    twos = np.full((2, 3), 2, np.int16)
    stacked = collate(channel(ARRAY), [ones, None, twos])
    np.testing.assert_array_equal(stacked, np.stack([ones, 0 * ones, twos]))
    assert collate(channel(ARRAY), [None, None]).shape == (2, 2, 3)
    assert collate(channel(MASK), [None], (5, 7)).shape == (1, 5, 7)
    with pytest.raises(SchemaError, match=r"values of \[2, 3\] and \[3, 2\] cannot be stacked"):
        collate(channel(MASK), [ones, ones.T])
    points = [np.ones((4, 3), np.float32), None]
    assert collate(channel(POINTS), points) == points
    packed = collate(
        channel(TOKENS),
        [np.array([1, 2], np.int32), None, np.array([3], np.int32)],
    )
    assert isinstance(packed, Packed)
    assert (packed.values.tolist(), packed.offsets.tolist()) == (
        [1, 2, 3],
        [0, 2, 2, 3],
    )
    assert packed.values.dtype == np.int32
    fixed = channel(TOKENS, shape=(2,))
    assert collate(fixed, [np.array([1, 2], np.int32), None]).tolist() == [
        [1, 2],
        [0, 0],
    ]
    boxes = {"box": np.ones((1, 4), np.float32), "id": np.ones(1, np.int32)}
    assert collate(channel(BOXES2D), [boxes, None]) == {
        "box": [boxes["box"], None],
        "id": [boxes["id"], None],
    }
    assert collate(channel({"kind": "text"}), ["a", None]) == ["a", None]
    assert collate(channel({"kind": "texts"}), [["a"], None, []]) == [
        ["a"],
        None,
        [],
    ]


class Voxels(type(KINDS["points"])):
    extensions = ("npy",)


class Backwards(LawCode):
    def move(self, value, _channel, _motion):
        return value[::-1]


voxels = Voxels()
backwards = Backwards()


def test_packages_add_kinds_and_laws_and_cannot_replace_ours(
    monkeypatch,
) -> None:
    def installed(group: str) -> list[EntryPoint]:
        return [
            EntryPoint(name, f"{__name__}:{attribute}", group)
            for name, attribute in (
                ("voxels", "voxels"),
                ("backwards", "backwards"),
                ("image", "voxels"),
            )
        ]

    monkeypatch.setattr(plugins, "entry_points", lambda *, group: installed(group))
    kinds = plugins.Registry("kind", "fuelrail.kinds", {"image": KINDS["image"]}, Kind)
    laws = plugins.Registry("law", "fuelrail.laws", {"fixed": LAWS["fixed"]}, LawCode)
    assert kinds["voxels"] is voxels
    assert kinds["image"] is KINDS["image"]
    assert laws["backwards"].move([1, 2], CAMERA, None) == [2, 1]
    assert laws.names() == ["fixed", "backwards", "voxels", "image"]
    with pytest.raises(
        ConfigError,
        match=r"is Voxels; a law must be fuelrail\.pipeline\.channels\.laws\.LawCode",
    ):
        laws["voxels"]
    with pytest.raises(
        ConfigError,
        match="the kind 'mesh' is unknown; known: image, voxels, backwards",
    ):
        kinds["mesh"]
