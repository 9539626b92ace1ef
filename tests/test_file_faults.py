"""Every file that Fuelrail reads as JSON or YAML, with wrong values: the message says in words what
is wrong, where, and what is allowed.

No message speaks of the library that decodes, or in its form.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import xxhash

from fuelrail import ImageAugment, OrderSpec, bench
from fuelrail.bench.studies.runs.replay import saved_states
from fuelrail.bench.trainer.checkpoints.store import (
    VERSION,
    DamagedError,
    Store,
)
from fuelrail.loaders.schedule.ledger import identity_of
from fuelrail.loaders.schedule.state import decode_state
from fuelrail.pipeline.channels.kinds import KINDS
from fuelrail.pipeline.channels.table import Channel, Law
from fuelrail.pipeline.errors import FuelrailError
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.format.layers import LAYERS
from fuelrail.pipeline.format.ledger import RunSetup, read_ledger
from fuelrail.pipeline.format.manifest import decode_manifest
from fuelrail.pipeline.sample.arrays import read_tensors
from fuelrail.pipeline.sample.schema import META, decode_meta, encode_meta
from fuelrail.pipeline.settings import load_yaml
from fuelrail.sharding.forget import ForgetReport
from fuelrail.sharding.forgotten import as_it_was
from fuelrail.sharding.output.folder import FolderOutput, read_json
from fuelrail.sharding.output.workspace import RunState
from fuelrail.sharding.planning.recipe import parse_splits
from fuelrail.sharding.sources.shared import foreign
from fuelrail.sharding.verify.catalogue import TAGS_FILE, read_tags
from support.batches import load
from support.hostile import small_dataset

FORBIDDEN = ("Expected ", "$.", "$[", "`", "msgspec", "[...]")
OWN_COMMAND = re.compile(r"`fuelrail [^`]*`")
WRONG = [["wrong"]]
FIRST = hashlib.sha256(b"fuelrail ledger 1").hexdigest()


class Place(NamedTuple):
    """A run and what it has left."""

    folder: Path
    ledger: Path
    cache: Path
    state: dict[str, Any]


class Owner(msgspec.Struct, forbid_unknown_fields=True):
    """A record of a source's table."""

    name: str
    ages: dict[str, int]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    folder = tmp_path_factory.mktemp("place")
    small_dataset(folder / "d")
    url = f"local://{folder / 'd'}"
    cache = folder / "cache"
    with load(
        url,
        2,
        image=ImageAugment(height=8, width=16),
        order=OrderSpec(seed=1),
        ledger=folder / "a.ledger",
        storage={"cache_dir": cache},
    ) as loader:
        list(loader)
        state = loader.state_dict()
    return Place(folder, folder / "a.ledger", cache, state)


