"""Strict settings: YAML or plain dicts to frozen structs; a mistake is named with file, line and
path.

A settings type derives from :class:`Settings`. Unknown keys, wrong types, missing values and values
out of range are :class:`~fuelrail.pipeline.errors.ConfigError`; nothing is coerced and nothing is
ignored.
"""

from __future__ import annotations

import datetime
import difflib
import errno
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Self, TypeVar

import msgspec
from msgspec import inspect

from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.limits import UNTYPED, YAML_DEPTH, YAML_VALUES
from fuelrail.pipeline.text import (
    MAX_VALUE,
    fault_in_words,
    requirement_in_words,
    shortened,
)

if TYPE_CHECKING:
    import yaml

    from fuelrail.pipeline.limits import Limit

    PathText = str | os.PathLike[str]
else:
    # A field of settings that holds a path: msgspec converts texts, `resolve_fields` makes them of
    # path objects.
    PathText = str

_MERGE: Final = "tag:yaml.org,2002:merge"
_TEXT: Final = "tag:yaml.org,2002:str"
_LONGEST: Final = 1000
"""Characters of a YAML value that is no text: for 1:1:1 PyYAML takes time in their square."""

Positive = Annotated[int, msgspec.Meta(gt=0)]
NotNegative = Annotated[int, msgspec.Meta(ge=0)]
# Figures: msgspec knows no "finite", so they have a bound.
_LARGE: Final = 1e9
AtLeast0 = Annotated[float, msgspec.Meta(ge=0, le=_LARGE)]
Above0 = Annotated[float, msgspec.Meta(gt=0, le=_LARGE)]

_ROOT: Final = "top level"
"""The path of the data itself."""
_UNKNOWN: Final = object()
"""The value where it is not known which of several is wrong."""

S = TypeVar("S", bound=msgspec.Struct)
T = TypeVar("T")
N = TypeVar("N", int, float)

# `configs/` is beside `pipeline/` in a checkout (whose package is a link: so resolve) and in an
# installed package.
_CONFIGS: Final = Path(__file__).resolve().parents[1] / "configs"
_PRESETS: Final = {
    "ImageAugment": "images",
    "BevAugment": "bev",
    "PixelAugment": "pixels",
    "OrderSpec": "orders",
    "Scenario": "scenarios",
}
"""Folder of the presets of each type of settings that has some."""


class _SettingsMeta(msgspec.StructMeta):
    if not TYPE_CHECKING:  # type checkers see the fields as parameters

        def __call__(self, *args: Any, **fields: Any) -> Any:
            """Make settings; an unknown field is refused with the name that was probably meant."""
            try:
                return super().__call__(*args, **fields)
            except TypeError:
                names = self.__struct_fields__
                for name in fields:
                    if name not in names:
                        hint = did_you_mean(name, names)
                        text = (
                            f"{self.__name__} has no field {name!r}; it has: "
                            f"{', '.join(names)}{hint}"
                        )
                        raise TypeError(text) from None
                raise


class Settings(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    repr_omit_defaults=True,
    metaclass=_SettingsMeta,
):
    """Base of all settings types: immutable, unknown keys refused.

    A subclass repeats ``frozen=True`` so that type checkers see it; ``kw_only=True`` is a
    subclass's own choice, for msgspec does not hand it down.
    """

    @classmethod
    def preset(cls, name: str) -> Self:
        """Return the settings of a name that `fuelrail presets` lists; raises ConfigError for an
        unknown one.
        """
        files = preset_files(cls)
        if name not in files:
            names = (
                f"it has: {', '.join(files)}{did_you_mean(name, files)}"
                if files
                else "this type has none"
            )
            raise ConfigError(f"{cls.__name__} has no preset {name!r}; {names}")
        return load_yaml(files[name], cls)


class CheckedSettings(Settings, frozen=True):
    """Settings that are checked when they are made, not only when they are read; a dict or a file
    of settings is read.

    Raises ConfigError.
    """

    def __post_init__(self) -> None:
        resolve_fields(self)
        check_types(self, ConfigError)


