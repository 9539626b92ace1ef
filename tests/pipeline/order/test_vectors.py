"""The test vectors of ORDER.md: the product gives them, and so does the reference in C, written from the page.

The vectors tell wrong implementations from right ones: each of several slips in the reference changes a result.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from fuelrail.pipeline.format.attributes import ClipTable
from fuelrail.pipeline.order.batching import Batching, World
from fuelrail.pipeline.order.compile import compile_table
from fuelrail.pipeline.order.lanes import LaneOrder
from fuelrail.pipeline.order.mix import Mix, MixedOrder, MixSchedule, MixStage
from fuelrail.pipeline.order.permutation import KeyedPermutation, derive_key
from fuelrail.pipeline.order.select import Filter
from fuelrail.pipeline.order.spec import ORDER_VERSION, CompiledOrder, OrderSpec, OrderStage
from fuelrail.pipeline.order.table import Table
from fuelrail.pipeline.order.weights import AttributeWeights, SystematicSampling
from fuelrail.pipeline.order.windows import FrameWindow, window_lookup
from fuelrail.pipeline.order.without import ThinnedOrder

pytestmark = pytest.mark.process

VECTORS = Path(__file__).with_name("vectors.json")
REFERENCE = Path(__file__).parents[2] / "support" / "order.c"
VECTORS_READ = json.loads(VECTORS.read_text(encoding="utf-8"))
CASES = VECTORS_READ["cases"]
RESULTS = (
    "key_hex",
    "values",
    "samples",
    "valid",
    "prev_exists",
    "datasets",
    "positions_of_rank",
    "frame_rows",
    "present",
)
PRINTED = (
    "datasets",
    "positions_of_rank",
    "values",
    "samples",
    "frame_rows",
    "valid",
    "present",
    "prev_exists",
)
"""The results in the order in which the reference prints them, position by position."""
FILTERS = VECTORS_READ["filters"]
SLIPS = {
    "half a tick is rounded up": ("(u64)rint(", "(u64)floor(0.5 + "),
    "half a tick is cut off": ("(u64)rint(", "(u64)ceil(-0.5 + "),
    "an ended lane stays at its last frame": (
        "past % size",
        "(past < size ? past : size - 1)",
    ),
    "an ended lane shows all of its pieces again": (
        "while (size < num_frames[lane] && !frames[lane][size].is_first) size++;",
        "size = num_frames[lane];",
    ),
    "an ended lane goes on where a longer one would be": (
        "past = step - num_frames[lane]",
        "past = step",
    ),
    "changes of a ramp by dataset": ("to && place[to - 1] > at_place", "0"),
    "changes of a ramp that begin at once": ("(2 * j + 1) /", "(2 * j) /"),
    "changes of a ramp that end at once": ("(2 * j + 1) /", "(2 * j + 2) /"),
    "changes of a ramp at equal places from the last dataset on": (
        "place[to - 1] > at_place",
        "place[to - 1] >= at_place",
    ),
    "a ramp that is early": (
        "i = num * c * c / (2 * n)",
        "i = (num * c * c + n) / (2 * n)",
    ),
    "parts with the seed of the mix": (
        'Permutation p = permutation(n, key2("order shuffled", part_seed, turn));',
        'Permutation p = permutation(n, key2("order shuffled", seed, turn));',
    ),
    "parts that begin anew in each epoch": (
        "u64 u = block * ratio[d];",
        "u64 u = block % blocks * ratio[d];",
    ),
    "a window that repeats the clip's first frame": (
        "stored < nearest) row = j;",
        "1) row = j;",
    ),
    "a window that counts in stored frames": (
        "frame < stored && stored",
        "frame + 1 < stored && stored",
    ),
    "a lane without frames shows that before it": (
        "lane = (lane + 1) % num_lanes",
        "lane = (lane + num_lanes - 1) % num_lanes",
    ),
    "the frame behind one that is left out continues its piece": (
        "} else is_first = 1;",
        "}",
    ),
    "what is left out keeps its position": (
        "if (!contains(num_hidden, hidden, placed[i]))",
        "if (1)",
    ),
}
"""Wrong implementations of ORDER.md, as changes of the reference: the text that is right, and one that is not."""


def compute_results(case) -> dict:
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
            number = np.repeat(np.arange(len(clips)), clips)
            frame = np.concatenate([np.arange(n) for n in clips])
            order = LaneOrder(
                ClipTable.build(number, frame),
                case["global_batch"],
                seed=case["seed"],
                pieces_per_clip=case["pieces_per_clip"],
            )
            if case.get("hidden"):
                order = ThinnedOrder(order, [np.array(case["hidden"])])
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
                    ratios=dict(zip(names, stage["ratios"], strict=True)),
                    until=stage["until"],
                    ramp=stage["ramp"],
                )
                for stage in case["stages"] or ()
            ]
            schedule = MixSchedule(stages, names) if stages else None
            ratios = schedule.final if schedule else case["ratios"]
            mixed = MixedOrder(orders, ratios, seed=case["seed"], schedule=schedule)
            assert mixed.num_blocks == case["blocks_per_epoch"]
            entries = mixed.epoch(case["epoch"]).entries(case["positions"])
            return {
                "datasets": entries.parts.tolist(),
                "samples": entries.samples.tolist(),
            }
        case "stages":
            columns = {}
            for d, stage in enumerate(case["stages"]):
                weights = dict(
                    zip(
                        stage["selected"],
                        stage["weights"] or [1.0] * len(stage["selected"]),
                        strict=True,
                    )
                )
                columns[f"in{d}"] = [row in weights for row in range(case["rows"])]
                columns[f"w{d}"] = [weights.get(row, 0.0) for row in range(case["rows"])]
            stages = [
                OrderStage(
                    filter=f"in{d}",
                    until=stage["until"],
                    ramp=stage["ramp"],
                    weights=(AttributeWeights(attribute=f"w{d}"),) if stage["weights"] else (),
                )
                for d, stage in enumerate(case["stages"])
            ]
            spec = OrderSpec(
                seed=case["seed"],
                stages=tuple(stages),
                epoch_length=case["epoch_length"],
            )
            order = compile_table(spec, Table(columns, spec, None, None), [case["rows"]])
            assert [stage_order.epoch_length for stage_order in order.orders] == [
                stage["epoch_length"] for stage in case["stages"]
            ]
            return {"samples": order.epoch(case["epoch"])(case["positions"]).tolist()}
        case "parts":
            columns = {"part": pa.array(case["attribute_values"])}
            if case["weights"]:
                columns["weight"] = case["weights"]
            spec = OrderSpec(
                seed=case["seed"],
                mix=Mix(attribute="part", ratios=dict(case["ratios"])),
                weights=(AttributeWeights(attribute="weight"),) if case["weights"] else (),
            )
            order = compile_table(
                spec,
                Table(columns, spec, None, None),
                [len(case["attribute_values"])],
            )
            assert order.num_blocks == case["blocks_per_epoch"]
            return {"samples": order.epoch(case["epoch"])(case["positions"]).tolist()}
        case "window":
            window = FrameWindow(
                frames=tuple(case["offsets"]),
                stride=case["stride"],
                pad=case["pad"],
            )
            rows, present = window_lookup(
                ClipTable.build(np.array(case["clips"]), np.array(case["frames"])),
                window,
            )(case["samples_shown"])
            return {"frame_rows": rows.tolist(), "present": present.tolist()}
        case "batch":
            world = World(case["rank"], case["ranks"])
            batching = Batching(
                epoch_length=case["epoch_length"],
                global_batch=case["global_batch"],
                world=world,
                drop_last=False,
                start=case["start"],
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
            order = CompiledOrder(
                spec=spec,
                identity={},
                shard_lengths=case["shard_lengths"],
                selected=selected,
                sampling=sampling,
            )
            assert order.epoch_length == case["epoch_length"]
            if case.get("hidden"):
                order = ThinnedOrder(order, [np.array(case["hidden"])])
            return {"samples": order.epoch(case["epoch"])(case["positions"]).tolist()}


def as_text(value) -> str:
    """A value as section 8 writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


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
            lists = (
                case["clip_lengths"],
                case.get("hidden", []),
                case["positions"],
            )
            return f"{head} {' '.join(map(counted, lists))}"
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
                numbers += [
                    *stage["ratios"],
                    stage["until"] or 0,
                    int(stage["ramp"]),
                ]
            return f"mix {' '.join(map(str, [*numbers, *case['lengths']]))} {counted(case['positions'])}"
        case "parts":
            ratios = [ratio for _, ratio in case["ratios"]]
            numbers = [case["seed"], case["epoch"], case["blocks_per_epoch"]]
            text = f"parts {' '.join(map(str, numbers))} {counted(ratios)}"
            for value, _ in case["ratios"]:
                rows = [
                    row
                    for row, attribute in enumerate(case["attribute_values"])
                    if as_text(attribute) == value
                ]
                weights = [case["weights"][row] for row in rows] if case["weights"] else []
                text += f" {counted(rows)} {counted(weights)}"
            return f"{text} {counted(case['positions'])}"
        case "window":
            lists = ("offsets", "clips", "frames", "samples_shown")
            counts = " ".join(counted(case[name]) for name in lists)
            return f"window {case['pad']} {case['stride']} {counts}"
        case "stages":
            text = f"stages {case['seed']} {case['epoch']} {case['epoch_length']} {len(case['stages'])}"
            for mix_stage in case["stages"]:
                head = f"{mix_stage['until'] or 0} {int(mix_stage['ramp'])} {counted(mix_stage['selected'])}"
                text += f" {head} {counted(mix_stage['weights'] or [])} {mix_stage['epoch_length']}"
            return f"{text} {counted(case['positions'])}"
        case "batch":
            names = (
                "epoch_length",
                "global_batch",
                "ranks",
                "rank",
                "step",
                "start",
            )
            return f"batch {' '.join(str(case[name]) for name in names)}"
        case kind:
            lists = " ".join(
                counted(case[name] or []) for name in ("shard_lengths", "selected", "weights")
            )
            head = f"order {kind} {case['seed']} {case['epoch']} {case['window'] or 0} {lists} {case['epoch_length']}"
            return f"{head} {counted(case.get('hidden', []))} {counted(case['positions'])}"


