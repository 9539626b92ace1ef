"""Image classification in folders of classes, as torchvision's `ImageFolder` reads them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.text import shortened
from fuelrail.sharding.sources.adapter.classes import SOURCE
from fuelrail.sharding.sources.adapter.frame import Clip, Frame, Image, Sensors
from fuelrail.sharding.sources.adapter.rows import attribute_types
from fuelrail.sharding.sources.adapter.source import FrameSettings, FrameSource
from fuelrail.sharding.sources.shared.pictures import EXTENSION_OF

_NAMES: Final = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation"),
    "test": ("test", "testing"),
}
_SPLITS: Final = {name: split for split, names in _NAMES.items() for name in names}
"""Folders that are splits where all folders are."""
_CAMERA: Final = "image"


class ImageFolder(FrameSource[FrameSettings]):
    """Class folders of JPEG and PNG images: CLASS/IMAGE or SPLIT/CLASS/IMAGE, with the class as the
    attribute cls.

    There are splits if all folders are called `train`, `val` (`valid`, `validation`) or `test` and
    hold no images. An image is a clip of one sample with the camera `image`; its path is
    `sample_token`. Bytes after its end are stored, never decoded.

    - The attribute `cls`, in batches too, numbers the classes by name, over all splits, as
      torchvision does. `fr.open(OUT).manifest.classes` has the names.
    - `-o classes=FILE` maps folders to other classes, several to one, or to none (-1).
    """

    kind = "imagefolder"
    time_base = "none"
    has_poses = False
    columns = {"cls": int}  # noqa: RUF012 - of a class, which does not change it

    def __init__(self, location: str, options: dict[str, object]) -> None:
        super().__init__(location, options)
        self._numbers: dict[str, int] = {}

    @property
    def attribute_types(self) -> dict[str, type]:
        """Columns of attributes; none counts boxes of a class."""
        return attribute_types((), self.columns)

    def _list_folders(self) -> dict[str, list[str]]:
        """Return the class folders by split, "" where there are no splits, in the order of
        names.
        """
        folders = self.files.folders()
        inside = (
            {folder: self.files.folders(folder) for folder in folders}
            if {*folders} <= _SPLITS.keys()
            else {}
        )
        if any(inside.values()):
            return inside
        return {"": folders}

    def category_names(self) -> list[str]:
        """Return the classes of all splits, in the order of names; an empty one has its number
        too.
        """
        folders = self._list_folders().values()
        return sorted({name for names in folders for name in names})

    def sensors(self) -> Sensors:
        """Return the one camera."""
        return Sensors.from_names([_CAMERA])

    def clips(self) -> Iterator[Clip]:
        """Yield a clip for each image: nothing says that one follows another."""
        names = self.category_names()
        self._numbers = {name: number for number, name in enumerate(names)}
        if self.settings.classes != SOURCE:
            labels = self._classes().labels(names)
            self._numbers = dict(zip(names, labels.tolist(), strict=True))
        num_images = 0
        for folder, classes in self._list_folders().items():
            for name in classes:
                inside = f"{folder}/{name}" if folder else name
                listed = self.files.listed(inside)
                images = [
                    name_listed
                    for name_listed in listed
                    if name_listed.rpartition(".")[2].lower() in EXTENSION_OF
                ]
                num_images += len(images)
                for image in images:
                    yield Clip(
                        name=f"{inside}/{image}",
                        token=name,
                        split=_SPLITS.get(folder, ""),
                    )
                num_skipped = len(listed) - len(images)
                if num_skipped:
                    self.noted[f"{inside}: files and folders left out, no JPEG or PNG"] += (
                        num_skipped
                    )
                if not images:
                    self.noted[f"{inside}: a class without an image"] += 1
            for lacking in sorted({*names}.difference(classes)):
                self.noted[f"{folder}: no folder of class {lacking}"] += 1
        if not num_images:
            for folder, classes in self._list_folders().items():
                for name in classes:
                    inside = f"{folder}/{name}" if folder else name
                    for deeper in self.files.folders(inside):
                        listed = self.files.listed(f"{inside}/{deeper}")
                        if any(
                            image.rpartition(".")[2].lower() in EXTENSION_OF for image in listed
                        ):
                            raise SourceError(
                                f"'{self.files.shown}' has no images in its folders of classes, "
                                f"but in folders below them, such as '{inside}/{deeper}': give "
                                "the folder that the classes are in, "
                                f"imagefolder:{self.files.shown}/{inside}"
                            )

    def frames(self, clip: Clip) -> Iterator[Frame]:
        """Yield the image. It has no time, calibration or pose."""
        if not clip.name.isprintable():
            raise SourceError(
                f"'{self.files.shown}/{shortened(clip.name)}': the name cannot be printed: "
                "rename it"
            )
        image = Image(ref=clip.name, timestamp_ns=0)
        yield Frame(
            timestamp_ns=0,
            images={_CAMERA: image},
            token=clip.name,
            attributes={"cls": self._numbers[clip.token]},
        )
