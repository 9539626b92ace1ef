"""The words that users read: of pages, messages, comments and names of tests."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
HALLS = ("pipeline", "sharding", "loaders", "bench")

# Of pages, strings, comments and names of tests. Each word with what to write in its place.
WORDS = {
    r"\btold\b": "reported",
    r"\banew\b": "again",
    r"\bbegun\b": "started, partial",
    r"\bgoes on\b": "resumes, continues",
    r"\bgo on\b": "resume, continue",
    r"\bso many\b": "this number of",
    r"\bso much\b": "this amount of",
    r"\bwhoever\b": "the caller, the process",
    r"\bheld against\b": "checked against",
    r"\bhasn't got\b": "has no",
    r"\ball is well\b": "OK",
    r"\bwas there already\b": "already complete",
    r"\bmeans something with\b": "needs",
    r"\bcannot be had\b": "is not available",
    r"(?<!here )(?<!here\n)\bis no (?!(better|faster|longer|slower|such|worse)\b)": "is not a",
    r"\bhardly\b": "almost not, rarely",
}
ANY_WORD = re.compile("|".join(WORDS))

# Of pages only.
PAGE_WORDS = {
    r"\bonce and for all\b": "(leave out)",
    r"\bstands? twice\b": "is a duplicate",
    r"\bholds? .{1,40} against\b": "checks against",
    r"\btells\b": "reports, shows",
    r"\bby themselves\b": "automatically",
}


def pages() -> Iterator[Path]:
    """All pages but CHANGELOG and RESULTS."""
    folders = (*(ROOT / hall for hall in HALLS), ROOT / "docs", ROOT / "configs")
    for page in (*ROOT.glob("*.md"), *(page for folder in folders for page in folder.rglob("*.md"))):
        if page.name not in {"CHANGELOG.md", "RESULTS.md"}:
            yield page


# What hostile names say, so that no message repeats it; output of a program in a test.
SAID_BY_OTHERS = re.compile(r"fuelrail: all is well")


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Strings, comments, and the words of the names of tests, each with its line; nothing of most files."""
    if not ANY_WORD.search(re.sub(r"""["']\s*\n\s*[rbf]?["']""", "", text).replace("_", " ")):
        return  # a search takes a hundredth of the time of a syntax tree
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, SAID_BY_OTHERS.sub("", node.value)
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node.lineno, node.name.replace("_", " ")
    if any("#" in line and ANY_WORD.search(line) for line in text.splitlines()):  # takes ten times as long as `ast`
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


def test_plain_words() -> None:
    """CHANGELOG and RESULTS are records of what was; all other pages are read by users."""
    found = defaultdict(list)
    folders = (*(ROOT / name for name in (*HALLS, "tests", "docs", "configs")), ROOT / ".src" / "fuelrail")
    files = {file for folder in folders for file in folder.rglob("*.py")} - {Path(__file__).resolve()}
    for file in sorted(files):
        for line, text in prose(file.read_text(encoding="utf-8")):
            for pattern, better in WORDS.items() if ANY_WORD.search(text) else ():
                if re.search(pattern, text):
                    found[str(file.relative_to(ROOT))].append(f"{line}: {pattern} -> {better}")
    for page in pages():
        for number, text in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            words = re.sub(r"`[^`]*`", "", text)  # names of files and options stay as they are
            for pattern, better in (WORDS | PAGE_WORDS).items():
                if re.search(pattern, words):
                    found[str(page.relative_to(ROOT))].append(f"{number}: {pattern} -> {better}")
    assert not found
