"""Foreign text as values: JSON, YAML, XML and plain text, with limits of size and depth.

Whatever is wrong with it is a SourceError that names the file. Every reader takes ``where``, the
file as messages name it, and refuses a Git LFS pointer.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, overload
from xml.parsers import expat

import msgspec
import numpy as np

from fuelrail.pipeline.errors import FuelrailError, SourceError
from fuelrail.pipeline.settings import explain, parse_yaml
from fuelrail.pipeline.text import fault_in_words
from fuelrail.sharding.sources.shared.files import check_no_pointer

if TYPE_CHECKING:
    from collections import Counter

    from fuelrail.pipeline.sample.schema import F64

T = TypeVar("T")

_MOST_UNTYPED: Final = 16 << 20
"""Bytes of JSON and YAML of no known type: a value may take 30 times its text."""
# A text without an end goes to the end of all: were it tried again from each quote in it, the time
# would grow with the square.
_TEXT_OR_NAN: Final = re.compile(rb'"(?:[^"\\]|\\.)*"?|-?\b(?:NaN|Infinity)\b', re.DOTALL)
NAN_AS_NULL: Final = "NaN and infinities in JSON, read as null outside of lists"


@contextlib.contextmanager
def parsing(where: str, problem: str = "cannot be read") -> Iterator[None]:
    """Turn any error that a parser raises at foreign bytes into a SourceError: ``where``,
    ``problem``, and why.
    """
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
        if isinstance(error, msgspec.ValidationError):
            text = fault_in_words(error)
        raise SourceError(f"{where} {problem}: {why or text or type(error).__name__}") from error


def read_text(data: bytes, where: str) -> str:
    """Decode the text of UTF-8, without its mark."""
    check_no_pointer(data, where)
    with parsing(where, "is not text in UTF-8"):
        return str(data, "utf-8-sig")


@overload
def read_json(
    data: bytes,
    where: str,
    kind: type[T],
    problem: str = ...,
    noted: Counter[str] | None = ...,
) -> T: ...
@overload
def read_json(
    data: bytes,
    where: str,
    kind: Any = ...,
    problem: str = ...,
    noted: Counter[str] | None = ...,
) -> Any: ...
def read_json(
    data: bytes,
    where: str,
    kind: Any = Any,
    problem: str = "is not JSON as it should be",
    noted: Counter[str] | None = None,
) -> Any:
    """Decode the value of a JSON text of this type, with or without a byte order mark.

    NaN and infinities, which Python's ``json`` writes and JSON does not have, are read as null, but
    for those in lists of no stated type, which stay; ``noted`` counts them. Without ``noted`` they
    are refused by name.
    """
    check_no_pointer(data, where)
    if kind is Any:
        _check_size(data, where)
    text = data.removeprefix(codecs.BOM_UTF8)
    with parsing(where, problem):
        try:
            return msgspec.json.decode(text, type=kind)
        except msgspec.ValidationError as error:
            raise SourceError(f"{where} {problem}: {explain(error, text, kind)}") from error
        except msgspec.DecodeError as error:
            strict, count = without_nan(text)
            if not count:
                raise
            if noted is None:
                raise ValueError(
                    f"{error}; {count} values are NaN or infinite: write null"
                ) from error
            value = msgspec.json.decode(strict, type=kind)
            if kind is Any:
                value = _without_nan_outside_lists(json.loads(text))
            noted[NAN_AS_NULL] += count
            return value


def _without_nan_outside_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nan_outside_lists(item) for name, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def without_nan(text: bytes) -> tuple[bytes, int]:
    """Return a JSON text with null for each bare NaN, Infinity and -Infinity, and how many these
    were.
    """
    if b"NaN" not in text and b"Infinity" not in text:
        return text, 0
    count = 0

    def replace(match: re.Match[bytes]) -> bytes:
        nonlocal count
        if match[0].startswith(b'"'):
            return match[0]
        count += 1
        return b"null"

    return _TEXT_OR_NAN.sub(replace, text), count


def read_yaml(
    data: bytes,
    where: str,
    kind: type[T],
    problem: str = "is not YAML as it should be",
) -> T:
    """Decode the value of a YAML text of this type.

    Merge keys, which may grow without bound, are refused.
    """
    check_no_pointer(data, where)
    _check_size(data, where)
    with parsing(where, problem):
        _, value = parse_yaml(str(data, "utf-8-sig"), takes_merges=False)
        return msgspec.convert(value, kind)


def read_xml(
    data: bytes,
    where: str,
    target: Any,
    problem: str = "is not XML, or it is cut off",
) -> None:
    """Call ``target.start(element, attributes)``, and ``end`` and ``data`` where it has them, for
    an XML text.

    Entities of the document's own, which may be files or grow without bound, are refused.
    """
    check_no_pointer(data, where)

    def refuse(*_: object) -> None:
        raise ValueError("it declares entities")

    with parsing(where, problem):
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

    def read(self, path: str, camera: str = "") -> Any:
        """Return what is at a path, in which ``{camera}`` is replaced; raise SourceError where
        nothing is.
        """
        value = self.values
        path = path.replace("{camera}", camera)
        try:
            for name in path.split("."):
                value = value[int(name)] if isinstance(value, list) else value[name]
        except (KeyError, IndexError, ValueError, TypeError) as error:
            raise SourceError(f"{self.where}: the JSON has no {path}") from error
        return value

    def integer(self, path: str) -> int:
        """Return a whole number of nanoseconds."""
        value = self.read(path)
        if not isinstance(value, int) or isinstance(value, bool):
            raise SourceError(
                f"{self.where}: {path} is {value!r}, expected a whole number of nanoseconds"
            )
        return value

    def matrix(self, path: str, size: int, camera: str = "") -> F64:
        """Return a matrix (size, size)."""
        value = self.read(path, camera)
        try:
            return np.array(value, np.float64).reshape(size, size)
        except (ValueError, TypeError, RecursionError, OverflowError) as error:
            text = (
                f"{path.replace('{camera}', camera)} is not a {size}x{size} matrix: {value!r:.200}"
            )
            raise SourceError(f"{self.where}: {text}") from error
