"""`fuelrail shard` and `fuelrail reshard`: one set of options, one way to make shards."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from fuelrail.pipeline.cli import Command, counted
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.format.codecs import DEFAULT_ZSTD_LEVEL
from fuelrail.pipeline.runtime.workers import sigterm_is_ctrl_c
from fuelrail.pipeline.storage.filesystem import is_url, shown_url
from fuelrail.sharding.engines import ENGINES, make_engine
from fuelrail.sharding.planning.recipe import (
    DEFAULT_SHARD_BYTES,
    FORM,
    JPEGS,
    LAYOUTS,
    ORDERS,
    make_recipe,
    parse_images,
    parse_size,
    parse_splits,
)
from fuelrail.sharding.progress import JsonLines, Quiet, make_progress
from fuelrail.sharding.run import Outcome, shard
from fuelrail.sharding.sources.fuelrail import SEPARATOR
from fuelrail.sharding.sources.source import SourceSpec, parse_source

if TYPE_CHECKING:
    from fuelrail.pipeline.format.manifest import Manifest
    from fuelrail.sharding.planning.recipe import Recipe

_FLAGS: Final = {
    "compression_level": "zstd-level",
    "dictionary_bytes": "dictionary",
    "shard_size_bytes": "shard-size",
}
"""Flags that are not called as their field of the recipe."""


def configure_shard(parser: argparse.ArgumentParser) -> None:
    """Arguments of `fuelrail shard`."""
    parser.add_argument("source", metavar="KIND:PATH", help="what to read: nuscenes:DATAROOT, a folder or a URL")
    _add_out(parser)
    _add_recipe(parser)
    _add_engine(parser)
    of_source = parser.add_argument_group("options of the source")
    of_source.add_argument("--version", metavar="FOLDER", help="nuscenes: folder of the tables, such as v1.0-mini")
    of_source.add_argument(
        "--missing-camera",
        choices=("error", "mask"),
        help="nuscenes: a camera file that does not exist: refuse (default), or leave the member out and mark it "
        "invalid; a sample without any image is dropped",
    )
    of_source.add_argument("--no-points", action="store_true", help="leave lidar sweeps out")
    of_source.add_argument(
        "--sweeps",
        type=int,
        metavar="N",
        help="nuscenes: with every keyframe store the N lidar sweeps before it (9: each sweep once; default 0)",
    )


def run_shard(args: argparse.Namespace) -> int:
    """`fuelrail shard`."""
    given = {
        "version": args.version,
        "missing_camera": args.missing_camera,
        "points": False if args.no_points else None,
        "sweeps": args.sweeps,
    }
    spec = parse_source(args.source, {name: value for name, value in given.items() if value is not None})
    if spec.kind == "fuelrail":
        raise ConfigError(f"'{spec.location}' is a dataset already: `fuelrail reshard {spec.location} {args.out}`")
    return _make(args, spec)


def configure_reshard(parser: argparse.ArgumentParser) -> None:
    """Arguments of `fuelrail reshard`."""
    parser.add_argument(
        "datasets", metavar="DATASET", nargs="+", help="folder or URL of a Fuelrail dataset; several are merged"
    )
    _add_out(parser)
    parser.add_argument(
        "--append",
        action="store_true",
        help="make OUT the first dataset's next version, with the clips of the others added: no shard is written anew, "
        "those that are there are linked (at a URL copied by the store); the old version stays",
    )
    _add_recipe(parser)
    parser.add_argument("--no-points", action="store_true", help="leave lidar sweeps out")
    _add_engine(parser)


def run_reshard(args: argparse.Namespace) -> int:
    """`fuelrail reshard`."""
    if _place(args.out) in map(_place, args.datasets):
        raise ConfigError(f"'{args.out}' is to be read and to be written: choose another output folder")
    if args.append:
        return _append(args)
    options = {"points": False} if args.no_points else {}
    return _make(args, SourceSpec("fuelrail", SEPARATOR.join(args.datasets), options))


def _place(location: str) -> str:
    """The same for two ways to write one folder or URL."""
    return location.rstrip("/") if is_url(location) else os.path.realpath(location.removeprefix("file://"))


def _append(args: argparse.Namespace) -> int:
    from fuelrail.sharding.append import append

    blank = argparse.ArgumentParser()
    configure_reshard(blank)
    of_run = {"datasets", "out", "append", "json"}
    for name, value in vars(args).items():
        if name not in of_run and value != blank.get_default(name):
            raise ConfigError(f"--append writes no shard anew: --{name.replace('_', '-')} cannot be had with it")
    begun = time.monotonic()
    with sigterm_is_ctrl_c(), make_progress(as_json=args.json) as progress:
        manifest = append(args.datasets, args.out, progress)
    outcome = Outcome(manifest, num_written=0, num_kept=len(manifest.shards))
    return _report(progress, outcome, args.out, time.monotonic() - begun)


def _add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "out",
        metavar="OUT",
        help="folder, or URL such as s3://bucket/prefix, for the dataset: new, empty, or with a run to go on with",
    )


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, help="of the order of samples in the shards (default 0)")
    parser.add_argument(
        "--order", default="frame", help=f"what stays together when samples are shuffled: {ORDERS} (default frame)"
    )
    parser.add_argument(
        "--select",
        metavar="EXPRESSION",
        help="samples to take, by their attributes: \"night and num_pedestrian >= 3 and location != 'x'\"",
    )
    parser.add_argument(
        "--limit", type=int, metavar="N", help="take the first N samples of those, in the source's order"
    )
    parser.add_argument(
        "--shard-size",
        metavar="SIZE",
        default=f"{DEFAULT_SHARD_BYTES >> 20}MiB",
        help="size of a shard, roughly (default %(default)s)",
    )
    parser.add_argument(
        "--splits",
        metavar="SPLITS",
        help="shares of the clips (train=0.8,val=0.2), or a JSON or YAML file: split to list of clips; "
        "default: the source's own, else all is train",
    )
    parser.add_argument("--split-seed", type=int, default=0, help="which clips go to which share (default 0)")
    parser.add_argument("--images", metavar="SPEC", help=f"store images smaller, which is lossy: {FORM}")
    parser.add_argument(
        "--layout",
        choices=LAYOUTS,
        default=LAYOUTS[0],
        help="member: compress metadata and points, each by itself; frame: compress each sample as a whole, in "
        ".tar.zst; none: compress nothing (default %(default)s)",
    )
    parser.add_argument(
        "--zstd-level", metavar="N", type=int, default=DEFAULT_ZSTD_LEVEL, help="1 to 19 (default %(default)s)"
    )
    parser.add_argument(
        "--dictionary",
        metavar="SIZE",
        help="train a zstd dictionary of this size (64KiB) for metadata, geometry and boxes; for layout member, and "
        "worth it where there are no images beside them (default: none)",
    )
    parser.add_argument(
        "--jpeg",
        choices=JPEGS,
        default=JPEGS[0],
        help="keep: store JPEGs byte for byte; restart: rewrite them losslessly, so that loaders need not decode what "
        "their crop drops; needs jpegtran (default %(default)s)",
    )
    parser.add_argument("--name", help="the dataset's name (default: from the source)")
    parser.add_argument("--license", help="the data's license, noted in the manifest and in every sample")


def _add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="processes (default: one for each core)")
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        help="where shards are made: in threads or processes here, or by a Ray cluster; the bytes are the same "
        "(default: threads for a few workers, processes for more)",
    )
    parser.add_argument(
        "--ray-address", metavar="ADDRESS", help="existing cluster: auto, or HOST:PORT (default: one of this run's own)"
    )
    parser.add_argument("--json", action="store_true", help="report progress and result as JSON lines on stdout")


def _recipe(args: argparse.Namespace) -> Recipe:
    values: dict[str, Any] = {
        "name": args.name,
        "license": args.license,
        "seed": args.seed,
        "select": args.select,
        "limit": args.limit,
        "order": args.order,
        "splits": None if args.splits is None else parse_splits(args.splits),
        "split_seed": args.split_seed,
        "shard_size_bytes": parse_size(args.shard_size, "--shard-size"),
        "images": None if args.images is None else parse_images(args.images),
        "layout": args.layout,
        "compression_level": args.zstd_level,
        "dictionary_bytes": None if args.dictionary is None else parse_size(args.dictionary, "--dictionary"),
        "jpeg": args.jpeg,
    }
    try:
        return make_recipe(**values)
    except ConfigError as error:
        raise ConfigError(_named_by_flag(str(error), values)) from error


def _make(args: argparse.Namespace, spec: SourceSpec) -> int:
    recipe = _recipe(args)
    if args.ray_address is not None and args.engine != "ray":
        raise ConfigError("--ray-address belongs to --engine ray")
    if args.workers < 0:
        raise ConfigError(f"--workers {args.workers} is too few: 1 at least")
    engine = make_engine(args.engine, args.workers, args.ray_address)
    begun = time.monotonic()
    with sigterm_is_ctrl_c(), make_progress(as_json=args.json) as progress:
        try:
            num_workers = args.workers or len(os.sched_getaffinity(0))
            outcome = shard(spec, args.out, recipe, num_workers, progress, engine)
        except KeyboardInterrupt:
            sys.stderr.write("fuelrail: finished shards are kept; run the same command to go on\n")
            raise
    return _report(progress, outcome, args.out, time.monotonic() - begun)


def _report(progress: Quiet, outcome: Outcome, out: str, seconds: float) -> int:
    manifest = outcome.manifest
    num_bytes = sum(entry.bytes for entry in manifest.shards)
    if isinstance(progress, JsonLines):
        progress.emit(
            "finished",
            samples=manifest.num_samples,
            shards=len(manifest.shards),
            written=outcome.num_written,
            kept=outcome.num_kept,
            bytes=num_bytes,
            seconds=round(seconds, 3),
            fingerprint=manifest.fingerprint,
        )
        return 0
    splits = ", ".join(f"{name} {entry.num_samples:,}" for name, entry in manifest.splits.items())
    kept = f" ({outcome.num_kept} were there already)" if outcome.num_kept else ""
    left_out = _left_out(manifest)
    sys.stdout.write(
        f"{counted(manifest.num_samples, 'sample')} ({splits}) of {counted(manifest.num_clips, 'clip')} in "
        f"{counted(len(manifest.shards), 'shard')}{kept}, {num_bytes / 1e6:,.1f} MB, {seconds:.1f} s: {out}\n{left_out}"
    )
    if outcome.report is not None:
        sys.stdout.write("\n".join(outcome.report.lines()) + "\n")
    return 0


def _left_out(manifest: Manifest) -> str:
    """A line about clips that no split names, where nobody asked for less than all of them; else nothing."""
    recipe, number = manifest.provenance.get("recipe", {}), manifest.provenance.get("num_clips_in_no_split", 0)
    if not number or recipe.get("select") is not None or recipe.get("limit") is not None:
        return ""
    return f"left out: {counted(number, 'clip')} of the source that no split names; --splits says what goes where\n"


def _named_by_flag(text: str, values: dict[str, Any]) -> str:
    """An error of the recipe about one field, with the flag and the value that the field came from."""
    match = re.fullmatch(r"options: at '(\w+)[^']*': (.*)", text, re.DOTALL)
    if match is None:
        return text
    field, said = match.groups()
    return f"--{_FLAGS.get(field, field.replace('_', '-'))} {values[field]}: {said}"


ARROW_POOL: Final = {"ARROW_DEFAULT_MEMORY_POOL": "system"}
"""Environment in which Arrow gives memory back at once: its own pool keeps tens of megabytes of a long run's scan."""


