"""The picture of all stacks under all histories: a cell for each outcome.

``python -m fuelrail.bench.studies.resume.drawing bench/results/resume.json docs/assets/stacks.svg``
"""

from __future__ import annotations

import re
import sys
from html import escape
from pathlib import Path
from typing import Final

from fuelrail.bench.report.files import load_report_of
from fuelrail.bench.studies.resume.session import SCHEMA, VERSION, ResumeReport

_TITLE: Final = "Rows that stacks repeat and lose when a run is killed and resumed"
_LEGEND: Final = (
    "+96: repeats 96 rows; -96: loses 96 rows; order: other rows than in the unbroken run at some "
    "step; *: the unbroken run had faults, too; empty: not run"
)
_NAMES: Final = 122
"""Width of the names of stacks [px]."""
_HEAD: Final = 232
"""Height of the histories' meanings, which stand at an angle [px]."""
_CELL: Final = (49, 19)
"""Width and height of a cell [px]."""
_MARGIN: Final = 150
"""Width of the meanings right of the last cell [px]."""
_COLOURS: Final = {
    "exact": "#cdebd6",
    "loses": "#f5b7a8",
    "repeats": "#fbe2a6",
    "other order": "#d8d0ee",
    "refuses": "#e2e2e2",
    "crashes": "#e2e2e2",
}
"""By the first of these words that an outcome has."""


def picture(report: ResumeReport) -> str:
    """Return the outcomes as an SVG file of its own."""
    stacks = [stack for stack in report.stacks if stack.left_out is None]
    width, height = _CELL
    right = _NAMES + width * len(report.histories)
    bottom = _HEAD + height * len(stacks)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right + _MARGIN} {bottom + 24}"',
        f' role="img" aria-label="{_TITLE}" font-family="sans-serif" font-size="10">',
        f'<title>{_TITLE}</title><rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    for column, (name, meaning) in enumerate(report.histories.items()):
        x = _NAMES + width * column + width // 2
        lines.append(
            f'<text class="history" transform="translate({x} {_HEAD - 6}) rotate(-55)">'
            f'<tspan font-weight="bold">{escape(name)}</tspan>: {escape(meaning)}</text>'
        )
    for row, stack in enumerate(stacks):
        y = _HEAD + height * row
        lines.append(
            f'<text class="stack" x="{_NAMES - 6}" y="{y + 13}" text-anchor="end">'
            f"{escape(stack.name)}</text>"
        )
        for column, name in enumerate(report.histories):
            cell = stack.cells.get(name)
            if cell is None or cell.outcome == "not run":
                continue
            x = _NAMES + width * column
            first, _, unbroken = cell.outcome.partition(" (")
            colours = [colour for word, colour in _COLOURS.items() if word in first]
            colour = colours[0] if colours else "#ffffff"
            text = escape(short_of(first))
            if unbroken:
                text += "*"
            lines.append(
                f'<rect x="{x + 1}" y="{y + 1}" width="{width - 2}" height="{height - 2}" '
                f'fill="{colour}"/><text class="cell" x="{x + width // 2}" y="{y + 13}" '
                f'text-anchor="middle" font-size="9">{text}</text>'
            )
    lines.append(f'<text x="6" y="{bottom + 16}" fill="#444444">{escape(_LEGEND)}</text>')
    return "\n".join([*lines, "</svg>", ""])


def short_of(outcome: str) -> str:
    """Return an outcome in the letters of a cell: ``+63 -63`` for repeated and lost rows."""
    counts = re.fullmatch(r"(?:repeats (\d+))?(?:, )?(?:loses (\d+))?", outcome)
    if counts is None:
        return outcome.removeprefix("other ")
    repeated, lost = counts.groups()
    words = []
    if repeated:
        words.append(f"+{repeated}")
    if lost:
        words.append(f"-{lost}")
    return " ".join(words)


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    report = load_report_of(source, ResumeReport, SCHEMA, VERSION)
    target.write_text(picture(report), encoding="utf-8")
