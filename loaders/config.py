"""The loader's settings."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    Literal,
    Never,
    TypeAlias,
)

import msgspec
import numpy as np
from msgspec import Meta

from fuelrail.loaders.decode.lens import Undistort
from fuelrail.loaders.decode.protocol import DaliOptions
from fuelrail.loaders.schedule.bad_samples import BadSamplePolicy
from fuelrail.loaders.schedule.ledger import LedgerOptions, ledger_options
from fuelrail.loaders.schedule.selection import stored_image
from fuelrail.loaders.storage import BACKENDS, Backend
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.order.mix import MixStage
from fuelrail.pipeline.order.spec import OrderSpec
from fuelrail.pipeline.order.windows import FrameWindow, as_window
from fuelrail.pipeline.runtime.host import default_num_workers
from fuelrail.pipeline.settings import (
    CheckedSettings,
    PathText,
    Settings,
    check_types,
    did_you_mean,
    must_be,
    resolve_fields,
)
from fuelrail.pipeline.storage.retry import RetryPolicy
from fuelrail.pipeline.transforms.ego import BevAugment
from fuelrail.pipeline.transforms.image import CameraGroup, ImageAugment
from fuelrail.pipeline.transforms.pixels import PixelAugment
from fuelrail.pipeline.transforms.points import PointSweeps

if TYPE_CHECKING:
    import torch

    from fuelrail.pipeline.format.dataset import Dataset

BoxFrame: TypeAlias = Literal["ego", "lidar"]
"""Frames of reference that boxes can be in."""

_BOOL: Final = must_be("True or False")
_COUNT: Final = must_be("an integer >= 1")
_WORKERS: Final = must_be(
    "an integer from 1 to 4096, 'auto', a Budget or None: it is the number of threads that "
    "decode in this process, not of worker processes, so 0 is not possible; leave it out "
    "for one thread for each CPU of this rank"
)
_RATIOS: Final = must_be(
    'a dict with an integer >= 1 for each dataset, such as {"city": 3}, a list of MixStage, or None'
)

_OWN_RANK: Final = (
    "each rank reads its own part without one: no DistributedSampler, no `prepare_data_loader`, "
    "no skipped batches"
)
_TORCH_ONLY: Final = {
    "sampler": (
        "the order of samples is set by `shuffle`, or in full by `order=OrderSpec(...)`; "
        f"{_OWN_RANK}"
    ),
    "batch_sampler": (
        "a batch is the next `batch_size` samples of the order, which `order=OrderSpec(...)` "
        f"sets; {_OWN_RANK}"
    ),
    "worker_init_fn": (
        "there are no worker processes to initialise; decoding runs in threads of this process"
    ),
    "persistent_workers": (
        "there are no worker processes; the decoding threads always live on between epochs"
    ),
    "multiprocessing_context": (
        "there are no worker processes; decoding runs in threads of this process"
    ),
    "timeout": (
        "`storage=StorageOptions(retry=RetryPolicy(deadline_s=...))` limits how long storage "
        "may take"
    ),
    "generator": "all randomness comes from `seed`, so that any rank can resume it",
    "pin_memory_device": "with `device='cuda:N'` batches are pinned and copied to that device",
}


@functools.lru_cache(maxsize=64)
def _column(levels: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Return numbers as float32 (n, 1, 1) on a device, the same tensor each time: making it is a
    blocking copy.
    """
    import torch  # here and below: takes seconds, and settings are read without it

    return torch.tensor(levels, dtype=torch.float32, device=device)[:, None, None]


