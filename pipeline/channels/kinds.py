"""Kinds: how a channel's values become a member's bytes, come back, and become part of a batch.

A kind is a subclass of :class:`Kind`, found by name in :data:`KINDS`. Packages add kinds by the
entry point group ``fuelrail.kinds``, whose entry points name ``Kind`` objects.

========  =============================  ========================================================
kind      value                          in the batch
========  =============================  ========================================================
image     (H, W) or (H, W, 3) array      stacked
points    (P, C) array                   list
array     array                          stacked
ragged    dict of arrays (M, ...)        dict of lists
text      str                            list
texts     list of str                    list
tokens    (T,) integers                  stacked where T is fixed, else `Packed`: values and offsets
bytes     bytes                          list
========  =============================  ========================================================

``logits_topk`` and ``logits_sampled`` are in :mod:`fuelrail.pipeline.channels.logits`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from fuelrail.pipeline.channels import logits
from fuelrail.pipeline.channels.plugins import Registry
from fuelrail.pipeline.channels.table import (
    Channel,
    check_shape,
    little_endian,
    not_finite,
)
from fuelrail.pipeline.errors import ImageError, SchemaError, needs
from fuelrail.pipeline.limits import UNTYPED
from fuelrail.pipeline.sample.arrays import (
    Buffer,
    read_npy,
    read_tensors,
    write_npy,
    write_tensors,
)
from fuelrail.pipeline.sample.image_header import probe, unpack_png
from fuelrail.pipeline.settings import explain

if TYPE_CHECKING:
    from fuelrail.pipeline.dtypes import I64


Value = Any
"""What a kind decodes to: the table above."""

BYTES_EXTENSIONS: Final = (
    "aac",
    "avif",
    "bin",
    "csv",
    "flac",
    "geojson",
    "h264",
    "h265",
    "json",
    "laz",
    "mp3",
    "mp4",
    "ogg",
    "opus",
    "pcd",
    "tif",
    "tiff",
    "wav",
    "webp",
    "xml",
    "yaml",
)
"""What members of kind ``bytes`` may end with: data that no usual reader runs."""
_PNG_BITS: Final = {"uint8": 8, "uint16": 16}


class Packed(NamedTuple):
    """Sequences of differing length: value i is ``values[offsets[i] : offsets[i + 1]]``; offsets
    are int64 [B + 1].
    """

    values: NDArray[np.generic]
    offsets: I64


class Kind(ABC):
    """The code of one kind.

    Attributes:
        extensions: what members of the kind may end with; the first is the usual one.
    """

    extensions: ClassVar[tuple[str, ...]]

    def broken(self, _channel: Channel, /) -> Iterator[str]:
        """Yield what is wrong with an entry of the table that has this kind; no check of law or
        names.
        """
        return iter(())

    @abstractmethod
    def encode(self, value: Value, channel: Channel) -> bytes:
        """Return a member's raw bytes; raise SchemaError for a value unlike the table."""

    @abstractmethod
    def decode(self, data: Buffer, channel: Channel) -> Value:
        """Return the value, arrays as read-only views where they can be.

        Raises SchemaError or ImageError for bytes that may not be stored: dtype, shape, tokens
        beyond the vocabulary, NaN and infinities where the table forbids them.
        """

    def check(self, data: Buffer, channel: Channel) -> object:
        """Raise what `decode` does, of an image by its header alone."""
        return self.decode(data, channel)

    def collate(
        self, values: Sequence[Value | None], _channel: Channel, _shape: tuple[int, ...], /
    ) -> Any:
        """Return what the batch holds of the values of its samples.

        None among them is a missing value: in a stack it is filled with zeros of the others' shape,
        in `Packed` it is empty, in a list it is None; the loader's ``{name}_valid`` says which.
        ``shape`` is that of a value, for a batch without any.
        """
        return list(values)

    def row_bytes(self, _channel: Channel) -> int | None:
        """Return the bytes of a row, for the codec ``zstd-pR``; 0: plain ``zstd``; None: stored
        raw.
        """
        return None


def _checked(array: NDArray[np.generic], channel: Channel) -> NDArray[np.generic]:
    text = check_shape(array, channel)
    if text is not None:
        raise SchemaError(f"channel '{channel.name}' is {text}")
    return array


def _check_values(array: NDArray[np.generic], channel: Channel) -> None:
    text = not_finite(array, channel)
    if text is not None:
        raise SchemaError(text)


def _as_array(value: Value, channel: Channel) -> NDArray[Any]:
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        # Such as of a tensor of bfloat16, or on a GPU.
        raise SchemaError(
            f"channel '{channel.name}': numpy cannot take {type(value).__name__}: {error}"
        ) from error


