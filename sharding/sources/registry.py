"""The kinds of sources: those of Fuelrail, and plug-ins of the entry-point group
``fuelrail.sources``.

A plug-in's package names its class there::

    [project.entry-points."fuelrail.sources"]
    pandaset = "pandaset_source:PandaSet"
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from fuelrail.pipeline.errors import (
    ConfigError,
    FuelrailError,
    SourceError,
    how_to_install,
)
from fuelrail.pipeline.settings import did_you_mean, parse_yaml
from fuelrail.pipeline.text import Printed, fault_in_words, shortened

if TYPE_CHECKING:
    from fuelrail.sharding.sources.source import Source

GROUP: Final = "fuelrail.sources"
_BUILT_IN: Final = {
    "nuscenes": "fuelrail.sharding.sources.nuscenes.source:NuScenesSource",
    "t4": "fuelrail.sharding.sources.nuscenes.t4:T4",
    "manifest": "fuelrail.sharding.sources.tables.manifest:Manifest",
    "webdataset": "fuelrail.sharding.sources.webdataset:WebDataset",
    "openscene": "fuelrail.sharding.sources.openscene.source:OpenScene",
    "lerobot": "fuelrail.sharding.sources.lerobot:LeRobot",
    "imagefolder": "fuelrail.sharding.sources.imagefolder:ImageFolder",
    "fuelrail": "fuelrail.sharding.sources.fuelrail.source:FuelrailSource",
    "argoverse2": "fuelrail.sharding.sources.argoverse2:Argoverse2",
    "kitti": "fuelrail.sharding.sources.kitti.raw:Kitti",
    "kitti_object": "fuelrail.sharding.sources.kitti.object:KittiObject",
    "waymo": "fuelrail.sharding.sources.waymo.source:Waymo",
    "waymo_v2": "fuelrail.sharding.sources.waymo.parquet:WaymoParquet",
    "mcap": "fuelrail.sharding.sources.logs.source:LogSource",
    "rosbag2": "fuelrail.sharding.sources.logs.source:Rosbag2Source",
    "rosbag1": "fuelrail.sharding.sources.logs.source:Rosbag1Source",
}
_OWN_PACKAGE: Final = "fuelrail"
_MOST_FOLDERS: Final = 100
"""Folders that are looked into for files that a source lacks."""
_EXAMPLES: Final = {
    name: (
        f"`pip install ./configs/sources/{name}` in a checkout brings package "
        f"fuelrail-{name.replace('_', '-')}"
    )
    for name in ("arrow", "pandaset", "physical_ai", "py123d")
}
"""Plug-ins that the documents name, and how to install them."""
_FACTS: Final = {
    "times": "time_base",
    "ego's origin": "ego_origin",
    "licence of the data": "license",
}
"""What a source's class may state of all its datasets, by title."""
CONTENTS: Final = {
    "fuelrail": ("dataset.json",),
    "nuscenes": ("v1.0-*/sample.json",),
    "t4": (
        "annotation/sample.json",
        "*/annotation/sample.json",
        "*/*/annotation/sample.json",
    ),
    "argoverse2": (
        "*/city_SE3_egovehicle.feather",
        "*/*/city_SE3_egovehicle.feather",
    ),
    "kitti": ("*_drive_*_sync/oxts", "*/*_drive_*_sync/oxts"),
    "kitti_object": ("image_2", "training/image_2"),
    "waymo": ("*.tfrecord", "*/*.tfrecord"),
    "waymo_v2": ("camera_image", "*/camera_image"),
    "rosbag2": ("*.db3", "*/*.db3"),
    "rosbag1": ("*.bag",),
    "mcap": ("*.mcap",),
    "webdataset": ("*.tar",),
    "openscene": ("navsim_logs/*/*.pkl", "meta_datas/*/*.pkl"),
    "lerobot": ("meta/info.json",),
    "imagefolder": tuple(
        f"{folder}*/*.{ending}"
        for folder in ("", "*/")
        for ending in ("jpg", "jpeg", "JPEG", "png")
    ),
}
"""Files or folders by which a kind is known where none is given."""


