"""`fuelrail annotate`: the same bytes from any number of ranks, resumed at will; outputs become a table."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from fuelrail import DataLoader
from fuelrail.bench.annotation.run import annotate
from fuelrail.pipeline.errors import (
    ConfigError,
    DatasetExistsError,
    SchemaError,
    StageError,
)
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.format.layers import open_layer_data
from support.datasets import build_dataset
from support.layers import digests

NUM_SAMPLES = 11
SMALL = {"image": {"height": 32, "width": 64}}
TRAIN = {"image": {"height": 32, "width": 64, "train": True, "flip_prob": 0.5}}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    root = tmp_path_factory.mktemp("base") / "base"
    build_dataset(root, {"train": (3, 4), "val": (4,)})
    return root


def teacher(batch):
    img = batch["img"].float()
    grid = torch.nn.functional.adaptive_avg_pool2d(img.flatten(0, 1), (2, 2)).unflatten(
        0, img.shape[:2]
    )
    names = [f"seen {key}" for key in batch["sample_key"]]
    return {
        "mean": img.flatten(1).mean(1),
        "grid": grid,
        "name": names,
        "words": [name.split("-") for name in names],
    }


class Stopping(torch.nn.Module):
    """The teacher, ended after some batches as a kill would end it."""

    def __init__(self, batches_left: int) -> None:
        super().__init__()
        self.batches_left = batches_left

    def forward(self, batch):
        self.batches_left -= 1
        if self.batches_left < 0:
            raise KeyboardInterrupt
        return teacher(batch)


def run(base, out, model=teacher, **options):
    return annotate(base, out, model, batch_size=2, transforms=SMALL, workers=1, **options)


@pytest.mark.costly
def test_ranks_and_interruptions_do_not_show(base, tmp_path, monkeypatch) -> None:
    before = digests(base)
    report = run(base, tmp_path / "a" / "teacher")
    assert (report.num_written, report.num_kept) == (NUM_SAMPLES, 0)
    expected = digests(tmp_path / "a" / "teacher")
    for world in (2, 4):
        out = tmp_path / str(world) / "teacher"
        monkeypatch.setenv("WORLD_SIZE", str(world))
        reports = []
        for rank in range(world):
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("LOCAL_RANK", str(rank))
            reports.append(run(base, out))
        assert [rank_report.fingerprint is not None for rank_report in reports] == [False] * (
            world - 1
        ) + [True]
        assert sum(rank_report.num_written for rank_report in reports) == NUM_SAMPLES
        assert digests(out) == expected
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name)
    out = tmp_path / "stopped" / "teacher"
    for num_batches in (
        2,
        4,
    ):  # the first batch is also what the table is made from
        with pytest.raises(KeyboardInterrupt):
            run(base, out, Stopping(num_batches))
    assert run(base, out, Stopping(100)).fingerprint == report.fingerprint
    assert digests(out) == expected
    assert run(base, out).num_kept == NUM_SAMPLES
    assert digests(base) == before


@pytest.mark.costly
def test_the_loader_gets_what_the_model_said(base, tmp_path) -> None:
    for store, dtype in (
        ("as_is", torch.float32),
        ("float16", torch.float16),
        ("int8", torch.int8),
    ):
        run(base, tmp_path / store, store=store)
        with DataLoader(
            base,
            7,
            shuffle=False,
            transforms=SMALL,
            layers={"t": tmp_path / store},
        ) as loader:
            batch = next(iter(loader))
        outputs = teacher(batch)
        torch.testing.assert_close(batch["t.mean"], outputs["mean"])
        assert batch["t.name"] == outputs["name"]
        assert batch["t.words"] == outputs["words"]
        assert batch["t.grid"].dtype == dtype
        grid = batch["t.grid"].float()
        if store == "int8":
            grid = grid * batch["t.grid_scale"][:, None, None, None, None]
        torch.testing.assert_close(grid, outputs["grid"], rtol=0, atol=1.0)


def test_a_view_is_what_a_loader_shows_in_that_epoch(base, tmp_path) -> None:
    annotate(
        base,
        tmp_path / "seen",
        teacher,
        transforms=TRAIN,
        view="per_view",
        seed=5,
        epoch=3,
        workers=1,
    )
    with DataLoader(
        base,
        7,
        shuffle=True,
        drop_last=True,
        seed=5,
        transforms=TRAIN,
        layers={"t": tmp_path / "seen"},
    ) as loader:
        loader.set_epoch(3)
        batch = next(iter(loader))
        torch.testing.assert_close(batch["t.mean"], teacher(batch)["mean"])
    manifest = open_layer_data(tmp_path / "seen").manifest
    assert manifest.view.epoch == 3  # type: ignore[attr-defined]


WINDOW = {"frames": [0, 1, 2], "pad": "drop"}
WHOLE_WINDOWS = [0, 1, 4, 8]
"""Rows followed by two frames of their clip and split: f - 2 of f, of rows 0-3, 4-6, 7 and 8-10."""


def span(batch):
    """What a model of windows says: the mean of each frame of the window."""
    return {"means": batch["img"].float().flatten(2).mean(2)}


def test_a_window_that_drops_leaves_out_and_counts_samples_at_the_end_of_clips(
    base, tmp_path, monkeypatch
) -> None:
    report = run(base, tmp_path / "one" / "span", span, window=WINDOW)
    assert (report.num_written, report.num_left_out) == (
        len(WHOLE_WINDOWS),
        NUM_SAMPLES - len(WHOLE_WINDOWS),
    )
    assert "7 samples without all frames of the window left out" in report.as_text()
    layer = open_layer_data(tmp_path / "one" / "span")
    assert layer.manifest.recipe["window"]["frames"] == [0, 1, 2]
    assert len(layer) == len(WHOLE_WINDOWS)
    second_report = run(base, tmp_path / "one" / "span", span, window=WINDOW)
    assert (second_report.num_written, second_report.num_kept) == (0, len(WHOLE_WINDOWS))
    with DataLoader(
        base,
        1,
        shuffle=False,
        transforms=SMALL,
        layers={"span": {"path": tmp_path / "one" / "span", "missing": "drop"}},
    ) as loader:
        annotated = [(int(batch["global_index"]), batch["span.means"]) for batch in loader]
    with DataLoader(base, 1, shuffle=False, transforms=SMALL, split="train") as loader:
        means = [float(batch["img"].float().mean()) for batch in loader]
    train = [row for row in WHOLE_WINDOWS if row < 7]
    assert [row for row, _ in annotated] == train
    for row, values in annotated:
        torch.testing.assert_close(values[0], torch.tensor(means[row : row + 3]))
    expected = digests(tmp_path / "one" / "span")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in (1, 0):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        report = run(base, tmp_path / "two" / "span", span, window=WINDOW)
    assert report.fingerprint is not None
    assert digests(tmp_path / "two" / "span") == expected


def test_a_window_that_repeats_gives_every_sample_a_row(base, tmp_path) -> None:
    report = run(base, tmp_path / "span", span, window={"frames": [-1, 0]})
    assert (report.num_written, report.num_left_out) == (NUM_SAMPLES, 0)
    first = open_layer_data(tmp_path / "span").read(0)["means"]
    assert first[0] == first[1]


def test_another_window_is_another_layer(base, tmp_path) -> None:
    run(base, tmp_path / "span", span, window=WINDOW)
    with pytest.raises(DatasetExistsError, match="window"):
        run(
            base,
            tmp_path / "span",
            span,
            window={**WINDOW, "stride": 2, "frames": [0, 1]},
        )


def test_a_table_is_given_beside_ragged_outputs(base, tmp_path) -> None:
    table = tmp_path / "table.yaml"
    table.write_text(
        "- {name: peaks, kind: points, field: peaks.npy, dtype: float32, axes: [point, column], shape: [null, 2],\n"
        "   columns: [u, v], law: {name: image_points, camera: cam_front, roles: {points: [[u, v]]}}}\n"
    )

    def peaks(batch):
        return {"peaks": [torch.full((row % 3, 2), row) for row in batch["global_index"].tolist()]}

    with pytest.raises(ConfigError, match="describe it in a table"):
        run(base, tmp_path / "layer", peaks)
    with pytest.raises(SchemaError, match="int64"):
        run(base, tmp_path / "layer", peaks, channels=table)
    run(
        base,
        tmp_path / "layer",
        lambda b: {"peaks": [row_peaks.float() for row_peaks in peaks(b)["peaks"]]},
        channels=table,
    )
    layer = open_layer_data(tmp_path / "layer")
    assert len(layer) == len(open_dataset(base))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("nothing", "must be MODULE:FUNCTION"),
        ("no_such_module:f", "cannot be imported"),
        ("./teacher.py:f", r"has the path './teacher\.py'; name a module"),
        (lambda _: {}, "returned no outputs"),
        (
            lambda _: {"x": torch.zeros(2, 2).to_sparse()},
            "'x' is a tensor of torch.float32 and layout torch.sparse",
        ),
        (
            lambda _: {"x": [{"y": torch.zeros(2, dtype=torch.float8_e5m2)}] * 2},
            r"'x\.y' is a tensor of torch.float8",
        ),
        (
            lambda _: {"x": [None, torch.zeros(3)]},
            r"holds NoneType, array \[3\], not arrays of one shape",
        ),
        ("math:pi", "not a function"),
        (lambda _: None, "must return a dict"),
        (
            lambda _: {"x": torch.zeros(3, 2)},
            "with a row for each of the batch's 2 samples",
        ),
        (lambda _: {"x": torch.full((2, 1), np.nan)}, "NaN"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(base, tmp_path, model, message) -> None:
    with pytest.raises((ConfigError, SchemaError), match=message):
        run(base, tmp_path / "layer", model)


BROKEN = """
import torch

