"""Reports as documents: one list of blocks, of which one template makes the page and another one
the Markdown.

Texts are plain and show as they are, for any content. Strong words and links are spans
(:class:`Span`, :func:`marked`), so that no name out of a dataset becomes markup. A page is one file
that loads nothing else, for a browser and for paper. Markdown has no figures.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from html import escape
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec

from fuelrail.bench.measure.clock import Summary
from fuelrail.bench.measure.display import Display, displayed_fields
from fuelrail.bench.measure.rates import Interval
from fuelrail.bench.report.files import (
    REPORT_HTML,
    REPORT_JSON,
    REPORT_MARKDOWN,
    ReportHead,
    ReportHeader,
    publish,
    publish_json,
)
from fuelrail.pipeline.cli import counted
from fuelrail.pipeline.errors import needs
from fuelrail.pipeline.text import escaped

with needs("a study or a report", "fuelrail[bench]"):
    import jinja2
    from markupsafe import Markup


GIB = 2**30
_FOLDER = Path(__file__).parent
_STRONG = re.compile(r"\*\*(.+?)\*\*")
# A command in a sentence, which shows as code; all other backticks are characters.
_COMMAND = re.compile(r"`((?:fuelrail|pip|cat|torchrun) [^`|]+)`")
# What is markup in Markdown (CommonMark, and tables): brackets are where a target follows, `_` is
# but within a word.
_MARKDOWN = re.compile(
    r"[\\`|~]|\*(?=\S)|(?<=\S)\*|\](?=[(\[:])|<(?=[\w/!?])|&(?=#?\w+;)|(?<![^\W_])_|_(?![^\W_])"
)


class Span(NamedTuple):
    """A part of a text: strong, or a link to ``file``, a path relative to the report."""

    text: str
    strong: bool = False
    file: str | None = None


Words = str | tuple[Span, ...]


def marked(template: str, **values: object) -> tuple[Span, ...]:
    """Return a text whose ``**words**`` are strong.

    ``{name}`` takes a value, whose own marks stay characters.
    """
    spans = []
    for number, part in enumerate(_STRONG.split(template)):
        if part:
            is_strong = number % 2 == 1
            spans.append(Span(part.format_map(values), strong=is_strong))
    return tuple(spans)


@dataclass(frozen=True)
class Hero:
    """The one figure that matters, what it is, and what it means; ``bar``: shares of a whole
    (label, colour, share).
    """

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
    """A plot as SVG, its caption, and a legend of labels with colours above it; empty where it
    was not drawn.
    """

    svg: str
    caption: Words
    legend: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Table:
    """A table, which scrolls where the window is narrow; the last row sums the others if ``total``.

    ``colours`` are keys before the first cells; ``texts``: cells are sentences rather than numbers.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    total: bool = False
    colours: Sequence[str] = ()
    texts: bool = False


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: Words
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
    """A whole report. ``facts``: everything that its figures depend on, by name. ``doubts``: the
    headline's.
    """

    brand: str
    title: str
    subtitle: Words
    origin: str
    doubts: Sequence[str]
    parts: Sequence[Block | Section]
    facts: Mapping[str, str]


