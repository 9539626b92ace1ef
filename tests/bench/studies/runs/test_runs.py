"""Runs from their ledgers: batches made again to the bit, where samples were shown, how two runs differ."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import random
import shutil

import msgspec
import pytest
import torch

import fuelrail as fr
from fuelrail import ImageAugment, Mix, OrderSpec, bench
from fuelrail.__main__ import main
from fuelrail.bench.studies.runs.history import RunHistory
from fuelrail.loaders.integrations.sampler import BatchSampler
from fuelrail.pipeline.errors import (
    ConfigError,
    LedgerError,
    ManifestError,
    StateMismatchError,
    WorldError,
)
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.format.ledger import LedgerFile, SegmentStart, read_ledger
from fuelrail.pipeline.order.spec import OrderStage
from support.batches import load, unlike
from support.datasets import build_dataset
from support.hostile import small_dataset
from support.layers import write_layer
from support.storage_suite import spoil

TRAIN = ImageAugment(height=8, width=16, train=True, resize_jitter=(0.9, 1.1), flip_prob=0.5)
BY_FRAME = (fr.AttributeWeights(attribute="frame"),)
LATER = OrderStage(weights=BY_FRAME)
ORDERS = {
    "shuffled": {"order": OrderSpec(seed=3)},
    "padded": {"order": OrderSpec(seed=3), "drop_last": False},
    "sequential": {"order": OrderSpec(kind="sequential"), "drop_last": False},
    "windowed": {"order": OrderSpec(kind="windowed", window=2, seed=1)},
    "filter": {"order": OrderSpec(filter="frame > 0", seed=1)},
    "weights": {"order": OrderSpec(weights=BY_FRAME, epoch_length=40)},
    "parts": {"order": OrderSpec(mix=Mix(attribute="frame", ratios={"0": 1, "3": 2}))},
    "lanes": {"order": OrderSpec(kind="lanes", seed=1)},
    "window": {
        "order": OrderSpec(seed=1),
        "window": {"frames": [-1, 0, 1], "pad": "mask"},
    },
    "edges": {"order": OrderSpec(seed=1), "window": {"frames": [-2, 0]}},
    "curriculum": {
        "order": OrderSpec(
            stages=(OrderStage(filter="frame > 0", until=20, ramp=True), LATER),
            seed=2,
        )
    },
    "dealt": {
        "order": OrderSpec(balance=fr.Balance(cost="frame"), seed=1),
        "drop_last": False,
    },
    "packs": {
        "order": OrderSpec(
            pack=fr.Pack(
                budget=12,
                cost=fr.Cost(constant=1, linear={"frame": 1}),
                window=8,
            )
        )
    },
    "dealt packs": {
        "order": OrderSpec(
            pack=fr.Pack(
                budget=12,
                cost=fr.Cost(constant=1, linear={"frame": 1}),
                window=8,
            ),
            balance=fr.Balance(cost="frame"),
        )
    },
    "without": {"order": OrderSpec(weights=BY_FRAME, without=(("clip-0002",),))},
    "without a frame": {
        "order": OrderSpec(seed=1, without=(("clip-0002-000003",),)),
        "window": {"frames": [-2, 0]},
    },
    "without in a mix": {
        "mix": {"a": 3, "b": 1},
        "order": OrderSpec(without=(("clip-0001-000002", "clip-0003"),)),
    },
    "mix": {"mix": {"a": 3, "b": 1}},
    "stages": {
        "mix": [
            fr.order.MixStage({"a": 1, "b": 0}, until=24, ramp=True),
            fr.order.MixStage({"a": 1, "b": 1}),
        ]
    },
}


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    base = tmp_path_factory.mktemp("runs")
    build_dataset(base / "a", {"val": (4,), "train": (9, 10, 7)})
    build_dataset(base / "b", {"train": (5, 6)})
    return base


def run(datasets, path, options, worlds, steps):
    """Train in segments, each on another world: returns the global batches by step, as the ranks had them."""
    global_batches = []
    state = None
    data = {"a": datasets / "a", "b": datasets / "b"} if "mix" in options else datasets / "a"
    for size, batch_size in worlds:
        loaders = [
            load(
                data,
                batch_size,
                rank=rank,
                size=size,
                image=TRAIN,
                ledger=path if rank == 0 else None,
                **options,
            )
            for rank in range(size)
        ]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        steps_left = steps
        while steps_left:
            for batches in zip(*loaders, strict=True):
                global_batches.append(batches)
                steps_left -= 1
                if not steps_left:
                    break
        state = json.loads(json.dumps(loaders[0].state_dict()))
        list(zip(*loaders, strict=True))  # what is trained behind the state, and thrown away
        for loader in loaders:
            loader.close()
    return global_batches


@pytest.fixture(scope="module", params=ORDERS)
def trained(request, datasets, tmp_path_factory):
    """A run in three segments, of three worlds: its ledger, and all batches that its weights have seen."""
    path = tmp_path_factory.mktemp("ledgers") / "a.ledger"
    fixed = request.param == "lanes"  # the lanes are the global batch
    worlds = [(1, 4), (2, 2), (4, 1)] if fixed else [(1, 4), (2, 3), (3, 1)]
    return path, run(
        datasets,
        path=path,
        options=ORDERS[request.param],
        worlds=worlds,
        steps=9,
    )


@pytest.mark.parametrize(
    "num", [3, pytest.param(84, marks=pytest.mark.long)]
)  # with both ranks about 2,000 batches
def test_batches_are_made_again_to_the_bit(trained, num):
    path, global_batches = trained
    history = RunHistory(path)
    assert history.num_steps >= len(global_batches) == 27
    for step in random.Random(num).choices(range(27), k=num):
        ranks = global_batches[step]
        for rank in {0, len(ranks) - 1}:
            replayed = bench.replay(path, step, rank=rank)
            assert not unlike(replayed.batch, ranks[rank])
            assert replayed.differences == []
        keys = [key for batch in ranks for key in batch["sample_key"]]
        replayed = bench.replay(path, step)
        if (
            replayed.loader.order.balance is not None
        ):  # the rows of all ranks are as they were before they were dealt
            assert sorted(replayed.batch["sample_key"]) == sorted(keys)
        else:
            assert replayed.batch["sample_key"] == keys


def shown_in(global_batches):
    """What the batches show: key, step, epoch, rank, is it a frame of another sample's window, is it valid."""
    for step, ranks in enumerate(global_batches):
        for rank, batch in enumerate(ranks):
            for row, key in enumerate(batch["sample_key"]):
                valid = bool(batch["valid"][row])
                yield (
                    int(batch["global_index"][row]),
                    key,
                    step,
                    int(batch["epoch"]),
                    rank,
                    False,
                    valid,
                )