def written(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def write_ledger(path: Path, *records: bytes) -> Path:
    digest = FIRST
    lines = []
    for record in records:
        digest = hashlib.sha256(digest.encode() + record).hexdigest()
        lines.append(b"%s %s\n" % (digest.encode(), record))
    return written(path, b"".join(lines))


def setup_of(place: Place) -> dict[str, Any]:
    (setup,) = [item for item in read_ledger(place.ledger).records if isinstance(item, RunSetup)]
    return msgspec.json.decode(msgspec.json.encode(setup))


class NotPlainError(Exception):
    """Bytes that no file of this kind can have: they stand in another file, which is whole."""


def plain(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotPlainError from error


def read_state(place: Place, data: bytes) -> None:
    identity = identity_of(read_ledger(place.ledger).records[0], place.ledger)
    decode_state(plain(data), identity)


def read_identity(place: Place, data: bytes) -> None:
    setup = msgspec.structs.replace(read_ledger(place.ledger).records[0], identity=plain(data))
    identity_of(setup, "FILE.json")


def read_setting(place: Place, data: bytes) -> None:
    """Replay a run whose ledger has these settings of the loader."""
    records = place.ledger.read_bytes().splitlines()
    setup = msgspec.json.encode({**setup_of(place), "loader": plain(data)})
    rest = [record[65:] for record in records[1:]]
    bench.replay(write_ledger(place.folder / "FILE.json", setup, *rest), 0)


def read_checkpoint(place: Place, data: bytes) -> None:
    xxh3 = xxhash.xxh3_64_hexdigest(f"{VERSION}\n".encode() + data)
    sealed = b'{"version":%d,"xxh3":"%s","manifest":%s}' % (
        VERSION,
        xxh3.encode(),
        data,
    )
    name = "step-00000001.0123456789abcdef"
    written(place.folder / "checkpoints" / name / "checkpoint.json", sealed)
    Store(str(place.folder / "checkpoints")).read(name)


def read_receipt(place: Place, data: bytes) -> None:
    as_it_was(
        place.folder / "d",
        "0" * 64,
        [written(place.folder / "FILE.json", data)],
    )


def read_cache(place: Place, data: bytes) -> None:
    (file,) = (place.cache / "spans").glob("*/cache.json")
    before = file.read_bytes()
    file.write_bytes(data)
    try:
        with load(
            f"local://{place.folder / 'd'}",
            2,
            image=ImageAugment(height=8, width=16),
            storage={"cache_dir": place.cache},
        ) as loader:
            list(loader)
    finally:
        file.write_bytes(before)


def read_header(_: Place, data: bytes) -> None:
    read_tensors(len(data).to_bytes(8, "little") + data)


def read_texts(_: Place, data: bytes) -> None:
    channel = Channel(name="captions", kind="texts", field="captions.json", law=Law("fixed"))
    KINDS["texts"].decode(data, channel)


def read_work(place: Place, data: bytes) -> None:
    written(place.folder / "out" / ".fuelrail" / "FILE.json", data)
    read_json(
        FolderOutput(str(place.folder / "out")),
        ".fuelrail/FILE.json",
        RunState,
        "remove it",
    )


def read_yaml_settings(place: Place, data: bytes) -> None:
    load_yaml(written(place.folder / "FILE.json", data), OrderSpec)


def read_record(place: Place, data: bytes) -> None:
    read_ledger(write_ledger(place.folder / "FILE.json", data))


def read_tag_list(place: Place, data: bytes) -> None:
    written(place.folder / "tagged" / TAGS_FILE, data)
    read_tags(place.folder / "tagged")


def manifest_value(place: Place) -> dict[str, Any]:
    return json.loads((place.folder / "d" / "dataset.json").read_bytes())


def layer_value(place: Place) -> dict[str, Any]:
    base = {
        "fingerprint": "0" * 64,
        "name": "d",
        "num_samples": 1,
        "sensors": [],
    }
    value = {**manifest_value(place), "format": "fuelrail-layer", "base": base}
    return {**value, "view": {"kind": "fixed"}}


def meta_value(place: Place) -> dict[str, Any]:
    dataset = open_dataset(place.folder / "d")
    return json.loads(encode_meta(dataset.read(0, META.partition(".")[0])["meta"]))


def checkpoint_value(_: Place) -> dict[str, Any]:
    progress = {"loader": {}, "schedule": 0, "scaler": {}}
    return {
        "step": 1,
        "world_size": 1,
        "identity": {},
        "progress": progress,
        "files": {},
    }


def receipt_value(_: Place) -> dict[str, Any]:
    report = ForgetReport(names=[], samples=[], folders=[], caches=[], keeps_dictionary=False)
    return json.loads(msgspec.json.encode(report))


def cache_value(place: Place) -> dict[str, Any]:
    (file,) = (place.cache / "spans").glob("*/cache.json")
    return json.loads(file.read_bytes())


def work_value(_: Place) -> dict[str, Any]:
    return {"recipe": {}, "num_samples": 1}


def header_value(_: Place) -> dict[str, Any]:
    return {"a": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}


Read = Callable[[Place, bytes], object]
FILES: dict[str, tuple[Read, Callable[[Place], Any], str]] = {
    "manifest": (
        lambda _, data: decode_manifest(data, "FILE.json"),
        manifest_value,
        "FILE.json",
    ),
    "layer manifest": (
        lambda _, data: decode_manifest(data, "FILE.json", LAYERS),
        layer_value,
        "FILE.json",
    ),
    "ledger record": (read_record, setup_of, "FILE.json"),
    "identity": (
        read_identity,
        lambda place: setup_of(place)["identity"],
        "FILE.json",
    ),
    "settings of a run": (
        read_setting,
        lambda place: setup_of(place)["loader"],
        "FILE.json",
    ),
    "loader state": (
        read_state,
        lambda place: dict(place.state),
        "loader state",
    ),
    "checkpoint": (read_checkpoint, checkpoint_value, "checkpoint.json"),
    "states": (
        lambda place, data: saved_states(written(place.folder / "FILE.json", data)),
        lambda _: {},
        "FILE.json",
    ),
    "sample record": (lambda _, data: decode_meta(data), meta_value, ""),
    "tensors": (read_header, header_value, "safetensors header"),
    "texts": (read_texts, lambda _: ["a"], "captions"),
    "tags": (read_tag_list, lambda _: ["a"], TAGS_FILE),
    "working file": (read_work, work_value, "FILE.json"),
    "receipt": (read_receipt, receipt_value, "FILE.json"),
    "cache": (read_cache, cache_value, "cache_dir"),
    "splits": (
        lambda place, data: parse_splits(str(written(place.folder / "FILE.json", data))),
        lambda _: {"train": ["clip"]},
        "FILE.json",
    ),
    "settings": (
        read_yaml_settings,
        lambda _: {"seed": 1, "kind": "shuffled"},
        "FILE.json",
    ),
    "table of a source": (
        lambda _, data: foreign.read_json(data, "table 'FILE.json'", Owner),
        lambda _: {"name": "a", "ages": {"cat": 1}},
        "FILE.json",
    ),
}
"""How a kind of file is read, what is right in it, and what the message calls it."""


def wrong_values(good: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and a copy of a value with one part of another type, or without it, or more."""
    yield path, WRONG
    if isinstance(good, dict):
        yield path, {**good, "colour": 3}
        for name, value in good.items():
            inner_path = f"{path}.{name}".lstrip(".")
            yield (
                f"{inner_path} left out",
                {key: good[key] for key in good if key != name},
            )
            for place, wrong in wrong_values(value, inner_path):
                yield place, {**good, name: wrong}
    elif isinstance(good, list) and good:
        for place, wrong in wrong_values(good[0], path):
            yield place, [wrong, *good[1:]]
    elif isinstance(good, int | float) and not isinstance(good, bool):
        yield path, -(2**70)
    elif isinstance(good, str):
        yield path, 12.5


@pytest.mark.parametrize("name", FILES)
def test_what_is_wrong_in_a_file_is_said_in_words(name, place, capfd) -> None:
    read, value_of, called = FILES[name]
    good = value_of(place)
    num_named = 0
    payloads = [(path, msgspec.json.encode(value)) for path, value in wrong_values(good)]
    payloads += [("", data) for data in (b"3", b"null", b'{"a', b'"\xff"', b"[" * 100_000)]
    for path, data in payloads:
        try:
            read(place, data)
        except NotPlainError:
            continue
        except (FuelrailError, DamagedError) as error:
            message = OWN_COMMAND.sub("", str(error))
        else:
            continue
        assert not [word for word in FORBIDDEN if word in message], (
            path,
            message,
        )
        if "must be" in message or "is missing" in message or "is unknown" in message:
            assert called in message, (path, message)
        field = path.removesuffix(" left out").rpartition(".")[2]
        if "must be" in message and "got" in message:
            assert field in message, (path, message)
            num_named += 1
        elif "' is missing" in message or "' is unknown" in message:
            assert f"'{field if path.endswith(' left out') else 'colour'}'" in message
            num_named += 1
    assert num_named >= 1
