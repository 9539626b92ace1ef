"""Kinds of sources: those of Fuelrail, plug-ins, their options as text."""

from __future__ import annotations

from pathlib import Path

import pytest

import fuelrail as fr
import fuelrail.sharding.sources
from fuelrail.__main__ import main
from fuelrail.pipeline.errors import ConfigError, SourceError
from fuelrail.sharding.run import scan_source
from fuelrail.sharding.sources.registry import (
    CONTENTS,
    SourceSpec,
    make_source,
    options_of_texts,
    parse_source,
)
from support.neutral_source import install_plugin, write_neutral
from support.pages import ROOT
from support.source_world import make_world


@pytest.fixture
def neutral(tmp_path, monkeypatch):
    install_plugin(tmp_path / "site", "neutral", "support.neutral_source:Neutral")
    install_plugin(tmp_path / "site", "broken", "support.nowhere:Nothing")
    monkeypatch.syspath_prepend(tmp_path / "site")


@pytest.mark.usefixtures("neutral")
def test_a_plugin_is_listed_with_its_options(capsys):
    kinds = {kind.kind: kind for kind in fr.sources()}
    assert {"nuscenes", "fuelrail", "neutral", "broken"} <= kinds.keys()
    assert kinds["neutral"].package == "neutral-source 1.0"
    options = {option.name: option for option in kinds["neutral"].options}
    assert options["images"].type == "file or made or range"
    assert (options["points"].type, options["points"].default) == (
        "true or false",
        "true",
    )
    assert options["classes"].description.startswith("classes of boxes")
    assert "nowhere" in kinds["broken"].summary
    assert main(["sources", "neutral"]) == 0
    assert "missing_camera (drop or error or mask, default error)" in capsys.readouterr().out
    with pytest.raises(
        ConfigError,
        match=r"'broken' of package 'broken-source' cannot be imported",
    ):
        make_source(SourceSpec("broken", "/x", {}))


def test_one_kind_is_printed_with_what_it_reads_and_all_kinds_in_a_line_each(capsys):
    assert main(["sources", "kitti_object"]) == 0
    printed = capsys.readouterr().out
    for words in ("`DontCare` gives no boxes.", "  times: none\n", "  right (true or false"):
        assert words in printed
    assert main(["sources"]) == 0
    listed = capsys.readouterr().out
    assert "\nkitti_object (fuelrail): KITTI's object benchmark: single frames" in listed
    assert "DontCare" not in listed
    assert "true or false" not in listed


def test_each_kind_says_in_markdown_what_it_reads():
    for kind in fr.sources():
        if kind.package == "fuelrail" and kind.kind != "fuelrail":
            assert kind.notes, kind.kind
            assert "``" not in kind.notes, kind.kind


def test_a_plug_in_of_the_documents_that_is_not_installed_is_named_with_its_package():
    """Where it is installed, the kind is known: `test_pandaset_plugin.py` does that."""
    page = (ROOT / "docs" / "sharding.md").read_text(encoding="utf-8")
    install = "pip install ./configs/sources/pandaset"
    assert (
        install in page and (ROOT / "configs" / "sources" / "pandaset" / "pyproject.toml").is_file()
    )
    with pytest.raises(
        ConfigError,
        match=rf"'pandaset', a plug-in that is not installed: `{install}`.*fuelrail-pandaset",
    ):
        parse_source("pandaset:/data/pandaset", {})


@pytest.mark.usefixtures("neutral")
def test_an_unknown_kind_names_the_known_ones():
    with pytest.raises(
        ConfigError,
        match=r"unknown kind 'nuscene'; known kinds: .*neutral.*did you mean 'nuscenes'",
    ):
        parse_source("nuscene:/data", {})
    assert main(["sources", "nuscene"]) == 2
    assert parse_source("nuscenes:C:/x", {"a": 1}) == SourceSpec("nuscenes", "C:/x", {"a": 1})
    for text in ("/data", "nuscenes", "nuscenes:", ":x"):
        with pytest.raises(ConfigError, match=r"KIND:PATH|unknown kind"):
            parse_source(text, {})


@pytest.mark.parametrize(
    ("kind", "file"),
    [
        ("fuelrail", "dataset.json"),
        ("nuscenes", "v1.0-mini/sample.json"),
        ("t4", "one/0/annotation/sample.json"),
        ("argoverse2", "val/1a/city_SE3_egovehicle.feather"),
        ("kitti", "2011_09_26/2011_09_26_drive_0001_sync/oxts/timestamps.txt"),
        ("kitti_object", "training/image_2/000000.png"),
        ("waymo", "segment-1.tfrecord"),
        ("waymo_v2", "validation/camera_image/1.parquet"),
        ("rosbag2", "bag/bag_0.db3"),
        ("mcap", "drive.mcap"),
        ("webdataset", "train-000000.tar"),
    ],
)
def test_a_source_without_its_kind_is_known_by_its_content(tmp_path, kind, file):
    place = tmp_path / file
    place.parent.mkdir(parents=True, exist_ok=True)
    place.touch()
    with pytest.raises(
        ConfigError,
        match=rf"must be KIND:PATH; its content looks like {kind}:{tmp_path}; known",
    ):
        parse_source(str(tmp_path), {})


