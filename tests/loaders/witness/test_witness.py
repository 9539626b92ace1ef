"""The witness of real loaders: workers, ranks over gloo, resumes, states and files of strangers, the command."""

from __future__ import annotations

import itertools
import json
import math
import pickle
import tracemalloc
from collections import UserDict
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import fuelrail as fr
from fuelrail.__main__ import main
from fuelrail.loaders.witness.rows import read_rows, row_names
from fuelrail.loaders.witness.witness import (
    WitnessWarning,
    check_records,
    compare_records,
)
from support import witness_ranks
from support.ranks import run_ranks
from support.witness_ranks import Rows


@pytest.mark.parametrize(
    ("batch", "ids"),
    [
        ({"index": torch.tensor([3, 4])}, [3, 4]),
        ({"idx": np.array([[3], [4]], np.int32)}, [3, 4]),
        ({"id": [torch.tensor(3), torch.tensor(4)]}, [3, 4]),
        ({"__key__": ["a", "b"], "id": [1, 2]}, ["a", "b"]),
        ({"id": torch.rand(2), "key": (b"a", b"\xff")}, ["a", "\ufffd"]),
        ({"index": torch.tensor([[1, 2], [3, 4]])}, ["(1, 2)", "(3, 4)"]),
        ({"index": 7, "x": torch.rand(5)}, [7]),
        (UserDict({"uid": ["a" * 100]}), ["a" * 30 + "..." + "a" * 30]),
        ({"index": torch.tensor([], dtype=torch.int64)}, []),
        ({"index": [2**64, -1]}, ["18446744073709551616", "-1"]),
        (SimpleNamespace(index=torch.tensor([5]), y=torch.rand(1)), [5]),
    ],
)
def test_ids_are_found_in_a_batch(batch, ids) -> None:
    rows = read_rows(batch, None)
    assert row_names(rows.kind, rows.hashes[:, 0], rows.names) == ids


@pytest.mark.parametrize(
    "batch",
    [
        torch.rand(4, 3),
        {"x": torch.rand(4, 3), "labels": ["a", "b", "c", "d"]},
        [torch.rand(4, 3), torch.arange(4)],
        {"inner": {"x": torch.rand(4, 3).to(torch.bfloat16)}},
        ["a", "b", "c", "d"],
        np.random.default_rng(0).random((4, 2)),
    ],
    ids=["tensor", "mapping", "list", "nested", "texts", "array"],
)
def test_rows_without_ids_are_known_by_their_content(batch) -> None:
    hashes = read_rows(batch, None).hashes
    assert len(hashes) == len(np.unique(hashes[:, 0])) == 4
    assert (read_rows(pickle.loads(pickle.dumps(batch)), None).hashes == hashes).all()


@pytest.mark.parametrize("key", [lambda _: [1.5], lambda _: [None]], ids=["float", "none"])
def test_an_id_that_is_none_is_refused(key) -> None:
    with pytest.raises(fr.errors.ConfigError, match="give key="):
        list(fr.witness([{"x": 1}], key=key))


def test_a_batch_without_content_is_refused() -> None:
    with pytest.raises(fr.errors.ConfigError, match="neither ids nor tensors"):
        list(fr.witness([object()]))


def test_ids_of_two_kinds_in_an_epoch_are_refused() -> None:
    with pytest.raises(fr.errors.ConfigError, match="text in one batch and integer"):
        list(fr.witness([{"id": [1]}, {"id": ["a"]}]))


@pytest.mark.parametrize(
    "options",
    [
        {"tail": "all"},
        {"content": "same"},
        {"on_fault": "stop"},
        {"groups": [[0, 1]]},
        {"expected": -1},
        {"expected": [1.5]},
        {"expected": [*range(2**18), "a"]},
    ],
)
def test_options_that_are_not_allowed_are_refused(options) -> None:
    with pytest.raises(fr.errors.ConfigError):
        list(fr.witness([{"id": [1]}], **options))


