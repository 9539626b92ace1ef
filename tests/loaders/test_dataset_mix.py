"""Several datasets in one loader: exact shares, own epochs, states that name them all, rigs that do not fit refused."""

from __future__ import annotations

import json
import os
import pickle
import shutil

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from fuelrail.loaders import AttributeWeights, ImageAugment, Mix, OrderSpec, World
from fuelrail.loaders.storage.cache.future_uses import FutureUses, RequestNumbers
from fuelrail.pipeline.errors import ConfigError, DatasetNotReadyError, OrderError, StateMismatchError
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.format.manifest import MANIFEST_FILE, encode_manifest, load_manifest
from fuelrail.pipeline.order.batching import Cursor, Walk
from support.datasets import build_dataset
from support.loaders import make_loader

SMALL = ImageAugment(height=32, width=48, resize=0.5)
MIX = {"city": 3, "highway": 1}


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mix")
    build_dataset(folder / "city", {"val": (3,), "train": (8, 10)})
    build_dataset(folder / "highway", {"train": (7,), "val": (2,)}, seed=5)
    return {"city": folder / "city", "highway": folder / "highway"}


def make(roots, batch_size, rank=0, size=1, **options):
    options = {"mix": MIX, "num_workers": 1, "image": SMALL, "seed": 2, **options}
    return make_loader(roots, batch_size, world=World(rank, size), **options)


def named(batches):
    """(dataset, row) of each sample, batch by batch."""
    return [list(zip(batch["dataset"], batch["global_index"].tolist(), strict=True)) for batch in batches]