def _stack(
    values: Sequence[Value | None],
    channel: Channel,
    shape: tuple[int, ...],
) -> NDArray[np.generic]:
    present = [value for value in values if value is not None]
    make = np.empty if len(present) == len(values) else np.zeros
    if present:
        dtype = present[0].dtype
        shape = present[0].shape
    else:
        dtype = channel.numpy_dtype
        shape = shape or tuple(side or 0 for side in channel.shape)
    stacked = make((len(values), *shape), dtype)
    for row, value in enumerate(values):
        if value is None:
            continue
        if value.shape != shape:
            raise SchemaError(
                f"channel '{channel.name}': values of {list(shape)} and "
                f"{list(value.shape)} cannot be stacked"
            )
        stacked[row] = value
    return stacked


class _ArrayKind(Kind):
    """An array of the table's shape."""

    extensions = ("npy",)

    def broken(self, channel: Channel) -> Iterator[str]:
        if not channel.dtype:
            yield "dtype is missing"
        if None in channel.shape:
            yield f"shape {list(channel.shape)} must be fixed; kinds points, ragged and tokens vary"

    def encode(self, value: Value, channel: Channel) -> bytes:
        array = _as_array(value, channel)
        if array.dtype.newbyteorder("<") == channel.numpy_dtype:
            array = np.asarray(array, channel.numpy_dtype, order="C")
        _check_values(_checked(array, channel), channel)
        return write_npy(array)

    def decode(self, data: Buffer, channel: Channel) -> NDArray[Any]:
        array = _checked(read_npy(data), channel)
        _check_values(array, channel)
        return array

    def collate(
        self,
        values: Sequence[Value | None],
        channel: Channel,
        shape: tuple[int, ...],
    ) -> Any:
        return _stack(values, channel, shape)

    def row_bytes(self, channel: Channel) -> int:
        return channel.numpy_dtype.itemsize


class _PointsKind(_ArrayKind):
    """Any number of points, a row each."""

    def broken(self, channel: Channel) -> Iterator[str]:
        if not channel.dtype:
            yield "dtype is missing"
        is_varying = [side is None for side in channel.shape]
        if is_varying != [True, False]:
            shape = list(channel.shape)
            yield f"shape {shape} must be [null, C]: any number of points of C columns"
        if not channel.columns:
            yield "columns must name the columns of a point"

    def collate(
        self,
        values: Sequence[Value | None],
        _channel: Channel,
        _shape: tuple[int, ...],
    ) -> list[Any]:
        return list(values)

    def row_bytes(self, channel: Channel) -> int:
        num_columns = channel.shape[-1] if len(channel.shape) > 1 else None
        return channel.numpy_dtype.itemsize * (num_columns or 1)


class _TokensKind(_ArrayKind):
    """Numbers of words of a vocabulary."""

    def broken(self, channel: Channel) -> Iterator[str]:
        if len(channel.shape) != 1:
            yield (
                f"shape {list(channel.shape)} must be [T], or [null] where the number of tokens "
                "varies"
            )
        if not channel.dtype or np.dtype(channel.dtype).kind not in "iu":
            yield f"dtype '{channel.dtype}' must be one of integers"
        if channel.vocabulary is None or channel.vocabulary.size < 1:
            yield "vocabulary must name the vocabulary and its size, from 1"

    def encode(self, value: Value, channel: Channel) -> bytes:
        data = super().encode(value, channel)
        self.decode(data, channel)
        return data

    def decode(self, data: Buffer, channel: Channel) -> NDArray[Any]:
        tokens = super().decode(data, channel)
        vocabulary = channel.vocabulary
        if vocabulary is None or not tokens.size:
            return tokens
        low = int(tokens.min())
        high = int(tokens.max())
        if low < 0 or high >= vocabulary.size:
            raise SchemaError(
                f"tokens of channel '{channel.name}' are {low} to {high}; vocabulary "
                f"'{vocabulary.name}' has 0 to {vocabulary.size - 1}"
            )
        return tokens

    def collate(
        self,
        values: Sequence[Value | None],
        channel: Channel,
        shape: tuple[int, ...],
    ) -> Any:
        if channel.shape[0] is not None:
            return _stack(values, channel, shape)
        empty = np.empty(0, channel.numpy_dtype)
        rows = [empty if value is None else value for value in values]
        lengths = [len(row) for row in rows]
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        tokens = np.concatenate([empty, *rows])
        return Packed(tokens, offsets)


