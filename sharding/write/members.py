"""The way of a member into a shard: a chain of named steps, built once for each field from the
recipe.

==========  ==================================================  ====================
step        what it does                                        for
==========  ==================================================  ====================
read        the bytes of the file, or what the source makes     every sensor member
check       the image is complete and has the size it should    images
transcode   scale and encode again                              a recipe with images; what lies on images too
restart     add restart markers to the JPEG                     ``jpeg: restart``
encode      compress with the codec of the field                every member
==========  ==================================================  ====================

The packer runs the last step (:mod:`fuelrail.sharding.write.packer`), with the codec named here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

from fuelrail.pipeline.errors import ImageError, MemberError, SourceError
from fuelrail.pipeline.sample.schema import IMAGE_EXTENSIONS
from fuelrail.sharding.planning.recipe import Recipe, codec_of
from fuelrail.sharding.sources.registry import sources
from fuelrail.sharding.sources.shared.pictures import image_size
from fuelrail.sharding.sources.source import MemberSource, PlacedSource
from fuelrail.sharding.write.images import (
    scale_value,
    stored_channel,
    stored_field,
    stored_size,
    transcode,
    with_restart_rows,
)
from fuelrail.sharding.write.packer import RawMember
from fuelrail.sharding.write.staging import STORED, StagedSource

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from fuelrail.pipeline.channels.sensors import LidarEntry
    from fuelrail.pipeline.channels.table import Channel
    from fuelrail.pipeline.sample.arrays import Buffer
    from fuelrail.sharding.sources.registry import SourceSpec
    from fuelrail.sharding.sources.shared.scan_table import Reference
    from fuelrail.sharding.write.read_buffer import ReadBuffer

_LEFT_OUT: Final = (
    "; the options check_images=pixels and damaged_image=drop find such images in the scan, and "
    "leave their frames out"
)
Sizes = dict[str, tuple[int, int]]
"""Width and height [px] of the source's image of each camera of a sample."""
Step = Callable[["Reference", "Buffer", Sizes], "Buffer"]
"""A function from a member's bytes to its bytes after the step; it raises MemberError or
SourceError.
"""


class Chain(NamedTuple):
    """The steps of one field: ``field`` is its name in the shard, ``camera`` the channel whose
    image it is.

    ``rewriting`` are the steps that compute for milliseconds without Python's lock.
    """

    field: str
    camera: str | None
    steps: tuple[Step, ...]
    rewriting: tuple[Step, ...] = ()


def _run_steps(
    steps: tuple[Step, ...], member: Reference, data: Buffer, source_sizes: Sizes
) -> Buffer:
    for step in steps:
        data = step(member, data, source_sizes)
    return data


