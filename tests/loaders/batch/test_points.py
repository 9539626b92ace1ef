"""Accumulated lidar sweeps, through sharding and the loader, against the official devkit and against the world."""

from __future__ import annotations

import numpy as np
import pytest

from fuelrail import BevAugment, DataLoader, PointSweeps
from fuelrail.loaders.storage.reader import SampleReader
from fuelrail.pipeline.errors import ConfigError, SourceError
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.sharding.planning.recipe import make_recipe
from fuelrail.sharding.progress import Quiet
from fuelrail.sharding.run import shard
from fuelrail.sharding.sources.registry import SourceSpec
from fuelrail.sharding.verify.dataset import verify
from support.batches import TINY, batches
from support.nuscenes_sweeps import WALL, add_sweeps
from support.nuscenes_tables import build_nuscenes
from support.sharding import shard_nuscenes

PER_KEYFRAME = 5
BEV = BevAugment(
    train=True,
    rotate_deg=(-22.5, 22.5),
    scale=(0.9, 1.1),
    flip_y_prob=0.5,
    translate_std_m=0.5,
)


@pytest.fixture(scope="module")
def nuscenes_source(tmp_path_factory):
    source = build_nuscenes(tmp_path_factory.mktemp("nuscenes"), {"scene-0061": 3, "scene-0103": 2})
    add_sweeps(source, PER_KEYFRAME)
    return source


@pytest.fixture(scope="module")
def dataset(nuscenes_source, tmp_path_factory):
    out = tmp_path_factory.mktemp("sweeps") / "out"
    shard_nuscenes(
        nuscenes_source.root,
        out,
        sweeps=PER_KEYFRAME + 2,
        splits={"train": 1.0},
    )
    return out


def samples(dataset, points, **options) -> dict[str, dict]:
    single_batches = batches(
        dataset,
        1,
        image=TINY,
        shuffle=False,
        points=points,
        **{"seed": 5, **options},
    )
    return {batch["sample_key"][0]: batch for batch in single_batches}


def clouds(dataset, points, **options) -> dict[str, np.ndarray]:
    return {
        key: batch["points"][0].numpy()
        for key, batch in samples(dataset, points, **options).items()
    }


@pytest.mark.costly
@pytest.mark.parametrize(
    ("num_sweeps", "min_distance_m"), [(1, 0.0), (3, 1.0), (8, 1.0), (30, 2.5)]
)
def test_clouds_are_the_devkits(
    nuscenes_source, dataset, num_sweeps: int, min_distance_m: float
) -> None:
    devkit = pytest.importorskip("nuscenes.nuscenes", reason="nuscenes-devkit is not installed")
    from nuscenes.utils.data_classes import LidarPointCloud

    nusc = devkit.NuScenes(
        version=nuscenes_source.version,
        dataroot=str(nuscenes_source.root),
        verbose=False,
    )
    ours = clouds(
        dataset,
        PointSweeps(num_sweeps=num_sweeps, min_distance_m=min_distance_m),
    )
    num_compared = 0
    for scene in nusc.scene:
        token = scene["first_sample_token"]
        frame = 0
        while token:
            record = nusc.get("sample", token)
            stored = min(
                num_sweeps, PER_KEYFRAME + 3
            )  # one more than the dataset keeps earlier ones
            cloud, lag_s = LidarPointCloud.from_file_multisweep(
                nusc, record, "LIDAR_TOP", "LIDAR_TOP", stored, min_distance_m
            )
            our_cloud = ours[f"{scene['name']}-{frame:06d}"]
            assert our_cloud.shape == (cloud.points.shape[1], 5)
            np.testing.assert_allclose(our_cloud[:, :3].T, cloud.points[:3], atol=2e-5)
            np.testing.assert_array_equal(our_cloud[:, 3], cloud.points[3])
            np.testing.assert_allclose(our_cloud[:, 4], lag_s[0], atol=1e-6)
            num_compared += len(np.unique(lag_s))
            token = record["next"]
            frame = frame + 1
    assert num_compared >= 5 * min(num_sweeps, 2) - 2


@pytest.mark.parametrize("bev", [None, BEV])
def test_what_stands_still_stays_at_its_place(dataset, bev) -> None:
    options = {} if bev is None else {"ego": bev}
    num_moved = 0
    for batch in samples(dataset, PointSweeps(num_sweeps=6), **options).values():
        points = batch["points"][0].numpy()
        for lag_s in np.unique(points[:, 4]):
            wall = points[points[:, 4] == lag_s][: len(WALL), :3]
            in_ego = np.c_[wall, np.ones(len(wall))] @ batch["lidar2ego"][0].double().numpy().T
            in_world = in_ego @ batch["ego2global"][0].numpy().T
            np.testing.assert_allclose(
                in_world[:, :3],
                WALL + np.array([400.0, 1100.0, 0.0]),
                atol=1e-3,
            )
            num_moved += lag_s > 0
    assert num_moved >= 3 * PER_KEYFRAME


