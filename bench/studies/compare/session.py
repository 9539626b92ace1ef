"""``fuelrail bench compare``: a comparison of loaders, from options to the report.

It runs from a checkout: this room and `bench/peers` are not in the wheel.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from rich.console import Console

from fuelrail.bench.measure.machine import (
    dataset_facts,
    machine_facts,
    package_versions,
)
from fuelrail.bench.measure.processes import WAS_INTERRUPTED
from fuelrail.bench.peers.peer import (
    PEERS,
    Contestant,
    Work,
    contestants,
    is_there,
)
from fuelrail.bench.peers.process import describe_work
from fuelrail.bench.report.files import REPORT_JSON, prepare_folder
from fuelrail.bench.report.options import output_folder
from fuelrail.bench.report.page import write_report
from fuelrail.bench.studies.commands import study
from fuelrail.bench.studies.compare.report import (
    CompareReport,
    ContestantResult,
    build_compare_report,
    load_compare_report,
    make_run,
    reasons_left_out,
)
from fuelrail.bench.studies.compare.run import Workshop, affinity
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.format.dataset import Dataset, open_dataset
from fuelrail.pipeline.runtime.progress import Progress
from fuelrail.pipeline.settings import (
    Above0,
    CheckedSettings,
    NotNegative,
    Positive,
    flag,
    make_options,
)
from fuelrail.sharding.planning.recipe import make_recipe
from fuelrail.sharding.progress import make_progress
from fuelrail.sharding.run import shard
from fuelrail.sharding.sources.registry import parse_source

_UNDER_WAY = "the run is under way, or was killed"


class CompareOptions(CheckedSettings, frozen=True, kw_only=True):
    """Options of :func:`compare`, and the flags of ``fuelrail bench compare``."""

    only: Annotated[
        tuple[str, ...],
        flag(
            (
                "compare only this loader, or LOADER:RECIPE; may be repeated (default: all that "
                "are installed)"
            ),
            metavar="NAME",
            repeat=True,
        ),
    ] = ()
    data: Annotated[
        str | None,
        flag(
            "folder that keeps the samples in each loader's format for the next comparison "
            "(default: data in the folder of the report)",
            metavar="FOLDER",
        ),
    ] = None
    split: Annotated[str | None, flag("split to load (default: the only one of the dataset)")] = (
        None
    )
    version: Annotated[
        str | None,
        flag(
            "nuScenes version folder of a nuscenes: source, e.g. v1.0-mini",
            metavar="FOLDER",
        ),
    ] = None
    batch_size: Annotated[Positive, flag("samples in a batch")] = 8
    height: Annotated[Positive, flag("height of the images delivered")] = 256
    width: Annotated[Positive, flag("width of the images delivered")] = 704
    cpus: Annotated[
        str | None,
        flag(
            "CPUs that every loader is pinned to, such as 0,1 or 0-3 (default: all usable)",
            metavar="LIST",
        ),
    ] = None
    rounds: Annotated[NotNegative, flag("runs of each loader, in turns; 0: prepare and check")] = 5
    seconds: Annotated[Above0, flag("measured time per run in seconds, without warm-up")] = 4.0
    psnr: Annotated[float, msgspec.Meta(le=1e9), flag("lowest acceptable PSNR in dB")] = 36.0
    seed: Annotated[NotNegative, flag("random seed for the orders")] = 0
    resume: Annotated[bool, flag("add rounds to the report in --out, if there is one")] = False


class _Output(NamedTuple):
    folder: Path
    html: bool


def open_samples(
    place: str | os.PathLike[str],
    options: CompareOptions,
    data: Path,
) -> Dataset:
    """Open the dataset, or make one in the data folder: of a source, or of one split of several."""
    kind, colon, _ = os.fspath(place).partition(":")
    if not colon or "/" in kind or Path(place).is_dir():
        dataset = open_dataset(place)
        split = options.split
        if split is None:
            return dataset
        entry = dataset.split(split)  # refuses one that is not there
        if len(dataset.manifest.splits) == 1:
            return dataset
        source = parse_source(f"fuelrail:{dataset.root}", {})
        end = entry.first_sample + entry.num_samples
        clips = dataset.index.clip_ids(entry.first_sample, end)
        recipe = make_recipe(splits={split: clips})
        out = data / f"split-{split}"
    else:
        if options.split is not None:
            raise ConfigError(
                "--split is for datasets; of a source, compare loads all samples as one split"
            )
        named = {} if options.version is None else {"version": options.version}
        source = parse_source(os.fspath(place), named)
        recipe = make_recipe(splits={"train": 1.0})
        out = data / "fuelrail"
    with make_progress(as_json=False) as progress:
        shard(source, out=out, recipe=recipe, num_workers=1, progress=progress)
    return open_dataset(out)


def compare(
    source: str | os.PathLike[str],
    options: CompareOptions | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    html: bool = True,
    **changes: Any,  # fields of CompareOptions
) -> CompareReport:
    """Compare the speed of all installed loaders on the images of a dataset, or of a source as in
    `shard`.

    ``compare("DATASET", rounds=3)`` takes the fields of :class:`CompareOptions` as keywords.
    ``out`` is a folder for the report; None: nothing is written. After Ctrl+C the report holds the
    runs that are complete (``cut_off``). Raises ConfigError and DatasetErrors.
    """
    options = make_options(CompareOptions, options, changes)
    entrants = contestants(options.only)
    cpus = affinity(options.cpus)
    with output_folder(out) as folder:
        output = _Output(folder, html and out is not None)
        samples = folder / "data" if options.data is None else Path(options.data)
        dataset = open_samples(source, options, samples)
        work = describe_work(
            dataset,
            height=options.height,
            width=options.width,
            batch_size=options.batch_size,
            num_workers=len(cpus),
            seed=options.seed,
        )
        session = _Session(
            options=options,
            output=output,
            dataset=dataset,
            work=work,
            cpus=cpus,
        )
        prepare_folder(folder, html=output.html, modules=("psutil", "scipy"))
        workshop = Workshop(
            data=samples,
            dataset=dataset,
            work=work,
            cpus=cpus,
            seconds=options.seconds,
        )
        cut_off: str | None = "the command failed"
        try:
            session.prepare(workshop, entrants)
            session.measure(workshop)
            cut_off = None
        except KeyboardInterrupt:
            cut_off = WAS_INTERRUPTED
        finally:
            # An error of our own must not lose the rounds before it.
            session.publish(cut_off)
        return session.report()


class _Session:
    """The contestants with what is known of each so far, and the report on them."""

    def __init__(
        self,
        options: CompareOptions,
        output: _Output,
        dataset: Dataset,
        work: Work,
        cpus: tuple[int, ...],
    ) -> None:
        self._given = options
        self._output = output
        self._work = work
        path = output.folder / REPORT_JSON
        before = load_compare_report(path) if options.resume and path.exists() else None
        split = next(iter(dataset.manifest.splits))
        self._facts = dataset_facts(dataset, split)
        self._machine = machine_facts()
        self._options: dict[str, Any] = {
            "seconds": options.seconds,
            "psnr_db": options.psnr,
            "cpus": list(cpus),
        }
        packages = {name for peer in PEERS.values() for name in peer.packages}
        self._packages = package_versions(sorted(packages))
        self._rounds = 0
        self._entries: dict[str, ContestantResult] = {}
        if before is not None:
            self._rounds = before.num_rounds
            self._entries = {entry.name: entry for entry in before.contestants}
        self._cut_off: str | None = None
        self._console = Console(stderr=True, soft_wrap=True)
        if before is not None:
            pairs = {
                "dataset": (
                    before.dataset.fingerprint,
                    self._facts.fingerprint,
                ),
                "work": (before.work, self._work),
                "options": (before.options, self._options),
                "processor": (before.machine.cpu, self._machine.cpu),
                "packages": (
                    (before.packages, before.machine.packages),
                    (self._packages, self._machine.packages),
                ),
            }
            for name, (old, new) in pairs.items():
                if old != new:
                    raise ConfigError(
                        f"--continue: the report in '{self._output.folder}' has another {name}: "
                        f"{old}, now {new}; use another --out"
                    )

    def prepare(self, workshop: Workshop, entrants: list[Contestant]) -> None:
        """Make data and images of every contestant; note those that fail, and leave them out."""
        self._entrants = []
        for number, contestant in enumerate(entrants):
            name = contestant.name
            place = f"{name} ({number + 1} of {len(entrants)})"
            with Progress(f"{place}: data", self._console) as progress:
                earlier = self._entries.get(name)
                check = earlier.check if earlier else None
                runs = earlier.runs if earlier else []
                if earlier is not None and earlier.left_out is None:
                    reason = workshop.prepare(contestant)
                else:
                    reason = is_there(contestant.peer) or workshop.prepare(contestant)
                    if reason is None:
                        progress.update(f"{place}: images")
                        last_recipe = PEERS[contestant.peer].recipes[-1]
                        check, reason = workshop.check(
                            contestant,
                            self._given.psnr,
                            whole_epoch=contestant.recipe == last_recipe,
                        )
            self._entries[name] = ContestantResult(
                name=name,
                peer=contestant.peer,
                recipe=contestant.recipe,
                check=check,
                left_out=reason,
                runs=runs,
                figures=None,
            )
            if reason is None:
                self._entrants.append(contestant)
            self.publish(cut_off=_UNDER_WAY)
        for line in reasons_left_out(self._entries[entrant.name] for entrant in entrants):
            self._console.print(f"left out: {line}", highlight=False, markup=False)

    def measure(self, workshop: Workshop) -> None:
        """Measure the rounds; write the report after each run, so that nothing measured is lost."""
        images_per_batch = self._work.batch_size * len(self._work.cameras)
        for done in range(self._given.rounds):
            turns = list(self._entrants)
            if self._rounds % 2 == 1:
                turns.reverse()
            with Progress(f"round {self._rounds + 1}", self._console) as progress:
                for number, measured in enumerate(workshop.round(turns)):
                    name = measured.contestant.name
                    entry = self._entries[name]
                    if measured.timed is None:
                        why = f"it failed while timed: {measured.failure}"
                        entry = msgspec.structs.replace(entry, left_out=why)
                        self._entrants = [item for item in self._entrants if item.name != name]
                    else:
                        run = make_run(
                            self._rounds,
                            measured.timed,
                            measured.beside,
                            images_per_batch,
                        )
                        entry = msgspec.structs.replace(entry, runs=[*entry.runs, run])
                    self._entries[name] = entry
                    text = f"round {self._rounds + 1}, {number + 1} of {len(turns)}: {name}"
                    rounds_done = done + (number + 1) / len(turns)
                    progress.update(text, rounds_done / self._given.rounds)
                    self.publish(cut_off=_UNDER_WAY)
            self._rounds += 1

    def report(self) -> CompareReport:
        """Return the report of what is known so far."""
        return build_compare_report(
            machine=self._machine,
            packages=self._packages,
            dataset=self._facts,
            work=self._work,
            options=self._options,
            num_rounds=self._rounds,
            contestants=list(self._entries.values()),
            cut_off=self._cut_off,
        )

    def publish(self, cut_off: str | None) -> None:
        """Write the report's files; the page only of what is finished."""
        self._cut_off = cut_off
        finished = cut_off != _UNDER_WAY
        write_report(
            self.report(),
            self._output.folder,
            html=finished and self._output.html,
        )


COMPARE = study(
    "compare",
    "compare the speed of all installed loaders on the same images, with confidence intervals",
    compare,
    options=CompareOptions,
    arguments={
        "source": {
            "metavar": "DATASET_OR_SOURCE",
            "help": "a Fuelrail dataset, or a source as in `shard`",
        }
    },
    names={"resume": "continue"},
    description="Writes the dataset's samples in the format of each loader, checks the images of "
    "every loader against the reference, then times the loaders in turns, each in a "
    "process of its own on the same CPUs. A loader that is not installed, or whose "
    "images differ, is left out and listed. Prepare with --rounds 0, and add rounds "
    "later with --continue. It runs from a checkout, with the extras bench, peers and view.",
)
