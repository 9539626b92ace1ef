"""Hostile ledgers of runs, weights and checkpoints: a result or one sentence, never more.

A sound file is spoiled: its bytes, as by accident, or one value in it, with all digests mended, as by an attacker. Some
cases of each kind run by default::

    FUELRAIL_ATTACK=all pytest tests/attack/test_hostile_runs.py      every case
    python tests/attack/test_hostile_runs.py [-v] [NUMBER]             that number of each kind, without pytest
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import xxhash

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.hostile import small_dataset
from support.hostile_runs import Outcome, footprint, in_fork, run
from support.loaders import make_loader

pytestmark = pytest.mark.process

HOSTILE = "x\x1b]0;t\x07\x1b[31m\u202e\nrecord\n" + "y" * 5_000
VALUES = {
    "negative": -1,
    "zero": 0,
    "one": 1,
    "31": 2**31,
    "63": 2**63,
    "64": 2**64,
    "huge": 10**4000,
    "large": 2**61,
    "epochs": 10**9,
    "none": None,
    "text": HOSTILE,
    "empty": "",
    "list": [],
    "dict": {},
    "pair": [2**61, 2**61],
    "far": [10**9, 0],
    "deep": json.loads("[" * 900 + "]" * 900),
    "true": True,
    "float": 1e300,
    "path": "/dev/zero",
}


def replace_with(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        path.unlink()
        make(path)

    return spoil


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def spoil_bytes(
    change: Callable[[bytes, random.Random], bytes], seed: int
) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(change(path.read_bytes(), random.Random(seed))) and None


def flip_bit(data: bytes, rng: random.Random) -> bytes:
    spoiled = bytearray(data)
    spoiled[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(spoiled)


def header_lies(data: bytes, rng: random.Random) -> bytes:
    """The length of safetensors' header, or of whatever begins with one."""
    return rng.choice([2**63, 2**40, 0, 1, len(data), 2**64 - 1]).to_bytes(8, "little") + data[8:]


BYTES: dict[str, Callable[[Path], None]] = {
    "gone": Path.unlink,
    "fifo": replace_with(os.mkfifo),
    "folder": replace_with(Path.mkdir),
    "device": replace_with(lambda path: path.symlink_to("/dev/zero")),
    "loop": replace_with(lambda path: path.symlink_to(path.name)),
    "sparse": replace_with(sparse),
    "empty": lambda path: path.write_bytes(b"") and None,
    "zeros": lambda path: path.write_bytes(bytes(1 << 20)) and None,
    "nested": lambda path: path.write_bytes(b"[" * 300_000) and None,
    "not-utf8": spoil_bytes(lambda data, _: data[:50] + b"\xff\xfe" + data[50:], 0),
    "twice": spoil_bytes(lambda data, _: data + data, 0),
    **{
        f"cut-{n}": spoil_bytes(lambda data, rng: data[: rng.randrange(len(data))], n)
        for n in range(4)
    },
    **{f"flipped-{n}": spoil_bytes(flip_bit, n) for n in range(8)},
    **{f"header-{n}": spoil_bytes(header_lies, n) for n in range(6)},
}


