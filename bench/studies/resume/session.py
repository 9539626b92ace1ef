"""``fuelrail bench resume``: stacks under histories, judged by the witness.

It runs from a checkout: this room and `bench/peers` are not in the wheel.
"""

from __future__ import annotations

import itertools
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from fuelrail.bench.measure.machine import MachineFacts, machine_facts, package_versions
from fuelrail.bench.peers.stacks.stack import (
    STACKS,
    Setup,
    Stack,
    load_stack,
    missing_module,
)
from fuelrail.bench.report.files import created_now, load_report_of, publish, publish_json
from fuelrail.bench.report.options import command
from fuelrail.bench.studies.resume.histories import HISTORIES, Act, History
from fuelrail.bench.studies.resume.ranks import RankPart, end_group, run_act, start
from fuelrail.loaders.witness.judge import Expected, Rules, WitnessReport, expect, judge
from fuelrail.loaders.witness.record import merge_epochs
from fuelrail.loaders.witness.witness import read_records
from fuelrail.pipeline.cli import PrintOptions, print_json
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.settings import CheckedSettings, Positive, flag
from fuelrail.pipeline.text import text_of

SCHEMA: Final = "fuelrail-bench-resume"
VERSION: Final = 1
_WORDS: Final = {
    "repeated": "repeats {}",
    "missing": "loses {}",
    "unexpected": "{} strange rows",
    "uneven": "uneven ranks",
    "same_rows": "ranks saw the same",
}


class ResumeOptions(CheckedSettings, frozen=True, kw_only=True):
    """Flags of ``fuelrail bench resume``."""

    stack: Annotated[
        tuple[str, ...],
        flag("only this stack; may be repeated (default: all)", metavar="NAME", repeat=True),
    ] = ()
    history: Annotated[
        tuple[str, ...],
        flag("only this history; may be repeated (default: all)", metavar="NAME", repeat=True),
    ] = ()
    times: Annotated[Positive, flag("runs of each history")] = 2
    out: Annotated[
        str | None,
        flag("folder for report.json and report.md", metavar="FOLDER"),
    ] = None
    add: Annotated[bool, flag("add to the report in --out, as of another environment")] = False


class Cell(msgspec.Struct, frozen=True):
    """What a stack did in a history.

    Attributes:
        outcome: in a word; all that there were where the runs differ.
        said: what the witness or the stack said, of the first run.
    """

    outcome: str
    said: list[str]


class StackResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a stack did.

    Attributes:
        name: of the stack.
        way: how it is documented to resume.
        versions: of its packages.
        left_out: why it was not run; None if it was.
        cells: by history.
    """

    name: str
    way: str = ""
    versions: dict[str, str] = {}
    left_out: str | None = None
    cells: dict[str, Cell] = {}


class ResumeReport(msgspec.Struct, frozen=True, kw_only=True):
    """All stacks under all histories."""

    schema: str
    version: int
    created: str
    machine: MachineFacts
    times: int
    histories: dict[str, str]
    stacks: list[StackResult]

    def as_text(self) -> str:
        """Return the report as Markdown."""
        names = list(self.histories)
        ran = [stack for stack in self.stacks if stack.left_out is None]
        lines = [
            f"| stack | {' | '.join(names)} |",
            f"|---|{'---|' * len(names)}",
        ]
        for stack in ran:
            outcomes = []
            for name in names:
                cell = stack.cells.get(name)
                outcomes.append(cell.outcome if cell is not None else "")
            lines.append(f"| {stack.name} | {' | '.join(outcomes)} |")
        lines += ["", "| history | what happens |", "|---|---|"]
        for name, meaning in self.histories.items():
            lines.append(f"| {name} | {meaning} |")
        lines += ["", "| stack | versions | how it resumes |", "|---|---|---|"]
        for stack in ran:
            versions = ", ".join(f"{name} {version}" for name, version in stack.versions.items())
            lines.append(f"| {stack.name} | {versions} | {stack.way} |")
        lines += ["", "Not run:", ""]
        names_by_reason: dict[str, list[str]] = {}
        for stack in ran:
            for name, cell in stack.cells.items():
                sentence = cell.said[0]
                if cell.outcome == "not run" and not sentence.startswith("it has no"):
                    _, _, reason = sentence.partition(": ")
                    names_by_reason.setdefault(f"{stack.name}: {reason}", []).append(name)
        for reason, names in names_by_reason.items():
            lines.append(f"- {', '.join(names)} of {reason}")
        for stack in self.stacks:
            if stack.left_out is not None:
                lines.append(f"- {stack.name} was left out: {stack.left_out}")
        return text_of(lines)


def run_history(
    kind: type[Stack],
    history: History,
    *,
    data: Path,
    folder: Path,
) -> list[list[RankPart]]:
    """Run a history's acts, and return what the ranks left of each, up to one that failed."""
    parts: list[list[RankPart]] = []
    before: tuple[Act, list[RankPart]] | None = None
    for number, act in enumerate(history.acts):
        exchange = folder / f"act{number}"
        exchange.mkdir(parents=True)
        ended = run_act(
            kind,
            act,
            before=before,
            data=data,
            records=folder / "records",
            folder=exchange,
        )
        parts.append(ended)
        if any(part.outcome is not None for part in ended):
            break
        before = (act, ended)
    return parts


