"""Pages as programs: their blocks of code, run as a reader would run them, in a folder with a small dataset.

* ```` ```python ```` runs in one namespace for the page.
* ```` ```python title="NAME" ```` (or any language with a title) is written to the file NAME.
* ```` ```sh ```` runs line by line. ``fuelrail`` runs in this process, ``python FILE`` too. What would change the
  environment or needs more ranks is checked instead: ``pip install`` by the names of its extras.
* A bucket of the page is this folder, and ``device="cuda"`` is left out where there is no GPU (``SUBSTITUTES``).
* ```` ```text ```` and fences without a language are not programs: commands for a cluster, a bucket, another machine.
"""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fuelrail.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)(?: +title=\"(?P<title>[^\"]+)\")?[^\n]*\n(?P<code>.*?)^ *```",
    re.MULTILINE | re.DOTALL,
)
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "optional-dependencies"
]
CHECKED_ONLY = ("eval", "torchrun")
SUBSTITUTES = {"s3://bucket/": "", '"/local/cache"': '"cache"'}
if not torch.cuda.is_available():
    SUBSTITUTES['device="cuda"'] = "device=None"


class Block(NamedTuple):
    """One fenced block; ``heading`` is the last heading before it, ``line`` the first line of its code."""

    language: str
    title: str | None
    code: str
    heading: str
    line: int


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page, top to bottom."""
    text = page.read_text(encoding="utf-8")
    blocks = []
    for match in FENCE.finditer(text):
        outside = re.sub(
            r"^ *```.*?^ *```",
            "",
            text[: match.start()],
            flags=re.MULTILINE | re.DOTALL,
        )
        headings = re.findall(r"^#+ (.+)$", outside, re.MULTILINE)
        indent = len(match["indent"])
        code = "".join(
            line[indent:] if line.strip() else line
            for line in match["code"].splitlines(keepends=True)
        )
        line = text[: match.start("code")].count("\n") + 1
        blocks.append(
            Block(
                language=match["language"],
                title=match["title"],
                code=code,
                heading=headings[-1] if headings else "",
                line=line,
            )
        )
    return blocks


def follow(page: Path, *headings: str, own_names: dict[str, Any] | None = None) -> dict[str, Any]:
    """Run the blocks of a page in the current folder, all or those below some headings; return the namespace.

    ``own_names`` are names that the page leaves to its reader, such as a model.
    """
    blocks = blocks_of(page)
    page_headings = {block.heading for block in blocks}
    assert set(headings) <= page_headings, (
        f"{page.name} has no code below {set(headings) - page_headings}; it has {page_headings}"
    )
    namespace: dict[str, Any] = {"__name__": "page", **(own_names or {})}
    for block in blocks:
        if not headings or block.heading in headings:
            run(block, namespace, page.name)
    return namespace


def run(block: Block, namespace: dict[str, Any], page: str) -> None:
    """Run one block."""
    if block.title is not None:
        Path(block.title).write_text(block.code, encoding="utf-8")
    elif block.language == "python":
        code = "\n" * (block.line - 1) + block.code
        for text, replacement in SUBSTITUTES.items():
            code = code.replace(text, replacement)
        exec(compile(code, page, "exec"), namespace)
    elif block.language == "sh":
        for line in block.code.replace("\\\n", " ").splitlines():
            run_command(line.partition("  #")[0].strip())


def run_command(line: str) -> None:
    """Run one line of a shell block."""
    words = shlex.split(line, comments=True)
    if not words or words[0] in CHECKED_ONLY:
        return
    if words[:2] == ["pip", "install"]:
        extras = re.findall(r"\[([\w,-]+)\]", line)
        assert set(",".join(extras).split(",")) - {""} <= EXTRAS.keys(), line
    elif words[0] == "fuelrail":
        assert main(words[1:]) == 0, line
    elif words[0] == "python":
        sys.path.insert(0, str(Path.cwd()))
        try:
            runpy.run_path(words[1], run_name="__main__")
        finally:
            sys.path.remove(str(Path.cwd()))
    else:
        subprocess.run(line, shell=True, check=True, executable="/bin/bash")
