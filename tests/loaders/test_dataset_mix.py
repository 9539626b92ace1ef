"""Several datasets in one loader: exact shares, own epochs, states that name them all, rigs that do not fit refused."""

from __future__ import annotations

import json
import operator
import pickle
import shutil

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

from fuelrail import AttributeWeights, Mix, OrderSpec
from fuelrail.loaders.storage.cache.future_uses import (
    FutureUses,
    Range,
    RequestNumbers,
    build_future_uses,
)
from fuelrail.pipeline.errors import (
    ConfigError,
    DatasetNotReadyError,
    OrderError,
    StateMismatchError,
)
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.order.batching import Cursor, Walk
from fuelrail.pipeline.order.mix import MixStage
from support.batches import batches, load
from support.datasets import build_dataset
from support.edits import reseal

MIX = {"city": 3, "highway": 1}


@pytest.fixture(scope="module")
def roots(build_once):
    highway, _ = build_once({"train": (7,), "val": (2,)}, seed=5)
    return {
        "city": build_once({"val": (3,), "train": (8, 10)})[0],
        "highway": highway,
    }


def make(roots, batch_size=4, **options):
    return load(roots, batch_size, **{"mix": MIX, "seed": 2, **options})


def named(batches):
    """(dataset, row) of each sample, batch by batch."""
    return [
        list(zip(batch["dataset"], batch["global_index"].tolist(), strict=True))
        for batch in batches
    ]


@pytest.mark.costly
def test_every_batch_has_the_shares_and_every_sample_comes_equally_often(roots):
    counts: dict = {}
    ranks = [make(roots, rank=rank, size=2) for rank in range(2)]
    for _ in range(7):
        for batch in map(operator.add, *map(named, ranks)):
            assert [name for name, _ in batch].count("city") == 6
            for entry in batch:
                counts[entry] = counts.get(entry, 0) + 1
    # 7 epochs of 7 blocks (28 positions, of which 24 are in full batches).
    assert {name for name, _ in counts} == {"city", "highway"}
    assert {row for name, row in counts if name == "city"} == set(range(3, 21))
    assert {row for name, row in counts if name == "highway"} == set(range(7))
    for name in MIX:
        times = [count for (dataset, _), count in counts.items() if dataset == name]
        assert (
            max(times) - min(times) <= 1 + 7
        )  # at most one copy an epoch lies in what drop_last leaves out


@pytest.mark.costly
def test_samples_are_those_of_the_datasets_alone(roots):
    alone = {}
    for name, root in roots.items():
        for batch in batches(root, 1, shuffle=False, points=True):
            alone[name, int(batch["global_index"])] = batch
    with make(roots, points=True) as loader:
        assert loader.dataset.root == roots["city"]
        assert list(loader.datasets) == ["city", "highway"]
        mixed_batches = list(loader)
        assert len(mixed_batches) == len(loader) == 7
        assert loader.stats().storage.spans >= 28
    for batch in mixed_batches:
        for index, entry in enumerate(named([batch])[0]):
            for field in ("img", "ego2img", "ego2global", "timestamp_ns"):
                assert torch.equal(batch[field][index], alone[entry][field][0]), field
            assert torch.equal(batch["points"][index], alone[entry]["points"][0])
            assert batch["sample_key"][index] == alone[entry]["sample_key"][0]


def test_filters_weights_windows_and_epoch_length_hold_in_each_dataset(roots):
    order = OrderSpec(
        filter="frame > 0",
        weights=(AttributeWeights(attribute="frame"),),
        epoch_length=24,
        seed=1,
    )
    with make(roots, order=order, frames=[-1, 0]) as loader:
        assert len(loader) == 6
        for batch in loader:
            assert sorted(batch["dataset"]) == [
                "city",
                "city",
                "city",
                "highway",
            ]
            assert (batch["frame"] > 0).all()
            rows = batch["frame_global_index"]
            keys = batch["global_index"]
            present = batch["frame_valid"][:, 0]
            assert torch.equal(rows[:, 0][present], keys[present] - 1)
    with make(roots, order=OrderSpec(kind="windowed", window=1, seed=1)) as loader:
        assert len(list(loader)) == 7


def test_the_state_names_all_datasets_and_refuses_others(roots, tiny):
    state = make(roots).state_dict()
    prints = {name: open_dataset(root).manifest.fingerprint for name, root in roots.items()}
    assert json.loads(state["identity"])["dataset"] == prints
    assert json.loads(state["identity"])["order"]["mix"] == MIX
    mismatches = [
        (make({**roots, "highway": tiny}), "dataset: state has"),
        (
            make(roots, mix={"city": 2, "highway": 1}),
            "order: state has .*'city': 3.* loader has .*'city': 2",
        ),
        (
            make({"highway": roots["highway"], "city": roots["city"]}),
            "order: state has",
        ),
        (load(roots["city"], 4), "dataset: state has"),
    ]
    for mismatched, text in mismatches:
        with mismatched, pytest.raises(StateMismatchError, match=text):
            mismatched.load_state_dict(state)


