"""Channels with a law, and values that it moves."""

from __future__ import annotations

from typing import Any

from fuelrail.pipeline.channels.laws import LAWS, Motion
from fuelrail.pipeline.channels.table import Channel, Law
from fuelrail.pipeline.transforms.ego import BevAugment, BevMap

EGO = BevAugment(
    train=True,
    rotate_deg=(-180.0, 180.0),
    scale=(0.8, 1.25),
    flip_x_prob=0.5,
    flip_y_prob=0.5,
    translate_std_m=0.7,
)
SIZE = (96, 64)


def ego_map(seed: int) -> BevMap:
    return EGO.draw(seed=seed, epoch=0, sample=0)


def channel(law: Law, **facts: Any) -> Channel:
    return Channel(
        name="it",
        kind=facts.pop("kind", "points"),
        field="it.npy",
        law=law,
        **facts,
    )


def move(channel: Channel, value: Any, **motion: Any) -> Any:
    return LAWS[channel.law.name].move(value, channel, Motion(**motion))