def test_a_loader_is_as_it_was() -> None:
    loader = DataLoader(
        Rows(),
        batch_size=7,
        shuffle=True,
        generator=torch.Generator().manual_seed(2),
    )
    watched = fr.witness(loader)
    assert watched.dataset is loader.dataset and len(watched) == len(loader)
    shown = [batch["index"].tolist() for batch in watched]
    loader.generator.manual_seed(2)
    assert shown == [batch["index"].tolist() for batch in loader]
    copied = pickle.loads(pickle.dumps(fr.witness([1])))
    assert list(copied) == [1]


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Rows(), 4, shuffle=True),
        DataLoader(Rows(), 4, drop_last=True),
        DataLoader(Rows(), 100, drop_last=True),
        DataLoader(Rows(), 4, sampler=SubsetRandomSampler(range(10))),
        DataLoader(Rows(), 4, sampler=WeightedRandomSampler([1.0] * 61, 200)),
        DataLoader(
            Rows(),
            4,
            sampler=torch.utils.data.RandomSampler(Rows(), num_samples=9),
        ),
        DataLoader(TensorDataset(torch.arange(20)[:, None] * 1.0), 3, shuffle=True),
        DataLoader(Rows(), None),
        DataLoader(Rows(), batch_sampler=[[0, 1], [5]]),
    ],
    ids=[
        "shuffled",
        "drop",
        "empty",
        "subset",
        "weights",
        "some",
        "content",
        "rows",
        "batches",
    ],
)
def test_loaders_of_torch_raise_no_alarm(loader) -> None:
    watched = fr.witness(loader, on_fault="raise")
    for _ in range(2):
        assert len(list(watched)) == len(loader)
    assert [report.is_complete for report in watched.reports] == [True, True]


@pytest.mark.parametrize(
    ("names", "groups"),
    [
        (("dp", "tp"), [[0, 1, 2], [3, 4, 5]]),
        (("tp", "dp"), [[0, 3], [1, 4], [2, 5]]),
        (("pp", "tp"), [[0, 1, 2, 3, 4, 5]]),
    ],
)
def test_groups_are_the_model_axes_of_a_device_mesh(names, groups, monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "6")
    mesh = SimpleNamespace(mesh=torch.arange(6).reshape(2, 3), mesh_dim_names=names)
    assert fr.witness([], groups=mesh)._rules.groups == groups


@pytest.mark.process
@pytest.mark.parametrize("workers", [1, 2])
def test_workers_raise_no_alarm(workers) -> None:
    watched = fr.witness(
        DataLoader(Rows(), 4, shuffle=True, num_workers=workers),
        on_fault="raise",
    )
    assert sum(len(batch["index"]) for batch in watched) == 61


def test_a_fault_warns_and_is_in_the_reports() -> None:
    batches = [{"id": [0, 1]}, {"id": [1]}]
    with pytest.warns(WitnessWarning, match=r"1 row \(1\) came again, on rank 0"):
        list(watched := fr.witness(batches, expected=3, tail="exact"))
    assert "1 row (2) never came" in watched.reports[0].as_text()
    plain = json.loads(watched.reports[0].as_json())
    assert [fault["kind"] for fault in plain["faults"]] == [
        "missing",
        "repeated",
    ]


def test_an_epoch_that_is_left_early_starts_anew() -> None:
    watched = fr.witness(DataLoader(Rows(), 4), on_fault="raise")
    list(itertools.islice(watched, 3))
    assert len(list(watched)) == math.ceil(61 / 4)


@pytest.mark.costly
@pytest.mark.parametrize("is_text", [False, True], ids=["integer", "text"])
def test_memory_and_state_do_not_grow(is_text) -> None:
    def batches():
        for start in range(0, 200_000, 1000):
            ids = range(start, start + 1000)
            yield {"id": [f"clip-{row:012d}" for row in ids] if is_text else np.array(ids)}

    watched = fr.witness(())
    watched.note({"id": ["a"] if is_text else [-1]})
    tracemalloc.start()
    for batch in batches():
        watched.note(batch)
        del batch
    report = watched.check()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert report.rows == 200_001
    assert peak < 8 << 20  # with one batch, and copies while it is compared
    held = watched._epoch.table.cells.nbytes + watched._epoch.sample.rows.nbytes
    assert held < 4 << 20
    assert len(json.dumps(watched.state_dict())) < 20_000


