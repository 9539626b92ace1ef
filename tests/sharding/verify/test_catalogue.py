"""``fuelrail log``, ``diff`` and ``tag``: lineage, differences by key and digest, names beside a dataset."""

from __future__ import annotations

import json

import pytest

import fuelrail as fr
from fuelrail.__main__ import main
from fuelrail.pipeline.errors import (
    ConfigError,
    DatasetError,
    DatasetNotReadyError,
)
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.format.layers import LayerView
from fuelrail.sharding.verify.catalogue import read_tags
from support.datasets import build_dataset
from support.edits import rewrite
from support.fault_server import FaultServer, Misbehaviour, Request
from support.layers import TABLE, values_of, write_layer


@pytest.fixture(scope="module")
def old(dataroot, sharded):
    return sharded(dataroot("a3 b3"), name="drive")


@pytest.fixture(scope="module")
def appended(old, dataroot, sharded, tmp_path_factory):
    new = sharded(dataroot("c2"), name="more")
    folder = tmp_path_factory.mktemp("catalogue") / "both"
    fr.reshard([old, new], folder, append=True)
    return new, folder


@pytest.mark.costly
def test_the_log_names_parents_and_their_parents(old, appended, tmp_path) -> None:
    new, merged = appended
    fr.reshard(merged, tmp_path / "again", seed=3)
    log = fr.dataset_log(tmp_path / "again")
    first, second, third = (open_dataset(place).manifest for place in (merged, old, new))
    assert log.parents == (first.fingerprint,)
    assert [
        (
            ancestor.fingerprint,
            ancestor.name,
            ancestor.num_samples,
            ancestor.made_by,
        )
        for ancestor in log.ancestors
    ] == [
        (first.fingerprint, first.name, 8, "append"),
        (second.fingerprint, "drive", 6, "nuscenes"),
        (third.fingerprint, "more", 2, "nuscenes"),
    ]
    assert log.ancestors[0].parents == (second.fingerprint, third.fingerprint)
    text = log.as_text()
    assert f"parent       {first.fingerprint[:16]}" in text
    assert f"before       {third.fingerprint[:16]}  more, 2 samples, made by nuscenes" in text
    assert json.loads(log.as_json())["parents"] == [first.fingerprint]
    assert fr.dataset_log(old).ancestors == ()


def test_samples_and_clips_that_only_one_has(old, appended) -> None:
    _, merged = appended
    diff = fr.dataset_diff(old, merged)
    assert not diff.is_same
    assert (
        diff.samples_only_in_a.count,
        diff.samples_only_in_b.count,
        diff.samples_changed.count,
    ) == (0, 2, 0)
    keys = set(open_dataset(merged).index.strings("key")) - set(
        open_dataset(old).index.strings("key")
    )
    assert set(diff.samples_only_in_b.first) == keys
    assert (
        diff.num_samples_equal,
        diff.clips_only_in_b.count,
        diff.clips_only_in_a.count,
    ) == (
        6,
        1,
        0,
    )
    assert diff.options["recipe.source"] == ("nuscenes", "append")
    assert (diff.channels, diff.members) == ({}, {})
    assert "samples only in b: 2 (" in diff.as_text()


def test_the_same_data_by_another_order_has_the_same_samples(old, tmp_path) -> None:
    fr.reshard(old, tmp_path / "again", seed=99)
    diff = fr.dataset_diff(old, tmp_path / "again")
    assert (
        diff.num_samples_equal,
        diff.samples_changed.count,
        diff.is_same,
    ) == (6, 0, False)
    assert diff.options["seed"] == (open_dataset(old).manifest.seed, 99)
    same = fr.dataset_diff(old, old)
    assert (same.is_same, same.options, same.num_samples_equal) == (True, {}, 6)


def test_changed_samples_channels_and_members(tmp_path) -> None:
    build_dataset(tmp_path / "a", {"train": (4,)}, size=(32, 24))
    build_dataset(tmp_path / "b", {"train": (4,)}, size=(32, 24))

    def add_a_member(members: dict[str, bytes]) -> None:
        members["x_note.txt"] = b"rain"

    rewrite(tmp_path / "b", 2, add_a_member)
    diff = fr.dataset_diff(tmp_path / "a", tmp_path / "b")
    assert diff.samples_changed.first == ("clip-0000-000002",)
    assert (diff.num_samples_equal, diff.members) == (
        3,
        {"x_note.txt": (None, True)},
    )
    build_dataset(tmp_path / "c", {"train": (4,)}, size=(64, 48))
    assert fr.dataset_diff(tmp_path / "a", tmp_path / "c").channels["cam_front"] == (
        {"sizes": ((32, 24),)},
        {"sizes": ((64, 48),)},
    )


