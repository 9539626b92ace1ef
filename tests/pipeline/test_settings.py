"""Strict settings: what is right comes through unchanged, what is wrong is one ConfigError that says where."""

from __future__ import annotations

import enum
import re
import time
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

import fuelrail
import fuelrail.bench
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.limits import YAML_DEPTH, YAML_VALUES
from fuelrail.pipeline.settings import Settings, convert, load_yaml, presets
from fuelrail.sharding.planning.recipe import parse_splits

if TYPE_CHECKING:
    from pathlib import Path


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Wheel(Settings, frozen=True):
    radius_m: Annotated[float, msgspec.Meta(gt=0)]
    kind: Literal["steel", "alloy"] = "steel"


class Wing(Settings, frozen=True, tag_field="type", tag="wing"):
    span_m: float


class Fin(Settings, frozen=True, tag_field="type", tag="fin"):
    area_m2: float


class Car(Settings, frozen=True):
    name: str
    front: Wheel
    spare: Wheel | None = None
    wheels: tuple[Wheel, ...] = ()
    pair: tuple[Wheel, int] | None = None
    named: dict[str, Wheel] = {}  # noqa: RUF012 - msgspec copies it
    part: Wing | Fin | None = None
    colour: Colour = Colour.RED
    label: str = "x"
    free: dict[str, Any] = {}  # noqa: RUF012 - msgspec copies it

    def __post_init__(self) -> None:
        if self.name == "lemon":
            raise ValueError("a car of that name was never built")


class Renamed(Settings, frozen=True, rename="kebab"):
    long_name: int


@pytest.fixture
def write(tmp_path: Path):
    def to_file(text: str) -> Path:
        file = tmp_path / "car.yaml"
        file.write_text(text, encoding="utf-8")
        return file

    return to_file


def read_error(file: Path, to: type = Car) -> str:
    with pytest.raises(ConfigError) as caught:
        load_yaml(file, to)
    return str(caught.value)


def test_loads_what_is_right(write) -> None:
    car = load_yaml(
        write("name: beetle\nfront: {radius_m: 0.3}\nwheels:\n- {radius_m: 1, kind: alloy}\n"),
        Car,
    )
    wheel = Wheel(radius_m=1.0, kind="alloy")
    assert car == Car(name="beetle", front=Wheel(radius_m=0.3), wheels=(wheel,))
    assert (
        convert(
            {
                "name": "beetle",
                "front": {"radius_m": 0.3},
                "wheels": [{"radius_m": 1, "kind": "alloy"}],
            },
            Car,
            "here",
        )
        == car
    )


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Wheel(radius_m=1.0).radius_m = 2.0  # type: ignore[misc]


def test_anchors_and_merges_are_expanded(write) -> None:
    car = load_yaml(
        write(
            "name: a\nfront: &w {radius_m: 2}\nspare: *w\nnamed: {left: {<<: *w, kind: alloy}, right: *w}"
        ),
        Car,
    )
    assert car.spare == car.front == car.named["right"]
    assert car.named["left"] == Wheel(radius_m=2.0, kind="alloy")


WRONG = [
    # text, line, path in the file, words that must stand in the message
    (
        "name: a\nfront:\n  radius_m: '1'\n",
        3,
        "front.radius_m",
        "must be a number > 0; got the text '1'",
    ),
    ("name: a\nfront:\n  radius_m: -1\n", 3, "front.radius_m", "> 0"),
    (
        "name: a\nfront:\n  radius_m: 1\n  radius: 2\n",
        4,
        "front",
        "the field 'radius' is unknown; allowed here: radius_m, kind",
    ),
    (
        "name: a\nfront:\n  kind: steel\n",
        2,
        "front",
        "the field 'radius_m' is missing; allowed here: radius_m, kind",
    ),
    (
        "name: a\nfront:\n  radius_m: 1\n  kind: wood\n",
        4,
        "front.kind",
        "must be one of alloy, steel; got 'wood'",
    ),
    (
        "name: a\nfront: {radius_m: 1}\nspare:\n  {}\n",
        3,
        "spare",
        "'radius_m' is missing; allowed here: radius_m, kind",
    ),
    (
        "name: a\nfront: {radius_m: 1}\nwheels:\n- radius_m: 1\n- radius_m: 1\n  x: 1\n",
        6,
        "wheels[1]",
        "'x' is unknown; allowed here: radius_m, kind",
    ),
    (
        "name: a\nfront: {radius_m: 1}\npair:\n- {radius_m: 1, kind: tin}\n- 3\n",
        4,
        "pair[0].kind",
        "must be one of alloy, steel; got 'tin'",
    ),
    (
        "name: a\nfront: {radius_m: 1}\nnamed:\n  left: {kind: tin, radius_m: 1}\n",
        4,
        "named.left.kind",
        "must be one of alloy, steel; got 'tin'",
    ),
    (
        "name: a\nfront: {radius_m: 1}\ncolour: green\n",
        3,
        "colour",
        "must be one of red, blue; got 'green'",
    ),
    (
        "name: a\nfront: {radius_m: 1}\nlabel: 2020-01-01\n",
        3,
        "label",
        "must be text; got the date 2020-01-01",
    ),
    (
        "name: a\nfront: {radius_m: true}\n",
        2,
        "front.radius_m",
        "must be a number > 0; got True",
    ),
    (
        "name: a\nfront: {radius_m: 1}\n1: 2\n",
        1,
        "top level",
        "a key must be text",
    ),
    ("- name\n", 1, "top level", "must be a mapping; got ['name']"),
    (
        "",
        1,
        "top level",
        "the field 'name' is missing; allowed here: name, front, ",
    ),
    ("name: lemon\nfront: {radius_m: 1}\n", 1, "top level", "never built"),
]


