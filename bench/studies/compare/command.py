"""``fuelrail bench compare``: the same samples and the same images through every loader that is installed."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.table import Table

from fuelrail.bench.measure.processes import exit_code, report_console
from fuelrail.bench.report.files import REPORT_JSON, prepare_folder
from fuelrail.pipeline.errors import ConfigError

if TYPE_CHECKING:
    import argparse

    from fuelrail.bench.peers.peer import Contestant, Work
    from fuelrail.bench.studies.compare.report import CompareReport
    from fuelrail.bench.studies.compare.run import Measured, Workshop
    from fuelrail.pipeline.format.dataset import Dataset

HELP = "run the same samples through every other loader that is installed, as ratios with intervals"
DESCRIPTION = (
    "Writes the dataset's samples in each loader's own format, holds every loader's images against the definition, "
    "then times them in turns, each in a process of its own on the same CPUs. A loader that is not installed, or whose "
    "images differ, is left out and named. Prepare with --rounds 0, and add rounds later with --continue."
)
_UNDER_WAY = "the run is under way, or was killed"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``fuelrail bench compare``."""
    add = parser.add_argument
    add("source", metavar="DATASET_OR_SOURCE", help="folder of a Fuelrail dataset, or a source as `shard` takes it")
    add("--split", help="split to load (default: the dataset's only one)")
    add("--version", metavar="FOLDER", help="of a nuscenes: source: the folder of its tables")
    add("--only", action="append", default=[], metavar="NAME", help="a loader, or LOADER:RECIPE; may be repeated")
    add("--batch-size", type=int, default=8, help="samples of a batch (default: %(default)s)")
    add("--height", type=int, default=256, help="of the images delivered (default: %(default)s)")
    add("--width", type=int, default=704, help="of the images delivered (default: %(default)s)")
    add("--cpus", metavar="LIST", help="CPUs that every loader is pinned to, such as 0,1 or 0-3 (default: all usable)")
    add("--rounds", type=int, default=5, help="runs of each, in turns; 0 prepares and checks (default: %(default)s)")
    add(
        "--seconds",
        type=float,
        default=4.0,
        help="length of a run behind its warm-up, in all its laps (default: %(default)s)",
    )
    add("--psnr", type=float, default=36.0, help="likeness [dB] that images must have at worst (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the orders (default: %(default)s)")
    add("--data", type=Path, help="folder for the loaders' formats, kept for the next time (default: data in --out)")
    add("--continue", dest="go_on", action="store_true", help="add rounds to the report in --out, if there is one")
    add("--out", type=Path, default=Path("bench-compare"), help="folder for the report (default: %(default)s)")
    add("--no-html", action="store_true", help="write no report.html; needs no matplotlib")


def run(arguments: argparse.Namespace) -> int:
    """Prepare, check, run the rounds; whatever was measured until an interruption is reported, as partial."""
    from fuelrail.bench.peers.peer import contestants
    from fuelrail.bench.peers.process import describe_work
    from fuelrail.bench.studies.compare.report import load_compare_report
    from fuelrail.bench.studies.compare.run import Workshop, affinity

    _check(arguments)
    entrants = contestants(tuple(arguments.only))
    cpus = affinity(arguments.cpus)
    data: Path = arguments.data or arguments.out / "data"
    dataset = _dataset(arguments, data)
    work = describe_work(
        dataset,
        height=arguments.height,
        width=arguments.width,
        batch_size=arguments.batch_size,
        num_workers=len(cpus),
        seed=arguments.seed,
    )
    path = arguments.out / REPORT_JSON
    before = load_compare_report(path) if arguments.go_on and path.exists() else None
    session = _Session(arguments, dataset, work, cpus, before)
    prepare_folder(arguments.out, html=not arguments.no_html)
    workshop = Workshop(data, dataset, work, cpus, arguments.seconds)
    cut_off: str | None = "the command failed"
    try:
        session.prepare(workshop, entrants)
        session.measure(workshop)
        cut_off = None
    except KeyboardInterrupt:
        cut_off = "the run was interrupted"
    finally:
        # A failure of our own must not take the rounds before it along.
        session.publish(cut_off)
    print_compare_report(session.report(), report_console())
    return exit_code(cut_off, interrupted=cut_off is not None)