@pytest.mark.parametrize("choose", ["latest", "random"])
def test_windows_of_accumulated_sweeps_in_an_augmented_ego_frame(dataset, choose: str) -> None:
    """Each frame's cloud by float64 matrices, and what stands still at one place in all frames of the key's ego."""
    reader = SampleReader(open_dataset(dataset))
    settings = PointSweeps(num_sweeps=4, choose=choose)
    num_earlier = 0
    for batch in samples(dataset, settings, frames=[-1, 0, 1], ego=BEV).values():
        bda = batch["bda_mat"][0].double().numpy()
        key2global = reader.sample(int(batch["global_index"])).geometry.ego2global
        for t, row in enumerate(batch["frame_global_index"][0].tolist()):
            sample = reader.sample(row)
            geometry = sample.geometry
            earlier = sample.sweeps.get("lidar_top")
            lidar2global = geometry.lidar_ego2global[0] @ geometry.lidar2ego[0]
            lidar2ego = np.linalg.solve(geometry.ego2global, lidar2global)
            parts = [(sample.points["lidar_top"], np.eye(4), 0.0)]
            ends = np.cumsum(earlier.num_points) if earlier is not None else []
            num_stored = len(ends)
            for sweep in settings.chosen(num_stored, seed=5, epoch=0, sample=row):
                move = np.linalg.solve(lidar2global, earlier.lidar2global[sweep])
                lag_s = (
                    int(geometry.lidar_timestamp_ns[0]) - int(earlier.timestamp_ns[sweep])
                ) * 1e-9
                parts.append(
                    (
                        earlier.points[ends[sweep] - earlier.num_points[sweep] : ends[sweep]],
                        move,
                        lag_s,
                    )
                )
                num_earlier += 1
            to_augmented = np.linalg.solve(lidar2ego, bda @ lidar2ego)
            expected = [
                (
                    np.c_[points[:, :3].astype(np.float64), np.ones(len(points))]
                    @ (to_augmented @ move).T
                )[:, :3]
                for points, move, _ in parts
            ]
            cloud = batch["points"][0][t].numpy()
            assert cloud.dtype == np.float32
            np.testing.assert_allclose(cloud[:, :3], np.concatenate(expected), atol=2e-4)
            lags_s = np.concatenate([np.full(len(points), lag_s) for points, _, lag_s in parts])
            np.testing.assert_allclose(cloud[:, 4], lags_s, atol=1e-6)
            np.testing.assert_allclose(batch["lidar2ego"][0, t].numpy(), lidar2ego, atol=1e-5)
            to_key = batch["ego2key"][0, t].double().numpy() @ lidar2ego
            wall = np.c_[cloud[: len(WALL), :3], np.ones(len(WALL))] @ to_key.T
            in_world = np.c_[WALL + np.array([400.0, 1100.0, 0.0]), np.ones(len(WALL))]
            still = in_world @ np.linalg.inv(key2global).T @ bda.T
            np.testing.assert_allclose(wall[:, :3], still[:, :3], atol=2e-3)
    assert num_earlier > 20


def test_random_sweeps_follow_the_seed_and_not_the_threads(dataset) -> None:
    points = PointSweeps(num_sweeps=4, choose="random")
    first = clouds(dataset, points)
    repeated = clouds(dataset, points, num_workers=1)
    reseeded = clouds(dataset, points, seed=6)
    assert all(np.array_equal(first[key], repeated[key]) for key in first)
    assert any(not np.array_equal(first[key], reseeded[key]) for key in first if key.endswith("1"))
    for key, cloud in first.items():
        lags = list(dict.fromkeys(cloud[:, 4].tolist()))
        assert lags == sorted(lags)
        assert len(lags) == (1 if key.endswith("000000") else 4)


def test_a_sample_without_earlier_sweeps_may_repeat_its_own(dataset) -> None:
    plain, padded = (
        clouds(dataset, PointSweeps(num_sweeps=3, repeat_if_alone=repeat))
        for repeat in (False, True)
    )
    for key, cloud in plain.items():
        expected = np.tile(cloud, (3, 1)) if key.endswith("000000") else cloud
        np.testing.assert_array_equal(padded[key], expected)


def test_without_accumulation_points_are_the_own_sweep(dataset) -> None:
    sweep_clouds = clouds(dataset, True)
    accumulated = clouds(dataset, PointSweeps(num_sweeps=1))
    for key in sweep_clouds:
        np.testing.assert_array_equal(sweep_clouds[key][:, :4], accumulated[key][:, :4])
        assert sweep_clouds[key][:, 4].any()  # rings
        assert not accumulated[key][:, 4].any()  # seconds


def test_the_dataset_is_sound_and_can_be_made_again(dataset, tmp_path) -> None:
    assert not verify(dataset, deep=True, num_threads=1).faults
    for points in (True, False):
        out = tmp_path / str(points)
        shard(
            SourceSpec("fuelrail", str(dataset), {"points": points}),
            out=out,
            recipe=make_recipe(seed=7),
            num_workers=1,
            progress=Quiet(),
        )
        if points:
            sweeps = PointSweeps(num_sweeps=3)
            before = clouds(dataset, sweeps)
            resharded = clouds(out, sweeps)
            assert all(np.array_equal(resharded[key], before[key]) for key in before)
        else:
            with pytest.raises(
                ConfigError,
                match=r"num_sweeps=3, but dataset .* stores one sweep",
            ):
                DataLoader(out, 1, transforms={"points": PointSweeps(num_sweeps=3)})


def test_missing_sweep_files_are_named(nuscenes_source, tmp_path) -> None:
    lost = next(
        row
        for row in nuscenes_source.tables["sample_data"]
        if row["filename"].startswith("sweeps/LIDAR")
    )
    path = nuscenes_source.root / lost["filename"]
    data = path.read_bytes()
    path.unlink()
    try:
        with pytest.raises(
            SourceError,
            match=f"{lost['filename']}.* is not there; the option sweeps=0",
        ):
            shard_nuscenes(nuscenes_source.root, tmp_path / "out", sweeps=PER_KEYFRAME)
    finally:
        path.write_bytes(data)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_sweeps": 0}, "num_sweeps=0 must be 1 or more"),
        ({"num_sweeps": 2, "min_distance_m": -1.0}, "min_distance"),
    ],
)
def test_settings_out_of_range(values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PointSweeps(**values)
