"""Texts of driving sets as a layer: DriveLM's JSON and others, joined by nuScenes' tokens, compared one by one."""

from __future__ import annotations

import importlib
import json
import os
import random
from pathlib import Path

import pytest

import fuelrail as fr
from support.nuscenes_tables import build_nuscenes

FOLDER = Path(__file__).parents[3] / "configs" / "sources" / "texts"
pytestmark = pytest.mark.costly
TASKS = ("perception", "prediction", "planning", "behavior")


@pytest.fixture(scope="module")
def texts():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("fuelrail_texts")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A dataset of small nuScenes tables; the tables' own samples."""
    root = tmp_path_factory.mktemp("nuscenes")
    nuscenes = build_nuscenes(root / "tables", {"scene-0001": 6, "scene-0002": 5, "scene-0003": 5})
    fr.shard(
        f"nuscenes:{root / 'tables'}",
        root / "out",
        options={"version": "v1.0-mini"},
        workers=1,
    )
    return root / "out", nuscenes.tables["sample"]


def questions(rng, token):
    """The questions of a key frame, as DriveLM has them: most fields are null."""
    answers = {}
    for task in TASKS:
        answers[task] = [
            {
                "Q": f"{task} {number} of {token}?",
                "A": f"Straße {rng.random()}",
                "C": None,
                "con_up": None,
                "con_down": None,
                "cluster": None,
                "layer": None,
            }
            for number in range(rng.randrange(4))
        ]
    return answers


def drivelm(samples, strange=()):
    """DriveLM's JSON over every second sample, and over tokens of other datasets."""
    rng = random.Random(7)
    scenes = {}
    chosen = [(sample["scene_token"], sample["token"]) for sample in samples[::2]] + [
        ("elsewhere", name) for name in strange
    ]
    for scene, token in chosen:
        frames = scenes.setdefault(
            scene,
            {"scene_description": f"a drive in {scene}", "key_frames": {}},
        )
        objects = {
            "<c1,CAM_FRONT,258.3,442.5>": {
                "Category": "Vehicle",
                "2d_bbox": [1.5, 2, 3, 4],
            }
        }
        paths = {"CAM_FRONT": "../nuscenes/samples/CAM_FRONT/x.jpg"}
        frames["key_frames"][token] = {
            "key_object_infos": objects,
            "QA": questions(rng, token),
            "image_paths": paths,
        }
    return scenes


def load_texts(base, layer, **options):
    """What the loader gives for each sample, by nuScenes' token."""
    texts_by_token = {}
    image = {"height": 16, "width": 32}
    with fr.DataLoader(
        base,
        2,
        shuffle=False,
        transforms={"image": image},
        layers={"qa": layer},
        **options,
    ) as loader:
        for batch in loader:
            names = [name for name in batch if name.startswith("qa.")]
            for position, token in enumerate(batch["sample_token"]):
                texts_by_token[token] = {
                    name.removeprefix("qa."): batch[name][position] for name in names
                }
    return texts_by_token


def expected_questions(scenes, samples):
    """The questions and answers of each sample of the tables, by a plain walk through the JSON."""
    questions = {sample["token"]: [] for sample in samples}
    for scene in scenes.values():
        for token, frame in scene["key_frames"].items():
            if token in questions:
                questions[token] = [
                    (qa["Q"], qa["A"], task) for task, all_ in frame["QA"].items() for qa in all_
                ]
    return questions


def check(texts_by_token, expected):
    for token, entries in expected.items():
        sample = texts_by_token[token]
        assert (
            list(
                zip(
                    sample["question"],
                    sample["answer"],
                    sample["task"],
                    strict=True,
                )
            )
            == entries
        )
        assert int(sample["num_entries"]) == len(entries)


