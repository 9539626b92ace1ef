"""Engines by name: the same bytes from each; what is said where one is not available, or a node does not see files."""

from __future__ import annotations

import dataclasses
import signal
import sys
from concurrent.futures import _base

import pytest

from fuelrail.pipeline.errors import ConfigError, DatasetError
from fuelrail.sharding.engines import LOCAL_ENGINES, EngineOptions, make_engine
from fuelrail.sharding.engines.ray import inputs_here, share_inputs
from support.sharding import digests, shard_nuscenes, write_job


@pytest.mark.process
def test_each_local_engine_gives_the_same_bytes(dataroot, tmp_path):
    source = dataroot("a4 b4", cameras=("CAM_FRONT", "CAM_BACK"))
    outputs = []
    for name in LOCAL_ENGINES:
        for num_workers in (1, 2, 3):
            out = tmp_path / f"{name}-{num_workers}"
            engine = make_engine(EngineOptions(engine=name, workers=num_workers))
            shard_nuscenes(source.root, out, engine=engine, shard_size_bytes=10_000)
            outputs.append(digests(out))
    assert len(outputs) == 6
    assert all(output == outputs[0] for output in outputs)


@pytest.mark.timeout(60)
def test_a_ctrl_c_while_locks_of_results_are_held_ends_the_run(dataroot, tmp_path, monkeypatch):
    """Threads that make shards wait for these locks: without its deferral the run never ends."""
    source = dataroot("a4 b4", cameras=("CAM_FRONT", "CAM_BACK"))

    class Interrupted(_base._AcquireFutures):
        def __enter__(self):
            super().__enter__()
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(_base, "_AcquireFutures", Interrupted)
    engine = make_engine(EngineOptions(engine="threads", workers=2))
    with pytest.raises(KeyboardInterrupt):
        shard_nuscenes(
            source.root,
            tmp_path / "out",
            engine=engine,
            shard_size_bytes=10_000,
        )


def test_without_ray_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        ConfigError,
        match=r"--engine ray needs ray, .*: pip install -e '\.\[ray\]' in a checkout",
    ):
        make_engine(EngineOptions(engine="ray"))


@pytest.fixture
def job(tmp_path):
    (tmp_path / "source").mkdir()
    return write_job(
        tmp_path / "out" / ".fuelrail",
        str(tmp_path / "out"),
        str(tmp_path / "source"),
    )


def test_in_a_shared_folder_they_are_there(job):
    share_inputs(job, "run1")
    assert inputs_here(job, "run1", "1.2.3.4") is job


def test_a_node_that_does_not_see_the_output_says_so(job, tmp_path):
    share_inputs(job, "run1")
    elsewhere = dataclasses.replace(job, scan_table=tmp_path / "elsewhere" / "scan.arrow")
    says = r"node 1\.2\.3\.4 cannot read the output folder .*a file system that all nodes share.*or at a URL"
    with pytest.raises(DatasetError, match=says):
        inputs_here(elsewhere, "run1", "1.2.3.4")
    with pytest.raises(
        DatasetError, match=says
    ):  # a folder of the same name, of another machine or run
        inputs_here(job, "run2", "1.2.3.4")


def test_a_node_that_does_not_see_the_source_says_so(job, tmp_path):
    share_inputs(job, "run1")
    elsewhere = dataclasses.replace(
        job, source=job.source._replace(location=str(tmp_path / "elsewhere"))
    )
    with pytest.raises(ConfigError, match=r"node 1\.2\.3\.4 cannot read the source .*elsewhere"):
        inputs_here(elsewhere, "run1", "1.2.3.4")
