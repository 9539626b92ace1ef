from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fuelrail.bench.trainer.models.bev import BevOccupancy, occupied_cells
from fuelrail.bench.trainer.models.settings import MODELS, BevSettings

pytestmark = pytest.mark.slow

SMALL = BevSettings(width=8, num_stages=2, blocks_per_stage=1, subsample=2, grid=4, range_m=20.0)


def batch(samples=2, cameras=3, *, boxes=True, seed=0):
    random = torch.Generator().manual_seed(seed)
    focal = torch.tensor([[40.0, 0, 31.5], [0, 40.0, 15.5], [0, 0, 1]])
    entries = {
        "img": torch.randint(
            0,
            256,
            (samples, cameras, 3, 32, 64),
            dtype=torch.uint8,
            generator=random,
        ),
        "cam_valid": torch.ones(samples, cameras, dtype=torch.bool),
        "intrinsics": focal.expand(samples, cameras, 3, 3).clone(),
        "cam2ego": torch.eye(4).expand(samples, cameras, 4, 4).clone(),
        "valid": torch.ones(samples, dtype=torch.bool),
        "epoch": 0,
    }
    if boxes:
        entries["gt_boxes_3d"] = [torch.tensor([[5.0, -5.0, 0, 4, 2, 1.5, 0]])] * samples
    return entries


def loss_of(model, entries):
    return model(*model.inputs(entries))


def test_a_cell_is_occupied_where_a_box_has_its_centre():
    target = occupied_cells(
        [torch.tensor([[-19.0, -19.0], [19.0, -19.0]]), torch.zeros(0, 7)],
        4,
        20.0,
    )
    assert target.shape == (2, 16)
    assert target[0].reshape(4, 4).nonzero().tolist() == [
        [0, 0],
        [3, 0],
    ]  # x ahead counts rows, y left columns
    assert target[1].sum() == 0


@given(
    x=st.floats(-60, 60, width=32),
    y=st.floats(-60, 60, width=32),
    grid=st.integers(1, 9),
    range_m=st.floats(1, 50),
)
def test_centres_outside_are_left_out_and_inside_are_in(x, y, grid, range_m):
    box = torch.zeros(1, 7)
    box[0, 0], box[0, 1] = x, y
    inside = -range_m <= x < range_m and -range_m <= y < range_m
    on_the_edge = min(abs(abs(x) - range_m), abs(abs(y) - range_m)) < 1e-3
    assert on_the_edge or occupied_cells([box], grid, range_m).sum() == inside


@pytest.mark.parametrize(
    "name",
    [name for name, size in MODELS.items() if isinstance(size, BevSettings)],
)
def test_models_train_on_the_loaders_sizes(name):
    settings_ = MODELS[name]
    model = BevOccupancy(settings_)
    # The smallest image that every model's strides divide.
    inputs = list(model.inputs(batch(samples=1, cameras=1)))
    inputs[0] = torch.zeros(1, 1, 3, 64, 96, dtype=torch.uint8)
    loss = model(*inputs)
    loss.backward()
    assert loss.shape == ()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_batch_without_calibration_has_cameras_of_unit_matrices():
    model = BevOccupancy(SMALL)
    plain = batch()
    unit = batch()
    unit["intrinsics"], unit["cam2ego"] = (
        torch.eye(3).expand(2, 3, 3, 3),
        torch.eye(4).expand(2, 3, 4, 4),
    )
    del plain["intrinsics"], plain["cam2ego"]
    assert torch.equal(loss_of(model, plain), loss_of(model, unit))


def absent_camera(entries):
    entries["cam_valid"][0, 1] = False
    entries["intrinsics"][0, 1] = 0


def padding_row(entries):
    entries["valid"][1] = False


@pytest.mark.parametrize(
    ("change", "entry", "where", "counts"),
    [
        (absent_camera, "img", (0, 1), False),
        (padding_row, "img", (1,), False),
        (lambda entries: None, "img", (0, 1), True),
        (
            lambda entries: None,
            "cam2ego",
            (slice(None), slice(None), 0, 3),
            True,
        ),
    ],
    ids=["absent camera", "padding", "pixels", "geometry"],
)
def test_pixels_and_geometry_count_where_there_is_a_camera_and_a_sample(
    change, entry, where, counts
):
    torch.manual_seed(0)
    model = BevOccupancy(SMALL)
    entries = batch()
    change(entries)
    before = loss_of(model, entries)
    entries[entry][where] = entries[entry][where] + 20
    assert torch.isfinite(before)
    assert torch.equal(before, loss_of(model, entries)) is not counts


def test_a_sample_without_any_camera_has_a_finite_loss():
    entries = batch()
    entries["cam_valid"][:] = False
    entries["intrinsics"][:] = 0
    assert torch.isfinite(loss_of(BevOccupancy(SMALL), entries))


@pytest.mark.parametrize("seed", [0, 1])
def test_it_learns_what_it_is_shown(seed):
    torch.manual_seed(seed)
    model = BevOccupancy(SMALL)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    entries = batch(seed=seed)
    losses = []
    for _ in range(12):
        loss = loss_of(model, entries)
        losses.append(loss.item())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert losses[-1] < losses[0]


def test_a_dataset_without_boxes_trains_towards_an_empty_grid():
    target = BevOccupancy(SMALL).inputs(batch(boxes=False))[4]
    assert target.shape == (2, 16)
    assert target.sum() == 0