def test_questions_and_answers_of_drivelm_are_with_their_samples(texts, base, tmp_path, capsys):
    dataset, samples = base
    drive_scenes = drivelm(samples, strange=["f" * 32])
    (tmp_path / "v1_1.json").write_text(json.dumps(drive_scenes, indent=1))
    texts.main(
        [
            str(dataset),
            str(tmp_path / "qa"),
            str(tmp_path / "v1_1.json"),
            "--count",
            "builtins:len",
        ]
    )
    printed = capsys.readouterr().out
    assert "1 names of no sample" in printed and "no sample: ffff" in printed
    assert not fr.verify(tmp_path / "qa", deep=True).faults
    expected = expected_questions(drive_scenes, samples)
    texts_by_token = load_texts(dataset, tmp_path / "qa")
    assert (
        texts_by_token.keys() == expected.keys()
        and any(expected.values())
        and not all(expected.values())
    )
    check(texts_by_token, expected)
    scenes = {sample["token"]: sample["scene_token"] for sample in samples}
    for token, record in texts_by_token.items():
        assert not {"c", "con_up", "cluster"} & record.keys()
        has_entry = token in {
            frame for scene in drive_scenes.values() for frame in scene["key_frames"]
        }
        assert (
            bool(record["scene_description_valid"])
            == bool(record["key_objects_valid"])
            == has_entry
        )
        if has_entry:
            assert record["scene_description"] == f"a drive in {scenes[token]}"
            frame = drive_scenes[scenes[token]]["key_frames"][token]
            assert json.loads(record["key_objects"]) == frame["key_object_infos"]
        assert int(record["question_tokens"]) == sum(len(text) for text, _, _ in expected[token])
    report = texts.import_texts(
        dataset, tmp_path / "qa", [tmp_path / "v1_1.json"], count="builtins:len"
    )
    assert report.num_samples + report.num_empty == len(samples) and report.unknown == ["f" * 32]


def test_texts_follow_their_samples_through_filters_and_reshard(texts, base, tmp_path):
    dataset, samples = base
    scenes = drivelm(samples)
    (tmp_path / "made.json").write_text(json.dumps(scenes))
    texts.import_texts(dataset, tmp_path / "qa", [tmp_path / "made.json"], count=str.split)
    expected = expected_questions(scenes, samples)
    filtered = {token: entries for token, entries in expected.items() if len(entries) > 3}
    texts_by_token = load_texts(
        dataset,
        tmp_path / "qa",
        order=fr.OrderSpec(filter="qa.num_entries > 3"),
    )
    assert texts_by_token.keys() == filtered.keys() and 0 < len(filtered) < len(expected)
    check(texts_by_token, filtered)
    fr.reshard(
        [dataset],
        tmp_path / "again",
        recipe=fr.Recipe(seed=99, shard_size_bytes=40_000),
        workers=1,
    )
    assert (
        fr.open(tmp_path / "again").index.texts("key").to_pylist()
        != fr.open(dataset).index.texts("key").to_pylist()
    )
    fr.rebase_layer(tmp_path / "qa", tmp_path / "again", tmp_path / "rebased")
    check(load_texts(tmp_path / "again", tmp_path / "rebased"), expected)
    cost = fr.Cost(linear={"qa.question_tokens": 1, "qa.answer_tokens": 1}, constant=1)
    tokens = {
        token: 1 + sum(len(text.split()) for q, a, _ in entries for text in (q, a))
        for token, entries in expected.items()
    }
    order = fr.OrderSpec(seed=7, pack=fr.Pack(budget=max(tokens.values()), cost=cost, window=8))
    packed = []
    image = {"height": 16, "width": 32}
    with fr.DataLoader(
        dataset,
        1,
        shuffle=True,
        drop_last=False,
        transforms={"image": image},
        layers={"qa": tmp_path / "qa"},
        order=order,
    ) as loader:
        for batch in loader:
            assert sum(tokens[token] for token in batch["sample_token"]) <= max(tokens.values())
            packed += batch["sample_token"]
    assert sorted(packed) == sorted(expected)


def test_records_are_joined_by_token_or_key(texts, base, tmp_path):
    dataset, samples = base
    opened = fr.open(dataset)
    keys = opened.index.texts("key").to_pylist()
    key_by_token = {opened.read(key, "meta")["meta"].sample_token: key for key in keys}
    tokens = [sample["token"] for sample in samples]
    records = [
        {
            "sample_token": tokens[0],
            "question": "How many?",
            "answer": "3",
            "num_hop": 1,
            "template_type": "count",
        },
        {
            "sample_token": tokens[1],
            "question": "Is it?",
            "answer": "yes",
            "num_hop": 0,
            "template_type": "exist",
        },
        {"sample_token": tokens[0], "question": "Where?", "answer": "left"},
    ]
    (tmp_path / "nuscenes_qa.json").write_text(
        json.dumps({"info": {"version": 1}, "questions": records})
    )
    texts.import_texts(dataset, tmp_path / "a", [tmp_path / "nuscenes_qa.json"])
    texts_by_token = load_texts(dataset, tmp_path / "a")
    assert texts_by_token[tokens[0]]["question"] == ["How many?", "Where?"]
    assert (
        texts_by_token[tokens[0]]["num_hop"],
        texts_by_token[tokens[0]]["template_type"],
    ) == (
        ["1", ""],
        ["count", ""],
    )
    assert (
        texts_by_token[tokens[1]]["answer"],
        texts_by_token[tokens[2]]["answer"],
    ) == (
        ["yes"],
        [],
    )
    lines = [
        {
            "image": key_by_token[tokens[2]],
            "Captions": ["a", "b"],
            "who": "me",
            "regions": [{"x": 1}],
            "none": None,
        }
    ]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    report = texts.import_texts(dataset, tmp_path / "b", [tmp_path / "own.jsonl"], by="image")
    assert report.channels == ["captions", "who", "regions", "num_entries"]
    record = load_texts(dataset, tmp_path / "b")[tokens[2]]
    assert (record["captions"], record["who"]) == (["a", "b"], ["me", "me"])
    assert [json.loads(text) for text in record["regions"]] == [[{"x": 1}]] * 2
    (tmp_path / "list.json").write_text(json.dumps(records))
    joined = texts.import_texts(
        dataset,
        tmp_path / "c",
        [tmp_path / "list.json", tmp_path / "list.json"],
    )
    assert (joined.num_entries, joined.num_samples) == (6, 2)