@pytest.mark.parametrize(("text", "line", "path", "words"), WRONG)
def test_a_mistake_is_named_with_file_line_path_and_what_is_allowed(
    write, text, line, path, words
) -> None:
    file = write(text)
    message = read_error(file)
    place = "" if path == "top level" else f"at '{path}': "
    assert message.startswith(f"{file}:{line}: {place}")
    assert "`" not in message
    assert words in message


@pytest.mark.parametrize(("text", "line", "path", "words"), [w for w in WRONG if w[0]])
def test_convert_says_the_same_without_a_line(text, line, path, words) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        convert(yaml.safe_load(text), Car, "argument car")
    place = "" if path == "top level" else f"at '{path}': "
    assert str(caught.value).startswith(f"argument car: {place}")


def test_names_in_the_file_are_those_allowed(write) -> None:
    assert read_error(write("long_name: 1"), Renamed).endswith(
        "the field 'long_name' is unknown; allowed here: long-name; did you mean 'long-name'?"
    )


def test_keys_of_the_type_that_a_value_says_it_has_are_suggested(write) -> None:
    text = "name: a\nfront: {radius_m: 1}\npart: "
    assert read_error(write(f"{text}{{type: fin, span_m: 1}}")).endswith(
        "the field 'span_m' is unknown; allowed here: area_m2"
    )
    assert "allowed here" not in read_error(write(f"{text}{{span_m: 1}}"))
    assert "must be one of " in read_error(write(f"{text}{{type: rudder, span_m: 1}}"))


@pytest.mark.parametrize(
    "text",
    [
        "a: [",
        "a: *nowhere",
        "? [list]\n: key",
        "a: 1\n---\nb: 2",
        "a: 2020-13-45",
        "a: !!int x",
        "a: !!timestamp x",
        "a: 0b_",
        "a: \x00",
        "!!python/object/apply:os.getcwd []",
        "[\n" * 1000,
    ],
)
def test_what_is_not_plain_yaml_is_refused(write, text) -> None:
    file = write(text)
    assert read_error(file).startswith(f"config file '{file}' is not YAML: ")


def test_a_list_that_holds_itself_ends(write) -> None:
    assert "line 1: an alias is in what it is of" in read_error(write("&a [*a]"))


NINE = ["a0: &a0 {x: 1}"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
MERGED = ["a0: &a0 {x: 1}"] + [f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}" for i in range(1, 50)]
DEEP = ["a0: &a0 [1]"] + [f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, 5000)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "\n".join(NINE),
            f"values when it is decoded, at most {YAML_VALUES.maximum} are read",
        ),
        (
            "\n".join(MERGED),
            f"values when it is decoded, at most {YAML_VALUES.maximum} are read",
        ),
        (
            "\n".join(DEEP),
            f"levels when it is decoded, at most {YAML_DEPTH.maximum} are read",
        ),
        (
            "[\n" * 100_000,
            f"levels when it is decoded, at most {YAML_DEPTH.maximum} are read",
        ),
        ("a: 1" + ":1" * 3_000_000, "a value of 6000001 characters is no text"),
        ("a: 1" + ":1" * 3000 + ".5", "a value of 6003 characters is no text"),
        ("a: !!bool x", "is not YAML"),
        ("a: !!int ''", "is not YAML"),
        ("a: !!float ''", "is not YAML"),
    ],
    ids=range(9),
)
@pytest.mark.parametrize("read", ["settings", "splits"])
def test_few_bytes_that_decode_to_much_end_at_once_in_a_sentence(write, text, says, read) -> None:
    """Entries of merge keys double with each line: 1,300 bytes of them never ended."""
    begin_s = time.process_time()
    with pytest.raises(ConfigError, match=re.escape(says) if read == "settings" else None):
        load_yaml(write(text), Car) if read == "settings" else parse_splits(str(write(text)))
    assert time.process_time() - begin_s < 10