class _Session:
    """What is known of the contestants so far, and the report of it."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        dataset: Dataset,
        work: Work,
        cpus: tuple[int, ...],
        before: CompareReport | None,
    ) -> None:
        from fuelrail.bench.measure.machine import dataset_facts, machine_facts

        self._arguments, self._work = arguments, work
        self._facts, self._machine = dataset_facts(dataset, next(iter(dataset.manifest.splits))), machine_facts()
        self._options: dict[str, Any] = {"seconds": arguments.seconds, "psnr_db": arguments.psnr, "cpus": list(cpus)}
        self._packages = _versions()
        self._rounds = before.num_rounds if before else 0
        self._entries = {entry.name: entry for entry in before.contestants} if before else {}
        self._cut_off: str | None = None
        self._console = Console(stderr=True, soft_wrap=True)
        if before is not None:
            self._refuse_other(before)

    def prepare(self, workshop: Workshop, entrants: list[Contestant]) -> None:
        """Data and images of every contestant; those that fail are noted and stay out."""
        from fuelrail.bench.peers.peer import PEERS, is_there
        from fuelrail.bench.studies.compare.report import Contestant as Entry

        self._entrants = []
        for number, contestant in enumerate(entrants):
            name = contestant.name
            with self._console.status(f"{name} ({number + 1} of {len(entrants)}): data") as status:
                known = self._entries.get(name)
                check, reason = (known.check, known.left_out) if known else (None, None)
                if known is None or known.left_out is not None:
                    reason = is_there(contestant.peer) or workshop.prepare(contestant)
                    if reason is None:
                        status.update(f"{name} ({number + 1} of {len(entrants)}): images")
                        counts = contestant.recipe == PEERS[contestant.peer].recipes[-1]
                        check, reason = workshop.check(contestant, self._arguments.psnr, whole_epoch=counts)
                else:
                    reason = workshop.prepare(contestant)
            runs = known.runs if known else []
            self._entries[name] = Entry(
                name=name, peer=contestant.peer, recipe=contestant.recipe, check=check, left_out=reason, runs=runs,
                figures=None,
            )  # fmt: skip
            if reason is not None:
                self._console.print(f"left out: {name}: {reason}", highlight=False, markup=False)
            else:
                self._entrants.append(contestant)
            self.publish(cut_off=_UNDER_WAY)

    def measure(self, workshop: Workshop) -> None:
        """The rounds; the report is written after each run, so that nothing measured is lost."""
        for _ in range(self._arguments.rounds):
            turns = self._entrants if self._rounds % 2 == 0 else self._entrants[::-1]
            with self._console.status(f"round {self._rounds + 1}") as status:
                for number, measured in enumerate(workshop.round(turns)):
                    self._note(measured)
                    status.update(f"round {self._rounds + 1}, {number + 1} of {len(turns)}: {measured.contestant.name}")
                    self.publish(cut_off=_UNDER_WAY)
            self._rounds += 1

    def _note(self, measured: Measured) -> None:
        from fuelrail.bench.studies.compare.report import make_run

        contestant = measured.contestant
        entry = self._entries[contestant.name]
        if measured.timed is None:
            why = f"it failed while timed: {measured.failure}"
            self._entries[contestant.name] = msgspec.structs.replace(entry, left_out=why)
            self._entrants = [other for other in self._entrants if other != contestant]
            return
        images_per_batch = self._work.batch_size * len(self._work.cameras)
        made = make_run(self._rounds, measured.timed, measured.beside, images_per_batch)
        self._entries[contestant.name] = msgspec.structs.replace(entry, runs=[*entry.runs, made])

    def report(self) -> CompareReport:
        """The report as it stands."""
        from fuelrail.bench.studies.compare.report import build_compare_report

        return build_compare_report(
            machine=self._machine, packages=self._packages, dataset=self._facts, work=self._work,
            options=self._options, num_rounds=self._rounds, contestants=list(self._entries.values()),
            cut_off=self._cut_off,
        )  # fmt: skip

    def publish(self, cut_off: str | None) -> None:
        """Write the report's files; the page only of what is finished."""
        from fuelrail.bench.report.files import write_report

        self._cut_off = cut_off
        finished = cut_off != _UNDER_WAY
        write_report(self.report(), self._arguments.out, html=finished and not self._arguments.no_html)

    def _refuse_other(self, before: CompareReport) -> None:
        pairs = {
            "dataset": (before.dataset.fingerprint, self._facts.fingerprint),
            "work": (before.work, self._work),
            "options": (before.options, self._options),
            "processor": (before.machine.cpu, self._machine.cpu),
            "packages": ((before.packages, before.machine.packages), (self._packages, self._machine.packages)),
        }
        for name, (old, new) in pairs.items():
            if old != new:
                raise ConfigError(
                    f"--continue: the report in '{self._arguments.out}' is of another {name}: {old} there, {new} here; "
                    "use another --out"
                )