def run(roots, global_batch, size, *, epoch=0, state=None, **options):
    ranks = []
    for rank in range(size):
        with make(roots, global_batch // size, rank, size, **options) as loader:
            if state is not None:
                loader.load_state_dict(state)
            loader.set_epoch(epoch)
            ranks.append(named(loader))
    return [[entry for part in parts for entry in part] for parts in zip(*ranks, strict=True)]


def test_every_batch_has_the_shares_and_every_sample_comes_equally_often(roots):
    counts: dict = {}
    for epoch in range(7):
        for batch in run(roots, 8, 2, epoch=epoch):
            assert [name for name, _ in batch].count("city") == 6
            for entry in batch:
                counts[entry] = counts.get(entry, 0) + 1
    # 7 epochs of 7 blocks (28 positions, of which 24 are in full batches).
    assert {name for name, _ in counts} == {"city", "highway"}
    assert {row for name, row in counts if name == "city"} == set(range(3, 21))
    assert {row for name, row in counts if name == "highway"} == set(range(7))
    for name in MIX:
        times = [count for (of, _), count in counts.items() if of == name]
        assert max(times) - min(times) <= 1 + 7  # at most one copy an epoch lies in what drop_last leaves out


def test_samples_are_those_of_the_datasets_alone(roots):
    alone = {}
    for name, root in roots.items():
        with make_loader(root, 1, image=SMALL, shuffle=False, num_workers=1, points=True) as loader:
            alone |= {(name, int(batch["global_index"])): batch for batch in loader}
    with make(roots, 4, points=True) as loader:
        assert loader.dataset.root == roots["city"]
        assert list(loader.datasets) == ["city", "highway"]
        batches = list(loader)
        assert len(batches) == len(loader) == 7
        assert loader.stats().storage.spans >= 28
    for batch in batches:
        for at, entry in enumerate(named([batch])[0]):
            for field in ("img", "ego2img", "ego2global", "timestamp_ns"):
                assert torch.equal(batch[field][at], alone[entry][field][0]), field
            assert torch.equal(batch["points"][at], alone[entry]["points"][0])
            assert batch["sample_key"][at] == alone[entry]["sample_key"][0]


@settings(max_examples=8, deadline=None)
@given(
    size=st.sampled_from([1, 2, 4]), then=st.sampled_from([1, 2, 4]), step=st.integers(0, 7), epoch=st.integers(0, 3)
)
@pytest.mark.slow
def test_ranks_and_resuming_change_nothing(roots, size, then, step, epoch):
    options = {"drop_last": False, "image": ImageAugment(height=8, width=8, resize="stretch"), "verify": False}
    whole = run(roots, 4, 1, epoch=epoch, **options)
    assert run(roots, 4, size, epoch=epoch, **options) == whole
    with make(roots, 4 // size, 0, size, **options) as loader:
        loader.set_epoch(epoch)
        batches = iter(loader)
        for _ in range(step):
            next(batches)
        state = msgspec.json.decode(msgspec.json.encode(loader.state_dict()))
    assert run(roots, 4, then, epoch=epoch, state=state, **options) == whole[step:]


def test_filters_weights_windows_and_epoch_length_hold_in_each_dataset(roots):
    order = OrderSpec(filter="frame > 0", weights=(AttributeWeights(attribute="frame"),), epoch_length=24, seed=1)
    with make(roots, 4, order=order, frames=[-1, 0]) as loader:
        assert len(loader) == 6
        for batch in loader:
            assert sorted(batch["dataset"]) == ["city", "city", "city", "highway"]
            assert (batch["frame"] > 0).all()
            rows, keys = batch["frame_global_index"], batch["global_index"]
            present = batch["frame_valid"][:, 0]
            assert torch.equal(rows[:, 0][present], keys[present] - 1)
    with make(roots, 4, order=OrderSpec(kind="windowed", window=1, seed=1)) as loader:
        assert len(list(loader)) == 7


def test_the_state_names_all_datasets_and_refuses_others(roots, tmp_path):
    with make(roots, 4) as loader:
        state = loader.state_dict()
        prints = {name: open_dataset(root).manifest.fingerprint for name, root in roots.items()}
        assert json.loads(state["identity"])["dataset"] == prints
        assert json.loads(state["identity"])["order"]["mix"] == MIX
    build_dataset(tmp_path / "other", {"train": (7,)}, seed=6)
    others = [
        (make({**roots, "highway": tmp_path / "other"}, 4), "dataset: state has"),
        (make(roots, 4, mix={"city": 2, "highway": 1}), "order: state has .*'city': 3.* loader has .*'city': 2"),
        (make({"highway": roots["highway"], "city": roots["city"]}, 4), "order: state has"),
        (make_loader(roots["city"], 4, image=SMALL, num_workers=1), "dataset: state has"),
    ]
    for other, text in others:
        with other, pytest.raises(StateMismatchError, match=text):
            other.load_state_dict(state)


def test_pickled_it_continues_as_the_same_mix(roots):
    with make(roots, 4) as loader:
        batches = iter(loader)
        next(batches)
        copy = pickle.loads(pickle.dumps(loader))
        rest = named(batches)
    with copy:
        assert named(copy) == rest


def test_each_cache_has_the_future_uses_of_its_own_rows(roots, tmp_path):
    options = {"backend": "remote", "cache_dir": tmp_path, "look_ahead_bytes": 30_000}
    plain = [run(roots, 4, 1, epoch=epoch) for epoch in range(3)]
    with make(roots, 4, **options) as loader:
        supply = loader._supply
        assert [named(loader) for _ in range(3)] == plain
        stats = loader.stats().storage
        assert stats.backend == "fsspec"
        assert stats.cache_misses <= 18 + 7
        assert stats.cache_hits >= 3 * 28 - 25 - 4
    first = [(name, row) for batch in plain[0] for name, row in batch]
    for source in supply.sources:
        future_uses = supply._future_uses(source, Walk(Cursor(), loader._batching), RequestNumbers())[0]
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


def changed(root, folder, **changes):
    """A copy of a dataset whose manifest says something else."""
    shutil.copytree(root, folder, copy_function=os.link)
    manifest = msgspec.structs.replace(load_manifest(root), **changes)
    (folder / MANIFEST_FILE).unlink()
    (folder / MANIFEST_FILE).write_bytes(encode_manifest(manifest))
    return folder


def test_datasets_that_do_not_fit_are_refused_with_both_sides(roots, tmp_path):
    channels = load_manifest(roots["highway"]).channels
    cameras = sum(channel.sensor == "camera" for channel in channels)
    unlike = {
        "cameras": {"channels": (*channels[:cameras][::-1], *channels[cameras:])},
        "classes": {"classes": ("car", "bicycle")},
        "origins of the ego frame": {"ego_origin": "imu"},
    }
    for what, changes in unlike.items():
        other = changed(roots["highway"], tmp_path / what, **changes)
        with pytest.raises(ConfigError, match=rf"'city' and 'highway' cannot .* their {what} differ: 'city' has .*"):
            make({"city": roots["city"], "highway": other}, 4)
    build_dataset(tmp_path / "unlabelled", {"train": (7,)}, labelled=False)
    with pytest.raises(ConfigError, match="'city' has boxes, 'highway' has no boxes"):
        make({"city": roots["city"], "highway": tmp_path / "unlabelled"}, 4)


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"mix": None}, ConfigError, "mix=None requires a dict of datasets"),
        ({"mix": {"city": 1}}, OrderError, "names 'city', the datasets are 'city', 'highway'"),
        ({"mix": {"city": 0, "highway": 1}}, ConfigError, "an integer >= 1 for each"),
        ({"mix": {"city": 0.5, "highway": 0.5}}, ConfigError, "an integer >= 1 for each"),
        ({"mix": {"city": 2000, "highway": 1}}, OrderError, "1024 in sum"),
        ({"mix": "3:1"}, ConfigError, "mix='3:1' must be a dict with an integer"),
        ({"order": OrderSpec(kind="lanes")}, OrderError, "kind 'lanes' is of one dataset"),
        ({"order": OrderSpec(mix=Mix(attribute="frame", ratios={"0": 1}))}, OrderError, "a mix of its own"),
        ({"order": OrderSpec(subset="keys.txt")}, OrderError, "a subset is of one dataset"),
        ({"order": OrderSpec(filter="frame > 9")}, OrderError, "dataset 'city': filter .* selects no sample"),
        ({"split": "test"}, ConfigError, "has no split 'test'"),
    ],
)
def test_mixes_that_cannot_be_are_refused(roots, options, kind, text):
    with pytest.raises(kind, match=text):
        make(roots, 4, **options)


