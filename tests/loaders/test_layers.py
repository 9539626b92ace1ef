"""A loader with layers: the values belong to their samples in every order, window, storage and after every restart."""

from __future__ import annotations

import itertools
import json
import re
import shutil

import msgspec
import numpy as np
import pytest
import torch

from fuelrail import DataLoader
from fuelrail.loaders.config import Transforms
from fuelrail.loaders.schedule.layers import LayerOptions, view_settings
from fuelrail.pipeline.errors import (
    ChecksumError,
    ConfigError,
    IndexFileError,
    OrderError,
    StateMismatchError,
)
from fuelrail.pipeline.format.layers import LayerView
from fuelrail.pipeline.order.batching import World
from fuelrail.pipeline.order.spec import OrderSpec, OrderStage
from fuelrail.pipeline.order.weights import AttributeWeights
from fuelrail.sharding.write.layers.writer import LayerWriter
from support.datasets import build_dataset
from support.layers import TABLE, values_of, write_layer
from support.sharding import flip

SMALL = Transforms(image={"height": 32, "width": 64})  # type: ignore[arg-type]
PRESENT = (0, 1, 2, 5, 6, 7, 8, 10)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    root = tmp_path_factory.mktemp("base") / "base"
    build_dataset(root, {"train": (3, 4, 5)})
    return root


@pytest.fixture(scope="module")
def layer(base):
    return write_layer(base, base.parent / "whole")


@pytest.fixture(scope="module")
def part(base):
    return write_layer(base, base.parent / "part", PRESENT)


def make(
    base,
    layers,
    missing=None,
    select=None,
    batch_size=4,
    rank=0,
    size=1,
    **options,
):
    transforms = msgspec.structs.replace(SMALL, select=select)
    if missing is not None:
        layers = {name: LayerOptions(path, missing) for name, path in layers.items()}
    return DataLoader(
        base,
        batch_size,
        transforms=transforms,
        layers=layers,
        world=World(rank, size),
        **{"shuffle": True, "drop_last": True, "num_workers": 1, **options},
    )


def rows_of(base, layers, present=range(12), **options) -> list[int]:
    """Check an epoch's values; returns its rows."""
    with make(base, layers, **options) as loader:
        return [row for batch in loader for row in check(batch, present=present)]


def check(batch, name="t", present=range(12)) -> list[int]:
    """Each sample of the batch has the values that were written for its row."""
    rows = batch["global_index"].tolist()
    for index, row in enumerate(rows):
        is_there = row in present
        values = values_of(row)
        assert batch[f"{name}.loss_valid"][index].item() is is_there
        assert batch[f"{name}.loss"][index].item() == (values["loss"] if is_there else 0)
        logits = values["logits"] if is_there else np.zeros(10, np.float16)
        np.testing.assert_array_equal(batch[f"{name}.logits"][index].numpy(), logits)
        assert batch[f"{name}.caption"][index] == (values.get("caption") if is_there else None)
    return rows


@pytest.mark.parametrize("storage", ["pread", "remote"])
def test_values_belong_to_their_samples(base, layer, storage) -> None:
    with (
        make(base, {"t": layer}, storage=storage, seed=3) as loader,
        make(base, None, seed=3) as plain,
    ):
        for with_layer, without in zip(loader, plain, strict=True):
            assert check(with_layer) == without["global_index"].tolist()
            assert torch.equal(with_layer["img"], without["img"])
            assert set(with_layer) - set(without) == {
                f"t.{name}{suffix}"
                for name in ("logits", "loss", "caption")
                for suffix in ("", "_valid")
            }


def test_a_cache_evicts_layers_as_it_does_the_base(base, part, tmp_path) -> None:
    storage = {"cache_dir": tmp_path / "cache", "cache_size": 120_000}
    for number in range(2):
        with make(base, {"t": part}, missing="mask", storage=storage) as loader:
            for batch in loader:
                check(batch, present=PRESENT)
            assert (loader.stats().storage.cache_hits > 0) is bool(number)


