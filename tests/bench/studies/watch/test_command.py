"""``fuelrail watch -- COMMAND``, and ``fr.watch`` in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import torch

import fuelrail as fr
from fuelrail.bench.measure.records import rank_path, read_rank
from fuelrail.pipeline.errors import ConfigError
from support.ranks import environment

pytestmark = pytest.mark.process

SCRIPT = """
import sys, time, torch
rows = [torch.full((4,), float(row)) for row in range(64)]
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
for epoch in range(int(sys.argv[1])):
    for batch in torch.utils.data.DataLoader(rows, 2):
        time.sleep(0.002)
        model(batch).sum().backward()
        optimizer.step()
        if epoch == 1:
            print("running", flush=True)
"""


def command(*words: object, **options) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "fuelrail", "watch", *map(str, words)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def run(*words: object, **options) -> tuple[int, str, str]:
    process = command(*words, **options)
    said, errors = process.communicate(timeout=200)
    return process.returncode, said, errors


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.slow
def test_a_script_is_watched_without_a_line_in_it(script: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, said, errors = run("--out", out, "--try", "--json", "--", sys.executable, script, 2)
    assert code == 0, errors
    report = json.loads(said[said.index("{") :])
    assert report == json.loads((out / "report.json").read_text())
    assert report["findings"][0]["cause"] == "host"
    steps = read_rank(rank_path(out / "records", 0)).steps
    assert len(steps) == 63  # without the one in which ranks may wait for each other's trials
    tried = read_rank(rank_path(out / "records", 0)).remedies
    assert msgspec.to_builtins(tried) == report["remedies"]
    assert "fuelrail: the training pauses, remedies are tried" in errors
    assert {step.num_samples for step in steps} == {2}
    assert all(step.data_wait_ns and step.backward_ns and step.optimiser_ns for step in steps)
    assert (out / "report.html").exists()
    code, said, _ = run("--out", out)  # from the records alone
    assert code == 0
    assert said.startswith("Work outside of forward, backward and optimiser holds all ranks up")


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.parametrize("end", ["run.finish()", ""])
def test_a_run_of_wandb_gets_the_steps_before_it_ends(
    script: Path, tmp_path: Path, end: str
) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    begin = f"import torch, wandb\nrun = wandb.init(mode='offline', dir={str(tmp_path)!r})\n"
    script.write_text(f"{begin}{SCRIPT}\nrun.log({{'loss': 1}})\n{end}\n")
    code, _, errors = run("--out", tmp_path / "out", "--", sys.executable, script, 2)
    assert code == 0, errors
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    stored = file.read_bytes()
    assert stored.count(b"watch/forward_ms") >= 60
    assert b"watch/occupancy" in stored


def test_after_ctrl_c_there_is_a_verdict(script: Path, tmp_path: Path) -> None:
    process = command(
        "--out", tmp_path / "out", "--", sys.executable, script, 100_000, start_new_session=True
    )
    assert process.stdout is not None
    while process.stdout.readline() != "running\n":
        time.sleep(0)
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=200)
    assert "Work outside of forward, backward and optimiser holds all ranks up" in said
    assert process.returncode == 130


@pytest.mark.slow
@pytest.mark.long
def test_a_job_whose_rank_dies_ends_with_a_verdict(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, signal, torch\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)\n"
        "rows = [torch.ones(4)] * 400\n"
        "for step, batch in enumerate(torch.utils.data.DataLoader(rows, 2)):\n"
        "    model(batch).sum().backward()\n"
        "    optimizer.step()\n"
        "    if step == 60 and dist.get_rank() == 1:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    out = tmp_path / "out"
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, script)
    code, said, _ = run("--out", out, "--", sys.executable, *launch)
    assert code == 1
    assert "on 2 ranks" in said
    assert len(read_rank(rank_path(out / "records", 1)).steps) >= 58


def test_a_command_keeps_its_exit_code_and_a_sitecustomize_is_run(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text("NAME = 'of the user'")
    code = "import sys, sitecustomize; print(sitecustomize.NAME, 'torch' in sys.modules); exit(3)"
    env = {
        **environment(),
        "PYTHONPATH": os.pathsep.join([str(other), environment()["PYTHONPATH"]]),
    }
    done = subprocess.run(
        [
            *(sys.executable, "-m", "fuelrail", "watch", "--out", str(tmp_path / "out"), "--"),
            *(sys.executable, "-c", code),
        ],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "of the user False\n"
    assert done.returncode == 3
    assert "no step of a training loop was seen" in done.stderr


def test_a_command_that_does_not_start_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    code, _, errors = run("--out", tmp_path, "--", tmp_path / "no-such-program")
    assert code == 2
    assert "cannot run" in errors
    code, _, errors = run("--out", tmp_path)
    assert code == 1
    assert "there are no records" in errors


def test_a_watch_is_its_loader_and_there_is_one_recording_of_a_process(tmp_path: Path) -> None:
    loader = torch.utils.data.DataLoader(list(range(12)), 4)
    watched = fr.watch(loader, out=tmp_path / "a")
    try:
        assert len(watched) == 3
        assert watched.batch_size == 4
        assert watched.report() is None
        batches = [batch.tolist() for batch in fr.watch(loader)]
        assert (
            batches == [batch.tolist() for batch in watched] == [batch.tolist() for batch in loader]
        )
        with pytest.raises(ConfigError, match="this process records to"):
            fr.watch(loader, out=tmp_path / "b")
        with pytest.raises(AttributeError):
            _ = watched.no_such_attribute
    finally:
        watched.finish()
    assert [
        batch.tolist() for batch in watched
    ] == batches  # a watch that ended goes on as a loader


def test_a_batch_lives_no_longer_than_without_a_watch(tmp_path: Path) -> None:
    import weakref

    watched = fr.watch((torch.ones(2) for _ in range(3)), out=tmp_path)
    try:
        iterator = iter(watched)
        batch = next(iterator)
        kept = weakref.ref(batch)
        del batch
        assert kept() is None
    finally:
        watched.finish()