def reports_of(folder: Path, setup: Setup, reference: Path) -> list[WitnessReport]:
    """Return what the witness says of each epoch.

    It is compared with the unbroken run where datasets are mixed, and where rows that fill no batch
    would be counted among those that a resume repeats or loses.
    """
    reference_records = {}
    for records in read_records(reference / "records"):
        epoch = records[0].epoch
        reference_records[epoch] = records
    is_whole = setup.rows % setup.global_batch == 0
    tail: Any = "drop" if setup.drop_last else "pad"
    if is_whole:
        tail = "exact"
    rules = Rules(expected=expect(setup.rows, "integer"), tail=tail)
    reports = []
    for records in read_records(folder / "records"):
        epoch = records[0].epoch
        unbroken = Expected(merge_epochs(reference_records[epoch]))
        report = judge(records, rules)
        if setup.is_mixed or (report.faults and not is_whole):
            rules_of_mix = Rules(expected=unbroken, tail="exact")
            report = judge(records, rules_of_mix)
        reports.append(report)
    return reports


def counted_rows(parts: Iterable[Sequence[RankPart]]) -> dict[tuple[int, int], Counter[int]]:
    """Return how often each row had come, by epoch and by the number of rows so far."""
    rows_so_far: dict[tuple[int, int], Counter[int]] = {}
    totals: dict[int, Counter[int]] = {}
    for ranks in parts:
        epochs = {epoch for part in ranks for epoch, _ in part.log}
        for epoch in sorted(epochs):
            total = totals.setdefault(epoch, Counter())
            logs = [[rows for number, rows in part.log if number == epoch] for part in ranks]
            for steps in itertools.zip_longest(*logs, fillvalue=()):
                for rows in steps:
                    total.update(rows)
                num_rows = total.total()
                rows_so_far[epoch, num_rows] = total.copy()
    return rows_so_far


def last_of(rows_so_far: dict[tuple[int, int], Counter[int]], epoch: int) -> Counter[int]:
    """Return how often each row came in an epoch, of what `counted_rows` returned."""
    places = [place for place in rows_so_far if place[0] == epoch]
    if not places:
        return Counter()
    return rows_so_far[max(places)]


def wording(
    folder: Path,
    setup: Setup,
    *,
    reference: Path,
    run: dict[tuple[int, int], Counter[int]],
    unbroken: dict[tuple[int, int], Counter[int]],
) -> tuple[str, list[str]]:
    """Return the witness's faults of a run in few words, and its reports."""
    reports = reports_of(folder, setup, reference)
    counts: Counter[str] = Counter()
    for report in reports:
        # After a resume the witness estimates numbers above a hundred; here the rows are known.
        due = Counter(range(setup.rows))
        if setup.is_mixed or setup.rows % setup.global_batch:
            due = last_of(unbroken, report.epoch)
        came = last_of(run, report.epoch)
        numbers = {fault.kind: fault.count for fault in report.faults}
        if "repeated" in numbers:
            numbers["repeated"] = (came - due).total()
        if "missing" in numbers:
            numbers["missing"] = (due - came).total()
        counts.update(numbers)
    words = [word.format(counts[kind]) for kind, word in _WORDS.items() if kind in counts]
    words += [kind for kind in counts if kind not in _WORDS]
    texts = [report.as_text().rstrip() for report in reports]
    return ", ".join(words), texts


