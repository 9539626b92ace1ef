from __future__ import annotations

import numpy as np
import pytest

from fuelrail.sharding.demo.solids import Solid, visibility_level, visible_shares
from fuelrail.sharding.demo.world import Clip, WorldSpec, make_clip


@pytest.mark.parametrize(
    ("share", "level"),
    [(0.0, "1"), (0.4, "1"), (0.41, "2"), (0.61, "3"), (0.8, "3"), (0.81, "4"), (1.0, "4")],
)
def test_levels_end_where_nuscenes_says(share: float, level: str) -> None:
    assert visibility_level(share) == level


def _ahead(clip: Clip, metres: float, left: float, actor: int, size: tuple[float, float, float]) -> Solid:
    (x, y, _), _ = clip.ego(clip.start_us)
    forward = clip.ego2global(clip.start_us)[:3, 0]
    side = np.array([-forward[1], forward[0]])
    place = np.array([x, y]) + metres * forward[:2] + left * side
    yaw = float(np.arctan2(forward[1], forward[0]))
    return Solid("vehicle.bus.rigid", actor, (place[0], place[1], size[2] / 2), yaw, size, (9, 9, 9), 0)


def test_what_is_hidden_is_not_seen() -> None:
    clip = make_clip(WorldSpec(seed=2), 0)
    large, small = (8.0, 3.0, 3.0), (2.0, 1.0, 1.0)
    alone = visible_shares(clip, [_ahead(clip, 30.0, 0.0, 0, small)], clip.start_us)
    assert alone == {0: 1.0}
    behind = [_ahead(clip, 30.0, 0.0, 0, small), _ahead(clip, 15.0, 0.0, 1, large)]
    assert visible_shares(clip, behind, clip.start_us) == {0: 0.0, 1: 1.0}
    half = [_ahead(clip, 30.0, 0.0, 0, large), _ahead(clip, 15.0, 0.8, 1, (2.0, 1.6, 3.0))]
    assert 0.3 < visible_shares(clip, half, clip.start_us)[0] < 0.7
    assert visible_shares(clip, half[::-1], clip.start_us) == pytest.approx(visible_shares(clip, half, clip.start_us))
