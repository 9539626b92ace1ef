"""`fuelrail annotate --engine ray` on a real cluster of several nodes: the bytes of one process, whatever dies."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import pytest

from fuelrail.bench.annotation.run import annotate
from fuelrail.pipeline.errors import ConfigError, FuelrailError, StageError
from fuelrail.sharding.engines import ray as engine
from support.datasets import build_dataset
from support.layers import digests
from support.ray_cluster import ray_cluster
from support.sharding import environment

pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")
pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # Ray's own, of its dependencies
]
OPTIONS = {
    "batch_size": 2,
    "transforms": {"image": {"height": 16, "width": 32}},
    "workers": 1,
}
MODEL = """
import os
import signal
from pathlib import Path


def mean(batch):
    row = int(batch["global_index"][0])
    if (victim := Path("KILLS") / str(row)).exists():
        victim.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return {"mean": batch["img"].float().flatten(1).mean(1), "name": batch["sample_key"]}


def broken(batch):
    return {"mean": batch["no such entry"]}
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    root = tmp_path_factory.mktemp("base") / "base"
    build_dataset(root, {"train": (15, 16), "val": (9,)})
    return root


@pytest.fixture(scope="module")
def cluster():
    with ray_cluster(3) as started_cluster:
        yield started_cluster


@pytest.fixture
def kills(tmp_path, monkeypatch):
    """A folder of files named by rows: the process that comes to such a row ends as by SIGKILL, once."""
    folder = tmp_path / "kills"
    folder.mkdir()
    (tmp_path / "teacher.py").write_text(MODEL.replace("KILLS", str(folder)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    sys.modules.pop("teacher", None)


@pytest.fixture
def expected(base, kills, tmp_path):
    annotate(base, tmp_path / "alone" / "teacher", "teacher:mean", **OPTIONS)
    return digests(tmp_path / "alone" / "teacher")


def on_ray(base, out, cluster, model="teacher:mean", **changes):
    return annotate(
        base,
        out,
        model,
        engine="ray",
        ray_address=cluster.address,
        **OPTIONS | changes,
    )


def test_processes_and_a_node_that_die_do_not_show(base, kills, expected, cluster, tmp_path):
    out = tmp_path / "ray" / "teacher"
    done = threading.Event()
    for row in (0, 8, 20, 30):  # the first one while the table is inferred
        (kills / str(row)).touch()

    def kill_a_node():
        while len(list(out.glob(".fuelrail/segments/*"))) < 4 and not done.is_set():
            time.sleep(0.01)
        cluster.tell("kill")

    killer = threading.Thread(target=kill_a_node)
    killer.start()
    try:
        report = on_ray(base, out, cluster)
    finally:
        done.set()
        killer.join()
        cluster.tell("add")
    assert list(kills.iterdir()) == []
    assert (report.num_written, report.num_kept) == (40, 0)
    assert digests(out) == expected
    assert on_ray(base, out, cluster).num_kept == 40


def test_a_command_that_is_killed_continues_where_it_was(base, expected, cluster, tmp_path):
    out = tmp_path / "ray" / "teacher"
    command = [
        sys.executable,
        "-m",
        "fuelrail",
        "annotate",
        base,
        out,
        "--model",
        "teacher:mean",
        "--batch-size",
        "2",
    ]
    (tmp_path / "small.yaml").write_text("image: {height: 16, width: 32}")
    command += [
        "--transforms",
        "small.yaml",
        "--engine",
        "ray",
        "--ray-address",
        cluster.address,
    ]
    run = subprocess.Popen(
        command,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline_s = time.monotonic() + 200
    while len(list(out.glob(".fuelrail/segments/*"))) < 3:
        assert run.poll() is None, run.stderr.read()
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    run.send_signal(signal.SIGKILL)
    run.communicate()
    report = on_ray(base, out, cluster)
    assert 6 <= report.num_kept == 40 - report.num_written
    assert digests(out) == expected


def test_a_function_without_a_module_is_taken_along(base, expected, cluster, tmp_path):
    out = tmp_path / "ray" / "teacher"
    on_ray(
        base,
        out,
        cluster,
        lambda b: {
            "mean": b["img"].float().flatten(1).mean(1),
            "name": b["sample_key"],
        },
    )
    assert digests(out) == expected


def test_a_window_leaves_out_the_same_samples(base, kills, cluster, tmp_path):
    window = {"frames": [0, 1, 2], "pad": "drop"}
    alone = annotate(
        base,
        tmp_path / "alone" / "span",
        "teacher:mean",
        window=window,
        **OPTIONS,
    )
    report = on_ray(base, tmp_path / "ray" / "span", cluster, window=window)
    assert 0 < report.num_left_out == alone.num_left_out == 40 - report.num_written
    assert digests(tmp_path / "ray" / "span") == digests(tmp_path / "alone" / "span")
    second_report = on_ray(base, tmp_path / "ray" / "span", cluster, window=window)
    assert (second_report.num_written, second_report.num_kept) == (0, report.num_written)


def test_what_is_wrong_is_said_as_without_ray(base, kills, cluster, tmp_path, monkeypatch):
    with pytest.raises(
        StageError,
        match=r"'broken' failed on samples .*KeyError.*teacher\.py:\d+ in broken",
    ) as caught:
        on_ray(base, tmp_path / "layer", cluster, "teacher:broken")
    assert "no such entry" in str(caught.value.__cause__)
    with pytest.raises(
        ConfigError,
        match=r"node [\d.]+ cannot begin: .*cannot be imported.*all nodes share",
    ):
        on_ray(base, tmp_path / "layer", cluster, "no_such_module:f")
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"cannot be pickled .*give it as 'MODULE:NAME'"):
        on_ray(base, tmp_path / "layer", cluster, lambda batch: lock)
    monkeypatch.setattr(engine, "NO_NODE_S", 0.5)
    monkeypatch.setattr(engine, "_LOOK_S", 0.1)
    with pytest.raises(
        FuelrailError,
        match=r"no node with 1 CPU and 1 GPU and .* memory for 0 s",
    ):
        on_ray(base, tmp_path / "layer", cluster, device="cuda")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ConfigError, match="one of 2 ranks: start it once"):
        on_ray(base, tmp_path / "layer", cluster)
    assert not (tmp_path / "layer").exists()
