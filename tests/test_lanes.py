"""Tests are in the lanes of what they use, and are named by what they hold."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent

# A test file that uses these modules is in the lane, or some of its tests are.
LANES = {
    "process": r"subprocess|multiprocessing|ray|support\.(forked|ranks)|torch\.utils\.data",
    "network": r"aiohttp|http\.server|moto|support\.cloud_emulators|support\.(fault|listing|s3)_server",
    "real": r"support\.shared_data",
}
# A search for them takes a hundredth of the time of a syntax tree.
ANY_NAME = re.compile(
    rf"\b({'|'.join(LANES.values())})\b".replace(r"support\.", "").replace(r"\.", r"(\.| import )")
)


def test_tests_are_in_the_lanes_of_what_they_use() -> None:
    for file in sorted(TESTS.rglob("test_*.py")):
        text = file.read_text(encoding="utf-8")
        used: set[str] = set()
        for node in ast.walk(ast.parse(text)) if ANY_NAME.search(text) else ():
            if isinstance(node, ast.Import):
                used |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                used |= {
                    str(node.module),
                    *(f"{node.module}.{alias.name}" for alias in node.names),
                }
        for lane, pattern in LANES.items():
            if any(re.fullmatch(pattern, name) for name in used):
                assert f"pytest.mark.{lane}" in text, (
                    f"{file.relative_to(TESTS)} marks no test as `{lane}`"
                )


def test_tests_are_named_by_what_they_hold() -> None:
    """No name starts with the code of a list that a reader does not have, such as a letter and a number."""
    files = sorted(TESTS.rglob("test_*.py"))
    names = [
        (file, name)
        for file in files
        for name in re.findall(r"def (test_\w+)", file.read_text(encoding="utf-8"))
    ]
    coded = [
        f"{file.name} {name}"
        for file, name in names
        if re.match(r"test_(?!t4_)[a-z]\d{1,2}_", name)
    ]
    assert coded == []  # T4 is a dataset
