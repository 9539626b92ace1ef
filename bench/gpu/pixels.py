"""GPU checks of pixels: every kind of image against libjpeg-turbo, bad ones among good ones, any place in a batch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from fuelrail.bench.gpu.base import Bench, CheckFailed, keep_busy, require_dali
from fuelrail.bench.gpu.cameras import SOURCE_WH
from fuelrail.bench.gpu.images import KINDS, bad_jpegs, jpeg
from fuelrail.loaders import ImageAugment, Transforms
from fuelrail.loaders.decode import make_decoder
from fuelrail.loaders.decode.protocol import BatchDecoder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fuelrail.pipeline.transforms.image_map import ImageMap

_MIN_PSNR_DB = 35.0
_MAX_TWIN_LEVELS = 2
_TRAIN = ImageAugment(
    height=256, width=704, train=True, resize_range=(0.38, 0.55), rotate_deg=(-5.4, 5.4), flip_prob=0.5, crop_y="bottom"
)
_PRESSURE_CYCLES = 5_000_000


class _Batch(NamedTuple):
    kinds: list[str]
    encoded: list[bytes]
    maps: list[ImageMap]


def decoders_agree(bench: Bench, facts: dict[str, Any]) -> None:
    """Every image of every kind, straight and turned, is what libjpeg-turbo makes of it; twins are equal.

    The reference decodes on the CPU. A restart-marked twin has the same coefficients as its plain image, so that only
    splicing may change its pixels, by levels and not more.
    """
    decoder, reference = _decoder(bench), make_decoder("pillow")
    batch = _corpus(bench.pick(8, 2))
    pictures = _decoded(decoder, batch)
    lowest: dict[str, float] = {}
    expected = np.empty(pictures.shape[1:], np.uint8)
    for kind, data, image_map, picture in zip(batch.kinds, batch.encoded, batch.maps, pictures, strict=True):
        reference.decode_into(data, image_map, expected)
        lowest[kind] = min(lowest.get(kind, math.inf), _psnr_db(picture, expected))
    facts |= {
        "reference": reference.name,
        "images": len(batch.kinds),
        "lowest_psnr_db": {kind: round(psnr_db, 1) for kind, psnr_db in lowest.items()},
        "left_to_turbo": getattr(decoder, "num_refused", 0),
    }
    of_kind = {kind: pictures[[at for at, one in enumerate(batch.kinds) if one == kind]] for kind in KINDS}
    twins = np.abs(of_kind["plain"].astype(np.int16) - of_kind["restart"])
    facts["restart_twins_differ_by"] = {"largest": int(twins.max()), "mean": round(float(twins.mean()), 5)}
    if facts["left_to_turbo"] or min(lowest.values()) < _MIN_PSNR_DB:
        raise CheckFailed(f"pictures are not as they must be (at least {_MIN_PSNR_DB:g} dB, none refused)")
    if twins.max() > _MAX_TWIN_LEVELS and twins.mean() > 0.01:
        raise CheckFailed(f"images with restart markers differ from their plain twins by {int(twins.max())} levels")


def pixels_do_not_depend_on_company(bench: Bench, facts: dict[str, Any]) -> None:
    """An image decodes to the same bytes at any place, among other images and bad ones, and under load.

    This finds a share of the batch that another engine decodes, and decoding that overtakes work on its stream.
    """
    decoder = _decoder(bench)
    batch = _corpus(bench.pick(4, 1))
    alone = _decoded(decoder, batch)
    rounds, worst = bench.pick(30, 2), 0
    for number in range(1, rounds + 1):
        moved = _Batch(*(_rolled(part, number) for part in batch))
        if bench.on_gpu:
            keep_busy(_PRESSURE_CYCLES)
        found = _decoded(decoder, moved)
        worst = max(worst, int(np.abs(np.roll(alone, number, axis=0).astype(np.int16) - found).max()))
    bad = bad_jpegs()
    mixed, maps = [*batch.encoded], [*batch.maps]
    for at, data in enumerate(bad):
        mixed.insert(2 * at, data)
        maps.insert(2 * at, batch.maps[0])
    out = _new(decoder, len(mixed))
    errors = decoder.decode_batch(mixed, maps, out)
    refused = [at for at, error in enumerate(errors) if error is not None]
    good = [at for at in range(len(mixed)) if at not in {2 * number for number in range(len(bad))}]
    among_bad = int(np.abs(out[good].cpu().numpy().astype(np.int16) - alone).max())
    facts |= {
        "rounds": rounds,
        "largest_difference": worst,
        "refused": refused,
        "largest_difference_among_bad": among_bad,
    }
    if set(refused) - {2 * number for number in range(len(bad))} or len(refused) < 2:
        raise CheckFailed(
            f"of the bad images at {[2 * number for number in range(len(bad))]} those at {refused} were refused"
        )
    if worst or among_bad:
        raise CheckFailed(f"the same image differs by {max(worst, among_bad)} levels at another place of a batch")


def _decoder(bench: Bench) -> BatchDecoder:
    require_dali()
    decoder = make_decoder("dali", str(bench.device))
    assert isinstance(decoder, BatchDecoder), "DALI takes batches"
    return decoder


def _corpus(count: int) -> _Batch:
    """``count`` pictures of each kind, half of them turned."""
    kinds = [kind for kind in KINDS for _ in range(count)]
    encoded = [jpeg(kind, number) for kind in KINDS for number in range(count)]
    straight, turned = Transforms().image, _TRAIN
    maps = [
        (turned if number % 2 else straight).draw([SOURCE_WH], seed=7, epoch=0, sample=number)[0]
        for _ in KINDS
        for number in range(count)
    ]
    return _Batch(kinds, encoded, maps)


def _decoded(decoder: BatchDecoder, batch: _Batch) -> Any:  # noqa: ANN401 - uint8 [n, 3, 256, 704]
    out = _new(decoder, len(batch.encoded))
    errors = [error for error in decoder.decode_batch(batch.encoded, batch.maps, out) if error is not None]
    if errors:
        raise CheckFailed(f"{len(errors)} of {len(batch.encoded)} good images cannot be decoded: {errors[0]}")
    return out.cpu().numpy()


def _new(decoder: BatchDecoder, count: int) -> torch.Tensor:
    shape = (count, 3, _TRAIN.height, _TRAIN.width)
    # On the CPU there is no stream to allocate on.
    return torch.empty(shape, dtype=torch.uint8) if decoder.device.type == "cpu" else decoder.new_output(shape)


def _rolled(part: Sequence[Any], number: int) -> list[Any]:
    number %= len(part)
    return [*part[len(part) - number :], *part[: len(part) - number]]


def _psnr_db(picture: Any, expected: Any) -> float:  # noqa: ANN401 - uint8 arrays
    error = float(np.mean((picture.astype(np.float32) - expected) ** 2))
    return 10 * math.log10(255**2 / error) if error else math.inf
