"""A teacher's logits stored by `annotate`: as top-k or draws by key, from one teacher only, after kills the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from fuelrail import DataLoader
from fuelrail.bench.annotation.run import annotate
from fuelrail.bench.annotation.teacher import Reduction, weights_digest
from fuelrail.loaders.schedule.layers import LayerOptions
from fuelrail.pipeline.channels.table import Channel, Law, Vocabulary
from fuelrail.pipeline.errors import ConfigError, DatasetExistsError
from fuelrail.pipeline.format.layers import open_layer_data
from fuelrail.sharding.api import verify
from fuelrail.sharding.verify.inspect import describe_dataset, describe_sample
from support.datasets import build_dataset
from support.layers import digests

NUM = 11
LENGTH = 6
SIZE = 300
SMALL = {"image": {"height": 32, "width": 64}}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    root = tmp_path_factory.mktemp("base") / "base"
    build_dataset(root, {"train": (3, 4), "val": (4,)})
    return root


class Speaker(torch.nn.Module):
    """Logits of the position of a sample in the dataset, by weights."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        table = torch.randn(NUM, LENGTH, SIZE, generator=torch.Generator().manual_seed(seed))
        self.table = torch.nn.Parameter(4 * table)

    def forward(self, batch):
        return {
            "logits": self.table[batch["global_index"]],
            "name": list(batch["sample_key"]),
        }


def run(base, out, model=None, **options):
    options = {"batch_size": 2, "store": "topk:8", **options}
    return annotate(base, out, model or Speaker(), transforms=SMALL, workers=1, **options)


def rows(out) -> list:
    data = open_layer_data(out)
    return [data.read(row)["logits"] for row in range(NUM)]


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_top_k_is_what_the_teacher_said(base, tmp_path, temperature) -> None:
    run(base, tmp_path / "layer", temperature=temperature)
    likely = (Speaker().table.detach().double() / temperature).softmax(-1)
    for row, logits in enumerate(rows(tmp_path / "layer")):
        weights, indices = likely[row].topk(8, dim=-1)
        order = indices.argsort(-1)
        np.testing.assert_array_equal(logits.indices, indices.gather(-1, order))
        np.testing.assert_allclose(logits.weights, weights.gather(-1, order), rtol=0.03)
        np.testing.assert_allclose(logits.tail, 1 - weights.sum(-1), rtol=0.01, atol=1e-6)
        assert logits.mask.all()
    facts = describe_dataset(tmp_path / "layer")
    assert ("temperature" in facts.text) == (temperature != 1)
    assert weights_digest(Speaker()) in facts.text
    assert "indices int32[6, 8], " in describe_sample(tmp_path / "layer", "clip-0000-000001").text
    assert not verify(tmp_path / "layer", deep=True).faults


def test_draws_are_each_tokens_share_in_the_mean_over_keys_and_not_of_the_order(
    base, tmp_path
) -> None:
    run(base, tmp_path / "one", store="sampled:20")
    run(base, tmp_path / "two", store="sampled:20", batch_size=5)
    assert digests(tmp_path / "one")["index.arrow"] == digests(tmp_path / "two")["index.arrow"]
    channel = open_layer_data(tmp_path / "one").manifest.channels[0]
    reduce = Reduction()
    logits = Speaker().table[0].detach()
    expected_indices = np.sort(reduce(logits, channel, "clip-0000-000000").indices)
    np.testing.assert_array_equal(rows(tmp_path / "one")[0].indices, expected_indices)
    counts = np.zeros((LENGTH, SIZE))
    for key in range(3000):
        indices = reduce(logits, channel, str(key)).indices
        np.add.at(counts, (np.arange(LENGTH)[:, None], indices), 1)
    likely = logits.double().softmax(-1).numpy()
    share = counts / 3000 / 20
    part = np.modf(likely * 20)[0]  # a token is drawn the whole number of times below or above
    error = np.sqrt(part * (1 - part) / 3000) / 20
    assert (np.abs(share - likely) <= 5 * error + 3 / 60_000).all()
    assert not np.array_equal(
        reduce(logits, channel, "a").indices,
        reduce(logits, channel, "b").indices,
    )
    assert not np.array_equal(
        reduce(logits, channel, "a").indices,
        Reduction(epoch=1)(logits, channel, "a").indices,
    )


def test_positions_are_those_of_the_largest_entropy(base, tmp_path) -> None:
    run(base, tmp_path / "layer", positions=0.4)
    logs = Speaker().table.detach().log_softmax(-1)
    entropy = -(logs.exp() * logs).sum(-1)
    for row, logits in enumerate(rows(tmp_path / "layer")):
        assert sorted(entropy[row].topk(3).indices.tolist()) == np.flatnonzero(logits.mask).tolist()
        assert not logits.weights[~logits.mask].any()
    with DataLoader(
        base,
        4,
        shuffle=False,
        transforms=SMALL,
        layers={"t": tmp_path / "layer"},
    ) as loader:
        assert next(iter(loader))["t.logits"].mask.sum() == 12