def shapes(batch):
    return torch.nn.Linear(5, 4)(torch.ones(2, 3))

class Model:
    def __init__(self):
        self.weights = {}["weights"]

def ends(batch):
    raise SystemExit(3)
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "shapes",
            r"'shapes' failed on samples 'clip-0000-000000' .. 'clip-0000-000001': RuntimeError.*py:5 in shapes",
        ),
        (
            "ends",
            r"model 'ends' failed on samples .*: SystemExit: 3 \(.*broken\.py:12 in ends",
        ),
        (
            "Model",
            r"model 'broken:Model' cannot be made: KeyError: 'weights' \(.*broken\.py:9 in __init__",
        ),
    ],
)
def test_a_model_that_raises_is_named_with_its_batch_and_line(
    base, tmp_path, monkeypatch, name, message
) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    with pytest.raises(StageError, match=message) as caught:
        run(base, tmp_path / "layer", f"broken:{name}")
    assert isinstance(caught.value.__cause__, RuntimeError | KeyError | SystemExit)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"channels": "no.yaml"}, "'no.yaml' cannot be read: No such file"),
        (
            {"store": "float16"},
            "output 'x' has 1e\\+06, and float16 holds 65504 at most: store it as_is",
        ),
        ({"seed": 5}, "view='fixed' shows samples without any"),
        (
            {"temperature": 2.0},
            "temperature=2.0, positions=1.0 are for logits, and store='as_is' stores none",
        ),
        (
            {"positions": 0.5, "store": "int8"},
            "positions=0.5 are for logits, and store='int8' stores none",
        ),
        (
            {"view": "per_view", "window": {"frames": [0, 1]}},
            "view='per_view' with a window",
        ),
        (
            {"window": {"frames": [0, 9], "pad": "drop"}},
            r"no clip of '.*' has all of these frames",
        ),
        (
            {"store": "int8"},
            "output 'nan' has NaN or infinities, which int8 cannot hold",
        ),
        (
            {"store": "int8", "channels": "table.yaml"},
            r"store='int8' is for values without a table: 'table\.yaml'",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(base, tmp_path, options, message) -> None:
    def extremes(batch):
        return {"x": torch.full((2, 1), 1e6), "nan": torch.full((2, 1), np.nan)}

    with pytest.raises(ConfigError, match=message):
        run(base, tmp_path / "layer", extremes, **options)


def test_groups_of_cameras_are_shown_unaugmented_and_two_views_are_refused(base, tmp_path) -> None:
    image = {
        "height": 32,
        "width": 64,
        "train": True,
        "rotate_deg": (-20.0, 20.0),
    }
    groups = {name: {"cameras": [f"cam_{name}"], "image": image} for name in ("back", "front")}

    def model(batch):
        return {
            "mean": batch["img"]["front"].float().flatten(1).mean(1),
            "ida": batch["ida_mat"][:, 0, :2, :2],
        }

    options = {
        "batch_size": 4,
        "workers": 1,
        "transforms": {"camera_groups": groups},
    }
    annotate(base, tmp_path / "seen", model, **options)
    data = open_layer_data(tmp_path / "seen")
    for row in range(NUM_SAMPLES):
        turned = data.read(row)["ida"]
        assert turned[0, 1] == turned[1, 0] == 0
    options["transforms"]["two_views"] = True
    with pytest.raises(ConfigError, match="leave two_views out"):
        annotate(base, tmp_path / "two", model, **options)
