"""Pages that people read first: the files and names in them exist, and the lists in them are complete."""

from __future__ import annotations

import re
from pathlib import Path
from types import FunctionType

import pytest

import fuelrail as fr
from fuelrail import __main__ as command_line
from fuelrail import bench
from fuelrail.loaders.records import batch_entries

ROOT = Path(__file__).resolve().parents[1]
HALLS = ("pipeline", "sharding", "loaders", "bench")
ROOMS = sorted(page for hall in HALLS for page in (ROOT / hall).rglob("README.md"))
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        ROOT / "configs" / "trainers" / "README.md",
        *ROOMS,
    ]
)
MAX_README_WORDS = 650
MAX_CODE_COLUMNS = 88
MAX_PICTURE_BYTES = 400_000
MAX_ENTRIES = 18  # of a folder of docs: a page for each subject

# A file or folder of this repository: with a known suffix, or with a slash at its end.
PATH = re.compile(r"`((?:[\w.-]+/)*[\w.-]+\.(?:py|md|yaml|toml|txt|css|c)|(?:[\w.-]+/)+)`")
# What users write, or what is written for them.
NOT_OURS = re.compile(
    r"^(table|first_batch)\.py$|^launch\.yaml$|(^|/)NAME|(^|/)test_NAME|\.fuelrail/"
)


def named_paths(text: str) -> list[str]:
    return [path for path in PATH.findall(text) if not NOT_OURS.search(path)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_files_exist(page: Path) -> None:
    """Links are relative to the page, names of files to the page's folder, its hall, or the repository."""
    text = page.read_text(encoding="utf-8")
    if page.name != "CHANGELOG.md":
        hall = ROOT / page.relative_to(ROOT).parts[0]
        places = (page.parent, hall, ROOT)
        missing = [
            path
            for path in named_paths(text)
            if not any((place / path).exists() for place in places)
        ]
        assert not missing
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    assert not [link for link in links if not (page.parent / link).exists()]


def test_no_folder_of_the_documents_has_too_many_entries() -> None:
    for folder in (
        ROOT / "docs",
        *(path for path in (ROOT / "docs").rglob("*") if path.is_dir()),
    ):
        assert (
            len([path for path in folder.iterdir() if path.name != "__pycache__"]) <= MAX_ENTRIES
        ), folder


def test_the_site_has_every_page() -> None:
    """Its build fails on a page that exists and is not in `nav`; here the other way is cheap to check: files exist."""
    nav = re.findall(
        r"^ +- .+: (\S+\.md)$",
        (ROOT / "mkdocs.yml").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    generated = {
        "index.md",
        *(f"reference/{name}.md" for name in ("commands", "names", "python", "sources")),
    }
    assert pages <= set(nav)
    assert all((ROOT / page).is_file() for page in set(nav) - pages - generated)


def test_readme_is_short_and_its_pictures_are_small() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= MAX_README_WORDS
    for code in re.findall(r"```\w+\n(.*?)```", text, re.DOTALL):
        lines = [line for line in code.splitlines() if not line.startswith("wrote: ")]  # output
        assert max(map(len, lines)) <= MAX_CODE_COLUMNS + 1, "a diff has a column more"
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
    assert pictures
    for picture in pictures:
        assert 0 < (ROOT / picture).stat().st_size <= MAX_PICTURE_BYTES, picture


def test_readme_says_first_what_state_the_project_is_in() -> None:
    """Where it comes from, and whether a GPU has seen it, before any figure."""
    head = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())[:500]
    assert re.search(r"Status: .*not on the package index", head)
    assert re.search(
        r"measured on CPUs only: it has never run on a GPU",
        head,
        re.IGNORECASE,
    )


def test_no_page_promises_a_time_of_a_host() -> None:
    """The same command takes three times as long elsewhere: processor time is about the same, wall time is not."""
    for page in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "Makefile",
        ROOT / "docs" / "commands.md",
    ):
        text = page.read_text(encoding="utf-8")
        promises = re.findall(
            r"(?i)(?:in|about|:) (?:\w+|[\d.]+) (?:seconds|minutes?|hours?)(?! of processor time)\b[^\n]*",
            text,
        )
        assert not [
            promise
            for promise in promises
            if re.search(r"make|cores|test|lane|try", promise, re.IGNORECASE)
        ], page.name


def test_start_here_is_a_list_of_files() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text[text.index("## START HERE") : text.index("## Run one test")]
    files = named_paths(section)
    assert len(files) == 10
    assert all((ROOT / file).is_file() for file in files)


def test_every_task_of_contributing_names_a_file_to_open() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text[text.index("| task | open first |") : text.index("### Add a source")]
    rows = [row.split("|")[1:-1] for row in table.strip().splitlines()[2:]]
    assert len(rows) >= 10
    for task, first_file, next_files in rows:
        assert named_paths(first_file) or "search" in first_file, task
        assert named_paths(next_files), task
    for steps in (
        "Run one test",
        "Add a source",
        "Add a decoder",
        "Add an order kind",
        "Add a command",
    ):
        assert re.search(rf"^##+ {steps}$", text, re.MULTILINE), steps


def test_the_table_of_a_batch_on_the_loaders_page_is_made_of_its_type() -> None:
    page = (ROOT / "docs" / "loader.md").read_text(encoding="utf-8")
    rows = [f"| `{name}` {form} | {meaning} |" for name, (form, meaning) in batch_entries().items()]
    table = "\n".join(("| name, shape, dtype | meaning |", "|---|---|", *rows))
    assert table in page, f"replace the table of docs/loader.md by\n{table}"


def test_the_site_makes_each_table_that_a_page_leaves_to_it() -> None:
    hook = (ROOT / "docs" / "assets" / "site.py").read_text(encoding="utf-8")
    tables = hook[hook.index("def made_tables") : hook.index("def resume_tables")]
    left_out = [
        name
        for page in [*PAGES, ROOT / "bench" / "RESULTS.md"]
        for name in re.findall(r"^<!-- made: (\w+) -->$", page.read_text("utf-8"), re.MULTILINE)
    ]
    assert sorted(left_out) == re.findall(r'^ {8}"(\w+)": ', tables, re.MULTILINE)


def test_every_function_is_named_by_the_help_of_its_command_or_on_the_page() -> None:
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    named = " ".join(entry.python for entry in command_line._COMMANDS.values())
    said = {*re.findall(r"\b(\w+)\b", named), *re.findall(r"`(?:fr|bench)\.(\w+)`", page)}
    functions = {
        name
        for package in (fr, bench)
        for name in dir(package)
        if isinstance(getattr(package, name), FunctionType) and not name.startswith("__")
    }
    assert functions - said == {"open"}


@pytest.mark.parametrize("word", command_line._COMMANDS)
def test_what_a_help_calls_a_function_is_one(word) -> None:
    """Those of one package stand together: ``fuelrail.bench.replay, seen``."""
    names = re.sub(r" \([^)]*\)", "", command_line._COMMANDS[word].python).split(", ")
    for name in filter(None, names):
        package = bench if names[0].startswith("fuelrail.bench.") else fr
        assert callable(getattr(package, name.rpartition(".")[2])), name