def test_where_samples_were_shown_is_a_search_through_all_batches(trained):
    path, global_batches = trained
    report = bench.seen(path, sorted({key for _, key, *_ in shown_in(global_batches)}))
    listed = sorted(
        (showing.key, showing.step, showing.epoch, showing.rank, showing.valid)
        for showing in report.showings
        if not showing.as_frame
    )
    expected = sorted(
        (key, step, epoch, rank, valid)
        for _, key, step, epoch, rank, _, valid in shown_in(global_batches)
    )
    assert [showing for showing in listed if showing[1] < 27] == expected


def test_frames_of_windows_count(datasets, tmp_path):
    path = tmp_path / "a.ledger"
    global_batches = run(datasets, path=path, options=ORDERS["edges"], worlds=[(1, 4)], steps=6)
    index = open_dataset(datasets / "a").index
    expected = {
        (index.row(int(frame)).key, step)
        for step, (batch,) in enumerate(global_batches)
        for frames in batch["frame_global_index"]
        for frame in frames
    }
    clips = sorted(set(index.strings("clip_id", 4)))
    report = bench.seen(path, clips)
    assert {
        (showing.key, showing.step) for showing in report.showings if showing.step < 6
    } == expected
    assert report.num_samples == 26


@pytest.mark.parametrize("name", ["without", "without a frame", "without in a mix"])
def test_what_is_left_out_is_shown_nowhere(datasets, tmp_path, name):
    global_batches = run(
        datasets,
        path=tmp_path / "a.ledger",
        options=ORDERS[name],
        worlds=[(1, 4)],
        steps=14,
    )
    names = [clip for entry in ORDERS[name]["order"].without for clip in entry]
    opened = {
        "a": open_dataset(datasets / "a"),
        "b": open_dataset(datasets / "b"),
    }
    for (batch,) in global_batches:
        parts = batch.get("dataset", ["a"] * 4)
        for part, frames in zip(
            parts,
            batch.get("frame_global_index", batch["global_index"][:, None]),
            strict=True,
        ):
            keys = [opened[part].index.row(int(frame)).key for frame in frames]
            assert not any(key.startswith(name) for key in keys for name in names)
    full_options = {
        **ORDERS[name],
        "order": msgspec.structs.replace(ORDERS[name]["order"], without=()),
    }
    data = (
        datasets / "a" if "mix" not in full_options else {"a": datasets / "a", "b": datasets / "b"}
    )
    with load(data, 4, image=TRAIN, ledger=tmp_path / "b.ledger", **full_options) as loader:
        for _ in range(2):
            list(loader)
    assert bench.seen(tmp_path / "a.ledger", names).showings == []
    first = bench.seen(tmp_path / "b.ledger", names).showings[0].step
    for step in {*range(first)[:1], *range(first)[-1:]}:
        assert not unlike(
            bench.replay(tmp_path / "b.ledger", step).batch,
            global_batches[step][0],
        )
    assert (
        bench.replay(tmp_path / "b.ledger", first).batch["sample_key"]
        != global_batches[first][0]["sample_key"]
    )


