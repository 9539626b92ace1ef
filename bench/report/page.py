"""The reports' HTML pages: one file that needs nothing else, for a browser and for paper. Frame and building blocks."""

from __future__ import annotations

from datetime import datetime
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuelrail.bench.report.markdown import as_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from fuelrail.bench.measure.machine import DatasetFacts, MachineFacts
    from fuelrail.bench.report.files import ReportHeader

GIB = 2**30
_LONG_FIGURE = 8  # characters that fit the hero in its large type
_STYLE_SHEET = Path(__file__).with_name("report.css")


def page(title: str, parts: Iterable[str]) -> str:
    """A whole page; ``title`` is text, ``parts`` is HTML."""
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>\n{_STYLE_SHEET.read_text(encoding='utf-8')}</style></head>\n"
        f"<body><main>\n{body}\n</main></body></html>\n"
    )


def head(report: ReportHeader, brand: str, title: str, about: str) -> list[str]:
    """Render the start of a page: what was measured (``about``, HTML), when, with what, and whether it is partial."""
    machine = report.machine
    commit = f", commit {machine.commit[:10]}" if machine.commit else ""
    made = f"{when(report.created)}, fuelrail {escape(machine.fuelrail)}{commit}"
    parts = [
        f'<div class="brand">{escape(brand)}</div>',
        f"<h1>{escape(title)}</h1>",
        f'<p class="sub">{about}. {made}.</p>',
    ]
    if report.cut_off is not None:
        parts.append(note(f"Partial report: {report.cut_off}. It shows what was measured until then."))
    return parts


def when(created: str) -> str:
    """A report's time, as people write it; UTC."""
    return f"{datetime.fromisoformat(created):%Y-%m-%d %H:%M} UTC"


def hero(figure: str, meaning: str, text: str, below: str = "") -> str:
    """The one figure that matters, what it is, and what it means; ``below`` is HTML, the rest text."""
    size = ' class="long"' if len(figure) > _LONG_FIGURE else ""
    return (
        f'<div class="hero"><div class="figure"><b{size}>{escape(figure)}</b><span>{escape(meaning)}</span></div>'
        f"<div><p>{escape(text)}</p>{below}</div></div>"
    )


def tiles(entries: Iterable[tuple[str, str]]) -> str:
    """Further figures, each with what it is; text."""
    cells = "".join(f'<div class="tile"><b>{escape(v)}</b><span>{escape(label)}</span></div>' for v, label in entries)
    return f'<div class="tiles">{cells}</div>'


def bar(segments: Iterable[tuple[str, str, float]]) -> str:
    """Shares of one whole as a bar with its legend: (label, colour, share)."""
    segments = list(segments)
    parts = "".join(
        f'<i style="width:{share:.3%};background:{colour}" title="{label} {share:.1%}"></i>'
        for label, colour, share in segments
    )
    # What would be told as 0.0% is not told.
    visible = [(f"{label} {share:.1%}", colour) for label, colour, share in segments if share >= 0.0005]
    return f'<div class="bar">{parts}</div>{legend(visible)}'


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Labels with their colours."""
    return f'<div class="legend">{"".join(f"<span>{key(colour)}{label}</span>" for label, colour in entries)}</div>'


def key(colour: str) -> str:
    """A small square of a colour."""
    return f'<i class="key" style="background:{colour}"></i>'


def figure(svg: str, caption: str, above: str = "") -> str:
    """A plot with its caption and what stands above it, such as a legend, which no page break parts; all HTML."""
    return f"<figure>{above}{svg}<figcaption>{caption}</figcaption></figure>"


def note(text: str) -> str:
    """A warning."""
    return f'<div class="note"><p>{escape(text)}</p></div>'


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, total: bool = False, texts: bool = False) -> str:
    """A table of HTML cells, which scrolls where the window is narrow; with ``total`` the last row sums the others.

    With ``texts`` cells are sentences rather than numbers: they start on the left, and long ones have several lines.
    """
    lines = [f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows]
    if total:
        lines[-1] = lines[-1].replace("<tr>", '<tr class="total">', 1)
    names = "".join(f"<th>{name}</th>" for name in header)
    kind = ' class="texts"' if texts else ""
    return (
        f'<div class="wide"><table{kind}><thead><tr>{names}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
    )


def facts(
    machine: MachineFacts, dataset: DatasetFacts, options: Mapping[str, Any], packages: Mapping[str, str] | None = None
) -> list[str]:
    """Render the end of a page: everything that its figures depend on; ``packages`` in place of the machine's."""
    gpus = ", ".join(f"{gpu.name} ({gpu.memory_bytes / GIB:.0f} GiB, driver {gpu.driver})" for gpu in machine.gpus)
    changed = " with uncommitted changes" if machine.uncommitted_changes else ""
    commit = f"commit {machine.commit}{changed}" if machine.commit else "installed package"
    rows = {
        "processor": f"{machine.cpu}; {machine.num_cpus:g} of {machine.num_cpus_installed} CPUs usable",
        "memory": f"{machine.memory_bytes / GIB:.1f} GiB",
        "GPUs": gpus or "none",
        "system": f"{machine.system}, Python {machine.python}",
        "fuelrail": f"{machine.fuelrail}, {commit}",
        "packages": ", ".join(f"{name} {version}" for name, version in (packages or machine.packages).items()),
        "dataset": f"{dataset.name}, split {dataset.split}: {dataset.num_samples:,} samples in {dataset.num_shards} "
        f"shard{'s' if dataset.num_shards != 1 else ''}; cameras {', '.join(dataset.cameras)}; fingerprint "
        f"{dataset.fingerprint}",
        "options": as_text(options),
    }
    body = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in rows.items())
    return ["<h2>Machine, dataset, options</h2>", f'<table class="facts">{body}</table>']