def _check(arguments: argparse.Namespace) -> None:
    for name, least in (("batch_size", 1), ("height", 1), ("width", 1), ("rounds", 0), ("seed", 0)):
        value = getattr(arguments, name)
        if value < least:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be {least} or more")
    if not arguments.seconds > 0:
        raise ConfigError(f"--seconds {arguments.seconds:g} must be more than 0")


def _dataset(arguments: argparse.Namespace, data: Path) -> Dataset:
    """The dataset, or the one that is made of a source in the data folder."""
    from fuelrail.pipeline.format.dataset import open_dataset
    from fuelrail.sharding.planning.recipe import make_recipe
    from fuelrail.sharding.progress import make_progress
    from fuelrail.sharding.run import shard
    from fuelrail.sharding.sources.source import parse_source

    kind, colon, _ = arguments.source.partition(":")
    if not colon or "/" in kind or Path(arguments.source).is_dir():
        dataset = open_dataset(arguments.source)
        return dataset if arguments.split is None else _one_split(dataset, arguments.split, data)
    if arguments.split is not None:
        raise ConfigError("--split is for datasets; of a source, compare loads all samples as one split")
    options = {} if arguments.version is None else {"version": arguments.version}
    out = data / "fuelrail"
    with make_progress(as_json=False) as progress:
        shard(parse_source(arguments.source, options), out, make_recipe(splits={"train": 1.0}), 1, progress)
    return open_dataset(out)


def _one_split(dataset: Dataset, split: str, data: Path) -> Dataset:
    """The dataset if it has that split alone, else a dataset of the split's clips, made in the data folder."""
    from fuelrail.pipeline.format.dataset import open_dataset
    from fuelrail.sharding.planning.recipe import make_recipe
    from fuelrail.sharding.progress import make_progress
    from fuelrail.sharding.run import shard
    from fuelrail.sharding.sources.source import parse_source

    entry = dataset.split(split)  # refuses one that is not there
    if len(dataset.manifest.splits) == 1:
        return dataset
    source = parse_source(f"fuelrail:{dataset.root}", {})
    clips = dataset.index.clip_ids(entry.first_sample, entry.first_sample + entry.num_samples)
    out = data / f"split-{split}"
    with make_progress(as_json=False) as progress:
        shard(source, out, make_recipe(splits={split: clips}), 1, progress)
    return open_dataset(out)


def _versions() -> dict[str, str]:
    from fuelrail.bench.peers.peer import PEERS

    versions = {}
    for package in sorted({package for entry in PEERS.values() for package in entry.packages}):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def print_compare_report(report: CompareReport, console: Console) -> None:
    """The figures as text."""
    from fuelrail.bench.studies.compare.report import REFERENCE, ranking

    if report.cut_off:
        console.print(f"[bold]PARTIAL:[/bold] {report.cut_off}", highlight=False)
    timed = ranking(report)
    if timed:
        ratio = f"{REFERENCE} is ... times as fast"
        table = Table("loader", "images/s", "range", ratio, "CPU-s/1000", "MB", "first s", box=None, pad_edge=False)
        for column in table.columns[1:]:
            column.justify = "right"
        for entry in timed:
            figures = entry.figures
            assert figures is not None
            rate, times = figures.images_per_s, figures.ours_times_as_fast
            table.add_row(
                entry.name, f"{rate.median:.0f}", f"{rate.low:.0f} to {rate.high:.0f}" if rate.is_told else "",
                "" if times is None else f"{times.median:.2f} ({times.shown('.2f')})",
                f"{figures.cpu_s_per_1000_images:.2f}", f"{figures.peak_memory_bytes / 1e6:.0f}",
                f"{figures.first_batch_s:.2f}",
            )  # fmt: skip
        console.print(table)
    for entry in report.contestants:
        if entry.left_out is not None:
            console.print(f"left out: {entry.name}: {entry.left_out}", highlight=False, markup=False)
    for warning in report.warnings:
        console.print(f"warning: {warning}", highlight=False, markup=False)
