"""`fuelrail synth`, `shard`, `reshard`, `verify` and `inspect`. What a command needs is imported when it runs."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Final

from fuelrail.pipeline.command import Command
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.remote import is_url, shown_url

if TYPE_CHECKING:
    import argparse


ARROW_POOL: Final = {"ARROW_DEFAULT_MEMORY_POOL": "system"}
"""Environment in which Arrow gives memory back at once: its own pool keeps tens of megabytes of a long run's scan."""


def _configure_synth(parser: argparse.ArgumentParser) -> None:
    from fuelrail.sharding.synth.command import configure_synth

    configure_synth(parser)


def _run_synth(args: argparse.Namespace) -> int:
    from fuelrail.sharding.synth.command import run_synth

    return run_synth(args)


def _configure_shard(parser: argparse.ArgumentParser) -> None:
    _choose_arrow_pool()
    from fuelrail.sharding.shard_command import configure_shard

    configure_shard(parser)


def _run_shard(args: argparse.Namespace) -> int:
    from fuelrail.sharding.shard_command import run_shard

    return run_shard(args)


def _configure_reshard(parser: argparse.ArgumentParser) -> None:
    _choose_arrow_pool()
    from fuelrail.sharding.shard_command import configure_reshard

    configure_reshard(parser)


def _run_reshard(args: argparse.Namespace) -> int:
    from fuelrail.sharding.shard_command import run_reshard

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
    from fuelrail.sharding.verify import verify

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
    from fuelrail.sharding.inspection import describe_dataset, describe_sample

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
