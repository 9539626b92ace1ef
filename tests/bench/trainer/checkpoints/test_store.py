"""Manifests of checkpoints that somebody else has written."""

from __future__ import annotations

import msgspec
import pytest
import xxhash

from fuelrail.bench.trainer.checkpoints.store import (
    VERSION,
    DamagedError,
    Store,
)

FOLDER = "step-00000004.0123abcd"
MANIFEST = {
    "step": 4,
    "world_size": 1,
    "identity": {},
    "progress": {"loader": {}, "schedule": 4, "scaler": {}},
    "files": {},
}


@pytest.fixture
def place(tmp_path):
    folder = tmp_path / "run" / FOLDER
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(b"tensors")
    (folder / "0.distcp").write_bytes(b"weights")
    (tmp_path / "run" / "beside").write_bytes(b"secret")
    return tmp_path / "run"


def facts(data):
    return [len(data), xxhash.xxh3_64_hexdigest(data)]


def write(place, body):
    digest = xxhash.xxh3_64_hexdigest(f"{VERSION}\n".encode() + body)
    sealed = b'{"version":%d,"xxh3":"%s","manifest":%s}' % (
        VERSION,
        digest.encode(),
        body,
    )
    (place / FOLDER / "checkpoint.json").write_bytes(sealed)


FILES = {".metadata": facts(b"tensors"), "0.distcp": facts(b"weights")}


def test_a_whole_checkpoint_is_read(place):
    write(place, msgspec.json.encode({**MANIFEST, "files": FILES}))
    assert Store(str(place)).read(FOLDER).files.keys() == FILES.keys()


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (
            {"0.distcp": FILES["0.distcp"]},
            "checkpoint.json does not name .metadata",
        ),
        ({}, "checkpoint.json does not name .metadata"),
        (
            {**FILES, "../beside": facts(b"secret")},
            r"names '\.\./beside', which is no plain name",
        ),
        ({**FILES, "..": facts(b"")}, r"names '\.\.', which is no plain name"),
        ({**FILES, "": facts(b"")}, "names '', which is no plain name"),
        (
            {**FILES, "/etc/passwd": facts(b"")},
            "names '/etc/passwd', which is no plain name",
        ),
        (
            {**FILES, "a\nb/c": facts(b"")},
            r"names 'a\\nb/c', which is no plain name",
        ),
        (
            {**FILES, "nul\0": facts(b"")},
            r"names 'nul\\x00', which is no plain name",
        ),
        ({**FILES, "1.distcp": facts(b"")}, "1.distcp is missing"),
    ],
)
def test_files_have_plain_names_and_one_has_the_tensors(place, files, says):
    write(place, msgspec.json.encode({**MANIFEST, "files": files}))
    with pytest.raises(DamagedError, match=says):
        Store(str(place)).read(FOLDER)


@pytest.mark.parametrize(
    "body",
    [
        b'{"step": "\xff"}',
        b"[" * 100_000 + b"]" * 100_000,
        b'{"progress":{"loader":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}}",
        b'{"step": 1e999}',
        b'{"step": %d}' % 10**400,
        b"null",
    ],
)
def test_what_is_no_manifest_is_damaged(place, body):
    write(place, body)
    with pytest.raises(DamagedError, match="is not a manifest"):
        Store(str(place)).read(FOLDER)
    (place / FOLDER / "checkpoint.json").write_bytes(body)
    with pytest.raises(DamagedError, match="is not a manifest"):
        Store(str(place)).read(FOLDER)