def test_pickled_it_continues_as_the_same_mix(roots):
    with make(roots) as loader:
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
        rest = named(iterator)
        loader.load_state_dict(state)
        copy = pickle.loads(pickle.dumps(loader))
    with copy:
        assert named(copy) == rest


@pytest.mark.costly
def test_ratios_change_in_stages_and_a_run_resumes_inside_a_ramp(roots):
    stages = [
        MixStage(ratios={"city": 4, "highway": 0}, until=16 * 4, ramp=True),
        MixStage(ratios={"city": 2, "highway": 2}),
    ]
    order = OrderSpec(seed=2, epoch_length=24)
    with make(roots, order=order, mix=stages) as loader:
        all_entries = [entries for _ in range(4) for entries in named(loader)]
    shares = [sum(name == "highway" for name, _ in entries) for entries in all_entries]
    assert shares[:16] == [(block + 1) ** 2 // 16 - block**2 // 16 for block in range(16)]
    assert set(shares[16:]) == {2}
    with make(roots, order=order, mix=stages) as loader:
        epochs = [named(loader) for _ in range(1)]
        iterator = iter(loader)
        epochs += [named([next(iterator), next(iterator), next(iterator)])]
        state = json.loads(json.dumps(loader.state_dict()))
    ranks = [make(roots, 2, order=order, mix=stages, rank=rank, size=2) for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(state)
    rest = [a + b for _ in range(3) for a, b in zip(*map(named, ranks), strict=True)]
    assert [*sum(epochs, []), *rest] == all_entries  # noqa: RUF017
    later_stages = make(roots, order=order, mix=stages[1:])
    with (
        later_stages,
        pytest.raises(StateMismatchError, match="order: state has"),
    ):
        later_stages.load_state_dict(state)
    with pytest.raises(ConfigError, match="a list of MixStage"):
        make(roots, mix=[{"city": 1}])


@pytest.mark.costly
def test_each_cache_has_the_future_uses_of_its_own_rows(roots, tmp_path):
    plain = make(roots)
    expected = [named(plain) for _ in range(3)]
    with make(
        roots,
        backend="remote",
        cache_dir=tmp_path,
        look_ahead_bytes=30_000,
        num_workers=1,
    ) as loader:
        schedule = loader._schedule
        assert [named(loader) for _ in range(3)] == expected
        stats = loader.stats().storage
        assert stats.backend == "fsspec"
        assert stats.cache_misses <= 18 + 7
        assert stats.cache_hits >= 3 * 28 - 25 - 4
    first = [entry for batch in expected[0] for entry in batch]
    for source in schedule.sources:
        only = Range(source.base, len(source.dataset.index), RequestNumbers())
        walk = Walk(Cursor(), loader._batching)
        where = schedule.where
        future_uses, _ = build_future_uses(where.numbers, walk, where.frames, only)
        assert isinstance(future_uses, FutureUses)
        uses = [(time, row) for time, (name, row) in enumerate(first) if name == source.name]
        assert future_uses.used(0, len(first)).tolist() == [row for _, row in uses]
        time, row = uses[1]
        assert future_uses.next_use(torch.tensor([row]).numpy(), time - 1).tolist() == [time]


def test_request_numbers_are_found_in_order():
    numbers = RequestNumbers()
    for number in (0, 3, 4, 9, 11):
        numbers.note(number)
    assert [numbers(0), numbers(0), numbers(2), numbers(4)] == [0, 0, 4, 11]


def test_datasets_that_do_not_fit_are_refused_with_both_sides(roots, build_once, tmp_path):
    channels = open_dataset(roots["highway"]).manifest.channels
    cameras = sum(channel.sensor == "camera" for channel in channels)
    unlike = {
        "cameras": {"channels": (*channels[:cameras][::-1], *channels[cameras:])},
        "classes": {"classes": ("car", "bicycle")},
        "origins of the ego frame": {"ego_origin": "imu"},
    }
    for field, changes in unlike.items():
        changed_root = shutil.copytree(roots["highway"], tmp_path / field)
        reseal(
            changed_root,
            lambda manifest, changes=changes: msgspec.structs.replace(manifest, **changes),
        )
        with pytest.raises(
            ConfigError,
            match=rf"'city' and 'highway' cannot .* their {field} differ: 'city' has .*",
        ):
            make({"city": roots["city"], "highway": changed_root})
    with pytest.raises(ConfigError, match="'city' has boxes, 'highway' has no boxes"):
        make(
            {
                "city": roots["city"],
                "highway": build_once({"train": (4,)}, labelled=False)[0],
            }
        )


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"mix": None}, ConfigError, "mix=None requires a dict of datasets"),
        (
            {"mix": {"city": 1}},
            OrderError,
            "names 'city', the datasets are 'city', 'highway'",
        ),
        (
            {"mix": {"city": 0.5, "highway": 0.5}},
            ConfigError,
            "an integer >= 1 for each",
        ),
        ({"mix": {"city": 2000, "highway": 1}}, OrderError, "1024 in sum"),
        (
            {"order": OrderSpec(kind="lanes")},
            OrderError,
            "kind 'lanes' is of one dataset",
        ),
        (
            {"order": OrderSpec(mix=Mix(attribute="frame", ratios={"0": 1}))},
            OrderError,
            "a mix of its own",
        ),
        (
            {"order": OrderSpec(subset="keys.txt")},
            OrderError,
            "a subset is of one dataset",
        ),
        (
            {"order": OrderSpec(filter="frame > 9")},
            OrderError,
            "dataset 'city': filter .* selects no sample",
        ),
        ({"split": "test"}, ConfigError, "has no split 'test'"),
    ],
)
def test_mixes_that_cannot_be_are_refused(roots, options, kind, text):
    with pytest.raises(kind, match=text):
        make(roots, **options)