def test_a_source_without_its_kind_of_which_nothing_is_known(tmp_path):
    (tmp_path / "drive.mcap").touch()
    with pytest.raises(ConfigError, match=rf"looks like mcap:{tmp_path}/drive\.mcap;"):
        parse_source(f"{tmp_path}/drive.mcap", {})
    (tmp_path / "drive.mcap").unlink()
    with pytest.raises(
        ConfigError,
        match="must be KIND:PATH, such as nuscenes:/data/nuscenes; known",
    ):
        parse_source(str(tmp_path), {})
    with pytest.raises(
        ConfigError,
        match="must be KIND:PATH, such as nuscenes:s3://bucket/data; known",
    ):
        parse_source("s3://bucket/data", {})


def test_what_is_to_be_installed_is_named(monkeypatch, tmp_path):
    from fuelrail.sharding.sources.nuscenes.source import NuScenesSource

    monkeypatch.setattr(NuScenesSource, "requires", {"no_such_module": "fuelrail[extra]"})
    assert fr.sources("nuscenes")[0].missing == ["fuelrail[extra]"]
    assert "pip install -e '.[extra]'" in fr.sources("nuscenes")[0].as_text()
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[extra\]' in a checkout"):
        make_source(SourceSpec("nuscenes", str(tmp_path), {}))


def test_options_as_text():
    texts = [
        "sweeps=3",
        "points=true",
        "version=1.0",
        "classes={car: auto, truck: null}",
    ]
    assert options_of_texts("nuscenes", texts) == {
        "sweeps": 3,
        "points": True,
        "version": "1.0",
        "classes": {"car": "auto", "truck": None},
    }


DOUBLED = ", ".join(f"&a{number} [*a{number - 1}, *a{number - 1}]" for number in range(1, 30))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("sweeps", "must be KEY=VALUE"),
        ("sweep=1", r"no option 'sweep'; allowed: .*did you mean 'sweeps'"),
        ("sweeps=many", r"-o sweeps=many: it must be a whole number, not text"),
        (
            "missing_camera=hold",
            "hold: 'hold' is not allowed; allowed are drop, error, mask",
        ),
        ("classes={car", "not YAML"),
        (
            "classes={car: {<<: {a: b}}}",
            "a merge key, <<: write its entries out",
        ),
        ("classes={a: !!int x}", "not YAML: invalid literal"),
        ("cameras=" + "[" * 200 + "]" * 200, "not YAML: it takes 65 levels"),
        (f"cameras=[&a0 [b, b], {DOUBLED}]", r"not YAML: it takes .* values"),
    ],
    ids=[
        "no value",
        "unknown",
        "no number",
        "no answer",
        "cut",
        "merged",
        "no int",
        "deep",
        "many",
    ],
)
def test_bad_options_are_named(text, match):
    with pytest.raises(ConfigError, match=match):
        options_of_texts("nuscenes", [text])
    with pytest.raises(ConfigError, match="given twice"):
        options_of_texts("nuscenes", ["sweeps=1", "sweeps=2"])


def test_nothing_is_unpickled():
    """Sources hold the files of strangers: none takes pickles but OpenScene, whose reader calls nothing of theirs."""
    root = Path(fuelrail.sharding.sources.__file__).parent
    lines = {
        path.relative_to(root).as_posix(): line.strip()
        for path in root.rglob("*.py")
        if path.parent.name != "openscene"
        for line in path.read_text().splitlines()
        if "pickle" in line
        and "allow_pickle=False" not in line
        and "nothing is unpickled" not in line
    }
    assert not lines
    loads = [path for path in root.rglob("*.py") if "np.load(" in path.read_text()]
    assert all("allow_pickle=False" in path.read_text() for path in loads)


PLUGIN = """
from support.neutral_source import Neutral


class Fails(Neutral):
    kind = "fails"

    def clips(self):
        return {}["no such entry"]


class FailsLater(Neutral):
    kind = "fails_later"

    def points(self, ref):
        raise ZeroDivisionError("in points")
"""


def test_an_exception_of_a_plugin_names_its_kind_and_package(tmp_path, monkeypatch):
    (tmp_path / "site").mkdir()
    (tmp_path / "site/failing_plugin.py").write_text(PLUGIN)
    (tmp_path / "site/bad_plugin.py").write_text("1 / 0")
    install_plugin(tmp_path / "site", "fails", "failing_plugin:Fails")
    install_plugin(tmp_path / "site", "fails_later", "failing_plugin:FailsLater")
    install_plugin(tmp_path / "site", "fails_first", "bad_plugin:Bad")
    monkeypatch.syspath_prepend(tmp_path / "site")
    root = tmp_path / "source"
    root.mkdir()
    write_neutral(make_world(1, 3), root)
    with pytest.raises(KeyError) as caught:
        fr.check_source(f"fails:{root}")
    assert "the source kind 'fails' of package 'fails-source 1.0'" in caught.value.__notes__[0]
    with pytest.raises(ZeroDivisionError) as later:
        fr.shard(
            f"fails_later:{root}",
            tmp_path / "out",
            workers=1,
            splits={"train": 1.0},
        )
    assert (
        "the source kind 'fails_later' of package 'fails_later-source 1.0'"
        in later.value.__notes__[0]
    )
    with pytest.raises(
        ConfigError,
        match=r"'fails_first' of package 'fails_first-source' cannot be .*ZeroDivision",
    ):
        fr.check_source(f"fails_first:{root}")


@pytest.mark.parametrize("kind", ["argoverse2", "kitti", "waymo"])
def test_a_folder_of_another_kind_says_what_was_looked_for(tmp_path, kind):
    (tmp_path / "something.bin").touch()
    with pytest.raises(SourceError) as caught:
        scan_source(SourceSpec(kind, str(tmp_path), {}))
    assert CONTENTS[kind][0] in str(caught.value)
    assert "something.bin" in str(caught.value)