class SourceSpec(NamedTuple):
    """A source by kind, location and options: everything that a worker needs to open it."""

    kind: str
    location: str
    options: dict[str, Any]


class SourceOption(msgspec.Struct, frozen=True, kw_only=True):
    """An option of a kind of source: name, type and default as text, and what it does."""

    name: str
    type: str
    default: str
    description: str


class SourceKind(Printed, msgspec.Struct, frozen=True, kw_only=True):
    """A kind of source.

    ``notes`` say in Markdown what it reads and how; ``facts`` are what all its datasets have in
    common, such as the time base. ``package`` brings it; ``missing`` is what `pip install` must
    bring for it to work.
    """

    kind: str
    summary: str
    notes: str = ""
    facts: dict[str, str] = {}
    package: str
    missing: list[str]
    options: list[SourceOption]

    def as_text(self) -> str:
        """Return the kind for people, with its notes and options."""
        lines = [self.as_line()]
        lines += ["", self.notes, ""] if self.notes else []
        lines += [f"  {name}: {fact}" for name, fact in self.facts.items()]
        lines += [f"  fuelrail shard {self.kind}:PATH OUT -o KEY=VALUE ..."] if self.options else []
        for option in self.options:
            lines.append(
                f"  {option.name} ({option.type}, default {option.default}): {option.description}"
            )
        return "\n".join(lines) + "\n"

    def as_line(self) -> str:
        """Return kind, package, summary, and what to install, for a list of kinds."""
        line = f"{self.kind} ({self.package}): {self.summary}"
        return line + (f"\n  needs: {how_to_install(*self.missing)}" if self.missing else "")


def parse_source(text: str, options: dict[str, Any]) -> SourceSpec:
    """Parse ``KIND:LOCATION``; raises ConfigError for an unknown kind or a missing location."""
    kind, _, location = text.partition(":")
    is_plain_url = location.startswith("//") and kind not in _list_kinds()
    if not location or is_plain_url:
        hint = f", such as nuscenes:{text if is_plain_url else '/data/nuscenes'}"
        place = Path(text)
        if not is_plain_url:
            for name, patterns in CONTENTS.items():
                if any(
                    place.match(pattern) if place.is_file() else any(place.glob(pattern))
                    for pattern in patterns
                ):
                    hint = f"; its content looks like {name}:{text}"
                    break
        raise ConfigError(
            f"source {text!r} must be KIND:PATH{hint}; known kinds: {_list_names(_list_kinds())}"
        )
    _find_entry(kind, f"source {text!r} has the")
    return SourceSpec(kind, location, options)


@contextlib.contextmanager
def naming(spec: SourceSpec) -> Iterator[None]:
    """Add to an error that no source means to raise the kind and the package that it comes from.

    Add to one that a source means where the files of its kind are, if they are in a folder beside.
    """
    try:
        yield
    except SourceError as error:
        advice = _find_better_place(spec)
        if advice:
            raise SourceError(f"{error}; {advice}") from error
        raise
    except FuelrailError:
        raise
    except Exception as error:
        entry = _find_entry(spec.kind)
        note = f"raised by the source kind '{spec.kind}' of package '{_describe_package(entry)}'"
        if spec.kind not in _BUILT_IN and not getattr(error, "__notes__", ()):
            error.add_note(f"{note}: report it there")
        raise


def _describe_package(entry: EntryPoint) -> str:
    if entry.dist is None:
        return _OWN_PACKAGE
    return f"{entry.dist.name} {entry.dist.version}"


def make_source(spec: SourceSpec) -> Source:
    """Make the source; raises ConfigError where its options are wrong, or a package that it
    needs is missing.
    """
    kind = _load(_find_entry(spec.kind, f"source '{spec.kind}:{spec.location}' has the"))
    missing = _list_missing(kind)
    if missing:
        raise ConfigError(f"sources of kind '{spec.kind}' need: {how_to_install(*missing)}")
    with naming(spec):
        source: Source = kind(spec.location, spec.options)
    return source