def test_tags_are_beside_the_dataset(old, tmp_path, capsys) -> None:
    build_dataset(tmp_path / "d", {"train": (1,)}, size=(32, 24))
    before = {path.name: path.read_bytes() for path in (tmp_path / "d").iterdir()}
    assert fr.tag(tmp_path / "d", add=("v1", "baseline")) == ("baseline", "v1")
    assert main(["tag", str(tmp_path / "d"), "--add", "night.2", "--remove", "v1"]) == 0
    assert capsys.readouterr().out == "baseline\nnight.2\n"
    assert (
        read_tags(tmp_path / "d") == fr.dataset_log(tmp_path / "d").tags == ("baseline", "night.2")
    )
    after = {path.name: path.read_bytes() for path in (tmp_path / "d").iterdir()}
    assert {name: data for name, data in after.items() if name != "tags.json"} == before
    assert fr.verify(tmp_path / "d").faults == []
    for wrong in ("", "A", "a b", "-a", "a" * 101, "a/b"):
        with pytest.raises(ConfigError, match="is not allowed"):
            fr.tag(tmp_path / "d", add=(wrong,))
    with pytest.raises(ConfigError, match=r"has no tag 'v1'; it has: baseline, night\.2"):
        fr.tag(tmp_path / "d", remove=("v1",))
    with pytest.raises(
        ConfigError,
        match="tag 'q' is to be added and to be removed: give it once",
    ):
        fr.tag(tmp_path / "d", add=("q",), remove=("q",))
    with pytest.raises(ConfigError, match="in folders only"):
        fr.tag("s3://bucket/d", add=("a",))
    with pytest.raises(DatasetNotReadyError):
        fr.tag(tmp_path / "nothing", add=("a",))
    assert main(["tag", str(tmp_path / "nothing")]) == 2


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"\xff", b"[" * 60_000])
def test_a_damaged_file_of_tags_is_named(tmp_path, data) -> None:
    build_dataset(tmp_path / "d", {"train": (1,)}, size=(32, 24))
    (tmp_path / "d" / "tags.json").write_bytes(data)
    with pytest.raises(DatasetError, match=r"tags\.json' is not a list of tags"):
        read_tags(tmp_path / "d")


@pytest.mark.network
def test_tags_at_a_url_that_storage_does_not_give(tmp_path) -> None:
    pytest.importorskip("aiohttp")
    build_dataset(tmp_path / "d", {"train": (1,)}, size=(32, 24))
    for status in (403, 500):

        def answer(request: Request, status: int = status) -> Misbehaviour:
            return Misbehaviour(status=status if request.name == "tags.json" else None)

        with FaultServer(tmp_path / "d", answer) as server:
            if status == 403:  # what a store that refuses listings says of what is not there
                assert fr.dataset_log(server.url).tags == ()
            else:
                with pytest.raises(
                    DatasetError,
                    match=r"/tags\.json' cannot be read \(ClientResponseError: 500",
                ):
                    fr.dataset_log(server.url)


def test_commands(old, appended, capsys) -> None:
    assert main(["log", str(old)]) == 0
    assert "drive" in capsys.readouterr().out
    assert main(["diff", str(old), str(appended[1]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["samples_only_in_b"]["count"] == 2
    assert main(["diff", str(old), "nothing"]) == 2


def test_layers_are_compared_too(tmp_path) -> None:
    build_dataset(tmp_path / "base", {"train": (4,)}, size=(32, 24))
    old = write_layer(tmp_path / "base", tmp_path / "old")
    new = tmp_path / "new"
    table = [
        *(
            {**channel, "dtype": "float32"} if channel["name"] == "logits" else channel
            for channel in TABLE[:2]
        )
    ]
    with fr.LayerWriter(
        tmp_path / "base",
        new,
        channels=table,
        view=LayerView("per_view", 1, {}),
    ) as writer:
        for row in range(3):
            values = {name: value for name, value in values_of(row).items() if name != "caption"}
            writer.write(row, {**values, "logits": values["logits"].astype("float32")})
    writer.finish(partial=True)
    assert fr.tag(old, add=("v1",)) == fr.dataset_log(old).tags == ("v1",)
    diff = fr.dataset_diff(old, new)
    assert diff.samples_only_in_a.first == ("clip-0000-000003",)
    assert [channel["dtype"] for channel in diff.channels["logits"]] == [
        "float16",
        "float32",
    ] and "shape" not in diff.channels["logits"][0]
    assert diff.channels["caption"][0]["kind"] == "text" and diff.channels["caption"][1] is None
    assert (
        diff.options["view"] == ({}, {"kind": "per_view", "epoch": 1, "settings": {}})
        and "base" not in diff.options
    )
    assert "channel logits: a" in diff.as_text()
    assert fr.dataset_diff(old, old).is_same
    assert fr.dataset_diff(tmp_path / "base", old).options["format"] == (
        "fuelrail-dataset",
        "fuelrail-layer",
    )
    log = fr.dataset_log(new)
    assert log.num_samples == 3 and f"layer of     {log.base}" in log.as_text()
    assert log.base == fr.dataset_log(tmp_path / "base").fingerprint
