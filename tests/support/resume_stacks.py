"""Stacks whose outcome is known, under `fuelrail bench resume`; prints outcomes and what was said as JSON."""

from __future__ import annotations

import itertools
import json
import sys

from fuelrail.bench.peers.stacks.fuelrail import OrderStack
from fuelrail.bench.peers.stacks.stack import NotRun
from fuelrail.bench.peers.stacks.torch_loader import TorchEpochs, TorchSkip
from fuelrail.bench.studies.resume.session import run_stack


class OneBatchMore(TorchSkip):
    def epoch(self, epoch):
        return itertools.islice(super().epoch(epoch), int(self.job.step > 0), None)


class Backwards(TorchSkip):
    def epoch(self, epoch):
        rest = list(super().epoch(epoch))
        return rest[::-1] if self.job.states else rest


class Refusing(TorchEpochs):
    def restore(self):
        raise ValueError("no resume in the middle of an epoch")


class Crashing(TorchEpochs):
    def restore(self):
        raise KeyError("state")


class NoWay(TorchEpochs):
    def restore(self):
        raise NotRun("nothing is documented")


class OwnRows(TorchSkip):
    """Each rank reads the whole dataset."""

    def loader(self, *, shuffle=True):
        loader = super().loader(shuffle=shuffle)
        loader.sampler.rank = 0
        return loader


CASES = [
    ("epoch start", TorchEpochs, "kill"),
    ("epoch start", TorchEpochs, "last-step"),
    ("skip", TorchSkip, "kill"),
    ("skip", TorchSkip, "batch"),
    ("skip", TorchSkip, "keep"),
    ("our order", OrderStack, "fewer-ranks"),
    ("our order", OrderStack, "buffer"),
    ("one batch more", OneBatchMore, "kill"),
    ("backwards", Backwards, "kill"),
    ("refusing", Refusing, "batch"),
    ("crashing", Crashing, "kill"),
    ("no way", NoWay, "kill"),
    ("own rows", OwnRows, "whole"),
]

if __name__ == "__main__":
    outcomes = {}
    for name, kind, history in CASES:
        cell = run_stack(name, kind, [history], 1).cells[history]
        outcomes[f"{name}, {history}"] = [cell.outcome, *cell.said]
    json.dump(outcomes, sys.stdout)
