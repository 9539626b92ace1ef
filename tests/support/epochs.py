"""Epochs of simulated ranks: which rows each gets, as loaders of the field share them out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fuelrail.loaders.witness.judge import Rules, WitnessReport, expect, judge
from fuelrail.loaders.witness.record import Epoch
from fuelrail.loaders.witness.rows import id_rows

Batches = list[list]


def share(
    size: int,
    ranks: int,
    batch: int,
    *,
    pads: bool,
    drops: bool,
    seed: int = 0,
    epoch: int = 0,
) -> list[Batches]:
    """Return the batches of each rank as DistributedSampler and DataLoader make them.

    Without ``pads`` the sampler leaves out rows that do not divide by the ranks; with ``drops`` the
    loader leaves out batches that are not full.
    """
    order = np.random.default_rng((seed, epoch)).permutation(size).tolist()
    if pads:
        total = -(-size // ranks) * ranks
        order = (order * (1 + -(-total // max(size, 1))))[:total]
    else:
        order = order[: size // ranks * ranks]
    shares = []
    for rank in range(ranks):
        own = order[rank::ranks]
        batches = [own[start : start + batch] for start in range(0, len(own), batch)]
        shares.append([part for part in batches if len(part) == batch or not drops])
    return shares


def watch(shares: Sequence[Batches], *, epoch: int = 0, is_complete: bool = True) -> list[Epoch]:
    """Return the records of ranks that saw these batches."""
    records = []
    for rank, batches in enumerate(shares):
        record = Epoch(epoch=epoch, ranks=[rank], world=len(shares), batches=[0])
        for ids in batches:
            record.add(ids, id_rows(ids), has_contents=False)
        record.is_complete = is_complete
        records.append(record)
    return records


def judged(
    records: Sequence[Epoch],
    expected: object,
    previous: Sequence[Epoch] = (),
    **rules,
) -> WitnessReport:
    """Return the report of an epoch whose rows are these."""
    kind = next((record.kind for record in records if record.kind is not None), None)
    return judge(records, Rules(expected=expect(expected, kind), **rules), previous)