def preset_files(kind: type) -> dict[str, Path]:
    """Return the files of the presets of a type of settings, by name."""
    folder = _PRESETS.get(kind.__name__)
    if folder is not None:
        return {file.stem: file for file in sorted((_CONFIGS / folder).glob("*.yaml"))}
    return {}


class Preset(msgspec.Struct, frozen=True):
    """Settings with a name; ``summary`` is the comment at the start of their file."""

    kind: str
    name: str
    summary: str
    file: str


class PresetsReport(msgspec.Struct, frozen=True):
    """The presets of all kinds of settings."""

    presets: list[Preset]

    def as_text(self) -> str:
        """Return a table for people."""
        lines = []
        for kind, group in itertools.groupby(self.presets, lambda preset: preset.kind):
            presets = list(group)
            width = max(len(preset.name) for preset in presets)
            lines += [
                kind,
                *(f"  {preset.name:<{width}}  {preset.summary}" for preset in presets),
                "",
            ]
        lines.append(
            "In Python: `fr.ImageAugment.preset(NAME)`. On the command line: the name in "
            "place of a YAML file."
        )
        return "\n".join(lines)


def presets() -> PresetsReport:
    """Return the settings that can be given by name: images, ego frame, pixel values, orders,
    scenarios.
    """
    entries = []
    for kind, folder in _PRESETS.items():
        for file in sorted((_CONFIGS / folder).glob("*.yaml")):
            comment = itertools.takewhile(
                lambda line: line.startswith("#"),
                file.read_text("utf-8").splitlines(),
            )
            entries.append(
                Preset(
                    kind,
                    file.stem,
                    " ".join(line.lstrip("# ") for line in comment),
                    str(file),
                )
            )
    return PresetsReport(entries)


def must_be(words: str) -> msgspec.Meta:
    """Describe in words what is allowed in a field: ``Annotated[int, Meta(ge=1), must_be("an
    integer >= 1")]``.
    """
    return msgspec.Meta(extra={"must be": words})


Probability = Annotated[float, msgspec.Meta(ge=0, le=1), must_be("a probability from 0 to 1")]


def flag(description: str, **extra: object) -> msgspec.Meta:
    """Describe a field that is a flag: its help, and what `add_flags` reads of ``extra``."""
    return msgspec.Meta(description=description, extra=extra or None)


def check_types(
    settings: msgspec.Struct,
    error: type[Exception],
    where: str | None = None,
) -> None:
    """Raise ``error``, naming field, value and what is allowed, where one is not of its type; for
    ``__post_init__``.

    A list of dicts that was given for a tuple of settings becomes that.
    msgspec checks what it converts, not what a constructor is called with. What is allowed is what
    the field's `must_be` says, if it has one. ``where`` comes first in the message; None: the name
    of the settings type.
    """
    where = f"{type(settings).__name__}: " if where is None else where
    for field in _fields(type(settings)):
        value = getattr(settings, field.name)
        converted = _check_type(f"{where}{field.name}", value, field.type, error)
        if isinstance(converted, tuple) and converted != value:
            msgspec.structs.force_setattr(settings, field.name, converted)


def resolve_fields(settings: msgspec.Struct, where: str | None = None) -> None:
    """Replace a dict or a path, given for a field that holds settings, by the settings; for
    ``__post_init__``.

    A path object given for a text becomes a text. Raises ConfigError for a dict or a file that does
    not fit; other wrong values are left to `check_types`.
    """
    where = f"{type(settings).__name__}: " if where is None else where
    for field in _fields(type(settings)):
        value = getattr(settings, field.name)
        resolved = _resolved(value, field.type, f"{where}{field.name}")
        if resolved is not value:
            msgspec.structs.force_setattr(settings, field.name, resolved)


def as_settings(value: object, kind: type[S], name: str) -> S:
    """Return settings of type ``kind``: themselves, made from a dict of their fields, or read from
    a YAML file.

    In a dict, settings within settings may again be given in any of the three forms. ``name`` says
    in the error message what the value was given for. Raises ConfigError.
    """
    if isinstance(value, kind):
        return value
    if isinstance(value, Mapping):
        plain = dict(value)
        for field in _fields(kind):
            key = field.encode_name
            if key in plain:
                plain[key] = _resolved(plain[key], field.type, f"{name}.{key}")
                _check_type(f"{name}.{key}", plain[key], field.type, ConfigError)
        return convert(plain, kind, name)
    if isinstance(value, str | os.PathLike):
        try:
            return load_yaml(value, kind)
        except ConfigError as error:
            raise ConfigError(
                f"{name}={_short(value)}: {error}; {name} may be {_forms(kind)}"
            ) from error
    raise ConfigError(f"{name}={_short(value)} must be {_forms(kind)}")


