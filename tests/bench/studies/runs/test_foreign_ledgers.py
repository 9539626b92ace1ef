"""Ledgers and checkpoints of somebody else: what they name is not read, and nothing is waited for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from fuelrail import OrderSpec, bench
from fuelrail.__main__ import main
from fuelrail.pipeline.errors import ConfigError, FuelrailError, LedgerError
from fuelrail.pipeline.format.ledger import LedgerFile, RunSetup, read_ledger
from fuelrail.pipeline.limits import LEDGER, NAMES, UNTYPED
from support.batches import load, unlike
from support.datasets import build_dataset


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    root = tmp_path_factory.mktemp("foreign") / "d"
    build_dataset(root, {"train": (4, 4)})
    return root


@pytest.fixture(scope="module")
def ledger(dataset, tmp_path_factory):
    path = tmp_path_factory.mktemp("ledger") / "a.ledger"
    with load(dataset, 2, ledger=path, order=OrderSpec(seed=1)) as loader:
        for batch in loader:
            assert len(batch["sample_key"]) == 2
    return path


def rewritten(ledger, path, **changes):
    """A ledger with another setup of the loader and right digests; ``changes`` by dotted names."""
    records = []
    for record in read_ledger(ledger).records:
        if isinstance(record, RunSetup):
            loader = json.loads(json.dumps(record.loader))
            for name, value in changes.items():
                *folders, last = name.split("__")
                place = loader
                for folder in folders:
                    place = place[folder]
                place[last] = value
            record = msgspec.structs.replace(record, loader=loader)
        records.append(record)
    LedgerFile(path).append(*records)
    return path


def weights_of(file):
    return [{"by": "file", "file": file, "default": 1.0}]


NAMED = {
    "subset": lambda file: {"order__subset": file},
    "without": lambda file: {"order__without": [file]},
    "weights": lambda file: {"order__weights": weights_of(file)},
    "stages": lambda file: {
        "order__stages": [
            {"weights": weights_of(file), "until": 8},
            {"weights": []},
        ]
    },
}


@pytest.mark.parametrize("field", NAMED)
@pytest.mark.parametrize("word", ["replay", "seen"])
def test_files_that_a_ledger_names_are_read_in_named_folders_only(
    ledger, tmp_path, field, word, capsys
):
    elsewhere = tmp_path / "elsewhere"
    ledger_folder = tmp_path / "here"
    elsewhere.mkdir()
    ledger_folder.mkdir()
    (elsewhere / "secret").write_text("root:x:0:0:secret\n")
    os.mkfifo(ledger_folder / "fifo")
    (ledger_folder / "link").symlink_to(elsewhere / "secret")
    (ledger_folder / "zero").symlink_to("/dev/zero")
    names = [
        "/etc/passwd",
        "/dev/zero",
        "gone",
        str(elsewhere / "secret"),
        *(
            str(ledger_folder / name)
            for name in ("fifo", "link", "zero", ".", "../elsewhere/secret")
        ),
        "nul\0character",
    ]
    for number, name in enumerate(names):
        path = rewritten(ledger, ledger_folder / f"{number}.ledger", **NAMED[field](name))
        words = {"replay": ["--step", "1"], "seen": ["clip-0001"]}[word]
        assert main(["runs", word, str(path), *words]) == 2, name
        text = capsys.readouterr().err
        assert "the ledger names the file" in text
        assert ":x:0" not in text


@pytest.mark.parametrize("name", ["transforms__image", "transforms__ego", "window", "order"])
def test_settings_that_a_ledger_names_as_files_are_not_read(ledger, tmp_path, name, capsys):
    (tmp_path / "secret.yaml").write_text("secret: 5\n")
    for file in (str(tmp_path / "secret.yaml"), "/dev/zero", "/etc/passwd"):
        path = rewritten(ledger, tmp_path / f"{len(file)}.ledger", **{name: file})
        with pytest.raises(LedgerError, match="in the setup of record 1 are of no known form"):
            bench.replay(path, 0)
        assert main(["runs", "seen", str(path), "clip-0001"]) == 2
        text = capsys.readouterr().err
        assert "secret: 5" not in text and ":x:0" not in text
        path.unlink()


def test_the_folder_of_files_may_be_named_again(dataset, ledger, tmp_path, capsys):
    """A run of one's own, whose file is neither beside the ledger nor where it was."""
    keys = tmp_path / "lists" / "keys.txt"
    keys.parent.mkdir()
    keys.write_text("\n".join(f"clip-0001-{frame:06d}" for frame in range(4)))
    path = tmp_path / "runs" / "a.ledger"
    with load(dataset, 2, ledger=path, order=OrderSpec(seed=1, subset=str(keys))) as loader:
        batches = list(loader)
    with pytest.raises(ConfigError, match=r"not below .*runs.*--files FOLDER"):
        bench.replay(path, 1)
    assert not unlike(bench.replay(path, 1, files=keys.parent).batch, batches[1])
    words = ["--files", str(keys.parent), "--json"]
    assert main(["runs", "replay", str(path), "--step", "1", *words]) == 0
    assert json.loads(capsys.readouterr().out)["keys"] == list(batches[1]["sample_key"])
    assert main(["runs", "seen", str(path), "clip-0001", *words]) == 0
    assert json.loads(capsys.readouterr().out)["num_samples"] == 4
    beside = path.parent / "keys.txt"
    beside.write_bytes(keys.read_bytes())
    with load(
        dataset,
        2,
        ledger=path.parent / "b.ledger",
        order=OrderSpec(seed=1, subset=str(beside)),
    ) as loader:
        list(loader)
    assert not unlike(bench.replay(path.parent / "b.ledger", 1).batch, batches[1])