def judge_history(
    history: History,
    parts: Sequence[Sequence[RankPart]],
    unbroken_parts: Sequence[Sequence[RankPart]],
    *,
    folder: Path,
    reference: Path,
) -> Cell:
    """Return what a run of a history came to, compared with the unbroken one."""
    failed = [part for part in parts[-1] if part.outcome is not None]
    if failed:
        telling = [part for part in failed if part.log or part.error]
        part = (telling or failed)[0]
        place = "at the start" if len(parts) == 1 else f"in act {len(parts)}"
        return Cell(str(part.outcome), [f"{place}: {part.error}"])
    setup = history.acts[0].setup
    run = counted_rows(parts)
    unbroken = counted_rows(unbroken_parts)
    words, said = wording(folder, setup, reference=reference, run=run, unbroken=unbroken)
    plain, _ = wording(reference, setup, reference=reference, run=unbroken, unbroken=unbroken)
    without = f" (unbroken: {plain})" if plain else ""
    places = sorted(run.keys() & unbroken.keys())
    differences = [place for place in places if run[place] != unbroken[place]]
    # A row too many comes after the places that both have.
    epochs = {epoch for epoch, _ in run.keys() | unbroken}
    is_complete = all(last_of(run, epoch) == last_of(unbroken, epoch) for epoch in epochs)
    if not differences and is_complete:
        said.append(f"as the unbroken run at each of {len(places)} steps")
        return Cell(f"exact{without}", said)
    if words:
        return Cell(words + without, said)
    epoch, rows = differences[0] if differences else max(run)
    said.append(f"other rows than in the unbroken run by row {rows} of epoch {epoch}")
    return Cell("other order", said)


def run_stack(
    name: str,
    kind: type[Stack],
    histories: Sequence[str],
    times: int,
) -> StackResult:
    """Run a stack under histories, each some times."""
    cells = {}
    with tempfile.TemporaryDirectory(prefix="fuelrail-resume-") as place:
        folder = Path(place)
        references: dict[Setup, tuple[Path, list[list[RankPart]]]] = {}
        for word in histories:
            history = HISTORIES[word]
            if history.needs is not None and history.needs not in kind.offers:
                cells[word] = Cell("not run", [f"it has no {history.needs}"])
                continue
            setup = history.acts[0].setup
            if setup not in references:
                reference = folder / f"reference{len(references)}"
                unbroken = History("", [Act(setup=setup)])
                data = stored(kind, setup, folder, reference)
                parts = run_history(kind, unbroken, data=data, folder=reference)
                references[setup] = reference, parts
            reference, unbroken_parts = references[setup]
            is_trained = all(part.outcome is None for part in unbroken_parts[0])
            runs = []
            for time in range(times):
                run = folder / f"{word}-{time}"
                parts = unbroken_parts
                if is_trained:
                    data = stored(kind, setup, folder, run)
                    parts = run_history(kind, history, data=data, folder=run)
                cell = judge_history(
                    history,
                    parts,
                    unbroken_parts,
                    folder=run,
                    reference=reference,
                )
                runs.append(cell)
            outcomes = dict.fromkeys(cell.outcome for cell in runs)
            outcome = " or ".join(outcomes)
            cells[word] = Cell(outcome, runs[0].said)
            sys.stderr.write(f"{name}, {word}: {outcome}\n")
    versions = package_versions(kind.packages)
    return StackResult(name=name, way=kind.way, versions=versions, cells=cells)


