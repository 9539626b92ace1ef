"""Histories: what happens to a run, as a list of acts."""

from __future__ import annotations

from typing import Final

import msgspec

from fuelrail.bench.peers.stacks.stack import Setup


class Act(msgspec.Struct, frozen=True, kw_only=True):
    """Train, save a checkpoint, and be killed; or train to the end.

    Attributes:
        setup: what the run is told.
        steps: steps of the run after which the checkpoint is saved; None: to the end.
        is_border: save once the epoch's loop is over, not after its last batch in the loop.
        leaves_loop: save after a `break` out of the loop over batches, not in it.
    """

    setup: Setup = Setup()
    steps: int | None = None
    is_border: bool = False
    leaves_loop: bool = False


class History(msgspec.Struct, frozen=True):
    """A name's acts.

    Attributes:
        meaning: what happens.
        acts: each but the last one ends with a kill of all ranks.
        needs: what a stack must have: "buffer" or "mix".
    """

    meaning: str
    acts: list[Act]
    needs: str | None = None


_KILL: Final = 8  # in the first of two epochs of 24 steps
_FETCHED: Final = Setup(workers=2)


def _kill_once(setup: Setup, resumed: Setup | None = None) -> list[Act]:
    """Return the acts of a run that is killed, and resumed as ``resumed`` says (default: as it
    was).
    """
    return [
        Act(setup=setup, steps=_KILL),
        Act(setup=resumed or setup),
    ]


HISTORIES: Final = {
    "whole": History(
        "nothing happens in two epochs",
        [Act()],
    ),
    "kill": History(
        "killed after 8 of 24 steps, and resumed",
        _kill_once(Setup()),
    ),
    "workers": History(
        "the same, with 2 workers that fetch ahead",
        _kill_once(_FETCHED),
    ),
    "other-workers": History(
        "resumed with 3 workers, not 2",
        _kill_once(_FETCHED, resumed=Setup(workers=3)),
    ),
    "more-ranks": History(
        "resumed on 4 ranks, not 2",
        _kill_once(Setup(), resumed=Setup(ranks=4)),
    ),
    "fewer-ranks": History(
        "resumed on 2 ranks, not 4",
        _kill_once(Setup(ranks=4), resumed=Setup()),
    ),
    "batch": History(
        "resumed with twice the batch",
        _kill_once(Setup(), resumed=Setup(global_batch=24)),
    ),
    "twice": History(
        "killed after 8 and after 13 steps",
        [Act(steps=_KILL), Act(steps=13), Act()],
    ),
    "last-step": History(
        "saved after an epoch's last batch, inside the loop",
        [Act(steps=24), Act()],
    ),
    "border": History(
        "saved between two epochs",
        [Act(steps=24, is_border=True), Act()],
    ),
    "break": History(
        "saved after a break out of the loop, 2 workers",
        [Act(setup=_FETCHED, steps=_KILL, leaves_loop=True), Act(setup=_FETCHED)],
    ),
    "evaluate": History(
        "an evaluation after every 5 steps",
        _kill_once(Setup(evaluation=5)),
    ),
    "drop": History(
        "295 rows, the last ones dropped",
        _kill_once(Setup(rows=295, drop_last=True)),
    ),
    "keep": History(
        "295 rows, the last ones kept",
        _kill_once(Setup(rows=295)),
    ),
    "mix": History(
        "two datasets mixed 2 to 1",
        _kill_once(Setup(is_mixed=True)),
        needs="mix",
    ),
    "buffer": History(
        "a shuffle buffer of 50 rows",
        _kill_once(Setup(buffer=50)),
        needs="buffer",
    ),
}
