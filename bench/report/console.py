"""Reports as text on a terminal: a document without its plots, explanations and facts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table as RichTable

from fuelrail.bench.report.page import (
    Block,
    Hero,
    Items,
    Note,
    Section,
    Table,
    Tiles,
    document_of,
    plain,
)

_PRINTED = Hero | Tiles | Items | Note | Table


_WIDE = 200


def report_console() -> Console:
    """Return standard output; in a file or a pipe wide enough that no table is cut."""
    console = Console(soft_wrap=True, markup=False, highlight=False)
    if console.is_terminal:
        return console
    return Console(soft_wrap=True, markup=False, highlight=False, width=_WIDE)


def print_table(
    console: Console,
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    texts: bool = False,
) -> None:
    """Print a table; the first column is text, the others are figures unless ``texts``."""
    table = RichTable(*header, box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "left" if texts else "right"
    for row in rows:
        table.add_row(*map(plain, row))
    console.print(table)


def print_report(report: object, console: Console) -> None:
    """Print the figures of a report."""
    document = document_of(report)
    console.print(plain(document.subtitle))
    for doubt in document.doubts:
        console.print(plain(doubt), style="bold")
    for part in document.parts:
        if not isinstance(part, Section):
            _print(part, console)
            continue
        blocks = [block for block in part.blocks if isinstance(block, _PRINTED)]
        if blocks:
            console.print(f"\n{plain(part.title)}", style="bold")
            for block in blocks:
                _print(block, console)


def _print(block: Block, console: Console) -> None:
    if isinstance(block, Hero):
        console.print(plain(f"{block.figure} {block.meaning}"), style="bold")
        console.print(plain(block.text))
    elif isinstance(block, Tiles):
        text = "; ".join(f"{value} {label}" for value, label in block.entries)
        console.print(plain(text))
    elif isinstance(block, Items):
        console.print("\n".join(map(plain, block.entries)))
    elif isinstance(block, Note):
        console.print(f"note: {plain(block.text)}")
    elif isinstance(block, Table):
        print_table(console, block.header, block.rows, texts=block.texts)