class Members:
    """The chains of one run's fields."""

    def __init__(
        self,
        source: MemberSource,
        recipe: Recipe,
        lidars: tuple[LidarEntry, ...],
        extra: tuple[Channel, ...],
        buffer: ReadBuffer,
        spec: SourceSpec,
        threads: Executor | None = None,
    ) -> None:
        """Make them as fields come; ``buffer`` is where files are read, ``spec`` names the source
        in errors.

        ``extra`` are the channels other than cameras, lidars and boxes. ``threads`` rewrite the
        images of a sample side by side; None: one after the other, in the caller's thread.
        """
        self._source = source
        self._placed = source if isinstance(source, PlacedSource) else None
        self._recipe = recipe
        self._lidars = lidars
        self._buffer = buffer
        self._spec = spec
        self._threads = threads
        self._extra = extra
        self._extra_fields = {channel.field: channel for channel in extra}
        self._chains: dict[str, Chain] = {}
        self._codecs: dict[str, str] = {}

    def run(
        self,
        key: str,
        references: tuple[Reference, ...],
        raw: dict[str, Buffer],
        sizes: dict[str, set[tuple[int, int]]],
    ) -> None:
        """Run the sensor members of sample ``key`` through their chains into ``raw``; ``sizes``
        gets image sizes.
        """
        source_sizes = {
            reference.name.partition(".")[0]: (
                reference.width,
                reference.height,
            )
            for reference in references
            if reference.width
        }
        members = []
        for member in references:
            chain = self._chains.get(member.name) or self._build_chain(member.name)
            with self._naming(key, member):
                data = _run_steps(chain.steps, member, b"", source_sizes)
            if chain.rewriting and self._threads is not None:
                result = self._threads.submit(
                    _run_steps, chain.rewriting, member, data, source_sizes
                ).result
            else:
                result = functools.partial(_run_steps, chain.rewriting, member, data, source_sizes)
            members.append((member, chain, result))
        for member, chain, result in members:
            with self._naming(key, member):
                data = result()
            if chain.field in raw:
                raise SourceError(
                    f"{self._describe_place(key, member)}: duplicate field '{chain.field}' in the "
                    "sample"
                )
            if chain.camera is not None:
                sizes.setdefault(chain.camera, set()).add(self._stored_size(member))
            raw[chain.field] = data

    def encoded(self, raw: Mapping[str, Buffer]) -> list[RawMember]:
        """Return the members with the codecs that the packer encodes them with."""
        codecs = self._codecs
        for name in raw:
            if name not in codecs:
                codecs[name] = codec_of(name, self._recipe, self._lidars, self._extra)
        return [RawMember(name, codecs[name], data) for name, data in raw.items()]

    @contextmanager
    def _naming(self, key: str, member: Reference) -> Iterator[None]:
        """Raise a MemberError inside as a SourceError that names the member."""
        try:
            yield
        except MemberError as error:
            hint = ""
            if isinstance(error, ImageError):
                (kind,) = sources(self._spec.kind)
                if any(option.name == "damaged_image" for option in kind.options):
                    hint = _LEFT_OUT
            raise SourceError(f"{self._describe_place(key, member)}: {error}{hint}") from error

    def _build_chain(self, name: str) -> Chain:
        """Choose the steps of a field of the source."""
        recipe = self._recipe
        images = self._recipe.images
        steps: list[Step] = [self._read_member]
        rewriting: list[Step] = []
        extra = self._extra_fields.get(name)
        if extra is not None:
            if images is not None and extra.law.name in (
                "image",
                "image_points",
            ):
                stored = stored_channel(extra, images)
                steps.append(
                    lambda _, data, sizes: scale_value(
                        data,
                        channel=extra,
                        stored=stored,
                        sizes=sizes,
                        recipe=images,
                    )
                )
            chain = self._chains[name] = Chain(name, None, tuple(steps))
            return chain
        channel, _, extension = name.partition(".")
        field = stored_field(name, images)
        is_image = extension in IMAGE_EXTENSIONS
        if is_image:
            steps.append(self._check_image)
            if images is not None:
                rewriting.append(
                    lambda member, data, _: (
                        data
                        if member.ref.startswith(STORED)
                        else transcode(data, member.name.partition(".")[2], images)
                    )
                )
        if field.endswith(".jpg") and recipe.jpeg == "restart":
            rewriting.append(lambda _, data, __: with_restart_rows(data))
        chain = self._chains[name] = Chain(
            field=field,
            camera=channel if is_image else None,
            steps=tuple(steps),
            rewriting=tuple(rewriting),
        )
        return chain

    def _read_member(self, member: Reference, _: Buffer, __: Sizes) -> Buffer:
        place = None if self._placed is None else self._placed.place(member.ref)
        if place is None:
            return self._source.open(member.ref)
        path, offset, length = place
        return self._buffer.read(
            path,
            member.bytes if length is None else length,
            None if length is None else offset,
        )

    def _stored_size(self, member: Reference) -> tuple[int, int]:
        size = (member.width, member.height)
        if self._recipe.images is None:
            return size
        return stored_size(self._recipe.images, size)

    def _describe_place(self, key: str, member: Reference) -> str:
        name = member.name if isinstance(self._source, StagedSource) else member.ref
        return f"image '{name}' of {self._spec.kind}:{self._spec.location} (sample {key})"

    def _check_image(self, member: Reference, data: Buffer, _: Sizes) -> Buffer:
        """Check that an image is complete, and that its size is the one in the source's tables,
        or the stored one.
        """
        if len(data) != member.bytes and not member.is_estimate:
            raise ImageError(
                f"had {member.bytes} bytes when the run started and has {len(data)} now"
            )
        size = image_size(data, member.name.partition(".")[2])
        stated_size = (member.width, member.height)
        if size != (self._stored_size(member) if member.ref.startswith(STORED) else stated_size):
            raise ImageError(
                f"{size[0]} x {size[1]} pixels, the source's tables say {stated_size[0]} x "
                f"{stated_size[1]}"
            )
        return data
