"""Strict settings: YAML or plain dicts to frozen structs; a mistake is named with file, line and path.

A settings type derives from :class:`Settings`. Unknown keys, wrong types, missing values and values out of range
are :class:`~fuelrail.pipeline.errors.ConfigError`; nothing is coerced and nothing is ignored.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

import msgspec
import yaml

from fuelrail.pipeline.errors import ConfigError

if TYPE_CHECKING:
    import os


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all settings types: immutable, keyword-only, unknown keys refused.

    A subclass repeats ``frozen=True`` so that type checkers see it.
    """


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


def load_yaml(path: str | os.PathLike[str], to: type[S]) -> S:
    """Read a YAML file into the settings type ``to``; raises ConfigError naming file, line and path in the file."""
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file '{file}' cannot be read: {error}") from error
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        _refuse_duplicates(root, file)
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"config file '{file}' is not YAML: {' '.join(str(error).split())}") from error
    try:
        return msgspec.convert({} if value is None else value, to)
    except msgspec.ValidationError as error:
        message, at = _split(str(error))
        line = _line_of(root, at, message)
        raise ConfigError(f"{file}:{line}: at '{at}': {message}{_hint(message, at, to)}") from error


def _split(message: str) -> tuple[str, str]:
    """Split msgspec's "text - at `$.a.b`" into text and path "a.b" ("top level" for the root)."""
    text, _, path = message.partition(" - at `$")
    return text, path.rstrip("`").lstrip(".") or "top level"


def _steps(path: str) -> list[str]:
    return [] if path == "top level" else re.findall(r"[^.\[\]]+", path)


def _hint(text: str, path: str, root: type) -> str:
    """For an unknown or missing key, the keys that are allowed at this place."""
    if "unknown field" not in text and "missing required field" not in text:
        return ""
    found: Any = root
    for step in _steps(path):
        found = get_type_hints(found).get(step) if _is_struct(found) else None
        found = next((a for a in (found, *get_args(found)) if _is_struct(a)), None)
    if not _is_struct(found):
        return ""
    return f"; allowed here: {', '.join(field.encode_name for field in msgspec.structs.fields(found))}"


def _is_struct(candidate: object) -> bool:
    return isinstance(candidate, type) and issubclass(candidate, msgspec.Struct)


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


def _refuse_duplicates(node: yaml.Node | None, file: Path) -> None:
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if key.value in seen:
                raise ConfigError(f"{file}:{key.start_mark.line + 1}: key '{key.value}' stands twice")
            seen.add(key.value)
            _refuse_duplicates(value, file)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_duplicates(item, file)