class Normalize(Settings, frozen=True):
    """How ``img`` becomes floating point: (channel - mean) / std, computed in float32, then cast.

    Attributes:
        mean, std: of grey levels 0 to 255, for the channels in ``channel_order``. The defaults are
            ImageNet's, RGB. Mean 0 and deviation 1 leave 0 to 255, deviation 255 gives 0 to 1.
            (BEVDet applies the RGB numbers to BGR channels: ``channel_order="bgr"`` and the
            defaults.)
        channel_order: ``"rgb"`` or ``"bgr"`` of the result.
        dtype: of the result.
        channels_last: memory format of each image; the shape stays [..., 3, H, W].

    Raises ConfigError for a standard deviation that is not above 0, and for values of the scale 0
    to 1, which torchvision and timm have.
    """

    mean: tuple[float, float, float] = (123.675, 116.28, 103.53)
    std: tuple[float, float, float] = (58.395, 57.12, 57.375)
    channel_order: Literal["rgb", "bgr"] = "rgb"
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    channels_last: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if not all(level > 0.0 for level in self.std):
            raise ConfigError(f"std={list(self.std)} must be three numbers above 0")
        # Of grey levels, a mean of 1 is black, and a deviation below 1 spreads the levels over more
        # than 255.
        unit_levels = {
            name: values
            for name, values in (("mean", self.mean), ("std", self.std))
            if 0.0 < max(values) <= 1.0 and values != (1.0, 1.0, 1.0)
        }
        if unit_levels:
            largest = max(
                (255.0 - mean) / std for mean, std in zip(self.mean, self.std, strict=True)
            )
            stated = ", ".join(f"{name}={list(values)}" for name, values in unit_levels.items())
            scaled = ", ".join(
                f"{name}={[round(255 * value, 3) for value in values]}"
                for name, values in unit_levels.items()
            )
            raise ConfigError(
                f"{stated} must be of grey levels 0 to 255, by which they give images of "
                f"values up to {largest:.0f}: if they are of pixels from 0 to 1, as "
                f"torchvision and timm have them, multiply by 255: {scaled}"
            )

    def images(self, img: torch.Tensor) -> torch.Tensor:
        """Return the images uint8 [..., 3, H, W], RGB, as the settings say; on their device."""
        import torch

        flat = img.flatten(0, -4) if img.ndim > 3 else img[None]
        if self.channel_order == "bgr":
            flat = flat.flip(1)
        values = flat.to(torch.float32)
        values.sub_(_column(self.mean, img.device)).div_(_column(self.std, img.device))
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        return values.to(getattr(torch, self.dtype), memory_format=layout).view(img.shape)

    def __call__(self, batch: Any) -> Any:
        """Return the batch with its ``img`` normalised.

        Raises ConfigError for a batch that has none of uint8.
        """
        import torch

        img = batch.get("img") if isinstance(batch, dict) else None
        if isinstance(img, dict):
            return {
                **batch,
                "img": {name: self({"img": images})["img"] for name, images in img.items()},
            }
        if (
            not isinstance(img, torch.Tensor)
            or img.dtype != torch.uint8
            or img.ndim < 3
            or img.shape[-3] != 3
        ):
            kind = (
                f"{img.dtype} {list(img.shape)}"
                if isinstance(img, torch.Tensor)
                else type(img).__name__
            )
            raise ConfigError(
                f"normalize needs batches with a uint8 'img' [..., 3, H, W], got {kind}: "
                "let transform and collate_fn keep it, or normalise there"
            )
        return {**batch, "img": self.images(img)}


class Budget(CheckedSettings, frozen=True):
    """Limits for ``num_workers="auto"``; given as ``num_workers`` itself it means "auto" within
    these limits.

    Attributes:
        cpus: maximum number of decoding threads; None: 1.5 times this rank's share of the CPUs that
            the process may use (affinity mask and container quota, divided by the ranks on this
            host).
        memory_bytes: maximum size of the batch buffers; None: a quarter of this rank's share of the
            memory that is free when the loader is made.

    Raises ConfigError for values out of range.
    """

    cpus: Annotated[Annotated[int, Meta(ge=1)] | None, must_be("an integer >= 1, or None")] = None
    memory_bytes: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        must_be("a number of bytes of 1 or more, or None"),
    ] = None


