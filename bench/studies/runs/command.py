"""``fuelrail runs show|replay|seen|diff|attest``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from fuelrail.bench.studies.runs.history import run_diff, run_history
from fuelrail.pipeline.cli import Command, PrintOptions, add_flags, from_flags, print_json
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.settings import NotNegative, Settings, flag
from fuelrail.pipeline.text import text_of

if TYPE_CHECKING:
    import argparse


class SeenOptions(PrintOptions, frozen=True, kw_only=True):
    """Flags of ``fuelrail runs`` words that make a loader."""

    dataset: Annotated[
        str | None, flag("where the dataset is now (default: where it was)", metavar="DATASET")
    ] = None
    files: Annotated[
        str | None,
        flag(
            "folder of the files of keys and weights that the run's order names "
            "(default: the ledger's)",
            metavar="FOLDER",
        ),
    ] = None
    receipt: Annotated[
        tuple[str, ...],
        flag(
            "receipt of `fuelrail forget` on the dataset since the run, unless it is beside the "
            "dataset; repeatable",
            repeat=True,
            metavar="FILE",
        ),
    ] = ()


class FindOptions(SeenOptions, frozen=True, kw_only=True):
    """Flags of ``fuelrail runs seen``."""

    checkpoints: Annotated[
        str | None,
        flag(
            "folder or URL of checkpoints, or a JSON file of loaders' states by name",
            metavar="PLACE",
        ),
    ] = None


class ReplayOptions(SeenOptions, frozen=True, kw_only=True):
    """Flags of ``fuelrail runs replay``."""

    without: Annotated[
        str | None,
        flag("the batch of a run that never had the keys and clips in a file", metavar="FILE"),
    ] = None

    step: Annotated[NotNegative, flag("number of the step in the run, from 0")]
    rank: Annotated[
        NotNegative | None, flag("the batch of one rank (default: of all ranks, in order)")
    ] = None
    image: Annotated[str | None, flag("draw the batch into this PNG file", metavar="FILE")] = None


class AttestOptions(Settings, frozen=True, kw_only=True):
    """Flags of ``fuelrail runs attest``."""

    epoch: Annotated[NotNegative, flag("epoch of the loader's state in the checkpoint")]
    samples: Annotated[
        NotNegative, flag("samples of that epoch consumed, of the loader's state in the checkpoint")
    ]
    key: Annotated[
        str | None, flag("PEM file of an Ed25519 private key (default: not signed)", metavar="FILE")
    ] = None


class ReplayReport(msgspec.Struct, frozen=True):
    """A step of a run, made again."""

    step: int
    epoch: int
    samples_consumed: int
    keys: list[str]
    digest_matches: bool | None
    differences: list[str]

    def as_text(self) -> str:
        """Return the report as text."""
        digests = {None: "the ledger has no digest of it", True: "its digest is that of the ledger"}
        where = f"step {self.step}: epoch {self.epoch}, after {self.samples_consumed} samples"
        lines = [
            where,
            *self.keys,
            digests.get(self.digest_matches, "its digest is NOT that of the ledger"),
        ]
        return text_of([*lines, *self.differences])


def _configure(parser: argparse.ArgumentParser) -> None:
    words = parser.add_subparsers(dest="word", required=True, metavar="WORD")
    show = words.add_parser(
        "show", help="print the segments of a run, and what its weights have seen"
    )
    replay_parser = words.add_parser("replay", help="make the batch of a step again")
    find = words.add_parser("seen", help="print at which steps samples or clips were shown")
    differ = words.add_parser(
        "diff", help="print the first step and the settings in which two runs differ"
    )
    stated = words.add_parser(
        "attest", help="print what a checkpoint's weights have seen as an in-toto statement"
    )
    for subparser in (show, replay_parser, find, stated):
        subparser.add_argument("ledger", metavar="LEDGER", help="ledger of a run")
    find.add_argument("names", metavar="KEY", nargs="+", help="key of a sample, or a clip")
    for name in ("ledger", "other"):
        differ.add_argument(name, metavar="LEDGER", help="ledger of a run")
    stated.add_argument("checkpoint", metavar="CHECKPOINT", help="file or folder of the checkpoint")
    add_flags(stated, AttestOptions)
    for subparser, options in (
        (show, PrintOptions),
        (replay_parser, ReplayOptions),
        (find, FindOptions),
        (differ, PrintOptions),
    ):
        add_flags(subparser, options)


def _run(args: argparse.Namespace) -> int:
    report: Any
    code = 0
    if args.word == "attest":
        from fuelrail.bench.studies.runs.attest import attest

        stated = from_flags(args, AttestOptions)
        print_json(
            attest(args.ledger, args.checkpoint, (stated.epoch, stated.samples), key=stated.key)
        )
        return code
    if args.word == "show":
        options = from_flags(args, PrintOptions)
        report = run_history(args.ledger)
    elif args.word == "diff":
        options = from_flags(args, PrintOptions)
        report = run_diff(args.ledger, args.other)
        code = int(report != type(report)(None, None, report.compared_digests, []))
    elif args.word == "seen":
        from fuelrail.bench.studies.runs.replay import seen  # with torch

        find_options = options = from_flags(args, FindOptions)
        report = seen(
            args.ledger,
            args.names,
            dataset=find_options.dataset,
            receipts=find_options.receipt,
            checkpoints=find_options.checkpoints,
            files=find_options.files,
        )
    else:
        replay_options = options = from_flags(args, ReplayOptions)
        report = _replay(args.ledger, replay_options)
        code = int(report.digest_matches is False)
    print_json(report) if options.json else print(report.as_text())  # noqa: T201
    return code


def _replay(ledger: str, options: ReplayOptions) -> ReplayReport:
    from fuelrail.bench.studies.runs.replay import replay  # with torch

    replayed = replay(
        ledger,
        options.step,
        rank=options.rank,
        dataset=options.dataset,
        without=options.without,
        files=options.files,
        receipts=options.receipt,
    )
    if options.image is not None:
        try:
            replayed.loader.show(replayed.batch, samples=len(replayed.batch["sample_key"])).save(
                options.image
            )
        except OSError as error:
            raise ConfigError(
                f"--image '{options.image}' cannot be written: {error.strerror}"
            ) from error
    return ReplayReport(
        step=options.step,
        epoch=replayed.epoch,
        samples_consumed=replayed.samples_consumed,
        keys=list(replayed.batch["sample_key"]),
        digest_matches=replayed.digest_matches,
        differences=replayed.differences,
    )


COMMANDS = {
    "runs": Command("read the ledger of a run: what its weights have seen", _configure, _run)
}