def stored(kind: type[Stack], setup: Setup, folder: Path, run: Path) -> Path:
    """Return a run's own copy of a stack's dataset, which is written once of a setup."""
    data = folder / f"data-{setup.rows}-{setup.is_mixed}"
    if not data.exists():
        data.mkdir()
        process = start(kind.store, setup, data)
        process.join()
    return Path(shutil.copytree(data, run / "data"))


def bench_resume(options: ResumeOptions) -> ResumeReport:
    """Run stacks under histories; raise ConfigError for names that there are not."""
    for kind, names, table in (
        ("stack", options.stack, STACKS),
        ("history", options.history, HISTORIES),
    ):
        for name in names:
            if name not in table:
                raise ConfigError(f"--{kind} {name!r} is not one; there are {', '.join(table)}")
    if options.add and options.out is None:
        raise ConfigError("--add needs --out, the folder of the report to add to")
    histories = options.history or tuple(HISTORIES)
    earlier: dict[str, StackResult] = {}
    if options.add:
        before = load_report_of(Path(str(options.out)), ResumeReport, SCHEMA, VERSION)
        earlier = {stack.name: stack for stack in before.stacks}
    report = ResumeReport(
        schema=SCHEMA,
        version=VERSION,
        created=created_now(),
        machine=machine_facts(),
        times=options.times,
        histories={word: history.meaning for word, history in HISTORIES.items()},
        stacks=list(earlier.values()),
    )
    for name in options.stack or tuple(STACKS):
        module = missing_module(name)
        if module is not None:
            result = StackResult(name=name, left_out=f"'{module}' is not installed")
        else:
            with tempfile.TemporaryDirectory(prefix="fuelrail-resume-") as place:
                file = Path(place, "result.json")
                write = partial(_write_stack, file, name, times=options.times)
                process = start(write, histories)
                process.join()
                end_group(process)
                result = StackResult(name=name, left_out="its process ended without a result")
                if file.exists():
                    result = msgspec.json.decode(file.read_bytes(), type=StackResult)
        past = earlier.get(name)
        if past is not None and past.left_out is None:
            cells = {**past.cells, **result.cells}
            newest = past if result.left_out is not None else result
            result = msgspec.structs.replace(newest, cells=cells)
        earlier[name] = result
        stacks = [earlier[word] for word in STACKS if word in earlier]
        report = msgspec.structs.replace(report, stacks=stacks)
        # After each stack, so that nothing of what was run is lost.
        if options.out is not None:
            folder = Path(options.out)
            folder.mkdir(parents=True, exist_ok=True)
            publish_json(folder / "report.json", report)
            publish(folder / "report.md", report.as_text().encode())
    return report


def _write_stack(
    file: Path,
    name: str,
    histories: Sequence[str],
    *,
    times: int,
) -> None:
    try:
        kind = load_stack(name)
    except Exception as error:  # noqa: BLE001 - of whatever a library raises when it is imported
        words = f"{type(error).__name__}: {error}".split()
        said = " ".join(words)[:300]
        result = StackResult(name=name, left_out=f"it cannot be imported ({said})")
    else:
        result = run_stack(name, kind, histories, times)
    file.write_bytes(msgspec.json.encode(result))


def print_resume(options: ResumeOptions, printing: PrintOptions) -> int:
    """Run the command, and print its table; of few cells what was said too."""
    report = bench_resume(options)
    if printing.json:
        print_json(report)
        return 0
    if len(options.stack) == 1 or len(options.history) == 1:
        for stack in report.stacks:
            for word, cell in stack.cells.items():
                sys.stdout.write(f"{stack.name}, {word}: {cell.outcome}\n")
                text = "\n".join(cell.said)
                for line in text.split("\n"):
                    sys.stdout.write(f"  {line}\n")
    sys.stdout.write(report.as_text())
    return 0


RESUME: Any = command(
    "kill and resume others' training stacks, and see which rows come",
    print_resume,
    arguments={},
    options=(ResumeOptions, PrintOptions),
    description="Runs each installed stack under histories: it trains some steps, saves a "
    "checkpoint in its documented way, is killed, and resumes, perhaps with other workers, ranks "
    "or batches. The witness says which rows came again or never, and whether the order is that "
    "of an unbroken run.",
)
