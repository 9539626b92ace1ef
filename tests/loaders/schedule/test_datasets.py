from __future__ import annotations

from functools import partial

from fuelrail.loaders.schedule.datasets import image_facts, make_sources
from fuelrail.loaders.storage import open_storage
from fuelrail.pipeline.format.dataset import open_dataset
from support.datasets import build_dataset


def facts_of(*roots, verify: bool = True):
    datasets = {root.name: open_dataset(root) for root in roots}
    options = {
        "points": False,
        "sweeps": False,
        "chosen": {},
        "layers": {},
        "named": len(roots) > 1,
    }
    return image_facts(
        make_sources(datasets, "train", partial(open_storage, verify=verify), **options)
    )


def test_sizes_are_the_largest_of_all_manifests(build_once) -> None:
    wide, _ = build_once({"train": (12,)}, size=(80, 48))
    high, _ = build_once({"train": (4,)}, size=(64, 72))
    assert facts_of(wide)[:2] == ((80, 48), 1.0)
    assert facts_of(wide, high)[:2] == ((80, 72), 1.0)


def test_progressive_images_are_counted_and_bad_samples_left_out(
    tmp_path,
) -> None:
    raw = build_dataset(tmp_path / "d", {"train": (12,)}, size=(80, 48))
    shard = tmp_path / "d" / "train-000000.tar"
    image = raw[min(raw)]["cam_front.jpg"]
    start_of_frame = image.index(b"\xff\xc0")
    progressive = (
        image[:start_of_frame] + b"\xff\xc2" + image[start_of_frame + 2 :]
    )  # a header is all that is read
    shard.write_bytes(shard.read_bytes().replace(image, progressive))
    assert facts_of(tmp_path / "d", verify=False).baseline_share == 7 / 8
    assert facts_of(tmp_path / "d").baseline_share == 1.0  # its digest is wrong