def places(value: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the values of a JSON document are, itself left out."""
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, item in inner:
        yield (*where, key)
        yield from places(item, (*where, key))


def set_value(document: Any, where: tuple[Any, ...], value: Any) -> Any:
    copy = json.loads(json.dumps(document))
    inner = copy
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    return copy


def write_ledger(records: list[Any]) -> bytes:
    """The ledger of some records with the right digests; the form is on the page of ledgers."""
    lines = []
    head = hashlib.sha256(b"fuelrail ledger 1").hexdigest()
    for record in records:
        body = json.dumps(record).encode()
        head = hashlib.sha256(head.encode() + body).hexdigest()
        lines.append(f"{head} ".encode() + body + b"\n")
    return b"".join(lines)


def ledger_values(
    number: int, record: dict[str, Any], sound: bytes
) -> Iterator[tuple[str, Callable[[Path], None]]]:
    records = [json.loads(line[65:]) for line in sound.splitlines()]
    for where in places(record):
        for name, value in VALUES.items():
            spoiled = write_ledger(
                [
                    *records[:number],
                    set_value(record, where, value),
                    *records[number + 1 :],
                ]
            )
            yield (
                f"{record['record']}/{'.'.join(map(str, where))}={name}",
                partial(_write, spoiled),
            )


def _write(data: bytes, path: Path) -> None:
    path.write_bytes(data)


def safetensors_values(
    sound: bytes,
) -> Iterator[tuple[str, Callable[[Path], None]]]:
    size = int.from_bytes(sound[:8], "little")
    header = json.loads(sound[8 : 8 + size])
    data = sound[8 + size :]
    first = dict(list(header.items())[:2])
    for where in places(first):
        for name, value in VALUES.items():
            text = json.dumps(set_value(header, where, value)).encode()
            yield (
                f"{'.'.join(map(str, where))}={name}",
                partial(_write, len(text).to_bytes(8, "little") + text + data),
            )


def checkpoint_values(
    sound: bytes,
) -> Iterator[tuple[str, Callable[[Path], None]]]:
    sealed = json.loads(sound)
    for where in places(sealed["manifest"]):
        for name, value in VALUES.items():
            if name == "deep":  # checkpoints of strangers are not loaded: see Checkpoints
                continue
            body = json.dumps(
                set_value(sealed["manifest"], where, value),
                separators=(",", ":"),
            )
            digest = xxhash.xxh3_64_hexdigest(f"{sealed['version']}\n{body}".encode())
            text = f'{{"version":{sealed["version"]},"xxh3":"{digest}","manifest":{body}}}'
            yield (
                f"{'.'.join(map(str, where))}={name}",
                partial(_write, text.encode()),
            )


def make_sound(folder: Path) -> None:
    """A dataset, a run with its ledger and a checkpoint, and weights."""
    import torch

    import fuelrail as fr

    small_dataset(folder / "DS")
    options = {"path": folder / "a.ledger", "digest_every": 1}
    parallel = model()
    with (
        make_small_loader(folder / "DS", ledger=options) as loader,
        fr.bench.Checkpoints(folder / "CKPT") as checkpoints,
    ):
        for step, _ in enumerate(loader):
            state = loader.state_dict()
            if step == 1:
                checkpoints.save(2, parallel, state)
        checkpoints.wait()
    with make_small_loader(folder / "DS", ledger=options) as loader:
        loader.load_state_dict(state)
        next(iter(loader))
    lines = (folder / "a.ledger").read_bytes().splitlines()
    records = [json.loads(line[65:]) for line in lines]
    key = "clip-0000-000000"
    records.append(
        {
            "record": "replaced",
            "since": [0, 0],
            "rank": 0,
            "epoch": 0,
            "position": 1,
            "key": key,
            "replaced_by": key,
        }
    )
    records.append({"record": "reached", "place": [1, 4], "why": "state"})
    (folder / "a.ledger").write_bytes(write_ledger(records))
    shutil.copy(folder / "a.ledger", folder / "GOOD")
    fr.bench.save_weights(parallel, folder / "weights.safetensors")
    assert torch.get_num_threads() == 1


def make_small_loader(dataset: Path | str, **options: Any) -> Any:
    from fuelrail import ImageAugment

    return make_loader(
        str(dataset),
        2,
        seed=1,
        num_workers=1,
        image=ImageAugment(height=32, width=64),
        **options,
    )


def model() -> Any:
    import torch

    import fuelrail as fr

    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    return fr.bench.parallelise(layers)


def run_as_trainer(work: Callable[[], object]) -> int:
    """Run as a trainer does: an error of ours is a sentence."""
    from fuelrail.pipeline.errors import FuelrailError

    try:
        print(repr(work())[:2000])
    except FuelrailError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


def train_with_ledger() -> int:
    with make_small_loader("DS", ledger="a.ledger") as loader:
        return len([batch for batch, _ in zip(loader, range(2), strict=False)])


def restore() -> object:
    import fuelrail as fr

    with make_small_loader("DS") as loader:
        return fr.bench.Checkpoints("CKPT").restore(model(), loader)


def load() -> object:
    import fuelrail as fr

    return fr.bench.load_weights(model(), "weights.safetensors")


def make_trainer_command(work: Callable[[], object]) -> Callable[[], int]:
    return lambda: run_as_trainer(work)


KINDS: dict[str, tuple[str, dict[str, list[str] | Callable[[], int]]]] = {
    "ledger": (
        "a.ledger",
        {
            "show": ["runs", "show", "a.ledger"],
            "json": ["runs", "show", "a.ledger", "--json"],
            "replay": ["runs", "replay", "a.ledger", "--step", "1"],
            "seen": ["runs", "seen", "a.ledger", "clip-0000-000000"],
            "diff": ["runs", "diff", "a.ledger", "GOOD"],
            "diff-other": ["runs", "diff", "GOOD", "a.ledger"],
            "attest": [
                "runs",
                "attest",
                "a.ledger",
                "GOOD",
                "--epoch",
                "0",
                "--samples",
                "4",
            ],
            "train": make_trainer_command(train_with_ledger),
        },
    ),
    "weights": ("weights.safetensors", {"load": make_trainer_command(load)}),
    "checkpoint": ("CKPT", {"restore": make_trainer_command(restore)}),
}


Case = tuple[str, str, Callable[[Path], None]]
"""Kind, file, and what spoils that."""


def cases(folder: Path) -> dict[str, Case]:
    """Return all cases by name."""
    cases_by_name: dict[str, Case] = {}
    checkpoint = next((folder / "CKPT").glob("step-*"))
    files = {"ledger": ["a.ledger"], "weights": ["weights.safetensors"]}
    files["checkpoint"] = [str(file.relative_to(folder)) for file in sorted(checkpoint.iterdir())]
    for kind, names in files.items():
        for name in names:
            for how, spoil in BYTES.items():
                file_name = Path(name).name if kind == "checkpoint" else ""
                cases_by_name[f"{kind}/bytes/{file_name}{how}"] = (
                    kind,
                    name,
                    spoil,
                )
    sound = (folder / "a.ledger").read_bytes()
    kinds = set()
    for number, line in enumerate(sound.splitlines()):
        record = json.loads(line[65:])
        if record["record"] not in kinds:
            kinds.add(record["record"])
            for how, spoil in ledger_values(number, record, sound):
                cases_by_name[f"ledger/values/{how}"] = (
                    "ledger",
                    "a.ledger",
                    spoil,
                )
    for how, spoil in safetensors_values((folder / "weights.safetensors").read_bytes()):
        cases_by_name[f"weights/values/{how}"] = (
            "weights",
            "weights.safetensors",
            spoil,
        )
    for how, spoil in checkpoint_values((checkpoint / "checkpoint.json").read_bytes()):
        cases_by_name[f"checkpoint/values/{how}"] = (
            "checkpoint",
            f"CKPT/{checkpoint.name}/checkpoint.json",
            spoil,
        )
    return cases_by_name


def attack(case: Case, folder: Path, place: Path) -> dict[str, Outcome | str]:
    """How each command ends on one case."""
    kind, name, spoil = case
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    (place / "tmp").mkdir()
    for source in folder.iterdir():
        if source.name != "DS" and (kind == "checkpoint") != (source.name == "CKPT"):
            continue
        if source.name == "DS":
            (place / "DS").symlink_to(source)
        elif source.is_dir():
            shutil.copytree(source, place / source.name)
        else:
            shutil.copy(source, place / source.name)
    spoil(place / name)
    results: dict[str, Outcome | str] = {}
    before = footprint(place)
    for command_name, command in KINDS[kind][1].items():
        results[command_name] = run(command, place)
        if kind == "ledger" and command_name != "train" and footprint(place) != before:
            results[f"{command_name}-files"] = "something was written"
    return results


def list_faults(results: dict[str, Outcome | str]) -> list[str]:
    return [
        f"{name}: {fault}"
        for name, result in results.items()
        for fault in ([result] if isinstance(result, str) else result.faults())
    ]


def preload() -> None:
    """Load what the commands load, so that a fork has it."""
    import cv2
    import torch

    import fuelrail.__main__
    import fuelrail.bench.studies.runs.attest
    import fuelrail.bench.studies.runs.command
    import fuelrail.bench.studies.runs.replay
    import fuelrail.bench.trainer.checkpoints.saver
    import fuelrail.bench.trainer.weights  # noqa: F401

    torch.set_num_threads(1)
    cv2.setNumThreads(1)


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    preload()
    folder = tmp_path_factory.mktemp("sound")
    in_fork(lambda: make_sound(folder))
    return folder


def choose_cases(cases_by_name: dict[str, Case], number: int) -> dict[str, Case]:
    """Return a number of cases of each kind, always the same ones."""
    kinds = (
        "ledger/bytes",
        "ledger/values",
        "weights/bytes",
        "weights/values",
        "checkpoint/bytes",
        "checkpoint/values",
    )
    names_by_kind = ([name for name in cases_by_name if name.startswith(kind)] for kind in kinds)
    return {
        name: cases_by_name[name]
        for names in names_by_kind
        for name in random.Random(1).sample(names, min(number, len(names)))
    }


@pytest.mark.parametrize("kind", ["ledger", "weights", "checkpoint"])
def test_hostile_ledgers_weights_and_checkpoints_end_in_a_sentence(kind, sound, tmp_path) -> None:
    selected = choose_cases(
        cases(sound),
        10_000 if os.environ.get("FUELRAIL_ATTACK") == "all" else 2,
    )
    kind_cases = {name: case for name, case in selected.items() if case[0] == kind}
    faults = {
        name: list_faults(attack(case, sound, tmp_path / "place"))
        for name, case in kind_cases.items()
    }
    assert len(faults) >= 4
    assert {name: texts for name, texts in faults.items() if texts} == {}


def main() -> int:
    """Run NUMBER cases of each kind; a line for each fault, and for each run with -v."""
    preload()
    number = int(next((argument for argument in sys.argv[1:] if argument != "-v"), "10000"))
    num_runs = num_faults = num_cases = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "sound"
        place = Path(temporary) / "place"
        folder.mkdir()
        in_fork(lambda: make_sound(folder))
        for name, case in choose_cases(cases(folder), number).items():
            results = attack(case, folder, place)
            num_cases = num_cases + 1
            num_runs = num_runs + len(results)
            for fault in list_faults(results):
                num_faults += 1
                print(f"{name}: {fault}", flush=True)
            for command_name, result in results.items() if "-v" in sys.argv else ():
                if isinstance(result, Outcome):
                    line = result.text.strip().rpartition("\n")[2][:200]
                    figures = (
                        f"{result.status} {result.seconds:.1f} s {result.memory_bytes >> 20} MiB"
                    )
                    print(f"  {name} {command_name}: {figures} {line}", flush=True)
    print(f"{num_cases} files, {num_runs} runs, {num_faults} faults")
    return 1 if num_faults else 0


if __name__ == "__main__":
    sys.exit(main())
