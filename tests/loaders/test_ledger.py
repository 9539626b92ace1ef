"""The ledger of a loader's and of a sampler's run: one record a segment, resumed without gap or overlap."""

from __future__ import annotations

import json
import pickle

import pytest

from fuelrail import OrderSpec, World
from fuelrail.loaders.distributed import batch_digest
from fuelrail.loaders.integrations.sampler import BatchSampler
from fuelrail.pipeline.errors import (
    ConfigError,
    LedgerError,
    OrderError,
    StateMismatchError,
)
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.format.ledger import (
    BatchDigest,
    PlaceReached,
    RunSetup,
    SampleReplaced,
    SegmentStart,
    read_ledger,
    seen_by_weights,
)
from support.batches import TINY, load
from support.ledger_kills import run_kills
from support.storage_suite import spoil

NUM = 21


def records(path, kind):
    return [record for record in read_ledger(path).records if isinstance(record, kind)]


def segments(path):
    return [
        (segment.start.place, segment.end)
        for segment in seen_by_weights(read_ledger(path).records)[0]
    ]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs" / "a.ledger"


def make(tiny, path, batch_size=2, **options):
    return load(tiny, batch_size, image=TINY, ledger=path, **options)


def test_epochs_are_one_segment_and_a_resumption_another(tiny, path):
    with make(tiny, path) as loader:
        for epoch in range(3):
            loader.set_epoch(epoch)
            for step, _ in enumerate(loader):
                if (epoch, step) == (1, 3):
                    state = loader.state_dict()
    assert [record.place for record in records(path, SegmentStart)] == [(0, 0)]
    assert [(record.place, record.why) for record in records(path, PlaceReached)] == [
        ((1, 0), "epoch"),
        ((1, 8), "state"),
        ((2, 0), "epoch"),
        ((3, 0), "epoch"),
    ]
    size = path.stat().st_size
    with make(tiny, path, 3) as loader:  # of another batch size, as in another world
        loader.load_state_dict(json.loads(json.dumps(state)))
        list(loader)
    assert segments(path) == [((0, 0), (1, 8)), ((1, 8), (2, 0))]
    setup = records(path, RunSetup)[0]
    resumed = records(path, SegmentStart)[1]
    assert len(records(path, RunSetup)) == 1, "what has not changed is not repeated"
    assert (resumed.global_batch, resumed.restored) == (3, (1, 8))
    assert setup.decoder == "turbo"
    assert setup.loader["datasets"] == {open_dataset(tiny).manifest.name: str(tiny)}
    assert path.stat().st_size - size < 1000


def test_a_break_ends_a_segment(tiny, path):
    loader = make(tiny, path)
    for step, _ in enumerate(loader):
        if step == 2:
            break
    for _ in loader:
        pass
    loader.close()
    assert segments(path) == [((0, 0), (0, 6)), ((1, 0), (2, 0))]
    assert [segment.skipped for segment in seen_by_weights(read_ledger(path).records)[0]] == [
        False,
        True,
    ]


def test_an_iteration_without_a_batch_leaves_no_trace(tiny, path):
    loader = make(tiny, path)
    iter(loader)
    loader.state_dict()
    loader.close()
    assert not path.exists()


def test_states_in_each_step_are_not_all_checkpoints(tiny, path):
    with make(tiny, path, 1) as loader:
        for _ in loader:
            loader.state_dict()
    assert [record.place for record in records(path, PlaceReached)] == [
        (0, NUM - 1),
        (1, 0),
    ]
    far = path.with_name("far.ledger")
    with make(tiny, far, 1) as loader:
        for step, _ in enumerate(loader):
            if step in (2, 4):
                loader.state_dict()
    assert [record.place for record in records(far, PlaceReached)] == [
        (0, 3),
        (0, 5),
        (1, 0),
    ]


def test_digests_are_those_of_the_batches(tiny, path):
    with make(tiny, {"path": str(path), "digest_every": 4}) as loader:
        digests = [f"{batch_digest(batch) % 2**64:016x}" for batch in loader]
    assert [(record.place, record.xxh3) for record in records(path, BatchDigest)] == [
        ((0, 0), digests[0]),
        ((0, 8), digests[4]),
        ((0, 16), digests[8]),
    ]


