"""`fuelrail synth`, `shard`, `sources`, `reshard`, `verify`, `forget`, `inspect`, `log`, ...:
flags in, report out.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from fuelrail.pipeline.cli import Command, PrintOptions, add_flags, from_flags, given_flags
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.runtime.workers import sigterm_interrupts

if TYPE_CHECKING:
    import argparse

    from fuelrail.sharding.api import ShardReport
    from fuelrail.sharding.progress import Quiet

ARROW_POOL: Final = {"ARROW_DEFAULT_MEMORY_POOL": "system"}
"""Environment in which Arrow frees memory at once: its own pool keeps tens of megabytes of a
long run's scan.
"""

_DATASET: Final = "folder or URL of a Fuelrail dataset"
_OUT: Final = "output folder, or URL such as s3://bucket/prefix; must be new, empty, or hold an unfinished run to resume"  # noqa: E501


def _choose_arrow_pool() -> None:
    """Set the memory pool before Arrow is loaded; a choice in the environment stays."""
    for name, value in ARROW_POOL.items():
        os.environ.setdefault(name, value)


def _print_text(
    args: argparse.Namespace, report: Any, options: type[PrintOptions] = PrintOptions
) -> int:
    sys.stdout.write(report.as_json() if from_flags(args, options).json else report.as_text())
    return 0


def _configure_shard(parser: argparse.ArgumentParser) -> None:
    _choose_arrow_pool()
    from fuelrail.sharding.api import SourceOptions

    parser.add_argument(
        "source",
        metavar="KIND:PATH",
        help="source to read, such as nuscenes:DATAROOT: folder or URL",
    )
    parser.add_argument("out", metavar="OUT", nargs="?", help=_OUT)
    add_flags(parser, SourceOptions)
    _add_options(parser)


def _run_shard(args: argparse.Namespace) -> int:
    from fuelrail.sharding.api import SourceOptions, check_source, shard
    from fuelrail.sharding.sources.registry import options_of_texts, parse_source

    source = from_flags(args, SourceOptions)
    pairs = (
        source.option if source.cameras is None else (*source.option, f"cameras=[{source.cameras}]")
    )
    source_options = options_of_texts(parse_source(args.source, {}).kind, pairs)
    if source.check:
        return _print_text(
            args,
            check_source(
                args.source, options=source_options, recipe=_shared_options(args)["recipe"]
            ),
        )
    if args.out is None:
        raise ConfigError(
            "`fuelrail shard` needs an output folder or URL, OUT; --check scans without one"
        )
    options = _shared_options(args)
    return _run_with_progress(
        args,
        lambda progress: shard(
            args.source, args.out, options=source_options, progress=progress, **options
        ),
    )


def _configure_sources(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", metavar="KIND", nargs="?", help="one kind (default: all)")
    add_flags(parser, PrintOptions)


def _run_sources(args: argparse.Namespace) -> int:
    from fuelrail.sharding.sources.registry import sources

    as_json = from_flags(args, PrintOptions).json
    sys.stdout.write(
        "\n".join(kind.as_json() if as_json else kind.as_text() for kind in sources(args.kind))
    )
    return 0


def _configure_reshard(parser: argparse.ArgumentParser) -> None:
    _choose_arrow_pool()
    from fuelrail.sharding.api import ReshardOptions
    from fuelrail.sharding.sources.fuelrail.source import FuelrailOptions

    parser.add_argument(
        "datasets", metavar="DATASET", nargs="+", help=f"{_DATASET}; several are merged"
    )
    parser.add_argument("out", metavar="OUT", help=_OUT)
    add_flags(parser, ReshardOptions)
    _add_options(parser)
    add_flags(parser, FuelrailOptions)


def _run_reshard(args: argparse.Namespace) -> int:
    from fuelrail.sharding.api import ReshardOptions, append_refuses, reshard
    from fuelrail.sharding.engines import EngineOptions
    from fuelrail.sharding.planning.recipe import Recipe
    from fuelrail.sharding.sources.fuelrail.source import FuelrailOptions

    if from_flags(args, ReshardOptions).append:
        kinds = (Recipe, EngineOptions, FuelrailOptions)
        refused = [flag for kind in kinds for flag in given_flags(args, kind).values()]
        if refused:
            raise append_refuses("--append", refused[0])
        return _run_with_progress(
            args, lambda progress: reshard(args.datasets, args.out, append=True, progress=progress)
        )
    selection = from_flags(args, FuelrailOptions)
    options = _shared_options(args)
    options |= {"points": selection.points, "cameras": selection.cameras}
    return _run_with_progress(
        args, lambda progress: reshard(args.datasets, args.out, progress=progress, **options)
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    from fuelrail.sharding.engines import EngineOptions
    from fuelrail.sharding.planning.recipe import FLAGS, Recipe

    add_flags(parser, Recipe, names=FLAGS)
    add_flags(parser, EngineOptions)
    add_flags(parser, PrintOptions)


def _shared_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that `shard` and `reshard` have in common, as keywords of their
    functions.
    """
    from fuelrail.sharding.engines import EngineOptions
    from fuelrail.sharding.planning.recipe import Recipe

    engine = from_flags(args, EngineOptions)
    return {
        "recipe": from_flags(args, Recipe),
        "workers": engine.workers,
        "engine": engine.engine,
        "ray_address": engine.ray_address,
    }


