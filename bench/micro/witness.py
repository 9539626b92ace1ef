"""CPU time that a witness adds to a row: ids as integers or texts, or the digest of an image."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import numpy as np

import fuelrail as fr

ROWS = 64_000
ROUNDS = 5


def measure_row_us(batches: list[Any], rows: int, **options: Any) -> float:
    """Return the least CPU time of several epochs, in microseconds a row."""
    spent = []
    for _ in range(ROUNDS):
        watched = fr.witness(batches, on_fault="ignore", **options)
        started = time.process_time()
        for _ in watched:
            pass
        spent.append(time.process_time() - started)
    return min(spent) / rows * 1e6


def batches_of(ids: Iterable[Any], batch: int, **columns: Any) -> list[dict[str, Any]]:
    """Return batches of these ids, each with these columns."""
    listed = list(ids)
    batches = []
    for start in range(0, len(listed), batch):
        part = {"id": listed[start : start + batch], **columns}
        batches.append(part)
    return batches


def main() -> None:
    """Print a table: a row for each kind of ids, a column for each size of a batch."""
    image = np.zeros((32, 3, 224, 224), np.uint8)
    for batch in (8, 32, 256):
        starts = range(0, ROWS // batch * batch, batch)
        numbers = [{"id": np.arange(start, start + batch)} for start in starts]
        names = (f"clip-{row:07d}/cam_front" for row in range(ROWS))
        texts = batches_of(names, batch)
        integer_us = measure_row_us(numbers, ROWS)
        text_us = measure_row_us(texts, ROWS)
        line = f"batch {batch:>3}: integers {integer_us:5.1f} us a row, texts {text_us:5.1f} us"
        print(line)  # noqa: T201
    content_us = measure_row_us([{"x": image}] * 20, 640)
    print(f"digest of an image of 224 x 224: {content_us:.1f} us a row")  # noqa: T201


if __name__ == "__main__":
    main()