def test_only_the_first_process_writes(tiny, path, monkeypatch):
    with make(tiny, path, rank=1, size=2) as loader:
        list(loader)
    monkeypatch.setenv("RANK", "1")  # of a group of processes that share the data
    with make(tiny, path) as loader:
        list(loader)
    assert not path.parent.exists()
    monkeypatch.setenv("RANK", "0")
    with make(tiny, path, rank=0, size=2) as loader:
        list(loader)
    assert records(path, SegmentStart)[0].ranks == 2


def test_bad_samples_are_recorded_with_what_took_their_place(tiny_copy, tmp_path, path):
    index = open_dataset(tiny_copy).index
    spoil(tiny_copy, index.row(7))
    options = {"on_error": "substitute", "file": None, "shuffle": False}
    plain = [
        key for batch in load(tiny_copy, 2, image=TINY, **options) for key in batch["sample_key"]
    ]
    for rank in range(2):
        with make(tiny_copy, path, 1, rank=rank, size=2, **options) as loader:
            list(loader)
    assert not records(path, SampleReplaced)
    # The loader looks ahead into the next epoch, so this may have its record too.
    replacement = records(path.with_name("a.ledger.rank00001"), SampleReplaced)[0]
    assert replacement == SampleReplaced(
        since=(0, 0),
        rank=1,
        epoch=0,
        position=7,
        key=index.row(7).key,
        replaced_by=plain[7],
    )
    assert replacement.replaced_by == index.row(8).key


def test_what_cannot_be_one_run_is_refused(tiny, path):
    with make(tiny, path) as loader:
        list(loader)
    with pytest.raises(
        StateMismatchError,
        match=r"is of another run: give this one its own; .*order: state has",
    ):
        make(tiny, path, seed=1, order=OrderSpec(seed=1))
    with make(
        tiny, path, seed=1, order=OrderSpec()
    ) as restored:  # settings of the content may change
        restored.load_state_dict(loader.state_dict(), strict=False)
        list(restored)
    assert len(records(path, RunSetup)) == 2
    with pytest.raises(LedgerError, match="was written to by another loader"):
        list(loader) and list(loader)
    loader.close()
    with pytest.raises(ConfigError, match="is iterated in the trainer's process"):
        make(tiny, path).take_share(0, 2)
    with pytest.raises(ConfigError, match="ledger=5 must be"):
        make(tiny, 5)
    with pytest.raises(ConfigError, match="must be a local file"):
        make(tiny, "s3://bucket/a.ledger")
    with pytest.raises(ConfigError, match="digest_every"):
        make(tiny, {"path": str(path), "digest_every": 0})
    path.write_bytes(b"x" + path.read_bytes()[1:])
    with pytest.raises(LedgerError, match="record 0 does not have the digest") as error:
        make(tiny, path)
    assert error.value.record == 0


def test_a_sampler_has_a_ledger_too(path):
    sampler = BatchSampler(100, OrderSpec(seed=3), global_batch=8, world=World(), ledger=path)
    with pytest.raises(
        OrderError,
        match="a sampler with a ledger must know what the trainer received",
    ):
        next(iter(sampler))
    loader = pickle.loads(pickle.dumps(sampler)).count()
    for step, _ in enumerate(loader):
        if step == 4:
            state = loader.state_dict()
    resumed = BatchSampler(
        100, OrderSpec(seed=3), global_batch=20, world=World(), ledger=str(path)
    ).count()
    resumed.load_state_dict(state)
    list(resumed)
    assert segments(path) == [((0, 0), (0, 40)), ((0, 40), (1, 0))]
    assert records(path, RunSetup)[0].loader is None


@pytest.mark.process
@pytest.mark.parametrize("num_kills", [6, pytest.param(200, marks=pytest.mark.long)])
def test_kills_leave_no_gap_and_no_overlap(tmp_path, num_kills):
    assert run_kills(tmp_path, num_kills, seed=num_kills) > 0
