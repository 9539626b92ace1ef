"""The functions behind the commands: options in, report out.

``fuelrail shard`` calls ``fuelrail.shard``.

Options are keywords, checked as the command line checks its flags; every error is a FuelrailError.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from fuelrail.pipeline.cli import counted
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.runtime.host import num_usable_cpus
from fuelrail.pipeline.runtime.workers import check_main_guard
from fuelrail.pipeline.settings import Settings, convert, flag
from fuelrail.pipeline.storage.filesystem import is_url, shown_url
from fuelrail.pipeline.text import Printed
from fuelrail.sharding.engines import Engine, EngineOptions, make_engine
from fuelrail.sharding.planning.recipe import Recipe, check_recipe, make_recipe
from fuelrail.sharding.progress import Quiet
from fuelrail.sharding.run import Outcome, checked_source
from fuelrail.sharding.run import repair as repair_dataset
from fuelrail.sharding.run import shard as run_shard
from fuelrail.sharding.sources.fuelrail.source import SEPARATOR
from fuelrail.sharding.sources.registry import SourceSpec, parse_source
from fuelrail.sharding.sources.shared.scan_report import ScanReport
from fuelrail.sharding.verify.dataset import Checked, VerifyReport
from fuelrail.sharding.verify.dataset import verify as verify_dataset
from fuelrail.sharding.verify.inspect import (
    Description,
    describe_dataset,
    describe_sample,
)
from fuelrail.sharding.write.break_even import BreakEven

if TYPE_CHECKING:
    Location = str | os.PathLike[str]


class ShardReport(Printed, msgspec.Struct, frozen=True, kw_only=True):
    """The result of a sharding run.

    ``num_kept`` shards were already complete and were reused. ``num_clips_left_out`` counts the
    clips that no split names. ``scan`` is what the scan of the source kept, dropped and did not
    understand, where the source counts it.
    """

    dataset: str
    fingerprint: str
    num_samples: int
    num_clips: int
    num_shards: int
    num_written: int
    num_kept: int
    num_bytes: int
    seconds: float
    samples_by_split: dict[str, int]
    num_clips_left_out: int = 0
    scan: ScanReport | None = None

    def as_text(self) -> str:
        """Return the report for people: a line for the dataset, and more for what was left out
        or changed.
        """
        splits = ", ".join(f"{name} {count:,}" for name, count in self.samples_by_split.items())
        reused_text = f" ({self.num_kept:,} reused)" if self.num_kept else ""
        lines = [
            (
                f"{counted(self.num_samples, 'sample')} ({splits}) of "
                f"{counted(self.num_clips, 'clip')} in "
                f"{counted(self.num_shards, 'shard')}{reused_text}, {self.num_bytes / 1e6:,.1f} "
                f"MB, {self.seconds:.1f} s: {self.dataset}"
            )
        ]
        if self.num_clips_left_out:
            lines.append(
                f"left out: {counted(self.num_clips_left_out, 'clip')} of the source that "
                "no split names; assign them with --splits"
            )
        if self.scan is not None:
            lines += self.scan.lines()
        return "\n".join(lines) + "\n"


class SourceOptions(Settings, frozen=True, kw_only=True):
    """Options of ``shard`` for its source."""

    option: Annotated[
        tuple[str, ...],
        flag(
            "option of the source, repeatable; `fuelrail sources KIND` lists them",
            repeat=True,
            short="-o",
            metavar="KEY=VALUE",
        ),
    ] = ()
    cameras: Annotated[
        str | None,
        flag(
            "cameras to keep, such as cam_front,cam_back: the source's option of that name "
            "(default: all)"
        ),
    ] = None
    check: Annotated[bool, flag("scan the source, report, and write nothing")] = False


class ReshardOptions(Settings, frozen=True, kw_only=True):
    """Options of ``reshard`` beside those of ``shard``."""

    append: Annotated[
        bool,
        flag(
            "make OUT the next version of the first dataset, with the clips of the others "
            "added; existing shards are reused (linked in a folder, copied by the store at "
            "a URL), and the old version stays"
        ),
    ] = False


class SourceReport(Printed, msgspec.Struct, frozen=True, kw_only=True):
    """What a source holds, by its scan: channels of the rig, classes of boxes, and the scan's
    own report.
    """

    name: str
    num_samples: int
    num_clips: int
    cameras: list[str]
    lidars: list[str]
    classes: list[str]
    scan: ScanReport | None = None
    video: BreakEven | None = None

    def as_text(self) -> str:
        """Return the report for people."""
        lines = [
            (
                f"{self.name}: {counted(self.num_samples, 'sample')} of "
                f"{counted(self.num_clips, 'clip')}"
            ),
            (
                f"cameras: {', '.join(self.cameras) or 'none'}; lidars: "
                f"{', '.join(self.lidars) or 'none'}"
            ),
            f"classes: {', '.join(self.classes) or 'none'}",
        ]
        if self.scan is not None:
            lines += self.scan.lines()
        if self.video is not None:
            lines += self.video.lines()
        return "\n".join(lines) + "\n"


class VerifyOptions(Settings, frozen=True, kw_only=True):
    """Options of ``verify``."""

    deep: Annotated[bool, flag("also decode every member and every image")] = False
    workers: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None,
        flag("number of threads (default: one per core)"),
    ] = None
    repair: Annotated[
        tuple[str, ...],
        flag(
            "rebuild damaged shards from the original source; for a merged dataset "
            "fuelrail:OUT1 OUT2 ...",
            metavar="KIND:PATH",
        ),
    ] = ()


def shard(
    source: str,
    out: Location,
    recipe: Recipe | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    workers: int = 0,
    engine: str | Engine | None = None,
    ray_address: str | None = None,
    progress: Quiet | None = None,
    **settings: Any,  # checked by the recipe
) -> ShardReport:
    """Convert a source, such as ``nuscenes:/data/nuscenes``, into a Fuelrail dataset; an
    interrupted run is resumed.

    ``out`` is a folder or a URL that fsspec can write. ``settings`` are the fields of
    :class:`Recipe` as keywords (``seed=7, splits={"train": 0.8, "val": 0.2}``), or give one struct.
    ``options`` are those of the kind of source, such as ``{"version": "v1.0-mini"}``;
    :func:`fuelrail.sources` lists kinds and options. ``workers=0`` is one per core; ``engine`` is
    "threads", "processes", "ray" or None for the best local one. A script that starts processes
    needs an ``if __name__ == "__main__":`` guard: they import it.

    Raises SourceError for faults of the source, DatasetExistsError where ``out`` holds another
    dataset, DatasetError where it cannot be written, ConfigError for options.
    """
    spec = parse_source(source, dict(options or {}))
    if spec.kind == "fuelrail":
        raise ConfigError(
            f"'{spec.location}' is already a Fuelrail dataset: use `fuelrail reshard "
            f"{spec.location} {os.fspath(out)}`"
        )
    return _run(
        spec,
        out=out,
        recipe=_recipe(recipe, settings),
        engine=engine,
        workers=workers,
        ray_address=ray_address,
        progress=progress,
    )


def check_source(
    source: str,
    *,
    options: Mapping[str, Any] | None = None,
    recipe: Recipe | None = None,
) -> SourceReport:
    """Scan a source and write nothing: what :func:`shard` would find wrong, and what it would keep
    and drop.

    Of video in files, also what JPEGs of its frames cost, stored by the recipe's ``images``. Raises
    SourceError with all faults of the source, ConfigError for options.
    """
    info, video = checked_source(parse_source(source, dict(options or {})), recipe or make_recipe())
    return SourceReport(
        name=info.name,
        num_samples=info.num_samples,
        num_clips=len(info.clips),
        cameras=[camera.channel for camera in info.cameras],
        lidars=[lidar.channel for lidar in info.lidars],
        classes=info.classes,
        scan=info.report,
        video=video,
    )


def reshard(
    datasets: Location | Sequence[Location],
    out: Location,
    recipe: Recipe | None = None,
    *,
    append: bool = False,
    points: bool = True,
    cameras: Sequence[str] = (),
    workers: int = 0,
    engine: str | Engine | None = None,
    ray_address: str | None = None,
    progress: Quiet | None = None,
    **options: Any,  # checked by the recipe
) -> ShardReport:
    """Merge, split, reshuffle or recompress datasets, with the options of :func:`shard`.

    ``points=False`` leaves lidar sweeps out, ``cameras=["cam_front"]`` all other cameras and what
    lies on their images. ``append=True`` makes ``out`` the first dataset's next version, with the
    clips of the others added: it reuses the shards as they are, so that it takes no other options.
    """
    if isinstance(datasets, str | os.PathLike):
        datasets = [datasets]
    locations = [os.fspath(location) for location in datasets]
    if _normalize_place(os.fspath(out)) in map(_normalize_place, locations):
        raise ConfigError(
            f"input and output are the same folder, '{os.fspath(out)}': choose another "
            "output folder"
        )
    if not append:
        source_options: dict[str, Any] = {
            **({} if points else {"points": False}),
            **({"cameras": cameras} if cameras else {}),
        }
        spec = SourceSpec("fuelrail", SEPARATOR.join(locations), source_options)
        return _run(
            spec,
            out=out,
            recipe=_recipe(recipe, options),
            engine=engine,
            workers=workers,
            ray_address=ray_address,
            progress=progress,
        )
    stated = {
        "recipe": recipe,
        "engine": engine,
        "workers": workers or None,
        "ray_address": ray_address,
        **options,
    }
    stated |= {"points": None if points else False, "cameras": cameras or None}
    refused = [name for name, value in stated.items() if value is not None]
    if refused:
        raise append_refuses("append=True", refused[0])
    from fuelrail.sharding.append import append as append_datasets

    start = time.monotonic()
    manifest = append_datasets(locations, out, progress)
    return _report(
        Outcome(manifest, num_written=0, num_kept=manifest.num_shards),
        out,
        time.monotonic() - start,
    )


def append_refuses(append: str, option: str) -> ConfigError:
    """Return the error for an option that does not go with appending, each as the user wrote it."""
    return ConfigError(
        f"{append} reuses shards as they are, so it cannot be combined with {option}"
    )


def verify(
    dataset: Location,
    *,
    deep: bool = False,
    workers: int | None = None,
    repair: str | Sequence[str] | None = None,
    progress: Checked = lambda _shard, _num_shards: None,
    before_repair: Callable[[VerifyReport], object] | None = None,
) -> VerifyReport:
    """Check every byte of a dataset, in a folder or at a URL; what is wrong is in the report's
    ``faults``.

    ``deep`` also decodes every member and image. ``repair`` is the original source
    (``nuscenes:/data/nuscenes``): damaged files are rebuilt from it, and the report is that of the
    repaired dataset; ``before_repair`` gets the report of the damage. ``progress`` is called with
    each checked shard and the number of shards. Raises DatasetError where there is no dataset.
    """
    if repair is None:
        repair = ()
    elif isinstance(repair, str):
        repair = (repair,)
    else:
        repair = tuple(repair)
    options = convert(
        {"deep": deep, "workers": workers, "repair": repair},
        VerifyOptions,
        "verify",
    )
    if repair and is_url(dataset):
        raise ConfigError(
            f"repair needs a folder, got '{shown_url(str(dataset))}': run the command that "
            "made the dataset again, it rebuilds what is damaged"
        )
    if repair:
        parse_source(SEPARATOR.join(repair), {})  # a mistake must not show after hours of reading
    num_threads = options.workers or num_usable_cpus()
    report = verify_dataset(
        dataset,
        deep=deep,
        num_threads=num_threads,
        checked=progress,
    )
    if not (report.faults and repair):
        return report
    if before_repair is not None:
        before_repair(report)
    repair_dataset(
        dataset,
        SEPARATOR.join(repair),
        num_threads,
        Quiet(),
    )
    return verify_dataset(
        dataset,
        deep=deep,
        num_threads=num_threads,
        checked=progress,
    )


class InspectOptions(Settings, frozen=True, kw_only=True):
    """Options of ``inspect``."""

    statistics: Annotated[
        bool,
        flag(
            "also compute mean, deviation and quantiles of all numbers, and store them "
            "beside the manifest"
        ),
    ] = False


def inspect(
    dataset: Location,
    key: str | None = None,
    *,
    statistics: bool = False,
) -> Description:
    """Describe a dataset, or the sample with this key: its members, metadata and geometry.

    ``statistics``: see :func:`fuelrail.sharding.verify.statistics.dataset_statistics`. Raises
    DatasetError for what is not a dataset, ConfigError for a key that does not exist, and for
    statistics of a sample.
    """
    if statistics and key is not None:
        raise ConfigError(
            f"statistics are of a dataset, and '{key}' is one sample: leave one of them out"
        )
    if key is None:
        return describe_dataset(dataset, statistics=statistics)
    return describe_sample(dataset, key)


def _recipe(recipe: Recipe | None, options: Mapping[str, Any]) -> Recipe:
    if recipe is None:
        return make_recipe(**options)
    if options:
        raise ConfigError(
            "give the options as a recipe or as keywords, not both; got recipe and "
            f"{', '.join(options)}"
        )
    check_recipe(recipe)
    return recipe


def _run(
    spec: SourceSpec,
    out: Location,
    recipe: Recipe,
    engine: str | Engine | None,
    workers: int,
    ray_address: str | None,
    progress: Quiet | None,
) -> ShardReport:
    check_main_guard()
    name = engine if isinstance(engine, str) else None
    options = convert(
        {"workers": workers, "engine": name, "ray_address": ray_address},
        EngineOptions,
        "options",
    )
    start = time.monotonic()
    chosen = make_engine(options) if engine is None or isinstance(engine, str) else engine
    outcome = run_shard(
        spec,
        out=out,
        recipe=recipe,
        num_workers=options.num_workers,
        progress=progress or Quiet(),
        engine=chosen,
    )
    return _report(outcome, out, time.monotonic() - start)


def _report(outcome: Outcome, out: Location, seconds: float) -> ShardReport:
    manifest = outcome.manifest
    recipe = manifest.provenance.get("recipe", {})
    is_of_all = recipe.get("select") is None and recipe.get("limit") is None
    num_in_no_split = manifest.provenance.get("num_clips_in_no_split", 0)
    return ShardReport(
        dataset=os.fspath(out),
        fingerprint=manifest.fingerprint,
        num_samples=manifest.num_samples,
        num_clips=manifest.num_clips,
        num_shards=manifest.num_shards,
        num_written=outcome.num_written,
        num_kept=outcome.num_kept,
        num_bytes=manifest.num_bytes,
        seconds=seconds,
        samples_by_split={name: entry.num_samples for name, entry in manifest.splits.items()},
        num_clips_left_out=num_in_no_split if is_of_all else 0,
        scan=outcome.report,
    )


def _normalize_place(location: str) -> str:
    """Return the same text for two ways to write one folder or URL."""
    if is_url(location):
        return location.rstrip("/")
    return os.path.realpath(location.removeprefix("file://"))