class StaticBatches(CheckedSettings, frozen=True):
    """Batches of fixed shapes at fixed addresses, for CUDA graphs and torch.compile; see
    docs/loader.md.

    Attributes:
        max_boxes: rows of each sample's ``gt_boxes_3d`` and of the entries that go with it;
            ``gt_mask`` says which are real. A sample with more is an error.
        max_points: rows of each sample's ``points``; ``points_mask`` says which are real. Needed
            with ``points``.
        max_tokens: tokens of a batch of packs; more are an error. None: the packs' budget times the
            packs of a batch.
        buffers: sets of buffers that batches are copied into in turn. A batch is overwritten when
            this many more have been handed out.

    Raises ConfigError for values out of range.
    """

    max_boxes: Annotated[int, Meta(ge=1), must_be("an integer >= 1")] = 256
    max_points: Annotated[
        Annotated[int, Meta(ge=1)] | None, must_be("an integer >= 1, or None")
    ] = None
    max_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None, must_be("an integer >= 1, or None")
    ] = None
    buffers: Annotated[int, Meta(ge=1, le=1024), must_be("an integer from 1 to 1024")] = 2


class Transforms(Settings, frozen=True):
    """How stored samples become tensors: what of them, size, augmentation, decoding, frame of
    reference.

    Fields that hold settings may also be given as a dict, or as the path of a YAML file.

    Attributes:
        image: size and augmentation of the images. None: as they are stored, pixel for pixel, which
            needs images of one size; :attr:`fuelrail.DataLoader.transforms` has it.
        camera_groups: in the place of ``image``, for rigs whose cameras differ: groups by name,
            each a `CameraGroup` with a size of its own. Each camera of the rig is in one of them.
            ``img`` then is a dict by group.
        cameras: names of the cameras to fetch and decode, such as ``["cam_front"]``. A batch has
            these alone, in the rig's order: images, matrices and frames of a window, and no channel
            that lies on another camera. They are augmented as a loader of all cameras augments
            them. None: all cameras. Of a mix also a dict of dataset to its cameras, as many of each
            and in the batch's order, which has the names of the first dataset's.
        pixels: augmentation of the pixel values.
        ego: augmentation of the ego frame: boxes, points and matrices move together, pixels stay.
        points: also decode the first lidar's sweep; a `PointSweeps` accumulates several.
        select: names of channels and attributes (of layers as ``LAYER.NAME``) that become entries
            of the batch, with ``{name}_valid``, False where a sample has none. Channels:
            :mod:`fuelrail.loaders.batch.channels`; those left out are not decoded, and a sample is
            fetched up to the last one selected. Attributes: numbers, true and false as tensors [B],
            texts as lists. None: the label of a dataset of images without boxes, which is called
            one of `LABELS`, and all channels of the layers. A name of both is the channel.
            ``loader.describe()`` lists what there is.
        undistort: remove the lens distortion while decoding; None: images as stored, with ``dist``
            in the batch.
        normalize: convert ``img`` to floating point on the batch's device; None: uint8.
        decoder: "turbo" (libjpeg-turbo), "pillow" (exact antialiasing), "dali" (whole batches; on
            the loader's ``device`` if that is a GPU) or "auto".
        box_frame: frame of boxes and velocities: "ego", which pairs with ``ego2img``, or "lidar",
            the first lidar's at its own time, which pairs with ``lidar2img`` and ``points``.
        dali: how "dali" decodes on a GPU.
        static: True, or a `StaticBatches`: batches of fixed shapes, at fixed addresses.
        two_views: give each sample twice, under two independent draws of all augmentations, from
            one decode of its images: a batch has 2 B rows in the place of B, and ``view``
            (:mod:`fuelrail.loaders.batch.assemble`).
        channels, attributes: earlier names of ``select``, which they become.

    Raises ConfigError for values that are not allowed.
    """

    image: ImageAugment | None = None
    camera_groups: Annotated[
        dict[str, CameraGroup] | None,
        must_be("a dict of group name to CameraGroup, or None"),
    ] = None
    cameras: Annotated[
        tuple[str, ...] | dict[str, tuple[str, ...]] | None,
        must_be("a list of names of cameras, a dict of dataset to such lists, or None"),
    ] = None
    pixels: PixelAugment = PixelAugment()
    ego: BevAugment = BevAugment()
    points: Annotated[
        bool | PointSweeps,
        must_be("True, False, a PointSweeps, a dict of its fields, or a YAML file's path"),
    ] = False
    select: Annotated[
        tuple[str, ...] | None,
        must_be("a list of names of channels and attributes, or None"),
    ] = None
    undistort: Undistort | None = None
    normalize: Normalize | None = None
    decoder: Annotated[str, must_be("a decoder's name, such as 'auto'")] = "auto"
    box_frame: Annotated[BoxFrame, must_be("one of ego, lidar")] = "ego"
    dali: DaliOptions = DaliOptions()
    static: Annotated[
        bool | StaticBatches,
        must_be("True, False, a StaticBatches, a dict of its fields, or a YAML file's path"),
    ] = False
    two_views: Annotated[bool, must_be("True or False")] = False
    channels: Annotated[tuple[str, ...] | None, must_be("a list of names of channels, or None")] = (
        None
    )
    attributes: Annotated[tuple[str, ...], must_be("a list of names of attributes")] = ()

    def __post_init__(self) -> None:
        """Read dicts and files of settings; refuse values that are not allowed."""
        resolve_fields(self)
        check_types(self, ConfigError)
        if self.channels is not None or self.attributes:
            if self.select is not None:
                raise ConfigError("select takes channels and attributes alike: leave these out")
            names = (*(self.channels or ()), *self.attributes)
            msgspec.structs.force_setattr(self, "select", names)
            msgspec.structs.force_setattr(self, "channels", None)
            msgspec.structs.force_setattr(self, "attributes", ())
        for name in ("cameras", "select"):
            if getattr(self, name) is not None and not isinstance(getattr(self, name), dict):
                msgspec.structs.force_setattr(self, name, tuple(getattr(self, name)))
        if self.camera_groups is not None and (not self.camera_groups or self.image is not None):
            raise ConfigError(
                "camera_groups must name a group or more, and takes the place of image: "
                "leave image out"
            )

    def evaluation(self) -> Transforms:
        """Return the deterministic variant of these settings: nothing is drawn."""
        groups = self.camera_groups and {
            name: group.evaluation() for name, group in self.camera_groups.items()
        }
        return msgspec.structs.replace(
            self,
            image=self.image and self.image.evaluation(),
            camera_groups=groups,
            pixels=self.pixels.evaluation(),
            ego=self.ego.evaluation(),
            points=self.points if isinstance(self.points, bool) else self.points.evaluation(),
        )

    def with_stored_size(self, datasets: Mapping[str, Dataset]) -> Transforms:
        """Return transforms that name the size of the images: that of the stored ones, where these
        name none.

        Raises ConfigError where the images of the cameras that are loaded differ in size.
        """
        if self.image is not None or self.camera_groups is not None:
            return self
        return msgspec.structs.replace(self, image=stored_image(datasets, self.cameras))

    @property
    def static_batches(self) -> StaticBatches | None:
        """The settings of static batches; None where batches are not static."""
        if isinstance(self.static, bool):
            return StaticBatches() if self.static else None
        return self.static

    def content(self) -> dict[str, Any]:
        """Return what decides the content of a sample, by name, but for cameras and what is
        selected.

        ``image`` must be known (:meth:`with_stored_size`). An augmentation that draws nothing is
        None.
        """
        return {
            "image": self.image if self.camera_groups is None else None,
            "camera_groups": self.camera_groups,
            "pixels": self.pixels if self.pixels.train else None,
            "ego": self.ego if self.ego.train else None,
            "undistort": self.undistort,
            "normalize": self.normalize,
            "box_frame": self.box_frame,
            "points": self.points,
            "two_views": self.two_views,
        }