def compile_program(compiler: str, program: Path, source: str, *options: str) -> Path:
    file = program.with_suffix(".c")
    file.write_text(source, encoding="utf-8")
    warnings = ("-Wall", "-Wextra", "-Werror")
    subprocess.run(
        [
            compiler,
            "-std=c11",
            "-O1",
            *warnings,
            *options,
            "-o",
            program,
            file,
            "-lm",
        ],
        check=True,
    )
    return program


def run_program(program: Path, cases: list) -> list[list[str]]:
    """What a program prints for some cases, in words; fewer where it stops."""
    text = "".join(f"{line(case)}\n" for case in cases)
    environment = {
        **os.environ,
        "ASAN_OPTIONS": "detect_leaks=0",
    }  # it frees nothing, on purpose
    run = subprocess.run([program], input=text, capture_output=True, text=True, env=environment)
    assert not run.stderr, run.stderr
    return [words.split() for words in run.stdout.splitlines()]


def expected_words(case) -> list[str]:
    """What the reference prints for a case."""
    if case["kind"] == "key":
        return [case["key_hex"]]
    results = [case[name] for name in PRINTED if name in case]
    if case["kind"] == "window":
        results = [[value for values in result for value in values] for result in results]
    return [str(int(value)) for position in zip(*results, strict=True) for value in position]