def _configure_synth(parser: argparse.ArgumentParser) -> None:
    from fuelrail.sharding.demo.command import configure_synth

    configure_synth(parser)


def _run_synth(args: argparse.Namespace) -> int:
    from fuelrail.sharding.demo.command import run_synth

    return run_synth(args)


def _configure_shard(parser: argparse.ArgumentParser) -> None:
    _choose_arrow_pool()

    configure_shard(parser)


def _run_shard(args: argparse.Namespace) -> int:

    return run_shard(args)


def _configure_reshard(parser: argparse.ArgumentParser) -> None:
    _choose_arrow_pool()

    configure_reshard(parser)


def _run_reshard(args: argparse.Namespace) -> int:

    return run_reshard(args)


def _choose_arrow_pool() -> None:
    """To be called before Arrow is loaded; who has chosen already is left alone."""
    for name, value in ARROW_POOL.items():
        os.environ.setdefault(name, value)


def _configure_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dataset", metavar="OUT", help="folder or URL of a Fuelrail dataset")
    parser.add_argument("--deep", action="store_true", help="decode every member and every image too")
    parser.add_argument("--workers", type=int, metavar="N", help="threads (default: one for each core)")
    parser.add_argument(
        "--repair",
        metavar="KIND:PATH",
        nargs="+",
        help="make what is broken again from the source it came from; of a merged dataset fuelrail:OUT1 OUT2 ...",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def _run_verify(args: argparse.Namespace) -> int:
    from fuelrail.sharding.progress import checking
    from fuelrail.sharding.verify.dataset import verify

    if args.workers is not None and not 1 <= args.workers <= 1024:
        raise ConfigError(f"--workers {args.workers} must be 1 to 1024; left out, it is one for each core")
    if args.repair and is_url(args.dataset):
        raise ConfigError(
            f"--repair is for folders; the command that made '{shown_url(args.dataset)}', run again, makes what is "
            "damaged there anew"
        )
    num_threads = args.workers or len(os.sched_getaffinity(0))
    with checking() as checked:
        report = verify(args.dataset, deep=args.deep, num_threads=num_threads, checked=checked)
    if report.faults and args.repair:
        from fuelrail.sharding.progress import make_progress
        from fuelrail.sharding.run import repair

        sys.stderr.write(report.as_text())
        with make_progress(as_json=False) as progress:
            repair(args.dataset, "\n".join(args.repair), num_threads, progress)
        with checking() as checked:
            report = verify(args.dataset, deep=args.deep, num_threads=num_threads, checked=checked)
    sys.stdout.write(report.as_json() if args.json else report.as_text())
    return 1 if report.faults else 0


def _configure_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dataset", metavar="OUT", help="folder of a Fuelrail dataset")
    parser.add_argument("key", nargs="?", help="sample key; left out: the dataset as a whole")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _run_inspect(args: argparse.Namespace) -> int:
    from fuelrail.sharding.verify.inspect import describe_dataset, describe_sample

    text = (
        describe_dataset(args.dataset, as_json=args.json)
        if args.key is None
        else describe_sample(args.dataset, args.key, as_json=args.json)
    )
    sys.stdout.write(text)
    return 0


COMMANDS = {
    "synth": Command("render a synthetic multi-camera world as nuScenes v1.0 tables", _configure_synth, _run_synth),
    "shard": Command("make a Fuelrail dataset of a source", _configure_shard, _run_shard),
    "reshard": Command(
        "merge, split, shuffle or recompress datasets, or append to one", _configure_reshard, _run_reshard
    ),
    "verify": Command("check every byte of a dataset", _configure_verify, _run_verify),
    "inspect": Command("show a dataset's manifest or one sample's members", _configure_inspect, _run_inspect),
}