def document(
    report: ReportHead,
    brand: str,
    title: str,
    subtitle: Words,
    parts: Iterable[Block | Section],
    packages: Mapping[str, str] | None = None,
) -> Document:
    """Return the document of a report, with its warnings behind the hero; ``packages`` in place
    of the machine's.
    """
    before: list[Block | Section] = []
    after: list[Block | Section] = []
    for part in parts:
        if isinstance(part, Hero) and report.disturbed is not None:
            part = replace(part, meaning=f"{part.meaning} (loaded host: not reliable)")
        is_figure = isinstance(part, (Hero, Tiles))
        if is_figure and not after:
            before.append(part)
        else:
            after.append(part)
    machine = report.machine
    gpus = ", ".join(
        f"{gpu.name} ({gpu.memory_bytes / GIB:.0f} GiB, driver {gpu.driver})"
        for gpu in machine.gpus
    )
    commit = "installed package"
    if machine.commit:
        commit = f"commit {machine.commit}"
        if machine.uncommitted_changes:
            commit += " with uncommitted changes"
    packages = machine.packages if packages is None else packages
    facts = {
        "processor": f"{machine.cpu}; {machine.num_cpus:g} of {machine.num_cpus_installed} CPUs "
        "usable",
        "memory": f"{machine.memory_bytes / GIB:.1f} GiB",
        "GPUs": gpus or "none",
        "system": f"{machine.system}, Python {machine.python}",
        "fuelrail": f"{machine.fuelrail}, {commit}",
        "packages": ", ".join(f"{name} {version}" for name, version in packages.items()),
    }
    if isinstance(report, ReportHeader):
        dataset = report.dataset
        facts["dataset"] = (
            f"{dataset.name}, split {dataset.split}: {dataset.num_samples:,} samples in "
            f"{counted(dataset.num_shards, 'shard')}; cameras "
            f"{', '.join(dataset.cameras)}; fingerprint {dataset.fingerprint}"
        )
    facts["options"] = as_text(msgspec.to_builtins(report.options))
    origin = f"{when(report.created)}, fuelrail {machine.fuelrail}"
    if machine.commit:
        origin += f", commit {machine.commit[:10]}"
    cut_off = getattr(report, "cut_off", None)
    warnings = [Note(warning) for warning in report.warnings]
    return Document(
        brand=brand,
        title=title,
        subtitle=subtitle,
        origin=origin,
        doubts=doubts(cut_off, report.disturbed),
        parts=[*before, *warnings, *after],
        facts=facts,
    )


def doubts(cut_off: str | None, disturbed: str | None) -> list[str]:
    """Return what the headline says before any figure: that the report is partial, or of a host
    that others used.
    """
    texts = []
    if cut_off is not None:
        texts.append(f"Partial report: {cut_off}. It shows what was measured until then.")
    if disturbed is not None:
        texts.append(f"Measured on a loaded host: {disturbed}. Repeat it on an idle machine.")
    return texts


def table_of(records: Sequence[msgspec.Struct]) -> Table:
    """Return the table of records of one type: a column for each field that says how it shows.

    There is at least one record.
    """
    fields = displayed_fields(type(records[0]))
    header = [entry.label for entry in fields.values()]
    rows = []
    for record in records:
        row = [_display_text(getattr(record, name), entry) for name, entry in fields.items()]
        rows.append(row)
    return Table(header, rows)


def tiles_of(*records: msgspec.Struct, names: Mapping[str, str] | None = None) -> Tiles:
    """Return a tile for each field of records that says how it shows and is not None; ``names``:
    by field, in place of those of the type.
    """
    entries = []
    for record in records:
        for name, entry in displayed_fields(type(record)).items():
            value = getattr(record, name)
            if value is None:
                continue
            label = (names or {}).get(name, entry.name)
            if isinstance(value, Interval):
                if value.has_interval:
                    low, high = (_display_text(end, entry) for end in (value.low, value.high))
                    label = f"{label} ({low} to {high})"
                value = value.median
            elif isinstance(value, Summary):
                p99 = _display_text(value.p99_ms, entry)
                label = f"{label} p50; p99 {p99} {entry.unit}"
                value = value.p50_ms
            figure = f"{_display_text(value, entry)} {entry.unit}".rstrip()
            entries.append((figure, label))
    return Tiles(entries)


def _display_text(value: Any, entry: Display) -> str:
    if value is None:
        return entry.missing
    if isinstance(value, Interval):
        value = value.median
    if isinstance(value, int | float) and entry.scale != 1:
        value *= entry.scale
    if entry.digits:
        return f"{value:{entry.digits}}"
    if isinstance(value, float):
        return format_number(value)
    return str(value)


def write_report(report: msgspec.Struct, out: Path, *, html: bool) -> None:
    """Write a report of any kind into a folder, each file by rename. Raises ConfigError."""
    publish_json(out / REPORT_JSON, report)
    markdown = render_markdown(report)
    publish(out / REPORT_MARKDOWN, markdown.encode())
    if html:
        page = render_page(report)
        publish(out / REPORT_HTML, page.encode())


