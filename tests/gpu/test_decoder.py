"""GPU checks of DALI's decoder: its first runs, its best rate and our share of it, and its pixels.

As a program, ``test_decoder.py GRAPH DEVICE``, it runs one graph and prints the facts as JSON: a check starts it as a
process, because a fault of the decoder's may end the process.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from fuelrail import ImageAugment
from fuelrail.bench.measure.nvml import NvmlWatch
from fuelrail.bench.studies.loader.report import LoaderOptions
from fuelrail.bench.studies.loader.stages import measure_stages, record_stages
from fuelrail.loaders.decode import make_decoder
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.sample.image_header import probe
from support import gpu_bench
from support.backends import needs_dali
from support.cameras import SOURCE_WH
from support.gpu_bench import (
    CUDA,
    KINDS,
    Bench,
    cameras,
    check,
    jpeg,
    jpeg_engines,
    keep_busy,
    with_dali,
)
from support.nvml_watch import Watch

GRAPHS = {
    "image": "whole images, resized as the loader does",
    "image_slice": "regions, which the loader avoids",
}
_LOADS = (0.0, 0.12, 0.3, 0.65, 1.0)
_BATCHES = (64, 126, 252, 504)
_NUM_PICTURES = 8
_MIN_SHARE = 0.95
_TIMEOUT_S = 120.0
_MIN_PSNR_DB = 35.0
_MAX_TWIN_LEVELS = 2
_TRAIN = ImageAugment(
    height=256,
    width=704,
    train=True,
    resize_range=(0.38, 0.55),
    rotate_deg=(-5.4, 5.4),
    flip_prob=0.5,
    crop_y="bottom",
)
_PRESSURE_CYCLES = 5_000_000


@check(40, lane=pytest.mark.process)
@with_dali
def test_first_runs_of_the_decoder(bench, facts, decoder):
    """Each graph runs for the first time in a process of its own; the one that the loader uses must live."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for graph in GRAPHS:
        command = [sys.executable, __file__, graph, str(bench.device)]
        try:
            done = subprocess.run(
                command,
                env=environment,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            facts[graph] = {"ended": f"did not end in {_TIMEOUT_S:.0f} s"}
            continue
        if done.returncode == 0:
            facts[graph] = json.loads(done.stdout.splitlines()[-1])
        else:
            how = (
                signal.Signals(-done.returncode).name
                if done.returncode < 0
                else f"exit code {done.returncode}"
            )
            facts[graph] = {"ended": f"{how}: {done.stderr.strip()[-500:]}"}
    found = facts["image"]
    assert "ended" not in found, f"the graph that the loader uses ended in {found['ended']}"
    assert not bench.on_gpu or found["jpeg_engines_busy"], (
        f"the JPEG engines were idle in it ({found['nvml']}): CUDA cores or CPUs decoded"
    )


@check(110)
@with_dali
def test_share_of_the_bare_decoder(bench, facts, decoder):
    """The loader's decode stage reaches 95 % of the decoder alone where all goes to the engines; the best for both.

    Bare is nvImageCodec's decoder inside DALI with nothing behind it, whole images, over share and batch size. Share 1
    costs about no CPU; other shares use the node's CPUs as well.
    """
    seconds = bench.pick(1.0, 0.05)
    loads, batches = bench.pick((_LOADS, _BATCHES), ((1.0,), (8,)))
    plain = [jpeg("plain", number) for number in range(bench.pick(_NUM_PICTURES, 2))]
    bare: dict[str, dict[str, float]] = {}
    facts["bare_images_per_s"] = bare
    with jpeg_engines(bench, "dali", facts, "jpeg_engines_busy_bare"):
        for load in sorted(loads, reverse=True):
            for batch in batches:
                bare.setdefault(f"share {load:g}", {})[str(batch)] = _bare(
                    plain,
                    device=bench.device,
                    load=load,
                    batch=batch,
                    seconds=seconds,
                )
    for kind in ("restart", "4:2:2", "gray"):
        with jpeg_engines(bench, "turbo", facts, f"jpeg_engines_busy_{kind}"):
            rate = _bare(
                [jpeg(kind)],
                device=bench.device,
                load=1.0,
                batch=batches[-1],
                seconds=seconds,
            )
        bare[f"{kind}, share 1"] = {str(batches[-1]): rate}
    with jpeg_engines(bench, "dali", facts, "jpeg_engines_busy_ours"):
        ours = {kind: _stage_rate(bench, kind, 3 * seconds) for kind in ("plain", "restart")}
    engines = max(bare["share 1"].values())
    best = max(max(rates.values()) for rates in bare.values())
    share = ours["plain"] / engines
    facts |= {
        "decode_stage_images_per_s": {kind: round(rate, 1) for kind, rate in ours.items()},
        "share_of_bare_engines": round(share, 3),
        "share_of_best": round(ours["plain"] / best, 3),
    }
    assert not bench.on_gpu or share >= _MIN_SHARE, (
        f"the decode stage reaches {share:.0%} of the decoder alone at the same share, not 95 %"
    )


def _stage_rate(bench, kind, seconds):
    """Images per second of a loader's decode stage alone, on its own threads."""
    dataset = open_dataset(cameras(bench, kind))
    batch_size = bench.pick(16, 2)
    options = LoaderOptions(batch_size=batch_size, workers=2, decoder="dali")
    device = str(bench.device) if bench.on_gpu else None
    recorded = record_stages(dataset, options, num_batches=2, device=device)
    (rate,) = measure_stages(
        [entry for entry in recorded if entry.stage.name == "decode"],
        batch_size,
        seconds,
    )
    return rate.samples_per_s * len(dataset.manifest.cameras)


def _bare(images, device, load, batch, seconds):
    pipeline = _pipeline(images, device, load=load, batch=batch, graph=None)
    for _ in range(2):
        pipeline.run()
    started_s = time.perf_counter()
    runs = 0
    while runs == 0 or time.perf_counter() - started_s < seconds:
        pipeline.run()
        runs += 1
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return round(runs * batch / (time.perf_counter() - started_s), 1)


def _pipeline(images, device, *, load, batch, graph):
    """Return a built pipeline over the images: decoding alone, or one of `GRAPHS`."""
    from nvidia.dali import Pipeline, fn, types

    arrays = [np.frombuffer(images[number % len(images)], np.uint8) for number in range(batch)]
    on_gpu = device.type == "cuda"
    options: dict[str, Any] = {
        "output_type": types.RGB,
        "jpeg_fancy_upsampling": True,
        "adjust_orientation": False,
    }
    if on_gpu:
        hints = {
            "preallocate_width_hint": 1600,
            "preallocate_height_hint": 900,
            "affine": False,
        }
        options |= {"device": "mixed", "hw_decoder_load": load, **hints}
    pipeline = Pipeline(
        batch,
        4,
        (device.index or 0) if on_gpu else None,
        prefetch_queue_depth=2,
    )
    with pipeline:
        encoded = fn.external_source(source=lambda: arrays, dtype=types.UINT8, ndim=1)
        if graph == "image_slice":
            pictures = fn.decoders.image_slice(
                encoded,
                start=[300, 0],
                end=[900, 1600],
                axis_names="HW",
                **options,
            )
        else:
            pictures = fn.decoders.image(encoded, **options)
        if graph == "image":
            pictures = fn.resize(
                pictures,
                roi_start=[311, 0],
                roi_end=[900, 1600],
                size=[256, 704],
                antialias=True,
            )
        pipeline.set_outputs(pictures)
    pipeline.build()
    return pipeline


def _first_run(graph, device):
    batch, seconds = (126, 3.0) if device.type == "cuda" else (4, 0.1)
    pipeline = _pipeline([jpeg("plain")], device, load=1.0, batch=batch, graph=graph)
    started_s = time.perf_counter()
    runs = 0
    with NvmlWatch(1 if device.type == "cuda" else 0) as watch:
        while runs == 0 or time.perf_counter() - started_s < seconds:
            (pictures,) = pipeline.run()
            runs += 1
    use = watch.use()
    return {
        "images_per_s": round(runs * batch / (time.perf_counter() - started_s), 1),
        "mean_level": round(float(np.asarray(pictures.as_cpu()[0]).mean()), 1),
        "jpeg_engines_busy": None if use is None else use[0].jpeg,
        "nvml": watch.reason,
    }


class _Batch(NamedTuple):
    kinds: list
    encoded: list
    maps: list


@check(30, twins=("cpu", "fake"))
@with_dali
def test_decoders_agree(bench, facts, decoder):
    """Every image of every kind, straight and turned, is what libjpeg-turbo makes of it; twins are equal.

    The reference decodes on the CPU. A restart-marked twin has the same coefficients as its plain image, so that only
    splicing may change its pixels, by levels and not more.
    """
    dali = make_decoder("dali", str(bench.device))
    reference = make_decoder("pillow")
    batch = _corpus(bench.pick(8, 2))
    pictures = _decoded(dali, batch)
    lowest: dict[str, float] = {}
    expected = np.empty(pictures.shape[1:], np.uint8)
    for kind, data, image_map, picture in zip(*batch, pictures, strict=True):
        reference.decode_into(data, image_map, expected)
        lowest[kind] = min(lowest.get(kind, math.inf), _psnr_db(picture, expected))
    of_kind = {
        kind: pictures[[at for at, one in enumerate(batch.kinds) if one == kind]] for kind in KINDS
    }
    twins = np.abs(of_kind["plain"].astype(np.int16) - of_kind["restart"])
    facts |= {
        "reference": reference.name,
        "images": len(batch.kinds),
        "lowest_psnr_db": {kind: round(psnr_db, 1) for kind, psnr_db in lowest.items()},
        "left_to_turbo": getattr(dali, "num_refused", 0),
        "restart_twins_differ_by": {
            "largest": int(twins.max()),
            "mean": round(float(twins.mean()), 5),
        },
    }
    assert not facts["left_to_turbo"] and min(lowest.values()) >= _MIN_PSNR_DB, (
        f"pictures are not as they must be (at least {_MIN_PSNR_DB:g} dB, none refused)"
    )
    assert twins.max() <= _MAX_TWIN_LEVELS or twins.mean() <= 0.01, (
        f"images with restart markers differ from their plain twins by {int(twins.max())} levels"
    )


@check(20, twins=("cpu", "fake"))
@with_dali
def test_pixels_do_not_depend_on_company(bench, facts, decoder):
    """An image decodes to the same bytes at any place, among other images and bad ones, and under load.

    This finds a share of the batch that another engine decodes, and decoding that overtakes work on its stream.
    """
    dali = make_decoder("dali", str(bench.device))
    batch = _corpus(bench.pick(4, 1))
    alone = _decoded(dali, batch)
    rounds = bench.pick(30, 2)
    worst = 0
    for number in range(1, rounds + 1):
        moved = _Batch(
            *([*part[-number % len(part) :], *part[: -number % len(part)]] for part in batch)
        )
        if bench.on_gpu:
            keep_busy(_PRESSURE_CYCLES)
        found = _decoded(dali, moved)
        worst = max(
            worst,
            int(np.abs(np.roll(alone, number, axis=0).astype(np.int16) - found).max()),
        )
    # One cut off, one whose header is that of another format, one empty.
    whole = jpeg("plain")
    bad = {0: whole[: len(whole) // 2], 2: b"\x89PNG" + whole[4:], 4: b""}
    mixed = [*batch.encoded]
    maps = [*batch.maps]
    for at, data in bad.items():
        mixed.insert(at, data)
        maps.insert(at, batch.maps[0])
    out = _new(dali, len(mixed))
    refused = [
        at for at, error in enumerate(dali.decode_batch(mixed, maps, out)) if error is not None
    ]
    good = [at for at in range(len(mixed)) if at not in bad]
    among_bad = int(np.abs(out[good].cpu().numpy().astype(np.int16) - alone).max())
    facts |= {
        "rounds": rounds,
        "largest_difference": worst,
        "refused": refused,
        "largest_difference_among_bad": among_bad,
    }
    assert set(refused) <= bad.keys() and len(refused) >= 2, (
        f"of the bad images at {[*bad]} those at {refused} were refused"
    )
    assert not (worst or among_bad), (
        f"the same image differs by {max(worst, among_bad)} levels at another place of a batch"
    )


def _corpus(count):
    """``count`` pictures of each kind, half of them turned."""
    each = [(kind, number) for kind in KINDS for number in range(count)]
    augments = (ImageAugment(height=256, width=704), _TRAIN)
    maps = [
        augments[number % 2].draw([SOURCE_WH], seed=7, epoch=0, sample=number)[0]
        for _, number in each
    ]
    return _Batch([kind for kind, _ in each], [jpeg(*one) for one in each], maps)


def _decoded(decoder, batch):
    """Pictures, uint8 [n, 3, 256, 704]."""
    out = _new(decoder, len(batch.encoded))
    errors = [
        error for error in decoder.decode_batch(batch.encoded, batch.maps, out) if error is not None
    ]
    assert not errors, (
        f"{len(errors)} of {len(batch.encoded)} good images cannot be decoded: {errors[0]}"
    )
    return out.cpu().numpy()


def _new(decoder, count):
    shape = (count, 3, _TRAIN.height, _TRAIN.width)
    # On the CPU there is no stream to allocate on.
    return (
        torch.empty(shape, dtype=torch.uint8)
        if decoder.device.type == "cpu"
        else decoder.new_output(shape)
    )


def _psnr_db(picture, expected):
    error = float(np.mean((picture.astype(np.float32) - expected) ** 2))
    return 10 * math.log10(255**2 / error) if error else math.inf


@pytest.mark.costly
def test_the_data_has_every_kind_of_image():
    found = {kind: probe(jpeg(kind)) for kind in KINDS}
    assert [kind for kind, info in found.items() if info.restart_interval] == ["restart"]
    assert {(info.width, info.height) for info in found.values()} == {(1600, 900)}
    assert [kind for kind in KINDS if b"\xff\xc2" in jpeg(kind)[:700]] == ["progressive"]
    assert jpeg("plain", 1) != jpeg("plain", 2)


def wrong(kind, damage):
    """Decoding that damages one picture: the first, or that of a kind."""
    honest = _decoded

    def tampered(decoder, batch):
        pictures = honest(decoder, batch)
        at = 0 if kind is None else batch.kinds.index(kind)
        pictures[at] = damage(pictures[at])
        return pictures

    return tampered


@pytest.mark.costly
@needs_dali
@pytest.mark.parametrize(
    "damage",
    [lambda image: image[:, :, ::-1].copy(), lambda image: 0],
    ids=["other", "black"],
)
@pytest.mark.parametrize("kind", ["restart", "gray"])
def test_one_wrong_picture_of_one_kind_is_found(kind, damage, bench, monkeypatch):
    monkeypatch.setitem(globals(), "_decoded", wrong(kind, damage))
    facts = {}
    with pytest.raises(AssertionError, match="not as they must be"):
        test_decoders_agree(bench, facts, "dali")
    assert min(facts["lowest_psnr_db"], key=facts["lowest_psnr_db"].get) == kind


@pytest.mark.costly
@needs_dali
def test_pixels_that_depend_on_their_place_are_found(bench, monkeypatch):
    """The first place of each batch is decoded by something else."""
    monkeypatch.setitem(globals(), "_decoded", wrong(None, lambda image: image ^ 1))
    with pytest.raises(AssertionError, match="differs by 1 levels at another place"):
        test_pixels_do_not_depend_on_company(bench, {}, "dali")


@pytest.mark.costly
@pytest.mark.parametrize(("ours", "holds"), [(94.0, False), (96.0, True)])
def test_the_share_is_judged_against_the_best_batch_at_the_same_load(
    ours, holds, bench, monkeypatch
):
    rates = {1.0: {504: 100.0}, 0.12: {64: 300.0}}
    monkeypatch.setattr(gpu_bench, "NvmlWatch", Watch)
    monkeypatch.setitem(
        globals(),
        "_bare",
        lambda _, device, load, batch, seconds: rates.get(load, {}).get(batch, 50.0),
    )
    monkeypatch.setitem(globals(), "_stage_rate", lambda bench, kind, seconds: ours)
    on_gpu = Bench(CUDA, bench.dataset, bench.work, bench.keep, is_small=False)
    facts = {}
    if holds:
        test_share_of_the_bare_decoder(on_gpu, facts, "dali")
    else:
        with pytest.raises(AssertionError, match="94% of the decoder alone at the same share"):
            test_share_of_the_bare_decoder(on_gpu, facts, "dali")
    assert set(facts["bare_images_per_s"]) >= {
        "share 0",
        "share 0.12",
        "share 0.3",
        "share 0.65",
        "share 1",
    }
    assert set(facts["bare_images_per_s"]["share 1"]) == {
        "64",
        "126",
        "252",
        "504",
    }
    assert facts["share_of_best"] == pytest.approx(ours / 300.0, abs=1e-3)


@needs_dali
@pytest.mark.parametrize("graph", [None, *GRAPHS])
def test_the_bare_graphs_of_a_gpu_can_be_defined(graph, monkeypatch):
    """Keywords that this version of DALI does not know raise when a graph is defined; building it needs a GPU."""
    from nvidia.dali import Pipeline

    monkeypatch.setattr(Pipeline, "build", lambda pipeline: None)
    for load in (0.0, 0.65, 1.0):
        _pipeline([jpeg("plain")], CUDA, load=load, batch=4, graph=graph)


@needs_dali
@pytest.mark.process
def test_a_first_run_that_dies_is_reported_and_harms_nothing(bench, tmp_path, monkeypatch):
    dies = tmp_path / "dies"
    dies.write_text("#!/bin/sh\nkill -SEGV $$\n")
    dies.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(dies))
    facts = {}
    with pytest.raises(AssertionError, match="ended in SIGSEGV"):
        test_first_runs_of_the_decoder(bench, facts, "dali")
    assert facts["image"]["ended"].startswith("SIGSEGV")


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_first_run(sys.argv[1], torch.device(sys.argv[2]))) + "\n")
