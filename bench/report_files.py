"""A report's files: what every command writes, by the one way that there is. JSON, Markdown, and a page if wanted."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fuelrail.bench import compare_report, diagnose_report, loader_report, scale_report, train_report
from fuelrail.bench.files import REPORT_HTML, REPORT_JSON, REPORT_MARKDOWN, publish, publish_json

if TYPE_CHECKING:
    from pathlib import Path

    from fuelrail.bench.reports import AnyReport

# Schema: what makes Markdown of a report, and what makes a page. Pages need matplotlib: imported where one is wanted.
_RENDERERS = {
    train_report.SCHEMA: ("train_markdown:render_train_markdown", "train_page:render_train_html"),
    loader_report.SCHEMA: ("loader_markdown:render_loader_markdown", "loader_page:render_loader_html"),
    compare_report.SCHEMA: ("compare_markdown:render_compare_markdown", "compare_page:render_compare_html"),
    scale_report.SCHEMA: ("scale_markdown:render_scale_markdown", "scale_page:render_scale_html"),
    diagnose_report.SCHEMA: ("diagnose_markdown:render_diagnose_markdown", "diagnose_page:render_diagnose_html"),
}


def write_report(report: AnyReport, out: Path, *, html: bool) -> list[Path]:
    """Write a report of any kind into a folder, each file by rename; return the files. Raises ConfigError."""
    markdown, page = _RENDERERS[report.schema]
    written = [out / REPORT_JSON, out / REPORT_MARKDOWN]
    publish_json(written[0], report)
    publish(written[1], _render(markdown, report).encode())
    if html:
        written.append(out / REPORT_HTML)
        publish(written[2], _render(page, report).encode())
    return written


def _render(place: str, report: Any) -> str:  # noqa: ANN401 - of the renderer's own kind, by its schema
    module, _, function = place.partition(":")
    text: str = getattr(import_module(f"fuelrail.bench.{module}"), function)(report)
    return text