def test_lists_may_differ_in_length_and_half_precision_is_taken(base, tmp_path) -> None:
    def model(batch):
        return {
            "logits": [
                torch.randn(row % 3, 50).bfloat16() for row in batch["global_index"].tolist()
            ]
        }

    run(base, tmp_path / "layer", model, store="sampled:5")
    assert [len(logits.mask) for logits in rows(tmp_path / "layer")] == [
        row % 3 for row in range(NUM)
    ]
    assert open_layer_data(tmp_path / "layer").manifest.channels[0].shape == (
        None,
        5,
    )


def test_arrays_to_read_only_are_taken_and_beside_others_stored_as_they_are(base, tmp_path) -> None:
    def model(batch):
        logits = Speaker()(batch)["logits"].detach().numpy()
        logits.flags.writeable = False
        return {
            "logits": logits,
            "loss": logits.mean((1, 2)),
            "best": logits.argmax(2),
        }

    run(base, tmp_path / "array", model)
    run(base, tmp_path / "tensor")
    for from_array, from_tensor in zip(
        rows(tmp_path / "array"), rows(tmp_path / "tensor"), strict=True
    ):
        np.testing.assert_array_equal(from_array.weights, from_tensor.weights)
    kinds = {
        channel.name: channel.kind
        for channel in open_layer_data(tmp_path / "array").manifest.channels
    }
    assert kinds == {"logits": "logits_topk", "loss": "array", "best": "array"}


def test_another_teacher_may_not_continue_and_a_loader_can_demand_one(base, tmp_path) -> None:
    first = weights_digest(Speaker(1))
    run(base, tmp_path / "layer", Speaker(1))
    repeated_report = run(base, tmp_path / "layer", Speaker(1))
    assert repeated_report.num_kept == NUM
    second = weights_digest(Speaker(2))
    with pytest.raises(
        DatasetExistsError,
        match=rf'recipe\.teacher: "{first}" there, "{second}" here',
    ):
        run(base, tmp_path / "layer", Speaker(2))
    with pytest.raises(DatasetExistsError, match=r"recipe\.temperature: none there, 2.0 here"):
        run(base, tmp_path / "layer", Speaker(1), temperature=2.0)

    def stops(batch):
        if 4 in batch["global_index"]:
            raise KeyboardInterrupt
        return Speaker(1)(batch)

    with pytest.raises(KeyboardInterrupt):
        run(base, tmp_path / "part", stops, teacher="big-7b@rev1")
    with pytest.raises(
        DatasetExistsError,
        match=r'recipe\.teacher: "big-7b@rev1" there, "big-7b@rev2" here',
    ):
        run(base, tmp_path / "part", stops, teacher="big-7b@rev2")
    for layer, digest in (("layer", first), ("layer", None)):
        with DataLoader(
            base,
            2,
            transforms=SMALL,
            layers={"t": LayerOptions(tmp_path / layer, teacher=digest)},
        ):
            pass
    with pytest.raises(ConfigError, match=f"made by the teacher {first}, not by {second}"):
        DataLoader(
            base,
            2,
            transforms=SMALL,
            layers={"t": LayerOptions(tmp_path / "layer", teacher=second)},
        )


@pytest.mark.parametrize("store", ["topk:8", "sampled:8"])
def test_interruptions_do_not_show(base, tmp_path, store) -> None:
    class Stopping(Speaker):
        batches_left = 100

        def forward(self, batch):
            Stopping.batches_left -= 1
            if Stopping.batches_left < 0:
                raise KeyboardInterrupt
            return super().forward(batch)

    run(base, tmp_path / "a" / "it", Speaker(), store=store)
    for batches_left in (2, 4):
        Stopping.batches_left = batches_left
        with pytest.raises(KeyboardInterrupt):
            run(base, tmp_path / "b" / "it", Stopping(), store=store)
    Stopping.batches_left = 100
    run(base, tmp_path / "b" / "it", Stopping(), store=store)
    assert digests(tmp_path / "a" / "it") == digests(tmp_path / "b" / "it")


SPEAKER = Speaker()


