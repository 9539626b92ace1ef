"""Counter-based random numbers: they depend on their purpose, never on the caller or the time.

A draw is addressed by (stream, seed, epoch, sample, camera) and is the same on every host, rank,
worker, thread and call order. There is no generator and no state: the address is hashed. So a
resumed or re-partitioned run repeats its augmentations exactly, and a single sample's can be
reproduced alone.

Definition (frozen; golden values in the tests): the 64-bit words of a draw are the little-endian
words of ``BLAKE2b(message = seed, epoch, sample, camera, block as five signed 64-bit little-endian
integers, person = stream in ASCII, digest_size = 64)`` for block 0, 1, ..., eight words a block; a
word w gives the uniform ``(w >> 11) * 2**-53``. BLAKE2b (RFC 7693) is in Python's standard library,
identical everywhere, and costs about a microsecond a camera, less than numpy's own counter-based
generators cost to construct.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from fuelrail.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from fuelrail.pipeline.dtypes import F64


ALL_CAMERAS = -1
"""The camera to name for a draw that all cameras of a sample share."""

_ADDRESS = struct.Struct("<5q")
_WORDS_PER_BLOCK = 8


def second_view(sample: int) -> int:
    """Return the sample to name for a sample's second draw: ``-1 - sample``, which no sample
    has.
    """
    return -1 - sample


def uniforms(
    seed: int,
    epoch: int,
    sample: int,
    cameras: Sequence[int] = (ALL_CAMERAS,),
    *,
    stream: str,
    count: int,
) -> F64:
    """Return uniforms in [0, 1), float64 (len(cameras), count), for one sample.

    Row i belongs to ``cameras[i]`` and its first values do not change when ``count`` grows.
    ``stream`` (1 to 16 ASCII characters) keeps different uses apart. Raises ConfigError for an
    address outside signed 64 bits.
    """
    num_blocks = -(-count // _WORDS_PER_BLOCK)
    person = stream.encode("ascii")
    digests = []
    try:
        for camera in cameras:
            for block in range(num_blocks):
                address = _ADDRESS.pack(seed, epoch, sample, camera, block)
                digests.append(blake2b(address, person=person).digest())
    except struct.error as error:
        raise ConfigError(
            f"random address seed={seed}, epoch={epoch}, sample={sample}, cameras={list(cameras)} "
            f"must be integers of signed 64 bits"
        ) from error
    words = np.frombuffer(b"".join(digests), dtype="<u8")
    table = words.reshape(len(cameras), num_blocks * _WORDS_PER_BLOCK)
    upper_53_bits = table[:, :count] >> np.uint64(11)
    return upper_53_bits.astype(np.float64) * 2.0**-53


def settle_train(settings: msgspec.Struct, drawn: Sequence[str]) -> None:
    """Make ``train`` False where it is not given, which settings without fields of ``drawn`` allow.

    Raises ConfigError where fields that are drawn in training alone are given without it: they
    would do nothing.
    """
    if getattr(settings, "train", None) is not None:
        return
    defaults = {field.name: field.default for field in msgspec.structs.fields(settings)}
    changes = []
    for name in drawn:
        value = getattr(settings, name)
        if value != defaults[name]:
            changes.append(f"{name}={value!r}")
    if changes:
        raise ConfigError(
            f"{type(settings).__name__}: {', '.join(changes)} is drawn in training alone, and "
            "train is not given: say train=True, or train=False for evaluation"
        )
    msgspec.structs.force_setattr(settings, "train", False)


def within(limits: tuple[float, float], uniform: float) -> float:
    """Return the number between two limits that a uniform in [0, 1) makes."""
    low, high = limits
    return low + (high - low) * uniform
