"""Tokens of a keyframe: what is where around the vehicle."""

from __future__ import annotations

import numpy as np

from fuelrail.pipeline.rigid import invert_rigid
from fuelrail.sharding.demo.channels import TOKENS, top_view_tokens
from fuelrail.sharding.demo.solids import solids_near
from fuelrail.sharding.demo.world import WorldSpec, captures, make_clip


def test_tokens_say_what_is_around_the_nearest_cells_first() -> None:
    spec = WorldSpec(seed=1, num_clips=1, num_frames=1)
    clip = make_clip(spec, 0)
    moment = captures(spec, clip)[0].timestamp_us
    solids = solids_near(clip, moment)
    tokens = top_view_tokens(clip, solids, moment)
    assert tokens.shape == TOKENS.shape
    assert tokens[0] == TOKENS.vocabulary.size - 1
    assert tokens[1:].max() < tokens[0]
    global2ego = invert_rigid(clip.ego2global(moment))
    middles = np.stack(np.meshgrid(np.arange(32), np.arange(32), indexing="ij"), -1).reshape(-1, 2) - 15.5
    middles = middles[np.argsort((middles**2).sum(1), kind="stable")] * 3.2
    places = [
        (global2ego[:3, :3] @ solid.centre + global2ego[:3, 3])[:2]
        for solid in solids
        if solid.actor >= 0 and clip.actors[solid.actor].category.startswith("vehicle")
    ]
    near = [place for place in places if np.abs(place).max() < 51]
    assert len(near) > 3
    for place in near:
        cell = np.flatnonzero(np.abs(middles - place).max(1) <= 1.6)[0]
        assert tokens[1 + cell] % 6 in (1, 2, 3)  # a vehicle, or who stands in the same cell