def test_aliases_below_the_limit_are_walked_once(write) -> None:
    assert "the field 'a0' is unknown" in read_error(write("\n".join(NINE[:5])))


def test_a_key_that_stands_twice_is_refused_at_any_depth(write) -> None:
    file = write(
        "name: a\nfront: {radius_m: 1}\nfree:\n  list:\n  - {x: 1}\n  - x: 1\n    y: 2\n    x: 3\n"
    )
    assert read_error(file) == f"{file}:8: key 'x' occurs twice"


def test_unreadable_files_are_config_errors(tmp_path: Path) -> None:
    assert "cannot be read" in read_error(tmp_path / "missing.yaml")
    assert "cannot be read" in read_error(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"name: \xff")
    assert "cannot be read" in read_error(tmp_path / "latin.yaml")


@given(st.text(max_size=60) | st.text(alphabet="a:-[]{}&*!?|>'\"% \n\t,#0_.x<", max_size=40))
@example("a: !!binary x")
@example("? &a [*a]\n: 1")
@example("<<: 1")
def test_any_text_is_settings_or_a_config_error(tmp_path_factory, text) -> None:
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_text(text, encoding="utf-8")
    try:
        load_yaml(file, Car)
    except ConfigError as error:
        assert str(file) in str(error)


def plain(depth: int) -> st.SearchStrategy[Any]:
    leaves = (
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False)
        | st.text(st.characters(exclude_characters="`"), max_size=5)
    )
    keys = st.sampled_from(
        [
            "name",
            "front",
            "radius_m",
            "kind",
            "wheels",
            "part",
            "type",
            "free",
            "named",
            "pair",
        ]
    )
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4),
        max_leaves=depth,
    )


@given(plain(8))
def test_any_plain_data_is_settings_or_a_config_error(value) -> None:
    try:
        car = convert(value, Car, "argument")
    except ConfigError as error:
        assert str(error).startswith("argument: ")
        assert "`" not in str(error)
    else:
        assert convert(msgspec.to_builtins(car), Car, "again") == car


def test_a_wrong_value_of_a_dict_names_those_allowed() -> None:
    with pytest.raises(
        ConfigError,
        match=r"window.pad='zero' must be one of drop, mask, .*, repeat_edge",
    ):
        fuelrail.DataLoader("dataset", 1, window={"frames": [-1, 0], "pad": "zero"})


def test_an_unknown_field_of_a_constructor_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(
        TypeError,
        match=r"Wheel has no field 'radius'; it has: .*; did you mean 'radius_m'\?",
    ):
        Wheel(radius=1)
    with pytest.raises(TypeError, match="Missing required argument"):
        Wheel()


@pytest.mark.parametrize("preset", presets().presets, ids=lambda one: f"{one.kind}-{one.name}")
def test_each_preset_is_found_by_its_name(preset):
    face = fuelrail.bench if preset.kind == "Scenario" else fuelrail
    kind = getattr(face, preset.kind)
    assert preset.summary.endswith(".")
    assert kind.preset(preset.name) == load_yaml(preset.file, kind) == load_yaml(preset.name, kind)


@pytest.mark.parametrize("kind", [fuelrail.OrderSpec, fuelrail.Transforms])
def test_a_preset_of_another_kind_is_named_as_such(kind):
    words = "'bevdet-704x256' is a preset of ImageAugment, which is a value of another field"
    with pytest.raises(ConfigError, match=words):
        load_yaml("bevdet-704x256", kind)


def test_an_unknown_preset_names_the_known_ones():
    for load in (
        fuelrail.BevAugment.preset,
        partial(load_yaml, to=fuelrail.BevAugment),
    ):
        with pytest.raises(
            ConfigError,
            match=r"bevdet, bevfusion, streampetr; did you mean 'bevfusion'\?",
        ):
            load("bevfussion")
    with pytest.raises(
        ConfigError,
        match="StorageOptions has no preset 's3'; this type has none",
    ):
        fuelrail.StorageOptions.preset("s3")