IDS = [{"id": [row, row + 1]} for row in range(0, 40, 2)]


def state_after(steps: int) -> dict:
    watched = fr.witness(DataLoader(Rows(), 4))
    list(itertools.islice(watched, steps))
    return watched.state_dict()


def test_a_state_at_an_epochs_border_is_of_the_next_one() -> None:
    state = state_after(16)
    watched = fr.witness(DataLoader(Rows(), 4), on_fault="raise")
    watched.load_state_dict(state)
    list(watched)
    assert watched.reports[0].epoch == 1


def test_one_of_several_ranks_states_is_not_enough(monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    state = state_after(5)
    monkeypatch.setenv("WORLD_SIZE", "1")
    watched = fr.witness(DataLoader(Rows(), 4), on_fault="raise")
    watched.load_state_dict(state)
    list(watched)
    assert "only one rank's part" in watched.reports[0].notes[0]


def test_a_group_that_sees_the_same_rows_counts_once_over_a_resume(
    monkeypatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    states = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        watched = fr.witness(IDS, groups=[[1, 0]])
        list(itertools.islice(watched, 5))
        states.append(watched.state_dict())
    records = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        watched = fr.witness(IDS[5:], groups=[[1, 0]], expected=40)
        watched.load_state_dict(states)
        list(watched)
        records += watched._previous
    report = type(watched)._judge(watched, records)
    assert report.faults == [] and report.rows == 40


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    st.sampled_from(
        [
            "0:",
            ":",
            "0:eJwDAAAAAAE=",
            "eJwDAAAAAAE=",
            "9" * 30 + ":eJwDAAAAAAE=",
            "\x1b[31m",
        ]
    ),
)


@pytest.mark.costly
@settings(
    max_examples=300,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.dictionaries(st.sampled_from([*state_after(2), "other"]), LEAVES, max_size=4))
def test_a_state_of_a_stranger_is_taken_or_refused(changes) -> None:
    """What is wrong is said in our words, and what is taken can be judged."""
    watched = fr.witness(DataLoader(Rows(), 4), on_fault="ignore", content="random")
    try:
        watched.load_state_dict({**state_after(2), **changes})
    except fr.errors.LedgerError as error:
        assert not {"Expected `", "`$"} & {str(error)} and "Expected `" not in str(error)
        assert str(error).isprintable()
        return
    try:
        list(watched)
    except fr.errors.ConfigError as error:  # ids of another kind than the state's
        assert "give key=" in str(error)
        return
    watched.reports[0].as_json()
    assert watched.reports[0].as_text()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rows": "many"}, "at 'rows': must be a whole number"),
        ({"ranks": []}, "at 'ranks'"),
        ({"before": "%"}, "must be base64 of zlib"),
        ({"sample": 7}, "must be text; got int"),
        ({"version": 9}, "its version is 9"),
        ({"colour": 1}, "'colour'"),
        ({"ranks": [4]}, "ranks"),
    ],
)
def test_what_is_wrong_with_a_state_is_said(changes, said) -> None:
    with pytest.raises(fr.errors.LedgerError) as raised:
        fr.witness([]).load_state_dict({**state_after(2), **changes})
    assert said in str(raised.value)


def write(folder: Path, batches: list, **options) -> Path:
    list(fr.witness(batches, folder=folder, on_fault="ignore", **options))
    return folder


def test_two_runs_are_compared_by_their_records(tmp_path) -> None:
    whole = write(tmp_path / "whole", IDS)
    assert compare_records(whole, write(tmp_path / "same", IDS)) == []
    swapped = write(tmp_path / "swapped", [*IDS[:12], IDS[13], IDS[12], *IDS[14:]])
    (line,) = compare_records(swapped, whole)
    assert line.startswith("epoch 0: the same rows, in another order after 12 equal steps or more")
    (line,) = compare_records(write(tmp_path / "short", IDS[:-1]), whole)
    assert "other rows" in line


