"""What a task does first on its node: find the run's inputs, or fetch them, or say what is not shared."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from fuelrail.pipeline.errors import ConfigError, DatasetError
from fuelrail.pipeline.format.rules import Rig
from fuelrail.sharding.engines.ray import inputs_here, share_inputs
from fuelrail.sharding.planning.recipe import make_recipe
from fuelrail.sharding.sources.registry import SourceSpec
from fuelrail.sharding.write.shard_writer import WriteJob


@pytest.fixture
def job(tmp_path):
    work = tmp_path / "out" / ".fuelrail"
    work.mkdir(parents=True)
    (tmp_path / "source").mkdir()
    (work / "scan.arrow").write_bytes(b"table")
    for name in ("plan.npy", "selection.npy"):
        np.save(work / name, np.arange(3))
    return WriteJob(
        out=str(tmp_path / "out"),
        scan_table=work / "scan.arrow",
        plan_rows=work / "plan.npy",
        selection=work / "selection.npy",
        shards=(),
        stamps=(),
        source=SourceSpec("nuscenes", str(tmp_path / "source"), {}),
        recipe=make_recipe(),
        dataset="d",
        rig=Rig.make((), (), (), ()),
        license=None,
        lidars=(),
        dictionary=None,
        clip_ids=(),
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
    with pytest.raises(DatasetError, match=says):  # a folder of the same name, of another machine or run
        inputs_here(job, "run2", "1.2.3.4")


def test_a_node_that_does_not_see_the_source_says_so(job, tmp_path):
    share_inputs(job, "run1")
    elsewhere = dataclasses.replace(job, source=job.source._replace(location=str(tmp_path / "elsewhere")))
    with pytest.raises(ConfigError, match=r"node 1\.2\.3\.4 cannot read the source .*elsewhere"):
        inputs_here(elsewhere, "run1", "1.2.3.4")