def test_datasets_that_are_none_are_refused(roots, tmp_path):
    with pytest.raises(ConfigError, match=r"mix=.* requires a dict of datasets, got dataset="):
        make(roots["city"], 4)
    with pytest.raises(ConfigError, match="a mix needs at least one dataset"):
        make({}, 4, mix={})
    with pytest.raises(ConfigError, match="dataset=7 must be a folder, a URL"):
        make({**roots, "highway": 7}, 4)
    with pytest.raises(DatasetNotReadyError):
        make({**roots, "highway": tmp_path / "nowhere"}, 4)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_the_state_goes_through_torchs_distributed_checkpoint(roots, tmp_path):
    """Windows and mixes put nested values into the state; saved and loaded in place they are the same."""
    options = {"frames": [-1, 0], "order": OrderSpec(filter="frame > 0", seed=3)}
    with make(roots, 4, **options) as loader:
        batches = iter(loader)
        next(batches)
        dcp.save({"loader": loader}, checkpoint_id=tmp_path / "step")
        rest = named(batches)
    with make(roots, 2, 0, 2, **options) as other:
        dcp.load({"loader": other}, checkpoint_id=tmp_path / "step")
        assert named(other) == [batch[:2] for batch in rest]
    # It is loaded in place, into a loader that has neither of these settings: what only the state has is seen too.
    with make(roots, 4) as unlike, pytest.raises(StateMismatchError, match="frames: state has") as caught:
        dcp.load({"loader": unlike}, checkpoint_id=tmp_path / "step")
    assert "frame > 0" in str(caught.value)
    with make(roots, 4, seed=9, **options) as unlike, pytest.raises(StateMismatchError, match="seed: state has"):
        dcp.load({"loader": unlike}, checkpoint_id=tmp_path / "step")