def _run_with_progress(args: argparse.Namespace, work: Callable[[Quiet], ShardReport]) -> int:
    """Run with a progress display and print the report."""
    from fuelrail.sharding.progress import JsonLines, make_progress

    with (
        sigterm_interrupts(),
        make_progress(as_json=from_flags(args, PrintOptions).json) as progress,
    ):
        try:
            report = work(progress)
        except KeyboardInterrupt:
            sys.stderr.write("fuelrail: finished shards are kept; run the same command to resume\n")
            raise
    if isinstance(progress, JsonLines):
        progress.show(
            "finished",
            samples=report.num_samples,
            shards=report.num_shards,
            written=report.num_written,
            kept=report.num_kept,
            bytes=report.num_bytes,
            seconds=round(report.seconds, 3),
            fingerprint=report.fingerprint,
        )
    else:
        sys.stdout.write(report.as_text())
    return 0


def _configure_verify(parser: argparse.ArgumentParser) -> None:
    from fuelrail.sharding.api import VerifyOptions

    parser.add_argument("dataset", metavar="DATASET", help=_DATASET)
    add_flags(parser, VerifyOptions)
    add_flags(parser, PrintOptions)


def _run_verify(args: argparse.Namespace) -> int:
    from fuelrail.sharding.api import VerifyOptions, verify
    from fuelrail.sharding.progress import bar

    options = from_flags(args, VerifyOptions)
    with sigterm_interrupts(), bar("checking") as update:
        report = verify(
            args.dataset,
            deep=options.deep,
            workers=options.workers,
            repair=options.repair,
            progress=lambda shard, number: update(
                total=number, advance=1, description=f"checked {shard.name}"
            ),
            before_repair=lambda damage: sys.stderr.write(damage.as_text()),
        )
    _print_text(args, report)
    return 1 if report.faults else 0


def _configure_forget(parser: argparse.ArgumentParser) -> None:
    _choose_arrow_pool()
    from fuelrail.sharding.forget import ForgetOptions

    parser.description = (
        "Delete samples from a dataset, in place. The same command continues an interrupted run."
    )
    parser.add_argument("dataset", metavar="DATASET", help="folder of a Fuelrail dataset")
    add_flags(parser, ForgetOptions)


def _run_forget(args: argparse.Namespace) -> int:
    from fuelrail.sharding.forget import ForgetOptions, forget

    forget_options = from_flags(args, ForgetOptions)
    with sigterm_interrupts():
        report = forget(
            args.dataset,
            forget_options.clips,
            layers=forget_options.layer,
            caches=forget_options.cache,
            receipt=forget_options.receipt,
        )
    return _print_text(args, report, ForgetOptions)


def _configure_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dataset", metavar="DATASET", help=_DATASET)
    from fuelrail.sharding.api import InspectOptions

    parser.add_argument(
        "key", metavar="KEY", nargs="?", help="sample key (default: describe the whole dataset)"
    )
    add_flags(parser, InspectOptions)
    add_flags(parser, PrintOptions)


def _run_inspect(args: argparse.Namespace) -> int:
    from fuelrail.sharding.api import InspectOptions, inspect

    return _print_text(
        args,
        inspect(args.dataset, args.key, statistics=from_flags(args, InspectOptions).statistics),
    )


