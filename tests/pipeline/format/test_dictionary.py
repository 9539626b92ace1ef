"""The zstd dictionary of small members: trained alike every time, named by its id, checked against its digest."""

from __future__ import annotations

import json
import pickle
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuelrail.loaders.storage.reader import SampleReader
from fuelrail.pipeline.errors import CodecError, ConfigError, ManifestError
from fuelrail.pipeline.format import codecs
from fuelrail.pipeline.format.codecs import (
    DICTIONARY_FILE,
    MAX_DICTIONARY_BYTES,
    Dictionary,
    train_dictionary,
)
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.format.manifest import encode_manifest, load_manifest


def samples(seed):
    rng = random.Random(seed)
    return [
        json.dumps(
            {
                "schema": "x",
                "key": f"clip-{i:06d}",
                "time": rng.getrandbits(60),
                "token": f"{i:032x}",
            }
        ).encode()
        for i in range(600)
    ]


@pytest.fixture(scope="module")
def dictionary():
    return train_dictionary(samples(0), 4096, 3)


def test_training_is_deterministic(dictionary):
    assert train_dictionary(samples(0), 4096, 3).data == dictionary.data
    assert len(dictionary.data) <= 4096
    assert dictionary.id > 0


def test_it_pays_for_small_members(dictionary):
    raw = samples(1)[5]
    stored = codecs.encode("zstd-dict", raw, dictionary=dictionary)
    assert len(stored) < 0.7 * len(codecs.encode("zstd", raw))


@given(raw=st.binary(max_size=5000), level=st.integers(1, 19))
@settings(max_examples=30, deadline=None)
def test_members_round_trip(dictionary, raw, level):
    stored = codecs.encode("zstd-dict", raw, level=level, dictionary=dictionary)
    unpickled = pickle.loads(pickle.dumps(dictionary))
    for size in (len(raw), None):
        assert codecs.decode("zstd-dict", stored, size, dictionary=unpickled) == raw


def test_names():
    assert codecs.stored_name("meta.json", "zstd-dict") == "meta.json.dict.zst"
    assert codecs.split_name("meta.json.dict.zst") == ("meta.json", "zstd-dict")
    with pytest.raises(ConfigError, match="reads as another codec's"):
        codecs.stored_name("x_a.dict", "zstd")


def test_another_dictionary_is_recognised_by_its_id(dictionary):
    second_dictionary = train_dictionary(samples(2), 4096, 3)
    stored = codecs.encode("zstd-dict", b"x" * 100, dictionary=second_dictionary)
    with pytest.raises(
        CodecError,
        match=rf"needs the dictionary {second_dictionary.id}, zstd\.dict is {dictionary.id}",
    ):
        codecs.decode("zstd-dict", stored, 100, dictionary=dictionary)
    with pytest.raises(CodecError, match="stored with a dictionary, and the dataset has none"):
        codecs.decode("zstd-dict", stored, 100)
    with pytest.raises(CodecError, match="needs the dictionary 0,"):
        codecs.decode(
            "zstd-dict",
            codecs.encode("zstd", b"x" * 100),
            100,
            dictionary=dictionary,
        )
    with pytest.raises(CodecError, match="damaged zstd frame"):
        codecs.decode("zstd", stored, 100)
    with pytest.raises(ConfigError, match="codec 'zstd-dict' needs a dictionary"):
        codecs.encode("zstd-dict", b"")


@pytest.mark.parametrize("data", [b"", b"abc", bytes(5000), bytes(MAX_DICTIONARY_BYTES + 1)])
def test_other_bytes_are_no_dictionary(data):
    with pytest.raises(
        CodecError,
        match=r"the dictionary (is not a zstd dictionary|has 1048577 bytes, over the cap)",
    ):
        Dictionary(data)


def test_sizes_and_samples_that_do_not_do():
    with pytest.raises(
        ConfigError,
        match="a dictionary of 100 bytes is not allowed: 1024 to 1048576",
    ):
        train_dictionary(samples(0), 100, 3)
    with pytest.raises(
        ConfigError,
        match="2 small members of 6 bytes in all are too little to train",
    ):
        train_dictionary([b"abc", b"abd"], 4096, 3)


class TestDataset:
    @pytest.fixture
    def root(self, tiny_dataset, tmp_path, dictionary):
        return tiny_dataset({"train": (3,)}, dictionary=dictionary, copy_to=tmp_path / "tiny").root

    def test_members_are_read(self, root, tiny_dataset, dictionary):
        raw = tiny_dataset({"train": (3,)}).raw
        dataset = open_dataset(root)
        assert dataset.dictionary.id == dictionary.id
        assert [m.codec for m in dataset.index.row(0).members[:2]] == [
            "zstd-dict",
            "zstd-dict",
        ]
        sample = SampleReader(dataset).sample(1)
        assert sample.key in raw
        assert sample.images["cam_front"] == raw[sample.key]["cam_front.jpg"]

    def test_a_missing_or_another_file(self, root):
        file = root / DICTIONARY_FILE
        data = file.read_bytes()
        file.write_bytes(data[:-1] + b"?")
        with pytest.raises(
            ManifestError,
            match=r"zstd\.dict' is not the file that dataset\.json describes .* --repair",
        ):
            open_dataset(root)
        file.unlink()
        with pytest.raises(ManifestError, match=r"zstd\.dict' cannot be read: No such file"):
            open_dataset(root)

    def test_one_that_the_manifest_does_not_name(self, root):
        import msgspec

        manifest = load_manifest(root)
        files = tuple(entry for entry in manifest.files if entry.name != DICTIONARY_FILE)
        (root / "dataset.json").write_bytes(
            encode_manifest(msgspec.structs.replace(manifest, files=files))
        )
        with pytest.raises(
            ManifestError,
            match=r"need zstd\.dict, which the manifest does not name",
        ):
            open_dataset(root)
