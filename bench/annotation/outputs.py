"""A model's outputs: the table of channels that they need, and the values of each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from fuelrail.pipeline.channels.logits import (
    SAMPLED,
    TOPK,
    Logits,
    logits_entry,
    logits_store,
)
from fuelrail.pipeline.channels.table import DTYPES, Channel
from fuelrail.pipeline.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from fuelrail.bench.annotation.teacher import Reduction

_MOST_INT8: Final = 127
_SCALE: Final = "_scale"
_BY_HAND: Final = "describe it in a table of channels (--channels FILE; FORMAT.md, section 2.1)"


def infer_table(
    outputs: Mapping[str, Any],
    num_rows: int,
    store: str,
) -> list[dict[str, Any]]:
    """Infer the channels of outputs of ``num_rows`` samples: arrays, texts and bytes that no
    augmentation moves.

    ``store`` is how floating arrays of one axis and more are stored: ``as_is``, ``float16``, or
    ``int8`` beside a channel ``{name}_scale``; or how those of two axes are, which are logits [T,
    V] (`logits_store`). Raises ConfigError for values that need a table written by hand, and where
    nothing is logits though ``store`` is for them.
    """
    table: list[dict[str, Any]] = []
    logits = logits_store(store)
    for name, output in outputs.items():
        head: dict[str, Any] = {"name": name, "law": {"name": "fixed"}}
        sides = None if logits is None else _logits_sides(name, output, num_rows)
        if logits is not None and sides is not None:
            table.append(logits_entry(name, logits, *sides))
            continue
        values = _split(name, output, num_rows)
        if all(isinstance(value, str) for value in values):
            table.append({**head, "kind": "text", "field": f"{name}.txt"})
        elif all(
            isinstance(value, list) and all(isinstance(text, str) for text in value)
            for value in values
        ):
            table.append({**head, "kind": "texts", "field": f"{name}.json"})
        elif all(isinstance(value, bytes) for value in values):
            table.append({**head, "kind": "bytes", "field": f"{name}.bin"})
        elif len({_kind(value) for value in values}) == 1 and isinstance(values[0], np.ndarray):
            dtype = values[0].dtype.name
            shape = list(values[0].shape)
            if dtype not in DTYPES:
                raise ConfigError(
                    f"output {name!r} has dtype {dtype}; allowed are {', '.join(DTYPES)}"
                )
            is_large = values[0].dtype.kind == "f" and shape
            stored = store if is_large and store in ("float16", "int8") else dtype
            entry = {
                **head,
                "kind": "array",
                "field": f"{name}.npy",
                "dtype": stored,
                "axes": [f"axis_{number}" for number in range(len(shape))],
                "shape": shape,
            }
            table.append(entry)
            if stored == "int8" and is_large:
                scale = f"{name}{_SCALE}"
                scale_entry = {
                    "law": {"name": "fixed"},
                    "description": f"{name} is int8 times this",
                    "name": scale,
                    "kind": "array",
                    "field": f"{scale}.npy",
                    "dtype": "float32",
                }
                table.append(scale_entry)
        else:
            kinds = sorted({_kind(value) for value in values})
            raise ConfigError(
                f"output {name!r} holds {', '.join(kinds)}, not arrays of one shape, texts "
                f"or bytes: {_BY_HAND}"
            )
    if logits is not None and not any(entry["kind"] == logits[0] for entry in table):
        raise ConfigError(
            f"store={store!r} is for logits, floats [B, T, V]; the model returned "
            f"{', '.join(outputs)} without any: give a sample's logits an axis of "
            "positions, or store them as_is"
        )
    return table


def rows_of(
    outputs: Mapping[str, Any],
    keys: Sequence[str],
    channels: Sequence[Channel],
    reduce: Reduction,
) -> list[dict[str, Any]]:
    """Return the values of each row as the table stores them.

    Floating values are cast to a floating dtype of the table; for int8 with a channel
    ``{name}_scale`` beside, they are divided by the row's largest absolute value / 127, and that is
    the scale. Those of a channel of logits go through ``reduce``. Raises ConfigError for an output
    whose length is not the batch's, and for values that its dtype cannot hold.
    """
    table = {channel.name: channel for channel in channels}
    rows: list[dict[str, Any]] = [{} for _ in keys]
    for name, output in outputs.items():
        channel = table.get(name)
        if channel is not None and channel.kind in (TOPK, SAMPLED):
            logits = _rows(name, output, len(keys))
            for row, key, value in zip(rows, keys, logits, strict=True):
                row[name] = value if isinstance(value, Logits) else reduce(value, channel, key)
            continue
        values = _split(name, output, len(keys))
        for row, value in zip(rows, values, strict=True):
            row[name] = value
            if channel is None or not isinstance(value, np.ndarray) or value.dtype.kind != "f":
                continue
            if channel.dtype == "int8" and f"{name}{_SCALE}" in table:
                if not np.isfinite(value).all():
                    raise ConfigError(
                        f"output {name!r} has NaN or infinities, which int8 cannot hold; replace "
                        "them in the model, or store it as_is with a table that has allows_nan or "
                        "allows_inf (--channels FILE)"
                    )
                largest = float(np.abs(value).max()) if value.size else 0.0
                scale = np.float32(largest / _MOST_INT8 if largest else 1.0)
                quantised = np.clip(np.rint(value / scale), -_MOST_INT8, _MOST_INT8)
                row[name] = quantised.astype(np.int8)
                row[f"{name}{_SCALE}"] = scale
            elif channel.dtype.startswith("float"):
                with np.errstate(over="ignore"):
                    row[name] = value.astype(channel.numpy_dtype)
                if np.isinf(row[name]).sum() > np.isinf(value).sum():
                    largest = np.abs(value[np.isfinite(value)]).max()
                    limit = np.finfo(channel.dtype).max
                    raise ConfigError(
                        f"output {name!r} has {largest:g}, and {channel.dtype} holds {limit:g} at "
                        "most: store it as_is, or as int8 with a scale"
                    )
    return rows


def _kind(value: object) -> str:
    """Return the type of a value, of an array its shape."""
    if isinstance(value, np.ndarray):
        return f"array {list(value.shape)}"
    return type(value).__name__


def _logits_sides(
    name: str,
    output: object,
    num_rows: int,
) -> tuple[int | None, int] | None:
    """Return T and V of an output that is logits [T, V] of each sample, else None; T is None in
    a list: it may vary.
    """
    import torch

    rows = _rows(name, output, num_rows)
    for row in rows:
        if isinstance(row, torch.Tensor):
            is_float = row.is_floating_point()
        else:
            is_float = getattr(row, "dtype", np.dtype("O")).kind == "f"
        if not is_float or getattr(row, "ndim", 0) != 2:
            return None
    sizes = {row.shape[1] for row in rows}
    if len(sizes) != 1:
        return None
    num_positions, num_classes = rows[0].shape
    if isinstance(output, list | tuple):
        num_positions = None
    return num_positions, num_classes


def _split(name: str, output: object, num_rows: int) -> list[Any]:
    """Return the rows of an output; tensors as arrays in host memory, bfloat16 as float32."""
    import torch

    if isinstance(output, torch.Tensor):
        output = _on_host(name, output)
    return [_array(name, row) for row in _rows(name, output, num_rows)]


def _rows(name: str, output: object, num_rows: int) -> list[Any]:
    import torch

    has_rows = isinstance(output, list | tuple)
    if isinstance(output, np.ndarray | torch.Tensor):
        has_rows = output.ndim > 0
    rows: list[Any] = list(output) if has_rows else []  # type: ignore[call-overload]
    if not has_rows or len(rows) != num_rows:
        length = f"of {len(rows)} rows" if has_rows else "without rows"
        raise ConfigError(
            f"output {name!r} is a {type(output).__name__} {length}; it must be a tensor [B, ...] "
            f"or a list, with a row for each of the batch's {num_rows} samples"
        )
    return rows


def _on_host(name: str, tensor: torch.Tensor) -> NDArray[Any]:
    import torch

    host = tensor.detach().cpu()
    if host.dtype == torch.bfloat16:
        host = host.float()
    try:
        return host.numpy()
    except TypeError as error:  # sparse, quantised, float8
        raise ConfigError(
            f"output {name!r} is a tensor of {host.dtype} and layout {host.layout}, which "
            f"no array can hold: make it dense, and of one of {', '.join(DTYPES)}"
        ) from error


def _array(name: str, row: Any) -> Any:
    import torch

    if isinstance(row, torch.Tensor):
        return _on_host(name, row)
    if isinstance(row, dict):
        return {part: _array(f"{name}.{part}", value) for part, value in row.items()}
    if isinstance(row, np.generic | bool | int | float):
        return np.asarray(row)
    return row
