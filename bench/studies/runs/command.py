"""``fuelrail runs show|replay|seen|diff|attest``."""

from __future__ import annotations

from typing import Annotated

import msgspec

from fuelrail.bench.report.options import command, command_of_words, print_text
from fuelrail.bench.studies.runs.history import run_diff, run_history
from fuelrail.pipeline.cli import PrintOptions, print_json
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.settings import NotNegative, Settings, flag
from fuelrail.pipeline.text import text_of


class SeenOptions(PrintOptions, frozen=True, kw_only=True):
    """Flags of ``fuelrail runs`` words that make a loader."""

    dataset: Annotated[
        str | None,
        flag(
            "where the dataset is now (default: where it was)",
            metavar="DATASET",
        ),
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
        flag(
            "the batch of a run that never had the keys and clips in a file",
            metavar="FILE",
        ),
    ] = None

    step: Annotated[NotNegative, flag("number of the step in the run, from 0")]
    rank: Annotated[
        NotNegative | None,
        flag("the batch of one rank (default: of all ranks, in order)"),
    ] = None
    image: Annotated[str | None, flag("draw the batch into this PNG file", metavar="FILE")] = None


class AttestOptions(Settings, frozen=True, kw_only=True):
    """Flags of ``fuelrail runs attest``."""

    epoch: Annotated[NotNegative, flag("epoch of the loader's state in the checkpoint")]
    samples: Annotated[
        NotNegative,
        flag("samples of that epoch consumed, of the loader's state in the checkpoint"),
    ]


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
        digests = {
            None: "the ledger has no digest of it",
            True: "its digest is that of the ledger",
        }
        where = f"step {self.step}: epoch {self.epoch}, after {self.samples_consumed} samples"
        lines = [
            where,
            *self.keys,
            digests.get(self.digest_matches, "its digest is NOT that of the ledger"),
        ]
        return text_of([*lines, *self.differences])


def print_history(ledger: str, printing: PrintOptions) -> int:
    """Print the segments of a run."""
    print_text(run_history(ledger), printing)
    return 0


def print_diff(ledger: str, second: str, printing: PrintOptions) -> int:
    """Print where two runs differ; return 1 where they do."""
    report = run_diff(ledger, second)
    print_text(report, printing)
    return int(report != type(report)(None, None, report.compared_digests, []))


def print_seen(ledger: str, names: list[str], options: FindOptions) -> int:
    """Print the steps that showed samples or clips."""
    from fuelrail.bench.studies.runs.replay import seen  # with torch

    report = seen(
        ledger,
        names,
        dataset=options.dataset,
        receipts=options.receipt,
        checkpoints=options.checkpoints,
        files=options.files,
    )
    print_text(report, options)
    return 0


def print_replayed(ledger: str, options: ReplayOptions) -> int:
    """Print the samples of a step; return 1 where its batch is another one."""
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
    keys = list(replayed.batch["sample_key"])
    if options.image is not None:
        try:
            replayed.loader.show(replayed.batch, samples=len(keys)).save(options.image)
        except OSError as error:
            raise ConfigError(
                f"--image '{options.image}' cannot be written: {error.strerror}"
            ) from error
    report = ReplayReport(
        step=options.step,
        epoch=replayed.epoch,
        samples_consumed=replayed.samples_consumed,
        keys=keys,
        digest_matches=replayed.digest_matches,
        differences=replayed.differences,
    )
    print_text(report, options)
    return int(report.digest_matches is False)


def print_statement(ledger: str, checkpoint: str, options: AttestOptions) -> int:
    """Print the statement of a checkpoint."""
    from fuelrail.bench.studies.runs.attest import attest

    print_json(attest(ledger, checkpoint, (options.epoch, options.samples)))
    return 0


_LEDGER = {"metavar": "LEDGER", "help": "ledger of a run"}
_KEYS = {"metavar": "KEY", "nargs": "+", "help": "key of a sample, or a clip"}
_CHECKPOINT = {
    "metavar": "CHECKPOINT",
    "help": "file or folder of the checkpoint",
}
_WORDS = {
    "show": command(
        "print the segments of a run, and what its weights have seen",
        print_history,
        arguments={"ledger": _LEDGER},
        options=(PrintOptions,),
    ),
    "replay": command(
        "make the batch of a step again",
        print_replayed,
        arguments={"ledger": _LEDGER},
        options=(ReplayOptions,),
    ),
    "seen": command(
        "print at which steps samples or clips were shown",
        print_seen,
        arguments={"ledger": _LEDGER, "names": _KEYS},
        options=(FindOptions,),
    ),
    "diff": command(
        "print the first step and the settings in which two runs differ",
        print_diff,
        arguments={"ledger": _LEDGER, "second": _LEDGER},
        options=(PrintOptions,),
    ),
    "attest": command(
        "print what a checkpoint's weights have seen as an in-toto statement",
        print_statement,
        arguments={"ledger": _LEDGER, "checkpoint": _CHECKPOINT},
        options=(AttestOptions,),
    ),
}
COMMANDS = {
    "runs": command_of_words("read the ledger of a run: what its weights have seen", _WORDS)
}
