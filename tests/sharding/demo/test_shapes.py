from __future__ import annotations

import numpy as np
import pytest

from fuelrail.sharding.demo.picture.shapes import painting_order, shape_of
from fuelrail.sharding.demo.street import KINDS

ALL = [*KINDS, "bicycle", "building", "tree", "crown"]


@pytest.mark.parametrize("kind", ALL)
def test_shapes_stay_in_the_unit_box_and_reach_its_ends(kind: str) -> None:
    vertices = np.concatenate([part.vertices for part in shape_of(kind)])
    assert (np.abs(vertices[:, :2]) <= 0.5 + 1e-12).all()
    assert vertices[:, 2].min() >= 0.0
    assert vertices[:, 2].max() <= 1.0
    np.testing.assert_allclose(np.ptp(vertices, axis=0), [1.0, 1.0, 1.0], atol=1e-9)


@pytest.mark.parametrize("kind", [*ALL, "post"])
def test_bodies_are_closed_convex_and_face_outwards(kind: str) -> None:
    for part in shape_of(kind):
        middle = part.vertices.mean(0)
        edges = []
        for face in part.faces:
            corners = part.vertices[list(face.vertices)]
            normal = np.cross(corners[1] - corners[0], corners[2] - corners[1])
            assert normal @ (corners[0] - middle) > 0
            beyond = (part.vertices - corners[0]) @ normal / np.linalg.norm(normal)
            assert beyond.max() < 1e-9, "every vertex lies behind or in every face"
            edges += list(zip(face.vertices, (*face.vertices[1:], face.vertices[0]), strict=True))
        assert sorted(edges) == sorted((b, a) for a, b in edges), "each edge is used once each way"


@pytest.mark.parametrize("kind", ALL)
def test_textures_cover_their_faces(kind: str) -> None:
    for part in shape_of(kind):
        for face in part.faces:
            right, down, corner = face.frame.T
            offsets = part.vertices[list(face.vertices)] - corner
            basis = np.column_stack([right, down])
            share = np.linalg.lstsq(basis, offsets.T, rcond=None)[0]
            assert share.min() > -0.2, "slanted sides repeat the texture's border"
            assert share.max() < 1.2
            np.testing.assert_allclose(basis @ share, offsets.T, atol=1e-9)


def test_parts_are_painted_from_far_to_near() -> None:
    parts = shape_of("vehicle.truck")
    cargo, cab = (index for index, part in enumerate(parts) if part.material in ("cargo", "body"))
    ahead = painting_order(parts, np.array([5.0, 0.0, 0.4]))
    behind = painting_order(parts, np.array([-5.0, 0.0, 0.4]))
    assert ahead.index(cargo) < ahead.index(cab)
    assert behind.index(cab) < behind.index(cargo)
    assert sorted(ahead) == list(range(len(parts)))
