from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.transforms.randomness import ALL_CAMERAS, uniforms

INT64 = st.integers(-(2**63), 2**63 - 1)


def test_golden_values() -> None:
    # Frozen: runs in the world resume on these numbers. If this fails, augmentation of every old run changes.
    got = uniforms(
        7,
        epoch=3,
        sample=12345,
        cameras=(0, 5, ALL_CAMERAS),
        stream="image-augment",
        count=5,
    )
    assert got.tolist() == [
        [
            0.5036406581986539,
            0.2256841167584196,
            0.042610640220525964,
            0.5107070380834474,
            0.4871414526653386,
        ],
        [
            0.3844064320496867,
            0.8951036399638768,
            0.761004471233019,
            0.5025152702829443,
            0.46405933013660183,
        ],
        [
            0.4057798742867943,
            0.34301015948353597,
            0.5506692180306191,
            0.5390269746235546,
            0.9090256456053564,
        ],
    ]
    # The ninth value comes from the second block.
    assert (
        uniforms(0, epoch=0, sample=0, cameras=(0,), stream="x", count=9)[0, 8]
        == 0.41058997102063555
    )
    assert uniforms(
        -1,
        epoch=2**63 - 1,
        sample=-(2**63),
        cameras=(2,),
        stream="image-augment",
        count=2,
    ).tolist() == [[0.6465054496679133, 0.6923204386626459]]


@given(
    INT64,
    INT64,
    INT64,
    st.lists(INT64, max_size=3),
    st.sampled_from(["some-stream", "s"]),
    st.integers(1, 20),
)
def test_is_what_the_definition_says(seed, epoch, sample, cameras, stream, count) -> None:
    got = uniforms(
        seed,
        epoch=epoch,
        sample=sample,
        cameras=cameras,
        stream=stream,
        count=count,
    )
    assert (got.shape, got.dtype) == ((len(cameras), count), np.float64)
    for camera, row in zip(cameras, got, strict=True):
        for i, value in enumerate(row):
            address = b"".join(
                x.to_bytes(8, "little", signed=True) for x in (seed, epoch, sample, camera, i // 8)
            )
            digest = hashlib.blake2b(address, digest_size=64, person=stream.encode()).digest()
            (word,) = struct.unpack_from("<Q", digest, 8 * (i % 8))
            assert value == (word >> 11) / 2**53


@pytest.mark.parametrize("address", [(2**63, 0, 0), (0, -(2**63) - 1, 0), (0, 0, 2**64)])
def test_addresses_beyond_64_bits_are_refused(
    address: tuple[int, int, int],
) -> None:
    with pytest.raises(ConfigError, match="signed 64 bits"):
        uniforms(*address, (0,), stream="s", count=1)
