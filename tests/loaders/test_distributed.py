"""Which data-parallel rank a process is: environment, meshes, Megatron; and the check that all ranks mean the same."""

from __future__ import annotations

import json
import sys
import types

import numpy as np
import pytest
import torch

from fuelrail import World
from fuelrail.loaders.distributed import (
    batch_digest,
    detect_world,
    resolve_world,
)
from fuelrail.pipeline.errors import WorldError
from support.ranks import TESTS, run_ranks


@pytest.fixture(scope="module")
def ranks(build_once, tmp_path_factory):
    """What four real processes found; see support/mesh_ranks.py."""
    root = tmp_path_factory.mktemp("mesh")
    run_ranks(
        4,
        TESTS / "support" / "mesh_ranks.py",
        build_once({"train": (9, 15)})[0],
        root,
    )
    return [json.loads((root / f"{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.process
class TestFourProcesses:
    @pytest.mark.parametrize(
        ("mesh", "expected"),
        [
            ("dp", [0, 1, 2, 3]),
            ("dp_tp", [0, 0, 1, 1]),
            ("pp_dp", [0, 1, 0, 1]),
            ("dp_cp", [0, 0, 1, 1]),
            ("hsdp", [0, 1, 2, 3]),
            ("pp_hsdp_tp", [0, 0, 1, 1]),
            ("tp", [0, 0, 0, 0]),
        ],
    )
    def test_ranks_of_a_model_parallel_group_share_batches_and_others_do_not(
        self, ranks, mesh, expected
    ):
        size = len(set(expected))
        assert [report[mesh]["world"] for report in ranks] == [[rank, size] for rank in expected]
        keys = [tuple(report[mesh]["keys"]) for report in ranks]
        for a in range(4):
            for b in range(4):
                assert (keys[a] == keys[b]) == (expected[a] == expected[b])
        assert len({key for batch in keys for key in batch}) == 2 * size

    def test_without_a_mesh_every_process_is_a_rank_before_and_after_initialisation(self, ranks):
        for case in ("early", "detected", "unnamed"):
            assert [report[case] for report in ranks] == [[rank, 4] for rank in range(4)]

    def test_an_axis_that_could_be_either_is_refused_and_can_be_reported(self, ranks):
        assert all(
            "'ep'" in report["unclear"] and "mesh_world(mesh, data_axes" in report["unclear"]
            for report in ranks
        )
        for case in ("stated", "submesh"):
            assert [report[case] for report in ranks] == [
                [0, 2],
                [0, 2],
                [1, 2],
                [1, 2],
            ]

    @pytest.mark.parametrize(
        ("case", "said"),
        [
            ("other seed", "seed: 0 on rank 0, 1, 3, 7 on rank 2"),
            ("other world", "world size: 4 on rank 0, 1, 2, 1 on rank 3"),
            (
                "other position",
                "samples_consumed: 0 on rank 0, 2, 3, 8 on rank 1",
            ),
            ("same rank", "no process is data-parallel rank 2 of 4"),
            (
                "other batch",
                "processes 0 and 1 are both data-parallel rank 0 but got different batches",
            ),
        ],
    )
    def test_ranks_that_do_not_agree_are_reported_on_every_rank_with_both_sides(
        self, ranks, case, said
    ):
        assert all(said in report[case] for report in ranks)


class TestEnvironment:
    @pytest.fixture(autouse=True)
    def clean(self, monkeypatch):
        monkeypatch.delenv("RANK", raising=False)
        monkeypatch.delenv("WORLD_SIZE", raising=False)

    def test_alone(self):
        assert detect_world() == resolve_world(None) == World(0, 1)

    def test_the_launchers_variables(self, monkeypatch):
        monkeypatch.setenv("RANK", "3")
        monkeypatch.setenv("WORLD_SIZE", "8")
        assert detect_world() == World(3, 8)
        assert resolve_world(World(1, 2)) == World(1, 2), "what the caller says comes first"

    def test_a_pair_is_not_a_world(self):
        with pytest.raises(
            WorldError,
            match=r"world=\(0, 2\) is neither a World\(rank, size\) nor a DeviceMesh",
        ):
            resolve_world((0, 2))

    @pytest.mark.parametrize(("rank", "size"), [("x", "2"), ("2", "2"), ("0", "")])
    def test_variables_that_do_not_fit_are_shown(self, monkeypatch, rank, size):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", size)
        with pytest.raises(WorldError, match=f"RANK='{rank}' and WORLD_SIZE='{size}'"):
            detect_world()

    def test_a_megatron_state_that_is_not_initialised_says_nothing(self, monkeypatch):
        state = types.SimpleNamespace(is_initialized=lambda: False)
        monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
        assert detect_world() == World(0, 1)


class TestDigest:
    def test_every_part_counts(self):
        image = torch.arange(6, dtype=torch.uint8)
        batch = {
            "img": image.view(2, 3),
            "points": [torch.ones(2)],
            "key": ["a"],
            "step": 1,
        }
        digest = batch_digest(batch)
        assert digest == batch_digest(dict(batch))
        points = [torch.ones(2), torch.ones(0)]
        for name, value in {
            "img": image.view(3, 2),
            "points": points,
            "key": ["b"],
            "step": 2,
        }.items():
            assert batch_digest(batch | {name: value}) != digest, name

    def test_bf16_and_empty_tensors(self):
        assert batch_digest(torch.ones(3, dtype=torch.bfloat16)) != batch_digest(torch.ones(3))
        assert (
            batch_digest(torch.from_numpy(np.ones((1, 2))[:0].astype(np.int64)[:, 0])) is not None
        )
        assert batch_digest(torch.empty(0, 4)) != batch_digest(torch.empty(0, 5))