AFTER = [
    "shuffled",
    "padded",
    "windowed",
    "filter",
    "weights",
    "lanes",
    "edges",
    "packs",
    "without",
]


# Of those that select rows alike, one in the normal lane.
ALIKE = ("padded", "filter")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] if name in ALIKE else [])
        for name in (*AFTER, "mix")
    ],
)
def test_runs_can_be_asked_after_samples_were_deleted(datasets, tmp_path, name):
    for folder in ("a", "b"):
        shutil.copytree(datasets / folder, tmp_path / folder)
    path = tmp_path / "a.ledger"
    worlds = [(1, 4)] if name == "lanes" else [(1, 4), (2, 3)]
    global_batches = run(tmp_path, path=path, options=ORDERS[name], worlds=worlds, steps=6)
    keys = open_dataset(tmp_path / "a").index.strings("key")
    names = [*keys[4:25:5], "clip-0001", "clip-0003"]
    before = [bench.seen(path, [target]) for target in names]
    gone = [key for key in keys if key.startswith("clip-0001")] + [
        keys[15],
        keys[0],
        keys[24],
    ]
    first = fr.forget(tmp_path / "a", ["clip-0001", keys[15]])
    second = fr.forget(tmp_path / "a", [keys[0], keys[24]], receipt=tmp_path / "kept.json")
    assert first.folders[0].after == second.folders[0].before
    with pytest.raises(StateMismatchError):  # one receipt is elsewhere
        bench.seen(path, names[:1])
    receipts = [tmp_path / "kept.json"]
    assert [bench.seen(path, [target], receipts=receipts) for target in names] == before
    if name == "mix":  # both datasets have these keys
        replays = [
            bench.replay(path, step, receipts=receipts) for step in range(len(global_batches))
        ]
        assert any(replay.differences for replay in replays)
        for replay, ranks in zip(replays, global_batches, strict=True):
            assert replay.differences or len(ranks) > 1 or not unlike(replay.batch, ranks[0])
        return
    num_unchanged = changed = 0
    for step, ranks in enumerate(global_batches):
        batch_keys = [key for batch in ranks for key in batch["sample_key"]]
        shown_keys = [key for batch in ranks for key in batch.get("window_key", ())]
        if name in ("lanes", "packs") and {*batch_keys} & {*gone}:
            with pytest.raises(ConfigError, match="samples that were deleted"):
                bench.replay(path, step, receipts=receipts)
            changed += 1
            continue
        replay = bench.replay(path, step, receipts=receipts)
        if len(ranks) == 1 and not replay.differences and not shown_keys:
            assert not {*batch_keys} & {*gone}
            assert not unlike(replay.batch, ranks[0])
            num_unchanged += 1
        elif {*batch_keys} & {*gone}:
            assert any("was deleted" in text for text in replay.differences)
            replayed = replay.batch["sample_key"]
            for key, replayed_key in zip(batch_keys, replayed, strict=True):
                assert key in gone or replayed_key == key or name == "edges"
            changed += 1
    assert changed
    assert num_unchanged or name in ("lanes", "windowed", "packs", "edges")


PLACES = {"folder": "", "file": "file://", "url": "local://"}