def test_datasets_that_are_none_are_refused(roots, tmp_path):
    with pytest.raises(ConfigError, match=r"mix=.* requires a dict of datasets, got dataset="):
        make(roots["city"])
    with pytest.raises(ConfigError, match="a mix needs at least one dataset"):
        make({}, mix={})
    with pytest.raises(ConfigError, match="dataset=7 must be a folder, a URL"):
        make({**roots, "highway": 7})
    with pytest.raises(DatasetNotReadyError):
        make({**roots, "highway": tmp_path / "nowhere"})


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_the_state_goes_through_torchs_distributed_checkpoint(roots, tmp_path):
    """Windows and mixes put nested values into the state; saved and loaded in place they are the same."""
    options = {
        "frames": [-1, 0],
        "order": OrderSpec(filter="frame > 0", seed=3),
    }
    with make(roots, **options) as loader:
        iterator = iter(loader)
        next(iterator)
        dcp.save({"loader": loader}, checkpoint_id=tmp_path / "step")
        rest = named(iterator)
    with make(roots, 2, size=2, **options) as restored:
        dcp.load({"loader": restored}, checkpoint_id=tmp_path / "step")
        assert named(restored) == [batch[:2] for batch in rest]
    # It is loaded in place, into a loader that has neither of these settings: what only the state has is seen too.
    with (
        make(roots) as unlike,
        pytest.raises(StateMismatchError, match="frames: state has") as caught,
    ):
        dcp.load({"loader": unlike}, checkpoint_id=tmp_path / "step")
    assert "frame > 0" in str(caught.value)
    with (
        make(roots, seed=9, **options) as unlike,
        pytest.raises(StateMismatchError, match="seed: state has"),
    ):
        dcp.load({"loader": unlike}, checkpoint_id=tmp_path / "step")


OF_CAMERAS = (
    "img",
    "cam_valid",
    "intrinsics",
    "dist",
    "cam2ego",
    "cam2keyego",
    "ego2img",
    "img_timestamp_ns",
)


@pytest.mark.parametrize("window", [None, {"frames": [-1, 0]}])
def test_cameras_of_other_names_and_in_another_order_are_mapped(
    roots, tmp_path, monkeypatch, window
):
    """Each sample is as its dataset alone gives it, its cameras in the order of the mapping."""
    monkeypatch.setattr("support.datasets.CAMERAS", ("left", "right"))
    build_dataset(
        tmp_path / "other",
        {"train": (7,)},
        seed=5,
        missing=frozenset({(2, "left")}),
    )
    datasets = {"city": roots["city"], "other": tmp_path / "other"}
    camera_names = {
        "city": ["cam_front", "cam_back"],
        "other": ["right", "left"],
    }
    options = {
        "mix": {"city": 1, "other": 1},
        "order": OrderSpec(),
        "decoder": "turbo",
        "window": window,
    }
    alone = {
        (name, int(batch["global_index"])): batch
        for name, root in datasets.items()
        for batch in batches(root, 1, shuffle=False, decoder="turbo", window=window)
    }
    with load(datasets, 4, cameras=camera_names, **options) as loader:
        assert loader.cameras == ("cam_front", "cam_back")
        state = loader.state_dict()
        mixed_batches = list(loader)
    for batch in mixed_batches:
        for index, (name, row) in enumerate(
            zip(batch["dataset"], batch["global_index"].tolist(), strict=True)
        ):
            axis = 0 if window is None else 1
            for entry in OF_CAMERAS:
                value = alone[name, row][entry][0]
                value = value.flip(axis) if name == "other" else value
                assert torch.equal(batch[entry][index], value), (name, entry)
    exchanged = load(
        datasets,
        4,
        cameras={**camera_names, "other": ["left", "right"]},
        **options,
    )
    with exchanged, pytest.raises(StateMismatchError, match="cameras"):
        exchanged.load_state_dict(state)
    for wrong, text in (
        (
            {"city": ["cam_front"], "other": ["right", "left"]},
            "as many names as the first, and 'other' has",
        ),
        ({"city": ["cam_front"]}, "'other' has none"),
        ({**camera_names, "other": ["right", "top"]}, "has no camera 'top'"),
        ({**camera_names, "other": ["right", "right"]}, "each once"),
        (None, "their cameras differ"),
    ):
        with pytest.raises(ConfigError, match=text):
            load(datasets, 4, cameras=wrong, **options)