@pytest.fixture(scope="module")
def compiler() -> str:
    path = shutil.which("cc")
    if path is None:
        pytest.skip("no C compiler (cc) is installed")
    return path


@pytest.fixture(scope="module")
def sanitizers(compiler, tmp_path_factory) -> tuple[str, ...]:
    """The options that check each access of memory, where the compiler has their libraries."""
    options = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    program = tmp_path_factory.mktemp("sanitizers") / "empty"
    try:
        compile_program(compiler, program, "int main(void) { return 0; }\n", *options)
    except subprocess.CalledProcessError:
        return ()
    return options


def test_the_vectors_are_of_this_version_and_of_every_kind() -> None:
    assert VECTORS_READ["order_version"] == ORDER_VERSION
    kinds = {case["kind"] for case in CASES}
    assert kinds == {
        "key",
        "permutation",
        "shuffled",
        "sequential",
        "windowed",
        "lanes",
        "mix",
        "parts",
        "stages",
        "window",
        "batch",
    }
    assert len(CASES) >= 45
    assert any(case.get("hidden") for case in CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["kind"])
def test_the_product_gives_the_vectors(case) -> None:
    assert compute_results(case) == {name: case[name] for name in RESULTS if name in case}


def test_the_reference_in_c_gives_the_vectors(tmp_path, compiler, sanitizers) -> None:
    """Each access of memory is checked."""
    source = REFERENCE.read_text(encoding="utf-8")
    program = compile_program(compiler, tmp_path / "order", source, *sanitizers)
    for case, words in zip(CASES, run_program(program, CASES), strict=True):
        assert words == expected_words(case), case


def test_the_reference_in_c_takes_a_ramp_of_any_number_of_changes(
    tmp_path, compiler, sanitizers
) -> None:
    """More than 1,024, which the product refuses, must not reach beyond its memory."""
    source = REFERENCE.read_text(encoding="utf-8")
    program = compile_program(compiler, tmp_path / "order", source, *sanitizers)
    stages = [
        {"ratios": [3000, 0], "until": 4 * 3000, "ramp": True},
        {"ratios": [0, 3000], "until": None, "ramp": False},
    ]
    case = {
        "kind": "mix",
        "seed": 1,
        "epoch": 0,
        "ratios": None,
        "stages": stages,
    }
    case |= {
        "lengths": [50, 60],
        "blocks_per_epoch": 4,
        "positions": list(range(0, 12000, 999)),
    }
    (words,) = run_program(program, [case])
    assert len(words) == 2 * len(case["positions"])
    assert set(words[::2]) == {"0", "1"}


@pytest.mark.parametrize("slip", SLIPS)
def test_the_vectors_tell_a_wrong_implementation(slip, tmp_path, compiler) -> None:
    right, wrong = SLIPS[slip]
    source = REFERENCE.read_text(encoding="utf-8")
    assert right in source
    program = compile_program(compiler, tmp_path / "order", source.replace(right, wrong), "-w")
    assert run_program(program, CASES) != [expected_words(case) for case in CASES]


@pytest.mark.parametrize("case", FILTERS["cases"], ids=lambda case: case["filter"])
def test_the_filters_of_the_vectors(case) -> None:
    columns = FILTERS["columns"]
    table = pa.table({name: columns[name] for name in Filter(case["filter"], columns).columns})
    selected = Filter(case["filter"], columns).select(table, FILTERS["rows"])
    assert selected.tolist() == case["selected"]
