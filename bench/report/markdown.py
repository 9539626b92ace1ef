"""Building blocks of the reports' Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from fuelrail.bench.report.files import ReportHeader


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table's lines; the first column is text, the others are figures. Bars in cells are escaped."""
    lines = [_line(header), "|" + "|".join(["---", *["---:"] * (len(header) - 1)]) + "|"]
    return lines + [_line(row) for row in rows]


def document(
    report: ReportHeader, title: str, about: str, body: Iterable[str], packages: Mapping[str, str] | None = None
) -> str:
    """A whole report as one text: what it is about and when, whether it is partial, the body, warnings, facts."""
    lines = [f"# {title}", "", f"{about}. {report.created}.", ""]
    if report.cut_off is not None:
        lines += [f"**Partial: {report.cut_off}.**", ""]
    lines += [*body, "", *(f"> {warning}" for warning in report.warnings), ""]
    return "\n".join([*lines, *_facts(report, packages)]) + "\n"


def _facts(report: ReportHeader, packages: Mapping[str, str] | None) -> list[str]:
    """Everything that the figures depend on, as a list."""
    machine, dataset = report.machine, report.dataset
    changed = " with uncommitted changes" if machine.uncommitted_changes else ""
    gpus = ", ".join(gpu.name for gpu in machine.gpus) or "none"
    data = f"{dataset.name}, split {dataset.split}: {dataset.num_samples:,} samples, {len(dataset.cameras)} cameras"
    versions = machine.packages if packages is None else packages
    return [
        "## Machine, dataset, options",
        "",
        f"- processor: {machine.cpu}; {machine.num_cpus:g} of {machine.num_cpus_installed} CPUs usable",
        f"- memory: {machine.memory_bytes / 2**30:.1f} GiB; GPUs: {gpus}",
        f"- system: {machine.system}, Python {machine.python}",
        f"- fuelrail {machine.fuelrail}, " + (f"commit {machine.commit}{changed}" if machine.commit else "installed"),
        f"- packages: {', '.join(f'{name} {version}' for name, version in versions.items())}",
        f"- dataset: {data}; fingerprint {dataset.fingerprint}",
        f"- options: {as_text(report.options)}",
    ]


def as_text(options: Mapping[str, Any]) -> str:
    """Options in a line, those within others by ``outer.inner``; what is off, empty or left to the program is not."""
    return ", ".join(f"{name}={value}" for name, value in _flat(options, ""))


def _flat(options: Mapping[str, Any], within: str) -> Iterator[tuple[str, str]]:
    for name, value in options.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{within}{name}.")
        elif isinstance(value, list | tuple):
            if any(value) or (value and not within):
                yield within + name, "[" + ", ".join(map(str, value)) + "]"
        elif value is not None and (not within or value):
            yield within + name, str(value)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
