"""Reports as documents: one list of blocks, of which one template makes the page and another one the Markdown.

Texts are plain; in those of :class:`Text`, :class:`Figure` and ``about``, ``**word**`` is strong and ``[word](file)``
a link. A page is one file that loads nothing else, for a browser and for paper. Markdown has no figures.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from html import escape
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from fuelrail.bench.report.files import REPORT_HTML, REPORT_JSON, REPORT_MARKDOWN, ReportHeader, publish, publish_json

if TYPE_CHECKING:
    import msgspec


GIB = 2**30
_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Hero:
    """The one figure that matters, what it is, and what it means; ``bar``: shares of a whole (label, colour, share)."""

    figure: str
    meaning: str
    text: str
    bar: Sequence[tuple[str, str, float]] = ()


@dataclass(frozen=True)
class Tiles:
    """Further figures, each with what it is."""

    entries: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Figure:
    """Plots beside each other, as SVG, each with its caption, and a legend of labels with colours above them.

    Plots that were not drawn are left out. With ``summary`` they fold away, and are so at first if ``folded``.
    """

    plots: Sequence[tuple[str, str]]
    legend: Sequence[tuple[str, str]] = ()
    summary: str = ""
    folded: bool = False


@dataclass(frozen=True)
class Table:
    """A table, which scrolls where the window is narrow; the last row sums the others if ``total``.

    ``colours`` are keys before the first cells; ``texts``: cells are sentences rather than numbers; ``prose``: two
    columns of them.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    total: bool = False
    colours: Sequence[str] = ()
    prose: bool = False
    texts: bool = False


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str
    small: bool = False


@dataclass(frozen=True)
class Items:
    """A list of texts."""

    entries: Sequence[str]


@dataclass(frozen=True)
class Note:
    """A warning."""

    text: str


Block = Hero | Tiles | Figure | Table | Text | Items | Note


@dataclass(frozen=True)
class Section:
    """Blocks under a heading."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Document:
    """A whole report. ``facts``: everything that its figures depend on, by name."""

    brand: str
    title: str
    about: str
    made: str
    cut_off: str | None
    parts: Sequence[Block | Section]
    facts: Mapping[str, str]


def document(
    report: ReportHeader, brand: str, title: str, about: str, parts: Iterable[Block | Section],
    packages: Mapping[str, str] | None = None,
) -> Document:  # fmt: skip
    """Return the document of a report, with its warnings behind the hero; ``packages`` in place of the machine's."""
    before: list[Block | Section] = []
    after: list[Block | Section] = []
    for part in parts:
        (after if after or not isinstance(part, (Hero, Tiles)) else before).append(part)
    machine = report.machine
    commit = f", commit {machine.commit[:10]}" if machine.commit else ""
    return Document(
        brand=brand, title=title, about=about, made=f"{when(report.created)}, fuelrail {machine.fuelrail}{commit}",
        cut_off=report.cut_off, parts=[*before, *map(Note, report.warnings), *after],
        facts=_facts(report, machine.packages if packages is None else packages),
    )  # fmt: skip


def _facts(report: ReportHeader, packages: Mapping[str, str]) -> dict[str, str]:
    machine, dataset = report.machine, report.dataset
    gpus = ", ".join(f"{gpu.name} ({gpu.memory_bytes / GIB:.0f} GiB, driver {gpu.driver})" for gpu in machine.gpus)
    changed = " with uncommitted changes" if machine.uncommitted_changes else ""
    commit = f"commit {machine.commit}{changed}" if machine.commit else "installed package"
    return {
        "processor": f"{machine.cpu}; {machine.num_cpus:g} of {machine.num_cpus_installed} CPUs usable",
        "memory": f"{machine.memory_bytes / GIB:.1f} GiB",
        "GPUs": gpus or "none",
        "system": f"{machine.system}, Python {machine.python}",
        "fuelrail": f"{machine.fuelrail}, {commit}",
        "packages": ", ".join(f"{name} {version}" for name, version in packages.items()),
        "dataset": f"{dataset.name}, split {dataset.split}: {dataset.num_samples:,} samples in {dataset.num_shards} "
        f"shard{'s' if dataset.num_shards != 1 else ''}; cameras {', '.join(dataset.cameras)}; fingerprint "
        f"{dataset.fingerprint}",
        "options": as_text(report.options),
    }


def write_report(report: msgspec.Struct, out: Path, *, html: bool) -> None:
    """Write a report of any kind into a folder, each file by rename. Raises ConfigError."""
    publish_json(out / REPORT_JSON, report)
    publish(out / REPORT_MARKDOWN, render_markdown(report).encode())
    if html:
        publish(out / REPORT_HTML, render_page(report).encode())


def render_page(report: Any) -> str:  # noqa: ANN401 - a report of any study
    """Return the page of a report as one string; raises ConfigError where matplotlib is not installed."""
    plots: dict[str, str] = _of_study(report, "plots").plots(report)
    return _template("page.html.j2").render(
        document=document_of(report, plots),
        style=(_FOLDER / "report.css").read_text(encoding="utf-8"),
    )


def render_markdown(report: Any) -> str:  # noqa: ANN401 - a report of any study
    """Return a report as Markdown."""
    return _template("report.md.j2").render(document=document_of(report))


def document_of(report: Any, plots: Mapping[str, str] | None = None) -> Document:  # noqa: ANN401 - likewise
    """Return a report as a document with these plots."""
    found: Document = _of_study(report, "page").describe(report, plots or {})
    return found


def _of_study(report: object, module: str) -> Any:  # noqa: ANN401 - a module
    """Return a module beside that of the report; it is imported when it is needed, for plots need matplotlib."""
    return import_module(f"{type(report).__module__.rpartition('.')[0]}.{module}")


@cache
def _template(name: str) -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER / "templates"), autoescape=name.endswith(".html.j2"), trim_blocks=True,
        lstrip_blocks=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters |= {"kind": lambda block: type(block).__name__, "strong": _strong}
    environment.globals["markdown_table"] = markdown_table
    return environment.get_template(name)


def _strong(text: str) -> str:
    strong = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", escape(text))
    return re.sub(r"\[([^]]+)\]\(([^)]+)\)", r'<a href="\2">\1</a>', strong)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as Markdown; the first column is text, the others are figures. Bars in cells are escaped."""
    rule = "|" + "|".join(["---", *["---:"] * (len(header) - 1)]) + "|"
    line, *lines = ("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |" for cells in (header, *rows))
    return "\n".join([line, rule, *lines])


def when(created: str) -> str:
    """A report's time, as people write it; UTC."""
    return f"{datetime.fromisoformat(created):%Y-%m-%d %H:%M} UTC"


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
