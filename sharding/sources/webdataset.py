"""The adapter for tars in WebDataset's naming: members that follow each other and share a key are a
sample.

The key is a member's name up to the first dot after the last slash, the rest is its extension, as
the library `webdataset` has it (``base_plus_ext``). Of plain tars headers and small members are
read, and images stay where they are; compressed tars are read from front to back, once by the scan
and once when each clip is staged.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import msgspec
from msgspec import Meta

from fuelrail.pipeline.errors import (
    ConfigError,
    ImageError,
    SchemaError,
    SourceError,
)
from fuelrail.pipeline.format.codecs import MAX_MEMBER_BYTES
from fuelrail.pipeline.sample.arrays import read_npy
from fuelrail.pipeline.sample.image_header import probe
from fuelrail.pipeline.text import shortened
from fuelrail.sharding.sources.adapter.channels import ValueForms
from fuelrail.sharding.sources.adapter.frame import (
    Calibration,
    Clip,
    Frame,
    Image,
    Sensors,
)
from fuelrail.sharding.sources.adapter.members import MADE_PREFIX
from fuelrail.sharding.sources.adapter.rows import (
    fitting_type,
    may_be_attribute,
)
from fuelrail.sharding.sources.adapter.source import FrameSettings, FrameSource
from fuelrail.sharding.sources.shared.files import is_hidden
from fuelrail.sharding.sources.shared.foreign import JsonFacts, read_json
from fuelrail.sharding.sources.shared.pictures import (
    CONVERTED,
    EXTENSION_OF,
    HEAD_BYTES,
    convertible_png,
    plain_or_damaged,
)
from fuelrail.sharding.sources.shared.scan_table import Reference
from fuelrail.sharding.sources.shared.tars import (
    COMPRESSED,
    OF_IGNORE_ZEROS,
    Member,
    compressed_members,
    tar_members,
)

if TYPE_CHECKING:
    from fuelrail.pipeline.channels.table import Channel
    from fuelrail.pipeline.sample.arrays import Buffer
    from fuelrail.sharding.sources.shared.files import SourceFiles
    from fuelrail.sharding.sources.source import Reads

_NAME: Final = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]*)\Z", re.DOTALL)
_ONE_CAMERA: Final = "image"
_DECODED: Final[dict[str, Callable[[bytes], Any]]] = {
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), int),
    **dict.fromkeys(("txt", "text", "transcript"), bytes.decode),
    "npy": lambda data: read_npy(data, any_order=True),
}
"""Decoders by the last part of an extension, as the library decodes them."""
_MOST_VALUE_BYTES: Final = 1 << 20  # values are in the scan's table
_LATE: Final = "none of the first samples has it; first_samples=0 looks at all"
_TYPES: Final[dict[str, type]] = {
    "": str,
    "bool": bool,
    "int64": int,
    "float64": float,
}
_MOST_EXTENSIONS: Final = 12
_STEP_NS: Final = 1_000_000_000


class WebDatasetSettings(FrameSettings, frozen=True, kw_only=True):
    """Options of the adapter; paths in JSON are names and numbers of entries, joined by dots."""

    images: Annotated[
        dict[str, str],
        Meta(
            description=(
                "camera to extension, as {cam_front: jpg0}; empty: NAME.jpg is camera NAME, jpg "
                "is camera image"
            )
        ),
    ] = {}  # noqa: RUF012 - of a struct, which copies it
    meta: Annotated[
        str,
        Meta(description="extension of the JSON member that the paths below are in"),
    ] = "json"
    timestamp_ns: Annotated[
        str,
        Meta(description="path of the sample's time [ns]; empty: samples are counted"),
    ] = ""
    intrinsics: Annotated[
        str,
        Meta(description="path of K, such as calib.{camera}.k; empty: not calibrated"),
    ] = ""
    cam2ego: Annotated[
        str,
        Meta(description="path of the 4x4 camera to ego, such as calib.{camera}.cam2ego"),
    ] = ""
    ego2global: Annotated[
        str,
        Meta(description="path of the 4x4 ego to global; empty: no ego poses"),
    ] = ""
    first_samples: Annotated[
        int,
        Meta(
            ge=0,
            description="how many samples decide names, types and shapes of what is not an image; "
            "0: all",
        ),
    ] = 1000
    ignore_zeros: Annotated[bool, Meta(description=OF_IGNORE_ZEROS)] = False
    gather: Annotated[
        bool,
        Meta(
            description=(
                "true reads each tar to its end and takes all members of a key for a sample, "
                "wherever they are"
            )
        ),
    ] = False
    clip: Annotated[
        str,
        Meta(
            description=(
                "regular expression, whose first group in a key is the clip; empty: each tar is "
                "a clip"
            )
        ),
    ] = ""

    def __post_init__(self) -> None:
        """Check that the options go together."""
        if bool(self.intrinsics) != bool(self.cam2ego):
            raise ConfigError("the options intrinsics and cam2ego of webdataset go together")
        try:
            if self.clip and re.compile(self.clip).groups < 1:
                raise ConfigError(f"clip={self.clip} needs a group, such as (.*)_[0-9]+")
        except re.error as error:
            raise ConfigError(f"clip={self.clip} is not a regular expression: {error}") from error


class _Read(NamedTuple):
    """What was read of a member of a compressed tar: the size of an image [px], the bytes of
    JSON, or a fault.
    """

    width: int = 0
    height: int = 0
    data: bytes = b""
    fault: str = ""


class _Sample(NamedTuple):
    """A run of members with one key, by extension; ``read`` by name is of compressed tars."""

    tar: str
    key: str
    members: dict[str, Member]
    read: dict[str, _Read] | None


class _Values(NamedTuple):
    """What a sample has beside images: members and lists by name, single values of the JSON, and
    what is left out.

    A member that is not decoded is its own value.
    """

    values: dict[str, Any]
    attributes: dict[str, Any]
    left_out: list[str]


class _Forms(NamedTuple):
    """What the first samples have beside images: channels, types of attributes, why other values
    are none, and whether one has the JSON.
    """

    channels: dict[str, Channel]
    types: dict[str, type]
    refused: dict[str, str]
    has_json: bool


class _Reader(NamedTuple):
    """Reads what a sample has beside images."""

    settings: WebDatasetSettings
    files: SourceFiles

    def json(self, sample: _Sample, noted: Counter[str]) -> JsonFacts:
        """Read the JSON; raise SourceError where there is none and an option names a path in it.

        ``noted`` counts members without a byte, which are none, and NaN and infinities, which are
        read as null.
        """
        where = f"tar '{self.files.shown}/{sample.tar}', key '{sample.key}'"
        if self.settings.meta not in sample.members and self._used:
            raise SourceError(
                f"{where}: there is no .{self.settings.meta}, but {', '.join(sample.members)}"
            )
        member = sample.members.get(self.settings.meta)
        if member is not None and not member.length:
            if self._used:
                raise SourceError(
                    f"{where}: .{self.settings.meta} is empty (0 bytes), and the options name "
                    f"{', '.join(sorted(self._used))} in it"
                )
            noted[f"members .{self.settings.meta} left out, empty (0 bytes)"] += 1
        if member is None or not member.length:
            return JsonFacts(None, where)
        data = self._read_data(sample, member)
        place = f"{where}: .{self.settings.meta}"
        return JsonFacts(
            read_json(
                data,
                place,
                problem="is not JSON",
                noted=noted,
            ),
            where,
        )

    @property
    def _used(self) -> frozenset[str]:
        """Names at the top of the JSON that the options name."""
        settings = self.settings
        paths = (
            settings.timestamp_ns,
            settings.intrinsics,
            settings.cam2ego,
            settings.ego2global,
        )
        return frozenset(path.partition(".")[0] for path in paths if path)

    def _read_data(self, sample: _Sample, member: Member) -> bytes:
        if sample.read is not None:
            return sample.read[member.name].data
        return self.files.read(sample.tar, member.offset, member.length)

    def values(self, sample: _Sample, json: Any) -> _Values:
        """Return the values that a sample has beside the images of its cameras."""
        values: dict[str, Any] = {}
        left_out: list[str] = []
        cameras = (self.settings.images or _find_cameras(sample.members)).values()
        for extension, member in sample.members.items():
            decode = _DECODED.get(extension.rpartition(".")[2])
            name = extension.replace(".", "_")
            if extension in cameras or extension == self.settings.meta:
                continue
            limit = MAX_MEMBER_BYTES if decode is None else _MOST_VALUE_BYTES
            if member.length > limit:
                left_out.append(f"members .{extension} left out, over {limit} bytes")
                continue
            if decode is None:
                values[name] = member
                continue
            try:
                values[name] = decode(self._read_data(sample, member))
            except (ValueError, SchemaError):
                left_out.append(
                    f"members .{extension} left out, not what the library webdataset reads as such"
                )
        attributes: dict[str, Any] = {}
        rest = (
            {name: item for name, item in json.items() if name not in self._used}
            if isinstance(json, dict)
            else json
        )
        # Numbers, texts and lists by their path, joined by _, in lower case.
        pending = [("", rest)]
        while pending:
            path, value = pending.pop()
            if isinstance(value, dict):
                for key, part in value.items():
                    pending.append((f"{path}_{key}".lower() if path else key.lower(), part))
            elif value is not None:
                name = path or self.settings.meta
                target = values if isinstance(value, list) else attributes
                if name in target:
                    left_out.append(f"{name} of the JSON left out, another value has this name")
                target.setdefault(name, value)
        return _Values(values, attributes, left_out)


class WebDataset(FrameSource[WebDatasetSettings]):
    """Tars in WebDataset's naming, of any writer: .tar, .tar.gz, .tgz, .tar.zst, .tzst.

    Adjacent members of one key are a sample, the key its `sample_token`. Options may name cameras'
    extensions, clips, and paths in the sample's JSON:

        fuelrail shard webdataset:tars OUT -o 'images={cam_front: jpg0, cam_back: jpg1}' \\
            -o 'clip=(.*)_[0-9]+' -o meta=json -o timestamp_ns=time \\
            -o 'intrinsics=calib.{camera}.K' -o 'cam2ego=calib.{camera}.T' -o ego2global=pose

    - Without such paths, times count one second a sample (`time_base` is `order`), poses are
      unknown and cameras not calibrated.
    - `.cls` (also `.index`, `.id`), `.txt` and `.npy` become channels of that name, with `_` for a
      dot: `left_txt`. Arrays whose first dimension varies are lists of tensors. Other extensions
      become channels of bytes.
    - In JSON, lists of numbers or texts become channels; single numbers, texts, true and false
      attributes. Nested names are joined: `weather_rain`. `NaN` and infinities are kept in lists
      (refused in JSON lines), else null.
    - The first 1,000 samples (`first_samples`) decide names, types and shapes; another type later
      is an error.
    - Left out, and counted in the report: values over 1 MiB, bytes over 128 MiB, names that are not
      allowed, an empty `.json`, other files.
    - Compressed tars are read whole, twice.
    - Errors: a sparse member, a link, a name that leaves the tar, a truncated or damaged tar; a key
      that returns after others (`tar --sort=name` avoids it, `gather=true` allows it).
    - A tar must end with two zero blocks and zeros to the end of a record of at most 20 blocks, a
      compressed one with a whole frame. `ignore_zeros=true` counts other ends (joined by `cat`,
      holes, padding, cuts) and reads on. Fewer than 11,264 bytes of zeros in place of the last
      members look like an end.
    """

    kind = "webdataset"
    settings_type = WebDatasetSettings

    def __init__(self, location: str, options: dict[str, Any]) -> None:
        super().__init__(location, options)
        self.time_base = "unix" if self.settings.timestamp_ns else "order"
        self.has_poses = bool(self.settings.ego2global)
        self._current: list[_Sample] = []
        self._reader = _Reader(self.settings, self.files)

    @cached_property
    def _forms(self) -> _Forms:
        """What the first samples have beside images."""
        values = ValueForms()
        attributes = ValueForms()
        has_json = False
        first_samples = islice(self.iter_samples(), self.settings.first_samples or None)
        for sample in first_samples:
            has_json |= self.settings.meta in sample.members
            json = self._reader.json(sample, Counter())
            sample_values = self._reader.values(sample, json.values)
            for forms, stated in (
                (values, sample_values.values),
                (attributes, sample_values.attributes),
            ):
                for name, value in stated.items():
                    forms.learn(name, b"" if isinstance(value, Member) else value)
        types = {
            attribute.name: _TYPES.get(attribute.dtype)
            for attribute in attributes.channels()
            if may_be_attribute(attribute.name)
        }
        return _Forms(
            channels={channel.name: channel for channel in values.channels()},
            types={
                name: fitting
                for name, kind in types.items()
                if (fitting := fitting_type(name, kind)) is not None
            },
            refused=values.refused,
            has_json=has_json,
        )

    @property
    def channels(self) -> Sequence[Channel]:  # type: ignore[override]
        """The channels of members and of lists in the JSON."""
        return tuple(self._forms.channels.values())

    @property
    def columns(self) -> Mapping[str, type]:  # type: ignore[override]
        """The columns of single values in the JSON."""
        return self._forms.types

    @property
    def reads(self) -> Reads:  # type: ignore[override]
        """ "clip" where a tar is compressed."""
        if any(tar.endswith(COMPRESSED) for tar in self._list_tars()):
            return "clip"
        return "random"

    def _list_tars(self) -> list[str]:
        """Return the names of the tars; what else is in the folder is counted."""
        if self.file is not None:
            return [self.file]
        names = self.files.listed()
        tars = [name for name in names if name.endswith((".tar", *COMPRESSED))]
        if len(tars) < len(names):
            listed = ", ".join((".tar", *COMPRESSED))
            self.noted[f"files and folders beside the tars left out, none of {listed}"] = len(
                names
            ) - len(tars)
        return tars

    def sensors(self) -> Sensors:
        """Return the cameras of the option ``images``, or of the first sample that has images."""
        if self.settings.images:
            return Sensors.from_names(self.settings.images)
        extensions: set[str] = set()
        for sample in self.iter_samples():
            cameras = _find_cameras(sample.members)
            if cameras:
                return Sensors.from_names(cameras)
            if len(extensions) < _MOST_EXTENSIONS:
                extensions.update(sample.members)
        listed = ", ".join(map(shortened, sorted(extensions)[:_MOST_EXTENSIONS])) or "none"
        raise SourceError(
            f"the webdataset source '{self.files.shown}' has no tars with images; its "
            f"members have the extensions: {listed}; the option images maps a camera to one of them"
        )

    def iter_samples(self, noted: Counter[str] | None = None) -> Iterator[_Sample]:
        """Yield the samples of all tars; ``noted`` counts members that belong to none."""
        noted = Counter() if noted is None else noted
        for tar in self._list_tars():
            read: dict[str, _Read] | None = None
            if tar.endswith(COMPRESSED):
                read = {}
                members = self._unpack_tar(tar, read, noted)
            else:
                members = tar_members(
                    self.files,
                    tar,
                    ignore_zeros=self.settings.ignore_zeros,
                    noted=noted,
                )
            where = f"tar '{self.files.shown}/{tar}'"
            group = _gather_samples if self.settings.gather else _group_adjacent
            yield from group(tar, _iter_keyed(members, noted), where, read)

    def _unpack_tar(
        self,
        tar: str,
        read: dict[str, _Read],
        noted: Counter[str],
    ) -> Iterator[Member]:
        """Yield the members of a compressed tar; keep the needed part of each in ``read``."""
        json = f".{self.settings.meta}"
        whole_endings = (json, *(f".{last}" for last in _DECODED))
        for member, data in compressed_members(
            self.files,
            tar,
            HEAD_BYTES[-1],
            whole_endings,
            ignore_zeros=self.settings.ignore_zeros,
            noted=noted,
        ):
            data = data or b""
            if member.name.lower().endswith(whole_endings):
                ending = member.name.lower()
                is_kept = member.length <= _MOST_VALUE_BYTES or ending.endswith(json)
                read[member.name] = _Read(data=data if is_kept else b"")
            else:
                try:
                    odd = convertible_png(data)
                    info = odd or probe(data)
                    if odd is not None:
                        noted[CONVERTED] += 1
                    read[member.name] = _Read(info.width, info.height)
                except ImageError as error:
                    read[member.name] = _Read(fault=error.message)
            yield member

    def clips(self) -> Iterator[Clip]:
        """Yield the clips: runs of samples of one tar, or with one name in their keys."""
        names_seen: set[str] = set()
        name = ""
        pending: list[_Sample] = []
        for sample in self.iter_samples(self.noted):
            if not self.settings.clip:
                stem = sample.tar.partition(".tar")[0]
                clip_name = stem.removesuffix(".tgz").removesuffix(".tzst")
            else:
                match = re.search(self.settings.clip, sample.key)
                if match is None or not match[1]:
                    raise SourceError(
                        f"tar '{self.files.shown}/{sample.tar}': clip={self.settings.clip} finds "
                        f"nothing in key '{sample.key}'"
                    )
                clip_name = match[1]
            if pending and clip_name != name:
                yield self._begin_clip(name, pending, names_seen)
                pending = []
            name = clip_name
            pending.append(sample)
        if pending:
            yield self._begin_clip(name, pending, names_seen)

    def _begin_clip(
        self,
        name: str,
        samples: list[_Sample],
        names_seen: set[str],
    ) -> Clip:
        if name in names_seen:
            raise SourceError(
                f"tar '{self.files.shown}/{samples[0].tar}': clip '{name}' comes again at "
                f"key '{samples[0].key}', after others; samples of a clip must follow each other"
            )
        names_seen.add(name)
        self._current = samples
        return Clip(
            name=name,
            files=tuple(dict.fromkeys(sample.tar for sample in samples)),
        )

    def frames(self, clip: Clip) -> Iterator[Frame]:  # noqa: ARG002 - the current one
        """Yield the clip's samples, by time where they have one."""
        frames_made: list[Frame] = []
        for number, sample in enumerate(self._current):
            facts = self._reader.json(sample, self.noted)
            sample_values = self._fit_values(sample, facts)
            raw = {
                name: member
                for name, member in sample_values.values.items()
                if isinstance(member, Member)
            }
            time_ns = (number + 1) * _STEP_NS
            if self.settings.timestamp_ns:
                time_ns = facts.integer(self.settings.timestamp_ns)
            images: dict[str, Image] = {}
            for camera, extension in (
                self.settings.images or _find_cameras(sample.members)
            ).items():
                member = sample.members.get(extension)
                if member is None:
                    continue
                suffix = extension.rpartition(".")[2].rstrip("0123456789_")
                image = Image(
                    ref=_make_ref(sample, member),
                    timestamp_ns=time_ns,
                    extension=EXTENSION_OF.get(suffix, "jpg"),
                    token=sample.key,
                )
                if self.settings.intrinsics:
                    calibration = Calibration(
                        intrinsics=facts.matrix(self.settings.intrinsics, 3, camera),
                        sensor2ego=facts.matrix(self.settings.cam2ego, 4, camera),
                    )
                    image = msgspec.structs.replace(image, calibration=calibration)
                if sample.read is not None:
                    read = sample.read[member.name]
                    image = msgspec.structs.replace(
                        image,
                        ref=image.ref.removeprefix(MADE_PREFIX),
                        made=True,
                        fault=read.fault,
                        width=read.width,
                        height=read.height,
                        num_bytes=member.length,
                    )
                images[camera.lower()] = image
            pose = None
            if self.settings.ego2global:
                pose = facts.matrix(self.settings.ego2global, 4)
                images = {
                    name: msgspec.structs.replace(image, ego2global=pose)
                    for name, image in images.items()
                }
            frames_made.append(
                Frame(
                    timestamp_ns=time_ns,
                    ego2global=pose,
                    images=images,
                    token=sample.key,
                    values={
                        name: value
                        for name, value in sample_values.values.items()
                        if name not in raw
                    },
                    attributes=sample_values.attributes,
                    members=[
                        Reference(f"{name}.bin", _make_ref(sample, item), item.length)
                        for name, item in raw.items()
                    ],
                )
            )
        frames_made.sort(key=lambda frame: frame.timestamp_ns)
        yield from frames_made

    def _fit_values(self, sample: _Sample, facts: JsonFacts) -> _Values:
        """Return what the dataset has of a sample beside images; count what is left out, and what
        the sample lacks.
        """
        channels, types, refused, has_json = self._forms
        sample_values = self._reader.values(sample, facts.values)
        self.noted.update(sample_values.left_out)
        names = {extension.replace(".", "_") for extension in sample.members}
        lacking = channels.keys() - sample_values.values.keys() - names
        if has_json and self.settings.meta not in sample.members:
            lacking.add(self.settings.meta)
        self.noted.update(f"samples without {name}, which others have" for name in lacking)
        for name in sample_values.values.keys() - channels:
            self.noted[f"{name} left out, {refused.get(name, _LATE)}"] += 1
        for name in sample_values.attributes.keys() - types:
            self.noted[
                f"{name} of the JSON left out, its name or its values are not those of an attribute"
            ] += 1
        attributes = {
            name: value for name, value in sample_values.attributes.items() if name in types
        }
        for name, value in attributes.items():
            is_number = types[name] is float and type(value) is int
            if not (is_number or type(value) is types[name]) or (
                type(value) is int and not -(2**63) <= value < 2**63
            ):
                raise SourceError(
                    f"{facts.where}: {name} is {value!r:.100}, and {types[name].__name__} "
                    "in the first samples; first_samples=0 looks at all"
                )
        values = {name: value for name, value in sample_values.values.items() if name in channels}
        for name, value in values.items():
            if isinstance(value, Member) != (channels[name].kind == "bytes"):
                raise SourceError(
                    f"{facts.where}: {name} is of another kind than in the first samples"
                )
        return _Values(values, attributes, [])

    def make_images(self, refs: Sequence[str]) -> Iterator[tuple[str, Buffer]]:
        """Read images of compressed tars from front to back."""
        by_tar: dict[str, set[str]] = {}
        for ref in refs:
            tar, _, name = ref.partition("#")
            by_tar.setdefault(tar, set()).add(name)
        for tar, names in by_tar.items():
            for member, data in compressed_members(
                self.files,
                tar,
                None,
                names=names,
                ignore_zeros=self.settings.ignore_zeros,
            ):
                if data is not None:
                    names.discard(member.name)
                    yield f"{tar}#{member.name}", bytes(plain_or_damaged(data))
            if names:
                raise SourceError(f"tar '{self.files.shown}/{tar}' has no '{min(names)}' any more")