@pytest.mark.parametrize("scheme", PLACES)
@pytest.mark.parametrize("has_followed", [True, False], ids=["followed", "stayed"])
def test_runs_with_layers_can_be_asked_after_samples_were_deleted(tmp_path, scheme, has_followed):
    small_dataset(tmp_path / "d")
    layers = [
        write_layer(tmp_path / "d", tmp_path / "whole"),
        write_layer(tmp_path / "d", tmp_path / "part", [0, 2, 3, 5, 6]),
    ]
    place = f"{PLACES[scheme]}{tmp_path}"
    path = tmp_path / "a.ledger"
    options = {
        "order": OrderSpec(seed=1, filter="teacher.loss > 0"),
        "layers": {
            "teacher": f"{place}/whole",
            "other": {"path": f"{place}/part", "missing": "drop"},
        },
    }
    with load(f"{place}/d", 1, image=TRAIN, ledger=path, **options) as loader:
        batches = list(loader)
    keys = [key for batch in batches for key in batch["sample_key"]]
    assert len(keys) == 4  # of the five with both, the first has a loss of 0
    before = [bench.seen(path, [key]) for key in keys]
    receipt = tmp_path / "kept.json"
    fr.forget(tmp_path / "d", [keys[1]], layers=layers * has_followed, receipt=receipt)
    with pytest.raises((StateMismatchError, ManifestError)):
        bench.seen(path, keys[:1])
    assert [bench.seen(path, [key], receipts=[receipt]) for key in keys] == before
    for step, batch in enumerate(batches):
        replay = bench.replay(path, step, receipts=[receipt])
        if keys[step] == keys[1]:
            assert any("was deleted" in text for text in replay.differences)
            assert replay.batch["sample_key"] != batch["sample_key"]
        else:
            assert not unlike(replay.batch, batch)


def test_a_receipt_whose_rows_of_a_layer_were_edited_is_refused(tmp_path):
    small_dataset(tmp_path / "d")
    layer = write_layer(tmp_path / "d", tmp_path / "l")
    path = tmp_path / "a.ledger"
    with load(tmp_path / "d", 1, image=TRAIN, ledger=path, layers={"teacher": layer}) as loader:
        list(loader)
    keys = open_dataset(tmp_path / "d").index.strings("key")
    fr.forget(
        tmp_path / "d",
        [keys[3]],
        layers=[layer],
        receipt=tmp_path / "kept.json",
    )
    edited = json.loads((tmp_path / "kept.json").read_text())
    edited["folders"][1]["order"]["attributes"]["loss"] = [9.0]
    (tmp_path / "kept.json").write_text(json.dumps(edited))
    with pytest.raises(ConfigError, match="is not that of a deletion from"):
        bench.seen(path, [keys[0]], receipts=[tmp_path / "kept.json"])