def options_of_texts(kind: str, pairs: Iterable[str]) -> dict[str, Any]:
    """Parse options given as ``KEY=VALUE``, each checked against the settings of the kind.

    A list or a mapping is written as YAML has it in one line: ``[a, b]``, ``{a: b}``. Raises
    ConfigError.
    """
    settings = _load(_find_entry(kind)).settings_type
    types = {field.name: field.type for field in msgspec.structs.fields(settings)}
    values: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise ConfigError(
                f"-o {pair!r} must be KEY=VALUE; options of {kind}: {', '.join(types)}"
            )
        if name not in types:
            hint = did_you_mean(name, types)
            raise ConfigError(
                f"-o {pair}: {kind} has no option {name!r}; allowed: {', '.join(types)}{hint}"
            )
        if name in values:
            raise ConfigError(f"-o {name} is given twice: {values[name]!r} and {text!r}")
        try:
            value: Any = text
            if text[:1] in ("[", "{"):
                _, value = parse_yaml(text, takes_merges=False)
            plain = msgspec.convert(value, types[name], strict=False)
            values[name] = msgspec.to_builtins(plain)
        except msgspec.ValidationError as error:
            fault = fault_in_words(error)
            if fault.endswith("is not allowed"):
                type_info = msgspec.inspect.type_info(types[name])
                names = dict.fromkeys(_type_name(type_info, {}))
                fault += f"; allowed are {', '.join(names)}"
            raise ConfigError(f"-o {pair}: {fault}") from error
        except ValueError as error:
            raise ConfigError(
                f"{shortened(f'-o {pair}')}: the value is not YAML: {error}"
            ) from error
    return values


def sources(kind: str | None = None) -> list[SourceKind]:
    """Return the kinds of sources that are installed, or one: options, and what is to be installed
    for it.

    Raises ConfigError for an unknown kind.
    """
    kinds = _list_kinds()
    chosen = sorted(kinds.values()) if kind is None else [_find_entry(kind)]
    described = []
    for entry in chosen:
        package = _describe_package(entry)
        try:
            described.append(describe_kind(_load(entry), entry.name, package))
        except ConfigError as error:
            described.append(
                SourceKind(
                    kind=entry.name,
                    summary=str(error),
                    package=package,
                    missing=[],
                    options=[],
                )
            )
    return described


def describe_kind(source: Any, kind: str, package: str) -> SourceKind:
    """Return what a source's class says of itself: its docstring, its facts and its settings."""
    info = msgspec.inspect.type_info(source.settings_type)
    assert isinstance(info, msgspec.inspect.StructType), "settings are a struct"
    options = []
    for field in info.fields:
        meta: dict[str, Any] = {}
        type_text = " or ".join(dict.fromkeys(_type_name(field.type, meta)))
        description = str(meta.get("description", ""))
        if not description:
            continue
        is_unset = field.default in (None, msgspec.NODEFAULT, "", ())
        options.append(
            SourceOption(
                name=field.name,
                type=type_text,
                default="none" if is_unset else f"{field.default}".lower(),
                description=description,
            )
        )
    summary, _, notes = inspect.cleandoc(source.__doc__ or "").partition("\n\n")
    stated = {title: getattr(source, name, None) for title, name in _FACTS.items()}
    return SourceKind(
        kind=kind,
        summary=" ".join(summary.split()),
        notes=notes,
        facts={title: fact for title, fact in stated.items() if isinstance(fact, str)},
        package=package,
        missing=_list_missing(source),
        options=options,
    )


