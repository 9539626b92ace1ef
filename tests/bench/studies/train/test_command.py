from __future__ import annotations

import json
import shutil
import signal

import msgspec
import numpy as np
import pytest

from fuelrail.__main__ import main
from fuelrail.bench.measure.records import (
    RankFailure,
    RankLog,
    rank_path,
    read_rank,
)
from fuelrail.bench.ranks.launch import Outcome, RankExit
from fuelrail.bench.studies.runs.history import run_history
from fuelrail.bench.studies.train import settings as train_settings
from fuelrail.bench.studies.train.report import load_report
from fuelrail.bench.studies.train.run import why_cut_off
from fuelrail.bench.studies.train.settings import TrainOptions, ask
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.order.spec import OrderSpec
from support.bench_runs import log, steps
from support.packed_ranks import PACK, TOKENS, words

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("warm_ranks")]


def bench(dataset, out, *options):
    fast = ("--accelerator", "emulated:resnet50-224-h100")
    return main(
        [
            "bench",
            "train",
            str(dataset),
            "--out",
            str(out),
            *fast,
            *map(str, options),
        ]
    )


def test_two_ranks_train_on_the_whole_epoch_and_are_reported(dataset, tmp_path, capsys):
    out = tmp_path / "out"
    options = (
        "--ranks",
        2,
        "--batch-size",
        1,
        "--steps",
        14,
        "--warmup",
        3,
        "--workers",
        1,
        "--price-per-gpu-hour",
        2,
    )
    assert bench(dataset, out, *options) == 0
    report = load_report(out / "report.json")
    assert report.cut_off is None
    assert not report.ranks_disagree
    assert (report.num_ranks, report.window.num_measured_steps) == (2, 11)
    assert [rank.backend for rank in report.ranks] == ["gloo", "gloo"]
    figures = report.figures
    assert 0 < figures.occupancy.mean <= 1
    assert sum(phase.share for phase in figures.phases) == pytest.approx(1, abs=1e-6)
    assert {stage.name for stage in figures.stages} == {
        "fetch",
        "parse",
        "decode",
        "collate",
    }
    for rank in range(2):
        records = read_rank(rank_path(out / "records", rank)).steps
        # One sample of two cameras; the profile counts images.
        assert {record.device_busy_ns for record in records} == {
            round((2 * (0.1866 + 0.3731) + 0.15) * 1e6)
        }
        assert [record.epoch for record in records] == [0] * 12 + [1] * 2
    printed = capsys.readouterr().out
    for word in (
        "occupancy",
        "data wait",
        "all-reduce",
        "samples/s",
        "GPU-hours per million samples",
        "report.html",
    ):
        assert word in printed
    assert "emulated" in (out / "report.html").read_text()


def test_packs_are_reported_with_their_padding_and_imbalance(tiny_dataset, tmp_path, capsys):
    root = tiny_dataset({"train": (16, 15)}, extra=[(TOKENS, words)]).root
    out = tmp_path / "out"
    order = tmp_path / "o.yaml"
    order.write_bytes(msgspec.yaml.encode(OrderSpec(seed=3, pack=PACK)))
    run = (
        "--model",
        "gpt-tiny",
        "--ranks",
        2,
        "--batch-size",
        2,
        "--steps",
        14,
        "--warmup",
        3,
        "--order",
        order,
    )
    assert bench(root, out, *run, "--cost", "timestamp_ns") == 0
    figures = load_report(out / "report.json").figures
    assert figures.losses.keys() == {"padding", "imbalance"}
    assert figures.cost_fit.num_measured == 22 and "22 steps" in capsys.readouterr().out
    measured = []
    for rank in range(2):
        for record in read_rank(rank_path(out / "records", rank)).steps:
            count, times, _ = record.sums["timestamp_ns"]
            predictions = times / 500_000_000 + count  # row r has r + 2 tokens
            assert record.padding == pytest.approx(1 - predictions / (2 * 32))
            measured.append(record.padding)
    assert 0 < figures.losses["padding"].size < max(measured)


def test_a_run_continues_from_its_checkpoint_on_other_ranks_with_the_same_losses(
    dataset, tmp_path, capsys
):
    place = tmp_path / "checkpoints"
    common = ("--model", "light", "--workers", 1, "--warmup", 3, "--no-html")
    whole_run = tmp_path / "whole"
    assert (
        bench(
            dataset,
            whole_run,
            "--ranks",
            1,
            "--batch-size",
            4,
            "--steps",
            20,
            *common,
        )
        == 0
    )
    ledger = tmp_path / "a.ledger"
    checkpoints = (
        "--checkpoint",
        place,
        "--every",
        4,
        "--keep",
        2,
        "--ledger",
        ledger,
    )
    assert (
        bench(
            dataset,
            tmp_path / "a",
            "--ranks",
            2,
            "--batch-size",
            2,
            "--steps",
            9,
            *common,
            *checkpoints,
        )
        == 0
    )
    assert sorted(path.name[:13] for path in place.iterdir()) == [
        "step-00000008",
        "step-00000009",
    ]
    capsys.readouterr()
    arguments = (
        "--ranks",
        1,
        "--batch-size",
        4,
        "--steps",
        20,
        *common,
        *checkpoints,
    )
    assert bench(dataset, tmp_path / "b", *arguments) == 0
    printed = capsys.readouterr().out
    assert "continued after step 9 from checkpoint step-00000009" in printed
    parts = run_history(ledger).stretches
    assert [
        (stretch.first_step, stretch.num_steps, stretch.ranks, stretch.skipped) for stretch in parts
    ] == [
        (0, 9, 2, False),
        (9, 11, 1, False),
    ]
    report = load_report(tmp_path / "b" / "report.json")
    assert report.checkpoints.restored.world_size == 2
    assert [series.first_step for series in report.series] == [9]
    undisturbed = load_report(whole_run / "report.json")
    assert report.series[0].loss == pytest.approx(undisturbed.series[0].loss[9:], abs=2e-6)
    for options, said in (
        (arguments, "20 of 20"),
        ((*common, *checkpoints, "--epochs", 3), "epoch 3 of 3"),
    ):
        assert bench(dataset, tmp_path / "c", *options) == 2
        assert said in capsys.readouterr().err