@pytest.mark.parametrize(
    ("name", "content", "error", "says"),
    [
        ("a.json", "{", fr.errors.SourceError, r"a\.json' is not JSON"),
        (
            "a.json",
            '{"scene": {"frames": {}}}',
            fr.errors.SourceError,
            "scene 'scene' is not JSON.*key_frames",
        ),
        (
            "a.json",
            '[{"question": "?"}]',
            fr.errors.SourceError,
            "record 1: the field 'sample_token' must name the sample",
        ),
        (
            "a.json",
            '[{"sample_token": null}]',
            fr.errors.SourceError,
            "record 1: the field 'sample_token' must",
        ),
        (
            "a.jsonl",
            '{"key": "a"}\n{"key"}',
            fr.errors.SourceError,
            "line 2 is not JSON",
        ),
        (
            "a.json",
            '[{"key": "a", "x": ["b"], "y": ["c", "d"]}]',
            fr.errors.SourceError,
            "differ in length: x 1, y 2",
        ),
        (
            "a.json",
            '[{"key": "a", "x": "b"}]',
            fr.errors.DatasetError,
            "no sample of .* has a name of .* such as 'a'",
        ),
        (
            "a.json",
            '[{"key": "KEY", "sweeps": "b", "num_entries": "c"}]',
            fr.errors.ConfigError,
            "num_entries",
        ),
        (
            "none.json",
            None,
            fr.errors.SourceError,
            "none.json' cannot be read: No such file",
        ),
    ],
)
def test_files_of_other_forms_are_refused(texts, base, tmp_path, name, content, error, says):
    dataset, _ = base
    if content is not None:
        key = fr.open(dataset).index.texts("key")[0].as_py()
        (tmp_path / name).write_text(content.replace("KEY", key))
    with pytest.raises(error, match=says):
        texts.import_texts(dataset, tmp_path / "out", [tmp_path / name])
    with pytest.raises(SystemExit, match="fuelrail-texts: "):
        texts.main([str(dataset), str(tmp_path / "out"), str(tmp_path / name)])


def test_a_counter_that_is_none_is_refused(texts, base, tmp_path):
    dataset, samples = base
    (tmp_path / "a.json").write_text(json.dumps([{"token": samples[0]["token"], "x": "b"}]))
    for name in ("nothing", "builtins:nothing", "nowhere:count"):
        with pytest.raises(
            fr.errors.ConfigError,
            match="must be MODULE:FUNCTION that can be imported",
        ):
            texts.import_texts(dataset, tmp_path / "out", [tmp_path / "a.json"], count=name)


@pytest.mark.parametrize(
    "content",
    [
        b'[{"token": "a", "q": "\xff"}]',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a": ' * 100_000,
        b"[{}, ",
    ],
    ids=["not UTF-8", "UTF-16", "deep list", "deep object", "cut"],
)
@pytest.mark.parametrize("ending", ["json", "jsonl"])
def test_odd_files_are_named(texts, base, tmp_path, content, ending):
    file = tmp_path / f"odd.{ending}"
    file.write_bytes(content)
    with pytest.raises(fr.errors.SourceError, match=rf"odd\.{ending}'"):
        texts.import_texts(base[0], tmp_path / "layer", [file])


def test_what_is_no_file_is_not_waited_for(texts, base, tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    for file in (
        tmp_path / "pipe.json",
        Path("/dev/zero"),
        tmp_path,
        tmp_path / "nowhere.json",
    ):
        with pytest.raises(fr.errors.SourceError, match=str(file)):
            texts.import_texts(base[0], tmp_path / "layer", [file])
