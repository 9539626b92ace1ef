"""Foreign text as values: JSON, YAML, XML and plain text, with limits of size and depth.

Whatever is wrong with it is a SourceError that names the file. Every reader takes ``where``, the file as messages name
it, and refuses a Git LFS pointer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final, NamedTuple, TypeVar, overload
from xml.parsers import expat

import msgspec
import numpy as np
from numpy.typing import NDArray

from fuelrail.pipeline.errors import FuelrailError, SourceError
from fuelrail.pipeline.settings import parse_yaml
from fuelrail.sharding.sources.shared.files import check_no_pointer

T = TypeVar("T")

_MOST_UNTYPED: Final = 16 << 20
"""Bytes of JSON and YAML of no known type: a value may take 30 times its text."""


@contextlib.contextmanager
def parsing(where: str, what: str = "cannot be read") -> Iterator[None]:
    """Turn any error that a parser raises at foreign bytes into a SourceError: ``where``, ``what``, and why."""
    try:
        yield
    except FuelrailError:
        raise
    except Exception as error:
        why = {
            RecursionError: "it is nested too deeply",
            MemoryError: "it takes too much memory",
            EOFError: "it is cut off",
        }.get(type(error))
        text = f"no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise SourceError(f"{where} {what}: {why or text or type(error).__name__}") from error


def read_text(data: bytes, where: str) -> str:
    """Decode the text of UTF-8, without its mark."""
    check_no_pointer(data, where)
    with parsing(where, "is not text in UTF-8"):
        return str(data, "utf-8-sig")


@overload
def read_json(data: bytes, where: str, kind: type[T], what: str = ...) -> T: ...
@overload
def read_json(data: bytes, where: str, kind: Any = ..., what: str = ...) -> Any: ...
def read_json(
    data: bytes, where: str, kind: Any = Any, what: str = "is not JSON as it should be"
) -> Any:
    """Decode the value of a JSON text of this type."""
    check_no_pointer(data, where)
    if kind is Any:
        _check_size(data, where)
    with parsing(where, what):
        return msgspec.json.decode(data, type=kind)


def read_yaml(
    data: bytes, where: str, kind: type[T], what: str = "is not YAML as it should be"
) -> T:
    """Decode the value of a YAML text of this type. Merge keys, which may grow without bound, are refused."""
    check_no_pointer(data, where)
    _check_size(data, where)
    with parsing(where, what):
        _, value = parse_yaml(str(data, "utf-8-sig"), takes_merges=False)
        return msgspec.convert(value, kind)


def read_xml(
    data: bytes, where: str, target: Any, what: str = "is not XML, or it is cut off"
) -> None:
    """Call ``target.start(element, attributes)``, and ``end`` and ``data`` where it has them, for an XML text.

    Entities of the document's own, which may be files or grow without bound, are refused.
    """
    check_no_pointer(data, where)

    def refuse(*_: object) -> None:
        raise ValueError("it declares entities")

    with parsing(where, what):
        parser = expat.ParserCreate()
        parser.buffer_text = True
        parser.EntityDeclHandler = refuse
        parser.StartElementHandler = target.start
        parser.EndElementHandler = getattr(target, "end", None)
        parser.CharacterDataHandler = getattr(target, "data", None)
        try:
            parser.Parse(data, True)
        except (expat.ExpatError, LookupError, ValueError) as error:
            text = f"an element has no {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"line {parser.CurrentLineNumber}: {text}") from error


def _check_size(data: bytes, where: str) -> None:
    if len(data) > _MOST_UNTYPED:
        raise SourceError(
            f"{where} has {len(data)} bytes, of which at most {_MOST_UNTYPED} are read"
        )


class JsonFacts(NamedTuple):
    """What a JSON says, by paths: names and numbers of entries, joined by dots."""

    values: Any
    where: str

    def at(self, path: str, camera: str = "") -> Any:
        """Return what is at a path, in which ``{camera}`` is replaced; raise SourceError where nothing is."""
        value, path = self.values, path.replace("{camera}", camera)
        try:
            for name in path.split("."):
                value = value[int(name)] if isinstance(value, list) else value[name]
        except (KeyError, IndexError, ValueError, TypeError) as error:
            raise SourceError(f"{self.where}: the JSON has no {path}") from error
        return value

    def whole(self, path: str) -> int:
        """Return a whole number of nanoseconds."""
        value = self.at(path)
        if not isinstance(value, int) or isinstance(value, bool):
            raise SourceError(
                f"{self.where}: {path} is {value!r}, expected a whole number of nanoseconds"
            )
        return value

    def matrix(self, path: str, size: int, camera: str = "") -> NDArray[np.float64]:
        """Return a matrix (size, size)."""
        value = self.at(path, camera)
        try:
            return np.array(value, np.float64).reshape(size, size)
        except (ValueError, TypeError, RecursionError, OverflowError) as error:
            text = (
                f"{path.replace('{camera}', camera)} is not a {size}x{size} matrix: {value!r:.200}"
            )
            raise SourceError(f"{self.where}: {text}") from error