class StorageOptions(CheckedSettings, frozen=True):
    """How shards are read and cached.

    Attributes:
        backend: "pread" (local paths), "remote" (any fsspec URL, in ranges; "fsspec" and "obstore"
            also choose the client), or "auto"; see :mod:`fuelrail.loaders.storage`.
        options: passed to fsspec: credentials, endpoint, profile. Environment variables are the
            better place.
        cache_dir: local folder in which samples of slow or remote storage are kept, shared by the
            ranks of a host. It must belong to this user and must not be a link; its files are
            readable by this user only.
        cache_size: limit in bytes, or a text such as "500GB"; None: 80 % of the free space. When
            the cache is full, the sample whose next use is farthest away is removed.
        look_ahead_bytes: maximum number of bytes requested in advance; None: 64 MiB locally, 256
            MiB remotely.
        retry: how long to retry when storage fails or does not answer; None: 120 s from the first
            attempt.
        verify: check every sample against the checksum in the index (xxh3, about 0.05 ms per
            sample).

    Raises ConfigError for values that are not allowed.
    """

    backend: Annotated[Backend, must_be(f"one of {', '.join(BACKENDS)}")] = "auto"
    options: Annotated[dict[str, Any] | None, must_be("a dict or None")] = None
    cache_dir: Annotated[PathText | None, must_be("a path or None")] = None
    cache_size: Annotated[
        Annotated[int, Meta(ge=1)] | str | None,
        must_be("a number of bytes, a text such as '500GB', or None"),
    ] = None
    look_ahead_bytes: Annotated[
        Annotated[int, Meta(ge=1)] | None, must_be("an integer >= 1, or None")
    ] = None
    retry: RetryPolicy | None = None
    verify: Annotated[bool, must_be("True or False")] = True

    def __repr__(self) -> str:
        """Return all fields, without the values in ``options``, which may be credentials."""
        hidden = None if self.options is None else dict.fromkeys(self.options, "...")
        return msgspec.Struct.__repr__(msgspec.structs.replace(self, options=hidden))


