"""A keyed permutation of 0 .. n-1 in constant memory: the arithmetic under every shuffled order.

``KeyedPermutation(n, key)`` maps any positions to distinct values without ever making a list of n.
Two forms, by n:

* up to ``TABLE_LIMIT``: the n values sorted by n 64-bit words of SHAKE-128 (a true shuffle of
  bounded size);
* above: a generalised Feistel network on Z_a x Z_b with a * b just over n, and cycle walking for
  the rest (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, sections 3 and
  4). a is the even number next to sqrt(n): the inner domain exceeds n by less than a, so about one
  value in sqrt(n) is walked on; and an even a lets odd permutations occur as often as even ones.

A round adds F(right) to the left half modulo its size. F is the high 32 bits of MurmurHash3's
64-bit finaliser (fmix64; Austin Appleby, public domain) of ``right ^ round_key``, scaled to the
half's size by a multiplication (Lemire, "Fast Random Integer Generation in an Interval", 2019).
Scaling favours some values by at most size / 2**32 (8e-6 for n = 10**9); each half collects the sum
of half the rounds, in which these excesses multiply.

This is a shuffle of statistical quality with a fixed definition, not a cipher. Its values are
pinned by tests: a change of them changes every order, and needs another
`fuelrail.pipeline.order.spec.ORDER_VERSION`.
"""

from __future__ import annotations

import hashlib
import math
from operator import index
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from fuelrail.pipeline.errors import OrderError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from fuelrail.pipeline.dtypes import I64, U64

MAX_LENGTH: Final = 2**62
"""Largest n of a permutation: halves stay under 2**32 and products under 2**64."""

TABLE_LIMIT: Final = 1024
"""Largest n that is shuffled as a table (8 KiB)."""

NUM_ROUNDS: Final = 8
"""Feistel rounds. Generic attacks on six rounds need many whole code books (Patarin); two more
are margin.
"""

_KEY_BYTES: Final = 16

CHUNK: Final = 16384
"""Positions at a time: four buffers of 128 KiB stay in a core's second-level cache."""

_FMIX_1: Final = np.uint64(0xFF51AFD7ED558CCD)

_FMIX_2: Final = np.uint64(0xC4CEB9FE1A85EC53)

_S32: Final = np.uint64(32)

_S33: Final = np.uint64(33)


def derive_key(purpose: str, *numbers: int) -> int:
    """Return a 128-bit key from a purpose and some numbers (seed, epoch, ...), by SHAKE-128 of an
    unambiguous encoding.

    Nothing is added up: (1, 2) and (2, 1) are unrelated, and so are two purposes. Numbers must be
    in [0, 2**128). Raises OrderError for others.
    """
    for number in numbers:
        if not 0 <= number < 2**128:
            raise OrderError(f"key number for '{purpose}' must be in 0 .. 2**128 - 1, got {number}")
    name = purpose.encode()
    name_length = len(name).to_bytes(8, "little")
    encoding = hashlib.shake_128(b"fuelrail key 1" + name_length + name)
    for number in numbers:
        encoding.update(index(number).to_bytes(16, "little"))
    digest = encoding.digest(_KEY_BYTES)
    return int.from_bytes(digest, "little")


def derive_seed(purpose: str, seed: int, number: int) -> int:
    """Return the seed of a part of an order, in the range of `OrderSpec.seed`."""
    return derive_key(purpose, seed, number) % 2**63


def _words(n: int, key: int, count: int) -> U64:
    """Return ``count`` 64-bit words (uint64) that depend on n and key: SHAKE-128, little-endian."""
    n_bytes = n.to_bytes(8, "little")
    key_bytes = key.to_bytes(_KEY_BYTES, "little")
    seed = b"fuelrail permutation 1" + n_bytes + key_bytes
    digest = hashlib.shake_128(seed).digest(8 * count)
    words = np.frombuffer(digest, dtype="<u8")
    return words.astype(np.uint64)


def as_positions(positions: ArrayLike, n: int, noun: str = "position") -> I64:
    """Return ``positions`` as int64 of the same shape, each in [0, n); raise OrderError with the
    offending value.
    """
    array: NDArray[Any] = np.asarray(positions)
    if array.size == 0:
        return np.zeros(array.shape, dtype=np.int64)
    if array.dtype.kind not in "iu":
        raise OrderError(f"{noun}s must be integers, got dtype {array.dtype}")
    low = int(array.min())
    high = int(array.max())
    if low < 0 or high >= n:
        outlier = low if low < 0 else high
        raise OrderError(f"{noun} {outlier} is outside 0 .. {n - 1}")
    return array.astype(np.int64, copy=False)