def test_missing_rows_are_an_error_masked_or_dropped(base, part) -> None:
    with pytest.raises(
        OrderError,
        match=r"layer 't' .* has no value for 4 of 12 selected samples, the first is sample 'clip-",
    ):
        make(base, {"t": part})
    assert sorted(rows_of(base, {"t": part}, PRESENT, missing="mask")) == [*range(12)]
    assert sorted(rows_of(base, {"t": part}, missing="drop")) == [*PRESENT]
    assert sorted(rows_of(base, {"t": part}, order=OrderSpec(filter="t.loss >= 0"))) == [
        *PRESENT
    ]  # all left have rows


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        (
            {"t": 3},
            "layers={'t': 3} must map names to folders, URLs or LayerOptions",
        ),
        ("teacher", "layers='teacher' must map names"),
        ({"t": {"path": "x", "fill": "mask"}}, "the field 'fill' is unknown"),
        (
            {"t": {"path": "x", "missing": "skip"}},
            "layers['t'].missing='skip' must be one of error, mask, drop",
        ),
    ],
)
def test_what_is_not_a_layer_is_refused(base, layers, words) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        make(base, layers)


def test_windows_lanes_and_two_layers(base, layer, part) -> None:
    with make(
        base,
        {"a": layer, "b": part},
        missing="mask",
        window={"frames": [-1, 0]},
    ) as loader:
        for batch in loader:
            for index, rows in enumerate(batch["frame_global_index"].tolist()):
                assert batch["a.loss"][index].tolist() == [row / 2 for row in rows]
                assert batch["b.loss_valid"][index].tolist() == [row in PRESENT for row in rows]
    assert rows_of(base, {"t": layer}, order=OrderSpec(kind="lanes", pieces_per_clip=2))


def test_attributes_join_filters_and_weights(base, layer) -> None:
    assert (
        min(
            rows_of(
                base,
                {"t": layer},
                order=OrderSpec(filter="t.loss > 3 and frame < 100"),
            )
        )
        == 7
    )
    spec = OrderSpec(weights=(AttributeWeights(attribute="t.loss"),), epoch_length=64)
    rows = rows_of(base, {"t": layer}, order=spec)
    assert 0 not in rows
    assert rows.count(11) > rows.count(1)
    with pytest.raises(OrderError, match=r"no attribute 't.lost'"):
        make(base, {"t": layer}, order=OrderSpec(filter="t.lost > 3"))


def test_attributes_of_layers_become_entries(base, layer, part) -> None:
    chosen = {"select": ["t.loss"]}
    for path, missing in ((layer, "error"), (part, "mask")):
        with make(base, {"t": path}, missing=missing, shuffle=False, **chosen) as loader:
            for batch in loader:
                rows = batch["global_index"].tolist()
                assert batch["t.loss_valid"].tolist() == [
                    path == layer or row in PRESENT for row in rows
                ]
                assert batch["t.loss"].tolist() == [
                    row / 2 * (path == layer or row in PRESENT) for row in rows
                ]


def test_a_state_names_the_layers(base, layer, part) -> None:
    state = make(base, {"t": layer}).state_dict()
    assert json.loads(state["identity"])["layers"].keys() == {"t"}
    with pytest.raises(StateMismatchError, match="layers: "):
        make(base, {"t": part}, missing="mask").load_state_dict(state)


def write_losses(base, out, losses):
    with LayerWriter(base, out, channels=TABLE[1:2]) as writer:
        for position, loss in enumerate(losses):
            writer.write(position, {"loss": np.float32(loss)})
    writer.finish()
    return out