def render_page(report: object) -> str:
    """Return the page of a report as one string; raises ConfigError where matplotlib is not
    installed.
    """
    module = _of_study(report, "plots")
    plots = module.plots(report) if module is not None else None
    style = _FOLDER / "report.css"
    return _template("page.html.j2").render(
        document=document_of(report, plots),
        style=style.read_text(encoding="utf-8"),
    )


def render_markdown(report: object) -> str:
    """Return a report as Markdown."""
    return _template("report.md.j2").render(document=document_of(report))


def document_of(report: object, plots: Mapping[str, str] | None = None) -> Document:
    """Return a report as a document with these plots."""
    page = _of_study(report, "page")
    description: Document = page.describe(report, plots or {})
    return description


def _of_study(report: object, module: str) -> Any:
    """Return a module beside that of the report, or None; it is imported when needed, for plots
    need matplotlib.
    """
    package, _, _ = type(report).__module__.rpartition(".")
    name = f"{package}.{module}"
    if find_spec(name) is None:
        return None
    return import_module(name)


@cache
def _template(name: str) -> jinja2.Template:
    """Load a template, every value of which is escaped for its kind; what a macro made is not
    escaped again.
    """
    write = _html if name.endswith(".html.j2") else _markdown
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        finalize=lambda value: value if isinstance(value, Markup) else write(value),
    )
    environment.filters["kind"] = lambda block: type(block).__name__
    environment.globals["markdown_table"] = markdown_table
    return environment.get_template(name)


def _spans(words: Words) -> Iterable[Span]:
    return (Span(words),) if isinstance(words, str) else words


def plain(words: Words) -> str:
    """Return a text without marks; what does not print as itself is escaped."""
    return escaped("".join(span.text for span in _spans(words)))


def _html(words: Words) -> Markup:
    parts = []
    for span in _spans(words):
        text = escape(escaped(span.text))
        text = _COMMAND.sub(r"<code>\1</code>", text)
        if span.strong:
            text = f"<b>{text}</b>"
        if span.file is not None:
            # Quoted, a colon included: a target is always a file beside the report.
            text = f'<a href="{quote(span.file)}">{text}</a>'
        parts.append(text)
    return Markup("".join(parts))


def _markdown(words: Words) -> Markup:
    parts = []
    for span in _spans(words):
        # Every second part is a command.
        pieces = _COMMAND.split(escaped(span.text))
        pieces[::2] = [_MARKDOWN.sub(r"\\\g<0>", piece) for piece in pieces[::2]]
        pieces[1::2] = [f"`{piece}`" for piece in pieces[1::2]]
        text = "".join(pieces)
        if span.strong:
            text = f"**{text}**"
        if span.file is not None:
            text = f"[{text}]({quote(span.file)})"
        parts.append(text)
    return Markup("".join(parts))


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Markup:
    """Return a table as Markdown; the first column is text, the others are figures."""
    lines = []
    for cells in (header, *rows):
        texts = map(_markdown, cells)
        lines.append("| " + " | ".join(texts) + " |")
    alignments = ["---"] + ["---:"] * (len(header) - 1)
    lines.insert(1, "|" + "|".join(alignments) + "|")
    return Markup("\n".join(lines))


def format_number(value: float) -> str:
    """Return a number with three digits or more, however small: 1,234, 12.3, 0.0131."""
    if value == 0:
        return "0"
    size = abs(value)
    if size < 1e-4:
        return f"{value:.2g}"
    exponent = math.floor(math.log10(size))
    digits = max(0, 2 - exponent)
    return f"{value:,.{digits}f}"


def when(created: str) -> str:
    """Return a report's time, as people write it; UTC."""
    return f"{datetime.fromisoformat(created):%Y-%m-%d %H:%M} UTC"


def as_text(options: Mapping[str, Any]) -> str:
    """Return options in a line, nested ones as ``outer.inner``, without those that are off,
    empty or automatic.
    """
    return ", ".join(f"{name}={value}" for name, value in _flat(options, ""))


def _flat(options: Mapping[str, Any], within: str) -> Iterator[tuple[str, str]]:
    for name, value in options.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{within}{name}.")
        elif isinstance(value, list | tuple):
            if any(value) or (value and not within):
                texts = ", ".join(map(str, value))
                yield within + name, f"[{texts}]"
        elif value is not None and (not within or value):
            yield within + name, str(value)
