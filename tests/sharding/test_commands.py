"""The commands as a user types them: what they print, and one clear sentence for each thing that can be wrong."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from fuelrail.__main__ import main
from fuelrail.pipeline.format.manifest import WORK_FOLDER
from support.sharding import digests, environment, flip, shard_command
from support.shared_data import shared_data

TWO = ("CAM_FRONT", "CAM_BACK")


@pytest.fixture(scope="module")
def source(dataroot):
    return dataroot("a3 b3", cameras=TWO)


@pytest.fixture
def copy(source, tmp_path):
    """A dataroot to spoil."""
    return shutil.copytree(source.root, tmp_path / "source")


@pytest.fixture
def run(capfd):
    """Run a command; returns exit code, stdout, stderr."""

    def running(*arguments):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as end:  # argparse's own way out
            code = end.code
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return running


def refused(result) -> str:
    """The one sentence of a refusal."""
    code, out, err = result
    assert code == 2
    assert out == ""
    assert err.startswith("fuelrail: error: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1, err
    return err


def shard(run, root, out, *more):
    return run("shard", f"nuscenes:{root}", out, "--seed", "7", "--workers", "1", *more)


def test_shard_verify_inspect(run, source, tmp_path):
    out = tmp_path / "out"
    code, said, err = shard(
        run,
        source.root,
        out,
        "-o",
        "version=v1.0-mini",
        "--splits",
        "train=0.5,val=0.5",
    )
    assert (code, err) == (0, "")
    assert said.startswith("6 samples (train 3, val 3) of 2 clips in 2 shards, ")
    code, said, _ = run("verify", out, "--deep")
    assert code == 0
    assert "6 samples in 2 shards" in said
    assert "12 images decoded: OK, no errors found" in said
    code, said, _ = run("inspect", out)
    assert code == 0
    assert "cam_front" in said
    code, said, _ = run("inspect", out, "a-000001")
    assert code == 0
    assert "a-000001" in said
    code, said, _ = shard(run, source.root, out, "--splits", "train=0.5,val=0.5")
    assert (code, "(2 reused)" in said) == (0, True)


def test_clips_that_no_split_names_are_reported(run, copy, tmp_path):
    (copy / "v1.0-mini" / "splits.json").write_text('{"train": ["b"]}')
    code, said, _ = shard(run, copy, tmp_path / "out")
    assert code == 0
    assert (
        said.splitlines()[1]
        == "left out: 1 clip of the source that no split names; assign them with --splits"
    )
    code, said, _ = shard(run, copy, tmp_path / "asked", "--select", "clip_id == 'b'")
    assert (code, "left out" in said) == (0, False)


def test_progress_for_machines(run, source, tmp_path):
    code, said, _ = shard(run, source.root, tmp_path / "out", "--json")
    events = [json.loads(line) for line in said.splitlines()]
    events = [
        event for event in events if event["event"] != "progress"
    ]  # one a second, of which a run may take many
    assert code == 0
    assert [event["event"] for event in events] == [
        "scanned",
        "planned",
        "shard",
        "finished",
    ]
    report = json.loads((tmp_path / "out" / "dataset.json").read_text())["provenance"]["scan"]
    assert events[0] == {
        "event": "scanned",
        "clips": 2,
        "samples": 6,
        "report": report,
    }
    assert events[2]["name"] == "train-000000.tar"
    assert events[3]["bytes"] == (tmp_path / "out" / "train-000000.tar").stat().st_size
    assert (
        events[3]["fingerprint"]
        == json.loads((tmp_path / "out" / "dataset.json").read_text())["fingerprint"]
    )


@pytest.mark.process
def test_a_terminal_gets_a_bar(source, tmp_path, monkeypatch):
    import pty

    main_end, child_end = pty.openpty()
    command = shard_command(f"nuscenes:{source.root}", tmp_path / "out", "--workers", "1")
    variables = {**environment(), "TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen(command, stderr=child_end, stdout=subprocess.PIPE, env=variables)
    os.close(child_end)
    output = b""
    with contextlib.suppress(OSError):  # the end of a pseudo terminal is an error
        while piece := os.read(main_end, 4096):
            output += piece
    os.close(main_end)
    said = process.communicate()[0]
    assert process.returncode == 0
    assert b"scanned 6 samples in 2 clips, 2 cameras, 1 lidar" in output
    assert b"0/1 shards, making train-000000" in output
    assert said.startswith(b"6 samples")


def test_ctrl_c_says_how_to_continue(run, source, tmp_path, monkeypatch):
    from fuelrail.sharding.write.shard_writer import ShardWriter

    def interrupted(self, number, pulse, *, digest_apart):
        raise KeyboardInterrupt

    monkeypatch.setattr(ShardWriter, "make", interrupted)
    code, _, err = shard(run, source.root, tmp_path / "out")
    assert code == 130
    assert "run the same command to resume" in err


def test_unknown_options(run, source, tmp_path):
    out = tmp_path / "out"
    for words, says in (
        (["--colour", "red"], "unrecognized arguments: --colour red"),
        (["--layout", "zip"], "'zip'"),
        (["--seed", "x"], "--seed must be a whole number; got 'x'"),
    ):
        code, _, err = shard(run, source.root, out, *words)
        assert code == 2
        assert says in err
    for words, says in (
        (["--order", "random"], "known: frame, clip, window:N"),
        (
            ["--zstd-level", "99"],
            "--zstd-level 99: must be a whole number from 1 to 19",
        ),
        (["--shard-size", "1"], "--shard-size '1': a size must be 1024"),
        (["--splits", ""], "--splits '': it is empty"),
        (["--workers", "-1"], "--workers -1: must be a whole number >= 0"),
    ):
        assert says in refused(shard(run, source.root, out, *words))
    assert "unknown kind 'nuplan'; known kinds: argoverse2, " in refused(
        run("shard", "nuplan:/data", out)
    )
    assert "output folder has no name" in refused(shard(run, source.root, ""))
    assert not out.exists()


@pytest.mark.real
def test_the_real_mini_tables_without_three_of_them(run, tmp_path):
    root = shared_data("nuscenes-mini")
    sentence = refused(shard(run, root, tmp_path / "out", "-o", "version=v1.0-mini"))
    assert "ego_pose.json, sample_annotation.json, sample_data.json missing" in sentence
    assert "there are: v1.0-derived, v1.0-mini" in refused(shard(run, root, tmp_path / "out"))


def test_pointers_instead_of_sensor_files(run, source, tmp_path):
    pointer = (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 17\n"
    )
    for channel in ("CAM_BACK", "LIDAR_TOP"):
        root = tmp_path / channel
        shutil.copytree(source.root, root)
        victim = next((root / "samples" / channel).iterdir())
        victim.write_bytes(pointer.ljust(140, b"\n"))  # a multiple of a point's 20 bytes
        sentence = refused(shard(run, root, tmp_path / f"{channel}-out"))
        assert victim.name in sentence
        assert "a git-LFS pointer" in sentence
        assert "git lfs pull" in sentence


def test_a_truncated_and_a_missing_camera_file(run, copy, tmp_path):
    victim = next((copy / "samples" / "CAM_BACK").iterdir())
    out = tmp_path / "out"
    victim.write_bytes(victim.read_bytes()[:-100])
    sentence = refused(shard(run, copy, out))
    assert f"samples/CAM_BACK/{victim.name}" in sentence
    assert "truncated JPEG" in sentence
    assert sentence.endswith(
        "; finished shards are kept: fix the source and run the same command again to resume\n"
    )
    assert [path.name for path in out.iterdir()] == [WORK_FOLDER]
    shutil.rmtree(out)
    victim.unlink()
    assert victim.name in refused(shard(run, copy, out))
    assert not out.exists()
    code, _, _ = shard(run, copy, out, "-o", "missing_camera=mask")
    assert code == 0
    assert run("verify", out, "--deep")[0] == 0


def test_an_output_that_holds_something_else(run, source, dataroot, tmp_path):
    out = tmp_path / "out"
    assert shard(run, source.root, out)[0] == 0
    before = digests(out)
    sentence = refused(run("shard", f"nuscenes:{source.root}", out, "--seed", "8"))
    assert "holds another dataset: seed: 7 there, 8 here" in sentence
    assert "the source's content" in refused(shard(run, dataroot("z2").root, out))
    # A wrong source is named before options are compared.
    sentence = refused(run("shard", f"nuscenes:{source.root}-", out))
    assert "is not there" in sentence and "options" not in sentence
    sentence = refused(run("shard", f"imagefolder:{source.root}", out))
    assert "of a source of kind nuscenes, not imagefolder" in sentence and "options" not in sentence
    assert digests(out) == before
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("")
    assert "thesis.tex" in refused(shard(run, source.root, tmp_path / "home"))


@contextlib.contextmanager
def without_privileges():
    """Run as a user whom permissions bind: root is not."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_an_output_that_is_read_only(run, source):
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        shutil.copytree(source.root, root / "source")
        (root / "locked").mkdir()
        (root / "locked").chmod(0o555)
        for folder in (root, root / "source"):
            folder.chmod(0o755)
        shard(
            run, root / "source", root / "first"
        )  # imports what it needs, with the rights to read it
        with without_privileges():
            results = [
                shard(run, root / "source", root / "locked" / name) for name in ("", "out", "a/b")
            ]
        for result in results:
            assert "cannot be written: Permission denied" in refused(result)
        assert list((root / "locked").iterdir()) == []


