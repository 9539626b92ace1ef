"""The test vectors of ORDER.md: the product gives them, and so does the reference in C, written from the page."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from fuelrail.pipeline.format.attributes import ClipTable
from fuelrail.pipeline.order.batching import Batching, World
from fuelrail.pipeline.order.compile import CompiledOrder, compile_table
from fuelrail.pipeline.order.lanes import LaneOrder
from fuelrail.pipeline.order.mix import MixedOrder, MixSchedule, MixStage
from fuelrail.pipeline.order.permutation import KeyedPermutation, derive_key
from fuelrail.pipeline.order.spec import ORDER_VERSION, OrderSpec, OrderStage
from fuelrail.pipeline.order.table import Table
from fuelrail.pipeline.order.weights import AttributeWeights, SystematicSampling

pytestmark = pytest.mark.process

VECTORS = Path(__file__).with_name("vectors.json")
REFERENCE = Path(__file__).parents[2] / "support" / "order.c"
FOUND = json.loads(VECTORS.read_text(encoding="utf-8")) if VECTORS.exists() else {"cases": []}
CASES = FOUND["cases"]
RESULTS = ("key_hex", "values", "samples", "valid", "prev_exists", "datasets", "positions_of_rank")


def computed(case) -> dict:
    """The results of a case, by the product."""
    match case["kind"]:
        case "key":
            return {"key_hex": f"{derive_key(case['purpose'], *case['numbers']):032x}"}
        case "permutation":
            return {
                "values": KeyedPermutation(case["n"], int(case["key"], 16))(
                    case["positions"]
                ).tolist()
            }
        case "lanes":
            clips = case["clip_lengths"]
            number, frame = (
                np.repeat(np.arange(len(clips)), clips),
                np.concatenate([np.arange(n) for n in clips]),
            )
            order = LaneOrder(
                ClipTable.build(number, frame),
                case["global_batch"],
                seed=case["seed"],
                pieces_per_clip=case["pieces_per_clip"],
            )
            entries = order.epoch(case["epoch"]).entries(case["positions"])
            prev = entries.flags["prev_exists"].tolist()
            return {
                "samples": entries.samples.tolist(),
                "valid": entries.valid.tolist(),
                "prev_exists": prev,
            }
        case "mix":
            seeds = [
                derive_key("order mix part", case["seed"], d) % 2**63
                for d in range(len(case["lengths"]))
            ]
            orders = [
                CompiledOrder(OrderSpec(seed=s), {}, [n])
                for s, n in zip(seeds, case["lengths"], strict=True)
            ]
            names = "abcd"[: len(orders)]
            stages = [
                MixStage(
                    ratios=dict(zip(names, one["ratios"], strict=True)),
                    until=one["until"],
                    ramp=one["ramp"],
                )
                for one in case["stages"] or ()
            ]
            schedule = MixSchedule(stages, names) if stages else None
            ratios = schedule.final if schedule else case["ratios"]
            mixed = MixedOrder(orders, ratios, seed=case["seed"], schedule=schedule)
            assert mixed.num_blocks == case["blocks_per_epoch"]
            entries = mixed.epoch(case["epoch"]).entries(case["positions"])
            return {"datasets": entries.parts.tolist(), "samples": entries.samples.tolist()}
        case "stages":
            columns = {}
            for d, one in enumerate(case["stages"]):
                weights = dict(
                    zip(
                        one["selected"], one["weights"] or [1.0] * len(one["selected"]), strict=True
                    )
                )
                columns[f"in{d}"] = [row in weights for row in range(case["rows"])]
                columns[f"w{d}"] = [weights.get(row, 0.0) for row in range(case["rows"])]
            stages = [
                OrderStage(
                    filter=f"in{d}",
                    until=one["until"],
                    ramp=one["ramp"],
                    weights=(AttributeWeights(attribute=f"w{d}"),) if one["weights"] else (),
                )
                for d, one in enumerate(case["stages"])
            ]
            spec = OrderSpec(
                seed=case["seed"], stages=tuple(stages), epoch_length=case["epoch_length"]
            )
            order = compile_table(spec, Table(columns, spec, None, None), [case["rows"]])
            assert [one.epoch_length for one in order.orders] == [
                one["epoch_length"] for one in case["stages"]
            ]
            return {"samples": order.epoch(case["epoch"])(case["positions"]).tolist()}
        case "batch":
            world = World(case["rank"], case["ranks"])
            batching = Batching(
                case["epoch_length"], case["global_batch"], world, False, case["start"]
            )
            step = case["step"]
            return {
                "positions_of_rank": batching.positions(step).tolist(),
                "valid": batching.valid(step).tolist(),
            }
        case kind:
            sampling = (
                SystematicSampling(case["weights"], case["epoch_length"])
                if case["weights"]
                else None
            )
            spec = OrderSpec(
                kind=kind,
                seed=case["seed"],
                window=case["window"],
                weights=(AttributeWeights(attribute="any"),) if sampling else (),
            )
            selected = np.array(case["selected"]) if case["selected"] else None
            order = CompiledOrder(spec, {}, case["shard_lengths"], selected, sampling)
            assert order.epoch_length == case["epoch_length"]
            return {"samples": order.epoch(case["epoch"])(case["positions"]).tolist()}


def line(case) -> str:
    """A case as the C program reads it."""

    def counted(values) -> str:
        return " ".join(map(repr, [len(values), *values]))

    match case["kind"]:
        case "key":
            return f"key {counted(case['numbers'])} {case['purpose']}"
        case "permutation":
            return f"permutation {case['n']} {case['key']} {counted(case['positions'])}"
        case "lanes":
            head = f"lanes {case['seed']} {case['epoch']} {case['global_batch']} {case['pieces_per_clip']}"
            return f"{head} {counted(case['clip_lengths'])} {counted(case['positions'])}"
        case "mix":
            stages = case["stages"] or [{"ratios": case["ratios"], "until": None, "ramp": False}]
            numbers = [
                case["seed"],
                case["epoch"],
                case["blocks_per_epoch"],
                len(case["lengths"]),
                len(stages),
            ]
            for stage in stages:
                numbers += [*stage["ratios"], stage["until"] or 0, int(stage["ramp"])]
            return f"mix {' '.join(map(str, [*numbers, *case['lengths']]))} {counted(case['positions'])}"
        case "stages":
            text = f"stages {case['seed']} {case['epoch']} {case['epoch_length']} {len(case['stages'])}"
            for one in case["stages"]:
                head = f"{one['until'] or 0} {int(one['ramp'])} {counted(one['selected'])}"
                text += f" {head} {counted(one['weights'] or [])} {one['epoch_length']}"
            return f"{text} {counted(case['positions'])}"
        case "batch":
            names = ("epoch_length", "global_batch", "ranks", "rank", "step", "start")
            return f"batch {' '.join(str(case[name]) for name in names)}"
        case kind:
            lists = " ".join(
                counted(case[name] or []) for name in ("shard_lengths", "selected", "weights")
            )
            head = f"order {kind} {case['seed']} {case['epoch']} {case['window'] or 0} {lists} {case['epoch_length']}"
            return f"{head} {counted(case['positions'])}"


def test_the_vectors_are_of_this_version_and_of_every_kind() -> None:
    assert FOUND["order_version"] == ORDER_VERSION
    kinds = {case["kind"] for case in CASES}
    assert kinds == {
        "key",
        "permutation",
        "shuffled",
        "sequential",
        "windowed",
        "lanes",
        "mix",
        "stages",
        "batch",
    }
    assert len(CASES) >= 30


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["kind"])
def test_the_product_gives_the_vectors(case) -> None:
    assert computed(case) == {name: case[name] for name in RESULTS if name in case}


def test_the_reference_in_c_gives_the_vectors(tmp_path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc) is installed")
    program = tmp_path / "order"
    subprocess.run(
        [compiler, "-std=c11", "-O1", "-Wall", "-Werror", "-o", program, REFERENCE, "-lm"],
        check=True,
    )
    text = "".join(f"{line(case)}\n" for case in CASES)
    out = subprocess.run([program], input=text, capture_output=True, text=True, check=True).stdout
    for case, words in zip(CASES, out.splitlines(), strict=True):
        results = {name: case[name] for name in RESULTS if name in case}
        if case["kind"] == "key":
            assert words == case["key_hex"]
            continue
        order = [
            name
            for name in (
                "datasets",
                "positions_of_rank",
                "values",
                "samples",
                "valid",
                "prev_exists",
            )
            if name in results
        ]
        rows = zip(*(results[name] for name in order), strict=True)
        assert list(map(int, words.split())) == [int(value) for row in rows for value in row], case
