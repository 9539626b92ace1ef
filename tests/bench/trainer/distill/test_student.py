"""Distillation: a layer teaches as its model does, and what the student cannot learn from is refused."""

from __future__ import annotations

from functools import partial
from itertools import islice

import numpy as np
import pytest
import torch
import torch.distributed as dist

from fuelrail import DataLoader, ImageAugment, Transforms
from fuelrail.bench.annotation.run import annotate
from fuelrail.bench.studies.train.run import bench_train
from fuelrail.bench.trainer.checkpoints.saver import Checkpoints
from fuelrail.bench.trainer.distill.settings import weights_of
from fuelrail.bench.trainer.distill.student import distilled, divergence
from fuelrail.bench.trainer.distill.teacher import LAYER, Teacher
from fuelrail.bench.trainer.models.build import build_model
from fuelrail.bench.trainer.models.settings import MODELS
from fuelrail.bench.trainer.strategies.parallel import parallelise
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.transforms.ego import BevAugment
from fuelrail.sharding.write.layers.writer import LayerWriter
from support.datasets import build_dataset
from support.models import build
from support.parallel_equality import train_step

IMAGE = ImageAugment(height=64, width=96)
FIXED = {"name": "fixed"}
GRID = {"name": "ego_grid", "extent_m": [-51.2, -51.2, 51.2, 51.2]}
STEPS = 4


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A dataset, the checkpoints of a teacher, and layers of its predictions in two precisions."""
    folder = tmp_path_factory.mktemp("distil")
    build_dataset(folder / "data", {"train": (4, 4)})
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for name in ("vit-tiny", "resnet-tiny"):
            parallel = parallelise(partial(build_model, MODELS[name]), seed=3)
            checkpoints = Checkpoints(str(folder / name), keep=1, identity={"model": name})
            checkpoints.save(1, parallel, {})
            checkpoints.close()
    finally:
        dist.destroy_process_group()
    teacher = Teacher(str(folder / "vit-tiny"))
    for store in ("as_is", "float16"):
        annotate(
            folder / "data",
            folder / store,
            teacher.outputs,
            store=store,
            transforms=Transforms(image=IMAGE),
        )
    return folder


def losses(place, settings, *, student="bev-tiny", **transforms):
    layers = {LAYER: settings["layer"]} if settings and "layer" in settings else None
    loader_transforms = Transforms(image=IMAGE, **transforms)
    with DataLoader(
        place / "data",
        2,
        num_workers=1,
        transforms=loader_transforms,
        layers=layers,
    ) as loader:

        def wrap(model):
            return model

        teacher = None
        if settings is not None:
            wrap, teacher = distilled(MODELS[student], loader, "cpu", **settings)
        parallel = parallelise(lambda: wrap(build_model(MODELS[student])))
        parallel.teacher = teacher
        return [train_step(parallel, batch) for batch in islice(loader, STEPS)]


ALL_PARTS = "labels=0.5,logits=1,features=0.3,targets=0.7"


@pytest.mark.costly
@pytest.mark.parametrize(("store", "largest"), [("as_is", 2e-6), ("float16", 1e-3)])
def test_a_layer_teaches_as_the_model_beside_the_student_does(place, store, largest):
    online = losses(place, {"teacher": str(place / "vit-tiny"), "weights": ALL_PARTS})
    offline = losses(place, {"layer": str(place / store), "weights": ALL_PARTS})
    assert (
        max(
            abs(online_loss - offline_loss)
            for online_loss, offline_loss in zip(online, offline, strict=True)
        )
        < largest
    )
    assert len(set(online)) == len(online)


@pytest.mark.costly
def test_every_part_and_the_temperature_change_what_the_student_learns(place):
    teacher = {"teacher": str(place / "vit-tiny"), "weights": "logits=1"}
    parts = ("features=1", "targets=1", "labels=1,logits=1")
    settings = [None, teacher, {**teacher, "temperature": 5.0}]
    settings += [{**teacher, "weights": weights} for weights in parts]
    assert len({tuple(losses(place, distillation)) for distillation in settings}) == len(settings)


def test_divergence_is_that_of_torchs_distributions():
    student = torch.randn(2, 5, 7)
    teacher = torch.randn(2, 5, 7)
    kinds = (
        (torch.distributions.Bernoulli, True),
        (torch.distributions.Categorical, False),
    )
    for kind, binary in kinds:
        expected = (
            torch.distributions.kl_divergence(kind(logits=teacher / 3), kind(logits=student / 3))
            * 9
        )
        torch.testing.assert_close(
            divergence(student, teacher, 3.0, binary=binary),
            expected,
            rtol=1e-4,
            atol=1e-5,
        )
        assert divergence(student, student, 3.0, binary=binary).abs().max() == 0


def write(place, name, channels, value):
    with LayerWriter(place / "data", place / name, channels=channels) as writer:
        for row in range(8):
            writer.write(row, value(row))
    writer.finish()
    return str(place / name)


def logits_channel(law=GRID, shape=(8, 8)):
    head = {
        "name": "logits",
        "kind": "array",
        "field": "logits.npy",
        "dtype": "float32",
        "law": law,
    }
    frame = {} if law == FIXED else {"frame": "ego"}
    return {
        **head,
        **frame,
        "axes": ["x", "y"][: len(shape)],
        "shape": list(shape),
    }


@pytest.mark.costly
def test_logits_of_a_grid_move_with_the_ego_augmentation(place):
    """A teacher that says what the labels say is right on mirrored samples too, by the law of its channel."""

    def occupied(row):
        with DataLoader(
            place / "data",
            1,
            shuffle=False,
            num_workers=1,
            transforms=Transforms(image=IMAGE),
        ) as loader:
            batch = next(islice(loader, row, None))
        target = build(MODELS["bev-tiny"], "cpu", 0).inputs(batch)[-2]
        return {"logits": np.where(target.view(8, 8) > 0, 20, -20).astype(np.float32)}

    layer = write(place, "grid", [logits_channel()], occupied)
    flip = BevAugment(train=True, flip_x_prob=1.0)
    labels = losses(place, None, ego=flip)
    taught = losses(place, {"layer": layer, "weights": "targets=1"}, ego=flip)
    assert taught == pytest.approx(labels, abs=1e-6)


@pytest.mark.costly
def test_detections_of_a_layer_take_the_labels_place(place):
    def boxes(row):
        return {"detections": {"box": np.array([[3.0 * row - 20, 5, 0, 4, 2, 1.5, 0]], np.float32)}}

    roles = {"name": "ego_boxes", "roles": {"boxes": [["box"]]}}
    table = {
        "name": "detections",
        "kind": "ragged",
        "field": "detections.safetensors",
        "law": roles,
        "frame": "ego",
    }
    arrays = [{"name": "box", "dtype": "float32", "shape": [7]}]
    layer = write(place, "detections", [{**table, "arrays": arrays}], boxes)
    layer_losses = losses(place, {"layer": layer, "weights": "targets=1"})
    assert layer_losses != losses(place, None)
    assert layer_losses[-1] < layer_losses[0]


FLIPPED = {"ego": BevAugment(train=True, flip_x_prob=0.5)}


@pytest.mark.parametrize(
    ("settings", "transforms", "message"),
    [
        (
            {"layer": "narrow"},
            {},
            r"must have a channel 'logits' of \[8, 8\].*it has \[10\]",
        ),
        (
            {"layer": "narrow", "weights": "features=1"},
            {},
            r"must have a channel 'features_cam_front'.*its channels are teacher.logits",
        ),
        (
            {"layer": "still"},
            FLIPPED,
            "law 'fixed', and the samples are augmented; give it the law 'ego_grid'",
        ),
        (
            {"teacher": "resnet-tiny"},
            {},
            r"teacher 'resnet-tiny' predicts .* the student",
        ),
        ({"teacher": "nothing"}, {}, "has no whole checkpoint"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused_before_training(
    place, settings, transforms, message
):
    shape = {"narrow": (10,), "still": (8, 8)}.get(settings.get("layer"))
    if shape is not None and not (place / settings["layer"]).exists():
        channel = logits_channel(FIXED, shape)
        write(
            place,
            settings["layer"],
            [channel],
            lambda _: {"logits": np.zeros(shape, np.float32)},
        )
    paths = {name: str(place / value) for name, value in settings.items() if name != "weights"}
    with pytest.raises(ConfigError, match=message):
        losses(place, settings | paths, **transforms)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("logits", "write PART=WEIGHT with a weight above 0"),
        ("logits=0", "write PART=WEIGHT"),
        ("logits=1,logits=2", "each part once"),
        ("heat=1", "parts: labels, logits, features, targets"),
        ("labels=1", "takes nothing from the teacher"),
    ],
)
def test_weights_that_cannot_be_meant_are_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        weights_of(text)


def test_weights_are_read_by_name():
    assert weights_of("logits=2, labels=0.5") == {"logits": 2.0, "labels": 0.5}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 3.0}, "temperature=3.0 needs a teacher"),
        ({"teacher": "a", "teacher_layer": "b"}, "exclude each other"),
        (
            {"teacher": "a", "distill": "labels=1"},
            "takes nothing from the teacher",
        ),
    ],
)
def test_options_without_sense_are_refused_before_a_rank_starts(place, tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        bench_train(
            place / "data",
            out=tmp_path,
            accelerator="emulated:resnet50-224-h100",
            **options,
        )