def test_a_source_file_that_may_not_be_read(run, source):
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        shutil.copytree(source.root, root / "source")
        (root / "open").mkdir()
        for folder in (
            root,
            root / "source",
            *(path for path in root.rglob("*") if path.is_dir()),
        ):
            folder.chmod(0o777)
        shard(
            run, root / "source", root / "first"
        )  # imports what it needs, with the rights to read it
        victim = sorted((root / "source" / "samples" / "CAM_BACK").iterdir())[2]
        victim.chmod(0)
        with without_privileges():
            text = refused(shard(run, root / "source", root / "open" / "out"))
        assert f"file '{victim}' cannot be read: Permission denied" in text
        victim.parent.chmod(0o600)
        with without_privileges():
            code, out, err = shard(run, root / "source", root / "open" / "out2")
        assert (code, out) == (2, "")
        first, *faults = err.splitlines()  # the first image of each of two scenes
        assert first == "fuelrail: error: the source has 2 faults:"
        assert all(
            "CAM_BACK" in fault and fault.endswith("cannot be read: Permission denied")
            for fault in faults
        )


def test_a_file_that_may_not_grow(run, dataroot, tmp_path):
    # What a full disk does, short of one: the system refuses to write on in the middle of a shard.
    source = dataroot("a6", cameras=TWO, size=(320, 240))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        result = shard(run, source.root, tmp_path / "out", "--name", "x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (
        "cannot be written: File too large; finished shards are kept; run the same command again"
        in refused(result)
    )
    assert [path.name for path in (tmp_path / "out").iterdir()] == [WORK_FOLDER]
    assert shard(run, source.root, tmp_path / "out", "--name", "x")[0] == 0
    assert run("verify", tmp_path / "out")[0] == 0