def test_records_of_all_ranks_are_checked(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        write(tmp_path / "records", IDS[rank::2])
    (report,) = check_records(tmp_path / "records", expected=40)
    assert report.faults == [] and report.ranks == 2

    def invoke(*words: object) -> tuple[int, str, str]:
        code = main(list(map(str, words)))
        return code, *capsys.readouterr()

    words = ("witness", "check", tmp_path / "records")
    code, out, err = invoke(*words, "--expected", "41")
    assert (code, err) == (1, "") and "FAULT 1 row (40) never came" in out
    code, out, err = invoke(*words, "--expected", "40", "--json")
    assert (code, err) == (0, "") and json.loads(out)[0]["rows"] == 40
    code, out, err = invoke("witness", "diff", tmp_path / "records", tmp_path / "records")
    assert (code, out, err) == (
        0,
        "each epoch has the same rows at the same steps\n",
        "",
    )
    (tmp_path / "records" / "epoch00000.rank00001.json").unlink()
    code, out, err = invoke(*words)
    assert (code, out) == (2, "") and "one of each rank is needed" in err


@pytest.mark.costly
@settings(
    max_examples=100,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.integers(0, 10**6), st.binary(max_size=6), st.booleans())
def test_a_damaged_file_is_checked_or_refused(tmp_path, place, data, is_cut) -> None:
    folder = write(tmp_path / "records", IDS)
    file = folder / "epoch00000.rank00000.json"
    text = file.read_bytes()
    place %= len(text)
    file.write_bytes(text[:place] + data + (b"" if is_cut else text[place + len(data) :]))
    try:
        reports = check_records(folder, expected=40)
    except (fr.errors.LedgerError, fr.errors.ConfigError) as error:
        assert str(error)
        return
    for report in reports:
        msgspec.json.encode(report)
        report.as_text()


def test_a_folder_without_records_is_refused(tmp_path) -> None:
    with pytest.raises(fr.errors.LedgerError, match="holds no records of a witness"):
        check_records(tmp_path)


def ranks_say(case: str, ranks: int, folder: Path) -> list[dict]:
    run_ranks(ranks, witness_ranks.__file__, case, folder)
    return json.loads((folder / f"{case}.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_over_gloo_agree_that_an_epoch_is_clean(ranks, tmp_path) -> None:
    reports = ranks_say("clean", ranks, tmp_path)
    assert [report["faults"] for report in reports] == [[]] * 4
    assert [report["ranks"] for report in reports] == [ranks] * 4
    assert [report.faults for report in check_records(tmp_path / "a", expected=61)] == [[], []]


@pytest.mark.slow
def test_ranks_over_gloo_name_faults(tmp_path) -> None:
    (report,) = ranks_say("not shared", 2, tmp_path)
    assert [fault["kind"] for fault in report["faults"]] == [
        "same_rows",
        "repeated",
    ]
    (report,) = ranks_say("one row lost", 2, tmp_path)
    found = {fault["kind"]: (fault["count"], fault["ranks"]) for fault in report["faults"]}
    assert found == {
        "missing": (1, []),
        "repeated": (2, [0, 1]),
    }  # and one that fills the last batch
    ranks_say("raised on all", 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_resume_on_other_ranks_over_gloo_is_followed(ranks, tmp_path) -> None:
    ranks_say("save", 2, tmp_path)
    whole, short = ranks_say("resume", ranks, tmp_path)
    assert whole["faults"] == []
    assert [fault["kind"] for fault in short["faults"]] == ["missing"]
    assert short["faults"][0]["count"] == 4 * ranks


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_not_waited_for(tmp_path) -> None:
    run_ranks(2, witness_ranks.__file__, "dead", tmp_path, timeout_s=60)
    assert (tmp_path / "told.0").exists()