@pytest.mark.costly
def test_a_curriculum_reads_a_layer_until_a_step_and_then_the_next_one(
    base, layer, tmp_path
) -> None:
    """The run starts with one layer, gets two more on its way, and stops again and again, on other ranks each time."""
    layers = {
        "v1": layer,
        "v2": write_losses(base, tmp_path / "v2", [0, 9] * 6),
    }
    layers["v3"] = write_losses(base, tmp_path / "v3", [5, 0, 1] * 4)
    weights = {name: (AttributeWeights(attribute=f"{name}.loss"),) for name in layers}
    stages = (
        OrderStage(weights=weights["v1"], until=40),
        OrderStage(filter="v2.loss > 0", until=120, ramp=True),
        OrderStage(weights=weights["v3"]),
    )

    def ranks_of(size, names, *stages):
        options = {
            "seed": 2,
            "select": [],
            "order": OrderSpec(seed=2, stages=stages, epoch_length=64),
        }
        run_layers = {name: layers[name] for name in names}
        return [
            make(
                base,
                run_layers,
                batch_size=4 // size,
                rank=rank,
                size=size,
                **options,
            )
            for rank in range(size)
        ]

    def drawn(ranks, state, num_steps):
        rank_batches = []
        for rank in ranks:
            with rank as loader:
                if state is not None:
                    loader.load_state_dict(state)
                batches = itertools.islice(
                    (batch for _ in itertools.count() for batch in loader),
                    num_steps,
                )
                rank_batches.append([batch["global_index"].tolist() for batch in batches])
                after = json.loads(json.dumps(loader.state_dict()))
        return [sum(parts, []) for parts in zip(*rank_batches, strict=True)], after  # noqa: RUF017

    uninterrupted, _ = drawn(ranks_of(1, layers, *stages), None, 40)
    assert 0 not in {row for batch in uninterrupted[:10] for row in batch}
    rows_of_v3 = [
        row
        for number, row in enumerate(sum(uninterrupted[10:30], []))  # noqa: RUF017
        if (number + 1) ** 2 // 160 > number**2 // 160
    ]
    assert len(rows_of_v3) == 40
    assert all(row % 3 != 1 for row in [*rows_of_v3, *sum(uninterrupted[30:], [])])  # noqa: RUF017
    step = 0
    state = None
    draw = np.random.default_rng(3)
    while step < 36:
        size = int(draw.choice([1, 2, 4], p=[0.6, 0.3, 0.1]))
        num_steps = int(draw.integers(1, 6))
        layer_names = ("v1",) if step + num_steps <= 10 else layers
        run_stages = stages if layer_names is layers else (OrderStage(weights=weights["v1"]),)
        rank_batches, state = drawn(ranks_of(size, layer_names, *run_stages), state, num_steps)
        assert rank_batches == uninterrupted[step : step + num_steps]
        step += num_steps
    names = json.loads(state["identity"])
    assert names["layers"].keys() == layers.keys()
    assert [stage["order"].get("filter") for stage in names["order"]["stages"]] == [
        None,
        "v2.loss > 0",
        None,
    ]
    layers["v3"] = write_losses(base, tmp_path / "other", [5, 0, 2] * 4)
    with pytest.raises(StateMismatchError) as error:
        ranks_of(1, layers, *stages)[0].load_state_dict(state)
    assert names["layers"]["v3"] in str(error.value)
    assert json.loads(ranks_of(1, layers, *stages)[0].state_dict()["identity"])["layers"][
        "v3"
    ] in str(error.value)


def test_selection_reads_only_what_is_named(base, layer) -> None:
    for channels, expected in (
        (["t.loss"], {"t.loss", "t.loss_valid"}),
        ([], set()),
    ):
        with make(base, {"t": layer}, select=channels) as loader:
            assert {name for name in next(iter(loader)) if name.startswith("t.")} == expected
    with pytest.raises(
        ConfigError,
        match=r"no channel or attribute 't.nothing'.*channels: .*t.loss",
    ):
        make(base, {"t": layer}, select=["t.nothing"])


def test_a_bad_row_makes_its_sample_bad(base, layer, tmp_path) -> None:
    shutil.copytree(layer, tmp_path / "bad")
    with (tmp_path / "bad" / "layer-000000.tar").open("r+b") as file:
        file.seek(600)
        file.write(b"?")  # in the first row
    with pytest.raises(
        ChecksumError,
        match=r"^layer 't': [^()]*\(xxh3\)[^()]*\(shard layer-000000.tar, [^()]*\)$",
    ):
        rows_of(base, {"t": tmp_path / "bad"}, shuffle=False)
    policy = {"on_error": "substitute", "file": None}
    with make(base, {"t": tmp_path / "bad"}, shuffle=False, bad_samples=policy) as loader:
        rows = [row for batch in loader for row in check(batch)]
        assert rows == [1, *range(1, 12)]
        assert loader.stats().bad_samples == 1


