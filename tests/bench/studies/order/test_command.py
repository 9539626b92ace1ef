"""`fuelrail order describe`, from the command line."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fuelrail.__main__ import main
from fuelrail.bench.studies.order.packs import (
    intraclass_correlation,
    padding_of,
)
from support.sized_datasets import write_synthetic_index


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    root = tmp_path_factory.mktemp("order") / "OUT"
    lengths = [40] * 60
    night = (np.arange(2400) // 40 % 5 == 0).tolist()
    write_synthetic_index(root, lengths, samples_per_shard=100, attributes={"night": night})
    return root


def described(capsys, *arguments):
    assert main(["order", "describe", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_shuffled_is_as_good_as_true_and_better_than_a_buffer(dataset, capsys):
    facts = described(capsys, dataset, "--seed", 3, "--epoch", 2, "--buffer", 200)
    ours, theirs, true = facts["figures"]
    assert [order["name"] for order in facts["figures"]] == [
        "fuelrail shuffled",
        "webdataset 200",
        "true shuffle",
    ]
    assert facts["epoch_length"] == facts["num_selected"] == 2400
    assert facts["num_steps"] == 37
    for name in ("rank_correlation_z", "serial_correlation_z"):
        assert abs(ours["quality"][name]) < 4
        assert abs(true["quality"][name]) < 4
    assert theirs["quality"]["serial_correlation_z"] > 6
    assert theirs["same_clip_pairs"] > 2 * ours["same_clip_pairs"]


def test_packs_and_ranks_are_described(dataset, tmp_path, capsys):
    config = tmp_path / "order.yaml"
    cost = "{linear: {frame: 1}, constant: 1}"
    config.write_text(
        f"pack: {{budget: 200, cost: {cost}, window: 300}}\nbalance: {{cost: {cost}}}\n"
    )
    facts = described(capsys, dataset, "--config", config, "--global-batch", 8, "--ranks", 4)
    costs = facts["costs"]
    assert costs["fill"] == pytest.approx(60 * sum(range(1, 41)) / 200 / facts["epoch_length"])
    assert costs["fill"] + costs["waste"] == pytest.approx(1)
    assert costs["samples_per_pack"] == pytest.approx(2400 / facts["epoch_length"])
    assert 0.95 < costs["fill"] <= 1 <= costs["dearest_rank"] < 1.02
    assert costs["randomness_lost"] < 0.02
    config.write_text(f"balance: {{cost: {cost}}}\n")
    costs = described(capsys, dataset, "--config", config, "--global-batch", 64, "--ranks", 4)[
        "costs"
    ]
    assert (costs["fill"], costs["ranks"]) == (None, 4)
    assert 1 <= costs["dearest_rank"] < 1.01
    assert described(capsys, dataset)["costs"] is None
    assert main(["order", "describe", str(dataset), "--config", str(config)]) == 0
    assert "of the mean" in capsys.readouterr().out


def test_buckets_are_described(dataset, tmp_path, capsys):
    config = tmp_path / "order.yaml"
    config.write_text(
        "bucket: {by: frame, bounds: [9, 19, 29, 39], window: 500}\nbalance: {cost: frame}\n"
    )
    arguments = (
        dataset,
        "--config",
        config,
        "--global-batch",
        16,
        "--ranks",
        4,
    )
    costs = described(capsys, *arguments)["costs"]
    assert (costs["num_buckets"], costs["fill"]) == (4, None)
    assert (
        0.4 < costs["padding_before"] < 0.5
    )  # of frames 0 .. 39, of which one of 16 is nearly always high
    assert 0.15 < costs["padding"] < 0.25  # of ten frames in a bucket, by the sizes of the buckets
    assert 0.9 < costs["randomness_lost"] < 1
    assert 1 < costs["dearest_rank"] < 1.05
    assert main(["order", "describe", *map(str, arguments)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert (
        f"4 buckets: padding {costs['padding_before']:.2%} without, {costs['padding']:.2%} with them"
        in text
    )
    config.write_text("bucket: {by: night}\n")
    costs = described(capsys, *arguments)["costs"]
    assert (costs["num_buckets"], costs["padding"]) == (2, None)


def test_padding_is_that_of_its_definition():
    costs = np.array([3, 1, 4, 4, 5, 5, 2])
    valid = np.array([True] * 5 + [False, True])
    assert padding_of(costs, valid, 3) == pytest.approx(1 - (8 + 9 + 2) / (12 + 15 + 2))


def test_the_intraclass_correlation_is_that_of_its_definition():
    groups = np.repeat(np.arange(50), 4)
    values = np.random.default_rng(0).normal(size=200)
    assert abs(intraclass_correlation(values, groups)) < 0.15
    assert intraclass_correlation(groups, groups) == pytest.approx(1)
    assert intraclass_correlation(np.tile([1, 2, 3, 4], 50), groups) == pytest.approx(-1 / 3)
    assert intraclass_correlation(np.ones(200), groups) == 0


def test_filters_lanes_and_config_files_are_described(dataset, tmp_path, capsys):
    assert described(capsys, dataset, "--filter", "night and frame < 10")["num_selected"] == 120
    lanes = described(
        capsys,
        dataset,
        "--kind",
        "lanes",
        "--pieces-per-clip",
        2,
        "--global-batch",
        7,
    )
    assert lanes["num_steps"] * 7 == lanes["epoch_length"] == 2400 + lanes["num_padding"]
    config = tmp_path / "order.yaml"
    config.write_text(
        "kind: windowed\nwindow: 4\nfilter: frame >= 20\nepoch_length: 500\n"
        "weights: [{by: attribute, attribute: night, values: {'true': 4}}]\n"
    )
    weighted = described(capsys, dataset, "--config", config)
    assert (weighted["num_selected"], weighted["epoch_length"]) == (1200, 500)
    config.write_text(
        "stages:\n  - {filter: not night, until: 3000, ramp: true}\n  - {filter: frame < 10}\nepoch_length: 2400\n"
    )
    staged = described(capsys, dataset, "--config", config, "--epoch", 1)
    assert (staged["num_selected"], staged["epoch_length"]) == (
        48 * 40 + 12 * 10,
        2400,
    )
    assert [stage["order"]["filter"] for stage in staged["identity"]["stages"]] == [
        "not night",
        "frame < 10",
    ]


@pytest.mark.costly
def test_the_table(dataset, capsys):
    assert (
        main(
            [
                "order",
                "describe",
                str(dataset),
                "--kind",
                "windowed",
                "--window",
                "5",
            ]
        )
        == 0
    )
    text = capsys.readouterr().out
    assert "2,400 samples selected" in text
    assert "same-clip pairs in a batch" in text


def test_where_there_is_no_whole_batch_a_dash_stands(dataset, capsys):
    assert (
        main(
            [
                "order",
                "describe",
                str(dataset),
                "--filter",
                "frame < 1",
                "--global-batch",
                "64",
            ]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert "nan" not in printed
    (pairs,) = (
        line.split()
        for line in printed.splitlines()
        if line.startswith("same-clip pairs in a batch")
    )
    assert pairs[-3:] == ["-", "-", "-"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kind", "windowed"], "needs window >= 1"),
        (["--filter", "nigth"], "did you mean night?"),
        (["--filter", "frame > 99"], "selects no sample"),
        (
            ["--kind", "lanes", "--global-batch", "61"],
            "60 pieces of clips for 61 lanes",
        ),
        (["--split", "val"], "no split 'val'; it has: train"),
        (
            ["--subset", "no-such-file"],
            "keys file 'no-such-file' cannot be read",
        ),
        (
            ["--buffer", "0"],
            "--buffer 0: must be a whole number from 1 to 1000000000",
        ),
        (["--config", "no-such.yaml"], "no-such.yaml"),
        (
            [
                "--config",
                "configs/orders/object-store-windows.yaml",
                "--seed",
                "3",
            ],
            "config is a whole order",
        ),
    ],
)
def test_mistakes_end_in_one_sentence(dataset, capsys, arguments, message):
    assert main(["order", "describe", str(dataset), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("fuelrail: error: ")
    assert message in error
    assert error.count("\n") == 1


def test_a_verdict_comes_before_the_figures(dataset, capsys):
    for kind, said in (
        ("shuffled", "As random as a true shuffle: the largest |z| is"),
        ("sequential", "Less random"),
    ):
        assert main(["order", "describe", str(dataset), "--kind", kind]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[1].startswith(said) or lines[2].startswith(said), lines[:4]