def _make_ref(sample: _Sample, member: Member) -> str:
    """Return the reference of a member's bytes."""
    plain = sample.read is None
    if plain:
        return f"{sample.tar}#{member.offset}+{member.length}"
    return f"{MADE_PREFIX}{sample.tar}#{member.name}"


def _find_cameras(members: dict[str, Member]) -> dict[str, str]:
    """Return the extension of each camera by the names."""
    extension_of = {}
    for extension in members:
        name, _, last = extension.rpartition(".")
        if last in EXTENSION_OF and re.fullmatch(r"[a-z0-9_]*", name):
            extension_of[name or _ONE_CAMERA] = extension
    return extension_of


def _iter_keyed(
    members: Iterable[Member], noted: Counter[str]
) -> Iterator[tuple[str, str, Member]]:
    """Yield key, extension and member; skip and count names without one, as the library skips
    them.
    """
    for member in members:
        if any(map(is_hidden, member.name.split("/"))):
            noted["hidden members left out"] += 1
            continue
        match = _NAME.match(member.name)
        stem = "" if match is None else match[1].rpartition("/")[2]
        if match is None or stem.startswith("__"):
            noted["members left out, without a key or an extension"] += 1
            continue
        yield match[1], match[2].lower(), member


def _group_adjacent(
    tar: str,
    members: Iterable[tuple[str, str, Member]],
    where: str,
    read: dict[str, _Read] | None,
) -> Iterator[_Sample]:
    """Yield samples of members that follow each other."""
    keys: set[str] = set()
    sample: _Sample | None = None
    for key, extension, member in members:
        if sample is None or sample.key != key:
            if sample is not None:
                yield sample
            if key in keys:
                raise SourceError(
                    f"{where}: key '{key}' comes again, with .{extension}, after other "
                    "keys: the members of a sample do not follow each other; the option "
                    "gather=true puts each sample together, and `tar --sort=name` writes a "
                    "tar in which they do"
                )
            keys.add(key)
            sample = _Sample(tar, key, {}, read)
        _add_member(sample, extension, member, where)
    if sample is not None:
        yield sample


def _gather_samples(
    tar: str,
    members: Iterable[tuple[str, str, Member]],
    where: str,
    read: dict[str, _Read] | None,
) -> Iterator[_Sample]:
    """Yield samples of members wherever they are in the tar, in the order of their first ones."""
    samples: dict[str, _Sample] = {}
    for key, extension, member in members:
        sample = samples.setdefault(key, _Sample(tar, key, {}, read))
        _add_member(sample, extension, member, where)
    yield from samples.values()


def _add_member(
    sample: _Sample,
    extension: str,
    member: Member,
    where: str,
) -> None:
    if extension in sample.members:
        raise SourceError(f"{where}: key '{sample.key}' has .{extension} twice")
    sample.members[extension] = member