@pytest.mark.parametrize(
    ("name", "position", "filtered", "says"),
    [
        (
            "rows.npy",
            -89,
            None,
            r"layer 't': '.*rows\.npy' names row -?\d+, and the index has 8 rows",
        ),
        (
            "attributes.parquet",
            None,
            "t.loss > 1",
            r"/attributes\.parquet' cannot be read: No such file",
        ),
        (
            "index.arrow",
            None,
            None,
            r"bad' has no index\.arrow; bring it back from a copy, or make it again",
        ),
    ],
)
def test_damage_of_a_layer_names_its_file(
    base, part, tmp_path, name, position, filtered, says
) -> None:
    shutil.copytree(part, tmp_path / "bad")
    (tmp_path / "bad" / name).unlink() if position is None else flip(
        tmp_path / "bad" / name, position, 0x80
    )
    with pytest.raises(IndexFileError, match=says):
        rows_of(
            base,
            {"t": tmp_path / "bad"},
            PRESENT,
            missing="mask",
            order=OrderSpec(filter=filtered),
        )


def test_mixes_have_layers_of_each_dataset(base, layer, tmp_path) -> None:
    build_dataset(tmp_path / "other", {"train": (4, 4)}, seed=9)
    second_layer = write_layer(tmp_path / "other", tmp_path / "of_other")
    data = {"a": base, "b": tmp_path / "other"}
    with make(
        data,
        {"a": {"t": layer}, "b": {"t": second_layer}},
        mix={"a": 1, "b": 1},
    ) as loader:
        for batch in loader:
            check(batch)
        assert json.loads(loader.state_dict()["identity"])["layers"].keys() == {
            "a",
            "b",
        }
    for name, layer_folder in (("a", layer), ("b", second_layer)):
        with pytest.raises(
            ConfigError,
            match=rf"only '{name}' has 't\.caption'; give both such a layer",
        ):
            make(data, {name: {"t": layer_folder}}, mix={"a": 1, "b": 1})
    with pytest.raises(ConfigError, match="'c' is not a dataset of the mix"):
        make(data, {"c": {"t": layer}}, mix={"a": 1, "b": 1})


def test_a_view_belongs_to_its_epoch_and_settings(base, tmp_path) -> None:
    train = Transforms(
        image={"height": 32, "width": 64, "train": True},
        ego={"train": True, "flip_x_prob": 0.5},  # type: ignore[arg-type]
    )
    settings = view_settings(7, train.content())
    point = {
        "name": "point",
        "kind": "points",
        "field": "point.npy",
        "dtype": "float32",
        "axes": ["point", "column"],
        "shape": [None, 3],
        "columns": ["x", "y", "z"],
        "frame": "ego",
        "law": {
            "name": "ego_points",
            "roles": {"positions": [["x", "y", "z"]]},
        },
    }
    for name, view in (
        ("fixed", LayerView()),
        ("seen", LayerView(kind="per_view", epoch=2, settings=settings)),
    ):
        with LayerWriter(base, tmp_path / name, channels=[point], view=view) as writer:
            for position in range(12):
                writer.write(
                    position,
                    {"point": np.array([[position, 2, 3]], np.float32)},
                )
        writer.finish()
    layers = {"fixed": tmp_path / "fixed", "seen": tmp_path / "seen"}
    with DataLoader(
        base,
        4,
        shuffle=True,
        drop_last=True,
        seed=7,
        transforms=train,
        layers=layers,
        num_workers=1,
    ) as loader:
        with pytest.raises(ConfigError, match="views of epoch 2, the loader is at epoch 0"):
            next(iter(loader))
        loader.set_epoch(2)
        batch = next(iter(loader))
        for index, row in enumerate(batch["global_index"].tolist()):
            stored = torch.tensor([row, 2.0, 3.0, 1.0])
            assert batch["seen.point"][index][0].tolist() == [row, 2, 3]
            torch.testing.assert_close(
                batch["fixed.point"][index][0],
                (batch["bda_mat"][index] @ stored)[:3],
            )
    with pytest.raises(ConfigError, match="seed: layer has 7, loader has 8"):
        DataLoader(
            base,
            4,
            shuffle=True,
            drop_last=True,
            seed=8,
            transforms=train,
            layers=layers,
        )
    with pytest.raises(ConfigError, match="a window augments its frames otherwise"):
        DataLoader(
            base,
            4,
            seed=7,
            transforms=train,
            layers=layers,
            window={"frames": [-1, 0]},
        )