def test_what_is_asked_after_a_deletion_needs_attributes_and_the_true_receipt(tmp_path, capsys):
    small_dataset(tmp_path / "d")
    path = tmp_path / "a.ledger"
    order = OrderSpec(filter="night", seed=1)
    with load(tmp_path / "d", 2, image=TRAIN, order=order, ledger=path) as loader:
        list(loader)
    keys = open_dataset(tmp_path / "d").index.strings("key")
    before = bench.seen(path, [keys[2]])
    assert before.showings
    report = fr.forget(tmp_path / "d", [keys[0], keys[1]])
    assert report.order.attributes["night"] == [True, False]
    assert bench.seen(path, [keys[2]]) == before
    (file,) = tmp_path.glob("d-forgot-*.json")
    words = ["runs", "seen", str(path), keys[2], "--json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["num_samples"] == 1
    edited = json.loads(file.read_text())
    edited["order"]["attributes"]["night"] = [False, False]
    file.write_text(json.dumps(edited))
    assert main(words) == 2
    assert "is not that of a deletion from" in capsys.readouterr().err
    file.unlink()
    (tmp_path / "other.json").write_bytes(b"[" * 100_000)
    for receipt in ("other.json", "none.json", "d"):
        assert main([*words, "--receipt", str(tmp_path / receipt)]) == 2
        assert "cannot be read" in capsys.readouterr().err


def test_the_newest_state_without_a_clip(datasets, tmp_path):
    path = tmp_path / "a.ledger"
    with load(datasets / "a", 2, ledger=path, order=OrderSpec(kind="sequential")) as loader:
        for step, _ in enumerate(loader):
            if step in (4, 11):
                loader.state_dict()
    index = open_dataset(datasets / "a").index
    report = bench.seen(path, [index.row(4 + 20).key])
    assert [(showing.step, showing.position, showing.draw) for showing in report.showings] == [
        (10, 20, 0)
    ]
    assert report.newest_clean == (0, 10)
    assert bench.seen(path, [index.row(4).key]).newest_clean is None
    with pytest.raises(
        ConfigError,
        match="no sample or clip of split 'train' is called 'nobody'",
    ):
        bench.seen(path, ["nobody"])
    with pytest.raises(ConfigError, match="is called"):
        bench.seen(path, [index.row(0).key])  # of another split


def test_a_run_without_samples(datasets, tmp_path, capsys):
    """From the newest clean state on the steps are those of a run that never had them, and replay gives them."""
    path = tmp_path / "a.ledger"
    states = {}
    batches = []
    options = {
        "order": OrderSpec(seed=3, weights=BY_FRAME, epoch_length=40),
        "image": TRAIN,
    }
    with load(datasets / "a", 2, ledger=path, **options) as loader:
        for step, batch in zip(range(30), itertools.chain(loader, loader), strict=False):
            batches.append(batch)
            if step % 4 == 3:
                states[f"step-{step}"] = loader.state_dict()
    shown_keys = [
        {key for batch in batches[:step] for key in batch["sample_key"]} for step in range(30)
    ]
    first, key = next(
        (step, key)
        for step in range(6, 20)
        for key in batches[step]["sample_key"]
        if key not in shown_keys[step]
    )
    newest = f"step-{first // 4 * 4 - 1}"
    (tmp_path / "states.json").write_text(json.dumps(states))
    assert (
        main(
            [
                "runs",
                "seen",
                str(path),
                key,
                "--checkpoints",
                str(tmp_path / "states.json"),
                "--json",
            ]
        )
        == 0
    )
    said = json.loads(capsys.readouterr().out)
    assert (said["showings"][0]["step"], said["checkpoint"]) == (first, newest)
    names = tmp_path / "keys.txt"
    names.write_text(f"{key}\n")
    masked = {
        **options,
        "order": msgspec.structs.replace(options["order"], without=(str(names),)),
    }
    with load(datasets / "a", 2, **masked) as never:
        expected = list(itertools.islice(itertools.chain(never, never), 34))
    assert not any(key in batch["sample_key"] for batch in expected)
    assert not any(unlike(batches[step], expected[step]) for step in range(first))
    for step in (0, first, 20, 33):
        replayed = bench.replay(path, step, without=str(names))
        assert not unlike(replayed.batch, expected[step])
        assert replayed.digest_matches is None
    assert (
        main(
            [
                "runs",
                "replay",
                str(path),
                "--step",
                "9",
                "--without",
                str(names),
                "--json",
            ]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["keys"] == list(expected[9]["sample_key"])
    with load(datasets / "a", 2, ledger=path, **masked) as tail:
        for name, state in states.items():
            if int(name[5:]) > first:
                with pytest.raises(
                    StateMismatchError,
                    match="showed what `without` names at position",
                ):
                    tail.load_state_dict(state)
        tail.load_state_dict(states[newest])
        for step, batch in enumerate(tail, first // 4 * 4):
            assert not unlike(batch, expected[step])
    assert bench.seen(path, [key]).showings == [], (
        "the weights have kept nothing of what was thrown away"
    )
    with pytest.raises(ConfigError, match="must be a JSON file of loaders' states by name"):
        bench.seen(path, [key], checkpoints=tmp_path / "none.json")


def test_the_weights_of_the_tail_are_those_of_a_run_that_never_had_them(datasets, tmp_path):
    """Bit for bit, on the CPU: a model that saw a clip is thrown away, and trained on from the clean checkpoint."""

    def train(steps, checkpoint=None, save_at=(), **options):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Flatten(),
            torch.nn.LazyLinear(16),
            torch.nn.Tanh(),
            torch.nn.Linear(16, 1),
        )
        model(torch.zeros(1, 2 * 3 * 8 * 16))
        optimiser = torch.optim.AdamW(model.parameters(), lr=0.01)
        saved = {}
        order = OrderSpec(kind="windowed", window=2, seed=3, **options)
        with load(
            datasets / "a",
            2,
            order=order,
            image=TRAIN,
            ledger=tmp_path / "w.ledger" if save_at else None,
        ) as loader:
            if checkpoint is not None:
                model.load_state_dict(checkpoint["model"])
                optimiser.load_state_dict(checkpoint["optimiser"])
                loader.load_state_dict(checkpoint["loader"])
            done = 0 if checkpoint is None else checkpoint["step"]
            while done < steps:
                for batch in loader:
                    images = batch["img"].float().flatten(1) / 255
                    loss = (model(images) - batch["global_index"][:, None] / 30).square().mean()
                    optimiser.zero_grad()
                    loss.backward()
                    optimiser.step()
                    done += 1
                    if done in save_at:
                        saved[done] = copy.deepcopy(
                            {
                                "model": model.state_dict(),
                                "optimiser": optimiser.state_dict(),
                                "step": done,
                                "loader": loader.state_dict(),
                            }
                        )
                    if done == steps:
                        break
        return model.state_dict(), saved

    dirty, saved = train(30, save_at=range(1, 30))
    report = bench.seen(tmp_path / "w.ledger", ["clip-0002"])
    newest = report.showings[0].step
    assert newest == 5
    never, _ = train(30, without=(("clip-0002",),))
    tail, _ = train(30, saved[newest], without=(("clip-0002",),))
    assert all(torch.equal(never[name], tail[name]) for name in never)
    assert not all(torch.equal(never[name], dirty[name]) for name in never)


def test_replaced_samples_are_marked(datasets, tmp_path):
    build_dataset(tmp_path / "own", {"train": (9, 10, 7)})
    index = open_dataset(tmp_path / "own").index
    spoil(tmp_path / "own", index.row(7))
    path = tmp_path / "a.ledger"
    options = {"on_error": "substitute", "file": None, "shuffle": False}
    with load(tmp_path / "own", 2, ledger=path, **options) as loader:
        batches = list(loader)
    bad = index.row(7).key
    good = index.row(8).key
    showings = [showing for showing in bench.seen(path, [bad, good]).showings if showing.epoch == 0]
    assert [
        (showing.key, showing.position, showing.stands_for, showing.replaced_by)
        for showing in showings
    ] == [
        (bad, 7, None, good),
        (good, 7, bad, None),
        (good, 8, None, None),
    ]
    replayed = bench.replay(path, 3)
    assert not unlike(replayed.batch, batches[3])
    assert replayed.differences == []


def test_a_replaced_sample_is_of_one_rank(tmp_path):
    build_dataset(tmp_path / "own", {"train": (9, 10, 7)})
    index = open_dataset(tmp_path / "own").index
    spoil(tmp_path / "own", index.row(4))
    options = {"on_error": "substitute", "file": None, "shuffle": False}
    with load(tmp_path / "own", 4, ledger=tmp_path / "a.ledger", **options) as loader:
        list(loader)
    records = list(read_ledger(tmp_path / "a.ledger").records)
    for number, record in enumerate(records):
        if isinstance(record, SegmentStart):
            records[number] = msgspec.structs.replace(record, ranks=2)
    path = tmp_path / "b.ledger"
    LedgerFile(path).append(*records)
    replayed = bench.replay(path, 1, rank=1)
    assert replayed.batch["sample_key"] == [index.row(row).key for row in (6, 7)]
    assert replayed.differences == []


def test_digests_say_whether_a_batch_is_the_same(datasets, tmp_path):
    paths = [
        tmp_path / "a.ledger",
        tmp_path / "b.ledger",
        tmp_path / "c.ledger",
    ]
    for path, jitter in zip(paths, (0.0, 0.0, 60.0), strict=True):
        options = {
            "image": TRAIN,
            "pixels": {"train": jitter > 0, "brightness": jitter},
        }
        with load(
            datasets / "a",
            2,
            ledger={"path": str(path), "digest_every": 2},
            **options,
        ) as loader:
            list(loader)
    assert bench.replay(paths[0], 4).digest_matches is True
    assert bench.replay(paths[0], 4, rank=0).digest_matches is True
    assert bench.replay(paths[0], 3).digest_matches is None
    same = bench.run_diff(*paths[:2])
    pixels_diff = bench.run_diff(paths[0], paths[2])
    assert (
        same.first_step,
        same.first_digest,
        same.compared_digests,
        same.settings,
    ) == (
        None,
        None,
        7,
        [],
    )
    assert (pixels_diff.first_step, pixels_diff.first_digest) == (None, 0)
    assert any(line.startswith("identity.settings.pixels") for line in pixels_diff.settings)


def test_the_first_step_that_differs(datasets, tmp_path):
    paths = [tmp_path / "a.ledger", tmp_path / "b.ledger"]
    run(datasets, path=paths[0], options={}, worlds=[(1, 4), (1, 4)], steps=5)
    run(datasets, path=paths[1], options={}, worlds=[(1, 4), (1, 2)], steps=5)
    assert bench.run_diff(*paths).first_step == 5
    assert bench.run_diff(paths[0], paths[0]).first_step is None


def test_the_commands(datasets, tmp_path, capsys):
    path = tmp_path / "a.ledger"
    global_batches = run(datasets, path=path, options={}, worlds=[(1, 4), (2, 2)], steps=4)
    assert main(["runs", "show", str(path)]) == 0
    text = capsys.readouterr().out
    assert (
        "4 steps from step 0 on: epoch 0 sample 0 to epoch 0 sample 16, global batch 4, 1 rank,"
        in text
    )
    assert (
        main(
            [
                "runs",
                "replay",
                str(path),
                "--step",
                "5",
                "--image",
                str(tmp_path / "a.png"),
                "--json",
            ]
        )
        == 0
    )
    keys = [key for batch in global_batches[5] for key in batch["sample_key"]]
    assert json.loads(capsys.readouterr().out)["keys"] == keys
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert (
        main(
            [
                "runs",
                "seen",
                str(path),
                keys[0],
                "--dataset",
                str(datasets / "a"),
                "--json",
            ]
        )
        == 0
    )
    assert 5 in [showing["step"] for showing in json.loads(capsys.readouterr().out)["showings"]]
    assert main(["runs", "diff", str(path), str(path)]) == 0
    other_path = tmp_path / "b.ledger"
    run(datasets, path=other_path, options={}, worlds=[(1, 2)], steps=4)
    assert main(["runs", "diff", str(path), str(other_path)]) == 1
    assert "step 0 is the first that differs" in capsys.readouterr().out
    assert main(["runs", "replay", str(path), "--step", "999"]) == 2
    assert "it has the steps 0 to" in capsys.readouterr().err


def test_what_a_ledger_does_not_keep(datasets, tmp_path):
    path = tmp_path / "a.ledger"
    with load(datasets / "a", 2, ledger=path, transform=dict) as loader:
        batch = next(iter(loader))
    with pytest.raises(
        ConfigError,
        match=r"the run had transform=builtins:dict, which a ledger does not keep",
    ):
        bench.replay(path, 0)
    assert not unlike(bench.replay(path, 0, functions={"transform": dict}).batch, batch)
    with pytest.raises(StateMismatchError, match="dataset: state has"):
        bench.replay(path, 0, dataset=datasets / "b", functions={"transform": dict})
    with pytest.raises(ConfigError, match="rank 3 is not in step 0"):
        bench.replay(path, 0, rank=3)
    sampler = BatchSampler(50, OrderSpec(seed=2), global_batch=4, ledger=tmp_path / "b.ledger")
    batches = list(sampler.count())
    with pytest.raises(ConfigError, match="the ledger is of a sampler's run"):
        bench.replay(tmp_path / "b.ledger", 0)
    replayed = bench.replay(
        tmp_path / "b.ledger",
        7,
        loader=BatchSampler(50, OrderSpec(seed=2), global_batch=4),
    )
    assert replayed.batch == batches[7]


def test_a_statement_names_the_checkpoint(datasets, tmp_path, capsys):
    path = tmp_path / "a.ledger"
    checkpoint = tmp_path / "checkpoint"
    run(datasets, path=path, options={}, worlds=[(1, 4), (1, 2)], steps=5)
    (checkpoint / "rank").mkdir(parents=True)
    (checkpoint / "rank" / "0.pt").write_bytes(b"weights")
    plain = bench.attest(path, checkpoint, (0, 24))
    digest = hashlib.sha256(b"weights").hexdigest()
    assert plain["subject"] == [{"name": "checkpoint/rank/0.pt", "digest": {"sha256": digest}}]
    assert [[stretch["start"], stretch["end"]] for stretch in plain["predicate"]["stretches"]] == [
        [[0, 0], [0, 20]],
        [[0, 20], [0, 24]],
    ]
    assert plain["predicate"]["head"] == bench.run_history(path).head
    words = [
        "runs",
        "attest",
        str(path),
        str(checkpoint),
        "--epoch",
        "0",
        "--samples",
        "24",
    ]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out) == plain
    assert main([*words[:-1], "999"]) == 2
    assert "is not in ledger" in capsys.readouterr().err


KINDS = [
    {},
    {"kind": "sequential"},
    {"kind": "lanes"},
    {"filter": "loss > 0.3"},
]
LOSS = (fr.AttributeWeights(attribute="loss"),)
PACK = fr.Pack(budget=20, cost="tokens", window=64)
BALANCE = fr.Balance(cost="tokens")
KINDS += [
    {"pack": PACK, "weights": LOSS},
    {"balance": BALANCE},
    {"pack": PACK, "balance": BALANCE},
]
KINDS += [
    {"weights": LOSS, "without": (("3", "11"),)},
    {"pack": PACK, "without": (("4",),)},
]
KINDS += [
    {"weights": LOSS},
    {"mix": Mix(attribute="night", ratios={"true": 1, "false": 2})},
]


@pytest.mark.parametrize("num_runs", [11, pytest.param(420, marks=pytest.mark.long)])
def test_random_steps_of_random_runs_have_their_keys(tmp_path, num_runs):
    """Of samplers: 20 steps of each run, about 240 keys."""
    draw = random.Random(num_runs)
    columns = {
        "clip_id": [row // 7 for row in range(300)],
        "night": [row % 3 == 0 for row in range(300)],
        "loss": [draw.random() for _ in range(300)],
        "tokens": [draw.randrange(1, 9) for _ in range(300)],
    }
    compared = 0
    for number in range(num_runs):
        spec = OrderSpec(**KINDS[number % len(KINDS)], seed=draw.getrandbits(60))
        path = tmp_path / f"{number}.ledger"
        batches = []
        drop_last = draw.random() < 0.5
        sizes = [12] if spec.kind == "lanes" else [4, 12, 20]  # the lanes are the global batch
        state = None
        for _ in range(draw.randrange(1, 4)):
            sampler = BatchSampler(
                columns,
                spec,
                global_batch=draw.choice(sizes),
                drop_last=drop_last,
                ledger=path,
            )
            loader = sampler.count()
            if state is not None:
                loader.load_state_dict(state)
            steps_left = draw.randrange(1, 60)
            while steps_left:
                for batch in loader:
                    batches.append(batch)
                    steps_left -= 1
                    if not steps_left:
                        break
            state = loader.state_dict()
        history = RunHistory(path)
        assert history.num_steps == len(batches)
        for step in draw.choices(range(len(batches)), k=20):
            size = history.step(step)[0].stretch.start.global_batch
            replay_sampler = BatchSampler(columns, spec, global_batch=size, drop_last=drop_last)
            assert bench.replay(path, step, loader=replay_sampler).batch == batches[step]
            compared += len(batches[step])
    assert compared >= 20 * 4 * num_runs


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"identity": {"dataset": 5}},
            "the identity of a setup is of no known form",
        ),
        (
            {"loader": {"datasets": {}}},
            "the settings of the loader in the setup of record 1 are of no known form",
        ),
        (
            {"loader": {"datasets": {"a": 5}, "functions": {}}},
            "the settings of the loader in the setup of record 1",
        ),
    ],
)
def test_a_ledger_that_someone_else_has_written_is_refused_in_a_sentence(
    datasets, tmp_path, change, said
):
    with load(datasets / "a", 2, ledger=tmp_path / "a.ledger") as loader:
        next(iter(loader))
    setup, *records = read_ledger(tmp_path / "a.ledger").records
    LedgerFile(tmp_path / "b.ledger").append(msgspec.structs.replace(setup, **change), *records)
    with pytest.raises(LedgerError, match=said):
        bench.replay(tmp_path / "b.ledger", 0)
    if "identity" in change:
        with pytest.raises(LedgerError, match=said):
            load(datasets / "a", 2, ledger=tmp_path / "b.ledger")