def test_a_pipeline_without_a_model_gets_one_of_enough_layers(dataset, tmp_path):
    options = TrainOptions(
        ranks=2,
        batch_size=2,
        strategy="pipeline",
        accelerator="emulated:resnet50-224-h100",
    )
    assert ask(dataset, options, tmp_path).settings.model == "bev-tiny"
    out = (
        "--ranks",
        2,
        "--strategy",
        "pipeline",
        "--steps",
        4,
        "--warmup",
        1,
        "--workers",
        1,
        "--no-html",
    )
    assert bench(dataset, tmp_path / "out", *out) == 0


def test_a_damaged_sample_ends_the_run_with_its_address_and_a_partial_report(
    dataset, tmp_path, capsys
):
    damaged = tmp_path / "damaged"
    shutil.copytree(dataset, damaged)
    row = _row_of_step(damaged, 9)
    with (damaged / f"train-{row.shard:06d}.tar").open("r+b") as shard:
        shard.seek(row.offset + row.length // 2)
        byte = shard.read(1)
        shard.seek(-1, 1)
        shard.write(bytes([byte[0] ^ 0xFF]))
    out = tmp_path / "out"
    code = bench(
        damaged,
        out,
        "--ranks",
        1,
        "--batch-size",
        1,
        "--steps",
        20,
        "--warmup",
        1,
        "--json",
        "--no-html",
    )
    assert code == 1
    captured = capsys.readouterr()
    reason = json.loads(captured.out)["cut_off"]
    assert row.key in reason
    # After a line of progress a minute, on a busy machine.
    assert captured.err.splitlines()[-1] == f"fuelrail: error: the report is partial: {reason}"
    report = load_report(out / "report.json")
    assert report.cut_off == reason
    assert report.ranks[0].num_steps == 9
    assert not (out / "report.html").exists()


def _row_of_step(folder, step):
    """The index row that one rank with batches of one gets in a step of the first epoch, seed 0."""
    from fuelrail.pipeline.order.spec import OrderSpec, position_map

    dataset = open_dataset(folder)
    order = position_map(
        OrderSpec(kind="shuffled", seed=0),
        [dataset.split("train").num_samples],
        0,
    )
    return dataset.index.row(dataset.split("train").first_sample + int(order(np.array([step]))[0]))


def test_cuda_without_a_gpu_is_refused(dataset, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train_settings, "installed_gpus", list)
    assert bench(dataset, tmp_path / "out", "--accelerator", "cuda") == 2
    assert "shows no GPU" in capsys.readouterr().err


def failed(kind, message, at_ns=0):
    return RankLog(
        steps=steps(3),
        failure=RankFailure(kind=kind, message=message, at_ns=at_ns),
    )


KILLED = RankExit(rank=1, exit_code=-signal.SIGKILL)
ENDED = RankExit(rank=0, exit_code=-signal.SIGTERM)
CRASHED = RankExit(rank=0, exit_code=1)


@pytest.mark.parametrize(
    ("outcome", "logs", "said"),
    [
        (Outcome(0, interrupted=False, failed=[]), [log(steps(3))], None),
        (
            Outcome(143, interrupted=True, failed=[]),
            [log(steps(3))],
            "interrupted",
        ),
        # Rank 0 crashes in its all-reduce because rank 1 was killed: rank 1 is the cause.
        (
            Outcome(1, interrupted=False, failed=[CRASHED, KILLED]),
            [
                failed("crashed", "RuntimeError: peer closed"),
                RankLog(steps=steps(5)),
            ],
            "rank 1 was ended by SIGKILL after 5 steps; the system may be out of memory",
        ),
        # Rank 1 refuses a sample; rank 0 may notice first.
        (
            Outcome(1, interrupted=False, failed=[CRASHED, ENDED]),
            [
                failed("crashed", "RuntimeError: peer closed", 1),
                failed("refused", "shard is bad", 2),
            ],
            "rank 1: shard is bad",
        ),
        # Of two crashes the first is the cause.
        (
            Outcome(1, interrupted=False, failed=[CRASHED]),
            [
                failed("crashed", "RuntimeError: peer closed", 2),
                failed("crashed", "ZeroDivisionError: x", 1),
            ],
            "rank 1: ZeroDivisionError: x (the ranks' output is in records/ranks.log",
        ),
        (
            Outcome(1, interrupted=False, failed=[]),
            [log(steps(3)), RankLog()],
            "rank 1 ended early",
        ),
    ],
    ids=["complete", "interrupted", "killed", "refused", "crashed", "unknown"],
)
def test_the_first_cause_is_reported(outcome, logs, said):
    sentence = why_cut_off(outcome, logs)
    assert (sentence is None) if said is None else (said in sentence)