class Arguments(Settings, frozen=True, kw_only=True):
    """What a DataLoader was given, checked; dicts and files of settings are settings here.

    Raises ConfigError. ``dataset``, ``layers``, ``device`` and ``world`` are checked where they are
    used.
    """

    dataset: Any
    batch_size: Annotated[int, Meta(ge=1), _COUNT]
    shuffle: Annotated[bool | None, must_be("True, False or None")]
    seed: Annotated[int, Meta(ge=0), must_be("an integer >= 0")]
    drop_last: Annotated[bool, _BOOL]
    num_workers: Annotated[
        Annotated[int, Meta(ge=1, le=4096)] | Literal["auto"] | Budget | None,
        _WORKERS,
    ]
    prefetch_factor: Annotated[int, Meta(ge=1), _COUNT]
    pin_memory: Annotated[bool | None, must_be("True, False or None")]
    collate_fn: Any
    order: OrderSpec | None
    split: Annotated[str, Meta(min_length=1), must_be("a split's name, such as 'train'")]
    mix: Annotated[dict[str, Annotated[int, Meta(ge=1)]] | list[MixStage] | None, _RATIOS]
    window: Any
    layers: Any
    transforms: Transforms
    transform: Any
    transform_in: Annotated[Literal["thread", "process"], must_be("'thread' or 'process'")]
    batch_transform: Any
    storage: StorageOptions
    bad_samples: BadSamplePolicy
    device: Any
    world: Any
    trace: Any
    check_ranks: Annotated[bool, _BOOL]
    ledger: LedgerOptions | None
    where: Any

    def __post_init__(self) -> None:
        """Read dicts and files of settings; refuse values that are not allowed."""
        for name in (
            "batch_size",
            "seed",
            "num_workers",
            "prefetch_factor",
            "mix",
        ):
            msgspec.structs.force_setattr(self, name, _plain(getattr(self, name)))
        backend: object = self.storage
        if isinstance(backend, str) and not backend.endswith((".yaml", ".yml")):
            if backend not in BACKENDS:
                raise ConfigError(
                    f"storage={backend!r} must be one of {', '.join(BACKENDS)}, a "
                    "StorageOptions, a dict of its fields, or the path of a .yaml file"
                )
            msgspec.structs.force_setattr(self, "storage", {"backend": backend})
        msgspec.structs.force_setattr(self, "ledger", ledger_options(self.ledger))
        msgspec.structs.force_setattr(self, "window", as_window(self.window))
        resolve_fields(self, where="")
        check_types(self, ConfigError, where="")
        if self.where not in (None, "process", "node") and not hasattr(self.where, "num_workers"):
            raise ConfigError(
                f"where={self.where!r} must be 'process', 'node', a RemoteWorkers, or None"
            )
        for name in ("transform", "batch_transform", "collate_fn", "trace"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise ConfigError(f"{name}={value!r} must be a function or None")

    @property
    def budget(self) -> Budget | None:
        """Limits within which the number of threads is tuned; None: it is not tuned."""
        if isinstance(self.num_workers, Budget):
            return self.num_workers
        return Budget() if self.num_workers == "auto" else None

    @property
    def num_threads(self) -> int:
        """Decoding threads at the start."""
        if isinstance(self.num_workers, int):
            return self.num_workers
        return default_num_workers()


def _plain(value: object) -> object:
    """Return NumPy integers as Python's, which msgspec and JSON know; also those in a dict."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, np.integer):
        return int(value)
    return value


_STRUCTS: Final[dict[str, type[Settings]]] = {
    "transforms": Transforms,
    "storage": StorageOptions,
    "bad_samples": BadSamplePolicy,
    "window": FrameWindow,
    "num_workers": Budget,
}


def refuse_unknown(arguments: Mapping[str, object]) -> None:
    """Raise TypeError for an argument that the loader does not have; say which one to use
    instead.
    """
    for name in arguments:
        if name in _TORCH_ONLY:
            raise TypeError(
                f"DataLoader has no argument {name!r}, which torch's has: {_TORCH_ONLY[name]}"
            )
        for argument, kind in _STRUCTS.items():
            if name in kind.__struct_fields__:
                fix = f"{argument}={kind.__name__}({name}=...)"
                raise TypeError(
                    f"DataLoader has no argument {name!r}: it is a field of "
                    f"{kind.__name__}; use {fix}"
                )
        argument_names = Arguments.__struct_fields__
        raise TypeError(
            f"DataLoader has no argument {name!r}{did_you_mean(name, argument_names)}; it "
            f"has: {', '.join(argument_names)}"
        )


class UnlikeTorch:
    """What a loader says to code that takes it for torch's DataLoader: what to use instead."""

    if not TYPE_CHECKING:  # where any name would be one

        def __getattr__(self, name: str) -> Any:
            """Return an argument that torch's loader shows too; explain one that only torch's
            has.
            """
            if name in ("collate_fn", "drop_last", "pin_memory"):
                return getattr(self._arguments, name)
            why = f", which torch's has: {_TORCH_ONLY[name]}" if name in _TORCH_ONLY else ""
            raise AttributeError(
                f"DataLoader has no attribute {name!r}{why}",
                name=name,
                obj=self,
            )

    def __getitem__(self, _: object) -> Never:
        """Refuse to be a dataset: batches come in the loader's order."""
        raise TypeError(
            "a fuelrail DataLoader gives whole batches in its order, and none by number: "
            "iterate it; Hugging Face's Trainer takes it from `get_train_dataloader`; give "
            "torch's DataLoader an IterableView(loader), with batch_size=None; Subset, "
            "random_split and samplers take a MapView(dataset) "
            "(fuelrail.loaders.integrations)"
        )