def _configure_log(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dataset", metavar="DATASET", help=_DATASET)
    add_flags(parser, PrintOptions)


def _run_log(args: argparse.Namespace) -> int:
    from fuelrail.sharding.verify.catalogue import dataset_log

    return _print_text(args, dataset_log(args.dataset))


def _configure_diff(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compare two datasets, or two layers, by manifests and tables. Shards are not read."
    )
    parser.add_argument("a", metavar="DATASET", help=_DATASET)
    parser.add_argument("b", metavar="OTHER", help="the dataset to compare it with")
    add_flags(parser, PrintOptions)


def _run_diff(args: argparse.Namespace) -> int:
    from fuelrail.sharding.verify.catalogue import dataset_diff

    return _print_text(args, dataset_diff(args.a, args.b))


def _configure_tag(parser: argparse.ArgumentParser) -> None:
    from fuelrail.sharding.verify.catalogue import TagOptions

    parser.description = (
        "Add or remove names of a dataset, in tags.json beside it. Without flags, list them."
    )
    parser.add_argument("dataset", metavar="DATASET", help="folder of a Fuelrail dataset")
    add_flags(parser, TagOptions)


def _run_tag(args: argparse.Namespace) -> int:
    from fuelrail.sharding.verify.catalogue import TagOptions, dataset_log, tag

    options = from_flags(args, TagOptions)
    changes = options.add or options.remove
    tags = (
        tag(args.dataset, add=options.add, remove=options.remove)
        if changes
        else dataset_log(args.dataset).tags
    )
    sys.stdout.write("".join(f"{name}\n" for name in tags))
    return 0


def _configure_layer(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Work on layers: channels that were added to a dataset later, in a folder of their own."
    )
    words = parser.add_subparsers(dest="word", required=True, metavar="WORD")
    text = (
        "bind a layer to another version of its base, such as the one that --append made; "
        "shards are linked"
    )
    rebase = words.add_parser("rebase", help=text, description=f"{text[0].upper()}{text[1:]}.")
    rebase.add_argument("layer", metavar="LAYER", help="folder of the layer")
    rebase.add_argument("base", metavar="DATASET", help="folder or URL of the new base")
    rebase.add_argument(
        "out", metavar="OUT", help="folder of the new layer: new, empty, or of an interrupted run"
    )
    add_flags(rebase, PrintOptions)


def _run_layer(args: argparse.Namespace) -> int:
    from fuelrail.sharding.write.layers.rebase import rebase_layer

    return _print_text(args, rebase_layer(args.layer, args.base, args.out))


def _configure_synth(parser: argparse.ArgumentParser) -> None:
    from fuelrail.sharding.demo.options import SynthOptions

    parser.description = (
        "Render a synthetic street world with exact calibration, poses, boxes and lidar, as "
        "nuScenes v1.0 tables. The same options give the same bytes."
    )
    parser.add_argument("out", metavar="OUT", help="output folder: new or empty")
    add_flags(parser, SynthOptions)


def _run_synth(args: argparse.Namespace) -> int:
    from fuelrail.sharding.demo.options import SynthOptions
    from fuelrail.sharding.demo.synth import synth
    from fuelrail.sharding.progress import bar

    options = from_flags(args, SynthOptions)
    with bar("rendering captures") as update:
        report = synth(
            args.out, options, progress=lambda done, total: update(completed=done, total=total)
        )
    sys.stdout.write(report.as_text())
    return 0


COMMANDS = {
    "synth": Command(
        "render a synthetic multi-camera world as nuScenes v1.0 tables",
        _configure_synth,
        _run_synth,
    ),
    "shard": Command(
        "convert a source (such as nuScenes) into a Fuelrail dataset", _configure_shard, _run_shard
    ),
    "sources": Command(
        "list the kinds of sources, their options, and what to install",
        _configure_sources,
        _run_sources,
    ),
    "reshard": Command(
        "merge, split, reshuffle or recompress datasets, or append to one",
        _configure_reshard,
        _run_reshard,
    ),
    "verify": Command(
        "check every byte of a dataset against its checksums", _configure_verify, _run_verify
    ),
    "forget": Command(
        "delete samples or clips from a dataset, its layers and caches",
        _configure_forget,
        _run_forget,
    ),
    "inspect": Command(
        "show the contents of a dataset or of one sample", _configure_inspect, _run_inspect
    ),
    "layer": Command("bind a layer to another version of its base", _configure_layer, _run_layer),
    "log": Command("show what a dataset was made of, and its tags", _configure_log, _run_log),
    "diff": Command(
        "show how two datasets differ: samples, clips, channels, options",
        _configure_diff,
        _run_diff,
    ),
    "tag": Command("add, remove or list tags of a dataset", _configure_tag, _run_tag),
}