def make_options(
    kind: type[S],
    options: S | None,
    changes: Mapping[str, object],
) -> S:
    """Return options with ``changes`` (fields by name), all checked; ``options`` None: the
    defaults.

    A field that holds settings may be given as a dict or the path of a YAML file too. Raises
    ConfigError naming the field.
    """
    if not isinstance(options, kind | None):
        raise ConfigError(
            f"{_short(options)} must be a {kind.__name__}; or give its fields by name"
        )
    values = {} if options is None else msgspec.structs.asdict(options)
    kinds = {field.name: field.type for field in _fields(kind)}
    for name, value in changes.items():
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if name in kinds:
            value = _resolved(value, kinds[name], f"{kind.__name__}.{name}")
        values[name] = value
    return convert(values, kind, kind.__name__)


def _check_type(
    name: str,
    value: object,
    annotation: Any,
    error: type[Exception],
) -> object:
    """Return the value as msgspec makes it of its type."""
    try:
        converted: object = msgspec.convert(value, type=annotation)
        # NumPy scalars and tensors look like an empty mapping to msgspec.
        has_fields = isinstance(value, msgspec.Struct | Mapping)
        if isinstance(converted, msgspec.Struct) and not has_fields:
            raise TypeError(f"got {type(value).__name__}")
    except (
        msgspec.ValidationError,
        AttributeError,
        IndexError,
        TypeError,
        UnicodeError,
    ) as failure:
        place = f"{name}={_short(value)}"
        rule = _allowed(annotation)
        if rule is not None:
            message = f"{place} must be {rule}"
        elif not isinstance(failure, msgspec.ValidationError):
            message = f"{place} is not allowed: {failure}"
        else:
            fault = find_fault(failure, value, annotation)
            if fault.path == _ROOT and fault.rule.startswith("must be "):
                message = f"{place} {fault.rule}{fault.hint}"
            else:
                message = f"{place} is not allowed: {fault}"
        raise error(message) from failure
    return converted


def _resolved(value: object, annotation: object, name: str) -> object:
    """Read the settings of a dict or a path, also those in a dict by name; keep other values."""
    if not isinstance(value, Mapping | str | os.PathLike):
        return value
    kinds = list(_variants([inspect.type_info(annotation)]))
    takes_text = any(isinstance(kind, inspect.StrType | inspect.LiteralType) for kind in kinds)
    if takes_text and isinstance(value, str | os.PathLike):
        return os.fspath(value)
    structs = [kind.cls for kind in kinds if isinstance(kind, inspect.StructType)]
    if len(structs) == 1:
        return as_settings(value, structs[0], name)
    value_types = [kind.value_type for kind in kinds if isinstance(kind, inspect.DictType)]
    value_structs = [kind.cls for kind in value_types if isinstance(kind, inspect.StructType)]
    if len(value_structs) != 1 or not isinstance(value, Mapping):
        return value
    settings = {}
    for key, item in value.items():
        settings[key] = as_settings(item, value_structs[0], f"{name}.{key}")
    return settings


def _allowed(annotation: object) -> str | None:
    """Say what a field may be: what `must_be` says, or the forms of its settings; None where
    neither is known.
    """
    for meta in getattr(annotation, "__metadata__", ()):
        if isinstance(meta, msgspec.Meta) and meta.extra is not None:
            words = meta.extra.get("must be")
            if words is not None:
                return str(words)
    kinds = list(_variants([inspect.type_info(annotation)]))
    structs = [kind.cls for kind in kinds if isinstance(kind, inspect.StructType)]
    types = {type(kind) for kind in kinds}
    if len(structs) != 1 or not types <= {inspect.StructType, inspect.NoneType}:
        return None
    forms = _forms(structs[0])
    if inspect.NoneType in types:
        return f"{forms}, or None"
    return forms


