"""``fuelrail bench resume``: stacks under histories, judged by the witness.

It runs from a checkout: this room and `bench/peers` are not in the wheel.
"""

from __future__ import annotations

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
    out: Annotated[str | None, flag("folder for report.json and report.md", metavar="FOLDER")] = (
        None
    )
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
            outcomes = [stack.cells[name].outcome if name in stack.cells else "" for name in names]
            lines.append(f"| {stack.name} | {' | '.join(outcomes)} |")
        lines += ["", "| history | what happens |", "|---|---|"]
        lines += [f"| {name} | {meaning} |" for name, meaning in self.histories.items()]
        lines += ["", "| stack | versions | how it resumes |", "|---|---|---|"]
        for stack in ran:
            versions = ", ".join(f"{name} {version}" for name, version in stack.versions.items())
            lines.append(f"| {stack.name} | {versions} | {stack.way} |")
        lines += ["", "Not run:", ""]
        reasons: dict[str, list[str]] = {}
        for stack in ran:
            for word, cell in stack.cells.items():
                if cell.outcome == "not run" and not cell.said[0].startswith("it has no"):
                    reason = f"{stack.name}: {cell.said[0].partition(': ')[2]}"
                    reasons.setdefault(reason, []).append(word)
        lines += [f"- {', '.join(words)} of {reason}" for reason, words in reasons.items()]
        lines += [
            f"- {stack.name} was left out: {stack.left_out}"
            for stack in self.stacks
            if stack.left_out is not None
        ]
        return text_of(lines)


def run_history(
    kind: type[Stack], history: History, *, data: Path, folder: Path
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
    epochs = {records[0].epoch: records for records in read_records(reference / "records")}
    is_whole = setup.rows % setup.global_batch == 0
    tail: Any = "drop" if setup.drop_last else "pad"
    rules = Rules(expected=expect(setup.rows, "integer"), tail="exact" if is_whole else tail)
    reports = []
    for records in read_records(folder / "records"):
        unbroken = Expected(merge_epochs(epochs[records[0].epoch]))
        report = judge(records, rules)
        if setup.is_mixed or (report.faults and not is_whole):
            report = judge(records, Rules(expected=unbroken, tail="exact"))
        reports.append(report)
    return reports


def counted_rows(parts: Iterable[Sequence[RankPart]]) -> dict[tuple[int, int], Counter[int]]:
    """Return how often each row had come, by epoch and by the number of rows so far."""
    rows_so_far: dict[tuple[int, int], Counter[int]] = {}
    totals: dict[int, Counter[int]] = {}
    for ranks in parts:
        for epoch in sorted({epoch for part in ranks for epoch, _ in part.log}):
            logs = [[rows for number, rows in part.log if number == epoch] for part in ranks]
            total = totals.setdefault(epoch, Counter())
            for step in range(max(map(len, logs))):
                for log in logs:
                    total.update(log[step] if step < len(log) else ())
                rows_so_far[epoch, total.total()] = total.copy()
    return rows_so_far


def last_of(rows_so_far: dict[tuple[int, int], Counter[int]], epoch: int) -> Counter[int]:
    """Return how often each row came in an epoch, of what `counted_rows` returned."""
    places = [place for place in rows_so_far if place[0] == epoch]
    return rows_so_far[max(places)] if places else Counter()


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
    counts = Counter({fault.kind: 0 for report in reports for fault in report.faults})
    for report in reports:
        counts.update({fault.kind: fault.count for fault in report.faults})
        # After a resume the witness estimates numbers above a hundred; here the rows are known.
        due = Counter(range(setup.rows))
        if setup.is_mixed or setup.rows % setup.global_batch:
            due = last_of(unbroken, report.epoch)
        came = last_of(run, report.epoch)
        for fault in report.faults:
            if fault.kind in ("repeated", "missing"):
                more = came - due if fault.kind == "repeated" else due - came
                counts[fault.kind] += more.total() - fault.count
    words = [word.format(counts[kind]) for kind, word in _WORDS.items() if kind in counts]
    words += [kind for kind in counts if kind not in _WORDS]
    return ", ".join(words), [report.as_text().rstrip() for report in reports]


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
        part = next((part for part in failed if part.log or part.error), failed[0])
        place = "at the start" if len(parts) == 1 else f"in act {len(parts)}"
        return Cell(str(part.outcome), [f"{place}: {part.error}"])
    setup = history.acts[0].setup
    run = counted_rows(parts)
    unbroken = counted_rows(unbroken_parts)
    words, said = wording(folder, setup, reference=reference, run=run, unbroken=unbroken)
    plain, _ = wording(reference, setup, reference=reference, run=unbroken, unbroken=unbroken)
    without = f" (unbroken: {plain})" if plain else ""
    places = sorted(run.keys() & unbroken.keys())
    parted = next((place for place in places if run[place] != unbroken[place]), None)
    # A row too many comes after the places that both have.
    epochs = {epoch for epoch, _ in run.keys() | unbroken}
    is_complete = all(last_of(run, epoch) == last_of(unbroken, epoch) for epoch in epochs)
    if parted is None and is_complete:
        said.append(f"as the unbroken run at each of {len(places)} steps")
        return Cell(f"exact{without}", said)
    if words:
        return Cell(words + without, said)
    epoch, rows = parted if parted is not None else max(run)
    said.append(f"other rows than in the unbroken run by row {rows} of epoch {epoch}")
    return Cell("other order", said)


def run_stack(name: str, kind: type[Stack], histories: Sequence[str], times: int) -> StackResult:
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
                unbroken = folder / f"reference{len(references)}"
                unbroken_parts = run_history(
                    kind,
                    History("", [Act(setup=setup)]),
                    data=stored(kind, setup, folder, unbroken),
                    folder=unbroken,
                )
                references[setup] = (unbroken, unbroken_parts)
            unbroken, unbroken_parts = references[setup]
            outcomes = []
            for time in range(times):
                run = folder / f"{word}-{time}"
                parts = unbroken_parts
                if all(part.outcome is None for part in unbroken_parts[0]):
                    parts = run_history(
                        kind, history, data=stored(kind, setup, folder, run), folder=run
                    )
                outcomes.append(
                    judge_history(history, parts, unbroken_parts, folder=run, reference=unbroken)
                )
            names = dict.fromkeys(cell.outcome for cell in outcomes)
            cells[word] = Cell(" or ".join(names), outcomes[0].said)
            sys.stderr.write(f"{name}, {word}: {cells[word].outcome}\n")
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
        unknown = [name for name in names if name not in table]
        if unknown:
            raise ConfigError(f"--{kind} {unknown[0]!r} is not one; there are {', '.join(table)}")
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
        result = StackResult(name=name, left_out=f"'{module}' is not installed")
        if module is None:
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


def _write_stack(file: Path, name: str, histories: Sequence[str], *, times: int) -> None:
    try:
        kind = load_stack(name)
    except Exception as error:  # noqa: BLE001 - of whatever a library raises when it is imported
        said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
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
                sys.stdout.write(
                    "".join(f"  {line}\n" for line in "\n".join(cell.said).split("\n"))
                )
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