def test_the_digest_is_that_of_the_weights_wherever_they_are() -> None:
    def by_name(batch):
        return SPEAKER(batch)

    class Holder:
        def __init__(self) -> None:
            self.inner = Speaker()
            self.count = 3

        def say(self, batch):
            return self.inner(batch)

    local = Speaker(2)
    model_digests = [
        weights_digest(model) for model in (by_name, Holder(), lambda batch: local(batch))
    ]
    assert len({*model_digests}) == 3 and None not in model_digests
    assert weights_digest(Holder().say) == weights_digest(Holder())
    assert (
        weights_digest(len)
        is weights_digest(lambda batch: batch)
        is weights_digest(torch.nn.Identity())
        is None
    )
    half = Speaker().bfloat16()
    assert weights_digest(half) != weights_digest(Speaker())


@pytest.mark.parametrize(
    ("spoil", "options", "says"),
    [
        (
            lambda x: x,
            {"store": "topk:301"},
            "more tokens a position than the vocabulary, 300",
        ),
        (
            lambda x: x,
            {"store": "topk:0"},
            "store='topk:0' must be as_is, float16, int8, topk:K or sampled:K",
        ),
        (lambda x: x, {"store": "topk"}, "store='topk' must be"),
        (
            lambda x: x,
            {"temperature": 0.0},
            r"'temperature': must be a number > 0",
        ),
        (
            lambda x: x,
            {"positions": 1.5},
            r"'positions': must be a number > 0 and <= 1",
        ),
        (
            lambda x: x[:, 0],
            {},
            "store='topk:8' is for logits, floats .* returned logits, name without any",
        ),
        (lambda x: x.long(), {}, "is for logits"),
        (
            lambda x: x.index_fill(2, torch.tensor(7), torch.nan),
            {},
            r"output 'logits' of sample 'clip-0000-000000' has NaN, an infinity or no finite logit at position 0",
        ),
        (
            lambda x: x.index_fill(1, torch.tensor(2), torch.inf),
            {"store": "sampled:5"},
            "at position 2",
        ),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name(base, tmp_path, spoil, options, says) -> None:
    def model(batch):
        outputs = SPEAKER(batch)
        return {**outputs, "logits": spoil(outputs["logits"])}

    with pytest.raises(ConfigError, match=says):
        run(base, tmp_path / "layer", model, **options)


def test_a_vocabulary_that_changes_between_batches_is_refused(base, tmp_path) -> None:
    def model(batch):
        return {
            "logits": torch.zeros(2, LENGTH, SIZE + (7 in batch["global_index"]))[
                : len(batch["img"])
            ]
        }

    with pytest.raises(
        ConfigError,
        match=r"sample 'clip-0001-000003' is \[6, 301\]; the table has logits \[T, 300\]",
    ):
        run(base, tmp_path / "layer", model)


def test_tokens_that_are_masked_out_have_no_probability() -> None:
    entry = Channel(
        name="it",
        kind="logits_sampled",
        field="it.lgt",
        law=Law("fixed"),
        axes=("p", "t"),
        shape=(None, 9),
        vocabulary=Vocabulary("w", 5),
    )
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 1.0, -torch.inf]])
    assert {*Reduction()(logits, entry, "a").indices[0].tolist()} == {1, 3}


TEACHER = """
import os, time
import torch

class Speaker(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(4 * torch.randn(11, 6, 300, generator=torch.Generator().manual_seed(1)))

    def forward(self, batch):
        time.sleep(float(os.environ.get("SLOW", "0")))
        return {"logits": self.table[batch["global_index"]]}
"""


@pytest.mark.process
@pytest.mark.long
@pytest.mark.parametrize("store", ["topk:8", "sampled:8"])
def test_kills_do_not_show(base, tmp_path, store) -> None:
    (tmp_path / "speaker.py").write_text(TEACHER)
    words = [
        "--model",
        "speaker:Speaker",
        "--batch-size",
        "2",
        "--workers",
        "1",
        "--store",
        store,
        "--positions",
        "0.5",
    ]
    start = [sys.executable, "-m", "fuelrail", "annotate", str(base)]
    environment = {
        **os.environ,
        "PYTHONPATH": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }

    def began(out):
        return subprocess.Popen(
            [*start, out, *words],
            cwd=tmp_path,
            env={**environment, "SLOW": "0.5"},
        )

    uninterrupted_run = subprocess.run(
        [*start, "a/teacher", *words, "--json"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        check=True,
    )
    assert json.loads(uninterrupted_run.stdout)["num_written"] == NUM
    for wait_s in (0.3, 1.2):
        process = began("b/teacher")
        while (
            process.poll() is None
            and not (tmp_path / "b" / "teacher" / ".fuelrail" / "layer.json").exists()
        ):
            time.sleep(0.05)
        time.sleep(wait_s)
        process.send_signal(signal.SIGKILL)
        process.wait()
    subprocess.run([*start, "b/teacher", *words], cwd=tmp_path, env=environment, check=True)
    assert digests(tmp_path / "b" / "teacher") == digests(tmp_path / "a" / "teacher")