def test_more_ranks_than_rows_of_a_batch_are_refused(datasets, tmp_path):
    with load(datasets / "a", 2, ledger=tmp_path / "a.ledger") as loader:
        next(iter(loader))
    setup, first, *records = read_ledger(tmp_path / "a.ledger").records
    LedgerFile(tmp_path / "b.ledger").append(
        setup, msgspec.structs.replace(first, ranks=4), *records
    )
    with pytest.raises(
        WorldError,
        match="a global batch of 2 has no row for some of 4 ranks",
    ):
        RunHistory(tmp_path / "b.ledger")


HOSTILE = "x\x1b]0;t\x07\u202e\n3 steps"


@pytest.mark.parametrize(
    "words",
    [
        "show",
        "show --json",
        "replay --step 0",
        "seen KEY",
        "diff OTHER",
        "attest OTHER",
    ],
)
def test_a_command_prints_texts_of_a_ledger_as_text(datasets, tmp_path, capsys, words):
    with load(datasets / "a", 2, ledger=tmp_path / "a.ledger") as loader:
        next(iter(loader))
    setup, first, *records = read_ledger(tmp_path / "a.ledger").records
    identity = (
        {**setup.identity, "split": HOSTILE} if words[:4] in ("show", "diff") else setup.identity
    )
    hostile = msgspec.structs.replace(
        setup, identity=identity, versions={"python": HOSTILE}, decoder=HOSTILE
    )
    LedgerFile(tmp_path / "b.ledger").append(
        hostile, msgspec.structs.replace(first, time=HOSTILE), *records
    )
    names = {"OTHER": str(tmp_path / "a.ledger"), "KEY": HOSTILE}
    word, *options = words.split()
    arguments = [names.get(option, option) for option in options] + (
        ["--epoch", "0", "--samples", "2"] if word == "attest" else []
    )
    main(["runs", word, str(tmp_path / "b.ledger"), *arguments])
    said = "".join(capsys.readouterr())
    assert "\\x1b" in said or "\\u001b" in said
    assert said.replace("\n", "").isprintable()
    assert "\n3 steps" not in said