def test_what_is_not_a_dataset(run, tmp_path):
    for word in ("verify", "inspect"):
        assert "has no dataset.json" in refused(run(word, tmp_path))
        assert "is not a folder" in refused(run(word, tmp_path / "nowhere"))


def test_verify_ends_with_1_where_something_is_wrong(run, source, tmp_path):
    out = tmp_path / "out"
    shard(run, source.root, out)
    flip(out / "train-000000.tar", 700)
    code, said, _ = run("verify", out)
    assert code == 1
    assert "train-000000.tar, offset 0, sample" in said
    assert said.splitlines()[-1].endswith("2 faults")
    code, said, _ = run("verify", out, "--json")
    assert code == 1
    assert json.loads(said)["faults"][1]["offset"] == 0


def test_verify_repairs_from_the_source(run, source, dataroot, tmp_path):
    out = tmp_path / "out"
    shard(run, source.root, out, "--shard-size", "20kB", "--order", "clip")
    before = digests(out)
    (out / "train-000000.tar").write_bytes(b"gone")
    (out / "train-000001.idx").unlink()
    code, _, err = run("verify", out, "--repair", f"nuscenes:{dataroot('a3 b3', seed=5).root}")
    assert code == 2
    assert "the source's content" in err
    code, said, err = run("verify", out, "--repair", f"nuscenes:{source.root}")
    assert "train-000000.tar: has 4 bytes" in err
    assert (code, said.splitlines()[-1].endswith("OK, no errors found")) == (
        0,
        True,
    )
    assert digests(out) == before


@pytest.mark.costly
def test_a_folder_in_the_place_of_a_file_is_named(run, source, tmp_path):
    out = tmp_path / "out"
    shard(run, source.root, out)
    for name in ("train-000000.tar", "index.arrow"):
        (out / name).rename(tmp_path / name)
        (out / name).mkdir()
        code, said, _ = run("verify", out)
        assert (
            code,
            f"{name}: cannot be read: it is a folder, not a file\n" in said,
        ) == (1, True)
        for code, _, err in (
            run("verify", out, "--repair", f"nuscenes:{source.root}"),
            shard(run, source.root, out),
        ):
            assert code == 2
            assert err.endswith(
                f"output folder '{out}' cannot be written: '{name}': it is a folder, not a file\n"
            )
        (out / name).rmdir()
        (tmp_path / name).rename(out / name)


def test_the_working_folder_of_a_run_that_was_killed_at_its_end(run, source, tmp_path):
    out = tmp_path / "out"
    shard(run, source.root, out)
    (out / WORK_FOLDER / "records").mkdir(parents=True)
    assert run("verify", out)[0] == 0
    assert shard(run, source.root, out)[0] == 0
    assert not (out / WORK_FOLDER).exists()