def peak_bytes(imports, code, *arguments):
    """Run code in a process of its own; returns what it printed, and the memory that it took."""
    program = (
        f"{imports}\n"
        "import resource, sys\n"
        "from fuelrail.pipeline.errors import FuelrailError\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"try:\n    {code}\nexcept FuelrailError as error:\n    print(error)\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)\n"
    )
    words = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    *lines, last = done.stdout.splitlines()
    return "\n".join(lines), int(last)


@pytest.mark.process
def test_a_checkpoint_is_digested_in_pieces(ledger, tmp_path):
    file = tmp_path / "weights.pt"
    with file.open("wb") as stream:
        stream.truncate(300 << 20)
    text, num_bytes = peak_bytes(
        "from fuelrail.bench.studies.runs.attest import attest",
        "print(attest(*sys.argv[1:], (0, 4))['subject'])",
        ledger,
        file,
    )
    assert "weights.pt" in text
    assert num_bytes < 50 << 20


def test_what_is_no_regular_file_is_not_stated_and_not_waited_for(ledger, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "0.pt").write_bytes(b"weights")
    (checkpoint / "same.pt").symlink_to("0.pt")
    assert len(bench.attest(ledger, checkpoint, (0, 4))["subject"]) == 2
    os.mkfifo(tmp_path / "fifo")
    for place in (tmp_path / "fifo", "/dev/zero", tmp_path / "gone"):
        with pytest.raises(ConfigError, match=r"not a regular file|No such file"):
            bench.attest(ledger, place, (0, 4))
    os.mkfifo(checkpoint / "fifo")
    with pytest.raises(ConfigError, match="is not a regular file"):
        bench.attest(ledger, checkpoint, (0, 4))
    (checkpoint / "fifo").unlink()
    for target in ("/etc/passwd", "/dev/zero", "nowhere", "loop"):
        (checkpoint / "loop").symlink_to(target)
        with pytest.raises(ConfigError, match="is a link that leads out of"):
            bench.attest(ledger, checkpoint, (0, 4))
        (checkpoint / "loop").unlink()


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_files_of_ranks_are_read_as_the_ledger_is(ledger, tmp_path, make):
    path = rewritten(ledger, tmp_path / "a.ledger")
    assert bench.run_history(path).num_steps
    rank = tmp_path / "a.ledger.rank00001"
    for broken in (make, lambda path: path.symlink_to("nowhere"), Path.mkdir):
        broken(rank)
        with pytest.raises(LedgerError, match=r"rank00001' cannot be read"):
            bench.run_history(path)
        rank.rmdir() if rank.is_dir() else rank.unlink()
    with rank.open("wb") as stream:
        stream.truncate(LEDGER.maximum)
    with pytest.raises(ConfigError, match=f"its 1 files of ranks .* {LEDGER.maximum} are read"):
        bench.run_history(path)


def test_states_of_checkpoints_are_those_of_a_regular_file(ledger, tmp_path):
    os.mkfifo(tmp_path / "fifo.json")
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    (tmp_path / "deep.json").write_bytes(b'{"a":' * 100_000)
    (tmp_path / "latin.json").write_bytes(b'{"\xe9": 1}')
    with (tmp_path / "large.json").open("wb") as stream:
        stream.truncate(UNTYPED.maximum + 1)
    for name in ("fifo", "zero", "deep", "latin", "large"):
        with pytest.raises(ConfigError, match="must be a JSON file of loaders' states by name"):
            bench.seen(ledger, ["clip-0001"], checkpoints=tmp_path / f"{name}.json")


@pytest.mark.process
@pytest.mark.parametrize("form", ["dictionary", "delta", "runs", "lists"])
def test_a_table_of_keys_is_limited_by_what_it_decodes_to(tmp_path, form):
    """Kilobytes that decode to gigabytes."""
    file = tmp_path / "keys.parquet"
    rows = 20_000
    text = pa.array(["x" * 100_000])
    column = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), text)
    options = {"compression": "zstd"}
    if form == "delta":
        column = pa.array([f"{'x' * 100_000}{row}" for row in range(200)])
        options |= {
            "use_dictionary": False,
            "column_encoding": {"key": "DELTA_BYTE_ARRAY"},
        }
    elif form == "runs":
        column = pa.array([True]).take(pa.array(np.zeros(80_000_000, np.int32)))
    elif form == "lists":
        column = pa.array([["a", "b"]])
    pq.write_table(pa.table({"key": column}), file, **options)
    assert form == "lists" or file.stat().st_size < 300_000
    imports = "import pyarrow.parquet\nfrom fuelrail.pipeline.order.keys import listed_names"
    text, num_bytes = peak_bytes(imports, "listed_names(sys.argv[1])", file)
    assert {
        "dictionary": f"at most {NAMES.maximum} are read",
        "delta": "has the encoding DELTA_BYTE_ARRAY",
        "runs": f"at most {NAMES.maximum} are read",
        "lists": "each row must have a value of its own",
    }[form] in text
    assert num_bytes < 100 << 20


def test_a_fifo_as_a_table_of_keys_is_refused(dataset, tmp_path):
    os.mkfifo(tmp_path / "keys.csv")
    with pytest.raises(FuelrailError, match="it is not a regular file"):
        load(dataset, 2, order=OrderSpec(subset=str(tmp_path / "keys.csv")))
