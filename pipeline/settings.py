"""Strict settings: YAML or plain dicts to frozen structs; a mistake is named with file, line and path.

A settings type derives from :class:`Settings`. Unknown keys, wrong types, missing values and values out of range
are :class:`~fuelrail.pipeline.errors.ConfigError`; nothing is coerced and nothing is ignored.
"""

from __future__ import annotations

import errno
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
import yaml
from msgspec import inspect

from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.text import shown

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator


_MAX_TEXT_BYTES: Final = 16 << 20


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all settings types: immutable, unknown keys refused.

    A subclass repeats ``frozen=True`` so that type checkers see it; ``kw_only=True`` is a subclass's own choice, for
    msgspec does not hand it down.
    """


def check_types(settings: msgspec.Struct, error: type[Exception]) -> None:
    """Raise ``error``, naming the field, where one is not of its type; for ``__post_init__``.

    msgspec checks what it converts, not what a constructor is called with.
    """
    for field in _fields(type(settings)):
        value = getattr(settings, field.name)
        try:
            msgspec.convert(value, type=field.type)
        except msgspec.ValidationError as failure:
            raise error(f"{type(settings).__name__}: {field.name}={value!r} is not allowed: {failure}") from failure


@cache
def _fields(kind: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    return msgspec.structs.fields(kind)


S = TypeVar("S", bound=msgspec.Struct)


def convert(value: object, to: type[S], where: str) -> S:
    """Convert plain Python data (as YAML or JSON gives it) to the settings type ``to``.

    ``where`` says in the error message where the data came from. Raises ConfigError.
    """
    try:
        return msgspec.convert(value, to)
    except msgspec.ValidationError as error:
        text, path = _split(str(error))
        raise ConfigError(f"{where}: at '{path}': {text}{_hint(text, path, to)}") from error


def read_text(file: Path) -> str:
    """The text of a small file that a user named, which may be a pipe; raises OSError, and for what is too large."""
    with file.open("rb") as stream:
        data = stream.read(_MAX_TEXT_BYTES + 1)
    if len(data) > _MAX_TEXT_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {_MAX_TEXT_BYTES} bytes, which is all that is read of it")
    return data.decode("utf-8").replace("\r\n", "\n")


def load_yaml(path: str | os.PathLike[str], to: type[S]) -> S:
    """Read a YAML file into the settings type ``to``; raises ConfigError naming file, line and path in the file."""
    file = Path(path)
    try:
        text = read_text(file)
    except OSError as error:
        raise ConfigError(f"config file '{shown(file)}' cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"config file '{file}' cannot be read: {error}") from error
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, AttributeError, RecursionError) as error:
        # The last three are what PyYAML lets out for a day 32, an `!!int x` or very deep nesting.
        raise ConfigError(f"config file '{file}' is not YAML: {' '.join(str(error).split())}") from error
    _refuse_duplicates(root, file, set())
    try:
        return msgspec.convert({} if value is None else value, to)
    except msgspec.ValidationError as error:
        message, at = _split(str(error))
        line = _line_of(root, at, message)
        raise ConfigError(f"{file}:{line}: at '{at}': {message}{_hint(message, at, to)}") from error


def _split(message: str) -> tuple[str, str]:
    """Split msgspec's "text - at `$.a.b`" into text and path "a.b" ("top level" for the root)."""
    match = re.fullmatch(r"(.*) - at (`key` in )?`\$(.*)`", message, re.DOTALL)
    if match is None:
        return message, "top level"
    text = f"a key is wrong: {match[1]}" if match[2] else match[1]
    return text, match[3].lstrip(".") or "top level"


def _steps(path: str) -> list[str]:
    """Field names and list positions of a path; "..." is msgspec's word for some entry of a mapping."""
    return [] if path == "top level" else re.findall(r"[^.\[\]]+|\.\.\.", path)


def _hint(text: str, path: str, root: type) -> str:
    """What is allowed at this place: the keys for an unknown or missing one, the values for one out of a fixed set."""
    kinds = list(_variants([inspect.type_info(root)]))
    for step in _steps(path):
        kinds = list(_variants(inner for kind in kinds for inner in _inner(kind, step)))
    allowed: list[str] = []
    if "unknown field" in text or "missing required field" in text:
        structs = [kind for kind in kinds if isinstance(kind, inspect.StructType)]
        # Of several structs msgspec does not say which one it took; the wrong keys would be worse than none.
        allowed = [field.encode_name for field in structs[0].fields] if len(structs) == 1 else []
    elif "Invalid enum value" in text:
        allowed = [str(value) for kind in kinds if isinstance(kind, inspect.LiteralType) for value in kind.values]
        allowed += [str(item.value) for kind in kinds if isinstance(kind, inspect.EnumType) for item in kind.cls]
    return f"; allowed here: {', '.join(allowed)}" if allowed else ""


def _variants(kinds: Iterable[inspect.Type]) -> Iterator[inspect.Type]:
    """The types themselves, with the members of unions in place of the unions, and without their descriptions."""
    for kind in kinds:
        if isinstance(kind, inspect.Metadata):
            yield from _variants([kind.type])
        elif isinstance(kind, inspect.UnionType):
            yield from _variants(kind.types)
        else:
            yield kind


def _inner(kind: inspect.Type, step: str) -> Iterator[inspect.Type]:
    """The type of the entry ``step`` of a value of type ``kind``."""
    if isinstance(kind, inspect.StructType):
        yield from (field.type for field in kind.fields if field.encode_name == step)
    elif isinstance(kind, inspect.DictType):
        yield kind.value_type
    elif isinstance(kind, inspect.ListType | inspect.VarTupleType):
        yield kind.item_type
    elif isinstance(kind, inspect.TupleType):
        yield kind.item_types[int(step)]


def _line_of(root: yaml.Node | None, path: str, message: str) -> int:
    """Line (from 1) of the entry that ``path`` and a field named in ``message`` lead to, as far as they exist."""
    named = re.search(r"unknown field `([^`]+)`", message)
    node, line = root, 1
    for step in [*_steps(path), *([named.group(1)] if named else [])]:
        if isinstance(node, yaml.MappingNode):
            entry = next(((k, v) for k, v in node.value if k.value == step), None)
            if entry is None:
                break
            line, node = entry[0].start_mark.line + 1, entry[1]
        elif isinstance(node, yaml.SequenceNode) and step.isdigit() and int(step) < len(node.value):
            node = node.value[int(step)]
            line = node.start_mark.line + 1
    return line


def _refuse_duplicates(node: yaml.Node | None, file: Path, visited: set[int]) -> None:
    if id(node) in visited:  # an alias, possibly of a node that holds it
        return
    visited.add(id(node))
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if key.value in seen:
                raise ConfigError(f"{file}:{key.start_mark.line + 1}: key '{key.value}' stands twice")
            seen.add(key.value)
            _refuse_duplicates(value, file, visited)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_duplicates(item, file, visited)
