"""What the commands of the harness refuse before they measure anything: one sentence, exit 2, and no folder is made."""

from __future__ import annotations

import pytest

from fuelrail.__main__ import main

REFUSED = {
    "train": [
        (("--ranks", 0), "--ranks 0: must be a whole number >= 1"),
        (("--batch-size", -1), "--batch-size -1: must be a whole number >= 1"),
        (("--warmup", -1), "--warmup -1: must be a whole number >= 0"),
        (
            ("--learning-rate", "nan"),
            "--learning-rate nan: must be a number from 0",
        ),
        (
            ("--price-per-gpu-hour", "inf"),
            "--price-per-gpu-hour inf: must be a number from 0 to 1000000000",
        ),
        (
            ("--steps", 9, "--epochs", 1),
            "steps=9 and epochs=1 exclude each other",
        ),
        (
            ("--ranks", 5, "--batch-size", 5),
            "has 24 samples, one step takes 25",
        ),
        (("--split", "test"), "no split 'test'"),
        (
            ("--accelerator", "tpu"),
            "must be auto, cuda, cpu or emulated:PROFILE",
        ),
        (
            ("--accelerator", "emulated:"),
            "must be auto, cuda, cpu or emulated:PROFILE",
        ),
        (("--accelerator", "emulated:z80"), "known profiles"),
        (
            ("--checkpoint", "checkpoints", "--leave-out", "loading"),
            "exclude each other",
        ),
        (
            ("--ledger", "a.ledger", "--leave-out", "loading"),
            "not a run to record",
        ),
        (("--checkpoint", "zip+tar://x"), "cannot be opened"),
        (("--checkpoint", "memory://x"), "would end with each rank's process"),
    ],
    "scale": [
        (("--ranks", 2, 4), "begin with 1"),
        (("--ranks", 1, 3, 4), "use powers of two"),
        (("--steps", 0), "--steps 0: must be a whole number >= 1"),
        (("--batch-size", 99), "has 24 samples"),
        (("--accelerator", "emulated:nope"), "nope"),
    ],
    "loader": [
        (("--batch-size", 0), "--batch-size 0: must be a whole number >= 1"),
        (("--workers", 0), "--workers 0: must be a whole number >= 1"),
        (("--repeats", 0), "--repeats 0: must be a whole number >= 1"),
        (("--seconds", 0), "--seconds 0.0: must be a number > 0"),
        (("--split", "test"), "no split 'test'"),
        (("--batch-size", 99), "has 24 samples, fewer than a batch of 99"),
        (("--decoder", "quartz"), "quartz"),
    ],
    "compare": [
        (("--only", "nope"), "'nope' is neither a loader"),
        (("--only", "wds:nope"), "'wds:nope' is neither a loader"),
        (("--rounds", -1), "--rounds -1: must be a whole number >= 0"),
        (("--seconds", 0), "--seconds 0.0: must be a number > 0"),
        (("--batch-size", 0), "--batch-size 0: must be a whole number >= 1"),
        (("--batch-size", 99), "too few to warm up"),
        (("--cpus", "x"), "must be a list such as"),
        (("--cpus", 4096), "this process may use"),
    ],
    "diagnose": [
        (
            ("--steps", 12, "--warmup", 5),
            "12 steps - 5 warm-up = 7 measured; at least 8",
        )
    ],
}


@pytest.mark.parametrize(
    ("word", "options", "said"),
    [(word, *row) for word, rows in REFUSED.items() for row in rows],
    ids=str,
)
def test_what_cannot_be_measured_is_refused_in_one_sentence(
    word, options, said, dataset, tmp_path, capsys
):
    out = tmp_path / "out"
    assert main(["bench", word, str(dataset), "--out", str(out), *map(str, options)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not out.exists()


@pytest.mark.parametrize("word", [*REFUSED])
def test_no_dataset(word, tmp_path, capsys):
    assert (
        main(
            [
                "bench",
                word,
                str(tmp_path / "nothing-here"),
                "--out",
                str(tmp_path / "out"),
            ]
        )
        == 2
    )
    error = capsys.readouterr().err
    assert "nothing-here" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out" / "report.json").exists()


@pytest.mark.parametrize("word", ["train", "loader"])
def test_an_output_folder_that_cannot_be_written_is_refused_before_anything_runs(
    word, dataset, tmp_path, capsys
):
    (tmp_path / "file").write_text("")
    assert (
        main(
            [
                "bench",
                word,
                str(dataset),
                "--out",
                str(tmp_path / "file" / "out"),
            ]
        )
        == 2
    )
    assert "cannot be written" in capsys.readouterr().err


def test_a_rank_of_torchrun_refuses_another_number_of_ranks(dataset, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("RANK", "3")
    assert (
        main(
            [
                "bench",
                "train",
                str(dataset),
                "--ranks",
                "2",
                "--out",
                str(tmp_path / "out"),
            ]
        )
        == 2
    )
    assert "one of WORLD_SIZE=16 processes" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