class KeyedPermutation:
    """A bijection of [0, n) chosen by ``key``; equal (n, key) give equal values on every machine
    and version.

    ``n`` in 1 .. 2**62, ``key`` in 0 .. 2**128 - 1 (see :func:`derive_key`). Memory is constant;
    calls are pure and may run in any number of threads. Raises OrderError for arguments out of
    range.
    """

    __slots__ = ("_a", "_b", "_round_keys", "_table", "key", "n")

    def __init__(self, n: int, key: int) -> None:
        if not 1 <= n <= MAX_LENGTH:
            raise OrderError(f"a permutation needs a length in 1 .. 2**62, got {n}")
        if not 0 <= key < 2 ** (8 * _KEY_BYTES):
            raise OrderError(f"a permutation's key must be in 0 .. 2**128 - 1, got {key}")
        self.n = index(n)
        self.key = index(key)
        self._table: I64 | None = None
        if self.n <= TABLE_LIMIT:
            # 0 .. n - 1 by random words; each word carries its index in its low bits, so that no
            # two are equal.
            low_bits = np.uint64(TABLE_LIMIT - 1)
            words = _words(self.n, self.key, count=self.n) & ~low_bits
            words |= np.arange(self.n, dtype=np.uint64)
            words.sort()
            self._table = (words & low_bits).astype(np.int64)
            return
        root = math.isqrt(self.n - 1) + 1  # ceil(sqrt(n))
        a = root + root % 2
        b = -(-self.n // a)
        self._a = np.uint64(a)
        self._b = np.uint64(b)
        # fmix64 begins with x ^= x >> 33. A half is under 2**33, so that shift sees the key alone:
        # done here, once. The finaliser's last step, the same shift, does not reach the high 32
        # bits that F takes.
        words = _words(self.n, self.key, count=NUM_ROUNDS)
        words ^= words >> _S33
        self._round_keys = tuple(words)

    def __len__(self) -> int:
        return self.n

    def __repr__(self) -> str:
        return f"KeyedPermutation(n={self.n}, key={self.key:#x})"

    def __call__(self, positions: ArrayLike) -> I64:
        """Return values (int64, same shape) at ``positions`` (integers in [0, n)); raise
        OrderError outside.
        """
        places = as_positions(positions, self.n)
        return self._map(places, backwards=False)

    def inverse(self, values: ArrayLike) -> I64:
        """Return positions (int64, same shape) of ``values`` (integers in [0, n)):
        ``p.inverse(p(x)) == x``.
        """
        numbers = as_positions(values, self.n, noun="value")
        return self._map(numbers, backwards=True)

    def _map(self, inputs: I64, *, backwards: bool) -> I64:
        if self._table is not None:
            if not backwards:
                return self._table[inputs]
            inverse = np.empty_like(self._table)
            inverse[self._table] = np.arange(self.n)
            return inverse[inputs]
        outputs = np.empty(inputs.size, dtype=np.int64)
        source = inputs.reshape(-1).view(np.uint64)
        target = outputs.view(np.uint64)
        for first in range(0, source.size, CHUNK):
            chunk = slice(first, first + CHUNK)
            values = target[chunk]
            self._network(source[chunk], values, backwards=backwards)
            # Each value's cycle comes back to its own start, which is under n: the loop ends, and
            # distinct inputs end apart.
            while (outside := np.flatnonzero(values >= self.n)).size:
                walking = values[outside]
                self._network(walking, walking, backwards=backwards)
                values[outside] = walking
        return outputs.reshape(inputs.shape)

    def _network(
        self,
        source: U64,
        target: U64,
        *,
        backwards: bool,
    ) -> None:
        """Split values x in [0, a * b) into their halves (x // b in Z_a, x % b in Z_b), and go
        through the rounds.
        """
        high = source // self._b
        low = source - high * self._b
        mixed = np.empty_like(high)
        spare = np.empty_like(high)
        size = self._a
        other_size = self._b
        keys = self._round_keys
        if backwards:
            keys = keys[::-1]
        for key in keys:
            if backwards:
                high, low = low, high
                size, other_size = other_size, size
                _round_function(
                    low,
                    key=key,
                    size=size,
                    out=mixed,
                    spare=spare,
                )
                # Wraps around to a huge number where it is negative.
                np.subtract(high, mixed, out=high)
                np.add(high, size, out=spare)
                np.minimum(high, spare, out=high)
            else:
                _round_function(
                    low,
                    key=key,
                    size=size,
                    out=mixed,
                    spare=spare,
                )
                np.add(high, mixed, out=high)  # under 2 * size
                # Wraps around to a huge number where high < size already.
                np.subtract(high, size, out=spare)
                np.minimum(high, spare, out=high)
                high, low = low, high
                size, other_size = other_size, size
        np.multiply(high, self._b, out=target)
        np.add(target, low, out=target)


def _round_function(
    right: U64,
    key: np.uint64,
    size: np.uint64,
    out: U64,
    spare: U64,
) -> None:
    """Compute F: high 32 bits of fmix64(right ^ round key), scaled to [0, size); see the
    constructor for the rest.
    """
    np.bitwise_xor(right, key, out=out)
    np.multiply(out, _FMIX_1, out=out)
    np.right_shift(out, _S33, out=spare)
    np.bitwise_xor(out, spare, out=out)
    np.multiply(out, _FMIX_2, out=out)
    np.right_shift(out, _S32, out=out)
    np.multiply(out, size, out=out)
    np.right_shift(out, _S32, out=out)


class PositionMap(Protocol):
    """Anything that maps the positions of an epoch to sample indices; orders are built of these."""

    def __len__(self) -> int:
        """Return the number of positions in the epoch."""

    def __call__(self, positions: ArrayLike, /) -> I64:
        """Return sample indices (int64, same shape) at ``positions``."""

    def inverse(self, samples: ArrayLike, /) -> I64:
        """Return the positions (int64, same shape) of sample indices: each has one."""
