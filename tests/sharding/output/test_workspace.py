"""The output folder in the making: whole files only, one run at a time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from fuelrail.pipeline.errors import DatasetError, DatasetExistsError
from fuelrail.pipeline.format.manifest import WORK_FOLDER
from fuelrail.sharding.output.folder import FolderOutput, check_out
from fuelrail.sharding.output.workspace import RunState, Workspace
from fuelrail.sharding.planning.plan import PlannedShard
from fuelrail.sharding.planning.recipe import make_recipe

STATE = RunState(
    recipe=make_recipe(),
    num_samples=3,
    num_clips=1,
    samples_sha256="ab",
    shards=[PlannedShard("train", 0, 0, 3)],
)


def workspace(folder):
    return Workspace(FolderOutput(str(folder)))


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    out = FolderOutput(str(tmp_path))
    final = tmp_path / "final"
    with out.publish("final") as file:
        file.write(b"whole")
        assert not final.exists()
    assert final.read_bytes() == b"whole"
    with pytest.raises(RuntimeError), out.publish("final") as file:
        file.write(b"half")
        raise RuntimeError
    assert final.read_bytes() == b"whole"
    assert list(out.temporary.iterdir()) == []


def test_a_second_run_is_refused_and_names_the_first(tmp_path):
    with (
        workspace(tmp_path / "out"),
        pytest.raises(DatasetError, match=f"process {os.getpid()}"),
    ):
        workspace(tmp_path / "out")
    with workspace(tmp_path / "out"):
        pass


@pytest.mark.process
def test_the_lock_of_a_dead_process_is_stale(tmp_path):
    code = (
        "import os, signal, sys\n"
        "from fuelrail.sharding.output.folder import open_output\n"
        "from fuelrail.sharding.output.workspace import Workspace\n"
        "work = Workspace(open_output(sys.argv[1]))\n"
        "(work.temporary / 'half').write_bytes(b'x')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    dead = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": _SRC},
    )
    assert dead.returncode == -signal.SIGKILL
    assert (tmp_path / "out" / WORK_FOLDER / "tmp" / "half").exists()
    with workspace(tmp_path / "out") as work:
        assert list(work.temporary.iterdir()) == []


_SRC = os.pathsep.join(path for path in sys.path if path)


def test_started_work_stays(tmp_path):
    out = tmp_path / "out"
    with workspace(out) as work:
        assert work.state() is None
        work.start(STATE)
    with workspace(out) as work:
        assert work.state() == STATE
        work.remove()
    assert list(out.iterdir()) == []


def test_a_recipe_of_another_version_is_not_guessed(tmp_path):
    with workspace(tmp_path) as work:
        work.start(STATE)
        (work.folder / "run.json").write_text('{"source": "nuscenes", "colour": 1}')
    with (
        workspace(tmp_path) as work,
        pytest.raises(DatasetExistsError, match="another version of fuelrail"),
    ):
        work.state()


def test_foreign_files_are_not_touched(tmp_path):
    check_out(FolderOutput(str(tmp_path / "not-there")))
    check_out(FolderOutput(str(tmp_path)))
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(DatasetExistsError, match=r"thesis\.tex"):
        check_out(FolderOutput(str(tmp_path)))
    with pytest.raises(DatasetExistsError, match=r"thesis\.tex' is a file"):
        check_out(FolderOutput(str(tmp_path / "thesis.tex")))