def _forms(kind: type) -> str:
    name = kind.__name__
    article = "an" if name[0] in "AEIOU" else "a"
    preset = ", a preset's name" if name in _PRESETS else ""
    return f"{article} {name}, a dict of its fields{preset}, or the path of a YAML file"


def _short(value: object) -> str:
    text = repr(value)
    if len(text) > MAX_VALUE:
        return f"{text[:MAX_VALUE]}..."
    return text


@cache
def _fields(kind: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    return msgspec.structs.fields(kind)


def convert(value: object, to: type[T], where: str) -> T:
    """Convert plain Python data (as YAML or JSON gives it) to the type ``to``.

    ``where`` says in the error message where the data came from. Raises ConfigError.
    """
    try:
        return msgspec.convert(value, to)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {find_fault(error, value, to)}") from error


def read_pairs(
    subject: str,
    text: str,
    names: Sequence[str],
    number: Callable[[str], N],
    rule: str,
) -> dict[str, N]:
    """Read ``NAME=NUMBER,...`` with numbers above 0. Raises ConfigError, which says ``rule``."""
    numbers: dict[str, N] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name in names and name not in numbers:
            with suppress(ValueError):
                parsed = number(value)
                if 0 < parsed <= _LARGE:
                    numbers[name] = parsed
                    continue
        raise ConfigError(
            f"{subject} '{text}' has the part '{part}'; write {rule}: {', '.join(names)}"
        )
    return numbers


def read_text(file: Path) -> str:
    """Read a small text file that a user named, or a pipe; raise OSError, also for too large a
    file.
    """
    with file.open("rb") as stream:
        data = stream.read(UNTYPED.maximum + 1)
    reason = UNTYPED.broken(len(data))
    if reason is not None:
        raise OSError(errno.EFBIG, f"it {reason}")
    text = data.decode("utf-8")
    return text.replace("\r\n", "\n")


def parse_yaml(text: str, *, takes_merges: bool) -> tuple[yaml.Node | None, Any]:
    """Return the nodes of a YAML text, and its value, within the limits of docs/guarantees.md.

    Entries of merge keys (``<<``) may double with each line: they count each time.
    Raises ValueError, with a clause, for what is no YAML, for more values or levels, and for merge
    keys unless the caller ``takes_merges``.
    """
    import yaml  # here, so that settings made in Python do without

    kind: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        depth = 0
        for event in yaml.parse(text, Loader=kind):  # before the nodes, which are made by recursion
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            _check_yaml(depth, YAML_DEPTH)
        root = yaml.compose(text, Loader=kind)
        if root is not None:
            _expanded_nodes(root, {}, takes_merges=takes_merges)
        # From the text again, for to make values changes nodes with merge keys.
        return root, yaml.load(text, Loader=kind)
    except Exception as error:
        # PyYAML lets out errors of many kinds: for a day 32, an `!!int x`, an `!!bool x`.
        clause = " ".join(str(error).split())
        raise ValueError(clause or type(error).__name__) from error


def _check_yaml(number: int, limit: Limit) -> None:
    reason = limit.broken(number)
    if reason is not None:
        raise ValueError(f"it {reason}")


def _expanded_nodes(
    node: yaml.Node,
    sizes: dict[int, tuple[int, int] | None],
    *,
    takes_merges: bool,
) -> tuple[int, int]:
    """Return the nodes from one on, aliases counted each time, and its levels.

    ``sizes`` are those of the nodes that were visited; None: of one that is not finished, and so
    holds itself. Raises ValueError over the limits.
    """
    import yaml

    if id(node) in sizes:
        size = sizes[id(node)]
        if size is None:
            raise ValueError(f"line {node.start_mark.line + 1}: an alias is in what it is of")
        return size
    sizes[id(node)] = None
    line = node.start_mark.line + 1
    number = 1
    levels = 0
    if isinstance(node, yaml.ScalarNode):
        if node.tag == _MERGE and not takes_merges:
            raise ValueError(f"line {line}: it has a merge key, <<: write its entries out")
        if node.tag != _TEXT and len(node.value) > _LONGEST:
            raise ValueError(f"line {line}: a value of {len(node.value)} characters is no text")
    else:
        children = node.value
        if isinstance(node, yaml.MappingNode):
            children = itertools.chain.from_iterable(node.value)
        for child in children:
            child_number, child_levels = _expanded_nodes(
                child,
                sizes,
                takes_merges=takes_merges,
            )
            number += child_number
            levels = max(levels, child_levels)
        levels += 1
        _check_yaml(number, YAML_VALUES)
        _check_yaml(levels, YAML_DEPTH)
    sizes[id(node)] = number, levels
    return number, levels


def load_yaml(path: str | os.PathLike[str], to: type[S]) -> S:
    """Read a YAML file, or a preset by its name, into the settings type ``to``.

    Raises ConfigError naming file, line and path in the file.
    """
    import yaml

    presets_by_name = preset_files(to)
    file = presets_by_name.get(str(path), Path(path))
    try:
        text = read_text(file)
    except OSError as error:
        hint = ""
        if presets_by_name:
            hint = f"; presets: {', '.join(presets_by_name)}"
            hint += did_you_mean(str(path), presets_by_name)
        for kind, folder in _PRESETS.items():
            preset_names = [preset.stem for preset in (_CONFIGS / folder).glob("*.yaml")]
            if str(path) in preset_names:
                hint += f"; '{path}' is a preset of {kind}, which is a value of another field"
        raise ConfigError(
            f"config file '{shortened(file)}' cannot be read: {error.strerror}{hint}"
        ) from error
    except ValueError as error:  # no UTF-8, or a path with a null character
        raise ConfigError(f"config file '{file}' cannot be read: {error}") from error
    try:
        root, value = parse_yaml(text, takes_merges=True)
    except ValueError as error:
        raise ConfigError(f"config file '{file}' is not YAML: {error}") from error
    _refuse_duplicates(root, file, set())
    if value is None:
        value = {}
    try:
        return msgspec.convert(value, to)
    except msgspec.ValidationError as error:
        fault = find_fault(error, value, to)
        steps = _steps(fault.path)
        if fault.unknown_field is not None:
            steps.append(fault.unknown_field)
        node = root
        line = 1  # of the entry that is at fault
        for step in steps:
            if isinstance(node, yaml.MappingNode):
                entry = next((entry for entry in node.value if entry[0].value == step), None)
                if entry is None:
                    break
                key, node = entry
                line = key.start_mark.line + 1
            elif isinstance(node, yaml.SequenceNode):
                if not step.isdigit() or int(step) >= len(node.value):
                    continue
                node = node.value[int(step)]
                line = node.start_mark.line + 1
        raise ConfigError(f"{file}:{line}: {fault}") from error


class SettingFault(msgspec.Struct, frozen=True):
    """What is wrong with a value within plain data, and where it is.

    ``path`` is "a.b[0]", or "top level" for the data itself; ``rule`` says what the value must be,
    ``got`` what it is, "" where that is not known; ``hint`` begins with "; " or is empty.
    ``unknown_field`` is the field that the rule is about, if it is about one that does not exist.
    """

    path: str
    rule: str
    got: str = ""
    hint: str = ""
    unknown_field: str | None = None

    def __str__(self) -> str:
        """Return a clause that begins with the place."""
        place = f"at '{self.path}': "
        entry = re.fullmatch(r"\[(\d+)\]\.?(.*)", self.path)
        if self.path == _ROOT:
            place = ""
        elif entry is not None:
            field = f"'{entry[2]}' of " if entry[2] else ""
            place = f"at {field}entry {entry[1]}: "
        return f"{place}{self.rule}{self.got}{self.hint}"


def explain(error: Exception, data: bytes | bytearray | memoryview, to: object) -> str:
    """Say in words why a text of JSON is not of the type ``to``: a clause for an error of ours.

    ``error`` is what msgspec raised for it: it names the place, the value and what is allowed,
    where the text is no larger than one of no known type may be.
    """
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if not isinstance(error, msgspec.ValidationError):
        return " ".join(str(error).split())
    if UNTYPED.broken(memoryview(data).nbytes) is None:
        with suppress(msgspec.DecodeError, UnicodeError, RecursionError):
            value = msgspec.json.decode(data)
            try:
                msgspec.convert(value, to, str_keys=True)
            except msgspec.ValidationError as of_value:  # a decoder's own says less
                return str(find_fault(of_value, value, to))
    return fault_in_words(error)


def find_fault(
    error: msgspec.ValidationError,
    value: object,
    to: object,
    *,
    names_none: bool = True,
) -> SettingFault:
    """Say in words why ``value`` could not be converted to the type ``to``.

    Without ``names_none`` the rule does not say that a value may be None: a flag cannot give it.
    """
    text = str(error)
    path = _ROOT
    is_key = False
    match = re.fullmatch(r"(.*) - at (`key` in )?`\$(.*)`", text, re.DOTALL)
    if match is not None:
        text = match[1]
        path = match[3].lstrip(".") or _ROOT
        is_key = match[2] is not None
    if "[...]" in path:
        path = _with_keys(path, str(error), value, to)
    words = requirement_in_words(text)
    if is_key:
        return SettingFault(path, f"a key {words}")
    kinds: list[inspect.Type] = [inspect.type_info(to)]
    outer = value
    for step in _steps(path):
        variants = _tagged(kinds, outer)
        kinds = [inner for kind in variants for inner in _inner(kind, step)]
        outer = _value_at(outer, step)
    variants = _tagged(kinds, outer)
    field_fault = re.search(r"(missing required|contains unknown) field `([^`]+)`", text)
    if field_fault is not None:
        is_unknown = field_fault[1] == "contains unknown"
        name = field_fault[2]
        structs = [kind for kind in variants if isinstance(kind, inspect.StructType)]
        hint = ""
        # Of several structs msgspec does not say which one it took; the wrong keys would be worse
        # than none.
        if len(structs) == 1:
            names = [field.encode_name for field in structs[0].fields]
            hint = f"; allowed here: {', '.join(names)}"
            if is_unknown:
                hint += did_you_mean(name, names)
        return SettingFault(
            path,
            words,
            hint=hint,
            unknown_field=name if is_unknown else None,
        )
    enum_value = re.fullmatch(r"Invalid (?:enum )?value (.+)", text, re.DOTALL)
    if enum_value is None and not text.startswith("Expected "):
        return SettingFault(path, words)
    rule = _rule(kinds, names_none=names_none)
    wrong = _value_at(value, path)
    if rule is None or (wrong is _UNKNOWN and enum_value is None):
        return SettingFault(path, words)
    text_types = inspect.StrType | inspect.LiteralType
    takes_text = any(isinstance(kind, text_types) for kind in _variants(kinds))
    if enum_value is not None:
        got = enum_value[1]
    elif isinstance(wrong, str) and not takes_text:
        got = f"the text {_short(wrong)}"
    elif isinstance(wrong, datetime.date):
        got = f"the date {wrong}"
    else:
        got = _short(wrong)
    hint = ""
    if enum_value is not None and isinstance(wrong, str):
        choices = _choices(_variants(kinds))
        hint = did_you_mean(wrong, map(str, choices))
    return SettingFault(
        path,
        rule=f"must be {rule}",
        got=f"; got {got}",
        hint=hint,
    )


def _steps(path: str) -> list[str]:
    """Return the field names and list positions of a path; "..." is msgspec's word for some
    entry of a mapping.
    """
    if path == _ROOT:
        return []
    return re.findall(r"[^.\[\]]+|\.\.\.", path)


def _with_keys(
    path: str,
    message: str,
    value: object,
    to: Any,
) -> str:
    """Return the path with the keys of mappings, of which msgspec says "[...]" only; without a
    key that is no plain name.
    """
    begin, _, end = path.partition("[...]")
    steps = _steps(begin or _ROOT)
    mapping = _value_at(value, begin or _ROOT)
    keys = list(mapping) if isinstance(mapping, Mapping) else []
    while len(keys) > 1:  # the first wrong entry is named: in the first half, or behind it
        middle = len(keys) // 2
        first_half = keys[:middle]
        is_in_first_half = False
        try:
            part = _with_entries(value, steps, first_half)
            msgspec.convert(part, to, str_keys=True)
        except (msgspec.ValidationError, TypeError) as error:
            is_in_first_half = str(error) == message
        keys = first_half if is_in_first_half else keys[middle:]
    if not keys:
        return path
    key = keys[0]
    if not isinstance(key, str) or re.search(r"[.\[\]]", key):
        return path
    named = f"{begin}.{key}{end}".lstrip(".")
    if "[...]" in end:
        return _with_keys(named, message, value, to)
    return named


def _with_entries(value: Any, steps: list[str], keys: Sequence[str]) -> object:
    """Return plain data whose mapping at ``steps`` has the entries of these keys alone."""
    if not steps:
        return {key: value[key] for key in keys}
    step, *inner_steps = steps
    if isinstance(value, Mapping):
        inner = _with_entries(value[step], inner_steps, keys)
        return {**value, step: inner}
    if isinstance(value, list | tuple):
        number = int(step)
        changed = list(value)
        changed[number] = _with_entries(value[number], inner_steps, keys)
        return changed
    return value


def _value_at(value: Any, path: str) -> object:
    """Return the value at a path; ``_UNKNOWN`` where the path does not say which it is."""
    for step in _steps(path):
        try:
            if isinstance(value, Mapping):
                value = value[step]
            elif isinstance(value, msgspec.Struct):
                value = getattr(value, step)
            else:
                value = value[int(step)]
        except (LookupError, AttributeError, TypeError, ValueError):
            return _UNKNOWN
    return value


def _choices(kinds: Iterable[inspect.Type]) -> Iterator[object]:
    """Yield the values of the types that have a fixed set of them."""
    for kind in kinds:
        if isinstance(kind, inspect.LiteralType):
            yield from kind.values
        elif isinstance(kind, inspect.EnumType):
            yield from (item.value for item in kind.cls)


def _rule(kinds: Sequence[inspect.Type], *, names_none: bool) -> str | None:
    """Say what a value of one of these types must be; None where a type has no words."""
    for kind in kinds:
        extra = kind.extra if isinstance(kind, inspect.Metadata) else None
        if extra is not None and "must be" in extra:
            return str(extra["must be"])
    plain = list(_variants(kinds))
    choices = list(map(str, _choices(plain)))
    rules = []
    if len(choices) > 1:
        rules.append(f"one of {', '.join(choices)}")
    elif choices:
        rules.append(choices[0])
    for kind in plain:
        if isinstance(kind, inspect.LiteralType | inspect.EnumType | inspect.NoneType):
            continue
        rule = _type_in_words(kind)
        if rule is None:
            return None
        rules.append(rule)
    if names_none and any(isinstance(kind, inspect.NoneType) for kind in plain):
        rules.append("None")
    rules = list(dict.fromkeys(rules))
    if len(rules) < 2:
        return rules[0] if rules else None
    comma = "," if len(rules) > 2 or len(choices) > 1 else ""
    return f"{', '.join(rules[:-1])}{comma} or {rules[-1]}"


def _type_in_words(kind: inspect.Type) -> str | None:
    match kind:
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType() | inspect.FloatType():
            noun = "a whole number" if isinstance(kind, inspect.IntType) else "a number"
            return f"{noun}{_bounds_in_words(kind)}"
        case inspect.StrType():
            rule = f"text{_length_in_words(kind.min_length, kind.max_length, 'character')}"
            if kind.pattern is not None:
                rule += f" that matches the pattern {kind.pattern!r}"
            return rule
        case inspect.ListType() | inspect.VarTupleType() | inspect.SetType():
            return f"a list{_length_in_words(kind.min_length, kind.max_length, 'entry')}"
        case inspect.TupleType():
            length = len(kind.item_types)
            return f"a list{_length_in_words(length, length, 'entry')}"
        case inspect.DictType():
            return f"a mapping{_length_in_words(kind.min_length, kind.max_length, 'entry')}"
        case inspect.NamedTupleType():
            minimum = sum(field.required for field in kind.fields)
            return f"a list{_length_in_words(minimum, len(kind.fields), 'entry')}"
        case inspect.StructType():
            return "a list" if kind.array_like else "a mapping"
    return None


def _bounds_in_words(kind: inspect.IntType | inspect.FloatType) -> str:
    """Return `` from 1 to 5``, `` >= 1``, `` > 0 and <= 1``; empty without bounds."""
    minimum = kind.ge
    above = kind.gt
    maximum = kind.le
    below = kind.lt
    if isinstance(kind, inspect.IntType):  # "> 0" is ">= 1" for whole numbers
        if above is not None:
            minimum = above + 1
            above = None
        if below is not None:
            maximum = below - 1
            below = None
    words = ""
    if minimum is not None and maximum is not None:
        words = f" from {_figure(minimum)} to {_figure(maximum)}"
    else:
        bounds = {
            ">=": minimum,
            ">": above,
            "<=": maximum,
            "<": below,
        }
        parts = []
        for sign, bound in bounds.items():
            if bound is not None:
                parts.append(f"{sign} {_figure(bound)}")
        if parts:
            words = f" {' and '.join(parts)}"
    if kind.multiple_of is not None:
        words += f", a multiple of {_figure(kind.multiple_of)}"
    return words


def _figure(number: float) -> str:
    if isinstance(number, int):
        return str(number)
    return f"{number:.15g}"


def _length_in_words(
    minimum: int | None,
    maximum: int | None,
    noun: str,
) -> str:
    plural = noun[:-1] + "ies" if noun.endswith("y") else f"{noun}s"
    if minimum is not None and minimum == maximum:
        return f" of {minimum} {noun if minimum == 1 else plural}"
    if minimum and maximum is not None:
        return f" of {minimum} to {maximum} {plural}"
    if minimum:
        return f" of {minimum} or more {plural}"
    if maximum is not None:
        return f" of at most {maximum} {noun if maximum == 1 else plural}"
    return ""


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """Return ``; did you mean 'flip_prob'?`` with the most similar allowed name; empty where
    none is similar.
    """
    matches = difflib.get_close_matches(name, list(allowed), n=1)
    if not matches:
        return ""
    return f"; did you mean {matches[0]!r}?"


def _variants(kinds: Iterable[inspect.Type]) -> Iterator[inspect.Type]:
    """Yield the types, without their descriptions; a union as its members."""
    for kind in kinds:
        if isinstance(kind, inspect.UnionType):
            yield from _variants(kind.types)
        elif isinstance(kind, inspect.Metadata):
            yield from _variants([kind.type])
        else:
            yield kind


def _tagged(kinds: Sequence[inspect.Type], value: object) -> list[inspect.Type]:
    """Return the variants of types; of structs with tags the one that the value has the tag of."""
    variants = list(_variants(kinds))
    structs = [kind for kind in variants if isinstance(kind, inspect.StructType)]
    if isinstance(value, Mapping):
        for kind in structs:
            if kind.tag_field is not None and value.get(kind.tag_field) == kind.tag:
                return [kind]
    return variants


def _inner(kind: inspect.Type, step: str) -> Iterator[inspect.Type]:
    """Yield the type of the entry ``step`` of a value of type ``kind``."""
    if isinstance(kind, inspect.StructType) and not kind.array_like:
        yield from (field.type for field in kind.fields if field.encode_name == step)
        if kind.tag_field == step:
            yield inspect.LiteralType((kind.tag,))
    elif isinstance(kind, inspect.StructType | inspect.NamedTupleType) and step.isdigit():
        number = int(step)
        if number < len(kind.fields):
            yield kind.fields[number].type
    elif isinstance(kind, inspect.DictType):
        yield kind.value_type
    elif isinstance(kind, inspect.ListType | inspect.VarTupleType):
        yield kind.item_type
    elif isinstance(kind, inspect.TupleType):
        yield kind.item_types[int(step)]


def _refuse_duplicates(
    node: yaml.Node | None,
    file: Path,
    visited: set[int],
) -> None:
    import yaml

    if id(node) in visited:  # an alias, possibly of a node that holds it
        return
    visited.add(id(node))
    if isinstance(node, yaml.MappingNode):
        keys: set[str] = set()
        for key, value in node.value:
            if key.value in keys:
                raise ConfigError(
                    f"{file}:{key.start_mark.line + 1}: key '{key.value}' occurs twice"
                )
            keys.add(key.value)
            _refuse_duplicates(value, file, visited)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_duplicates(item, file, visited)
