"""`fuelrail synth`, `shard`, `sources`, `reshard`, `verify`, `forget`, `inspect`, `log`, ...:
flags in, report out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from fuelrail.pipeline.cli import (
    Argument,
    Command,
    PrintOptions,
    add_flags,
    command,
    from_flags,
    given_flags,
)
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.runtime.workers import sigterm_interrupts

if TYPE_CHECKING:
    import argparse

    from fuelrail.sharding.api import ShardReport
    from fuelrail.sharding.progress import Quiet

ARROW_POOL: Final = {"ARROW_DEFAULT_MEMORY_POOL": "system"}
"""Environment, set before Arrow is loaded, in which it frees memory at once: its own pool keeps
tens of megabytes of a long run's scan.
"""

_DATASET: Final = Argument("dataset", "DATASET", "folder or URL of a Fuelrail dataset")
_FOLDER: Final = Argument("dataset", "DATASET", "folder of a Fuelrail dataset")
_OUT: Final = Argument(
    "out",
    "OUT",
    "output folder, or URL such as s3://bucket/prefix; must be new, empty, or hold an unfinished "
    "run to resume",
)
_PRINT: Final = "pipeline.cli:PrintOptions"
_WRITE: Final = (
    "sharding.planning.recipe:Recipe",
    "sharding.engines:EngineOptions",
    _PRINT,
)

COMMANDS: Final[dict[str, Command]] = {}

_command = partial(command, COMMANDS)


def _print_text(
    args: argparse.Namespace,
    report: Any,
    options: type[PrintOptions] = PrintOptions,
) -> int:
    sys.stdout.write(report.as_json() if from_flags(args, options).json else report.as_text())
    return 0


@_command(
    Argument("out", "OUT", "output folder: new or empty"),
    options=["sharding.demo.options:SynthOptions"],
)
def run_synth(args: argparse.Namespace) -> int:
    """Render a synthetic multi-camera world as nuScenes v1.0 tables.

    Render a synthetic street world with exact calibration, poses, boxes and lidar, as nuScenes
    v1.0 tables. The same options give the same bytes.
    """
    from fuelrail.sharding.demo.options import SynthOptions
    from fuelrail.sharding.demo.synth import synth
    from fuelrail.sharding.progress import bar

    options = from_flags(args, SynthOptions)
    with bar("rendering captures") as update:
        report = synth(
            args.out,
            options,
            progress=lambda done, total: update(completed=done, total=total),
        )
    sys.stdout.write(report.as_text())
    return 0


@_command(
    Argument(
        "source",
        "KIND:PATH",
        "source to read, such as nuscenes:DATAROOT: folder or URL",
    ),
    _OUT._replace(nargs="?"),
    options=["sharding.api:SourceOptions", *_WRITE],
    environment=ARROW_POOL,
)
def run_shard(args: argparse.Namespace) -> int:
    """Convert a source (such as nuScenes) into a Fuelrail dataset."""
    from fuelrail.sharding.api import SourceOptions, check_source, shard
    from fuelrail.sharding.sources.registry import (
        options_of_texts,
        parse_source,
    )

    source = from_flags(args, SourceOptions)
    pairs = (
        source.option if source.cameras is None else (*source.option, f"cameras=[{source.cameras}]")
    )
    source_options = options_of_texts(parse_source(args.source, {}).kind, pairs)
    if source.check:
        return _print_text(
            args,
            check_source(
                args.source,
                options=source_options,
                recipe=_shared_options(args)["recipe"],
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
            args.source,
            args.out,
            options=source_options,
            progress=progress,
            **options,
        ),
    )


@_command(
    Argument("kind", "KIND", "one kind (default: all)", nargs="?"),
    options=[_PRINT],
)
def run_sources(args: argparse.Namespace) -> int:
    """List the kinds of sources, and what to install; of one kind, what it reads and its
    options.
    """
    from fuelrail.sharding.sources.registry import sources

    kinds = sources(args.kind)
    if from_flags(args, PrintOptions).json:
        sys.stdout.write("\n".join(kind.as_json() for kind in kinds))
    elif args.kind is not None:
        sys.stdout.write(kinds[0].as_text())
    else:
        lines = [kind.as_line() for kind in kinds]
        lines.append("`fuelrail sources KIND` prints what a kind reads, and its options.")
        sys.stdout.write("\n".join(lines) + "\n")
    return 0


@_command(
    Argument("datasets", "DATASET", f"{_DATASET.help}; several are merged", nargs="+"),
    _OUT,
    options=[
        "sharding.api:ReshardOptions",
        *_WRITE,
        "sharding.sources.fuelrail.source:FuelrailOptions",
    ],
    environment=ARROW_POOL,
)
def run_reshard(args: argparse.Namespace) -> int:
    """Merge, split, reshuffle or recompress datasets, or append to one."""
    from fuelrail.sharding.api import ReshardOptions, append_refuses, reshard
    from fuelrail.sharding.engines import EngineOptions
    from fuelrail.sharding.planning.recipe import Recipe
    from fuelrail.sharding.sources.fuelrail.source import FuelrailOptions

    if from_flags(args, ReshardOptions).append:
        kinds = (Recipe, EngineOptions, FuelrailOptions)
        refused: list[str] = []
        for kind in kinds:
            refused += given_flags(args, kind).values()
        if refused:
            raise append_refuses("--append", refused[0])
        return _run_with_progress(
            args,
            lambda progress: reshard(
                args.datasets,
                args.out,
                append=True,
                progress=progress,
            ),
        )
    selection = from_flags(args, FuelrailOptions)
    options = _shared_options(args)
    options |= {"points": selection.points, "cameras": selection.cameras}
    return _run_with_progress(
        args,
        lambda progress: reshard(
            args.datasets,
            args.out,
            progress=progress,
            **options,
        ),
    )


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


@_command(_DATASET, options=["sharding.api:VerifyOptions", _PRINT])
def run_verify(args: argparse.Namespace) -> int:
    """Check every byte of a dataset against its checksums."""
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
                total=number,
                advance=1,
                description=f"checked {shard.name}",
            ),
            before_repair=lambda damage: sys.stderr.write(damage.as_text()),
        )
    _print_text(args, report)
    return 1 if report.faults else 0


@_command(_FOLDER, options=["sharding.forget:ForgetOptions"], environment=ARROW_POOL)
def run_forget(args: argparse.Namespace) -> int:
    """Delete samples or clips from a dataset, its layers and caches.

    Delete samples from a dataset, in place. The same command continues an interrupted run.
    """
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


@_command(
    _DATASET,
    Argument(
        "key",
        "KEY",
        "sample key (default: describe the whole dataset)",
        nargs="?",
    ),
    options=["sharding.api:InspectOptions", _PRINT],
)
def run_inspect(args: argparse.Namespace) -> int:
    """Show the contents of a dataset or of one sample."""
    from fuelrail.sharding.api import InspectOptions, inspect

    return _print_text(
        args,
        inspect(
            args.dataset,
            args.key,
            statistics=from_flags(args, InspectOptions).statistics,
        ),
    )


@_command(_DATASET, options=[_PRINT])
def run_log(args: argparse.Namespace) -> int:
    """Show what a dataset was made of, and its tags."""
    from fuelrail.sharding.verify.catalogue import dataset_log

    return _print_text(args, dataset_log(args.dataset))


@_command(
    _DATASET._replace(name="a"),
    Argument("b", "OTHER", "the dataset to compare it with"),
    options=[_PRINT],
)
def run_diff(args: argparse.Namespace) -> int:
    """Show how two datasets differ: samples, clips, channels, options.

    Compare two datasets, or two layers, by manifests and tables. Shards are not read.
    """
    from fuelrail.sharding.verify.catalogue import dataset_diff

    return _print_text(args, dataset_diff(args.a, args.b))


@_command(_FOLDER, options=["sharding.verify.catalogue:TagOptions"])
def run_tag(args: argparse.Namespace) -> int:
    """Add, remove or list tags of a dataset.

    Add or remove names of a dataset, in tags.json beside it. Without flags, list them.
    """
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
        "out",
        metavar="OUT",
        help="folder of the new layer: new, empty, or of an interrupted run",
    )
    add_flags(rebase, PrintOptions)


def _run_layer(args: argparse.Namespace) -> int:
    from fuelrail.sharding.write.layers.rebase import rebase_layer

    return _print_text(args, rebase_layer(args.layer, args.base, args.out))


COMMANDS["layer"] = Command(
    "bind a layer to another version of its base", _configure_layer, _run_layer
)
