from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from fuelrail.loaders.decode.resample import two_steps
from fuelrail.pipeline.transforms.image_map import ImageMap


@given(
    wh=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    size=st.tuples(st.integers(1, 400), st.integers(1, 400)),
    crop=st.tuples(st.integers(-50, 50), st.integers(-50, 50)),
    degrees=st.floats(-180, 180),
    reach=st.floats(0, 4),
)
def test_the_steps_together_are_the_map(wh, size, crop, degrees, reach) -> None:
    image_map = ImageMap.identity(wh).resize(*size).crop(*crop, *size).rotate(degrees)
    steps = two_steps(image_map, reach)
    if steps is None:
        assert image_map.source_roi(reach) == (0, 0, 0, 0)
        return
    left, top, right, bottom = steps.box
    assert 0 <= left < right <= wh[0]
    assert 0 <= top < bottom <= wh[1]
    assert (left, top) == (int(left), int(top))
    width, height = steps.size_wh
    assert width <= right - left + 1
    assert height <= bottom - top + 1
    resize = np.array([[width / (right - left), 0, 0], [0, height / (bottom - top), 0], [0, 0, 1]])
    shift = np.array([[1, 0, -left], [0, 1, -top], [0, 0, 1]])
    to_resized = np.vstack((np.array(steps.to_resized).reshape(2, 3), (0, 0, 1)))
    whole = np.vstack((image_map.matrix, (0, 0, 1)))
    assert_allclose(np.linalg.inv(to_resized) @ resize @ shift, whole, rtol=1e-6, atol=1e-6)