class _RaggedKind(Kind):
    """Named arrays of one length, which varies."""

    extensions = ("safetensors",)

    def broken(self, channel: Channel) -> Iterator[str]:
        if not channel.arrays:
            yield "arrays must name at least one array"
        if channel.dtype or channel.shape or channel.columns:
            yield "dtype, shape and columns are in its arrays: leave them out"

    def encode(self, value: Value, channel: Channel) -> bytes:
        if not isinstance(value, Mapping):
            raise SchemaError(
                f"channel '{channel.name}' is {type(value).__name__}; kind 'ragged' takes a "
                "dict of arrays"
            )
        arrays = {name: _as_array(array, channel) for name, array in value.items()}
        return write_tensors(self._checked(arrays, channel))

    def decode(self, data: Buffer, channel: Channel) -> dict[str, NDArray[np.generic]]:
        return self._checked(read_tensors(data), channel)

    def _checked(
        self, arrays: dict[str, NDArray[np.generic]], channel: Channel
    ) -> dict[str, NDArray[np.generic]]:
        """Return the arrays in the order of the table; raise SchemaError where they are not as it
        says.
        """
        specs = {spec.name: spec for spec in channel.arrays}
        if arrays.keys() != specs.keys():
            raise SchemaError(
                f"channel '{channel.name}' has the arrays {', '.join(sorted(arrays)):.200}; the "
                f"table has {', '.join(specs):.200}"
            )
        lengths = {len(array) if array.ndim else -1 for array in arrays.values()}
        if len(lengths) != 1:
            raise SchemaError(
                f"arrays of channel '{channel.name}' have the lengths {sorted(lengths)}; they "
                "share one"
            )
        for name, array in arrays.items():
            spec = specs[name]
            dtype = little_endian(spec.dtype)
            if array.dtype != dtype or array.shape[1:] != spec.shape:
                raise SchemaError(
                    f"array '{name}' of channel '{channel.name}' is "
                    f"{array.dtype}{list(array.shape)}; the table has "
                    f"{spec.dtype}{['M', *spec.shape]}"
                )
        for name in specs:
            _check_values(arrays[name], channel)
        return {name: arrays[name] for name in specs}

    def collate(
        self,
        values: Sequence[Value | None],
        channel: Channel,
        _shape: tuple[int, ...],
    ) -> dict[str, list[Any]]:
        arrays = {}
        for spec in channel.arrays:
            arrays[spec.name] = [None if value is None else value[spec.name] for value in values]
        return arrays

    def row_bytes(self, _channel: Channel) -> int:
        return 0


class _TextKind(Kind):
    """A text in UTF-8."""

    extensions = ("txt",)

    def encode(self, value: Value, channel: Channel) -> bytes:
        if not isinstance(value, str):
            raise SchemaError(
                f"channel '{channel.name}' is {type(value).__name__}; kind 'text' takes str"
            )
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise SchemaError(
                f"channel '{channel.name}' cannot be stored as UTF-8: {error}"
            ) from error

    def decode(self, data: Buffer, channel: Channel) -> str:
        try:
            return bytes(data).decode()
        except UnicodeDecodeError as error:
            raise SchemaError(f"channel '{channel.name}' is not UTF-8: {error}") from error


class _TextsKind(Kind):
    """Texts, as a list in JSON."""

    extensions = ("json",)

    def encode(self, value: Value, channel: Channel) -> bytes:
        if not isinstance(value, list | tuple) or not all(
            isinstance(entry, str) for entry in value
        ):
            raise SchemaError(
                f"channel '{channel.name}' is {value!r:.100}; kind 'texts' takes a list of str"
            )
        try:
            data = msgspec.json.encode(value)
        except UnicodeEncodeError as error:
            raise SchemaError(
                f"channel '{channel.name}' cannot be stored as UTF-8: {error}"
            ) from error
        text = UNTYPED.broken(len(data))
        if text is not None:
            raise SchemaError(f"channel '{channel.name}' {text}")
        return data

    def decode(self, data: Buffer, channel: Channel) -> list[str]:
        text = UNTYPED.broken(len(data))
        if text is not None:
            raise SchemaError(f"channel '{channel.name}' {text}")
        try:
            return msgspec.json.decode(data, type=list[str])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            fault = explain(error, data, list[str])
            raise SchemaError(
                f"channel '{channel.name}' is not a JSON list of texts: {fault}"
            ) from error

    def row_bytes(self, _channel: Channel) -> int:
        return 0


