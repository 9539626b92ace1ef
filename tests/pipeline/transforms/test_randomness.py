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
    got = uniforms(7, 3, 12345, (0, 5, ALL_CAMERAS), "image-augment", 5)
    assert got.tolist() == [
        [0.5036406581986539, 0.2256841167584196, 0.042610640220525964, 0.5107070380834474, 0.4871414526653386],
        [0.3844064320496867, 0.8951036399638768, 0.761004471233019, 0.5025152702829443, 0.46405933013660183],
        [0.4057798742867943, 0.34301015948353597, 0.5506692180306191, 0.5390269746235546, 0.9090256456053564],
    ]
    # The ninth value comes from the second block.
    assert uniforms(0, 0, 0, (0,), "x", 9)[0, 8] == 0.41058997102063555
    assert uniforms(-1, 2**63 - 1, -(2**63), (2,), "image-augment", 2).tolist() == [
        [0.6465054496679133, 0.6923204386626459]
    ]


@given(INT64, INT64, INT64, INT64, st.integers(1, 20))
def test_is_what_the_definition_says(seed: int, epoch: int, sample: int, camera: int, count: int) -> None:
    got = uniforms(seed, epoch, sample, (camera,), "some-stream", count)
    assert got.shape == (1, count)
    assert got.dtype == np.float64
    for i, value in enumerate(got[0]):
        address = b"".join(x.to_bytes(8, "little", signed=True) for x in (seed, epoch, sample, camera, i // 8))
        digest = hashlib.blake2b(address, digest_size=64, person=b"some-stream").digest()
        (word,) = struct.unpack_from("<Q", digest, 8 * (i % 8))
        assert value == (word >> 11) / 2**53


@given(st.integers(1, 30), st.integers(1, 30))
def test_a_longer_draw_begins_with_the_shorter(a: int, b: int) -> None:
    few, many = sorted((a, b))
    assert np.array_equal(uniforms(1, 2, 3, (4, 5), "s", many)[:, :few], uniforms(1, 2, 3, (4, 5), "s", few))


def test_each_part_of_the_address_matters_and_cameras_do_not_see_each_other() -> None:
    base = uniforms(1, 2, 3, (4,), "s", 8)
    others = [
        uniforms(2, 2, 3, (4,), "s", 8),
        uniforms(1, 3, 3, (4,), "s", 8),
        uniforms(1, 2, 4, (4,), "s", 8),
        uniforms(1, 2, 3, (5,), "s", 8),
        uniforms(1, 2, 3, (4,), "t", 8),
        uniforms(2, 1, 3, (4,), "s", 8),  # seed + epoch must not add up
    ]
    for other in others:
        assert not np.isin(base, other).any()
    assert np.array_equal(uniforms(1, 2, 3, (9, 4, 0), "s", 8)[1:2], base)


def test_values_are_uniform_and_uncorrelated() -> None:
    table = np.concatenate([uniforms(0, 0, sample, range(6), "s", 5) for sample in range(4000)])
    assert 0.0 <= table.min() < 1e-4
    assert 1.0 - 1e-4 < table.max() < 1.0
    counts, _ = np.histogram(table, bins=100, range=(0, 1))
    expected = table.size / 100
    assert ((counts - expected) ** 2 / expected).sum() < 160.0  # chi-squared, 99 degrees: 160 is beyond 1 in 10,000
    correlation = np.corrcoef(table.T) - np.eye(5)
    assert np.abs(correlation).max() < 0.02


def test_an_empty_rig_draws_nothing() -> None:
    assert uniforms(1, 2, 3, (), "s", 5).shape == (0, 5)


@pytest.mark.parametrize("address", [(2**63, 0, 0), (0, -(2**63) - 1, 0), (0, 0, 2**64)])
def test_addresses_beyond_64_bits_are_refused(address: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match="signed 64 bits"):
        uniforms(*address, (0,), "s", 1)
