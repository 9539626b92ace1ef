"""The arithmetic of ORDER.md, proved for all numbers of its range by z3, not tried at some of them."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.long

z3: Any = pytest.importorskip("z3", reason="pip install z3-solver proves the orders' arithmetic")

MAX_BATCH = 2**31
MAX_LENGTH = 2**62


def prove(claim: Any, *assumptions: Any) -> None:
    """Fail with a counterexample where the claim does not follow; unknown is a failure too."""
    solver = z3.Solver()
    solver.set("timeout", 300_000)
    solver.add(*assumptions, z3.Not(claim))
    result = solver.check()
    assert result == z3.unsat, solver.model() if result == z3.sat else solver.reason_unknown()


def quotient(dividend: Any, divisor: Any, name: str) -> tuple[Any, Any]:
    """A whole number q with its defining property: q divisor <= dividend < (q + 1) divisor."""
    q = z3.Int(name)
    return q, z3.And(q * divisor <= dividend, dividend < q * divisor + divisor)


def test_shares_have_no_gap_and_no_overlap_and_every_rank_has_a_row():
    """Section 1.2: neighbours meet by form, the first begins at 0, the last ends at G; none is empty where R <= G."""
    g, r, num = z3.Ints("g r num")
    bounds = z3.And(num >= 1, num <= g, g <= MAX_BATCH, r >= 0, r < num)
    first, is_first = quotient(r * g, num, "first")
    end, is_end = quotient(r * g + g, num, "end")
    prove(end >= first + 1, bounds, is_first, is_end)
    start, is_start = quotient(z3.IntVal(0), num, "start")
    prove(start == 0, bounds, is_start)
    last, is_last = quotient(num * g, num, "last")
    prove(last == g, bounds, is_last)


def test_ranks_differ_by_one_row_at_most():
    g, r, num, size = z3.Ints("g r num size")
    bounds = z3.And(num >= 1, num <= g, g <= MAX_BATCH, r >= 0, r < num)
    first, is_first = quotient(r * g, num, "first")
    end, is_end = quotient(r * g + g, num, "end")
    _, is_size = quotient(g, num, "size")
    prove(
        z3.And(end - first >= size, end - first <= size + 1),
        *(bounds, is_first, is_end, is_size),
    )


def test_the_rank_of_a_row_is_the_one_whose_share_has_it():
    """What a replay says: row j is of rank (R (j + 1) - 1) div G."""
    g, num, row = z3.Ints("g num row")
    bounds = z3.And(num >= 1, num <= g, g <= MAX_BATCH, row >= 0, row < g)
    rank, is_rank = quotient(num * row + num - 1, g, "rank")
    first, is_first = quotient(rank * g, num, "first")
    end, is_end = quotient(rank * g + g, num, "end")
    prove(z3.And(first <= row, row < end), bounds, is_rank, is_first, is_end)


def test_positions_and_shares_fit_64_bits():
    """Products r G, and positions of a step that begins in the epoch, continued beyond its end."""
    g, r, num, start, row = z3.Ints("g r num start row")
    bounds = z3.And(g >= 1, g <= MAX_BATCH, num >= 1, num <= g, r >= 0, r <= num)
    prove(r * g < 2**63, bounds)
    prove(
        start + row < 2**63,
        *(bounds, start >= 0, start < MAX_LENGTH, row >= 0, row < g),
    )


def test_padding_shows_positions_of_the_epoch():
    length, start, row, g = z3.Ints("length start row g")
    bounds = z3.And(length >= 1, length <= MAX_LENGTH, start >= 0, start < length)
    turns, is_turns = quotient(start + row, length, "turns")
    shown = start + row - turns * length
    rows = z3.And(row >= 0, row < g, g >= 1, g <= MAX_BATCH)
    prove(z3.And(shown >= 0, shown < length), bounds, is_turns, rows)
    prove(z3.Implies(start + row < length, shown == start + row), bounds, is_turns, rows)


def test_each_round_of_the_permutation_is_a_bijection():
    """Section 3.2: left becomes (left + F(right)) mod its size, for any F, and the halves change places.

    Two pairs with one image are one pair. F(right) is a number below the size, equal for equal right halves.
    """
    size, left, second_left, value, second_value, right, second_right = z3.Ints("a l m f h r s")
    bounds = z3.And(size >= 1, size <= 2**32)
    halves = [z3.And(half >= 0, half < size) for half in (left, second_left, value, second_value)]

    def moved(half: Any, by: Any) -> Any:
        return z3.If(half + by >= size, half + by - size, half + by)

    is_function = z3.Implies(right == second_right, value == second_value)
    is_equal = z3.And(moved(left, value) == moved(second_left, second_value), right == second_right)
    prove(
        z3.And(left == second_left, right == second_right),
        *(bounds, *halves, is_function, is_equal),
    )
    prove(z3.And(moved(left, value) >= 0, moved(left, value) < size), bounds, *halves)


def test_a_value_of_a_round_is_below_its_half_in_64_bits():
    """F(v) is (32 bits x size) >> 32: it does not overflow where the size is below 2^32, and is below the size."""
    bits, size = z3.BitVecs("bits size", 64)
    bounds = z3.And(z3.ULT(bits, 2**32), z3.ULT(0, size), z3.ULT(size, 2**32))
    prove(z3.BVMulNoOverflow(bits, size, False), bounds)
    prove(z3.ULT(z3.LShR(bits * size, 32), size), bounds)


def test_the_halves_cover_all_values_and_stay_below_2_to_the_32():
    """a is the square root of n rounded up to an even number, b is n / a rounded up: a b >= n, and b <= a."""
    n, root, a, b = z3.Ints("n root a b")
    bounds = z3.And(n > 1024, n <= MAX_LENGTH)
    is_root = z3.And(root >= 1, (root - 1) * (root - 1) < n, n <= root * root)
    is_even = z3.And(a >= root, a <= root + 1, a % 2 == 0)
    is_other = z3.And((b - 1) * a < n, n <= b * a)
    prove(z3.And(a < 2**32, a >= 1), bounds, is_root, is_even)
    prove(z3.And(b < 2**32, b <= a), bounds, is_root, is_even, is_other)
