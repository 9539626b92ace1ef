"""`fuelrail view` and `fuelrail doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fuelrail.pipeline.command import Command
from fuelrail.pipeline.errors import ConfigError

if TYPE_CHECKING:
    import argparse


def _configure_view(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dataset", metavar="OUT", help="folder of a Fuelrail dataset")
    parser.add_argument("key", nargs="?", help="sample key; left out: the first sample of the dataset")
    parser.add_argument("--image", metavar="YAML", help="image settings; default 704x256 from the bottom")
    parser.add_argument("--train", action="store_true", help="augment as a loader does, for this seed and epoch")
    parser.add_argument("--seed", type=int, default=0, help="of the augmentation (default 0)")
    parser.add_argument("--epoch", type=int, default=0, help="of the augmentation (default 0)")
    parser.add_argument("--output", "-o", default="contact_sheet.png", metavar="PNG", help="default contact_sheet.png")


def _run_view(args: argparse.Namespace) -> int:
    import cv2
    import msgspec

    from fuelrail.loaders.loader import DEFAULT_IMAGE
    from fuelrail.loaders.reader import SampleReader
    from fuelrail.loaders.view import contact_sheet, decode_single
    from fuelrail.pipeline.augment import ImageAugment
    from fuelrail.pipeline.dataset import open_dataset
    from fuelrail.pipeline.settings import load_yaml
    from fuelrail.pipeline.text import shown

    for name in ("seed", "epoch"):
        if getattr(args, name) < 0:
            raise ConfigError(f"--{name} {getattr(args, name)} must be 0 or more")
    output = Path(args.output)
    if output.suffix.lower() != ".png":
        raise ConfigError(f"--output {args.output!r} must end with .png")
    dataset = open_dataset(args.dataset)
    reader = SampleReader(dataset)
    row = 0 if args.key is None else reader.find(args.key)
    sample = reader.sample(row)
    image = load_yaml(args.image, ImageAugment) if args.image else DEFAULT_IMAGE
    image = msgspec.structs.replace(image, train=args.train)
    cameras = [camera.channel for camera in dataset.manifest.cameras]
    try:
        batch = decode_single(sample, cameras, image, seed=args.seed, epoch=args.epoch, row=row)
        sheet = contact_sheet(
            batch["img"][0].numpy(), batch["ego2img"][0].numpy(), cameras, sample.boxes, dataset.manifest.classes
        )
        encoded = cv2.imencode(".png", sheet[..., ::-1])[1].tobytes()
    except MemoryError as error:
        num_bytes = len(cameras) * 3 * image.height * image.width
        raise ConfigError(
            f"no memory to draw {len(cameras)} cameras of {image.width}x{image.height} pixels, {num_bytes} bytes and "
            "the same for the sheet: give a smaller height and width with --image"
        ) from error
    try:
        output.write_bytes(encoded)
    except OSError as error:
        raise ConfigError(f"--output '{output}' cannot be written: {error.strerror}") from error
    num_boxes = 0 if sample.boxes is None else len(sample.boxes.boxes3d)
    print(f"{shown(sample.key)}: {len(sample.images)} cameras, {num_boxes} boxes -> {output}")  # noqa: T201
    return 0


def _run_doctor(args: argparse.Namespace) -> int:  # noqa: ARG001
    from fuelrail.loaders.doctor import examine, render

    print(render(examine()))  # noqa: T201
    return 0


COMMANDS = {
    "view": Command(
        "draw a sample's cameras and boxes, through the augmentation, as a PNG", _configure_view, _run_view
    ),
    "doctor": Command("say what is installed to decode with, and what would be better", lambda _: None, _run_doctor),
}