class _BytesKind(Kind):
    """Bytes as they are."""

    extensions = BYTES_EXTENSIONS

    def encode(self, value: Value, channel: Channel) -> bytes:
        if not isinstance(value, bytes | bytearray | memoryview):
            raise SchemaError(
                f"channel '{channel.name}' is {type(value).__name__}; kind 'bytes' takes bytes"
            )
        return bytes(value)

    def decode(self, data: Buffer, _channel: Channel) -> bytes:
        return bytes(data)

    def check(self, _data: Buffer, _channel: Channel) -> None:
        return None


class _ImageKind(Kind):
    """A raster as PNG or JPEG."""

    extensions = ("png", "jpg")

    def broken(self, channel: Channel) -> Iterator[str]:
        dtypes = _PNG_BITS if channel.extension == "png" else ("uint8",)
        if channel.dtype not in dtypes:
            yield f"dtype '{channel.dtype}' must be uint8, or uint16 as PNG"
        rank = len(channel.shape)
        is_colour = rank == 3 and channel.shape[2] == 3
        if rank != 2 and not is_colour:
            yield (
                f"shape {list(channel.shape)} must be [height, width] or [height, width, 3], null "
                "where it varies"
            )

    def encode(self, value: Value, channel: Channel) -> bytes:
        with needs("a channel of images"):
            import cv2

        array = _as_array(value, channel)
        pixels: NDArray[Any] = _checked(array, channel)
        bgr = pixels if pixels.ndim == 2 else pixels[..., ::-1]
        is_encoded, encoded = cv2.imencode(f".{channel.extension}", bgr)
        if not is_encoded:
            raise ImageError(
                f"channel '{channel.name}' of {list(pixels.shape)} cannot be encoded as "
                f"{channel.extension}"
            )
        return encoded.tobytes()

    def decode(self, data: Buffer, channel: Channel) -> NDArray[np.generic]:
        with needs("the pixels of a channel of images"):
            import cv2

        self.check(data, channel)
        encoded = data
        if channel.extension == "png":
            bits = _PNG_BITS[channel.dtype]
            encoded = unpack_png(data, bits=(bits,))
        flags = cv2.IMREAD_UNCHANGED | cv2.IMREAD_IGNORE_ORIENTATION
        pixels = cv2.imdecode(np.frombuffer(encoded, np.uint8), flags)
        if pixels is None:
            raise ImageError(
                f"channel '{channel.name}' cannot be decoded: its pixel data are broken"
            )
        if pixels.ndim == 3:
            pixels = np.ascontiguousarray(pixels[..., ::-1])
        return _checked(pixels, channel)

    def check(self, data: Buffer, channel: Channel) -> None:
        width, height = image_size(data, channel)
        for side, expected in zip((height, width), channel.shape, strict=False):
            if expected not in (None, side):
                raise ImageError(
                    f"channel '{channel.name}' is {width} x {height} pixels; the table has "
                    f"{channel.shape}"
                )

    def collate(
        self,
        values: Sequence[Value | None],
        channel: Channel,
        shape: tuple[int, ...],
    ) -> Any:
        return _stack(values, channel, shape)


def image_size(data: Buffer, channel: Channel) -> tuple[int, int]:
    """Return width and height [px] of an image of the channel; raise ImageError for a header
    unlike the table.
    """
    bits = _PNG_BITS[channel.dtype]
    info = probe(data, bits=(bits,))
    num_components = 3 if len(channel.shape) == 3 else 1
    file_format = "png" if channel.extension == "png" else "jpeg"
    if info.num_components != num_components or info.format != file_format:
        raise ImageError(
            f"channel '{channel.name}' is a {info.format} of {info.num_components} "
            f"components; the table has '.{channel.extension}' with {num_components}"
        )
    return info.width, info.height


class _LogitsKind(Kind):
    """A teacher's distributions: see `fuelrail.pipeline.channels.logits`."""

    extensions = ("lgt",)
    broken = staticmethod(logits.broken)
    encode = staticmethod(logits.encode)
    decode = staticmethod(logits.decode)
    collate = staticmethod(logits.collate)


KINDS: Final = Registry(
    "kind",
    "fuelrail.kinds",
    {
        "image": _ImageKind(),
        "points": _PointsKind(),
        "array": _ArrayKind(),
        "ragged": _RaggedKind(),
        "text": _TextKind(),
        "texts": _TextsKind(),
        "tokens": _TokensKind(),
        "bytes": _BytesKind(),
        logits.TOPK: _LogitsKind(),
        logits.SAMPLED: _LogitsKind(),
    },
    Kind,  # type: ignore[type-abstract]
)
"""All kinds by name."""