def _type_name(kind: msgspec.inspect.Type, meta: dict[str, Any]) -> list[str]:
    """Return the names of the types that a value may have; ``meta`` gets what their Meta
    says.
    """
    if isinstance(kind, msgspec.inspect.Metadata):
        meta.update(kind.extra_json_schema or {})
        meta.update(kind.extra or {})
        return _type_name(kind.type, meta)
    if isinstance(kind, msgspec.inspect.UnionType):
        return [name for part in kind.types for name in _type_name(part, meta)]
    if isinstance(kind, msgspec.inspect.LiteralType):
        return [str(value) for value in kind.values]
    if isinstance(kind, msgspec.inspect.NoneType):
        return []
    plain = {
        "StrType": "text",
        "BoolType": "true or false",
        "IntType": "integer",
        "FloatType": "number",
    }
    name = type(kind).__name__
    is_list = name in ("ListType", "VarTupleType")
    return [plain.get(name, "list" if is_list else "mapping")]


def _list_kinds() -> dict[str, EntryPoint]:
    """Return all kinds by name; Fuelrail's own come first where a plug-in has the same name."""
    plugins = {entry.name: entry for entry in entry_points(group=GROUP)}
    return {
        **plugins,
        **{name: EntryPoint(name, place, GROUP) for name, place in _BUILT_IN.items()},
    }


def _list_names(names: Iterable[str]) -> str:
    # A dataset goes to `fuelrail reshard`.
    return ", ".join(sorted(name for name in names if name != "fuelrail"))


def _find_entry(kind: str, where: str = "this names an") -> EntryPoint:
    if kind in _BUILT_IN:
        return EntryPoint(kind, _BUILT_IN[kind], GROUP)
    kinds = _list_kinds()
    if kind not in kinds and kind in _EXAMPLES:
        raise ConfigError(
            f"{where} kind {kind!r}, a plug-in that is not installed: {_EXAMPLES[kind]}"
        )
    if kind not in kinds:
        raise ConfigError(
            f"{where} unknown kind {kind!r}; known kinds: "
            f"{_list_names(kinds)}{did_you_mean(kind, kinds)}; a plug-in's package names its kinds "
            f"in the entry points '{GROUP}'"
        )
    return kinds[kind]


def _load(entry: EntryPoint) -> Any:
    try:
        return entry.load()
    except Exception as error:  # a plug-in's module may raise anything
        package = "" if entry.dist is None else f" of package '{entry.dist.name}'"
        reason = error if isinstance(error, ImportError | AttributeError) else repr(error)
        raise ConfigError(
            f"source kind '{entry.name}'{package} cannot be imported: {reason}"
        ) from error


def check_place(spec: SourceSpec) -> None:
    """Raise SourceError for a folder or file of this machine that is not there; plug-ins look
    themselves.
    """
    place = spec.location.removeprefix("file://")
    is_elsewhere = "://" in place or "\n" in place or spec.kind not in _BUILT_IN
    if is_elsewhere:
        return
    problem = "is not there"
    try:
        os.lstat(place)
        return
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        # The name is too long, or holds a zero.
        problem = f"cannot be read: {getattr(error, 'strerror', None) or error}"
    raise SourceError(f"source '{shortened(f'{spec.kind}:{spec.location}')}' {problem}")


def _find_better_place(spec: SourceSpec) -> str:
    """Return where files of the kind are, if not in the source's folder but below or above it;
    empty else.
    """
    patterns = CONTENTS.get(spec.kind)
    place = Path(spec.location.removeprefix("file://"))
    if patterns is None or not place.is_dir() or _has_any(place, patterns):
        return ""
    inside = (entry.name for entry in os.scandir(place) if entry.is_dir())
    names = sorted(itertools.islice(inside, _MOST_FOLDERS))
    folders = [place / name for name in names]
    for folder in [*folders, place.absolute().parent]:
        if _has_any(folder, patterns):
            return f"'{folder}' looks like one: is it {spec.kind}:{folder}?"
    return ""


def _has_any(place: Path, patterns: Iterable[str]) -> bool:
    try:
        return any(any(place.glob(pattern)) for pattern in patterns)
    except OSError:
        return False


def _list_missing(kind: Any) -> list[str]:
    """Return what must be installed before this kind works."""
    requirements: Sequence[tuple[str, str]] = list(kind.requires.items())
    return list(
        dict.fromkeys(
            brings for module, brings in requirements if importlib.util.find_spec(module) is None
        )
    )
